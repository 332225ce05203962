"""What a ladder is made of: a rung of the course, a measured row, and what times as called rest on."""

from dataclasses import dataclass, field

from lab.roof import NOISE
from lab.timing import Timing


@dataclass(frozen=True)
class Rung:
    """One step of a ladder in `kernels/`: its function, what it is called, and the files that decide its speed."""

    name: str
    title: str
    function: object
    sources: tuple


@dataclass(frozen=True)
class Figure:
    """One measured rung. `share` is its rate over the rate of the probe beside it: the part of the roof it reached."""

    name: str
    bytes: int  # that one call must move, at the least
    flops: int
    timing: Timing
    share: float
    bound: str  # "read" or "flops": which of the two limits it
    checked: str = "not checked"
    sources: tuple = ()
    stale: bool = False
    called: Timing = None  # on a GPU: the time from Python, without a graph
    sustained: Timing = None  # on a GPU, of some: in a graph that is replayed for more than a second
    host: Timing = None  # on a GPU: of a call from Python, what the processor does for it

    @property
    def rate(self):
        """Bytes/s where reading is the limit, flop/s where arithmetic is."""
        return (self.bytes if self.bound == "read" else self.flops) / self.timing.median

    @property
    def roof(self):
        """The probe's rate, in the unit of `rate`."""
        return self.rate / self.share

    @property
    def rate_text(self):
        """The rate with a fitting unit: "169 GB/s", "4.32 TB/s", "38.6 GFLOP/s"."""
        prefix, size = ("T", 1e12) if self.rate >= 0.9995e12 else ("G", 1e9)
        return f"{self.rate / size:.3g} {prefix}{'B' if self.bound == 'read' else 'FLOP'}/s"

    @property
    def fastest(self):
        """The Timing of the faster way, in a graph or as called. Some peers run slower in a graph, and are not to be
        held to it."""
        return min((t for t in (self.timing, self.called) if t), key=lambda timing: timing.median)

    def speedup(self, over):
        """How many times more flops this rung does in a second than the figure `over`."""
        mine, other = (f.flops / f.timing.median for f in (self, over))
        return mine / other

    @property
    def impossible(self):
        """True if the figure lies above the roof: then it was not measured what we think was measured. A GPU's roof of
        arithmetic is what cuBLAS reaches in a large product, and nothing that a kernel could not surpass."""
        return self.share > NOISE and not (self.bound == "flops" and self.called)

    def cells(self, first):
        """The row of this figure in a table; `first` is the first rung, for the speed-up at equal work."""
        share = f"{100 * self.share:.2g} %" if self.share < 0.1 else f"{100 * self.share:.0f} %"
        mark = ", impossible: above the roof" if self.impossible else ""
        times = self.speedup(first)
        return (
            self.name + (" (stale: the source has changed since)" if self.stale else ""),
            self.checked,
            f"{_amount(self.bytes, 'B')}, {_amount(self.flops, 'FLOP')}",
            *self.timing.cells(),
            self.rate_text,
            share + mark,
            f"{times:.2g}×" if times < 10 else f"{times:,.0f}×",
        )


def _amount(number, unit):
    """A count with a fitting prefix: 12.6 MB."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number} {unit}"


@dataclass(frozen=True)
class AsCalled:
    """What a ladder's times as called rest on besides its kernels: the processor, and the Python that a call runs. They
    may be measured on another day than the times in a graph."""

    processor: str
    sources: dict  # path from the course's folder: hash of its code then; None until stored
    card: str = ""
    date: str = ""
    versions: dict = field(default_factory=dict)
    stale: bool = False  # marked: one of the sources has changed since
