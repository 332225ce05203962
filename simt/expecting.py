"""Counters in one's own tests: plain functions and AssertionError, so that any test runner will do.

simt.expect(report, bank_conflicts=0, sectors_per_load=4)
simt.expect(report, {"l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": 1024}, line="out[")
"""

import math
import numbers

from simt.report import ACTIVE, CONFLICTS, INSTRUCTIONS, REQUESTS, SECTORS, SHARED, WAVEFRONTS, Report, ratio

SHOWN = 3  # lines in a message


def _sum(*names):
    return lambda counters: sum(counters[name] for name in names)


def _ratio(above, below):
    return lambda counters: ratio(counters[above], counters[below])


QUANTITIES = {  # name: what makes a number of a launch's or a line's counters
    "global_loads": _sum(REQUESTS.format("ld")),
    "global_stores": _sum(REQUESTS.format("st")),
    "global_atomics": _sum(REQUESTS.format("atom"), REQUESTS.format("red")),
    "sectors_per_load": _ratio(SECTORS.format("ld"), REQUESTS.format("ld")),
    "sectors_per_store": _ratio(SECTORS.format("st"), REQUESTS.format("st")),
    "shared_loads": _sum(SHARED.format("ld")),
    "shared_stores": _sum(SHARED.format("st")),
    "wavefronts_per_shared_load": _ratio(WAVEFRONTS.format("ld"), SHARED.format("ld")),
    "wavefronts_per_shared_store": _ratio(WAVEFRONTS.format("st"), SHARED.format("st")),
    "bank_conflicts": _sum(CONFLICTS.format("ld"), CONFLICTS.format("st")),
    "threads_per_instruction": _sum(ACTIVE),
}


def expect(report, counters=None, *, line=None, **quantities):
    """Raise AssertionError unless a launch did as much as is said here; the message names the lines that did most.

    report      what a launch returned, a Report
    counters    {a name in report.counters: wanted}
    line        look at these source lines alone: a number, or a text that all of them, and no others, contain
    quantities  wanted, by names that need no looking up. Requests of warps: global_loads, global_stores,
                global_atomics, shared_loads, shared_stores. Of each such request, on average: sectors_per_load,
                sectors_per_store (32 bytes of global memory each; 4 for neighbouring floats),
                wavefronts_per_shared_load, wavefronts_per_shared_store. And bank_conflicts, threads_per_instruction
                (32 where no warp diverges)

    Wanted is a number, or a pair (least, most), either of which may be None. A mean of no requests is 0.

    TypeError or ValueError for arguments that name nothing, LaunchError for a launch that was not counted.
    """
    if not isinstance(report, Report):
        raise TypeError(f"expect: report must be what a launch returned, a simt.Report; got {type(report).__name__}")
    wanted = {**(counters or {}), **quantities}
    if not wanted:
        raise ValueError("expect: nothing is expected; name a counter or a quantity, such as bank_conflicts=0")
    counted, lines = report.counters, _lines(report, line)
    where = "" if line is None else f", line {line}" if isinstance(line, int) else f", lines with {line!r}"
    failed = []
    for name, value in wanted.items():
        least, most = _bounds(name, value)
        measure = _measure(report, name)
        got = measure(counted if lines is None else _total(report, lines))
        if not _within(got, least, most):
            by_line = _by_line(report, lines, measure, low=least is not None and got < least)
            failed.append(f"expected {name} {_said(least, most)}; got {_number(got)}{by_line}")
    if failed:
        raise AssertionError("\n".join(f"{report.kernel}{where}: {text}" for text in failed))


def _measure(report, name):
    """What takes counters and returns the number of this name."""
    if name in QUANTITIES:
        return QUANTITIES[name]
    if name in report.counters:
        return _sum(name)
    known = f"a name in report.counters, or one of {', '.join(QUANTITIES)}"
    raise ValueError(f"expect: {name!r} is no counter of this launch: it must be {known}")


def _bounds(name, value):
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2 or pair == (None, None) or not all(v is None or _is_number(v) for v in pair):
        raise TypeError(f"expect: {name} must be a number or a pair (least, most); got {value!r}")
    return pair


def _within(got, least, most):
    enough = least is None or got >= least or math.isclose(got, least)
    return enough and (most is None or got <= most or math.isclose(got, most))


def _is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)


def _lines(report, line):
    """The numbers of the lines to look at; None for all."""
    if line is None:
        return None
    text = (report.source or "").split("\n")
    if isinstance(line, str) and line:
        found = [number for number in report.lines if 0 < number <= len(text) and line in text[number - 1]]
        if not found:
            there = any(line in each for each in text)
            said = "has run no instruction on such a line" if there else "has no such line in its source"
            raise ValueError(f"expect: {report.kernel} {said}: {line!r}")
        return found
    if isinstance(line, int) and not isinstance(line, bool) and line > 0:
        if line not in report.lines:
            raise ValueError(f"expect: {report.kernel} has run no instruction on line {line}")
        return [line]
    raise TypeError(f"expect: line must be a line's number from 1 on, or a part of its text; got {line!r}")


def _total(report, lines):
    """The counters of these lines together."""
    total = {}
    for counters in (report.lines[number] for number in lines):
        for name, value in counters.items():
            value = value * counters[INSTRUCTIONS] if name == ACTIVE else value
            total[name] = total.get(name, 0) + value
    total[ACTIVE] = ratio(total[ACTIVE], total[INSTRUCTIONS])
    return dict.fromkeys(report.counters, 0) | total


def _by_line(report, lines, measure, low):
    """What the lines that did most of it did; where that is too little, those that did least."""
    none = dict.fromkeys(report.counters, 0)
    found = [(measure(none | report.lines[number]), number) for number in lines or report.lines]
    found = sorted((pair for pair in found if pair[0]), key=lambda pair: (pair[0] * (1 if low else -1), pair[1]))
    text = (report.source or "").split("\n")
    said = []
    for value, number in found[:SHOWN]:
        code = f" `{text[number - 1].strip()}`" if 0 < number <= len(text) and text[number - 1].strip() else ""
        said.append(f"\n    {_number(value)} by line {number}{code}")
    return "".join(said) + (f"\n    ... and {len(found) - SHOWN} lines more" if len(found) > SHOWN else "")


def _said(least, most):
    if least == most:
        return f"to be {_number(least)}"
    if least is None:
        return f"to be {_number(most)} or less"
    return f"to be {_number(least)} or more" if most is None else f"to be {_number(least)} to {_number(most)}"


def _number(value):
    return f"{value:.6g}" if isinstance(value, float) else str(value)
