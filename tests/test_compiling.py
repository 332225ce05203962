"""torch.compile as a peer: each compile chooses for itself, the fastest counts, and what was tuned ahead is found."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from kernels import compiling, running
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


def tuned(monkeypatch, jobs, *ways, taken=(3.0,)):
    """Let a process that tunes do these jobs for the ways of one ladder; its graphs take these seconds, one by one."""
    taken = iter(taken)
    graph = lambda calls: SimpleNamespace(turn=lambda: [next(taken)])  # noqa: E731
    monkeypatch.setattr(cuda_timing, "Graph", graph)
    monkeypatch.setitem(sys.modules, "a_bench", SimpleNamespace(ways=lambda: {"GEMV": lambda: list(ways)}))
    compiling._tune("a_bench", jobs)


def test_choices_are_looked_for_where_they_were_left(compiler, monkeypatch):
    """A process that tunes, and the bench, mean the same folder."""
    tuned(monkeypatch, [["GEMV", "with PDL", 2]], way(), way("F.linear", tuned=False), taken=[1.0] * 3)
    compiling.compiled(way(), "with PDL", 2)
    left, found = (asked.folder for asked in compiler)  # the one that is not tuned has no third compile
    assert left == found


def test_of_compiles_that_were_timed_ahead_only_the_fastest_is_made_again(compiler, monkeypatch):
    jobs = [["GEMV", mode, attempt] for attempt in range(3) for mode in compiling.PDL]
    times = [5, 6, 4, 2, 7, 3]  # plain and with PDL, three times; each is the least of three turns
    tuned(monkeypatch, jobs, way(), taken=[t for best in times for t in (best, 9, best)])
    (asked,) = [asked for asked in compiler if asked.options["triton.enable_pdl"]][1:2]
    compiler.clear()
    modes = compiling.modes(way())
    assert list(modes) == ["with PDL"]
    modes["with PDL"]()
    assert [again.folder for again in compiler] == [asked.folder] and asked.folder.endswith("_1")


def test_where_a_compile_failed_ahead_all_are_made(compiler, monkeypatch):
    tuned(monkeypatch, [["GEMV", mode, 0] for mode in compiling.PDL], way(), taken=[1.0] * 6)
    assert list(compiling.modes(way())) == list(compiling.PDL) and compiling._timed(way(), "with PDL") == {}


def test_a_run_that_only_calls_knows_the_mode(compiler, monkeypatch):
    jobs = [["GEMV", mode, attempt] for attempt in range(3) for mode in compiling.PDL]
    tuned(monkeypatch, jobs, way(), taken=[1.0] * 18)
    figures = [SimpleNamespace(name="torch.compile, W @ x: without PDL")]
    run = running.Run(called=True, stored={"GEMV": SimpleNamespace(figures=figures)})
    with running.set_to(run):
        assert list(compiling.modes(way())) == list(compiling.PDL)  # of which benching.peer_rows takes that one
        assert compiling._asked("GEMV") == ["without PDL"]
    assert compiling._asked("GEMV") == list(compiling.PDL)


def test_a_compile_that_fails_does_not_keep_the_others(compiler, monkeypatch, capsys):
    def bind(run):
        raise RuntimeError("no such kernel")

    tuned(monkeypatch, [["GEMV", "with PDL", 0]], way("bad")._replace(bind=bind), way(), taken=[1.0] * 3)
    assert "no such kernel" in capsys.readouterr().err
    assert (compiling._folder(way(), "with PDL", 0) / compiling.SECONDS).read_text() == "1.0"


def test_compiles_are_tuned_in_processes_of_their_own(compiler, monkeypatch, tmp_path):
    jobs, done = [], []

    def run(command, *, env, timeout, input, **quiet):
        assert command[1:] == ["-m", "kernels.compiling", "a_bench"] and env[compiling.HOME] == str(tmp_path)
        assert env["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
        jobs.append([tuple(job) for job in json.loads(input)])
        raise compiling.subprocess.TimeoutExpired(command, timeout)  # which does not end the bench

    monkeypatch.setattr(compiling.subprocess, "run", run)
    monkeypatch.setattr(compiling.os, "cpu_count", lambda: 5)
    ways = dict.fromkeys(["first", "second", "left out"])
    monkeypatch.setitem(sys.modules, "a_bench", SimpleNamespace(ways=lambda: ways))
    with running.set_to(running.Run(only=("first", "second"))):
        compiling.ahead("a_bench", lambda: done.append(1))
    wanted = {(title, mode, t) for title in ("first", "second") for mode in compiling.PDL for t in range(3)}
    assert len(jobs) == 5 and done == [1]  # as many as there are cores
    assert sorted(job for process in jobs for job in process) == sorted(wanted)
    assert all([job[2] for job in process] == sorted(job[2] for job in process) for process in jobs)


def test_one_process_measures_at_a_time(compiler, monkeypatch, tmp_path):
    import fcntl

    from torch._inductor.runtime.benchmarking import benchmarker

    def taken():
        with open(tmp_path / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def measured(*arguments, **options):
        assert taken()
        return 7.0

    def bound(run):
        assert benchmarker.benchmark_gpu("what", rep=40) == 7.0 and not taken()
        return [lambda: None]

    def turn():
        assert taken()
        return [1.0]

    monkeypatch.setattr(benchmarker, "benchmark_gpu", measured, raising=False)
    monkeypatch.setattr(cuda_timing, "Graph", lambda calls: SimpleNamespace(turn=turn))
    ways = [Way("GEMV", "a", product, bound)]
    monkeypatch.setitem(sys.modules, "a_bench", SimpleNamespace(ways=lambda: {"GEMV": lambda: ways}))
    compiling._tune("a_bench", [["GEMV", "without PDL", 0]])
    assert not taken() and (compiling._folder(ways[0], "without PDL", 0) / compiling.SECONDS).is_file()


@pytest.mark.parametrize("module", ["kernels.gemv.bench", "kernels.fusion.bench", "kernels.lowbit.bench"])
def test_every_bench_has_something_to_tune(module):
    ways = compiling.importlib.import_module(module).ways()
    assert ways and all(isinstance(title, str) and callable(make) for title, make in ways.items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_card_each_compile_is_right():
    torch.compiler.reset()
    W, x = torch.randn(512, 1024, device="cuda"), torch.randn(1024, device="cuda")
    real = Way("test", "W @ x", product, lambda run: [lambda: run(W, x)])
    for mode in compiling.PDL:
        (call,) = compiling.compiled(real, mode, 0)
        torch.testing.assert_close(call(), W @ x, rtol=1e-4, atol=1e-3)
