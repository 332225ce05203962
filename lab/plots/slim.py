"""What libraries carry for cards: shares of files, shares of architectures, and an environment and its copies."""

from lab.plots.style import BLACK, BLUE, COLOURS, GREEN, ORANGE, SKY, figure, finish

GREY = "#BBBBBB"


def device_code(report, card=None, most=12):
    """A report (models.slim) in two panels: libraries, and their device code by what it is for.

    card  a capability, (9, 0): what a card of this kind runs is dark; None: nothing is
    """
    picture, (left, right) = figure(10, 5, columns=2)
    holding = [library for library in report.libraries if library.stored][:most]
    names = [library.name.rpartition("/")[2].partition(".so")[0].removeprefix("lib") for library in holding]
    stored, sizes = [one.stored / 1e6 for one in holding], [one.size / 1e6 for one in holding]
    left.barh(range(len(holding)), stored, color=BLUE, label="device code")
    left.barh(range(len(holding)), [a - b for a, b in zip(sizes, stored)], left=stored, color=GREY, label="the rest")
    left.set_yticks(range(len(holding)), names, fontsize=9)
    left.invert_yaxis()
    left.set_xlabel("MB")
    left.set_title("libraries", loc="left")
    left.legend(frameon=False, fontsize=9.5)
    labels = report.by_label()
    total = sum(labels.values()) or 1
    colours = [_colour(label, card) for label in labels]
    right.barh(range(len(labels)), [size / 1e6 for size in labels.values()], color=colours)
    for at, size in enumerate(labels.values()):
        right.annotate(f"{100 * size / total:.1f} %", (size / 1e6, at), xytext=(4, 0), textcoords="offset points",
                       va="center", fontsize=9)  # fmt: skip
    right.set_yticks(range(len(labels)), labels, fontsize=9)
    right.invert_yaxis()
    right.set_xlabel("MB")
    right.margins(x=0.15)
    mine = f"; dark: what a card of {card[0]}.{card[1]} runs as it is" if card else ""
    right.set_title(f"device code, by what it is for{mine}", loc="left", fontsize=10.5)
    return finish(picture)


def _colour(label, card):
    number = label.removeprefix("sm_").rstrip("af")
    if label == "PTX":
        return ORANGE
    return BLUE if not card or number.isdigit() and divmod(int(number), 10) == tuple(card) else SKY


def container_layout(containers, size, title="where device code lies in a file", names=()):
    """A file as a strip: containers [(at, bytes, [(label, bytes), ...]), ...] of `size` bytes, entry by entry. A line
    is where one begins, with its name, if there are names."""
    picture, axis = figure(9, 2.1)
    labels = list(dict.fromkeys(label for _, _, entries in containers for label, _ in entries))
    colour = {label: COLOURS[n % len(COLOURS)] for n, label in enumerate(labels)}
    axis.barh(0, size / 1e3, color="#EEEEEE", height=0.6, edgecolor=BLACK, linewidth=0.6)
    for at, _, entries in containers:
        for label, many in entries:
            axis.barh(0, many / 1e3, left=at / 1e3, height=0.6, color=colour[label], edgecolor="white", linewidth=0.4)
            at += many
    for n, (at, *_) in enumerate(containers):
        axis.vlines(at / 1e3, -0.3, 0.5, color=BLACK, linewidth=1.2)
        axis.text(at / 1e3, 0.36, f" {names[n]}" if n < len(names) else "", fontsize=9)
    axis.set_ylim(-0.4, 0.6)
    for label in labels:
        axis.barh(0, 0, color=colour[label], label=label)
    axis.set_yticks([])
    axis.set_xlabel("KB from the file's beginning")
    axis.set_title(title, loc="left")
    axis.legend(frameon=False, ncols=6, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.45))
    return finish(picture)


def thin_copies(rows, title="a library, and copies of it"):
    """Bars in groups. rows  {way: {"file": MB, "on disk": MB, "zstd": MB}}"""
    picture, axis = figure(8, 0.9 + 0.75 * len(rows))
    for n, (name, colour) in enumerate(zip(("file", "on disk", "zstd"), (BLUE, GREEN, ORANGE))):
        at = [row + 0.27 * (n - 1) for row in range(len(rows))]
        sizes = [row[name] for row in rows.values()]
        axis.barh(at, sizes, height=0.25, color=colour, label=name)
        for y, size in zip(at, sizes):
            axis.annotate(f"{size:.3g}", (size, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=9)
    axis.set_yticks(range(len(rows)), rows)
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_xlabel("MB")
    axis.set_title(title, loc="left")
    axis.legend(frameon=False, fontsize=9.5, loc="upper left", bbox_to_anchor=(1, 1))
    return finish(picture)
