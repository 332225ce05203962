"""torch.compile as a peer: each compile chooses for itself, the fastest counts, and what was tuned ahead is found."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from kernels import compiling
from kernels.compiling import Way
from lab import cuda_timing

pytest.importorskip("triton")


def product(W, x):
    return W @ x


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """torch.compile, made up: at its first call it notes where choices go, and what it was asked."""
    seen = []

    def compile(function, *, dynamic, options):
        asked = SimpleNamespace(function=function, options=options, folder=None)
        seen.append(asked)

        def run(*arguments):
            asked.folder = asked.folder or os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            return function(*arguments)

        return run

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setenv(compiling.HOME, str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/before")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/triton's")
    compiling._home.cache_clear()
    yield seen
    compiling._home.cache_clear()


def way(name="W @ x", **more):
    W, x = torch.randn(4, 3), torch.randn(3)
    return Way("GEMV", name, product, lambda run: [lambda: run(W, x)] * 2, **more)


def test_the_fastest_of_three_compiles_counts(compiler, monkeypatch, tmp_path):
    taken = iter([[3.0], [1.0, 1.0, 9.0], [2.0]])
    timed = []
    monkeypatch.setattr(
        cuda_timing, "Graph", lambda calls: timed.append(calls) or SimpleNamespace(turn=lambda: next(taken))
    )
    modes = compiling.modes(way())
    assert list(modes) == ["without PDL", "with PDL"]
    assert modes["with PDL"]() is timed[1] and len(timed) == len(compiler) == 3
    for asked in compiler:
        assert asked.options == {"max_autotune": True, "coordinate_descent_tuning": True, "triton.enable_pdl": True}
        assert os.path.dirname(asked.folder) == str(tmp_path)
    # each compile has code of its own, or torch.compile would hand out the first result again, and a folder of its own
    assert len({id(asked.function.__code__) for asked in compiler}) == 3
    assert len({asked.folder for asked in compiler}) == 3
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/before"


def test_untuned_is_compiled_once_and_no_two_ways_share_choices(compiler, monkeypatch):
    monkeypatch.setattr(cuda_timing, "Graph", lambda calls: SimpleNamespace(turn=lambda: [1.0]))
    for one in (way(tuned=False), way("F.linear", tuned=False)):
        for make in compiling.modes(one).values():
            make()
    assert [asked.options for asked in compiler] == [{"triton.enable_pdl": pdl} for pdl in (False, True)] * 2
    assert len({asked.folder for asked in compiler}) == 4


def test_a_twin_does_the_same():
    scale = 3
    twin = compiling._twin(lambda x, by=2: scale * by * x, 1)
    assert twin(5) == 30 and twin(5, by=1) == 15


def test_choices_are_looked_for_where_they_were_left(compiler, monkeypatch):
    """A process that tunes, and the bench, mean the same folder."""
    monkeypatch.setitem(sys.modules, "a_bench", SimpleNamespace(ways=lambda: [None, lambda: [way(), way(tuned=False)]]))
    compiling._tune("a_bench", 1, "with PDL", 2)
    compiling.compiled(way(), "with PDL", 2)
    tuned, found = (asked.folder for asked in compiler)  # the one that is not tuned was not compiled ahead
    assert tuned == found


def test_each_compile_is_tuned_in_a_process_of_its_own(compiler, monkeypatch, tmp_path):
    jobs, done = [], []

    def run(command, *, env, timeout, **quiet):
        assert command[1:3] == ["-m", "kernels.compiling"] and env[compiling.HOME] == str(tmp_path)
        assert env["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
        jobs.append(tuple(command[3:]))
        raise compiling.subprocess.TimeoutExpired(command, timeout)  # which does not end the bench

    monkeypatch.setattr(compiling.subprocess, "run", run)
    monkeypatch.setitem(sys.modules, "a_bench", SimpleNamespace(ways=lambda: [None] * 2))
    compiling.ahead("a_bench", lambda: done.append(1))
    wanted = {("a_bench", c, mode, t) for c in "01" for mode in compiling.PDL for t in "012"}
    assert len(jobs) == len(wanted) and set(jobs) == wanted and done == [1]


def test_one_process_measures_at_a_time(compiler, monkeypatch, tmp_path):
    import fcntl

    from torch._inductor.runtime.benchmarking import benchmarker

    def measured(*arguments, **options):
        with open(tmp_path / "lock", "w") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return 7.0

    def bound(run):
        assert benchmarker.benchmark_gpu("what", rep=40) == 7.0
        return [lambda: None]

    monkeypatch.setattr(benchmarker, "benchmark_gpu", measured, raising=False)
    ways = [Way("GEMV", "a", product, bound)]
    monkeypatch.setitem(sys.modules, "a_bench", SimpleNamespace(ways=lambda: [lambda: ways]))
    compiling._tune("a_bench", 0, "without PDL", 0)
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again


@pytest.mark.parametrize("module", ["kernels.gemv.bench", "kernels.fusion.bench", "kernels.lowbit.bench"])
def test_every_bench_has_something_to_tune(module):
    assert all(map(callable, compiling.importlib.import_module(module).ways()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_card_each_compile_is_right():
    torch.compiler.reset()
    W, x = torch.randn(512, 1024, device="cuda"), torch.randn(1024, device="cuda")
    real = Way("test", "W @ x", product, lambda run: [lambda: run(W, x)])
    for mode in compiling.PDL:
        (call,) = compiling.compiled(real, mode, 0)
        torch.testing.assert_close(call(), W @ x, rtol=1e-4, atol=1e-3)
