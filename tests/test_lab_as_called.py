"""Times as called: on a made-up card that works while the processor calls, and on a real one where there is one."""

import functools
import gc
import sys
from types import SimpleNamespace

import pytest
import torch

from lab import as_called, cuda_timing

HERE = torch.cuda.is_available() and torch.version.cuda is not None
needs_gpu = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")
US = 1e-6


class Machine:
    """A processor and a card with clocks of their own: a call takes the one for so long, and then the other."""

    def __init__(self, monkeypatch, slowness=lambda now: 1.0):
        self.now, self.busy_until, self.slowness, self.log, self.longest = 0.0, 0.0, slowness, [], 0
        self.queued = 0
        monkeypatch.setattr(cuda_timing, "expect_gpu", lambda where: None)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        clock = SimpleNamespace(perf_counter=lambda: self.now, thread_time=lambda: self.now)
        monkeypatch.setattr(as_called, "time", clock)

    def wait(self):
        self.now, self.queued = max(self.now, self.busy_until), 0

    def call(self, name, processor, card):
        def run():
            assert not gc.isenabled()
            self.log.append(name)
            self.queued += 1
            self.longest = max(self.longest, self.queued)
            self.now += processor * self.slowness(self.now)
            self.busy_until = max(self.now, self.busy_until) + card

        return run


def turns(log):
    """Which names took turns, in their order."""
    return [name for at, name in enumerate(log) if at == 0 or log[at - 1] != name]


def test_the_larger_of_the_processors_time_and_the_cards_counts(monkeypatch):
    machine = Machine(monkeypatch)
    calls = {"short": machine.call("short", 10 * US, 2 * US), "long": machine.call("long", 10 * US, 30 * US)}
    found = as_called.together(calls)
    assert found["short"].median == pytest.approx(10 * US, rel=0.01)
    assert found["long"].median == pytest.approx(30 * US, rel=0.01)
    host = as_called.host(calls)
    assert [host[name].median for name in calls] == pytest.approx([10 * US] * 2)  # it never waits for the card
    assert gc.isenabled()


def test_rows_take_turns_there_and_back_again(monkeypatch):
    machine = Machine(monkeypatch)
    calls = {name: machine.call(name, 10 * US, 0) for name in "abc"}
    for measure in (as_called.together, as_called.host):
        machine.log.clear()
        found = measure(calls, seconds=0, least_rounds=4)
        assert "".join(turns(machine.log)).endswith("abcbabcba")  # c twice, and a twice, on end
        assert {timing.runs for timing in found.values()} == {4}


def test_a_drift_hits_all_alike(monkeypatch):
    machine = Machine(monkeypatch, lambda now: 1 + 2 * now)
    found = as_called.together({name: machine.call(name, 10 * US, 0) for name in "abc"}, seconds=0.3)
    times = [timing.median for timing in found.values()]
    assert max(times) / min(times) < 1.03 and min(times) > 12 * US


def test_every_copy_has_its_turn_and_the_queue_never_fills(monkeypatch):
    machine = Machine(monkeypatch)
    some = [machine.call(n, us * US, 1e-7) for n, us in enumerate((10, 20, 60))]
    assert as_called.together({"a": some})["a"].median == pytest.approx(30 * US, rel=0.01)
    machine.log.clear()
    found = as_called.host({"a": some})["a"].median
    assert found == pytest.approx(30 * US, rel=0.05) and set(machine.log) == {0, 1, 2}
    machine.longest = 0
    as_called.host({"a": [machine.call("a", 1 * US, 2e-3)], "b": machine.call("b", 1 * US, 0)})
    assert machine.longest <= as_called.BATCH
    with cuda_timing.no_garbage_collected():
        long = as_called._batch([machine.call("a", 1 * US, 2e-3)], machine.wait)
    assert 1 <= len(long) <= as_called.BACKLOG / 2e-3 + 1


def test_what_a_call_passes_through(tmp_path, monkeypatch):
    files = {
        "kernels/a.py": "import b\ndef run(x): return b.twice(x)\n",
        "lab/b.py": "def twice(x): return 2 * x\n",
        "lab/c.py": "def never(): pass\n",
        "other/d.py": "def also(x): return x\n",
        "kernels/topic/bench.py": "def row(run): return run()\n",
        "lab/prepared/calls.c": "int n;",
    }
    for room, text in files.items():
        path = tmp_path / room
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
        monkeypatch.syspath_prepend(str(path.parent))
    import a
    import bench
    import d

    def call():
        return bench.row(lambda: d.also(a.run(1)))

    assert as_called.passed_through(call, root=tmp_path) == ["kernels/a.py", "lab/b.py"]
    prepared = SimpleNamespace(__file__=str(tmp_path / "lab/prepared/__init__.py"))
    monkeypatch.setitem(as_called.sys.modules, as_called.PREPARED, prepared)  # what it does in C no profiler sees
    assert as_called.passed_through(call, root=tmp_path) == ["kernels/a.py", "lab/b.py", "lab/prepared/calls.c"]
    with pytest.raises(ZeroDivisionError):
        as_called.passed_through(lambda: 1 / 0)
    assert as_called.sys.getprofile() is None
    for name in ("a", "b", "bench", "d"):
        del sys.modules[name]


def test_a_kernels_call_passes_through_its_launcher():
    from kernels import gemv

    W, x = torch.randn(4, 64), torch.randn(64)
    call = functools.partial(gemv.gemv, W, x, out=torch.empty(4))
    call()
    found = as_called.passed_through(call)
    assert "kernels/gemv/__init__.py" in found and "lab/cuda/launch.py" in found
    assert all(path.split("/")[0] in as_called.ROOMS for path in found)


@needs_gpu
def test_on_a_card_as_called_waits_and_the_host_does_not():
    spin = functools.partial(torch.cuda._sleep, 1_000_000)
    alone = cuda_timing.against(spin, {"": spin}, seconds=0, least_turns=1)[""][0].median
    assert as_called.together({"a": spin})["a"].median == pytest.approx(alone, rel=0.2)
    assert as_called.host({"a": spin})["a"].median < alone / 5
    small = torch.zeros(1, device="cuda")
    found = as_called.together({"add": lambda: small.add_(1)})["add"].median
    assert as_called.host({"add": lambda: small.add_(1)})["add"].median <= 1.1 * found
