"""Serving: padding, pages as a block-sparse matrix, who reads how long, and a server's requests over time."""

import numpy as np

from lab.plots.style import BLACK, COLOURS, ORANGE, RED, SKY, figure, finish, rectangle

TAKEN, EMPTY, SHARED = "#BBDDF2", "#F2F2F2", "#F5CF87"
HUES = ["#BBDDF2", "#F5CF87", "#A9DFCB", "#E8B4B8", "#D9C8E8", "#CFE3B5"]


def padding(lens, page=16, longest=None):
    """The room of a batch's caches: padded to the longest, and in pages. A row a request.

    lens  tokens of each;  page  tokens of a page;  longest  tokens that each has room for, if not those of the longest
    """
    lens, wide = np.asarray(lens), longest or max(lens)
    rooms = {"room for the longest": np.full(len(lens), wide), f"pages of {page}": -(-lens // page) * page}
    picture, axes = figure(9, 1.0 + 0.24 * len(lens), columns=2)
    for axis, (name, room) in zip(axes, rooms.items()):
        rows = np.arange(len(lens))
        axis.barh(rows, room, height=0.76, color=EMPTY, edgecolor="#999999", linewidth=0.6, label="room, empty")
        axis.barh(rows, lens, height=0.76, color=TAKEN, edgecolor="#999999", linewidth=0.6, label="tokens")
        empty = 1 - lens.sum() / room.sum()
        axis.set_title(f"{name}: {100 * empty:.2g} % of it is empty", loc="left", fontsize=11)
        axis.set(xlim=(0, 1.02 * max(wide, rooms[name].max())), ylim=(len(lens) - 0.4, -0.6), xlabel="tokens")
        axis.set_yticks(rows, [f"request {row}" for row in rows] if len(lens) < 13 else [""] * len(lens), fontsize=8.5)
        axis.tick_params(axis="y", length=0)
    picture.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return finish(picture)


def page_table(table, lens, page, n_pages):
    """A page table as a block-sparse matrix: a row a request, a column a page of the pool.

    table  the physical pages of each request, in the order of its tokens;  lens  tokens of each
    In a box stands which page of the request it is. Orange: several requests have it; hatched: not full; white column:
    nobody's.
    """
    owners = np.zeros(n_pages, int)
    for pages in table:
        owners[list(pages)] += 1
    picture, axis = figure(9, 0.9 + 0.42 * len(table))
    for row, (pages, tokens) in enumerate(zip(table, lens)):
        for column in range(n_pages):
            axis.add_patch(rectangle(column, row, 1, 1, EMPTY if owners[column] else "white", 0.4))
        for logical, column in enumerate(pages):
            full = (logical + 1) * page <= tokens
            box = rectangle(column, row, 1, 1, SHARED if owners[column] > 1 else SKY)
            box.set_hatch("" if full else "///")
            axis.add_patch(box)
            axis.text(column + 0.5, row + 0.5, logical, ha="center", va="center", fontsize=9,
                      bbox=None if full else {"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # fmt: skip
    used, shared = int((owners > 0).sum()), int((owners > 1).sum())
    said = f"{used} of {n_pages} pages are taken" + (f", {shared} of them by several requests" if shared else "")
    axis.set_title(said, loc="left", fontsize=11)
    axis.set(xlim=(-0.1, n_pages + 0.1), ylim=(len(table) + 0.05, -0.05))
    axis.set_xticks(np.arange(n_pages) + 0.5, range(n_pages), fontsize=8.5)
    axis.set_yticks(np.arange(len(table)) + 0.5, [f"request {row}: {n}" for row, n in enumerate(lens)], fontsize=9)
    axis.set_xlabel(f"page of the pool, {page} tokens each (rows: tokens of each request)")
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)
    return finish(picture)


def block_loads(plans, blocks, costs, ends, requests=()):
    """How long each block reads, plan by plan: a column a block, a box a work, a colour a request.

    plans     {name: works, each with block, request, tiles};  costs  .tile and .start, µs
    ends      {name: µs when all is merged}: a dotted line;  requests  names of the first few, for the legend
    """
    picture, axes = figure(9, 0.7 + 1.75 * len(plans), rows=len(plans))
    highest = max(ends.values())
    for axis, (name, works) in zip(np.ravel(axes), plans.items()):
        tops, high, bottoms = np.zeros(blocks), [costs.start + costs.tile * work.tiles for work in works], []
        for work, one in zip(works, high):
            bottoms.append(tops[work.block])
            tops[work.block] += one
        look = {"color": [HUES[work.request % len(HUES)] for work in works], "edgecolor": "white", "linewidth": 0.3}
        axis.bar([work.block for work in works], high, 0.96, bottom=bottoms, **look)
        axis.axhline(ends[name], color=BLACK, linewidth=1, linestyle=":")
        axis.axhline(tops.mean(), color=RED, linewidth=1)
        busy = tops.sum() / (blocks * ends[name])
        axis.set_title(f"{name}: {ends[name]:.4g} µs, blocks are busy {busy:.0%} of it", loc="left", fontsize=10.5)
        axis.set(xlim=(-0.7, blocks - 0.3), ylim=(0, 1.06 * highest), ylabel="µs")
    np.ravel(axes)[-1].set_xlabel("block (red line: their mean; dotted: all is merged)")
    if requests:
        from matplotlib.patches import Patch

        boxes = [Patch(color=HUES[n % len(HUES)], label=name) for n, name in enumerate(requests)]
        picture.legend(handles=boxes, loc="outside lower center", ncols=len(boxes), frameon=False, fontsize=9)
    return finish(picture)


def server_over_time(steps, title=""):
    """A server's requests and its room over time.

    steps  (n, 6): begin and end (s), requests that run and that wait, tokens held, tokens of room taken
    """
    at = steps[:, 1]
    picture, (top, low) = figure(9, 4.4, rows=2)
    top.step(at, steps[:, 2], where="post", color=COLOURS[0], label="run")
    top.step(at, steps[:, 3], where="post", color=ORANGE, label="wait")
    top.set_ylabel("requests")
    low.fill_between(at, steps[:, 5] / 1e3, step="post", color=EMPTY, edgecolor="#999999", label="room taken")
    low.fill_between(at, steps[:, 4] / 1e3, step="post", color=SKY, label="tokens held")
    low.set(ylabel="thousand tokens", xlabel="s")
    for axis in (top, low):
        axis.set(xlim=(0, at[-1]))
        axis.set_ylim(bottom=0)
        axis.grid(True, alpha=0.25)
        axis.legend(frameon=False, fontsize=9.5, loc="upper left", bbox_to_anchor=(1, 1))
    top.set_title(title, loc="left")
    return finish(picture)


def lateness(gaps, title):
    """Which share of tokens comes later than so long behind the one before. gaps  {name: s, one for each token}"""
    picture, axis = figure(9, 4.2)
    for n, (name, of) in enumerate(gaps.items()):
        sorted_ = 1e3 * np.sort(of)
        share = 1 - np.arange(len(sorted_)) / len(sorted_)
        axis.plot(sorted_, share, color=COLOURS[n % len(COLOURS)], linewidth=2, label=name, drawstyle="steps-pre")
    axis.axhline(0.5, color="#999999", linewidth=0.9, linestyle=":")
    axis.axhline(0.01, color=BLACK, linewidth=1, linestyle="--")
    axis.annotate("p99", (1, 0.01), xycoords=("axes fraction", "data"), xytext=(-4, 3), textcoords="offset points",
                  ha="right", fontsize=9)  # fmt: skip
    axis.set(xscale="log", yscale="log", ylim=(1e-3, 1.1), xlabel="ms since the token before",
             ylabel="share of tokens that come later")  # fmt: skip
    axis.xaxis.set_major_formatter(lambda v, _: f"{v:,g}")
    axis.yaxis.set_major_formatter(lambda v, _: f"{v:.3g}")
    axis.set_title(title, loc="left")
    axis.grid(True, alpha=0.25)
    axis.legend(frameon=False, fontsize=9.5, loc="upper left", bbox_to_anchor=(1, 1))
    return finish(picture)


def over_rates(rates, figures, xlabel="requests a second"):
    """Panels over the rate at which requests come, each with an axis of its own.

    figures  {panel: {name: values}}, the same names in each; a panel's name says its unit
    """
    from matplotlib.ticker import LogLocator

    picture, axes = figure(4.2 * len(figures), 3.7, columns=len(figures))
    for axis, (panel, lines) in zip(np.ravel(axes), figures.items()):
        for n, (name, values) in enumerate(lines.items()):
            look = {"marker": "os^Dv*X"[n % 7], "color": COLOURS[n % len(COLOURS)], "markersize": 5}
            axis.plot(rates, values, label=name, linewidth=1.8, **look)
        highest, lowest = (f(f(values) for values in lines.values()) for f in (max, min))
        if lowest > 0 and highest > 20 * lowest:
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(lambda v, _: f"{v:,g}")
            axis.yaxis.set_minor_formatter(lambda v, _: "")
        else:
            axis.set_ylim(bottom=0)
        axis.set_title(panel, loc="left", fontsize=10.5)
        axis.set_xlabel(xlabel)
        axis.set_xticks(rates)
        axis.grid(True, alpha=0.25)
    handles = np.ravel(axes)[0].get_legend_handles_labels()
    picture.legend(*handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return finish(picture)
