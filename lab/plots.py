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
    for at, (share, f) in enumerate(zip(shares, figures)):
        axis.annotate(
            f.rate_text,
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
