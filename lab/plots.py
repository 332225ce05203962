"""The course's pictures: one style, units on every axis, colours that a colour-blind reader can tell apart."""

import numpy as np

# Okabe and Ito's palette, darkest first for lines and bars.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE, BLACK = "#0072B2 #E69F00 #009E73 #D55E00 #56B4E9 #CC79A7 #222222".split()
COLOURS = [BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK]


def figure(width=8, height=4, columns=1, rows=1):
    """A figure and its axes in the course's style. White behind, so that it reads on a dark page too."""
    import matplotlib.pyplot as plt

    style = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 11, "axes.titlesize": 12}
    with plt.rc_context(style):
        picture, axes = plt.subplots(rows, columns, figsize=(width, height), dpi=100, layout="constrained")
    picture.set_facecolor("white")
    return picture, axes


def bars(ladder):
    """Horizontal bars: the part of the roof that each rung reached; logarithmic if they span more than 50×."""
    figures = ladder.figures
    shares = 100 * np.array([f.share for f in figures])
    picture, axis = figure(8, 1.2 + 0.42 * len(figures))
    axis.barh(range(len(shares)), shares, color=[RED if f.impossible else BLUE for f in figures], height=0.65)
    axis.axvline(100, color=BLACK, linestyle="--", linewidth=1.2)
    axis.set_yticks(range(len(shares)), [f.name + (" (stale)" if f.stale else "") for f in figures])
    axis.invert_yaxis()
    if shares.min() < 2:
        axis.set_xscale("log")
        axis.set_xlim(shares.min() / 3, 1000)
        axis.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    else:
        axis.set_xlim(0, max(135, 1.3 * shares.max()))
    unit = "GB/s" if ladder.bound == "read" else "GFLOP/s"
    for at, (share, f) in enumerate(zip(shares, figures)):
        axis.annotate(
            f"{f.rate / 1e9:.3g} {unit}",
            (share, at),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            # on white, so that the roof's line does not cross the figures
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    name = "read bandwidth" if ladder.bound == "read" else "arithmetic"
    axis.set_xlabel(f"percent of the {name} measured beside it (dashed: the roof)")
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


def stacked(parts, unit, title):
    """One horizontal bar cut into named parts. parts  {name: amount}."""
    picture, axis = figure(8, 2.4)
    left = 0
    for i, (name, amount) in enumerate(parts.items()):
        axis.barh([0], [amount], left=left, color=COLOURS[i % len(COLOURS)], label=f"{name}: {amount:.3g}")
        left += amount
    axis.set_yticks([])
    axis.set_xlabel(unit)
    axis.set_title(title, loc="left")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=3, frameon=False, fontsize=10)
    return finish(picture)


def curves(x, lines, xlabel, ylabel, title, *, log=False, marker="o", level=None):
    """Curves over one x axis. lines  {name: values};  log  "x", "y", "xy" or False;  level  (value, name): a dashed
    line across."""
    from matplotlib.ticker import LogLocator

    picture, axis = figure(8, 4)
    for i, (name, values) in enumerate(lines.items()):
        axis.plot(x, values, marker=marker, color=COLOURS[i % len(COLOURS)], label=name, linewidth=2)
    if level:
        axis.axhline(level[0], color=BLACK, linestyle="--", linewidth=1.2, label=level[1])
    if log and "x" in log:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
    elif len(x) <= 16:
        axis.set_xticks(x)
    if log and "y" in log:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda v, _: f"{v:,g}")
        axis.yaxis.set_minor_formatter(lambda v, _: "")
    if not log or "y" not in log:
        axis.set_ylim(bottom=0)
    if len(lines) > 1 or level:
        axis.legend(frameon=False)
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    axis.set_title(title, loc="left")
    axis.grid(True, alpha=0.25)
    return finish(picture)


def walk(paths, rows=8, columns=32, line=16):
    """How loops walk over a matrix in memory: one panel a path, cache lines as boxes, the steps as dots in order.

    paths  {title: [(row, column), ...]}; line: elements of a cache line
    """
    picture, axes = figure(8, 1.1 + 1.75 * len(paths), rows=len(paths))
    for axis, (title, steps) in zip(np.atleast_1d(axes), paths.items()):
        touched = {(r, c // line) for r, c in steps}
        for r in range(rows):
            for box in range(columns // line):
                colour = "#FFE7B3" if (r, box) in touched else "#F2F2F2"
                axis.add_patch(_box(box * line - 0.5, r - 0.5, line, 1, colour))
        down, across = zip(*steps)
        axis.plot(across, down, color=BLUE, linewidth=1.2)
        axis.scatter(across, down, color=BLUE, s=14, zorder=3)
        axis.scatter(across[:1], down[:1], color=RED, s=40, zorder=4)
        axis.set(xlim=(-0.6, columns - 0.4), ylim=(rows - 0.4, -0.6), ylabel="row")
        axis.set_title(f"{title}: {len(steps)} steps touch {len(touched)} cache lines", loc="left", fontsize=11)
    axis.set_xlabel(f"column (each box is a cache line of {line} floats; the red dot is the first step)")
    return finish(picture)


def register_block(rows, columns, lanes):
    """One step of a matmul with a block of C in registers: a column of A, a row of B, and the block they meet in."""
    picture, axis = figure(8, 3.6)
    for r in range(rows):
        axis.add_patch(_box(-2.9, r, 2, 1, ORANGE))
        axis.text(-1.9, r + 0.5, f"a[{r}]", ha="center", va="center")
        for v in range(columns // lanes):
            axis.add_patch(_box(v * lanes, r, lanes, 1, "#D6E8F5"))
            axis.text((v + 0.5) * lanes, r + 0.5, f"acc[{r}][{v}]", ha="center", va="center")
    for v in range(columns // lanes):
        axis.add_patch(_box(v * lanes, -2.4, lanes, 1, SKY))
        axis.text((v + 0.5) * lanes, -1.9, f"b[{v}]", ha="center", va="center")
    axis.text(-1.9, rows + 0.7, f"{rows} numbers\nof A", ha="center", va="top")
    axis.text(columns + 0.4, -1.9, f"{columns // lanes} vectors of B, {lanes} floats each", va="center")
    text = f"{rows * columns // lanes} registers hold\na block of C:\nacc[i][v] += a[i] · b[v]"
    axis.text(columns + 0.4, rows / 2, text, va="center")
    axis.set(xlim=(-4.5, columns + 10), ylim=(rows + 2.4, -2.8))
    axis.axis("off")
    return finish(picture)


def _box(x, y, width, height, colour):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=colour, edgecolor="#999999", linewidth=0.8)


def finish(picture):
    """Close the figure for pyplot and return it: a notebook shows a returned figure once, and never twice."""
    import matplotlib.pyplot as plt

    plt.close(picture)
    return picture
