"""Launches: which operations share one, what passes between two, and how blocks fill a card."""

import numpy as np

from lab.plots.style import BLACK, BLUE, SKY, figure, finish, rectangle


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
                axis.add_patch(
                    rectangle(left + 0.07, at + 0.1, wide - 0.14, 0.6, SKY if name in heavy else "#F5CF87", 0)
                )
                axis.text(left + wide / 2, at + 0.42, name, ha="center", va="center", fontsize=8)
                left += wide
            frame = rectangle(begin, at + 0.02, left - begin, 0.76, "none", 1.3)
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
            axis.add_patch(rectangle(0, y, multiprocessors, room, "none"))
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
