"""Plain charts: parts of a whole, curves, curves in panels, dots and bars in groups."""

import numpy as np

from lab.plots.style import BLACK, COLOURS, figure, finish


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


def stacked_rows(rows, unit, title):
    """Horizontal bars, each cut into named parts, and its sum behind it. rows  {bar: {part: amount}}."""
    picture, axis = figure(8, 1.5 + 0.5 * len(rows))
    names = list(dict.fromkeys(part for parts in rows.values() for part in parts))
    for at, parts in enumerate(rows.values()):
        left = 0
        for part, amount in parts.items():
            n = names.index(part)
            axis.barh(at, amount, left=left, height=0.64, color=COLOURS[n % len(COLOURS)])
            left += amount
        axis.annotate(f"{left:.4g}", (left, at), xytext=(5, 0), textcoords="offset points", va="center", fontsize=10)
    from matplotlib.patches import Patch

    axis.set_yticks(range(len(rows)), rows)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(0, 1.1 * axis.get_xlim()[1])
    axis.set_xlabel(unit)
    axis.set_title(title, loc="left")
    handles = [Patch(color=COLOURS[n % len(COLOURS)], label=name) for n, name in enumerate(names)]
    picture.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9.5)
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


def error_dots(errors, title, ylabel="error of the output, percent"):
    """Groups of dots side by side, logarithmic. errors {group: {dot: percent}}, the same dots in each group.

    Dots, because a bar has no length that means anything where there is no 0.
    """
    picture, axis = figure(8, 4)
    for n, (name, at, heights) in enumerate(_side_by_side(errors)):
        axis.plot(at, heights, "os^Dv"[n % 5], color=COLOURS[n], markersize=7, label=name)
        _say_heights(axis, at, heights, 6)
    axis.set_yscale("log")
    found = [height for of in errors.values() for height in of.values()]
    low, high = min(found) / 1.8, 2 * max(found)
    if max(found) < 100 * min(found):  # powers of ten alone would be one or two
        axis.set_yticks([n * 10.0**p for p in range(-9, 10) for n in (1, 2, 5) if low <= n * 10.0**p <= high])
    axis.set_ylim(low, high)
    axis.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
    axis.yaxis.set_minor_formatter(lambda v, _: "")
    axis.grid(True, axis="y", alpha=0.25)
    for edge in range(1, len(errors)):
        axis.axvline(edge - 0.5, color="#CCCCCC", linewidth=0.8)
    return _grouped(picture, axis, errors, title, ylabel)


def grouped_bars(values, title, ylabel):
    """Groups of bars side by side, from 0. values {group: {bar: number}}, the same bars in each group."""
    picture, axis = figure(8, 4)
    wide = 0.8 / len(next(iter(values.values())))
    for n, (name, at, heights) in enumerate(_side_by_side(values)):
        axis.bar(at, heights, 0.92 * wide, color=COLOURS[n], label=name)
        _say_heights(axis, at, heights, 2)
    return _grouped(picture, axis, values, title, ylabel)


def _side_by_side(groups):
    """(name, its x in each group, its heights) for each name; a group is 0.8 wide."""
    names = list(next(iter(groups.values())))
    for n, name in enumerate(names):
        at = np.arange(len(groups)) + (n - (len(names) - 1) / 2) * 0.8 / len(names)
        yield name, at, [of[name] for of in groups.values()]


def _say_heights(axis, at, heights, above):
    look = {"xytext": (0, above), "textcoords": "offset points", "ha": "center", "fontsize": 8}
    for x, height in zip(at, heights):
        axis.annotate(f"{height:.2g}", (x, height), **look)


def _grouped(picture, axis, groups, title, ylabel):
    axis.set_xticks(range(len(groups)), groups)
    axis.set_xlim(-0.5, len(groups) - 0.5)
    axis.set_ylabel(ylabel)
    axis.set_title(title, loc="left")
    axis.legend(frameon=False, fontsize=9.5, loc="upper left", bbox_to_anchor=(1, 1))
    return finish(picture)
