"""Memory: which addresses loops and warps touch, what a register block saves, and how many loads are on their way."""

import numpy as np

from lab.plots.style import BLACK, BLUE, COLOURS, ORANGE, RED, SKY, figure, finish, rectangle


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
                axis.add_patch(rectangle(box * line - 0.5, r - 0.5, line, 1, colour))
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
    from simt import sectors_per_warp

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
                axis.add_patch(rectangle(32 * box, at, 32, 1, "#FFE7B3" if 4 * line + box in touched else "#F2F2F2"))
        for a, who in lanes.items():
            x, at = a % 128, rows.index(a // 128)
            axis.add_patch(rectangle(x, at + 0.12, size, 0.76, SKY))
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
        axis.add_patch(rectangle(-2.9, r, 2, 1, ORANGE))
        axis.text(-1.9, r + 0.5, f"a{r}", ha="center", va="center")
        for v in range(columns // lanes):
            axis.add_patch(rectangle(v * lanes, r, lanes, 1, "#D6E8F5"))
            axis.text((v + 0.5) * lanes, r + 0.5, f"acc[{r}][{v}]", ha="center", va="center")
    for v in range(columns // lanes):
        axis.add_patch(rectangle(v * lanes, -2.4, lanes, 1, SKY))
        axis.text((v + 0.5) * lanes, -1.9, f"b{v}", ha="center", va="center")
    axis.text(-1.9, rows + 0.7, f"{rows} numbers\nof A", ha="center", va="top")
    axis.text(columns + 0.4, -1.9, f"{columns // lanes} vectors of B, {lanes} floats each", va="center")
    steps = "".join(f"\nacc[i][{v}] += ai · b{v}" for v in range(columns // lanes))
    text = f"{rows * columns // lanes} registers hold\na block of C:{steps}"
    axis.text(columns + 0.4, rows / 2, text, va="center")
    axis.set(xlim=(-4.5, columns + 10), ylim=(rows + 2.4, -2.8))
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
                axis.barh(word, 1, left=now + turn + latency, height=0.7, color=ORANGE)
            now += latency + len(here)  # the last of the batch has been used
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
