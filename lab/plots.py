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
    logarithmic = shares.min() < 2
    if logarithmic:
        axis.set_xscale("log")
        axis.set_xlim(shares.min() / 3, 1000)
        axis.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    else:
        axis.set_xlim(0, max(135, 1.3 * shares.max()))
    for at, (share, f) in enumerate(zip(shares, figures)):
        inside = share > (5 if logarithmic else 30)  # clear of the roof's line
        axis.annotate(
            f.rate_text,
            (share, at),
            xytext=(-5 if inside else 5, 0),
            textcoords="offset points",
            ha="right" if inside else "left",
            va="center",
            color="white" if inside else BLACK,
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
    picture, axis = figure(8, 4)
    for i, (name, values) in enumerate(lines.items()):
        axis.plot(x, values, marker=marker, color=COLOURS[i % len(COLOURS)], label=name, linewidth=2)
    if level:
        axis.axhline(level[0], color=BLACK, linestyle="--", linewidth=1.2, label=level[1])
    _scales(axis, x, log)
    if len(lines) > 1 or level:
        axis.legend(frameon=False)
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    axis.set_title(title, loc="left")
    return finish(picture)


def _scales(axis, x, log, steps=(1, 2, 5)):
    """Axes from 0 or logarithmic, as in `curves`, and a grid. steps: the ticks in a power of ten"""
    from matplotlib.ticker import LogLocator

    if log and "x" in log:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
    elif len(x) <= 16:
        axis.set_xticks(x)
    if log and "y" in log:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=steps))
        axis.yaxis.set_major_formatter(lambda v, _: f"{v:,g}")
        axis.yaxis.set_minor_formatter(lambda v, _: "")
    if not log or "y" not in log:
        axis.set_ylim(bottom=0)
    axis.grid(True, alpha=0.25)


def panels(x, lines, xlabel, ylabel, title=None, *, log="x"):
    """Curves in panels, two beside each other, over the same axes and with one legend. log  as in `curves`

    lines  {panel: {name: values}}, the same names in each
    """
    picture, axes = figure(9, 0.9 + 2.4 * -(-len(lines) // 2), columns=2, rows=-(-len(lines) // 2))
    axes = np.ravel(axes)
    for axis, (panel, curves_of) in zip(axes, lines.items()):
        for i, (name, values) in enumerate(curves_of.items()):  # each a little thinner: one behind another still shows
            look = {"marker": "os^Dv"[i % 5], "markersize": max(4, 9 - 2 * i), "linewidth": max(1.2, 2.7 - 0.5 * i)}
            axis.plot(x, values, color=COLOURS[i % len(COLOURS)], label=name, **look)
        _scales(axis, x, log, steps=(1,))
        axis.set_title(panel, loc="left", fontsize=10.5)
        axis.tick_params(labelsize=9)
        axis.set(xlabel=xlabel, ylabel=ylabel)
    found = np.array([axis.get_ylim() for axis in axes[: len(lines)]])
    for axis in axes:
        axis.set_ylim(found.min(), 1.08 * found.max())
        axis.label_outer()
    for axis in axes[len(lines) :]:
        axis.axis("off")
    picture.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=10
    )
    if title:
        picture.suptitle(title, fontsize=12, x=0.01, ha="left")
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


def warp_addresses(requests, size=4):
    """Where the 32 lanes of a warp read or write: a panel a request, a row for each 128 bytes of memory it touches.

    Boxes are sectors of 32 bytes, filled if touched; blue are the lanes' own bytes, numbered by lane.
    requests  {title: 32 byte addresses, or None for a lane that takes no part};  size: bytes a lane
    """
    from simt.coalesce import sectors_per_warp

    lines = [sorted({int(a) // 128 for a in addresses if a is not None}) for addresses in requests.values()]
    heights = [len(rows) * 0.18 + 0.25 for rows in lines]
    picture, axes = figure(8, sum(heights) + 0.75 * len(lines), rows=len(lines))
    axes = np.atleast_1d(axes)
    axes[0].get_gridspec().set_height_ratios(heights)
    for axis, (title, addresses), rows in zip(axes, requests.items(), lines):
        active = np.array([a is not None for a in addresses])
        counted = sectors_per_warp(np.array([0 if a is None else int(a) for a in addresses]), size, active)
        lanes = {}  # the lanes at an address
        for lane in np.flatnonzero(active):
            lanes.setdefault(int(addresses[lane]), []).append(lane)
        touched = {a // 32 for a in lanes}
        for at, line in enumerate(rows):
            for box in range(4):
                axis.add_patch(_box(32 * box, at, 32, 1, "#FFE7B3" if 4 * line + box in touched else "#F2F2F2"))
        for a, who in lanes.items():
            x, at = a % 128, rows.index(a // 128)
            axis.add_patch(_box(x, at + 0.12, size, 0.76, SKY))
            if len(who) > 1:
                axis.text(x + size + 0.7, at + 0.53, f"{len(who)} lanes", va="center", fontsize=7)
            elif size > 1:
                axis.text(x + size / 2, at + 0.53, who[0], ha="center", va="center", fontsize=7 if size > 2 else 5)
        axis.set(xlim=(-0.5, 128.5), ylim=(max(len(rows), 1), 0), xticks=[0, 32, 64, 96, 128])
        axis.set_yticks([at + 0.5 for at in range(len(rows))], [f"{128 * line:,}" for line in rows], fontsize=7)
        fetched, used = 32 * int(counted), len({a + b for a in lanes for b in range(size)})
        share = f", of which {used:,} are used ({100 * used / fetched:.3g} %)" if fetched else ""
        count = f"{fetched // 32} sector{'s' * (fetched != 32)}"
        axis.set_title(f"{title}: {count}, {fetched:,} bytes{share}", loc="left", fontsize=10.5)
    axes[-1].set_xlabel("byte, counted from the address on the left (numbers in blue: the lane)")
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


def _box(x, y, width, height, colour, edge=0.8):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=colour, edgecolor="#999999", linewidth=edge)


def finish(picture):
    """Close the figure for pyplot and return it: a notebook shows a returned figure once, and never twice."""
    import matplotlib.pyplot as plt

    plt.close(picture)
    return picture


def shuffle_reduction(values, mode="bfly", steps=5):
    """A sum over the 32 lanes by shuffles, step by step: a row for the warp before and after each step.

    Dark lanes hold the sum of more lanes; green ones that of all 32; grey ones have counted some lane twice.
    values  32 numbers;  mode  "bfly" (__shfl_xor_sync) or "down" (__shfl_down_sync);  steps  how many to draw, 0 to 5
    """
    from simt.lanes import LANES, shuffle

    picture, axis = figure(8, 0.75 + 0.62 * (steps + 1))
    held, counts = np.array(values), np.eye(32, dtype=int)  # counts[lane, k]: how often lane k is in its sum
    shades = ["#F2F2F2", "#DCEBF6", "#B7D6ED", "#8FC0E3", "#63A8D8"]
    for step in range(steps + 1):
        if step:
            far = 32 >> step
            operand, clamp = np.array([far], np.uint32), np.array([31], np.uint32)
            source, _ = shuffle(mode, LANES, operand, clamp)  # the lane that each lane hears from
            for lane, other in enumerate(source.tolist()):
                axis.plot((other, lane), (step - 1 + 0.32, step - 0.32), color="#999999", linewidth=0.7, zorder=0)
            held, counts = held + held[source], counts + counts[source]
        for lane in range(32):
            whole, twice = counts[lane].min() > 0, counts[lane].max() > 1
            colour = "#D9D9D9" if twice else "#8FD3BF" if whole else shades[step]
            axis.add_patch(_box(lane - 0.46, step - 0.3, 0.92, 0.6, colour))
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
            axis.add_patch(_box(lane * 0.9, top + warp * side, 0.9, side, BLUE if lane == 0 else "#F2F2F2", 0.3))
        axis.add_patch(_box(36, top + warp * side, 3, side, ORANGE))
    axis.annotate("", (35.6, 16), (29.4, 16), arrowprops={"arrowstyle": "->", "color": BLUE, "linewidth": 1.5})
    axis.text(32.5, 14.8, "lane 0\nof each", ha="center", va="bottom", fontsize=9)
    axis.text(0, -1.6, f"{warps} warps, 32 lanes each", fontsize=10)
    axis.text(37.5, -1.6, "sums[ ], shared", fontsize=10, ha="center")
    axis.annotate("", (46, 16), (39.4, 16), arrowprops={"arrowstyle": "->", "color": ORANGE, "linewidth": 1.5})
    axis.text(42.7, 14.8, "barrier,\nthen read", ha="center", va="bottom", fontsize=9)
    for lane in range(warps):
        axis.add_patch(_box(46.5 + 1.15 * lane, 14.5, 1.15, 3, SKY))
    wide = 1.15 * warps
    axis.text(46.5, 12.9, f"warp 0: lanes 0 to {warps - 1}", fontsize=10)
    sectors = max(1, warps // 8)
    for n in range(sectors):
        axis.add_patch(_box(46.5 + n * wide / sectors, 21.5, wide / sectors, 3, "#FFE7B3"))
    for lane in range(warps):
        at = 46.5 + 1.15 * (lane + 0.5)
        axis.plot((at, at), (17.7, 21.3), color="#999999", linewidth=0.8)
    axis.text(46.5, 27.3, f"y: {sectors} sector{'s' * (sectors > 1)}, one request", fontsize=10)
    axis.set(xlim=(-1, 85), ylim=(33, -3.5))
    axis.axis("off")
    return finish(picture)


def loads_in_flight(batches=(1, 4, 8), words=8, latency=20):
    """When each of a lane's loads is asked for and when it arrives, if it asks for so many before it waits.

    latency  how many times as long as asking for one a load takes to arrive
    """
    picture, axes = figure(8, 0.7 + len(batches) * (0.45 + 0.13 * words), rows=len(batches))
    axes, longest = np.atleast_1d(axes), 0
    for axis, batch in zip(axes, batches):
        now = 0
        for first in range(0, words, batch):
            here = range(first, min(first + batch, words))
            for turn, word in enumerate(here):
                axis.barh(word, latency, left=now + turn, height=0.7, color=SKY)
                axis.barh(word, 1, left=now + turn, height=0.7, color=BLUE)
            now += latency + len(here) - 1  # the last of the batch is there
            axis.barh([*here], 1, left=now, height=0.7, color=ORANGE)
            now += 1
        longest = max(longest, now)
        axis.set_title(f"{batch} in flight: {words} words take {now / latency:.1f} latencies", loc="left", fontsize=11)
        axis.set(ylim=(words - 0.4, -0.6), yticks=[])
        axis.set_ylabel("word", fontsize=9)
    for axis in axes:
        axis.set_xlim(0, longest)
        axis.set_xticks([k * latency for k in range(longest // latency + 1)], range(longest // latency + 1))
    axes[-1].set_xlabel("time, in latencies of a load (dark blue: asked for; light: on its way; orange: used)")
    return finish(picture)


def bytes_in_flight(points, latency, roof):
    """Bandwidth over the bytes that are on their way at any moment, and Little's law, up to the roof.

    points  {name: (bytes in flight, bytes/s)}, arrays;  latency  seconds, of a load while memory has little to do
    """
    picture, axis = figure(8, 4.4)
    most = max(x.max() for x, _ in points.values())
    law = np.linspace(0, most, 400)
    axis.plot(law / 1e6, np.minimum(law / latency, roof.read) / 1e9, color=BLACK, linewidth=1.5, label="Little's law")
    for (name, (x, rate)), colour, marker in zip(points.items(), COLOURS, "os^Dv<>"):
        axis.plot(np.asarray(x) / 1e6, np.asarray(rate) / 1e9, marker, color=colour, markersize=7, label=name)
    said = f"the roof: {roof.read / 1e9:,.0f} GB/s"
    at = (most / 1e6, roof.read / 1e9)
    axis.annotate(said, at, xytext=(0, 5), textcoords="offset points", ha="right")
    axis.set(xlim=(0, None), ylim=(0, 1.12 * roof.read / 1e9))
    axis.set_xlabel("MB in flight, on the whole card")
    axis.set_ylabel("GB/s")
    axis.set_title(f"What {roof.card} reads, by what is on its way", loc="left")
    axis.legend(frameon=False, loc="lower right")
    axis.grid(True, alpha=0.25)
    return finish(picture)


def fused_operations(rows, heavy=("q", "k", "v", "o", "gate", "up", "down")):
    """Which operations share a launch: a row of boxes for each way to launch them, a frame for each launch.

    rows  {title: [[operation, ...], ...]}: the launches in order, and what each of them does
    heavy  operations to colour blue; the others are orange
    """
    picture, axis = figure(8, 0.4 + 0.52 * len(rows))
    widths = {"silu·mul": 1.6}
    for at, (title, launches) in enumerate(rows.items()):
        left = 0
        for operations in launches:
            begin = left
            for name in operations:
                wide = widths.get(name, 1)
                axis.add_patch(_box(left + 0.07, at + 0.1, wide - 0.14, 0.6, SKY if name in heavy else "#F5CF87", 0))
                axis.text(left + wide / 2, at + 0.42, name, ha="center", va="center", fontsize=8)
                left += wide
            frame = _box(begin, at + 0.02, left - begin, 0.76, "none", 1.3)
            frame.set_edgecolor(BLACK)
            axis.add_patch(frame)
            left += 0.25
        axis.text(-0.2, at + 0.42, title, ha="right", va="center", fontsize=10)
        says = f"{len(launches)} launch{'es' if len(launches) > 1 else ''}"
        axis.text(left + 0.2, at + 0.42, says, va="center", fontsize=10)
    axis.set(xlim=(-2.9, 17.5), ylim=(len(rows), -0.1))
    axis.axis("off")
    return finish(picture)


def launch_timeline(rows, title):
    """Launches one behind the other: dark while bytes flow at full speed, light in ramp and drain, white in between.

    rows  {name: (work, loss, gap)}: seconds at full speed of each launch; what each loses to its start and its end, in
          equal parts; what passes between two
    """
    picture, axis = figure(8, 1.3 + 0.42 * len(rows))
    for at, (work, loss, gap) in enumerate(rows.values()):
        now = 0
        for number, seconds in enumerate(work):
            now += gap if number else 0
            axis.barh(at, 1e6 * (seconds + loss), left=1e6 * now, height=0.62, color="#BBDDF2", edgecolor="white")
            axis.barh(at, 1e6 * seconds, left=1e6 * (now + loss / 2), height=0.62, color=BLUE)
            now += seconds + loss
        said = f"{1e6 * now:.3g} µs"
        axis.annotate(said, (1e6 * now, at), xytext=(5, 0), textcoords="offset points", va="center")
    axis.set_yticks(range(len(rows)), rows)
    axis.set_ylim(len(rows) - 0.5, -0.6)
    axis.set_xlim(0, 1.12 * axis.get_xlim()[1])
    axis.set_xlabel("µs (dark: bytes at the roof; light: ramp and drain; white: not yet launched)")
    axis.set_title(title, loc="left", fontsize=11)
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


def token_shares(kv_len, shares, title="", row=64):
    """Which block takes which tokens of a cache: a box a token, oldest first, red where no block comes.

    shares  [(first, last), ...]: the tokens first to last - 1 of each block;  row  tokens in a line
    """
    owner = np.full(kv_len, -1)
    for block, (first, last) in enumerate(shares):
        owner[first:last] = block
    lost, lines = int((owner < 0).sum()), -(-kv_len // row)
    picture, axis = figure(8, 0.75 + 0.4 * lines)
    shades = ["#BBDDF2", "#F5CF87", "#A9DFCB"]
    for t, block in enumerate(owner.tolist()):
        x, y = t % row, t // row
        axis.add_patch(_box(x, y + 0.12, 1, 0.76, RED if block < 0 else shades[block % 3], 0.4))
        if block >= 0 and (t == 0 or owner[t - 1] != block):
            axis.text(x + 0.5, y + 0.5, block, ha="center", va="center", fontsize=6)
    said = f"{lost} of {kv_len} tokens are taken by no block" if lost else f"all {kv_len} tokens are taken"
    axis.set_title(f"{title}: {said}" if title else said, loc="left", fontsize=11)
    axis.set(xlim=(-0.3, row + 0.3), ylim=(lines, 0), xticks=[])
    axis.set_yticks([n + 0.5 for n in range(lines)], [f"from {n * row}" for n in range(lines)], fontsize=8)
    axis.set_xlabel("tokens, the newest last (a number: that block begins here)", fontsize=9)
    for side in axis.spines.values():
        side.set_visible(False)
    axis.tick_params(length=0)
    return finish(picture)


def cache_reads(reads, n_kv_heads=4, head_dim=32, tokens=32, mine=1):
    """A piece of a cache as a table, a row a token, and the elements that one load of a warp asks for in it.

    reads  {title: [(token, channel), ...]}: the lanes' elements, in kv head `mine`
    """
    picture, axes = figure(8, 3.6, columns=len(reads))
    for axis, (title, elements) in zip(np.atleast_1d(axes), reads.items()):
        for g in range(n_kv_heads):
            axis.add_patch(_box(g * head_dim, 0, head_dim, tokens, "#E8F2FA" if g == mine else "#F7F7F7"))
        for t, d in elements:
            axis.add_patch(_box(mine * head_dim + d, t, 1, 1, ORANGE, 0.3))
        axis.set(xlim=(-0.5, n_kv_heads * head_dim + 0.5), ylim=(tokens + 0.5, -0.5), ylabel="token")
        middles = [(g + 0.5) * head_dim for g in range(n_kv_heads)]
        axis.set_xticks(middles, [f"KV head {g}" for g in range(n_kv_heads)], fontsize=10)
        axis.tick_params(length=0)
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel(f"{head_dim} channels of each, side by side in memory", fontsize=9)
    return finish(picture)


def slices_meet(slices=8, lanes=32):
    """A block of channels by time slices: each warp has its own tokens, and the sums of a channel meet at the end."""
    picture, axis = figure(8, 3.9)
    for s in range(slices):
        axis.text(-0.7, s + 0.5, f"warp {s}: tokens {s}, {s + slices}, {s + 2 * slices}, …", ha="right", va="center")
        for lane in range(lanes):
            axis.add_patch(_box(lane, s + 0.08, 1, 0.84, SKY if lane == 5 else "#E8F2FA", 0.4))
    axis.annotate("", (5.5, slices + 1.6), (5.5, slices + 0.1), arrowprops={"arrowstyle": "->", "color": BLUE})
    axis.text(7, slices + 0.9, f"barrier; warp 0 adds the {slices} sums of each channel, in order", va="center")
    for lane in range(lanes):
        axis.add_patch(_box(lane, slices + 1.7, 1, 0.84, BLUE if lane == 5 else "#BBDDF2", 0.4))
    axis.text(-0.7, slices + 2.1, "out: one store", ha="right", va="center")
    axis.text(0, -0.6, f"lane = channel, 0 to {lanes - 1}", va="center")
    axis.set(xlim=(-15, lanes + 0.5), ylim=(slices + 2.8, -1.2))
    axis.axis("off")
    return finish(picture)


def online_softmax(scores, values, step):
    """Online softmax after `step` tokens: the scores, their running maximum, and what each token weighs by then.

    scores  whole numbers, powers of 2 as weights;  values  one number for each token
    """
    scores, values = np.asarray(scores, float), np.asarray(values, float)
    n, seen = len(scores), np.arange(len(scores)) < step
    picture, (top, low) = figure(8, 4.6, rows=2)
    colours = [GREEN if t == step - 1 else SKY if t < step else "#E4E4E4" for t in range(n)]
    top.bar(range(n), scores, color=colours, width=0.7)
    highest = np.maximum.accumulate(scores)[:step]
    if step:
        top.step(np.arange(-1, step) + 0.5, [highest[0], *highest], where="pre", color=RED, linewidth=2)
    top.axhline(0, color=BLACK, linewidth=0.8)
    top.set(ylabel="score", xticks=range(n), ylim=(min(0, scores.min()) - 0.5, scores.max() + 1))
    m = highest[-1] if step else -np.inf
    before = highest[-2] if step > 1 else -np.inf
    weights = np.where(seen, 2.0 ** (scores - m), 0) if step else np.zeros(n)
    low.bar(range(n), weights, color=colours, width=0.7)
    for t in np.flatnonzero(seen):
        low.annotate(f"{weights[t]:.3g}", (t, weights[t]), ha="center", va="bottom", fontsize=8)
    low.set(ylabel="weight, as of now", xticks=range(n), ylim=(0, 1.25), xlabel="token (red: the maximum so far)")
    if step:
        total, out = weights.sum(), (weights * values).sum() / weights.sum()
        correction = 2.0 ** (before - m)
        said = f"after token {step - 1}: m = {m:g}, correction = {correction:.3g}, total = {total:.4g}, out = {out:.4g}"
    else:
        said = "before the first token: m = -infinity, total = 0"
    top.set_title(said, loc="left", fontsize=11)
    return finish(picture)


def merge_tree(levels):
    """Partial results that become one: a row of boxes for each level, the first at the bottom, lines to what they go
    into.

    levels  {name: [what a box says, ...]}; the boxes of a level are dealt out evenly to those of the next
    """
    picture, axis = figure(8, 0.4 + 0.95 * len(levels))
    wide = max(map(len, levels.values()))
    places = [[wide * (i + 0.5) / len(boxes) for i in range(len(boxes))] for boxes in levels.values()]
    for level, (name, boxes) in enumerate(levels.items()):
        width = min(0.92 * wide / len(boxes), 0.3 * wide)
        for i, (x, text) in enumerate(zip(places[level], boxes)):
            if level + 1 < len(levels):
                up = places[level + 1][i * len(places[level + 1]) // len(boxes)]
                axis.plot((x, up), (level + 0.25, level + 0.75), color="#999999", linewidth=1, zorder=0)
            empty = "-inf" in text
            colour = "#F2F2F2" if empty else ["#DCEBF6", "#F5CF87", "#8FD3BF"][level % 3]
            axis.add_patch(_box(x - width / 2, level - 0.25, width, 0.5, colour))
            axis.text(x, level, text, ha="center", va="center", fontsize=8 if wide < 13 else 6.5)
        axis.text(-0.02 * wide, level, name, ha="right", va="center", fontsize=10)
    axis.set(xlim=(-0.22 * wide, 1.01 * wide), ylim=(-0.45, len(levels) - 0.6))
    axis.axis("off")
    return finish(picture)


def waves(rows, multiprocessors=132, room=6):
    """How blocks fill a card: a column for each SM, with `room` places for blocks, wave after wave.

    rows  {title: how many blocks};  a place that stays empty while others work is grey
    """
    y, capacity = 0.0, room * multiprocessors
    many = sum(-(-blocks // capacity) for blocks in rows.values())
    picture, axis = figure(8, 0.55 + 0.32 * len(rows) + 0.085 * room * many)
    for title, blocks in rows.items():
        many = -(-blocks // capacity)
        axis.text(0, y - 0.6, f"{title}: {blocks:,} blocks, {many} wave{'s' * (many > 1)}", fontsize=10)
        for wave in range(many):
            here = min(capacity, blocks - wave * capacity)
            grid = np.arange(capacity).reshape(room, multiprocessors) < here
            axis.imshow(
                np.where(grid, wave % 2 + 1, 0),
                extent=(0, multiprocessors, y + room, y),
                cmap=_three("#EDEDED", BLUE, SKY),
                vmin=0,
                vmax=2,
                aspect="auto",
                interpolation="nearest",
            )
            axis.add_patch(_box(0, y, multiprocessors, room, "none"))
            y += room + 0.6
        y += 3.2
    axis.set(xlim=(-1, multiprocessors + 1), ylim=(y - 2.5, -3.2), yticks=[])
    axis.set_xlabel(f"{multiprocessors} SMs, room for {room} block{'s' * (room > 1)} on each")
    for side in axis.spines.values():
        side.set_visible(False)
    return finish(picture)


def _three(*colours):
    from matplotlib.colors import ListedColormap

    return ListedColormap(colours)


def operand_layout(lane=5, heads=4):
    """Which elements of a 16 × 16 matrix one lane holds: as results of two products, and as the operand of the next.

    Rows are query heads, of which only the first `heads` are there; columns are tokens.
    """
    g, q = lane // 4, lane % 4
    results, operand = {}, {}
    for n in range(2):
        for i in range(4):
            results[g + 8 * (i // 2), 8 * n + 2 * q + i % 2] = f"s{n}\n[{i}]"
    for register in range(4):
        for half in range(2):
            operand[g + 8 * (register % 2), 8 * (register // 2) + 2 * q + half] = f"w{register}\n.{'lh'[half]}"
    picture, axes = figure(9, 5.4, columns=2)
    titles = "scores, as two products leave them", "weights, as the next product takes them"
    for axis, title, mine in zip(axes, titles, (results, operand)):
        for row in range(16):
            for column in range(16):
                here = mine.get((row, column))
                axis.add_patch(_box(column, row, 1, 1, ORANGE if here else SKY if row < heads else "#F2F2F2", 0.4))
                if here:
                    axis.text(column + 0.5, row + 0.5, here, ha="center", va="center", fontsize=8, linespacing=0.9)
        axis.axvline(8, color=BLACK, linewidth=1.2)
        axis.set(xlim=(-0.2, 16.2), ylim=(16.2, -0.2), xlabel="token of the tile", xticks=[0.5, 8.5, 15.5])
        axis.set_xticklabels([0, 8, 15])
        axis.set_yticks([0.5, heads - 0.5, 8.5, 15.5], [0, heads - 1, 8, 15])
        axis.set_title(title, loc="left", fontsize=10)
        axis.tick_params(length=0)
    axes[0].set_ylabel(f"query head (of 16, {heads} are there)")
    picture.suptitle(f"lane {lane}", fontsize=11, x=0.02, ha="left")
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
            axis.add_patch(_box(place, at + 0.42, 1, 0.5, INSTRUCTIONS[name][1], 0.3))
    for at, title in enumerate(rows):
        axis.text(0, at + 0.34, title, fontsize=9.5, va="bottom")
    used = [name for name in INSTRUCTIONS if any(name in order for order in rows.values())]
    keys = [Patch(facecolor=INSTRUCTIONS[name][1], edgecolor="#999999", label=INSTRUCTIONS[name][0]) for name in used]
    axis.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=6, frameon=False, fontsize=9)
    axis.set(xlim=(-0.5, longest + 0.5), ylim=(len(rows), -0.1))
    axis.axis("off")
    return finish(picture)


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
            axis.add_patch(_box(left, at + 0.37, bits, 0.38, colour))
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
                frame = _box(left - 0.5, top - 0.5, min(wide, channels - left), min(high, tokens - top), "none", 1.1)
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
    above.add_patch(_box(0, 0, columns, rows, "#F7F7F7"))
    for at, (name, places) in enumerate(words.items()):
        bits = 32 / len(places)
        for i, (row, column) in enumerate(places):
            shade, left = shades[2 * row // rows], 32 - bits * (i + 1)
            above.add_patch(_box(column, row, 1, 1, shade, 0.4))
            below.add_patch(_box(left, at, bits, 0.62, shade))
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


def error_bars(errors, title, ylabel="error of the output, percent"):
    """Groups of bars side by side, logarithmic. errors {group: {bar: percent}}, the same bars in each group."""
    picture, axis = figure(8, 4)
    names = list(next(iter(errors.values())))
    wide = 0.8 / len(names)
    for n, name in enumerate(names):
        heights = [of[name] for of in errors.values()]
        at = np.arange(len(errors)) + (n - (len(names) - 1) / 2) * wide
        axis.bar(at, heights, 0.92 * wide, color=COLOURS[n], label=name)
        above = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "fontsize": 8}
        for x, height in zip(at, heights):
            axis.annotate(f"{height:.2g}", (x, height), **above)
    axis.set_xticks(range(len(errors)), errors)
    axis.set_yscale("log")
    found = [height for of in errors.values() for height in of.values()]
    low, high = min(found) / 3, 2 * max(found)
    if max(found) < 100 * min(found):  # powers of ten alone would be one or two
        axis.set_yticks([n * 10.0**p for p in range(-9, 10) for n in (1, 2, 5) if low <= n * 10.0**p <= high])
    axis.set_ylim(low, high)
    axis.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
    axis.yaxis.set_minor_formatter(lambda v, _: "")
    axis.set_ylabel(ylabel)
    axis.set_title(title, loc="left")
    axis.legend(frameon=False, fontsize=9.5, loc="upper left", bbox_to_anchor=(1, 1))
    return finish(picture)


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
        right.add_patch(_box(column * chunk, row * chunk, wide, high, colours[kind]))
    for kind, colour in colours.items():
        count = sum(one == kind for one in blocks.values())
        right.add_patch(_box(-9, -9, 0, 0, colour))
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
        axis.add_patch(_box(x, y, wide, 0.62, colour))
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
