"""Attention: which tokens a block takes, which elements a load asks for, and how partial results become one."""

import numpy as np

from lab.plots.style import BLACK, BLUE, GREEN, ORANGE, RED, SKY, figure, finish, rectangle


def token_shares(kv_len, shares, title="", row=64):
    """Which block takes which tokens of a cache: a box a token, oldest first, red where no block comes.

    shares  [(first, last), ...]: the tokens first to last - 1 of each block;  row  tokens in a line
    """
    owner = np.full(kv_len, -1)
    for block, (first, last) in enumerate(shares):
        owner[first:last] = block
    lost, lines = int((owner < 0).sum()), -(-kv_len // row)
    picture, axis = figure(8, 0.75 + 0.4 * lines)
    shades = ["#BBDDF2", "#F5CF87", "#A9DFCB"]
    for t, block in enumerate(owner.tolist()):
        x, y = t % row, t // row
        axis.add_patch(rectangle(x, y + 0.12, 1, 0.76, RED if block < 0 else shades[block % 3], 0.4))
        if block >= 0 and (t == 0 or owner[t - 1] != block):
            axis.text(x + 0.5, y + 0.5, block, ha="center", va="center", fontsize=6)
    said = f"{lost} of {kv_len} tokens are taken by no block" if lost else f"all {kv_len} tokens are taken"
    axis.set_title(f"{title}: {said}" if title else said, loc="left", fontsize=11)
    axis.set(xlim=(-0.3, row + 0.3), ylim=(lines, 0), xticks=[])
    axis.set_yticks([n + 0.5 for n in range(lines)], [f"from {n * row}" for n in range(lines)], fontsize=8)
    axis.set_xlabel("tokens, the newest last (a number: that block begins here)", fontsize=9)
    for side in axis.spines.values():
        side.set_visible(False)
    axis.tick_params(length=0)
    return finish(picture)


def cache_reads(reads, n_kv_heads=4, head_dim=32, tokens=32, mine=1):
    """A piece of a cache as a table, a row a token, and the elements that one load of a warp asks for in it.

    reads  {title: [(token, channel), ...]}: the lanes' elements, in kv head `mine`
    """
    picture, axes = figure(8, 3.6, columns=len(reads))
    for axis, (title, elements) in zip(np.atleast_1d(axes), reads.items()):
        for g in range(n_kv_heads):
            axis.add_patch(rectangle(g * head_dim, 0, head_dim, tokens, "#E8F2FA" if g == mine else "#F7F7F7"))
        for t, d in elements:
            axis.add_patch(rectangle(mine * head_dim + d, t, 1, 1, ORANGE, 0.3))
        axis.set(xlim=(-0.5, n_kv_heads * head_dim + 0.5), ylim=(tokens + 0.5, -0.5), ylabel="token")
        middles = [(g + 0.5) * head_dim for g in range(n_kv_heads)]
        axis.set_xticks(middles, [f"KV head {g}" for g in range(n_kv_heads)], fontsize=10)
        axis.tick_params(length=0)
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel(f"{head_dim} channels of each, side by side in memory", fontsize=9)
    return finish(picture)


def slices_meet(slices=8, lanes=32):
    """A block of channels by time slices: each warp has its own tokens, and the sums of a channel meet at the end."""
    picture, axis = figure(8, 3.9)
    for s in range(slices):
        axis.text(-0.7, s + 0.5, f"warp {s}: tokens {s}, {s + slices}, {s + 2 * slices}, …", ha="right", va="center")
        for lane in range(lanes):
            axis.add_patch(rectangle(lane, s + 0.08, 1, 0.84, SKY if lane == 5 else "#E8F2FA", 0.4))
    axis.annotate("", (5.5, slices + 1.6), (5.5, slices + 0.1), arrowprops={"arrowstyle": "->", "color": BLUE})
    axis.text(7, slices + 0.9, f"barrier; warp 0 adds the {slices} sums of each channel, in order", va="center")
    for lane in range(lanes):
        axis.add_patch(rectangle(lane, slices + 1.7, 1, 0.84, BLUE if lane == 5 else "#BBDDF2", 0.4))
    axis.text(-0.7, slices + 2.1, "out: one store", ha="right", va="center")
    axis.text(0, -0.6, f"lane = channel, 0 to {lanes - 1}", va="center")
    axis.set(xlim=(-15, lanes + 0.5), ylim=(slices + 2.8, -1.2))
    axis.axis("off")
    return finish(picture)


def online_softmax(scores, values, step):
    """Online softmax after `step` tokens: the scores, their running maximum, and what each token weighs by then.

    scores  whole numbers, powers of 2 as weights;  values  one number for each token
    """
    scores, values = np.asarray(scores, float), np.asarray(values, float)
    n, seen = len(scores), np.arange(len(scores)) < step
    picture, (top, low) = figure(8, 4.6, rows=2)
    colours = [GREEN if t == step - 1 else SKY if t < step else "#E4E4E4" for t in range(n)]
    top.bar(range(n), scores, color=colours, width=0.7)
    highest = np.maximum.accumulate(scores)[:step]
    if step:
        top.step(np.arange(-1, step) + 0.5, [highest[0], *highest], where="pre", color=RED, linewidth=2)
    top.axhline(0, color=BLACK, linewidth=0.8)
    top.set(ylabel="score", xlim=(-0.7, n - 0.3), xticks=range(n), ylim=(min(0, scores.min()) - 0.5, scores.max() + 1))
    m = highest[-1] if step else -np.inf
    before = highest[-2] if step > 1 else -np.inf
    weights = np.where(seen, 2.0 ** (scores - m), 0) if step else np.zeros(n)
    low.bar(range(n), weights, color=colours, width=0.7)
    for t in np.flatnonzero(seen):
        low.annotate(f"{weights[t]:.3g}", (t, weights[t]), ha="center", va="bottom", fontsize=8)
    low.set(ylabel="weight, as of now", xlim=top.get_xlim(), xticks=range(n), ylim=(0, 1.25))
    low.set_xlabel("token (red: the maximum so far)")
    if step:
        total, out = weights.sum(), (weights * values).sum() / weights.sum()
        correction = 2.0 ** (before - m)
        said = f"after token {step - 1}: m = {m:g}, correction = {correction:.3g}, total = {total:.4g}, out = {out:.4g}"
    else:
        said = "before the first token: m = -infinity, total = 0"
    top.set_title(said, loc="left", fontsize=11)
    return finish(picture)


def merge_tree(levels):
    """Partial results that become one: a row of boxes for each level, the first at the bottom, lines to what they go
    into.

    levels  {name: [what a box says, ...]}; the boxes of a level are dealt out evenly to those of the next
    """
    picture, axis = figure(8, 0.4 + 0.95 * len(levels))
    wide = max(map(len, levels.values()))
    places = [[wide * (i + 0.5) / len(boxes) for i in range(len(boxes))] for boxes in levels.values()]
    for level, (name, boxes) in enumerate(levels.items()):
        width = min(0.92 * wide / len(boxes), 0.3 * wide)
        for i, (x, text) in enumerate(zip(places[level], boxes)):
            if level + 1 < len(levels):
                up = places[level + 1][i * len(places[level + 1]) // len(boxes)]
                axis.plot((x, up), (level + 0.25, level + 0.75), color="#999999", linewidth=1, zorder=0)
            empty = "-inf" in text
            colour = "#F2F2F2" if empty else ["#DCEBF6", "#F5CF87", "#8FD3BF"][level % 3]
            axis.add_patch(rectangle(x - width / 2, level - 0.25, width, 0.5, colour))
            axis.text(x, level, text, ha="center", va="center", fontsize=8 if wide < 13 else 6.5)
        axis.text(-0.02 * wide, level, name, ha="right", va="center", fontsize=10)
    axis.set(xlim=(-0.22 * wide, 1.01 * wide), ylim=(-0.45, len(levels) - 0.6))
    axis.axis("off")
    return finish(picture)


def operand_layout(lane=5, heads=4):
    """Which elements of a 16 × 16 matrix one lane holds: as results of two products, and as the operand of the next.

    Rows are query heads, of which only the first `heads` are there; columns are tokens.
    """
    g, q = lane // 4, lane % 4
    results, operand = {}, {}
    for n in range(2):
        for i in range(4):
            results[g + 8 * (i // 2), 8 * n + 2 * q + i % 2] = f"s{n}\n[{i}]"
    for register in range(4):
        for half in range(2):
            operand[g + 8 * (register % 2), 8 * (register // 2) + 2 * q + half] = f"w{register}\n.{'lh'[half]}"
    picture, axes = figure(9, 5.4, columns=2)
    titles = "scores, as two products leave them", "weights, as the next product takes them"
    for axis, title, mine in zip(axes, titles, (results, operand)):
        for row in range(16):
            for column in range(16):
                here = mine.get((row, column))
                axis.add_patch(rectangle(column, row, 1, 1, ORANGE if here else SKY if row < heads else "#F2F2F2", 0.4))
                if here:
                    axis.text(column + 0.5, row + 0.5, here, ha="center", va="center", fontsize=8, linespacing=0.9)
        axis.axvline(8, color=BLACK, linewidth=1.2)
        axis.set(xlim=(-0.2, 16.2), ylim=(16.2, -0.2), xlabel="token of the tile", xticks=[0.5, 8.5, 15.5])
        axis.set_xticklabels([0, 8, 15])
        axis.set_yticks([0.5, heads - 0.5, 8.5, 15.5], [0, heads - 1, 8, 15])
        axis.set_title(title, loc="left", fontsize=10)
        axis.tick_params(length=0)
    axes[0].set_ylabel(f"query head (of 16, {heads} are there)")
    picture.suptitle(f"lane {lane}", fontsize=11, x=0.02, ha="left")
    return finish(picture)
