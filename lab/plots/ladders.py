"""Ladders and roofs: how much of the roof each rung reached, alone and over the length of a context."""

import numpy as np

from lab.plots.style import BLACK, BLUE, COLOURS, RED, figure, finish


def bars(ladder):
    """Horizontal bars: the part of the roof that each rung reached. If they span more than 50×, dots on a logarithmic
    axis, which has no zero for a bar to begin at."""
    figures = ladder.figures
    shares = 100 * np.array([f.share for f in figures])
    picture, axis = figure(8, 1.2 + 0.42 * len(figures))
    colours, logarithmic = [RED if f.impossible else BLUE for f in figures], shares.min() < 2
    if logarithmic:
        axis.scatter(shares, range(len(shares)), color=colours, s=70, zorder=3)
    else:
        axis.barh(range(len(shares)), shares, color=colours, height=0.65)
    axis.axvline(100, color=BLACK, linestyle="--", linewidth=1.2)
    axis.set_yticks(range(len(shares)), [f.name + (" (stale)" if f.stale else "") for f in figures])
    axis.invert_yaxis()
    if logarithmic:
        axis.grid(True, axis="x", alpha=0.25)
        axis.set_xscale("log")
        axis.set_xlim(shares.min() / 3, 1000)
        axis.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    else:
        axis.set_xlim(0, max(135, 1.3 * shares.max()))
    away = 9 if logarithmic else 5  # points, from the dot or the bar's end
    for at, (share, f) in enumerate(zip(shares, figures)):
        left = share > (5 if logarithmic else 30)  # clear of the roof's line
        axis.annotate(
            f.rate_text,
            (share, at),
            xytext=(-away if left else away, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            color="white" if left and not logarithmic else BLACK,
        )
    name = "read bandwidth" if ladder.bound == "read" else "arithmetic"
    axis.set_xlabel(f"percent of the {name} measured beside it\n(dashed: the roof)")  # long names leave little width
    axis.set_title(ladder.title + (f"\n{ladder.source}" if ladder.source else ""), loc="left")
    return finish(picture)


def roofline(roof, points=(), title=None):
    """The roofline of a machine, log-log, with kernels placed on it.

    points  (name, flop per byte, flop/s) triples; flop/s may be None: then the point sits on the roof
    """
    unit, scale = ("TFLOP/s", 1e12) if roof.flops >= 1e12 else ("GFLOP/s", 1e9)
    picture, axis = figure(8, 4 + 0.3 * len(points))
    intensities = [p[1] for p in points] or [1]
    low, high = min(0.1, min(intensities) / 2), max(10 * roof.ridge, 4 * max(intensities))
    x = np.geomspace(low, high, 200)
    axis.loglog(x, roof.attainable(x) / scale, color=BLACK, linewidth=2)
    bottom = min([roof.attainable(low), *(p[2] for p in points if p[2])]) / scale / 2
    axis.set(xlim=(low, high), ylim=(bottom, 4 * roof.flops / scale))
    axis.axvline(roof.ridge, color=BLACK, linestyle=":", linewidth=1)
    above = {"textcoords": "offset points", "color": BLACK}
    axis.annotate(f"ridge: {roof.ridge:.3g} flop/byte", (roof.ridge, bottom), xytext=(5, 6), **above)
    flat = f"{roof.flops / scale:.3g} {unit}"
    axis.annotate(flat, (roof.ridge, roof.flops / scale), xytext=(5, 6), **above)
    start = (low * 1.3, roof.attainable(low * 1.3) / scale)
    slope = {"rotation": 45, "rotation_mode": "anchor", "transform_rotates_text": True}
    axis.annotate(f"{roof.read / 1e9:,.0f} GB/s", start, xytext=(-4, 7), **above, **slope)
    for i, (name, intensity, rate) in enumerate(points):
        rate = roof.attainable(intensity) if rate is None else rate
        colour, marker = COLOURS[i % len(COLOURS)], "os^Dv<>P*X"[i % 10]
        axis.plot(intensity, rate / scale, marker, color=colour, markersize=9, label=name, clip_on=False)
    if points:
        axis.legend(loc="upper left", bbox_to_anchor=(0, -0.16), frameon=False)
    axis.set_xlabel("arithmetic intensity, flop per byte")
    axis.set_ylabel(unit)
    axis.set_title(title or f"Roofline of {roof.card}", loc="left")
    axis.grid(True, which="major", alpha=0.25)
    return finish(picture)


def roof_over_context(ladders, names, title):
    """Percent of the measured read bandwidth over context length: a line for each row, named at its end.

    ladders  {kv_len: Ladder};  names  of rows, as they stand in the ladders or before a colon ("FlashInfer" for
             "FlashInfer: XQA"); a ladder that has no such row leaves a gap
    Rows that name their sources are ours: full lines and dots. The others' are dashed, with squares.
    """
    found = {name: {n: _row(ladder, name) for n, ladder in sorted(ladders.items())} for name in names}
    picture, axis = figure(8, 4.8)
    axis.axhline(100, color=BLACK, linestyle=":", linewidth=1.2)
    ends, styles = [], {True: [0, "-", "o"], False: [0, "--", "s"]}
    for name, figures in found.items():
        figures = {n: f for n, f in figures.items() if f}
        if not figures:
            raise KeyError(f"roof_over_context: no ladder has a row {name!r}")
        style = styles[any(f.sources for f in figures.values())]
        colour, style[0] = COLOURS[style[0] % len(COLOURS)], style[0] + 1
        shares = [100 * f.share for f in figures.values()]
        # with a gap where a ladder in between has no such row
        whole = [100 * figures[n].share if n in figures else np.nan for n in sorted(ladders)]
        axis.plot(sorted(ladders), whole, style[1], marker=style[2], markersize=5, color=colour, linewidth=2)
        stale = " (stale)" if any(f.stale for f in figures.values()) else ""
        ends.append((shares[-1], max(figures), name + stale, colour))
    top = max(110, 1.05 * max(100 * f.share for figures in found.values() for f in figures.values() if f))
    axis.set(ylim=(0, top), xscale="log")
    axis.set_xticks(sorted(ladders), [_tokens(n) for n in sorted(ladders)], minor=False)
    axis.minorticks_off()
    ends.sort()
    heights = _apart([end[0] for end in ends], 0.052 * top, top)
    for (share, at, name, colour), height in zip(ends, heights):
        axis.annotate(
            name,
            (at, share),
            xytext=(1.02, height / top),
            textcoords=axis.transAxes,
            color=colour,
            va="center",
            fontsize=9.5,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.5},
        )
    axis.set_xlabel("tokens in the cache")
    axis.set_ylabel("percent of the read bandwidth")
    axis.set_title(title, loc="left")
    axis.grid(True, alpha=0.25)
    return finish(picture)


def _row(ladder, name):
    """The figure of this name, or of a name that goes on with a colon; None if there is none."""
    return next((f for f in ladder.figures if f.name == name or f.name.startswith(name + ":")), None)


def _tokens(number):
    """4096 -> "4K", 1048576 -> "1M", 1000 -> "1,000"."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if number % size == 0:
            return f"{number // size}{unit}"
    return f"{number:,}"


def _apart(heights, least, top):
    """Ascending heights, moved so that any two are `least` apart and none is above `top`, as little as that takes."""
    placed = []
    for height in heights:
        placed.append(max(height, placed[-1] + least if placed else 0))
    for at in reversed(range(len(placed))):
        placed[at] = min(placed[at], placed[at + 1] - least if at + 1 < len(placed) else top)
    return placed
