"""Schedules: which block has which tiles of the cache or rows of W, and what the warps of a block do over time."""

from typing import NamedTuple

from lab.plots.style import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, figure, finish, rectangle

SHADES = ["#BBDDF2", "#F5CF87", "#A9DFCB"]


def tile_shares(rows, shares):
    """Which block has which tiles of which row, and which segments that makes: a line of boxes for each row.

    rows  tiles of each row, one row after another on the line that is cut;  shares  how many blocks share them
    """
    total, wide = sum(rows), max(*rows, 1)
    each, rest = divmod(total, shares)
    begins = [share * each + min(share, rest) for share in range(shares + 1)]
    owners = [share for share in range(shares) for _ in range(begins[share], begins[share + 1])]
    picture, axis = figure(8, 0.8 + 0.62 * len(rows))
    at = 0
    for row, tiles in enumerate(rows):
        mine = owners[at : at + tiles]
        for tile, block in enumerate(mine):
            axis.add_patch(rectangle(tile, row, 1, 0.5, SHADES[block % 3], 0.5))
            axis.text(tile + 0.5, row + 0.25, block, ha="center", va="center", fontsize=8)
        for block in sorted(set(mine)):
            first, count = mine.index(block), mine.count(block)
            axis.plot((first + 0.08, first + count - 0.08), (row + 0.6, row + 0.6), color="#555555", linewidth=1.2)
            axis.text(first + count / 2, row + 0.76, block + row, ha="center", va="center", fontsize=8)
        at += tiles
    some = f"{each} or {each + 1}" if rest else f"{each}"
    axis.set_title(f"{total} tiles, {shares} blocks with {some} of them", loc="left", fontsize=11)
    axis.set(xlim=(-0.2, wide + 0.2), ylim=(len(rows) - 0.05, -0.1), xticks=[0.5, wide - 0.5])
    axis.set_xticklabels([0, wide - 1])
    axis.set_yticks([row + 0.25 for row in range(len(rows))], [f"row {row}" for row in range(len(rows))])
    axis.set_xlabel("tile of the row (in a box: its block; under a line: the segment's number)", fontsize=9)
    for side in axis.spines.values():
        side.set_visible(False)
    axis.tick_params(length=0)
    return finish(picture)


# How long each step of `decode` is drawn. Only their order follows from the kernel; a card has other proportions.
STEPS = {"ask": 0.5, "queries": 1.5, "scores": 1.0, "weights": 0.8, "values": 1.0, "merge, write": 1.6}
LATENCY, APART = 8.0, 0.6  # from asking to arrival, at least; between two tiles that come to a block, at least
BEFORE = 5.0  # when the kernel before ends
DRAWN = {  # what a warp does: its colour
    "ask": ORANGE, "wait for the kernel before": "#E8B4B8", "wait for a tile": "#E4E4E4", "queries": PURPLE,
    "scores": BLUE, "weights": GREEN, "values": SKY, "wait for the other warps": "#F6F6F6", "merge, write": RED,
}  # fmt: skip


class Step(NamedTuple):
    """What a warp does from `begin` to `end`, with which tile of the share, if with one."""

    warp: int
    what: str
    begin: float
    end: float
    tile: int | None = None


class Copy(NamedTuple):
    """A tile in a slot of a warp's ring: asked for, there, and free again once it has been used."""

    warp: int
    slot: int
    tile: int
    asked: float
    there: float
    free: float


def decode_schedule(segments, stages, warps=4, side=2, pdl=True):
    """What the warps of a block of `decode` do over time, in the kernel's order: ([Step, ...], [Copy, ...]).

    segments  tiles of each segment of the block's share; all but the last end with the newest tile of their row
    stages    tiles in a warp's ring;  side  kv heads side by side: the other warps divide a head's tiles
    """
    block = _Block(segments, stages, warps // side, pdl)
    running = {warp: block.warp(warp, warp // side) for warp in range(warps)}
    clocks = {warp: next(steps) for warp, steps in running.items()}
    met = {}
    while running:
        warp = min(running.keys() - met.keys(), key=clocks.get)  # who asks first is served first
        try:
            clocks[warp] = running[warp].send(None)
        except StopIteration:
            del running[warp]
            continue
        if block.at_the_barrier.pop(warp, False):
            met[warp] = clocks[warp]
        if met and len(met) == len(running):
            clocks = {w: running[w].send(max(met.values())) for w in met}
            met = {}
    return block.steps, block.copies


class _Block:
    def __init__(self, segments, stages, slices, pdl):
        self.segments, self.stages, self.slices, self.pdl = segments, stages, slices, pdl
        self.steps, self.copies, self.at_the_barrier, self.last_there = [], [], {}, 0.0

    def warp(self, warp, first):
        """The steps of a warp, which yields the time before each tile that it asks for, and at a barrier."""
        tiles = iter(range(first, sum(self.segments), self.slices))
        newest = {sum(self.segments[: n + 1]) - 1 for n in range(len(self.segments) - 1)}
        now, ring = 0.0, []  # (tile, slot, asked, there), the oldest first

        def does(what, end, tile=None):
            nonlocal now
            if end > now:
                self.steps.append(Step(warp, what, now, end, tile))
                now = end

        def wait_for_the_kernel_before():
            does("wait for the kernel before", BEFORE)

        def ask(slot):
            tile = next(tiles, None)
            if tile is None:
                return
            if tile in newest:
                wait_for_the_kernel_before()
            yield now
            does("ask", now + STEPS["ask"], tile)
            self.last_there = max(now + LATENCY, self.last_there + APART)
            ring.append((tile, slot, now, self.last_there))

        yield now
        if not self.pdl:
            wait_for_the_kernel_before()
        for slot in range(self.stages):
            yield from ask(slot)
        wait_for_the_kernel_before()
        end = 0
        for count in self.segments:
            end += count
            does("queries", now + STEPS["queries"])
            while ring and ring[0][0] < end:
                tile, slot, asked, there = ring.pop(0)
                does("wait for a tile", there, tile)
                for what in ("scores", "weights", "values"):
                    does(what, now + STEPS[what], tile)
                self.copies.append(Copy(warp, slot, tile, asked, there, now))
                yield from ask(slot)
            if self.slices > 1:
                self.at_the_barrier[warp] = True
                together = yield now
                does("wait for the other warps", together)
                yield now
            does("merge, write", now + STEPS["merge, write"])
        yield now


def decode_timeline(segments=(6, 4), stages=3, warps=4, side=2, pdl=True, until=None):
    """What the warps of a block of `decode` do over time, and over it the slots of each warp's ring. A schematic.

    segments, stages, warps, side, pdl  as in `decode_schedule`;  until  where the time axis ends
    """
    steps, copies = decode_schedule(segments, stages, warps, side, pdl)
    end = max(step.end for step in steps)
    slot_high, gap = 0.24, 0.5
    high = stages * slot_high + 0.55 + gap
    picture, axis = figure(9, 1.7 + 0.42 * warps * high)
    for copy in copies:
        top = copy.warp * high + copy.slot * slot_high
        axis.add_patch(rectangle(copy.asked, top, copy.there - copy.asked, slot_high, "#FBEBC8", 0.4))
        axis.add_patch(rectangle(copy.there, top, copy.free - copy.there, slot_high, "#F0BE5A", 0.4))
        axis.text(copy.asked + 0.2, top + slot_high / 2, copy.tile, va="center", fontsize=6)
    for step in steps:
        top = step.warp * high + stages * slot_high + 0.04
        axis.add_patch(rectangle(step.begin, top, step.end - step.begin, 0.5, DRAWN[step.what], 0.4))
        if step.what == "weights":
            middle = (step.begin + step.end) / 2
            axis.text(middle, top + 0.26, step.tile, ha="center", va="center", fontsize=7, color="white")
    axis.plot((BEFORE, BEFORE), (-0.1, warps * high - gap), color="#B04A55", linewidth=1, linestyle=":")
    axis.text(BEFORE, -0.12, " the kernel before ends", fontsize=8, va="bottom", color="#B04A55")
    _end_of_segments(axis, steps, len(segments), warps * high)
    names = [f"warp {w}\nKV head {w % side}" for w in range(warps)]
    axis.set_yticks([w * high + (high - gap) / 2 for w in range(warps)], names, fontsize=9)
    axis.set(xlim=(0, until or end + 0.5), ylim=(warps * high - gap + 0.15, -0.7), xticks=[])
    axis.set_xlabel("time, not to scale: a schematic made from the order of the kernel's steps", fontsize=9)
    axis.tick_params(length=0)
    axis.spines["left"].set_visible(False)
    _key(picture, {step.what for step in steps})
    return finish(picture)


def _end_of_segments(axis, steps, segments, low):
    """A line where all warps have come to the end of a segment; without a barrier each warp has an end of its own."""
    met = sorted({step.begin for step in steps if step.what == "merge, write"})
    if len(met) == segments:
        for number, when in enumerate(met):
            axis.plot((when, when), (-0.1, low), color=RED, linewidth=1)
            axis.text(when, -0.12, f"end of segment {number} ", fontsize=8, va="bottom", ha="right", color=RED)


def _key(picture, used):
    from matplotlib.patches import Patch

    boxes = [Patch(facecolor="#FBEBC8", edgecolor="#999999", label="slot of the ring: on its way")]
    boxes += [Patch(facecolor="#F0BE5A", edgecolor="#999999", label="slot: there")]
    boxes += [Patch(facecolor=DRAWN[what], edgecolor="#999999", label=what) for what in DRAWN if what in used]
    picture.legend(handles=boxes, loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def row_stream(groups=11, rows=4, blocks=3, stages=3, threads=8, block=1, thread=5):
    """Rows of W stream through a block: its groups of rows, the ring's slots, and a thread's part of both and of x.

    A group has `rows` rows, and every blocks-th is the block's. A column of words is a thread's, here as in the ring.
    """
    mine = [group for group in range(groups) if group % blocks == block]
    high, wide, ring = 0.16, 0.62, 6.6  # of a row; of a thread's words; where the ring begins
    picture, axis = figure(9, 0.5 + 0.4 * groups)

    def row_of_words(x, y, width, height, colour, strong):
        for t in range(threads):
            axis.add_patch(rectangle(x + t * width, y, width, height, strong if t == thread else colour, 0.4))

    for group in range(groups):
        top = group * (rows * high + 0.14)
        for row in range(rows):
            colours = (SKY, ORANGE) if group in mine else ("#EEEEEE", "#DDDDDD")
            row_of_words(0, top + row * high, 0.45, high, *colours)
        said = f"group {group}: block {group % blocks}"
        axis.text(-0.12, top + rows * high / 2, said, ha="right", va="center", fontsize=8.5)
    bottom = groups * (rows * high + 0.14)
    for slot in range(stages):
        top = 1.2 + slot * (rows * high + 0.5)
        for row in range(rows):
            row_of_words(ring, top + row * high, wide, high, SKY, ORANGE)
        said = ", then ".join(str(group) for group in mine[slot::stages])
        axis.text(ring - 0.12, top + rows * high / 2, f"slot {slot}", ha="right", va="center", fontsize=8.5)
        axis.text(ring + threads * wide + 0.12, top + rows * high / 2, f"group {said}", va="center", fontsize=8.5)
    place = 1.2 + stages * (rows * high + 0.5) + 0.6
    row_of_words(ring, place, wide, 0.4, "#F5CF87", ORANGE)
    for t in range(threads):
        axis.text(ring + (t + 0.5) * wide, 1.1, t, ha="center", va="bottom", fontsize=8.5)
        axis.text(ring + (t + 0.5) * wide, place + 0.2, "x·g", ha="center", va="center", fontsize=7.5)
    above = {"ha": "center", "va": "bottom", "fontsize": 9.5}
    axis.text(0.45 * threads / 2, -0.15, f"W, in groups of {rows} rows", **above)
    axis.text(ring + threads * wide / 2, 0.75, f"block {block}'s ring in shared memory, by threads", **above)
    axis.text(ring + threads * wide / 2, place - 0.1, "in their registers, for all groups", **above)
    half = 1.2 + 1.5 * (rows * high + 0.5) - 0.25
    arrow = {"arrowstyle": "->", "color": BLUE, "linewidth": 1.4}
    axis.annotate("", (ring - 0.85, half), (0.45 * threads + 0.15, half), arrowprops=arrow)
    axis.text((0.45 * threads + ring - 0.7) / 2, half - 0.08, "cp.async", **above)
    axis.set(xlim=(-2.2, ring + threads * wide + 1.9), ylim=(max(bottom, place + 0.5), -0.7))
    axis.axis("off")
    return finish(picture)
