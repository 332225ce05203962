"""Latent attention: its two forms, a tile that is keys and values, two warpgroups that take turns, where sums lie."""

from lab.plots.style import BLACK, figure, finish, rectangle

GREY, KEYS, LEFT, RIGHT, TURNED = "#F2F2F2", "#DCEBF6", "#BBDDF2", "#A9DFCB", "#F5CF87"
SCORES, OWN, OTHERS, SOFTMAX = "#0072B2", "#56B4E9", "#009E73", "#F5CF87"


def latent_forms():
    """The same attention twice: as the model has it, and absorbed. What is made for each token is hatched."""
    picture, axes = figure(9, 4.5, rows=2)
    model = [
        (0, 1.6, "cache\n512 + 64", LEFT, False),
        (2.55, 2.6, "keys of 128 heads\n128 × (128 + 64)", GREY, True),
        (2.55, 0.6, "values of 128 heads\n128 × 128", GREY, True),
        (5.25, 2.6, "scores\nq: 128 × 192", KEYS, False),
        (7.8, 1.6, "mix\n128 × 128", KEYS, False),
    ]
    absorbed = [
        (0, 0.6, "cache\n512 + 64", LEFT, False),
        (0, 2.6, "q: 128 × 192", GREY, False),
        (2.55, 2.6, "q, absorbed\n128 × 576", GREY, False),
        (5.25, 1.6, "scores, mix\n128 × 576, 512", KEYS, False),
        (7.8, 1.6, "heads\n128 × 128", GREY, False),
    ]
    arrows = [(0, 1, "W_UK"), (0, 2, "W_UV"), (1, 3, ""), (2, 4, ""), (3, 4, "")]
    other = [(1, 2, "W_UK"), (2, 3, ""), (0, 3, ""), (3, 4, "W_UV")]
    titles = "as the model has it: keys and values of every token", "absorbed: up-projections of queries and results"
    for axis, title, boxes, lines in zip(axes, titles, (model, absorbed), (arrows, other)):
        for x, y, says, colour, hatched in boxes:
            box = rectangle(x, y - 0.62, 1.7, 1.24, colour)
            box.set_hatch("//" if hatched else None)
            axis.add_patch(box)
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 1} if hatched else None
            axis.text(x + 0.85, y, says, ha="center", va="center", fontsize=9, bbox=paper)
        for a, b, says in lines:
            begin, end = (boxes[a][0] + 1.7, boxes[a][1]), (boxes[b][0], boxes[b][1])
            axis.annotate("", end, begin, arrowprops={"arrowstyle": "->", "color": BLACK})
            over = 0.5 * (end[1] - begin[1]) + (0.4 if end[1] > begin[1] else -0.45 if end[1] < begin[1] else 0.12)
            axis.text((begin[0] + end[0]) / 2, begin[1] + over, says, ha="center", fontsize=9)
        axis.set_title(title, loc="left", fontsize=10.5)
        axis.set(xlim=(-0.05, 9.55), ylim=(-0.15, 3.4))
        axis.axis("off")
    return finish(picture)


def latent_tile():
    """What a block of hopper.cu has in shared memory: queries and two tiles, each in nine parts of 64 × 64."""
    picture, axis = figure(9, 4.1)
    rows = {"queries: 64 heads": None, "slot 0: 64 tokens": 0, "slot 1: 64 tokens": 1}
    for at, (name, slot) in enumerate(rows.items()):
        for part in range(9):
            side = TURNED if part == 8 else LEFT if part < 4 else RIGHT
            axis.add_patch(rectangle(part, 1.25 * at, 1, 0.9, KEYS if slot is None else side))
            axis.text(part + 0.5, 1.25 * at + 0.45, f"part {part}", ha="center", va="center", fontsize=9)
        axis.text(-0.1, 1.25 * at + 0.45, name, ha="right", va="center", fontsize=9.5)
    low = 1.25 * 2 + 1.0
    spans = [
        (0, 9, "keys: all 576 numbers, for the scores of the slot's warpgroup", 0.1),
        (0, 4, "values of warpgroup 0: side 0", 0.62),
        (4, 8, "values of warpgroup 1: side 1", 0.62),
        (8, 9, "then weights", 0.62),
    ]
    for first, last, says, down in spans:
        arrow = {"arrowstyle": "|-|, widthA=0.25, widthB=0.25", "color": BLACK, "linewidth": 1}
        axis.annotate("", (first + 0.03, low + down), (last - 0.03, low + down), arrowprops=arrow)
        axis.text((first + last) / 2, low + down + 0.08, says, ha="center", va="top", fontsize=9)
    for part in (0, 8):
        axis.text(part, -0.06, 64 * part, ha="left", va="bottom", fontsize=8.5)
    axis.text(9, -0.06, 576, ha="right", va="bottom", fontsize=8.5)
    axis.set(xlim=(-1.75, 9.05), ylim=(low + 1.05, -0.3))
    axis.axis("off")
    return finish(picture)


def turns_schedule(tiles, softmax=1.5):
    """[(band, what, begins, ends, label)]: band 0 has the tensor cores, 1 and 2 the softmax of warpgroup 0 and 1.

    Products take as long as their flops: 64 × 64 scores over 576 numbers 2.25, a half of the values 1. Each warpgroup
    has every second tile: amid its scores it adds the other's weights times its half of the values, and behind its
    softmax its own.
    """
    found, done, free, pending = [], {}, 0.0, []

    def program(group):
        for t in range(group, tiles, 2):
            yield "ask", f"S{t}a", SCORES, 1.5
            if t:
                yield "wait", f"weights {t - 1}"
                yield "ask", f"V{t - 1}", OTHERS, 1.0
            yield "ask", f"S{t}b", SCORES, 0.75
            yield "wait", f"S{t}b {group}"
            yield "work", f"weights {t}", SOFTMAX, softmax
            yield "ask", f"V{t}", OWN, 1.0
            yield "wait", f"V{t} {group}"
        if (tiles - 1) % 2 != group:
            yield "wait", f"weights {tiles - 1}"
            yield "ask", f"V{tiles - 1}", OTHERS, 1.0
            yield "wait", f"V{tiles - 1} {group}"

    for group in (0, 1):
        steps = program(group)
        pending.append([0.0, group, steps, next(steps, None)])

    def begins_at(one):
        now, group, _, (kind, name, *_) = one
        return max(now, done[name]) if kind == "wait" else now, group

    while pending := [one for one in pending if one[3]]:
        one = min((one for one in pending if one[3][0] != "wait" or one[3][1] in done), key=begins_at)
        now, group, steps, (kind, name, *rest) = one
        if kind == "wait":
            one[0] = max(now, done[name])
        elif kind == "ask":
            begins = max(now, free)
            done[f"{name} {group}"] = free = begins + rest[1]
            found.append((0, rest[0], begins, free, name))
        else:
            one[0] = done[name] = now + rest[1]
            found.append((1 + group, rest[0], now, one[0], name.replace("weights ", "W")))
        one[3] = next(steps, None)
    return found


def latent_turns(tiles=6, softmax=1.5):
    """Two warpgroups of hopper.cu over time, with the share of it in which the tensor cores multiply."""
    picture, axis = figure(9, 2.6)
    bands = "tensor cores", "softmax of 0", "softmax of 1"
    schedule = turns_schedule(tiles, softmax)
    for band, what, begins, ends, says in schedule:
        axis.add_patch(rectangle(begins, band + 0.1, ends - begins, 0.8, what, 0.4))
        colour = BLACK if what == SOFTMAX else "white"
        axis.text((begins + ends) / 2, band + 0.5, says, ha="center", va="center", fontsize=8, color=colour)
    end = max(step[3] for step in schedule)
    busy = sum(step[3] - step[2] for step in schedule if step[0] == 0)
    axis.set_yticks([n + 0.5 for n in range(3)], bands, fontsize=9)
    axis.set(xlim=(0, end + 0.1), ylim=(3.05, -0.05), xticks=[])
    axis.set_title(f"{tiles} tiles: tensor cores multiply {busy / end:.0%} of the time", loc="left", fontsize=10.5)
    axis.set_xlabel("time: products as their flops, softmax made up", fontsize=9)
    axis.tick_params(length=0)
    axis.spines["left"].set_visible(False)
    from matplotlib.patches import Patch

    keys = {"scores": SCORES, "own half, own weights": OWN, "own half, the other's weights": OTHERS}
    keys["scores become weights"] = SOFTMAX
    handles = [Patch(facecolor=colour, edgecolor="#999999", label=name) for name, colour in keys.items()]
    picture.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return finish(picture)


def sums_at_home():
    """Where the sums of attention lie between two tiles: beside an Ascend's units, and in an SM."""
    picture, axes = figure(9, 2.9, columns=2)
    ascend = [(0, 1.5, "cube unit:\nproducts", KEYS), (3.6, 1.5, "vector units:\nsoftmax, rescale", KEYS)]
    ascend.append((1.8, 0, "memory:\nsums, 64 × 512", TURNED))
    hopper = [(0, 1.5, "tensor cores:\nproducts", KEYS), (3.6, 1.5, "threads:\nsoftmax, rescale", KEYS)]
    hopper.append((1.8, 0, "registers:\nsums, 64 × 512", TURNED))
    ways = [
        ("Ascend: two kinds of cores, and memory between them", ascend, "scores, weights:\nby memory, too"),
        ("Hopper: one register file for both", hopper, "scores, weights:\nin registers"),
    ]
    for axis, (title, boxes, between) in zip(axes, ways):
        for x, y, says, colour in boxes:
            axis.add_patch(rectangle(x, y, 1.7, 0.8, colour))
            axis.text(x + 0.85, y + 0.4, says, ha="center", va="center", fontsize=9)
        for x in (0.85, 4.45):
            end = (2.1, 0.82) if x < 2 else (3.2, 0.82)
            axis.annotate("", end, (x, 1.48), arrowprops={"arrowstyle": "<->", "color": BLACK, "linewidth": 1.2})
        axis.text(2.65, 1.9, between, ha="center", va="center", fontsize=8.5)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set(xlim=(-0.05, 5.4), ylim=(-0.05, 2.4))
        axis.axis("off")
    return finish(picture)
