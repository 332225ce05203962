"""State space models in chunks: the matrix of SSD, its blocks, and the steps of the chunked form."""

import numpy as np

from lab.plots.style import BLACK, BLUE, ORANGE, RED, SKY, figure, finish, rectangle


def token_matrices(matrices):
    """Matrices with a row for each token that is computed and a column for each that is read: dark is large.

    matrices  {title: (n, n)}, magnitudes up to 1; what is above the diagonal is not drawn
    """
    picture, axes = figure(8, 8 / len(matrices) + 0.7, columns=len(matrices))
    for axis, (name, values) in zip(np.atleast_1d(axes), matrices.items()):
        values = np.abs(np.asarray(values, float))
        above = ~np.tri(*values.shape, dtype=bool)
        axis.imshow(np.ma.masked_array(values, above), cmap="Blues", vmin=-0.08, vmax=1)
        axis.set_title(name, loc="left", fontsize=10.5)
        axis.set(xticks=[], yticks=[], xlabel="token j")
        for side in ("top", "right"):
            axis.spines[side].set_visible(True)
    np.atleast_1d(axes)[0].set_ylabel("token i")
    return finish(picture)


DENSE, STATES, GONE = "dense: C Bᵀ under the mask", "through a state", "decayed below 2⁻²⁴"


def chunk_blocks(seqlen, chunk, rate):
    """What becomes of each block of the chunk matrix, by row and column: DENSE, STATES or GONE.

    rate  −A dt of every token, 0 or more. A block is GONE if its largest entry is below 2^-24.
    """
    chunks = -(-seqlen // chunk)
    found = {}
    for row, column in ((r, c) for r in range(chunks) for c in range(r + 1)):
        nearest = row * chunk - (min((column + 1) * chunk, seqlen) - 1)  # from its last token to the row's first
        gone = column < row and rate * nearest > 24 * np.log(2)
        found[row, column] = DENSE if row == column else GONE if gone else STATES
    return found


def chunk_matrix(seqlen=64, chunk=8, rate=0.4):
    """The matrix of SSD cut into chunks: left what is left of token j at token i, right how each block is computed.

    rate  −A dt of every token, 0 or more
    """
    picture, (left, right) = figure(8, 5, columns=2)
    token = np.arange(seqlen)
    worth = np.exp(-rate * np.maximum(token[:, None] - token, 0))
    left.imshow(np.ma.masked_array(worth, token[:, None] < token), cmap="Blues", vmin=-0.08, vmax=1)
    chunks = -(-seqlen // chunk)
    for edge in range(chunk, seqlen, chunk):
        left.axhline(edge - 0.5, color=RED, linewidth=0.7)
        left.axvline(edge - 0.5, color=RED, linewidth=0.7)
    for side in ("top", "right"):
        left.spines[side].set_visible(True)
    left.set_title(f"rate {rate:g}: decay {np.exp(-rate):.3g} a token", loc="left", fontsize=10.5)
    left.set(xticks=[], yticks=[], xlabel="token j", ylabel="token i")

    colours = {DENSE: BLUE, STATES: ORANGE, GONE: "#DDDDDD"}
    blocks = chunk_blocks(seqlen, chunk, rate)
    for (row, column), kind in blocks.items():
        high, wide = (min(chunk, seqlen - at * chunk) for at in (row, column))
        right.add_patch(rectangle(column * chunk, row * chunk, wide, high, colours[kind]))
    for kind, colour in colours.items():
        count = sum(one == kind for one in blocks.values())
        right.add_patch(rectangle(-9, -9, 0, 0, colour))
        right.plot([], [], "s", color=colour, markersize=9, label=f"{kind}: {count} block{'s' if count != 1 else ''}")
    right.set(xlim=(0, seqlen), ylim=(seqlen, 0), xticks=[], yticks=[], aspect="equal")
    right.axis("off")
    right.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(-0.03, 0.0))
    right.set_title(f"{chunks} chunk{'s' if chunks > 1 else ''} of {chunk}", loc="left", fontsize=10.5)
    return finish(picture)


def chunk_steps(chunks=4):
    """The chunked form: what each chunk computes by itself, and the one row of states that goes from left to right."""
    picture, axis = figure(8, 4.2)
    arrow = {"arrowstyle": "-|>", "color": BLACK, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}

    def box(x, y, wide, colour, text):
        axis.add_patch(rectangle(x, y, wide, 0.62, colour))
        axis.text(x + wide / 2, y + 0.31, text, ha="center", va="center", fontsize=10)

    def line(begin, end, **look):
        axis.annotate("", end, begin, arrowprops=arrow | look)

    for k in range(chunks + 1):
        x = 2.4 * k
        box(x, 2.5, 0.7, ORANGE, f"$H_{k}$" if k < chunks else "final")
        if k == chunks:
            break
        box(x, 0, 1.7, "#EEEEEE", f"chunk {k}")
        box(x + 1, 1.25, 0.7, SKY, f"$S_{k}$")
        box(x, 3.75, 1.7, "#EEEEEE", f"y of chunk {k}")
        line((x + 1.35, 0.62), (x + 1.35, 1.25))  # 3
        line((x + 0.85, 0.62), (x + 0.85, 3.75), color=BLUE, linewidth=2)  # 2, and 5 by it
        line((x + 0.35, 3.12), (x + 0.35, 3.75))  # 5, from the state
        line((x + 0.7, 2.81), (x + 2.4, 2.81), color=RED, linewidth=2)  # 4
        line((x + 1.7, 1.75), (x + 2.4, 2.6))
        axis.text(x + 1.62, 2.92, "× decay", ha="center", va="bottom", fontsize=8.5, color=RED)
    rows = {0.31: "tokens", 1.56: "3  what it adds", 2.81: "4  state before", 4.06: "5  outputs"}
    for y, text in rows.items():
        axis.text(-0.3, y, text, ha="right", va="center", fontsize=10)
    axis.text(-0.3, 0.93, "1, 2  decays, C Bᵀ", ha="right", va="center", fontsize=10, color=BLUE)
    axis.set(xlim=(-2.9, 2.4 * chunks + 0.8), ylim=(-0.1, 4.45))
    axis.axis("off")
    return finish(picture)
