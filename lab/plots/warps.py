"""Warps at work: what lanes hand each other, how warps meet in shared memory, in which order they execute."""

import numpy as np

from lab.plots.style import BLUE, GREEN, ORANGE, RED, SKY, figure, finish, rectangle


def shuffle_reduction(values, mode="bfly", steps=5):
    """A sum over the 32 lanes by shuffles, step by step: a row for the warp before and after each step.

    Dark lanes hold the sum of more lanes; green ones that of all 32; grey ones have counted some lane twice.
    values  32 numbers;  mode  "bfly" (__shfl_xor_sync) or "down" (__shfl_down_sync);  steps  how many to draw, 0 to 5
    """
    from simt import shuffle

    picture, axis = figure(8, 0.75 + 0.62 * (steps + 1))
    held, counts = np.array(values), np.eye(32, dtype=int)  # counts[lane, k]: how often lane k is in its sum
    shades = ["#F2F2F2", "#DCEBF6", "#B7D6ED", "#8FC0E3", "#63A8D8"]
    for step in range(steps + 1):
        if step:
            far = 32 >> step
            operand, clamp = np.array([far], np.uint32), np.array([31], np.uint32)
            source, _ = shuffle(mode, np.arange(32), operand, clamp)  # the lane that each lane hears from
            for lane, other in enumerate(source.tolist()):
                axis.plot((other, lane), (step - 1 + 0.32, step - 0.32), color="#999999", linewidth=0.7, zorder=0)
            held, counts = held + held[source], counts + counts[source]
        for lane in range(32):
            whole, twice = counts[lane].min() > 0, counts[lane].max() > 1
            colour = "#D9D9D9" if twice else "#8FD3BF" if whole else shades[step]
            axis.add_patch(rectangle(lane - 0.46, step - 0.3, 0.92, 0.6, colour))
            axis.text(lane, step, f"{held[lane]:g}", ha="center", va="center", fontsize=7)
    call = {"bfly": "xor", "down": "down"}[mode]
    axis.set_yticks(range(steps + 1), ["before", *(f"{call} {32 >> s}" for s in range(1, steps + 1))])
    axis.set_xticks(range(0, 32, 4), [f"lane {n}" if n == 0 else n for n in range(0, 32, 4)])
    axis.tick_params(length=0)
    axis.set(xlim=(-0.6, 31.6), ylim=(steps + 0.4, -0.4))
    done = int((counts == 1).all(1).sum())
    said = f"{done} of 32 lanes hold the sum of all" if done else f"sums of {1 << steps} lanes"
    axis.set_title(f"__shfl_{call}_sync, {steps} of 5 steps: {said}", loc="left", fontsize=11)
    for side in axis.spines.values():
        side.set_visible(False)
    return finish(picture)


def block_transpose(warps=32):
    """Results that lie one in each warp cross shared memory and come out one in each lane of the first warp."""
    picture, axis = figure(8, 4.6)
    side, top = 32 / warps, 0
    for warp in range(warps):
        for lane in range(32):
            axis.add_patch(rectangle(lane * 0.9, top + warp * side, 0.9, side, BLUE if lane == 0 else "#F2F2F2", 0.3))
        axis.add_patch(rectangle(36, top + warp * side, 3, side, ORANGE))
    axis.annotate("", (35.6, 16), (29.4, 16), arrowprops={"arrowstyle": "->", "color": BLUE, "linewidth": 1.5})
    axis.text(32.5, 14.8, "lane 0\nof each", ha="center", va="bottom", fontsize=9)
    axis.text(0, -1.6, f"{warps} warps, 32 lanes each", fontsize=10)
    axis.text(37.5, -1.6, "sums[ ], shared", fontsize=10, ha="center")
    axis.annotate("", (46, 16), (39.4, 16), arrowprops={"arrowstyle": "->", "color": ORANGE, "linewidth": 1.5})
    axis.text(42.7, 14.8, "barrier,\nthen read", ha="center", va="bottom", fontsize=9)
    for lane in range(warps):
        axis.add_patch(rectangle(46.5 + 1.15 * lane, 14.5, 1.15, 3, SKY))
    wide = 1.15 * warps
    axis.text(46.5, 12.9, f"warp 0: lanes 0 to {warps - 1}", fontsize=10)
    sectors = max(1, warps // 8)
    for n in range(sectors):
        axis.add_patch(rectangle(46.5 + n * wide / sectors, 21.5, wide / sectors, 3, "#FFE7B3"))
    for lane in range(warps):
        at = 46.5 + 1.15 * (lane + 0.5)
        axis.plot((at, at), (17.7, 21.3), color="#999999", linewidth=0.8)
    axis.text(46.5, 27.3, f"y: {sectors} sector{'s' * (sectors > 1)}, one request", fontsize=10)
    axis.set(xlim=(-1, 85), ylim=(33, -3.5))
    axis.axis("off")
    return finish(picture)


def mma_diagonals(mine=3):
    """One `mma` for a single vector: rows of W in A, x in the columns of B, and the two diagonals of D that are wanted.

    mine  of the eight groups of four lanes, the one to show: its row of A, the one eight further down, its column of B
    """
    picture, axis = figure(9, 3.6)
    nothing, strong, pale = "#F2F2F2", {0: BLUE, 8: ORANGE}, {0: "#BBDDF2", 8: "#F5CF87"}
    for row in range(16):
        below = row // 8 * 8  # 8 for the rows that hold "the row below"
        for column in range(16):
            axis.add_patch(rectangle(column, row, 1, 1, strong[below] if row % 8 == mine else nothing, 0.5))
        for column in range(8):
            wanted = strong[below] if column == mine else pale[below]
            axis.add_patch(rectangle(19.5 + column, row, 1, 1, GREEN if column == mine else nothing, 0.5))
            axis.add_patch(rectangle(31 + column, row, 1, 1, wanted if row % 8 == column else nothing, 0.5))
    for title, middle in (("A: weights", 8), ("B: x", 23.5), ("D = A · B", 35)):
        axis.text(middle, -0.5, title, ha="center", va="bottom", fontsize=10)
    for sign, middle in (("·", 17.75), ("=", 29.25)):
        axis.text(middle, 8, sign, ha="center", va="center", fontsize=16)
    centred = {"ha": "center", "va": "center", "fontsize": 7.5}
    for lane in range(4):
        said = f"lane {4 * mine + lane}"
        axis.text(4 * lane + 2, mine + 0.5, said, color="white", **centred)
        axis.text(4 * lane + 2, mine + 8.5, said, **centred)
        axis.text(19.5 + mine + 0.5, 4 * lane + 2, said, color="white", rotation=90, **centred)
    for row, said in ((mine, "of a row of W"), (mine + 8, "of the row below")):
        axis.text(-0.4, row + 0.5, said, ha="right", va="center", fontsize=8.5)
        axis.text(39.4, row + 0.5, f"D[{row}, {mine}]", va="center", fontsize=8.5)
    axis.set(xlim=(-6.6, 43), ylim=(16.3, -2), aspect="equal")
    axis.axis("off")
    return finish(picture)


INSTRUCTIONS = {  # what a strip of machine code shows, with its colour: loads dark, arithmetic light
    "2": ("load of 2 bytes", ORANGE),
    "4": ("load of 4 bytes", BLUE),
    "8": ("load of 8 bytes", GREEN),
    "16": ("load of 16 bytes", RED),
    "c": ("conversion", "#CFCFCF"),
    "f": ("multiply–add", "#F5E6A8"),
}


def instruction_order(rows):
    """Loads and arithmetic of a loop in the order of the machine code, a box each, from left to right.

    rows  {title: [keys of INSTRUCTIONS, ...]}
    """
    from matplotlib.patches import Patch

    longest = max(map(len, rows.values()))
    picture, axis = figure(8, 0.85 + 0.5 * len(rows))
    for at, order in enumerate(rows.values()):
        for place, name in enumerate(order):
            axis.add_patch(rectangle(place, at + 0.42, 1, 0.5, INSTRUCTIONS[name][1], 0.3))
    for at, title in enumerate(rows):
        axis.text(0, at + 0.34, title, fontsize=9.5, va="bottom")
    used = [name for name in INSTRUCTIONS if any(name in order for order in rows.values())]
    keys = [Patch(facecolor=INSTRUCTIONS[name][1], edgecolor="#999999", label=INSTRUCTIONS[name][0]) for name in used]
    axis.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=6, frameon=False, fontsize=9)
    axis.set(xlim=(-0.5, longest + 0.5), ylim=(len(rows), -0.1))
    axis.axis("off")
    return finish(picture)
