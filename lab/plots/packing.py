"""Packed operands of a matrix product: the order in a panel, and which part of a matrix lies in which cache."""

import numpy as np

from lab.plots.style import BLUE, GREEN, ORANGE, RED, SKY, figure, finish, rectangle


def packing_order(rows=6, columns=8, height=3, width=4):
    """Where each number of A and of B lies once both are packed: A in panels of `height` rows, B in panels of `width`
    columns. Both walk along p. A is (rows, columns), B (columns, 2 · width)."""
    picture, axes = figure(9, 4.4, columns=2)
    (i, p), (q, j) = np.indices((rows, columns)), np.indices((columns, 2 * width))
    places_a = i // height * height * columns + p * height + i % height
    places_b = j // width * width * columns + q * width + j % width
    facts = (("A", "p", "i", places_a, i // height), ("B", "j", "p", places_b, j // width))
    for axis, (name, along, down, places, panel) in zip(axes, facts, strict=True):
        for (y, x), place in np.ndenumerate(places):
            axis.add_patch(rectangle(x - 0.5, y - 0.5, 1, 1, ("#FFE3B3", "#D6E8F5")[panel[y, x] % 2]))
            axis.text(x, y, str(place), ha="center", va="center", fontsize=8)
        axis.set(xlim=(-0.6, places.shape[1] - 0.4), ylim=(places.shape[0] - 0.4, -0.6), xlabel=along, ylabel=down)
        axis.set(title=f"{name}: each number's place when packed", aspect="equal")
        axis.grid(False)
    return finish(picture)


def cache_blocks(sizes, n, i0=1, p0=1, row=6, column=9):
    """Which part of A, B and C lies where, while the five loops of a packed product compute one block of C.

    sizes        {"MR", "NR", "KC", "MC", "NC"}, in floats: what kernels.cpu_matmul.blocking() gives
    n            the matrices are n × n, drawn to scale
    i0, p0       which group of MC rows, and which KC steps
    row, column  which block of C among those of this group
    """
    mr, nr, kc, mc = (sizes[k] for k in ("MR", "NR", "KC", "MC"))
    nc = min(sizes["NC"], n)
    top, left = i0 * mc, p0 * kc
    parts = {  # matrix: (its axes, [(x, y, width, height, colour, what it is)])
        "A": (1, 0, "p", "i", [
            (left, top, kc, mc, GREEN, f"packed rows of A\nMC × KC = {mc} × {kc}: {_kilobytes(mc * kc)}"),
            (left, top + row * mr, kc, mr, BLUE, f"a panel of A, MR × KC: {_kilobytes(mr * kc)}"),
        ]),
        "B": (0, 1, "j", "p", [
            (0, left, nc, kc, SKY, f"packed columns of B\nKC × NC = {kc} × {nc}: {_kilobytes(kc * nc)}"),
            (column * nr, left, nr, kc, ORANGE, f"a panel of B, KC × NR: {_kilobytes(kc * nr)}"),
        ]),
        "C": (1, 1, "j", "i", [
            (0, top, nc, mc, "#EEEEEE", "rows of C that these\npacked numbers add to"),
            (column * nr, top + row * mr, nr, mr, RED, f"the block, MR × NR: {_kilobytes(mr * nr)}"),
        ]),
    }  # fmt: skip
    where = {GREEN: "L2", SKY: "L3", ORANGE: "L1 or L2", BLUE: "L2, then L1", RED: "registers"}
    picture, axes = figure(9, 8, columns=2, rows=2)
    for name, (down, right, along, side, boxes) in parts.items():
        axis = axes[down][right]
        for x, y, width, height, colour, _ in boxes:
            axis.add_patch(rectangle(x, y, width, height, colour, edge=0.4))
        axis.set(xlim=(0, n), ylim=(n, 0), xlabel=along, ylabel=side, title=name, aspect="equal")
        axis.grid(False)
    handles = [
        (rectangle(0, 0, 1, 1, colour), f"{text}\n→ {where[colour]}" if colour in where else text)
        for *_, boxes in parts.values()
        for *_, colour, text in boxes
    ]
    axes[0][0].legend(*zip(*handles, strict=True), loc="center", frameon=False, fontsize=8, labelspacing=0.9)
    axes[0][0].axis("off")
    return finish(picture)


def _kilobytes(floats):
    return f"{4 * floats / 1024:,.3g} KB" if floats < 1 << 18 else f"{4 * floats / (1 << 20):.2g} MB"
