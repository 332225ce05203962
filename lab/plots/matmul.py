"""A matmul on tensor cores: its tiles, banks, the phases of mbarriers, warps with roles, the order of tiles."""

import numpy as np

from lab.plots.style import BLUE, GREEN, ORANGE, RED, SKY, figure, finish, rectangle

PALE = ["#BBDDF2", "#F5CF87"]  # phases of even and odd number; the first and the second round of tiles
WAITS, NOTHING, GREENISH = "#E4E4E4", "#F7F7F7", "#A9DFCB"


def tile_levels():
    """What a block has of the matrices, and what one step along k brings: 128 × 256 sums, 64 numbers of k at a time."""
    picture, (whole, step) = figure(9, 4.4, columns=2)
    for x, y, width, height in ((0, 6, 5, 8), (6, 0, 8, 5), (6, 6, 8, 8)):
        whole.add_patch(rectangle(x, y, width, height, NOTHING))
    for x, y, width, height, colour in ((0, 9, 5, 1, "#E8F2FA"), (10, 0, 2, 5, "#FBEBC8"), (10, 9, 2, 1, GREENISH)):
        whole.add_patch(rectangle(x, y, width, height, colour))
    whole.add_patch(rectangle(1.5, 9, 0.7, 1, PALE[0]))
    whole.add_patch(rectangle(10, 1.5, 2, 0.7, PALE[1]))
    for x, y, said in ((2.5, 13, "x (m, k)"), (7.6, 0.8, "Wᵀ (k, n)"), (7.4, 13, "y (m, n)"), (11, 10.5, "a tile")):
        whole.text(x, y, said, ha="center", va="center", fontsize=9.5)
    whole.text(2.5, 8.6, "128 rows of x", ha="center", fontsize=8.5)
    whole.text(1.85, 10.6, "a step", ha="center", fontsize=8.5)
    whole.text(9.8, 4.4, "256 rows of W", ha="right", fontsize=8.5)
    whole.text(9.8, 2.05, "a step", ha="right", fontsize=8.5)
    whole.set(xlim=(-0.3, 15.2), ylim=(14.3, -0.5), aspect="equal")
    whole.set_title("a block: a tile of y, and along k", loc="left", fontsize=10.5)
    for part in range(2):  # 64 rows of a consumer
        step.add_patch(rectangle(0, 3.2 + 2 * part, 1.6, 1.9, PALE[0]))
        step.add_patch(rectangle(0.4, 3.2 + 2 * part, 0.4, 1.9, BLUE))
        step.add_patch(rectangle(2.2, 3.2 + 2 * part, 6, 1.9, GREENISH))
        said = f"warpgroup {part}: 64 × 256 sums,\n128 registers of a thread"
        step.text(5.2, 4.15 + 2 * part, said, ha="center", va="center", fontsize=8.5)
    step.add_patch(rectangle(2.2, 0.6, 6, 2, PALE[1]))
    step.add_patch(rectangle(2.2, 1.1, 6, 0.5, ORANGE))
    step.text(5.2, 0.35, "256 rows of W, 64 numbers of k", ha="center", fontsize=8.5)
    step.text(5.2, 1.35, "16 numbers of k: one instruction", ha="center", va="center", fontsize=8)
    step.text(0.8, 7.35, "128 rows of x", ha="center", va="top", fontsize=8.5)
    step.set(xlim=(-0.4, 8.6), ylim=(8, -0.4))
    step.set_title("one step: 48 KB in shared memory", loc="left", fontsize=10.5)
    for axis in (whole, step):
        axis.axis("off")
    return finish(picture)


def column_banks(places, column=2):
    """Eight rows of 128 bytes in shared memory, and in which banks the same word of each row lies.

    places  {title: function of (row, word) that gives the word's place in the row, 0 to 7}
    """
    picture, axes = figure(9, 3.1, columns=len(places))
    for axis, (title, place) in zip(np.atleast_1d(axes), places.items()):
        found = [place(row, column) for row in range(8)]
        for row in range(8):
            for word in range(8):
                axis.add_patch(rectangle(place(row, word), row, 1, 1, ORANGE if word == column else NOTHING, 0.6))
                axis.text(place(row, word) + 0.5, row + 0.5, word, ha="center", va="center", fontsize=8.5)
        turns = max(map(found.count, found))
        axis.set_title(f"{title}: {turns} turn{'s' * (turns > 1)}", loc="left", fontsize=10.5)
        axis.set(xlim=(-0.1, 8.1), ylim=(8.1, -0.1))
        axis.set_xticks([n + 0.5 for n in range(8)], [f"{4 * n}–{4 * n + 3}" for n in range(8)], fontsize=8)
        axis.set_yticks([n + 0.5 for n in range(8)], [f"row {n}" for n in range(8)], fontsize=8)
        axis.set_xlabel("banks", fontsize=9)
        axis.tick_params(length=0)
        for side in axis.spines.values():
            side.set_visible(False)
    return finish(picture)


def ring_schedule(rows, stages, fill, read):
    """When a filler and a reader have each row: [(who, row, asks, begins, ends)], by the waits of a ring of slots."""
    found, filled, read_by = [], 0.0, []
    ready = 0.0  # when the reader asks for its next row
    for row in range(rows):
        begins = max(filled, read_by[row - stages] if row >= stages else 0.0)
        found.append(("filler", row, filled, begins, begins + fill))
        filled = begins + fill
        begins = max(ready, filled)
        found.append(("reader", row, ready, begins, begins + read))
        ready = begins + read
        read_by.append(ready)
    return found


def ring_phases(rows=6, stages=2, fill=2.0, read=3.0):
    """A filler and a reader over time, and in which phase the mbarriers of each slot are. Lengths are made up."""
    steps = ring_schedule(rows, stages, fill, read)
    end = max(step[-1] for step in steps) + 0.6
    picture, axis = figure(9, 1.7 + 0.62 * stages)
    names = ["filler", "reader"]
    for who, row, asks, begins, ends in steps:
        at, around = names.index(who), row // stages
        if begins > asks:
            axis.add_patch(rectangle(asks, at + 0.1, begins - asks, 0.8, WAITS, 0.5))
        axis.add_patch(rectangle(begins, at + 0.1, ends - begins, 0.8, SKY if who == "filler" else GREENISH, 0.5))
        parity = around % 2 ^ (who == "filler")
        said = f"row {row}, slot {row % stages}\nasked for {parity}"
        axis.text((begins + ends) / 2, at + 0.5, said, ha="center", va="center", fontsize=7)
    for slot in range(stages):
        for which, who in (("full", "filler"), ("empty", "reader")):
            at = len(names)
            names.append(f"{which}[{slot}]")
            over = [ends for name, row, _, _, ends in steps if name == who and row % stages == slot]
            for phase, (begins, ends) in enumerate(zip([0.0, *over], [*over, end])):
                axis.add_patch(rectangle(begins, at + 0.18, ends - begins, 0.64, PALE[phase % 2], 0.5))
                said = f"phase {phase}" if ends - begins > 1.5 else phase
                axis.text((begins + ends) / 2, at + 0.5, said, ha="center", va="center", fontsize=7.5)
    axis.set_yticks([n + 0.5 for n in range(len(names))], names, fontsize=9)
    axis.set(xlim=(0, end), ylim=(len(names) + 0.1, -0.1), xticks=[])
    axis.set_xlabel("time, in made-up units; grey: waits; blue: a phase of parity 0, yellow: of parity 1", fontsize=9)
    axis.tick_params(length=0)
    axis.spines["left"].set_visible(False)
    return finish(picture)


LATENCY, APART, ASK, PRODUCTS, ROUND, STORE = 4.0, 1.0, 0.35, 2.0, 1.4, 3.6  # how long things are drawn
ROLES = {"ask": ORANGE, "copy": "#FBEBC8", "products": BLUE, "round": GREEN, "store": RED}


def role_schedule(tiles, steps, stages, persistent):
    """Who works when, by the waits of the kernel: [(role, what, begins, ends, step)]. Two consumers do the same."""
    found, freed, asks, landed, consumer = [], [], 0.0, 0.0, 0.0
    for tile in range(tiles):
        for step in range(steps):
            if step >= stages or persistent and len(freed) >= stages:
                asks = max(asks, freed[-stages])
            landed = max(asks + LATENCY, landed + APART)
            found += [("producer", "ask", asks, asks + ASK, step), ("TMA, loads", "copy", landed - APART, landed, step)]
            asks += ASK
            begins = max(consumer, landed)
            consumer = begins + PRODUCTS
            freed.append(consumer)
            found += [(f"consumer {n}", "products", begins, consumer, step) for n in range(2)]
        if persistent:
            found.append(("TMA, stores", "store", consumer + ROUND / 2, consumer + ROUND / 2 + STORE, tile))
            found += [(f"consumer {n}", "round", consumer, consumer + ROUND, tile) for n in range(2)]
            consumer += ROUND
        else:
            found += [(f"consumer {n}", "store", consumer, consumer + STORE, tile) for n in range(2)]
            consumer += STORE
            asks = landed = consumer  # the next block begins where this one ends
    return found


def role_timeline(tiles=3, steps=5, stages=4):
    """What warps with roles do over time, where a block has one tile and where it stays. Lengths are made up."""
    from matplotlib.patches import Patch

    both = {"a block for each tile": False, "blocks that stay": True}
    found = {title: role_schedule(tiles, steps, stages, stays) for title, stays in both.items()}
    end = max(step[3] for schedule in found.values() for step in schedule)
    picture, axes = figure(9, 4.6, rows=2)
    for axis, (title, schedule) in zip(axes, found.items()):
        roles = ["producer", "TMA, loads", "consumer 0", "consumer 1", "TMA, stores"]
        for role, what, begins, ends, step in schedule:
            at = roles.index(role)
            axis.add_patch(rectangle(begins, at + 0.12, ends - begins, 0.76, ROLES[what], 0.4))
            if what == "products":
                middle = (begins + ends) / 2
                axis.text(middle, at + 0.5, step, ha="center", va="center", fontsize=7, color="white")
        axis.set_yticks([n + 0.5 for n in range(len(roles))], roles, fontsize=9)
        axis.set(xlim=(0, end + 0.3), ylim=(len(roles) + 0.05, -0.05), xticks=[])
        axis.set_title(title, loc="left", fontsize=10.5)
        axis.tick_params(length=0)
        axis.spines["left"].set_visible(False)
    axes[1].set_xlabel("time, in made-up units; a number is a step along k", fontsize=9)
    names = ("asks for a step", "its bytes come", "products", "rounds the sums", "stores them")
    keys = [Patch(facecolor=colour, edgecolor="#999999", label=name) for colour, name in zip(ROLES.values(), names)]
    picture.legend(handles=keys, loc="outside lower center", ncols=5, fontsize=8.5, frameon=False)
    return finish(picture)


def tile_raster(orders, at_a_time):
    """In which order tiles are taken: a grid for each order, with its first two rounds, and which strips the first
    round reads.

    orders     {title: [(row, column), ...]}
    at_a_time  tiles of a round
    """
    picture, axes = figure(9, 4.3, columns=len(orders))
    for axis, (title, order) in zip(np.atleast_1d(axes), orders.items()):
        for number, (row, column) in enumerate(order):
            turn = number // at_a_time
            axis.add_patch(rectangle(column, row, 1, 1, PALE[turn] if turn < 2 else NOTHING, 0.6))
            axis.text(column + 0.5, row + 0.5, number, ha="center", va="center", fontsize=7)
        rows, columns = (len(set(of)) for of in zip(*order[:at_a_time]))
        axis.set_title(f"{title}\nfirst round: {rows} strips of x, {columns} of W", loc="left", fontsize=10.5)
        last = [max(of) + 1 for of in zip(*order)]
        axis.set(xlim=(-0.1, last[1] + 0.1), ylim=(last[0] + 0.1, -0.1), aspect="equal")
        axis.axis("off")
    return finish(picture)
