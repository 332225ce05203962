"""One card's stored figures beside another's: python -m kernels.beside "Tesla T4", or at the end of make bench there.

For each ladder that is stored for both cards, a table: every rung's time and its share of the card's own roof, on the
one and on the other. Times of two cards say which is faster; shares say whether a kernel suits a card. Nothing is
measured here.
"""

import sys
from pathlib import Path

from lab import results
from lab.table import Table

HERE = Path(__file__).resolve().parent
OTHER = "NVIDIA H200"  # the card that the course's text speaks of


def beside(topic, card, other=OTHER):
    """The tables of a topic, a list of lab.table.Table: ladders stored for both cards, with the rows that both have."""
    here, there = results.stored_on(topic, card=card), results.stored_on(topic, card=other)
    found = []
    for ladder in here.ladders if here and there else ():
        same = results.ladder(there, ladder.title)
        rows = {figure.name: figure for figure in same.figures} if same else {}
        both = [(figure, rows[figure.name]) for figure in ladder.figures if figure.name in rows]
        if both:
            table = {own.name: {**_columns(card, own), **_columns(other, its)} for own, its in both}
            dates = f"stored runs: {card}, {here.date}; {other}, {there.date}"
            found.append(Table(ladder.title, table, source=dates, stale=any(f.stale for pair in both for f in pair)))
    return found


def _columns(card, figure):
    time, *_ = figure.timing.cells()
    return {f"{card}": time, f"{card}, of its roof": f"{100 * figure.share:.2g} %"}


def show(topics, card, other=OTHER):
    """Print the tables of these topics. Whether there was one."""
    tables = [table for topic in topics for table in beside(topic, card, other)]
    for table in tables:
        print(f"\n{table}")
    return bool(tables)


def main(words):
    """The command: the name of a card, as in its files. 1 where nothing is stored for it and the H200."""
    topics = sorted(path.parent.name for path in HERE.glob("*/measured") if not path.parent.name.startswith("cpu_"))
    cards = sorted({item.card for topic in topics for item in results.stored(topic)})
    if len(words) != 1 or words[0] not in cards or words[0] == OTHER:
        others = ", ".join(card for card in cards if card != OTHER) or f"none but the {OTHER}'s yet"
        print(f"usage: python -m kernels.beside CARD, the name of a card in quotes; stored are: {others}")
        return 2
    return int(not show(topics, words[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
