"""The README's headline: each chapter's best rung beside the best peer, from the stored results of one card.

A peer is a row of a stored ladder that rests on no source of this course; of several the fastest counts, whichever way
it is launched. So that nothing is chosen by its figure, the works stand in CASES, and are shown whatever was measured.
"""

from typing import NamedTuple

from lab import results

HEADINGS = ("chapter", "work", "ours", "of the roof", "best peer", "times faster")
PDL = ", PDL"


class Case(NamedTuple):
    """A row: what `ours` did in a ladder of a topic, and with programmatic dependent launch where that was measured."""

    chapter: str
    topic: str
    ladder: str
    ours: str


CASES = [
    Case("04", "gemv", "GEMV bf16, 4096 × 4096", "rows share x"),
    Case("04", "gemv", "GEMV bf16, 14336 × 4096", "rows share x"),
    Case("05", "fusion", "Mistral-7B, feed-forward block, bf16", "2 launches"),
    Case("05", "fusion", "Mistral-7B, decoder layer without attention, bf16", "4 launches"),
    *(
        Case("06", "lowbit", f"GEMV, {name}, {shape}", "interleaved, tensor cores")
        for name in ("int8 per row", "int4 g128", "int2 g128")
        for shape in ("4096 × 4096", "14336 × 4096")
    ),
    Case("08", "attention", "decode bf16, batch 1, 4K", "decode"),
    Case("08", "attention", "decode bf16, batch 1, 128K", "decode"),
    Case("08", "attention", "decode bf16, batch 16, 32K", "decode"),
    Case("09", "kv_cache", "decode fp8, batch 1, 128K", "decode"),
    Case("09", "kv_cache", "decode fp8, batch 16, 32K", "decode"),
    Case("12", "ssd", "SSD prefill, 2.7B, 8K", "five, chunk 256"),
    Case("13", "ssd", "SSD prefill, 2.7B, 1K", "fused.cu"),
    Case("13", "ssd", "SSD prefill, 2.7B, 8K", "fused.cu"),
    Case("13", "ssd", "SSD prefill, 2.7B, 128K", "fused.cu"),
]


def headline(card):
    """The table in Markdown, with where its figures come from. A topic without a stored run of the card has no rows."""
    stored = {topic: _of(card, topic) for topic in dict.fromkeys(case.topic for case in CASES)}
    rows = [_row(case, stored[case.topic].ladder(case.ladder)) for case in CASES if stored[case.topic]]
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    dates = sorted({item.date for item in stored.values() if item})
    return f"{table}\n\n*stored runs: {card}, {' and '.join(dates[:1] + dates[1:][-1:])}*"


def _of(card, topic):
    return next((item for item in results.stored(topic) if item.card == card), None)


def _row(case, ladder):
    ours = [ladder[case.ours], *(f for f in ladder.figures if f.name == case.ours + PDL)]
    peers = [f for f in ladder.figures if not f.sources]
    best = min(peers, key=lambda f: f.timing.median) if peers else None
    return (
        case.chapter,
        ladder.title,
        _both(_stale(f) + _time(f) for f in ours),
        _both(f"{100 * f.share:.0f} %" for f in ours),
        f"{_time(best)}, {best.name}" if best else "none was measured",
        _both(f"{best.timing.median / f.timing.median:.2f}×" for f in ours) if best else "",
    )


def _both(cells):
    """Plain, and with programmatic dependent launch behind it."""
    return " / ".join(cells)


def _time(figure):
    return figure.timing.cells()[0]


def _stale(figure):
    return "(stale) " if figure.stale else ""
