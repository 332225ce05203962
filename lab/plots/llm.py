"""A whole language model: a token's way through it, positions as turns, dependent launches, the law of a step."""

from typing import NamedTuple

import numpy as np

from lab.plots.style import BLACK, BLUE, COLOURS, SKY, figure, finish, rectangle

WEIGHTS, CACHE, SMALL, PALE_RED = "#BBDDF2", "#F5CF87", "#EFEFEF", "#E8B4B8"


def model_step(n_layers=32):
    """One token's way through a model, by the steps of ref.llm: what lies on the residual stream, what beside it."""
    picture, axis = figure(10, 3.1)
    stream, under = 2.6, 1.1
    axis.plot((1.8, 16.7), (stream, stream), color=BLACK, linewidth=3, solid_capstyle="butt")
    axis.text(9.1, stream + 0.16, "the residual stream x", ha="center", fontsize=9)
    _box(axis, 0, stream - 0.4, 1.8, 0.8, "1: row of\nthe embedding", WEIGHTS)
    branches = [
        [(2.7, "2: norm,\nWq Wk Wv", WEIGHTS), (4.7, "3, 4: turn;\nto the cache", SMALL), (6.7, "5: attention", CACHE)],
        [(11.7, "7: norm,\ngate and up", WEIGHTS), (13.7, "8: W_down", WEIGHTS)],
    ]
    branches[0].append((8.7, "6: Wo", WEIGHTS))
    for boxes in branches:
        first, last = boxes[0][0], boxes[-1][0] + 1.6
        _arrow(axis, (first - 0.35, stream), (first, under), "arc3,rad=0.35")
        for at, says, colour in boxes:
            _box(axis, at, under - 0.45, 1.6, 0.9, says, colour)
        for (at, *_), (then, *_) in zip(boxes, boxes[1:]):
            _arrow(axis, (at + 1.6, under), (then, under))
        _arrow(axis, (last, under), (last + 0.45, stream - 0.12), "arc3,rad=0.35")
        axis.text(last + 0.45, stream, "+", ha="center", va="center", fontsize=13, color="white", weight="bold",
                  bbox={"boxstyle": "circle,pad=0.12", "facecolor": BLACK, "edgecolor": "none"})  # fmt: skip
    _box(axis, 4.35, -0.85, 4.4, 0.65, "keys and values of all tokens so far", CACHE)
    _arrow(axis, (5.5, under - 0.45), (5.5, -0.2))
    _arrow(axis, (7.5, -0.2), (7.5, under - 0.45))
    frame = rectangle(2.1, -1.05, 14.2, 4.05, "none", 1.2)
    frame.set_linestyle("--")
    axis.add_patch(frame)
    axis.text(16.2, -0.95, f"{n_layers} layers, one after another", ha="right", va="bottom", fontsize=9)
    _box(axis, 16.7, stream - 0.4, 1.5, 0.8, "9: norm,\nhead", WEIGHTS)
    _arrow(axis, (17.45, stream - 0.4), (17.45, under + 0.4))
    _box(axis, 16.7, under - 0.4, 1.5, 0.8, "logits:\nchoose", SMALL)
    axis.annotate(
        "the next token", xy=(0.85, stream + 0.42), xytext=(17.45, 3.75), fontsize=9, ha="right", va="center",
        arrowprops={"arrowstyle": "->", "color": "#555555", "connectionstyle": "angle,angleA=180,angleB=90,rad=6"},
    )  # fmt: skip
    axis.plot((17.5, 18.6, 18.6, 18.2), (3.75, 3.75, under, under), color="#555555", linewidth=1)
    axis.set(xlim=(-0.1, 18.8), ylim=(-1.15, 4.05))
    axis.axis("off")
    return finish(picture)


def _box(axis, x, y, width, height, says, colour):
    axis.add_patch(rectangle(x, y, width, height, colour))
    axis.text(x + width / 2, y + height / 2, says, ha="center", va="center", fontsize=8.5)


def _arrow(axis, begin, end, style="arc3"):
    look = {"arrowstyle": "->", "color": "#555555", "connectionstyle": style, "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", xy=end, xytext=begin, arrowprops=look)


def rope_hands(frequencies, positions=8):
    """Each pair of numbers as a hand that turns by its frequency (radians a token): a row a pair, a column a token."""
    many = len(frequencies)
    picture, axis = figure(0.95 * positions + 1.6, 0.95 * many + 0.5)
    for row, frequency in enumerate(frequencies):
        for position in range(positions):
            angle = position * frequency
            axis.add_patch(_circle(position, row))
            tip = position + 0.4 * np.cos(angle), row - 0.4 * np.sin(angle)  # the y axis points down
            look = {"arrowstyle": "-|>", "color": BLUE, "shrinkA": 0, "shrinkB": 0, "linewidth": 1.8}
            axis.annotate("", xy=tip, xytext=(position, row), arrowprops=look)
    axis.set_yticks(range(many), [f"pair {row}: {f:.3g} a token" for row, f in enumerate(frequencies)])
    axis.set_xticks(range(positions))
    axis.set_xlabel("position of the token")
    axis.set(xlim=(-0.55, positions - 0.45), ylim=(many - 0.45, -0.55), aspect="equal")
    for side in axis.spines.values():
        side.set_visible(False)
    axis.tick_params(length=0)
    return finish(picture)


def _circle(x, y):
    from matplotlib.patches import Circle

    return Circle((x, y), 0.42, facecolor="white", edgecolor="#AAAAAA", linewidth=0.8)


RAMP, DRAIN, RING = 1.0, 2.0, 1.5  # µs, made up: until bytes come; while the last blocks end; of bytes kept ready


class Run(NamedTuple):
    """A launch over time: it begins; from `coming` on weights come, from `free` on it may read x; and it ends."""

    name: str
    begin: float
    coming: float
    free: float
    end: float


def dependent_runs(kernels, pdl):
    """When each launch of {name: µs of reading} begins and ends: behind the one ahead, or while that one drains."""
    runs, ahead = [], 0.0
    for name, work in kernels.items():
        begin = max(0.0, ahead - DRAIN) if pdl else ahead
        coming = begin + RAMP
        free = max(coming, ahead)
        ahead = free + max(work - min(free - coming, RING), 0) + DRAIN
        runs.append(Run(name, begin, coming, free, ahead))
    return runs


def dependent_launches(kernels):
    """The same launches one behind the other, and as dependent ones (PDL). kernels  {name: µs of reading}"""
    picture, axes = figure(8, 1.1 + 0.62 * len(kernels), rows=2)
    both = {"one behind the other": dependent_runs(kernels, False), "dependent (PDL)": dependent_runs(kernels, True)}
    longest = max(runs[-1].end for runs in both.values())
    for axis, (title, runs) in zip(axes, both.items()):
        for row, run in enumerate(runs):
            parts = [
                (run.begin, run.coming, WEIGHTS, "asks for weights: none have come yet"),
                (run.coming, run.free, PALE_RED, "weights come; waits for the launch ahead"),
                (run.free, run.end - DRAIN, BLUE, "reads x, multiplies"),
                (run.end - DRAIN, run.end, SKY, "the last blocks end"),
            ]
            for begin, end, colour, says in parts:
                axis.barh(row, end - begin, left=begin, height=0.66, color=colour, label="" if row else says)
        axis.axvline(runs[-1].end, color=BLACK, linewidth=1, linestyle=":")
        axis.text(runs[-1].end + 0.2, len(runs) - 1, f"{runs[-1].end:.3g} µs", va="center", fontsize=10)
        axis.set_yticks(range(len(runs)), kernels)
        axis.set(ylim=(len(runs) - 0.5, -0.6), xlim=(0, 1.1 * longest))
        axis.set_title(title, loc="left", fontsize=11)
    axes[1].set_xlabel("µs (schematic)")
    handles, labels = axes[1].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return finish(picture)


def law(series, title, xlabel="launches of a step"):
    """What a step takes beyond its bytes, over its launches or calls, and the line of each series.

    series  {name: ([launches, ...], [µs beyond the bytes, ...], µs of one)}
    """
    picture, axis = figure(8, 4)
    most = 1.05 * max(max(launches) for launches, *_ in series.values())
    for n, (name, (launches, beyond, price)) in enumerate(series.items()):
        colour = COLOURS[n % len(COLOURS)]
        axis.plot(launches, beyond, "os^D"[n % 4], color=colour, markersize=6)
        axis.plot((0, most), (0, price * most), color=colour, linewidth=1.6, label=f"{name}: {price:.3g} µs each")
    axis.set(xlim=(0, most), xlabel=xlabel, ylabel="µs beyond bytes / rate")
    axis.set_ylim(bottom=min(0, *(min(beyond) for _, beyond, _ in series.values())))
    axis.set_title(title, loc="left")
    axis.grid(True, alpha=0.25)
    axis.legend(frameon=False)
    return finish(picture)


def rates(series, roof, title):
    """Tokens a second over the bytes that a token reads, both logarithmic, under the line of the roof.

    series  {name: {point: (bytes, tokens a second)}};  roof  bytes/s
    """
    picture, axis = figure(8, 4.6)
    every = [bytes_ for points in series.values() for bytes_, _ in points.values()]
    x = np.geomspace(0.7 * min(every), 1.4 * max(every), 50)
    axis.plot(x / 1e9, roof / x, color=BLACK, linestyle="--", linewidth=1.2, label=f"{roof / 1e12:.2f} TB/s")
    for n, (name, points) in enumerate(series.items()):
        at = np.array([*points.values()])
        axis.plot(at[:, 0] / 1e9, at[:, 1], "os^Dv*X"[n % 7], color=COLOURS[n % len(COLOURS)], label=name, markersize=7)
    for point in dict.fromkeys(point for points in series.values() for point in points):
        bytes_, least = min((of[point] for of in series.values() if point in of), key=lambda found: found[1])
        look = {"xytext": (0, -14), "textcoords": "offset points", "ha": "center", "fontsize": 8.5}
        axis.annotate(point, (bytes_ / 1e9, least), **look)
    axis.set(xscale="log", yscale="log", xlabel="GB that a token reads", ylabel="tokens a second")
    axis.set_ylim(bottom=0.7 * min(rate for points in series.values() for _, rate in points.values()))
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_formatter(lambda v, _: f"{v:,g}")
        one.set_minor_formatter(lambda v, _: f"{v:,g}" if f"{v:e}"[0] in "25" else "")
    axis.set_title(title, loc="left")
    axis.grid(True, which="both", alpha=0.2)
    axis.legend(frameon=False, fontsize=9.5)
    return finish(picture)


def candidates(rows, title):
    """What the next token is drawn from: a line of tokens for each way, each as long as its probability.

    rows  {way: [(token's text, probability), ...]}, the likeliest first; what is left over is grey
    """
    picture, axis = figure(8.4, 0.9 + 0.55 * len(rows))
    for row, (_, tokens) in enumerate(rows.items()):
        left = 0.0
        for n, (text, probability) in enumerate(tokens):
            if not probability:
                continue
            axis.add_patch(rectangle(left, row - 0.33, probability, 0.66, (WEIGHTS, CACHE)[n % 2]))
            if probability > 0.016 * (len(text) + 1):
                axis.text(left + probability / 2, row, text, ha="center", va="center", fontsize=9, family="monospace")
            left += probability
        if left < 0.999:
            axis.add_patch(rectangle(left, row - 0.33, 1 - left, 0.66, SMALL))
    axis.set_yticks(range(len(rows)), rows)
    axis.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5), xlabel="u, a number between 0 and 1: the token that lies there")
    axis.set_title(title, loc="left", fontsize=11)
    for side in axis.spines.values():
        side.set_visible(False)
    return finish(picture)


class Load(NamedTuple):
    """What a block asks memory for: a task of a phase, from `begin` to `end`; used until `done`."""

    block: int
    phase: int
    begin: float
    end: float
    done: float


def task_schedule(phases, blocks=8, slots=4, apart=False):
    """Who loads which task when: [Load, ...]. Lengths are made up; a task takes about 1.

    phases  {name: tasks}: a task of one may be used only when all of the one before are done, and WAY later
    slots   tasks that a block may have loaded or be loading
    apart   each phase is a launch: nothing is asked for before the one before has ended
    """
    speed = 1 + 0.12 * np.sin(2.4 * np.arange(blocks))  # of each block: no two are alike
    loads, ready = [], 0.0
    own = [[] for _ in range(blocks)]
    for phase, tasks in enumerate(phases.values()):
        begun = len(loads)
        for _ in range(tasks):
            free = [max(_last(mine, 1).end, _last(mine, slots).done, ready if apart else 0.0) for mine in own]
            block = int(np.argmin(free))
            end = free[block] + speed[block]
            done = max(end, ready, _last(own[block], 1).done) + USE
            own[block].append(Load(block, phase, free[block], end, done))
            loads.append(own[block][-1])
        ready = max(load.done for load in loads[begun:]) + (LAUNCH if apart else WAY)
    return loads


WAY, LAUNCH, USE = 1.2, 2.0, 0.1  # until results are seen by others; until the next launch loads; to use a task
NEVER = Load(0, 0, 0.0, 0.0, 0.0)


def _last(loads, back):
    return loads[-back] if len(loads) >= back else NEVER


def task_line(phases, blocks=8, slots=4):
    """The phases of a layer as launches, and as one line of tasks: what each block loads, over time."""
    picture, axes = figure(9, 5, rows=2)
    both = {"a launch for each phase": True, f"one line of tasks, {slots} slot{'s' * (slots > 1)} a block": False}
    found = {title: task_schedule(phases, blocks, slots, apart) for title, apart in both.items()}
    longest = max(load.done for loads in found.values() for load in loads)
    for axis, (title, loads) in zip(axes, found.items()):
        for load in loads:
            colour = COLOURS[load.phase % len(COLOURS)]
            look = {"height": 0.8, "color": colour, "edgecolor": "white", "linewidth": 0.5}
            axis.barh(load.block, load.end - load.begin, left=load.begin, **look)
        last = max(load.done for load in loads)
        busy = sum(load.end - load.begin for load in loads) / (blocks * last)
        axis.set_title(f"{title}: memory is busy {busy:.0%} of the time", loc="left", fontsize=11)
        axis.axvline(last, color=BLACK, linewidth=1, linestyle=":")
        axis.set(xlim=(0, 1.02 * longest), ylim=(blocks - 0.4, -0.6), ylabel="block")
    axes[1].set_xlabel("time (schematic); a colour is a phase, white: nothing is asked for")
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS[n % len(COLOURS)], label=name) for n, name in enumerate(phases)]
    picture.legend(handles=handles, loc="outside lower center", ncols=len(phases), frameon=False, fontsize=9)
    return finish(picture)
