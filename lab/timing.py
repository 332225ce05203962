"""One way to time: warm up, repeat, take the median, and show the spread.

A median shrugs off the one run that the operating system interrupted; p20 and p80 (a fifth of the runs were faster,
a fifth slower) say how far two medians must lie apart to mean anything.

LAB_HASTE=1 in the environment, as where tests run notebooks: one turn is enough, a tenth as long. Figures are rough.
"""

import os
import time
from dataclasses import dataclass

import numpy as np

HASTE = 0.1 if os.environ.get("LAB_HASTE") == "1" else 1.0
TURN = 0.05 * HASTE  # seconds of timed calls in a turn, one call at the least
SETTLE = 0.02 * HASTE  # seconds of untimed calls before them
SLOW = 0.5 * HASTE  # a call that takes longer is timed at once: next to it, warming up is nothing
SPIN = 0.1 * HASTE  # ... and after another library: its threads go on spinning for so long, and would be timed as ours


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, 20th and 80th percentile, and how many calls were timed."""

    median: float
    p20: float
    p80: float
    runs: int

    @classmethod
    def of(cls, seconds):
        p20, median, p80 = np.percentile(seconds, [20, 50, 80])
        return cls(float(median), float(p20), float(p80), len(seconds))

    def cells(self):
        """The median with its unit, and p20 – p80 in the same unit: ("22 ms", "21.4 – 32.5")."""
        unit, size = _unit(self.median)
        return f"{self.median / size:.3g} {unit}", f"{self.p20 / size:.3g} – {self.p80 / size:.3g}"

    def __str__(self):
        median, spread = self.cells()
        return f"{median} ({spread}, {self.runs} runs)"


def measure(function, *, seconds=1.0, least_runs=5):
    """Time `function()`: some calls to warm up, then calls until `seconds` have passed. Returns a Timing.

    Give it a call whose data does not fit in a cache, or you will time the cache.
    """
    return side_by_side({"": function}, seconds=seconds, least_runs=least_runs)[""]


def side_by_side(functions, *, seconds=1.0, least_runs=5):
    """Time several functions in turns, a, b, c, a, b, c, ..., so that a drift of the machine hits all alike.

    functions  {name: function of no arguments}
    seconds    how long to go on, per function
    Returns {name: Timing}.
    """
    taken = {name: [] for name in functions}
    least_runs = least_runs if HASTE == 1 else 1
    stop = time.perf_counter() + HASTE * seconds * len(functions)
    while min(map(len, taken.values())) < least_runs or time.perf_counter() < stop:
        for name, function in functions.items():
            taken[name] += _turn(function, SPIN if len(functions) > 1 else SETTLE)
    return {name: Timing.of(t) for name, t in taken.items()}


def against(probe, functions, *, seconds=1.0, least_turns=5):
    """Time functions in turns, and the probe right before each turn. Returns {name: (Timing, ratio)}.

    The ratio is the function's time over the probe's: the median over turns of the two medians of one turn. Many
    machines change speed from one second to the next (a laptop's clock, a neighbour on a shared server); a ratio of
    two moments that lie side by side does not see that, a ratio of two separate medians does.
    """
    taken, ratios = {name: [] for name in functions}, {name: [] for name in functions}
    least_turns = least_turns if HASTE == 1 else 1
    stop = time.perf_counter() + HASTE * seconds * len(functions)
    while min(map(len, ratios.values())) < least_turns or time.perf_counter() < stop:
        for name, function in functions.items():
            beside = np.median(_turn(probe, SPIN))
            turn = _turn(function, SETTLE)
            taken[name] += turn
            ratios[name].append(np.median(turn) / beside)
    return {name: (Timing.of(taken[name]), float(np.median(ratios[name]))) for name in functions}


def _turn(function, settle):
    """Call `function` until `settle` has passed, then time calls for TURN. Returns the seconds of each timed call."""
    begin = time.perf_counter()
    function()
    first = time.perf_counter() - begin
    if first > SLOW:
        return [first]
    while time.perf_counter() - begin < settle:
        function()
    taken, begin = [], time.perf_counter()
    now = begin
    while now - begin < TURN:
        function()
        last, now = now, time.perf_counter()
        taken.append(now - last)
    return taken


def _unit(seconds):
    """A fitting unit of time and its size in seconds."""
    for unit, size in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return unit, size
    return "ns", 1e-9
