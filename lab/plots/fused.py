"""The fused SSD by hand: decays as row × column, roles over time, the walk of shares."""

import numpy as np

from lab.plots.style import BLACK, BLUE, COLOURS, GREEN, ORANGE, PURPLE, RED, figure, finish, rectangle

WAITS = "#E4E4E4"
BLOCK, STRIP, APART = 16, 4, 3  # tokens of a block; how wide a strip of factors is drawn, and how far from the matrix


def decay_factors(log2):
    """The decays of a chunk from log2 of each token's own, as fused.cu makes them: (whole, row, column, between).

    whole    (n, n): from token j to token i
    row      (n,): from the start of token i's block of 16 to i, inclusive
    column   (n,): from token j to the end of its block
    between  (blocks, blocks): over the blocks that lie between those of i and of j
    """
    log2 = np.asarray(log2, np.float64)
    blocks, n = log2.reshape(-1, BLOCK), len(log2)
    inside, total, sums = blocks.cumsum(1), blocks.sum(1), log2.cumsum()
    whole = np.where(np.tril(np.ones((n, n))) > 0, np.exp2(np.minimum(sums[:, None] - sums[None, :], 0)), np.nan)
    count = len(blocks)
    between = [[total[j + 1 : i].sum() if j < i else np.nan for j in range(count)] for i in range(count)]
    return whole, np.exp2(inside).ravel(), np.exp2(total[:, None] - inside).ravel(), np.exp2(between)


def block_decays(log2, at=(53, 21)):
    """Decays of a chunk, and the factors of those below the diagonal. log2: of each token; at: the marked (i, j)."""
    whole, row, column, between = decay_factors(log2)
    n, (i, j) = len(row), at
    picture, axis = figure(8, 5.6)
    look = {"cmap": "viridis", "vmin": 0, "vmax": 1, "interpolation": "nearest", "aspect": "equal"}
    shown = axis.imshow(whole, extent=(0, n, n, 0), **look)
    axis.imshow(row[:, None], extent=(-APART - STRIP, -APART, n, 0), **look)
    axis.imshow(column[None, :], extent=(0, n, -APART, -APART - STRIP), **look)
    for b in range(n // BLOCK):
        axis.add_patch(rectangle(BLOCK * b, BLOCK * b, BLOCK, BLOCK, "none", 0.5))
        axis.patches[-1].set(edgecolor=ORANGE, linewidth=2.2)
        for k in range(b):
            axis.add_patch(rectangle(BLOCK * k, BLOCK * b, BLOCK, BLOCK, "none", 0.5))
            axis.patches[-1].set(edgecolor="white", linewidth=1)
    for x, y in ((-APART - STRIP / 2, i + 0.5), (j + 0.5, -APART - STRIP / 2), (j + 0.5, i + 0.5)):
        axis.plot(x, y, "s", markersize=7, markerfacecolor="none", markeredgecolor=RED, markeredgewidth=1.8)
    axis.plot((-APART, j), (i + 0.5, i + 0.5), color=RED, linewidth=0.9, linestyle=":")
    axis.plot((j + 0.5, j + 0.5), (-APART, i), color=RED, linewidth=0.9, linestyle=":")
    parts = row[i], between[i // BLOCK, j // BLOCK], column[j]
    axis.text(n + 1, -APART - STRIP / 2, "to the end of j's block", va="center", fontsize=9)
    axis.text(-APART, -1, "from the start\nof i's block", ha="right", va="bottom", fontsize=9)
    said = f"i = {i}, j = {j}:\n{parts[0]:.2f} · {parts[1]:.2f} · {parts[2]:.2f} = {whole[i, j]:.3f}"
    axis.text(0.62 * n, 0.1 * n, said, fontsize=9, color=RED)
    axis.text(0.62 * n, 0.22 * n, "orange: an exponential\nfor each pair of tokens", fontsize=9)
    axis.set(xlim=(-APART - STRIP - 1, n + 1), ylim=(n + 1, -APART - STRIP - 1))
    axis.set_xticks(range(0, n + 1, BLOCK))
    axis.set_yticks(range(0, n + 1, BLOCK))
    axis.set_xlabel("token j, which is read")
    axis.set_ylabel("token i, which is written")
    for side in axis.spines.values():
        side.set_visible(False)
    picture.colorbar(shown, ax=axis, shrink=0.7, label="decay (1: nothing is forgotten)")
    return finish(picture)


ROLES = {  # a role of fused.cu: its colour
    "bring_tiles": ORANGE, "make_decays": PURPLE, "make_scores": GREEN, "multiply": BLUE, "store_tiles": RED,
}  # fmt: skip
LOADS, TAKES = 3.0, {"make_decays": 1.0, "make_scores": 2.0, "state": 1.0, "y": 2.0, "pass 1": 1.2, "store_tiles": 1.0}


def role_steps(places=3, steps=6, pass_1=0):
    """Who works on which step from when to when, by the waits of fused.cu: [(role, step, asks, begins, ends)].

    places  of a step in shared memory;  pass_1  how many of the steps, the first, are of pass 1. Lengths are made up
    """
    found, idle, free, scores_read = [], {}, [], []

    def work(role, step, length, *after):
        asks = idle.get(role, 0.0)
        begins = max(asks, *after)
        idle[role] = begins + length
        found.append((role, step, asks, begins, idle[role]))
        return idle[role]

    for step in range(steps):
        place = free[step - places] if step >= places else 0.0  # ring.empty
        tiles, decays = (work("bring_tiles", step, LOADS, place), work("make_decays", step, 1.0, place))
        full = max(tiles, decays)  # ring.full
        if step < pass_1:
            free.append(work("multiply", step, TAKES["pass 1"], full))
            continue
        room = scores_read[-2] if len(scores_read) > 1 else 0.0  # scores_ring.empty: two places
        scores = work("make_scores", step, TAKES["make_scores"], full, room)
        work("multiply", step, TAKES["state"], full)
        y = work("multiply", step, TAKES["y"], scores)  # scores_ring.full
        scores_read.append(y)
        free.append(work("store_tiles", step, TAKES["store_tiles"], y))  # y_full
    return found


def role_picture(places=3, steps=6, pass_1=0):
    """The roles of a block over time. Lengths are made up, and waits follow from the kernel."""
    found = role_steps(places, steps, pass_1)
    picture, axis = figure(9, 2.5)
    names = list(ROLES)
    for role, step, asks, begins, ends in found:
        at = names.index(role)
        if begins > asks:
            axis.add_patch(rectangle(asks, at + 0.12, begins - asks, 0.76, WAITS, 0.3))
        axis.add_patch(rectangle(begins, at + 0.12, ends - begins, 0.76, ROLES[role], 0.5))
        axis.patches[-1].set(alpha=0.35 + 0.45 * (step % 2), hatch="///" if step < pass_1 else None)
        axis.text((begins + ends) / 2, at + 0.5, step, ha="center", va="center", fontsize=8.5)
    axis.set_yticks([n + 0.5 for n in range(len(names))], names, fontsize=9)
    end = max(8 * steps + 0.5, max(ends for *_, ends in found) + 0.5)
    axis.set(xlim=(0, end), ylim=(len(names) + 0.05, -0.05), xticks=[])
    hatched = "; hatched: pass 1" if pass_1 else ""
    axis.set_xlabel(f"time, in made-up units; a number is a step; grey: waits{hatched}", fontsize=9)
    axis.set_title(f"places for steps: {places}", loc="left", fontsize=10.5)
    axis.tick_params(length=0)
    axis.spines["left"].set_visible(False)
    return finish(picture)


def share_steps(shares, chunks, pass_1=0.4):
    """The walk of all shares, each a block's: [(share, what, (pair, first, last), begins, ends)].

    shares  the pieces of each: [(pair, first chunk, last chunk + 1), ...];  chunks  of a pair
    what    "pass 1", a piece walked backwards for its end state; "wait", for that of others; "pass 2"
    pass_1  what a chunk of pass 1 costs, if one of pass 2 costs 1
    """
    found, published, now = [], {}, {}
    for share, pieces in enumerate(shares):
        now[share] = 0.0
        if pieces and pieces[-1][2] < chunks:  # another share goes on from here
            pair, first, last = pieces[-1]
            now[share] = published[pair, first] = pass_1 * (last - first)
            found.append((share, "pass 1", pieces[-1], 0.0, now[share]))
    for share, pieces in enumerate(shares):
        for pair, first, last in reversed(pieces):
            needed = [time for (p, begins), time in published.items() if p == pair and begins < first]
            begins = max([now[share], *needed])
            if begins > now[share]:
                found.append((share, "wait", (pair, first, last), now[share], begins))
            now[share] = begins + last - first
            found.append((share, "pass 2", (pair, first, last), begins, now[share]))
    return found


def share_walk(shares, chunks, pass_1=0.4):
    """The line of all chunks, cut into shares, and what the block of each share does over time. As share_steps."""
    pairs = 1 + max(pair for pieces in shares for pair, _, _ in pieces)
    steps = share_steps(shares, chunks, pass_1)
    picture, (line, walk) = figure(9, 1.6 + 0.34 * (pairs + len(shares)), rows=2)
    for share, pieces in enumerate(shares):
        for pair, first, last in pieces:
            goes_on = last < chunks and (pair, first, last) == pieces[-1]
            _piece(line, first, pair, last - first, pair, goes_on, f"share {share}")
    for share, what, (pair, first, last), begins, ends in steps:
        if what == "wait":
            walk.add_patch(rectangle(begins, share + 0.1, ends - begins, 0.8, WAITS, 0.3))
            continue
        arrow = f"{last - 1}…{first}" if what == "pass 1" else f"{first}…{last - 1}"
        _piece(walk, begins, share, ends - begins, pair, what == "pass 1", arrow)
    end = max(ends for *_, ends in steps)
    line.set(xlim=(0, chunks), ylim=(pairs, 0))
    line.set_yticks([n + 0.5 for n in range(pairs)], [f"pair {n}" for n in range(pairs)], fontsize=9)
    line.set_xlabel("chunk of the pair (hatched: walked twice)", fontsize=9)
    walk.set(xlim=(0, end), ylim=(len(shares), 0))
    walk.set_yticks([n + 0.5 for n in range(len(shares))], [f"share {n}" for n in range(len(shares))], fontsize=9)
    said = "time, in chunks of pass 2 (hatched: pass 1, backwards; in a box: its chunks; grey: waits)"
    walk.set_xlabel(said, fontsize=9)
    for axis in (line, walk):
        axis.tick_params(axis="y", length=0)
        axis.spines["left"].set_visible(False)
    return finish(picture)


def _piece(axis, x, y, width, pair, hatched, said):
    axis.add_patch(rectangle(x, y + 0.1, width, 0.8, COLOURS[pair % len(COLOURS)], 0.6))
    axis.patches[-1].set(alpha=0.55, hatch="////" if hatched else None, edgecolor="white")
    if width >= 0.9:
        small = 6.5 if width < 1.6 else 8.5
        axis.text(x + width / 2, y + 0.5, said, ha="center", va="center", fontsize=small, color=BLACK, clip_on=True)
