"""Several cards: a layer that is shared out, ways to hand a number over, what an exchange does one after another."""

from lab.plots.style import BLACK, BLUE, GREEN, ORANGE, RED, figure, finish, rectangle

OWN, OVER, SUM = "#DCEBF6", "#F9E3B4", "#BFE5DA"
KINDS = {"own": "#BBDDF2", "tell": "#F5CF87", "load": "#E8B7A0", "launch": "#D9D9D9"}  # steps of an exchange
MEANING = {
    "launch": "a launch on end of another",
    "own": "a load of its own memory",
    "tell": "a flag, or words, to the peer",
    "load": "a load from the peer",
}
LAYER = [  # (what it is, how it is shared out)
    ("norm", "whole"), ("Q, K, V", "half the rows"), ("attention", "half the heads"), ("W_o", "half the columns"),
    ("Σ", ""), ("norm", "whole"), ("gate, up", "half the rows"), ("W_down", "half the columns"), ("Σ", ""),
]  # fmt: skip


def split_layer():
    """A layer of a transformer over two cards: what each has of it, and where their sums must meet."""
    picture, axis = figure(9, 2.9)
    for at, (what, share) in enumerate(LAYER):
        if what == "Σ":
            axis.add_patch(rectangle(at + 0.2, 0.1, 0.6, 1.9, SUM))
            axis.text(at + 0.5, 1.05, "Σ", ha="center", va="center", fontsize=15)
            axis.text(at + 0.5, 2.12, "exchange", ha="center", fontsize=9)
            continue
        for card in (0, 1):
            y = 1.15 - 1.05 * card
            axis.add_patch(rectangle(at + 0.06, y, 0.88, 0.85, OWN if share != "whole" else "#F2F2F2"))
            axis.text(at + 0.5, y + 0.54, what, ha="center", va="center", fontsize=9.5)
            axis.text(at + 0.5, y + 0.24, share, ha="center", va="center", fontsize=6.4, color="#555555")
    for card in (0, 1):
        axis.text(-0.1, 1.57 - 1.05 * card, f"card {card}", ha="right", va="center", fontsize=10)
    axis.set(xlim=(-0.75, len(LAYER)), ylim=(0, 2.45))
    axis.axis("off")
    return finish(picture)


def handovers(ns):
    """How a number gets from card 0 to card 1, downwards in time, in four ways.

    ns  {"relaxed", "word", "released", "data": ns one way}, measured
    """
    way = ns["relaxed"]
    panels = {
        "a flag alone": [("flag", 0, way, 1)],
        "data and number\nin one word": [("word", 0, ns["word"], 1)],
        "a flag that releases": [("fence", 0, ns["released"] - way, 0), ("flag", ns["released"] - way, way, 1)],
        "data, then a flag\nthat releases": [
            ("data", 0, way, 1),
            ("it has come", way, ns["data"] - 2 * way, -1),
            ("flag", ns["data"] - way, way, 1),
        ],
    }
    picture, axes = figure(9, 4.4, columns=4)
    low = 1.12 * max(ns.values())
    for axis, (title, steps) in zip(axes, panels.items()):
        for card in (0, 1):
            axis.plot([card, card], [0, low], color="#999999", linewidth=1.2)
            axis.text(card, -0.03 * low, f"card {card}", ha="center", va="bottom", fontsize=9)
        for name, begins, lasts, side in steps:
            ends = begins + lasts
            if side == 0:
                axis.add_patch(rectangle(-0.09, begins, 0.18, lasts, KINDS["own"]))
                axis.text(0.14, begins + lasts / 2, "waits until all\nit has stored\nis there", va="center", fontsize=8)
                continue
            a, b = (0, 1) if side > 0 else (1, 0)
            colour = BLUE if name == "flag" else ORANGE if name in ("data", "word") else "#888888"
            axis.annotate("", (b, ends), (a, begins), arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.8})
            axis.text(
                0.5, (begins + ends) / 2 - 0.035 * low, name, ha="center", va="bottom", fontsize=8.5, color=colour
            )
        last = steps[-1][1] + steps[-1][2]
        axis.plot([0.94, 1.06], [last, last], color=BLACK, linewidth=1.5)
        axis.text(1.1, last, f"{last:,.0f}\nns", va="center", fontsize=9)
        axis.set_title(title, fontsize=10, pad=24)
        axis.set(xlim=(-0.2, 1.45), ylim=(low, 0))
        axis.axis("off")
    return finish(picture)


def spans(steps):
    """[(kind, name, begins, ends)] of steps, each of which waits for the one before. steps  [(kind, name, µs), ...]"""
    found, at = [], 0.0
    for kind, name, lasts in steps:
        found.append((kind, name, at, at + lasts))
        at += lasts
    return found


def exchange_steps(rungs, measured=None):
    """What each way to exchange does on two cards, one thing after another, over µs.

    rungs     {name: steps as for `spans`}, of one card; the other does the same
    measured  {name: µs}: a line for each of these
    """
    from matplotlib.patches import Patch

    measured = measured or {}
    picture, axes = figure(9, 0.7 + 1.12 * len(rungs), rows=len(rungs))
    axes = [axes] if len(rungs) == 1 else axes
    longest = max([spans(steps)[-1][3] for steps in rungs.values()] + list(measured.values()))
    for axis, (rung, steps) in zip(axes, rungs.items()):
        for kind, name, begins, ends in spans(steps):
            for card in (0, 1):
                axis.add_patch(rectangle(begins, 1 - card, ends - begins, 0.45, KINDS[kind], 0.5))
            if ends - begins > 0.011 * longest * len(name):  # else there is no room for it
                axis.text((begins + ends) / 2, 1.22, name, ha="center", va="center", fontsize=7.5)
            for a, b in ((1.0, 0.45), (0.45, 1.0)) if kind == "tell" else ():
                axis.annotate("", (ends, b), (begins, a), arrowprops={"arrowstyle": "->", "color": BLUE, "lw": 1.1})
            if kind == "load":
                middle = (begins + ends) / 2
                for x, y, to in ((begins, 1.0, (middle, 0.45)), (middle, 0.45, (ends, 1.0))):
                    axis.annotate("", to, (x, y), arrowprops={"arrowstyle": "->", "color": RED, "lw": 1.1})
        if rung in measured:
            axis.axvline(measured[rung], color=GREEN, linewidth=2)
            axis.text(measured[rung] + 0.01 * longest, 0.72, "measured", fontsize=8, color=GREEN, va="center")
        axis.set_yticks([1.22, 0.22], ["card 0", "card 1"], fontsize=8.5)
        axis.set(xlim=(0, 1.13 * longest), ylim=(-0.08, 1.55))
        axis.set_title(f"{rung}: {spans(steps)[-1][3]:.2f} µs by its steps", loc="left", fontsize=10)
        axis.tick_params(axis="y", length=0)
        axis.spines["left"].set_visible(False)
        axis.label_outer()
    axes[-1].set_xlabel("µs", fontsize=9)
    kinds = [kind for kind in MEANING if any(kind == step[0] for steps in rungs.values() for step in steps)]
    handles = [Patch(facecolor=KINDS[kind], edgecolor="#999999", label=MEANING[kind]) for kind in kinds]
    picture.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return finish(picture)
