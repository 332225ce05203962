"""A Mamba-2 as a whole: its block, the window of its convolution, lists of layers, costs over the context."""

import numpy as np

from lab.plots.llm import CACHE, SMALL, WEIGHTS, _arrow, _box
from lab.plots.style import BLACK, COLOURS, figure, finish, rectangle


def mamba2_block(n_layers=64):
    """A token's way through a Mamba-2 block, by the steps of ref.mamba2: what reads weights, what keeps the past."""
    picture, axis = figure(10, 3.4)
    stream, under = 2.75, 1.1
    axis.plot((0, 17.6), (stream, stream), color=BLACK, linewidth=3, solid_capstyle="butt")
    axis.text(8.8, stream + 0.14, "the residual stream, one vector a token", ha="center", fontsize=9)
    boxes = [
        (1.0, "1: norm,\nW_in", WEIGHTS),
        (4.6, "2: conv1d,\nsilu", CACHE),
        (8.2, "3: SSD:\nh, then y", CACHE),
        (11.8, "4: gate,\nnorm", SMALL),
        (14.4, "5: W_out", WEIGHTS),
    ]
    for at, says, colour in boxes:
        _box(axis, at, under - 0.45, 1.9, 0.9, says, colour)
    for (at, *_), (then, *_), says in zip(boxes, boxes[1:], ("x, B, C", "x, B, C", "y", "")):
        _arrow(axis, (at + 1.9, under), (then, under))
        axis.text((at + 1.9 + then) / 2, under + 0.08, says, ha="center", va="bottom", fontsize=8.5)
    _arrow(axis, (0.6, stream), (1.0, under), "arc3,rad=0.35")
    _arrow(axis, (16.3, under), (16.85, stream - 0.14), "arc3,rad=0.35")
    plus = {"boxstyle": "circle,pad=0.12", "facecolor": BLACK, "edgecolor": "none"}
    axis.text(16.85, stream, "+", ha="center", va="center", fontsize=13, color="white", weight="bold", bbox=plus)
    for height, into, says in ((2.3, 12.75, "z, the gate"), (1.88, 9.15, "dt, a step for each head")):
        axis.plot((1.95, 1.95, into), (under + 0.45, height, height), color="#555555", linewidth=1)
        _arrow(axis, (into, height), (into, under + 0.45))
        axis.text(2.15, height + 0.04, says, fontsize=8.5, va="bottom")
    for at, says in ((4.6, "conv state:\nthe last 3 inputs"), (8.2, "SSM state h:\na matrix for each head")):
        _box(axis, at - 0.55, -0.85, 3.0, 0.9, says, CACHE)
        _arrow(axis, (at + 0.55, 0.05), (at + 0.55, under - 0.45))
        _arrow(axis, (at + 1.35, under - 0.45), (at + 1.35, 0.05))
    axis.text(
        12.0, -0.4, "read and written by every token,\nas large after a million as after one", fontsize=9, va="center"
    )
    axis.text(17.6, stream + 0.35, f"{n_layers} such layers, one after another", ha="right", fontsize=9)
    axis.set(xlim=(-0.1, 17.8), ylim=(-1.0, 3.45))
    axis.axis("off")
    return finish(picture)


def conv_window(tokens=10, width=4, piece=6):
    """A causal convolution's window over tokens, and what one piece hands to the next. piece  tokens of the first"""
    picture, axis = figure(9, 2.7)
    for t in range(-(width - 1), tokens):
        old = t < 0
        kept = piece - width < t < piece
        axis.add_patch(rectangle(t, 0, 0.92, 0.8, "white" if old else CACHE if kept else WEIGHTS))
        axis.text(t + 0.46, 0.4, "0" if old else f"$u_{{{t}}}$", ha="center", va="center", fontsize=10)
        if not old:
            axis.add_patch(rectangle(t, 2.0, 0.92, 0.8, SMALL))
            axis.text(t + 0.46, 2.4, f"$v_{{{t}}}$", ha="center", va="center", fontsize=10)
    for t, colour in ((1, COLOURS[0]), (piece, COLOURS[3])):
        for w in range(width):
            begin = t - width + 1 + w + 0.46, 0.8
            axis.annotate("", xy=(t + 0.46, 2.0), xytext=begin, arrowprops={"arrowstyle": "->", "color": colour})
    axis.plot((piece - 0.04,) * 2, (-0.55, 3.0), color=BLACK, linestyle="--", linewidth=1.2)
    axis.text(piece - 0.2, -0.45, f"conv state: the last {width - 1} inputs", ha="right", fontsize=9.5)
    axis.text(piece + 0.1, -0.45, "the next piece, or the next token", ha="left", fontsize=9.5)
    axis.text(-width + 0.75, 2.4, "outputs", ha="right", va="center", fontsize=9.5)
    axis.text(-width + 0.75, 0.4, "inputs", ha="right", va="center", fontsize=9.5)
    axis.set(xlim=(-width - 0.9, tokens + 0.1), ylim=(-0.75, 3.05))
    axis.axis("off")
    return finish(picture)


def layer_kinds(models):
    """What each layer of some models is, a row a model. models  {name: [kind, ...]}"""
    picture, axis = figure(9.5, 0.9 + 0.42 * len(models))
    every = [kind for layers in models.values() for kind in layers]
    kinds = sorted(dict.fromkeys(every), key=every.count, reverse=True)
    colours = dict(zip(kinds, (WEIGHTS, COLOURS[1], COLOURS[2])))
    for row, layers in enumerate(models.values()):
        for n, kind in enumerate(layers):
            axis.add_patch(rectangle(n + 0.06, row - 0.36, 0.88, 0.72, colours[kind], 0.5))
    axis.set_yticks(range(len(models)), models)
    axis.set(xlim=(0, max(map(len, models.values()))), ylim=(len(models) - 0.5, -0.5), xlabel="layer")
    for side in axis.spines.values():
        side.set_visible(False)
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colours[kind], edgecolor="#555555", label=kind) for kind in kinds]
    picture.legend(handles=handles, loc="outside lower center", ncols=len(kinds), frameon=False, fontsize=9.5)
    return finish(picture)


def over_context(context, panels, title):
    """Costs over the context, a panel for each, all logarithmic.

    context  tokens;  panels  {label of the y axis: {name: values}}
    """
    picture, axes = figure(9.5, 4, columns=len(panels))
    for axis, (label, lines) in zip(np.ravel(axes), panels.items()):
        for n, (name, values) in enumerate(lines.items()):
            axis.plot(context, values, color=COLOURS[n % len(COLOURS)], linewidth=2, label=name)
        axis.set(yscale="log", xlabel="tokens so far")
        axis.set_xscale("log", base=2)
        axis.set_xticks([1 << k for k in range(0, 64, 3) if min(context) <= 1 << k <= max(context)])
        axis.yaxis.set_minor_formatter(lambda v, _: f"{v:,g}" if f"{v:e}"[0] in "25" else "")
        axis.set_title(label, loc="left", fontsize=10.5)
        axis.xaxis.set_major_formatter(lambda v, _: _short(v))
        axis.yaxis.set_major_formatter(lambda v, _: f"{v:,g}")
        axis.grid(True, alpha=0.25)
    picture.legend(
        *np.ravel(axes)[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9.5
    )
    picture.suptitle(title, fontsize=12, x=0.01, ha="left")
    return finish(picture)


def _short(tokens):
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= 0.9 * size:
            return f"{tokens / size:.3g}{letter}"
    return f"{tokens:.3g}"


def memory_of_heads(lives, title):
    """How many tokens each head remembers, sorted, a curve for each group. lives  {name: tokens of all heads}"""
    picture, axis = figure(8, 3.8)
    for n, (name, tokens) in enumerate(lives.items()):
        tokens = np.sort(np.ravel(tokens))
        axis.plot(
            np.linspace(0, 100, len(tokens)), tokens, "os^D"[n % 4] + "-", color=COLOURS[n % len(COLOURS)],
            markersize=4, linewidth=1.4, label=name,
        )  # fmt: skip
    axis.set(yscale="log", xlabel="percent of the heads", ylabel="tokens until 1/e is left")
    axis.yaxis.set_major_formatter(lambda v, _: f"{v:,g}")
    axis.set_title(title, loc="left")
    axis.grid(True, alpha=0.25)
    axis.legend(frameon=False)
    return finish(picture)
