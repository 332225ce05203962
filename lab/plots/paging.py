"""Attention over pages: what waits for a page's number, and two warpgroups that take turns at the tensor cores."""

from lab.plots.style import BLACK, figure, finish, rectangle

NUMBER, COPY, USE = "#F5CF87", "#BBDDF2", "#A9DFCB"
SCORES, VALUES, SOFTMAX = "#0072B2", "#56B4E9", "#F5CF87"


def table_walk(tiles=5, load=4, use=1, stages=3):
    """What a warp waits for as it walks along a request's tiles: without a table, with a number asked for in front of
    each copy, and with numbers that are there before. Lengths are made up; `stages` copies are on their way at a time.
    """
    ways = {"no table": 0, "a number, then its copy": load, "numbers a window ahead": 0}
    picture, axes = figure(9, 4.8, rows=3)
    for axis, (way, wait) in zip(axes, ways.items()):
        ends = _walk(axis, tiles, load, use, stages, wait)
        if way.startswith("numbers"):
            axis.add_patch(rectangle(-load, 0.1, load, 0.8, NUMBER, 0.4))
        axis.set_title(f"{way}: {tiles} tiles in {ends} of time", loc="left", fontsize=10.5)
        axis.set(xlim=(-load - 0.2, 26), ylim=(tiles + 0.1, -0.1), xticks=[])
        axis.set_yticks([n + 0.5 for n in range(tiles)], [f"tile {n}" for n in range(tiles)], fontsize=8)
        axis.tick_params(length=0)
        axis.spines["left"].set_visible(False)
    axes[-1].set_xlabel("time, in made-up units", fontsize=9)
    keys = [(NUMBER, "page numbers come"), (COPY, "keys and values come"), (USE, "they are used")]
    return _with_keys(picture, keys)


def _walk(axis, tiles, load, use, stages, wait):
    """Draw one way; a tile is asked for when the tile `stages` before it was used. Returns when the last is used."""
    done = []
    for tile in range(tiles):
        asked = done[tile - stages] if tile >= stages else 0
        there = asked + wait + load
        if wait:
            axis.add_patch(rectangle(asked, tile + 0.1, wait, 0.8, NUMBER, 0.4))
        axis.add_patch(rectangle(asked + wait, tile + 0.1, load, 0.8, COPY, 0.4))
        begins = max(there, done[-1] if done else 0)
        axis.add_patch(rectangle(begins, tile + 0.1, use, 0.8, USE, 0.4))
        done.append(begins + use)
    return done[-1]


def _with_keys(picture, keys):
    """A finished picture, with what its colours mean below it. keys: [(colour, name), ...]"""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, edgecolor="#999999", label=name) for colour, name in keys]
    picture.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return finish(picture)


def append_timeline(steps=4):
    """Two warpgroups over time, products on tensor cores and softmax on the others: one after another in a warpgroup
    alone, and interleaved. Lengths are made up, and alike for both products."""
    picture, axes = figure(9, 3.9, rows=2)
    for axis, (title, together) in zip(axes, {"one warpgroup, step by step": 0, "two, as in append.cu": 1}.items()):
        bands = ["tensor cores", "softmax"] if not together else ["tensor cores", "softmax of 0", "softmax of 1"]
        for band, what, begins, ends, said in append_schedule(steps, together):
            axis.add_patch(rectangle(begins, band + 0.1, ends - begins, 0.8, what, 0.4))
            colour = BLACK if what == SOFTMAX else "white"
            axis.text((begins + ends) / 2, band + 0.5, said, ha="center", va="center", fontsize=7.5, color=colour)
        axis.set_yticks([n + 0.5 for n in range(len(bands))], bands, fontsize=9)
        axis.set(xlim=(0, 4 * steps + 3.3), ylim=(len(bands) + 0.05, -0.05), xticks=[])
        axis.set_title(title, loc="left", fontsize=10.5)
        axis.tick_params(length=0)
        axis.spines["left"].set_visible(False)
    axes[-1].set_xlabel("time, in made-up units (before the dot: which warpgroup; behind it: which step)", fontsize=9)
    keys = [(SCORES, "scores: Q times keys"), (SOFTMAX, "softmax"), (VALUES, "weights times values")]
    return _with_keys(picture, keys)


def append_schedule(steps, together):
    """[(band, what, begins, ends, label)]: products take one unit each, a softmax 1 too (2 where two share the cores).

    Alone: scores, softmax, values, in turn. Together: a warpgroup asks for the next scores before the values of this
    step, so that its softmax runs while the other's products, and its own values, are multiplied.
    """
    found = []
    if not together:
        at = 0
        for step in range(steps):
            for band, what, last in ((0, SCORES, 1), (1, SOFTMAX, 1), (0, VALUES, 1)):
                found.append((band, what, at, at + last, f"0.{step}"))
                at += last
        return found
    cores, ready = 0.0, [0.0, 0.0]  # when the tensor cores are free; when each group's softmax is done
    for step in range(steps + 1):
        for group in (0, 1):
            scored = None
            if step < steps:  # the next scores stand in front of this step's values
                found.append((0, SCORES, cores, cores + 1, f"{group}.{step}"))
                cores += 1
                scored = cores
            if step:
                begins = max(cores, ready[group])
                found.append((0, VALUES, begins, begins + 1, f"{group}.{step - 1}"))
                cores = begins + 1
            if scored is not None:
                begins = max(scored, ready[group])
                found.append((1 + group, SOFTMAX, begins, begins + 2, f"{group}.{step}"))
                ready[group] = begins + 2
    return found
