"""A card that is this CPU, for tests of benches: every call is made once and takes 10 µs; two copies of each tensor."""

import gc
from types import SimpleNamespace

from kernels import benching
from lab import Timing, as_called, cuda_timing


class Noted:
    """Python's look for garbage: what is asked of it. It would go through all that other tests have left, each time."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        assert hasattr(gc, name)
        return lambda: self.asked.append(name)


def put_in(monkeypatch):
    """Put it in the card's place. Returns what a test may look at and change: `timed`, the names of the rows that were
    timed; `calls`, their lists of calls; `after(name)`, which is called when one was; `called`, the names of those that
    were timed as called, and `as_called`, the seconds that this takes."""
    made = SimpleNamespace(timed=[], calls={}, after=lambda name: None, called=[], as_called=2e-5)

    def against(probe, calls, *, seconds, least_turns):
        for name, call in calls.items():
            made.timed.append(name)
            made.calls[name] = call
            for c in call:
                c()
            made.after(name)
        return {name: (Timing.of([1e-5]), 2.0) for name in calls}

    def together(calls, **_):
        made.called += calls
        for c in (c for call in calls.values() for c in call):
            c()
        return {name: Timing.of([made.as_called]) for name in calls}

    monkeypatch.setattr(benching, "gc", Noted())
    monkeypatch.setattr(cuda_timing, "expect_gpu", lambda where: None)
    monkeypatch.setattr(cuda_timing, "cold_copies", lambda tensor: [tensor, tensor.clone()])
    monkeypatch.setattr(cuda_timing, "COLD", 1)
    monkeypatch.setattr(cuda_timing, "read_calls", lambda tensors: [lambda: None] * len(tensors))
    monkeypatch.setattr(cuda_timing, "read_probe", lambda: (lambda: None, 1 << 30))
    monkeypatch.setattr(cuda_timing, "flops_probe", lambda: (lambda: None, 1 << 40))
    monkeypatch.setattr(cuda_timing, "against", against)
    monkeypatch.setattr(as_called, "together", together)
    monkeypatch.setattr(as_called, "host", lambda calls, **_: {name: Timing.of([5e-6]) for name in calls})
    monkeypatch.setattr(cuda_timing, "sustained", lambda calls: Timing.of([1.1e-5]))
    monkeypatch.setattr(cuda_timing, "Graph", lambda calls: SimpleNamespace(turn=lambda: [len([c() for c in calls])]))
    return made
