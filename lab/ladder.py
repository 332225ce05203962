"""A ladder: rungs that compute the same thing, each checked, timed and held against the roof.

    ladder = Ladder("GEMV, 8192 × 8192, float32", bound="read")
    ladder.add("naive", lambda: naive(W, x, out=y), bytes=W.nbytes, flops=2 * W.size, verdict=verdict)
    ladder                  # the table; ladder.bars() and ladder.roofline() draw it

Each rung is timed in turns with a probe that does nothing but read (or multiply) as fast as the machine can. Its
percentage of the roof rests on that comparison and not on seconds alone, so that a machine that slows down for a
moment slows both sides.

Ladder(..., device="cuda") times on the GPU, as lab/cuda_timing.py says: a call may then be a list of functions, one for
each copy of its weights, and is timed in a CUDA graph, and then as called from Python (lab/as_called.py): what a call
takes, and what the processor does for it.
"""

from dataclasses import dataclass, field, replace

from lab import plots
from lab.figure import AsCalled, Figure
from lab.processor import cpu_name
from lab.roof import flops_probe, read_probe, roof
from lab.roof_gpu import gpu_roof
from lab.table import html_table
from lab.timing import against

HEADINGS = ("rung", "checked", "work", "time", "p20 – p80", "rate", "of the roof", "speed-up")
CALLED, HOST, AT = "as called", "processor", 5  # further columns and their place, in ladders timed on a GPU


@dataclass
class Ladder:
    """Rungs and their figures. `bound` is "read" or "flops"; `source` says where stored figures come from; `device` is
    "cpu" or "cuda"; `note` says how rows were measured that were measured otherwise than the rest."""

    title: str
    bound: str
    figures: list = field(default_factory=list)
    source: str = ""
    calls: dict = field(default_factory=dict, repr=False)
    first: Figure = None  # what the speed-up is over, if not the first of these figures
    device: str = "cpu"
    called_on: AsCalled = None
    note: str = ""

    def __post_init__(self):
        if self.bound not in ("read", "flops"):
            raise ValueError(f'Ladder: bound must be "read" or "flops", got {self.bound!r}')
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f'Ladder: device must be "cpu" or "cuda", got {self.device!r}')

    def plan(self, name, call, *, bytes, flops, verdict=None, sources=()):
        """Note a rung, to be timed by `again`. A rung that is wrong raises: a wrong kernel has no speed.

        call     the function to time, without arguments; on "cuda" also a list of functions, one for each copy of the
                 weights
        bytes    what one call must move, at the least
        verdict  what `check` returned
        sources  paths from the course's folder of the files that decide its speed
        """
        if verdict is not None and not verdict:
            raise ValueError(f"{name} is not right, so it is not timed: {verdict}")
        checked = "not checked" if verdict is None else str(verdict)
        self.calls[name] = {
            "call": call,
            "fixed": {"bytes": bytes, "flops": flops, "checked": checked, "sources": tuple(sources)},
        }

    def add(self, name, call, *, seconds=0.5, **facts):
        """Time `call()` beside the probe, append it as a rung (facts: as for `plan`), and return its scorecard."""
        self.plan(name, call, **facts)
        (figure,) = self._time([name], seconds, turns=3)
        if self.device == "cuda":
            figure = replace(figure, **self.as_called([name])[name])
        # a rung that is timed once more keeps its place
        self.figures = list(({f.name: f for f in self.figures} | {name: figure}).values())
        return Ladder(name, self.bound, [figure], first=self.figures[0], device=self.device)

    def again(self, seconds=0.5, *, sustain=()):
        """Time all rungs in turns, in one run. Returns the ladder.

        sustain  rungs that are then timed for more than a second on end, on "cuda"; so is the best peer, which they
                 compete with
        """
        if not self.calls:
            raise ValueError(f"{self.title}: there is no rung to time; stored figures cannot be timed again")
        self.figures = self._time(list(self.calls), seconds, turns=5)
        if self.device == "cuda":
            found = self.as_called()
            self.figures = [replace(f, **found[f.name]) for f in self.figures]
        if sustain and (peer := self.best_peer()):
            sustain = *sustain, peer.name
        self.figures = [self._sustained(f) if f.name in sustain else f for f in self.figures]
        return self

    def as_called(self, names=None):
        """Time rungs as called from Python, in turns: {name: {"called": Timing, "host": Timing}}. What they rest on is
        noted in called_on. names: which of those planned; all"""
        from lab import as_called

        calls = {name: self.calls[name]["call"] for name in names or self.calls}
        found, host = as_called.together(calls), as_called.host(calls)
        sources = set(self.called_on.sources if self.called_on else ())
        for name, call in calls.items():
            if ours := self.calls[name]["fixed"]["sources"]:
                sources |= {*ours, *as_called.passed_through(call[0] if isinstance(call, (list, tuple)) else call)}
        self.called_on = AsCalled(cpu_name(), dict.fromkeys(sorted(sources)))
        return {name: {"called": found[name], "host": host[name]} for name in calls}

    def _sustained(self, figure):
        from lab import cuda_timing

        return replace(figure, sustained=cuda_timing.sustained(self.calls[figure.name]["call"]))

    def best_peer(self, taken=lambda figure: figure.fastest):
        """Of the rows that rest on no source of the course the fastest, or None. taken: the Timing that decides"""
        return min((f for f in self.figures if not f.sources), key=lambda f: taken(f).median, default=None)

    def _time(self, names, seconds, turns):
        calls = {name: self.calls[name]["call"] for name in names}
        if self.device == "cuda":
            from lab import cuda_timing  # brings PyTorch, so it is imported only for those who ask for the GPU

            probe, amount = cuda_timing.read_probe() if self.bound == "read" else cuda_timing.flops_probe()
            timed = cuda_timing.against(probe, calls, seconds=seconds, least_turns=turns)
        else:
            probe, amount = read_probe() if self.bound == "read" else flops_probe()
            timed = against(probe, calls, seconds=seconds, least_turns=turns)
        figures = []
        for name in names:
            timing, ratio = timed[name]
            fixed = self.calls[name]["fixed"]
            mine = fixed["bytes"] if self.bound == "read" else fixed["flops"]
            # the probe does `amount` in one unit of time, the rung does `mine` in `ratio` of them
            figures.append(Figure(name=name, timing=timing, share=mine / amount / ratio, bound=self.bound, **fixed))
        return figures

    def __getitem__(self, name):
        """The figure of the rung with this name."""
        for figure in self.figures:
            if figure.name == name:
                return figure
        raise KeyError(f"{self.title}: no rung {name!r}; there are {', '.join(f.name for f in self.figures)}")

    def speedup(self, name, over):
        """How many times faster rung `name` does the same work than rung `over`."""
        return self[name].speedup(self[over])

    @property
    def headings(self):
        """HEADINGS, and "as called" and "processor" where that was timed."""
        return (*HEADINGS[:AT], *(heading for heading, _ in self._further()), *HEADINGS[AT:])

    def _further(self):
        """(heading, the figures' timings) of the further columns that there are."""
        columns = (CALLED, [f.called for f in self.figures]), (HOST, [f.host for f in self.figures])
        return [column for column in columns if any(column[1])]

    def rows(self):
        """The table's rows, as tuples of strings, without the headings."""
        rows = [figure.cells(self.first or self.figures[0]) for figure in self.figures]
        stale = "(stale) " if self.called_on and self.called_on.stale else ""
        for at, (_, timings) in enumerate(self._further(), AT):
            cells = [stale + timing.cells()[0] if timing else "" for timing in timings]
            rows = [(*row[:at], cell, *row[at:]) for row, cell in zip(rows, cells)]
        return rows

    def __str__(self):
        rows = [self.headings, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.headings))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([self._caption(), *lines])

    __repr__ = __str__

    def _caption(self):
        notes = "; ".join(note for note in (self.source, self.note) if note)
        return self.title + (f" ({notes})" if notes else "")

    def _repr_html_(self):
        rows, caption = self.rows(), self._caption()
        keep = list(range(len(self.headings)))
        work = self.headings.index("work")
        if len(rows) > 1 and len({r[work] for r in rows}) == 1:  # the same for all: once is enough
            keep.remove(work)
            caption += f"; {rows[0][work]} each"
        return html_table(caption, [self.headings[i] for i in keep], [[r[i] for i in keep] for r in rows])

    def markdown(self, columns=None):
        """The table in Markdown, for the README; all columns, or those named."""
        keep = [self.headings.index(c) for c in columns or self.headings]
        rows = [self.headings, *self.rows()]
        lines = ["| " + " | ".join(row[i].replace("|", r"\|") for i in keep) + " |" for row in rows]
        return "\n".join([lines[0], "|" + "---|" * len(keep), *lines[1:]])

    def bars(self):
        """Bars of every rung's rate, with the roof as a line."""
        return plots.bars(self)

    def roofline(self, machine_roof=None):
        """The rungs as points under a machine's roofline (default: this one's, or its GPU's), as far below it as they
        were measured to be below the probe beside them."""
        machine_roof = machine_roof or (gpu_roof() if self.device == "cuda" else roof())
        if machine_roof is None:
            raise ValueError(f"{self.title}: this machine has no GPU; give the roof of the one that was measured")
        points = []
        for f in self.figures:
            limit = machine_roof.read * f.flops / f.bytes if f.bound == "read" else machine_roof.flops
            points.append((f.name, f.flops / f.bytes, f.share * limit))
        return plots.roofline(machine_roof, points)
