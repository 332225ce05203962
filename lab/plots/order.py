"""Order between blocks: where the new values are, what leads from one block's stores to another one's loads, and who
works when."""

from lab.plots.style import BLACK, BLUE, GREEN, ORANGE, RED, SKY, figure, finish, rectangle

PIECES = "barrier before the flag", "release", "acquire", "barrier after the wait"  # of a handover, in their order


def old_and_new(rows):
    """Who has which value of a state and of its flag, at one moment: a line for each row.

    rows  {title: {place: (state, flag)}}; a value is "new", "old", or a text with one of these words
    """
    picture, axes = figure(8, 1.35 * len(rows) + 0.2, rows=len(rows))
    for axis, (title, places) in zip([axes] if len(rows) == 1 else axes, rows.items()):
        for n, (place, values) in enumerate(places.items()):
            axis.text(n + 0.4, 1.28, place, ha="center", fontsize=10)
            for line, (name, value) in enumerate(zip(("state", "flag"), values)):
                new = "new" in value
                axis.add_patch(rectangle(n, 0.62 - 0.56 * line, 0.8, 0.5, "#BFE5DA" if new else "#F6D2BE"))
                axis.text(n + 0.4, 0.87 - 0.56 * line, f"{name}: {value}", ha="center", va="center", fontsize=9)
        axis.set_title(title, loc="left", fontsize=11)
        axis.set(xlim=(-0.05, len(places) - 0.15), ylim=(-0.02, 1.6))
        axis.axis("off")
    return finish(picture)


def ordered(missing=None, threads=4):
    """The steps that lead from each to the next in a handover between two blocks: [(step, step)].

    A step is its name, or for what each thread does (name, thread). missing: one of PIECES, which then orders nothing
    """
    front, release, acquire, behind = (None if name == missing else name for name in PIECES)
    pairs = [(("store", t), front) for t in range(threads)] if front else []
    pairs += [(front or ("store", 0), release), (release, "set the flag"), ("set the flag", "see the flag")]
    pairs += [("see the flag", acquire), (acquire, behind or ("load", 0))]
    pairs += [(behind, ("load", t)) for t in range(threads)] if behind else []
    return [pair for pair in pairs if None not in pair]


def sees_new(missing=None, threads=4):
    """The threads whose load is bound to see what the same thread of the other block has stored."""
    pairs, found = ordered(missing, threads), []
    for thread in range(threads):
        reached = {("store", thread)}
        while more := {b for a, b in pairs if a in reached} - reached:
            reached |= more
        if ("load", thread) in reached:
            found.append(thread)
    return found


def handover(missing=None, threads=4):
    """How a block hands a state on to another, from top to bottom: whose loads are bound to see whose stores?

    missing  one of PIECES that is left out, or None;  threads  of each block
    """
    picture, axis = figure(8, 4.3)
    right, height, new = threads + 1, 0.6, sees_new(missing, threads)
    spans = {"barrier before the flag": (0, threads, 1), "release": (0, 1, 2), "set the flag": (0, 1, 3)}
    spans |= {"see the flag": (right, 1, 3), "acquire": (right, 1, 4), "barrier after the wait": (right, threads, 5)}
    for thread in range(threads):
        spans |= {("store", thread): (thread, 1, 0), ("load", thread): (right + thread, 1, 6)}
    for step, (x, wide, y) in spans.items():
        name, thread = step if isinstance(step, tuple) else (step, None)
        colour = "#F9E3B4" if name in ("release", "acquire") else "#DCEBF6" if thread is None else "#F2F2F2"
        if name == "load":
            colour, name = ("#BFE5DA", "load: new") if thread in new else ("#F6D2BE", "load: old?")
        box = rectangle(x + 0.04, y, wide - 0.08, height, "none" if step == missing else colour)
        if step == missing:
            box.set(edgecolor=RED, linestyle="--", linewidth=1.4)
        if name in ("release", "acquire"):
            axis.text(x + 1.08, y + height / 2, name, va="center", fontsize=9, style="italic", color="#666666")
            name = "fence"
        label = f"no {name}" if step == missing else name
        axis.add_patch(box)
        axis.text(
            x + wide / 2, y + height / 2, label, ha="center", va="center", fontsize=8 if wide == 1 else 9,
            color=RED if step == missing else BLACK,
        )  # fmt: skip
    for a, b in ordered(missing, threads):
        (x, wide, y), (to_x, to_wide, to_y) = spans[a], spans[b]
        if y == to_y:  # from block to block
            start, end = (x + wide, y + height / 2), (to_x, y + height / 2)
        else:
            middle = min(wide, to_wide) / 2 + max(x, to_x)
            start, end = (middle, y + height), (middle, to_y)
        colour = {"set the flag": ORANGE}.get(a, BLUE if x < right else GREEN)
        axis.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 1.3})
    for x, title in ((0, "block 0 writes"), (right, "block 1 reads")):
        axis.text(x + threads / 2, -0.55, title, ha="center", fontsize=11)
        for t in range(threads):
            axis.text(x + t + 0.5, -0.15, f"thread {t}", ha="center", fontsize=8, color="#666666")
    axis.set(xlim=(-0.05, right + threads + 0.05), ylim=(6.75, -1))
    axis.axis("off")
    return finish(picture)


def two_passes(segments=4, chunks=32, again=1 / 3):
    """A sequence walked by one program, and in two passes by a program for each segment.

    again  what a chunk costs in pass 1, where it costs 1 in pass 2
    """
    picture, axis = figure(8, 0.9 + 0.36 * (segments + 1))
    each = chunks / segments
    begins = again * each  # of pass 2: all segments have published
    axis.barh(0, chunks, color=SKY, edgecolor="white", height=0.7)
    axis.text(chunks / 2, 0, "all chunks in a row", ha="center", va="center", fontsize=9)
    for segment in range(segments):
        row = segment + 1
        if row < segments:  # nobody asks for the state behind the last
            axis.barh(row, begins, color=ORANGE, edgecolor="white", height=0.7)
            axis.text(begins / 2, row, "pass 1", ha="center", va="center", fontsize=8)
            axis.annotate(
                "", (begins, row + 0.95), (begins, row + 0.2), arrowprops={"arrowstyle": "->", "color": BLACK}
            )
        axis.barh(row, each, left=begins, color=SKY, edgecolor="white", height=0.7)
        axis.text(begins + each / 2, row, "pass 2", ha="center", va="center", fontsize=8)
    axis.set_yticks(range(segments + 1), ["one program", *(f"segment {n}" for n in range(segments))])
    axis.set(xlim=(0, chunks), xlabel="time, in chunks of pass 2; arrows: what is published, for all segments below")
    axis.invert_yaxis()
    return finish(picture)
