"""Numbers in few bits: which values a format has, how codes lie in words, and what shares a scale."""

import numpy as np

from lab.plots.style import BLUE, figure, finish, rectangle


def code_values(rows, low=-1, high=1):
    """Number lines: a tick for every number that a format has a code for, between low and high.

    rows  {title: values}
    """
    picture, axes = figure(8, 0.3 + 0.72 * len(rows), rows=len(rows))
    for axis, (title, values) in zip(np.atleast_1d(axes), rows.items()):
        inside = np.unique(values)
        inside = inside[(inside >= low) & (inside <= high)]
        axis.vlines(inside, 0, 1, color=BLUE, linewidth=1)
        axis.set(xlim=(low - 0.02 * (high - low), high + 0.02 * (high - low)), ylim=(-0.15, 1), yticks=[])
        axis.set_title(f"{title}: {len(inside)} values", loc="left", fontsize=10)
        axis.spines["left"].set_visible(False)
    return finish(picture)


def bit_fields(rows):
    """Words of bits, the highest bit on the left: a row of named fields for each word.

    rows  {title: [(name, bits, colour), ...]}
    """
    picture, axis = figure(8, 0.3 + 0.72 * len(rows))
    for at, (title, fields) in enumerate(rows.items()):
        left, total = 0, sum(bits for _, bits, _ in fields)
        axis.text(0, at + 0.3, title, fontsize=9.5, va="bottom")
        for name, bits, colour in fields:
            axis.add_patch(rectangle(left, at + 0.37, bits, 0.38, colour))
            axis.text(left + bits / 2, at + 0.565, name, ha="center", va="center", fontsize=9 if bits > 1 else 7)
            axis.text(left + bits - 0.5, at + 0.77, total - left - bits, ha="center", va="top", fontsize=6.5)
            left += bits
    axis.set(xlim=(-0.3, max(sum(f[1] for f in fields) for fields in rows.values()) + 0.3), ylim=(len(rows), 0))
    axis.axis("off")
    return finish(picture)


def shared_scales(numbers, groups, title=None):
    """Magnitudes of keys or values as a map, tokens downwards, and frames around the numbers that share a scale.

    numbers  (tokens, channels);  groups  {title: (tokens, channels) of a group}
    """
    picture, axes = figure(8, 3.2, columns=len(groups))
    tokens, channels = np.shape(numbers)
    for axis, (name, (high, wide)) in zip(np.atleast_1d(axes), groups.items()):
        axis.imshow(np.log10(np.abs(numbers) + 1e-2), cmap="Greys", aspect="auto", vmin=-2.2, vmax=2)
        for top in range(0, tokens, high):
            for left in range(0, channels, wide):
                frame = rectangle(
                    left - 0.5, top - 0.5, min(wide, channels - left), min(high, tokens - top), "none", 1.1
                )
                frame.set_edgecolor(BLUE)
                axis.add_patch(frame)
        count = -(-tokens // high) * -(-channels // wide)
        axis.set_title(f"{name}: {count} scales", loc="left", fontsize=10.5)
        axis.set(xticks=[], yticks=[], xlabel="channel")
    np.atleast_1d(axes)[0].set_ylabel("token")
    if title:
        picture.suptitle(title, fontsize=11, x=0.01, ha="left")
    return finish(picture)


def code_layout(words, title, rows=16, columns=128):
    """Where the codes in the words of one lane stand in a matrix, above, and in the words, below.

    words  {name: [(row, column), ...]}, the lowest bits first, equal fields. Colours: the upper and lower half of rows
    """
    shades = ["#9CC9E8", "#FFE7B3"]
    picture, (above, below) = figure(8, 1.75 + 0.5 * len(words), rows=2)
    above.get_gridspec().set_height_ratios([1.4, 0.5 * len(words)])
    above.add_patch(rectangle(0, 0, columns, rows, "#F7F7F7"))
    for at, (name, places) in enumerate(words.items()):
        bits = 32 / len(places)
        for i, (row, column) in enumerate(places):
            shade, left = shades[2 * row // rows], 32 - bits * (i + 1)
            above.add_patch(rectangle(column, row, 1, 1, shade, 0.4))
            below.add_patch(rectangle(left, at, bits, 0.62, shade))
            size = 8.5 if bits > 2 else 6.3
            below.text(left + bits / 2, at + 0.31, f"{row},{column}", ha="center", va="center", fontsize=size)
        below.text(-0.3, at + 0.31, name, ha="right", va="center", fontsize=8.5)
    for bit in range(0, 32, 8):
        below.text(32 - bit - 0.5, len(words) - 0.3, bit, ha="center", va="top", fontsize=7)
    above.set(xlim=(-0.5, columns + 0.5), ylim=(rows + 0.3, -0.3), xlabel="column", ylabel="row")
    above.set(xticks=range(0, columns + 1, 16), yticks=[0.5, rows / 2 + 0.5], yticklabels=[0, rows // 2])
    above.set_title(title, loc="left", fontsize=10.5)
    below.set(xlim=(-1.6, 32.3), ylim=(len(words), -0.1))
    below.axis("off")
    return finish(picture)
