"""The README's headline: each chapter's best rung beside the best of the peers that were measured, from the stored
results of one card.

A peer is a row of a stored ladder that rests on no source of this course. Like is compared with like: times in a graph
with those of the peer that is fastest in a graph, whichever way it is launched, and times as called from Python with
those of the peer that is fastest so. So that nothing is chosen by its figure, the works stand in CASES, and are shown
whatever was measured; one that was not measured at all is named, and left out.
"""

from typing import NamedTuple

from lab import results

HEADINGS = (
    "chapter",
    "work",
    "ours",
    "of the roof",
    "best peer measured",
    "times faster",
    "ours, as called",
    "best peer, as called",
    "times faster, as called",
    "processor: ours; peer",
    "sustained",
)
HOST = HEADINGS.index("processor: ours; peer")  # a column that stands there where one of its cells is known
PDL = ", PDL"
NONE = "–"
SAME = 0.03  # of the time: sustained figures that differ by less are not shown


class Case(NamedTuple):
    """A row: what `ours` did in a ladder of a topic, and with programmatic dependent launch where that was measured:
    in the row `dependent`, or in the one that is called as `ours` is, with PDL."""

    chapter: str
    topic: str
    ladder: str
    ours: str
    dependent: str = ""


CASES = [
    Case("04", "gemv", "GEMV bf16, 4096 × 4096", "rows share x", "ring, tensor cores, PDL"),
    Case("04", "gemv", "GEMV bf16, 14336 × 4096", "rows share x", "ring, tensor cores, PDL"),
    *(Case("05", "fusion", f"Mistral-7B, feed-forward block, {name}", "2 launches") for name in ("bf16", "fp16")),
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
    *(Case("10", "paged", f"paged decode bf16, {cell}", "decode") for cell in ("64 × 4K", "1 × 128K and 63 × 1K")),
    Case("12", "ssd", "SSD prefill, 2.7B, 8K", "five, chunk 256"),
    Case("13", "ssd", "SSD prefill, 2.7B, 8K", "loads ahead, dt once"),
    *(Case("14", "matmul", f"Matmul bf16, {n} × {n} times {n} × {n}", "sizes by a plan") for n in (4096, 8192)),
    *(Case("14", "matmul", f"Matmul bf16, {m} × 4096 times 14336 × 4096", "ours") for m in (512, 4096)),
    Case("15", "ssd", "SSD prefill, 2.7B, 1K", "fused.cu"),
    Case("15", "ssd", "SSD prefill, 2.7B, 8K", "fused.cu"),
    Case("15", "ssd", "SSD prefill, 2.7B, 128K", "fused.cu"),
    Case("17", "llm", "Mistral-7B, fp16, a token behind 127", "attention in one launch, too"),
    Case("17", "llm", "Mistral-7B, fp16, a token behind 4095", "attention in one launch, too"),
    Case("17", "llm", "Mistral-7B, int8, a token behind 127", "attention in one launch, too"),
    Case("17", "llm", "Mistral-7B, int4, a token behind 127", "attention in one launch, too"),
    Case("17", "llm", "Llama-3.2-1B, bf16, a token behind 127", "one launch"),
    Case("18", "mamba2", "Mamba-2 2.7B, fp16, a token", "one launch"),
    Case("18", "mamba2", "Mamba-2 2.7B, prefill, 8K", "ours"),
    Case("18", "mamba2", "Mamba-2 2.7B, prefill, 128K", "ours"),
    Case("18", "mamba2", "State step, batch 64, 80 heads of 64, dstate 128, 32 bits", "state_step"),
    *(
        Case("21", "ssd_backward", f"SSD forward and backward, 2.7B, bf16, {n}", "fused forward, fused backward")
        for n in ("8K", "128K")
    ),
]


def headline(card):
    """The table in Markdown, with where its figures come from. A topic without a stored run of the card has no rows. A
    work that a stored run lacks has none either, and that is said."""
    stored = {topic: _of(card, topic) for topic in dict.fromkeys(case.topic for case in CASES)}
    rows = []
    for case in CASES:
        if ladder := _ladder(stored[case.topic], case):
            rows.append(_row(case, ladder))
        elif stored[case.topic]:
            print(
                f"notice: the headline leaves out {case.ladder!r}: the run of {case.topic} has no {case.ours!r} there"
            )
    headings = HEADINGS
    if all(row[HOST] == NONE for row in rows):
        headings, *rows = ((*row[:HOST], *row[HOST + 1 :]) for row in (headings, *rows))
    lines = [headings, ("---",) * len(headings), *rows]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    dates = sorted({item.date for item in stored.values() if item})
    return f"{table}\n\n*stored runs: {card}, {' and '.join(dates[:1] + dates[1:][-1:])}{_called_on(stored)}*"


def _called_on(stored):
    """Where and when the times as called of the headline were measured, as far as that is known."""
    ladders = [ladder for case in CASES if (ladder := _ladder(stored[case.topic], case))]
    found = [ladder.called_on for ladder in ladders if ladder.called_on]
    if not found:
        return ""
    dates = sorted({on.date for on in found})
    processors = " and ".join(sorted({on.processor for on in found}))
    return f"; as called: {processors}, {' and '.join(dates[:1] + dates[1:][-1:])}"


def ladders(chapter, card="NVIDIA H200"):
    """The stored ladders, whole, from which a chapter's rows of the headline are."""
    cases = [case for case in CASES if case.chapter == chapter]
    return [ladder for case in cases if (ladder := _ladder(_of(card, case.topic), case))]


def _of(card, topic):
    return next((item for item in results.stored(topic) if item.card == card), None)


def _ladder(stored, case):
    """The stored ladder of a case, whose title begins as it says, or None; None too where it lacks the row."""
    ladders = stored.ladders if stored else ()
    found = next((ladder for ladder in ladders if ladder.title.startswith(case.ladder)), None)
    return found if found and case.ours in [figure.name for figure in found.figures] else None


def _row(case, ladder):
    dependent = case.dependent or case.ours + PDL
    ours = [ladder[case.ours], *(f for f in ladder.figures if f.name == dependent)]
    best = ladder.best_peer(lambda figure: figure.timing)
    return (
        case.chapter,
        ladder.title,
        _both(_stale(f) + _time(f.timing) for f in ours),
        _both(f"{100 * f.share:.0f} %" for f in ours),
        f"{_time(best.timing)}, {best.name}" if best else "none was measured",
        _times(best and best.timing, [f.timing for f in ours]),
        *_as_called(ladder, ours),
        _sustained(ours, best),
    )


def _as_called(ladder, ours):
    """Cells of the times as called from Python: ours, the best peer's, how many times faster; and what the processor
    does for a call, ours and that peer's."""
    called = [f.called for f in ours]
    best = ladder.best_peer(lambda figure: figure.called or figure.timing)
    if None in called or (best and not best.called):
        return (NONE,) * 4
    theirs = f"{_time(best.called)}, {best.name}" if best else ""
    stale = "(stale) " if ladder.called_on and ladder.called_on.stale else ""
    times = stale + _both(map(_time, called)), stale + theirs, _times(best and best.called, called)
    hosts = [f.host for f in ours]
    if None in hosts:
        return *times, NONE
    return *times, stale + _both(map(_time, hosts)) + (f"; {_time(best.host)}" if best and best.host else "")


def _sustained(ours, best):
    """Times of more than a second on end, where they differ: ours, and the best peer's."""
    figures = [*ours, *([best] if best else [])]
    if not all(f.sustained for f in figures):
        return NONE
    if all(abs(f.sustained.median / f.timing.median - 1) < SAME for f in figures):
        return "the same"
    found = _both(_time(f.sustained) for f in ours)
    if not best:
        return found
    return f"{found}; {_time(best.sustained)}: {_times(best.sustained, [f.sustained for f in ours])}"


def _times(theirs, ours):
    """How many times faster each of ours is."""
    return _both(f"{theirs.median / timing.median:.2f}×" for timing in ours) if theirs else ""


def _both(cells):
    """Plain, and with programmatic dependent launch behind it."""
    return " / ".join(cells)


def _time(timing):
    return timing.cells()[0]


def _stale(figure):
    return "(stale) " if figure.stale else ""
