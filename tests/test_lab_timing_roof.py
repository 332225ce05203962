"""Timing on a clock that the test turns itself, and the roof on buffers small enough for a test."""

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lab import Roof, Timing, machine, measure, side_by_side, timing
from lab.timing import against

roof_module = importlib.import_module("lab.roof")  # the name lab.roof is the function

MS = 1e-3
ROOT = Path(__file__).resolve().parent.parent


class Machine:
    """A machine with a clock of its own; slowness(now): how many times longer everything takes then."""

    def __init__(self, slowness=lambda now: 1.0):
        self.now, self.slowness, self.log = 0.0, slowness, []

    def __call__(self):
        self.now += 1e-12  # so that a loop that waits for time to pass ends
        return self.now

    def work(self, name, seconds):
        """A function that takes so long; a list of seconds: at its first, second, ... and all later calls."""
        costs = list(seconds) if isinstance(seconds, list) else [seconds]

        def call():
            begin = self.now
            self.now += (costs.pop(0) if len(costs) > 1 else costs[0]) * self.slowness(begin)
            self.log.append((name, begin, self.now - begin))

        return call


@pytest.fixture
def clock(monkeypatch):
    """Make a machine and let the course's timing read its clock."""

    def make(*args):
        made = Machine(*args)
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=made))
        return made

    return make


def turns_of(log):
    """The names in a log, runs of one name written once."""
    return [name for i, (name, *_) in enumerate(log) if i == 0 or log[i - 1][0] != name]


# Timing


def test_percentiles():
    t = Timing.of([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 0.0, 10.0])
    assert (t.median, t.p20, t.p80, t.runs) == (5, 2, 8, 11)
    assert Timing.of([3.0]) == Timing(3, 3, 3, 1)
    said = str(Timing(2e-3, 0.5e-3, 1.25, 7))
    assert said.startswith("2 ms (0.5") and "1.25e+03" in said and said.endswith("7 runs)")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2, "2 s"),
        (1, "1 s"),
        (0.9876, "988 ms"),
        (3.21e-3, "3.21 ms"),
        (4.5e-6, "4.5 µs"),
        (7e-8, "70 ns"),
        (0, "0 ns"),
    ],
)
def test_times_have_a_fitting_unit(seconds, text):
    timing = Timing(seconds, seconds, seconds, 1)
    assert str(timing).startswith(text + " ") and timing.cells()[0] == text


def test_measure_is_the_median_of_calls_after_the_warm_up(clock):
    m = clock()
    t = measure(m.work("f", [400 * MS, 2 * MS]), seconds=0.2)
    assert (t.median, t.p20, t.p80) == pytest.approx((2 * MS,) * 3)
    assert t.runs < len(m.log)
    assert 0.2 < m.now < 0.4 + 0.2  # the warm-up, the time asked for, and the end of a turn


def test_warm_up_calls_are_not_among_those_timed(clock):
    m = clock()
    slow_at_first = m.work("f", [1.5 * MS] * 14 + [MS])  # 14 calls take longer than SETTLE
    assert timing._turn(slow_at_first, timing.SETTLE) == pytest.approx([MS] * 50)


def test_a_call_that_is_slow_is_timed_from_the_first(clock):
    m = clock()
    t = measure(m.work("f", 0.75), seconds=0.1, least_runs=3)
    assert t.runs == len(m.log) == 3 and t.median == pytest.approx(0.75)


def test_an_interrupted_run_does_not_move_the_median(clock):
    m = clock()
    costs = ([MS] * 9 + [30 * MS]) * 100 + [MS]
    t = measure(m.work("f", costs), seconds=0.5)
    assert t.median == pytest.approx(MS) and t.p80 == pytest.approx(MS)


def test_least_runs_are_made_however_long_they_take(clock):
    m = clock()
    assert measure(m.work("f", 0.3), seconds=0.01, least_runs=4).runs >= 4


def test_side_by_side_takes_turns(clock):
    m = clock()
    found = side_by_side({"a": m.work("a", MS), "b": m.work("b", 3 * MS), "c": m.work("c", 20 * MS)}, seconds=0.5)
    assert {name: t.median for name, t in found.items()} == pytest.approx({"a": MS, "b": 3 * MS, "c": 20 * MS})
    turns = turns_of(m.log)
    assert len(turns) >= 6 and turns == ["a", "b", "c"] * (len(turns) // 3)
    assert 1.5 < m.now < 2.5  # half a second each


def test_side_by_side_gives_a_drift_to_all_alike(clock):
    m = clock(lambda now: 1 + now)  # ever slower
    found = side_by_side({"a": m.work("a", MS), "b": m.work("b", MS)}, seconds=3)
    assert found["a"].median == pytest.approx(found["b"].median, rel=0.1)


def test_against_knows_the_ratio_on_a_steady_machine(clock):
    m = clock()
    found = against(m.work("probe", 8 * MS), {"a": m.work("a", 4 * MS), "b": m.work("b", 20 * MS)}, seconds=0.5)
    assert found["a"][1] == pytest.approx(0.5) and found["b"][1] == pytest.approx(2.5)
    assert found["a"][0].median == pytest.approx(4 * MS) and found["b"][0].median == pytest.approx(20 * MS)
    turns = turns_of(m.log)
    assert turns == ["probe", "a", "probe", "b"] * (len(turns) // 4) and len(turns) >= 20


def test_against_makes_its_turns_however_long_they_take(clock):
    m = clock()
    timed, ratio = against(m.work("probe", MS), {"a": m.work("a", 2.0)}, seconds=0.1, least_turns=4)["a"]
    assert timed.runs == 4 and ratio == pytest.approx(2000)


@pytest.mark.parametrize("seed", range(5))
def test_the_ratio_does_not_see_a_machine_that_changes_speed(clock, seed):
    speeds = np.random.default_rng(seed).uniform(1, 6, 10_000)
    m = clock(lambda now: speeds[int(now)])  # another speed every second
    ratio = against(m.work("probe", MS), {"f": m.work("f", 40 * MS)}, seconds=20)["f"][1]
    assert ratio == pytest.approx(40, rel=0.02)


def test_the_ratio_is_of_moments_side_by_side_and_not_of_two_medians(clock):
    m = clock(lambda now: 1.0 if now % 3 < 0.3 else 8.0)
    ratio = against(m.work("probe", MS), {"f": m.work("f", 40 * MS)}, seconds=20)["f"][1]
    assert ratio == pytest.approx(40, rel=0.02)
    taken = {name: np.median([t for n, _, t in m.log if n == name]) for name in ("probe", "f")}
    assert taken["f"] / taken["probe"] > 200  # what two separate medians would say


# Roof


@pytest.fixture
def small(monkeypatch):
    """Probes on 4 MB, quick turns; nothing measured here is remembered."""
    cached = (roof_module._buffer, roof_module.roof)
    for function in cached:
        function.cache_clear()
    monkeypatch.setattr(roof_module, "probe_bytes", lambda: 4 << 20)
    for name in ("TURN", "SETTLE", "SPIN"):
        monkeypatch.setattr(timing, name, 0.004)
    yield
    for function in cached:
        function.cache_clear()


def test_the_roof_is_plausible_and_measured_once(small, monkeypatch, capsys):
    timed = []

    def counted(probes, **_):
        timed.append(side_by_side(probes, seconds=0.02))
        return timed[-1]

    monkeypatch.setattr(roof_module, "side_by_side", counted)
    monkeypatch.setattr(machine, "thread_count", lambda: 3)
    found = roof_module.roof()
    assert list(found.by_threads) == [1, 2, 3] and len(timed) == 3
    assert 1e8 < found.read < 1e13 and 1e8 < found.copy < 1e13 and 1e8 < found.flops < 1e14
    for i, best in enumerate((found.read, found.copy, found.flops)):
        assert best == max(v[i] for v in found.by_threads.values())
    for by_threads, (threads, (read, copy, flops)) in zip(timed, found.by_threads.items()):
        assert read == pytest.approx((4 << 20) / by_threads["read"].p20)
        assert copy == pytest.approx((8 << 20) / by_threads["copy"].p20)
        assert flops == pytest.approx(roof_module.flops_probe(threads)[1] / by_threads["flops"].p20)
    assert found.card == machine.card()
    said = capsys.readouterr().out
    assert said.startswith("measuring the roof of") and said.count("thread") >= 4 and "4 MB" in said

    assert roof_module.roof() is found and len(timed) == 3
    assert capsys.readouterr().out == ""


@pytest.fixture
def reads(monkeypatch):
    """reads(first, then, ...): a machine that reads at these rates, GB/s, whenever it is measured: by turns as the roof
    and once more."""

    def make(*rates):
        rates = list(rates)
        size = roof_module.read_probe()[1]
        monkeypatch.setattr(roof_module, "measure", lambda *_, **__: Timing(9, size / rates.pop(0) / 1e9, 9, 9))

        def measured():
            rate = 1e9 * rates.pop(0)
            return Roof("a card", rate, rate, 1e12, {1: (rate / 2, rate, 1e12), 2: (rate, rate, 1e12)})

        monkeypatch.setattr(roof_module, "roof", functools.cache(measured))
        return rates

    return make


@pytest.mark.parametrize("again", [30, 27.5, 32.9])
def test_a_roof_that_holds_stays(small, reads, capsys, again):
    reads(30, again)
    assert roof_module.roof_again().read == 30e9
    assert capsys.readouterr().out == (
        f"reading once more: {again:.1f} GB/s, and the roof is 30.0 GB/s: the same within 10%\n"
    )


@pytest.mark.parametrize("again", [26, 34, 55])
def test_a_roof_is_measured_anew_where_the_machine_has_changed(small, reads, capsys, again):
    left = reads(30, again, again + 1, again)
    assert roof_module.roof_again().read == (again + 1) * 1e9 == roof_module.roof().read and not left
    first, second = capsys.readouterr().out.splitlines()
    assert "and the roof is 30.0 GB/s: this machine has changed since, so" in first and "the same within" in second


def test_a_machine_that_does_not_keep_its_speed_is_told_so(small, reads, capsys):
    left = reads(30, 55, 30, 55, 30, 55, 30, 99)
    assert roof_module.roof_again().read == 30e9 and left == [99]
    said = capsys.readouterr().out
    assert said.count("has changed") == 3 and said.endswith("each is timed in turns with a probe.\n")


def test_the_roof_is_read_again_by_the_threads_that_read_most(small, monkeypatch):
    rates = {1: (9e9, 0, 0), 2: (5e9, 0, 0)}
    monkeypatch.setattr(roof_module, "roof", lambda: Roof("a card", 9e9, 0, 0, rates))
    asked = []
    monkeypatch.setattr(roof_module, "read_probe", lambda threads: asked.append(threads) or (None, 9))
    monkeypatch.setattr(roof_module, "measure", lambda *_, **__: Timing(1e-9, 1e-9, 1e-9, 1))
    roof_module.roof_again()
    assert asked == [1]


@pytest.mark.parametrize(("most", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_thread_counts_are_powers_of_two_and_the_most(small, monkeypatch, most, counts):
    monkeypatch.setattr(machine, "thread_count", lambda: most)
    monkeypatch.setattr(roof_module, "side_by_side", lambda probes, seconds: dict.fromkeys(probes, Timing(1, 1, 1, 1)))
    assert list(roof_module.roof().by_threads) == counts


def test_the_roofline():
    roof = Roof("a card", read=20e9, copy=15e9, flops=100e9)
    assert roof.ridge == 5
    assert roof.attainable(0.5) == 10e9 and roof.attainable(5) == roof.attainable(1e9) == 100e9
    assert roof.attainable([0, 1, 5, 6]).tolist() == [0, 20e9, 100e9, 100e9]
    assert str(roof) == "a card: reads 20.0 GB/s, copies 15.0 GB/s, 100 GFLOP/s, ridge at 5.0 flop/byte"


@pytest.mark.parametrize("caches", [1 << 20, 33_554_432, 36_700_160 + 4096, 99 << 20])
def test_probe_bytes_are_more_than_the_caches_hold_and_whole_megabytes(monkeypatch, caches):
    monkeypatch.setattr(machine, "all_caches_bytes", lambda: caches)
    monkeypatch.setattr(roof_module.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 21}.get)  # 8 GB
    size = roof_module.probe_bytes()
    assert size >= 256 << 20 and size >= 4 * caches - (1 << 20) and size % (1 << 20) == 0


def test_probe_bytes_leave_room_on_a_small_machine(monkeypatch):
    monkeypatch.setattr(machine, "all_caches_bytes", lambda: 1 << 30)
    monkeypatch.setattr(roof_module.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 18}.get)  # 1 GB
    assert roof_module.probe_bytes() == 128 << 20


def test_the_flops_probe_counts_the_work_done_and_not_the_threads_asked_for():
    """A system may grant fewer threads than asked for; the flops must be done all the same."""
    code = (
        "import time; from lab.roof import flops_probe\n"
        "def rate(threads):\n"
        "    call, flops = flops_probe(threads, steps=300_000); call()\n"
        "    times = []\n"
        "    for _ in range(7):\n"
        "        start = time.perf_counter(); call(); times.append(time.perf_counter() - start)\n"
        "    return flops / min(times)\n"
        "print(rate(4) / rate(1))"
    )
    environment = os.environ | {"OMP_THREAD_LIMIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert float(done.stdout) < 2, done.stderr  # 4 if the work of one thread were counted four times


@pytest.mark.parametrize("threads", [1, 2, 3, None])
def test_the_read_probe_reads_every_word(small, threads):
    call, amount = roof_module.read_probe(threads)
    data = roof_module._buffer("from")
    assert amount == data.nbytes == 4 << 20
    assert call() == int(np.add.reduce(data, dtype=np.uint64))
    for at in (0, data.size // 2 + 7, data.size - 1):
        data[at] ^= np.uint64(12345)
        assert call() == int(np.add.reduce(data, dtype=np.uint64)), at


def test_the_probes_data_are_random(small):
    words = roof_module._buffer("from")
    assert len(np.unique(words)) > words.size / 2**4 and not np.array_equal(words, roof_module._buffer("to"))


@pytest.mark.parametrize("threads", [1, 2, 3, None])
def test_the_copy_probe_copies_every_word(small, threads):
    call, amount = roof_module.copy_probe(threads)
    data, to = roof_module._buffer("from"), roof_module._buffer("to")
    assert amount == data.nbytes + to.nbytes and not np.shares_memory(data, to)
    assert not np.array_equal(data, to)
    call()
    assert np.array_equal(data, to)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_flops_probe_multiplies_and_adds_as_often_as_it_says(threads):
    steps = 500
    call, flops = roof_module.flops_probe(threads, steps)
    width = roof_module._library().lanes_times_chains()
    assert flops == 2 * steps * width * threads
    lanes = {16 * 16: 16, 8 * 10: 8, 4 * 16: 4}[width]
    chains = np.float32(0.999) + np.arange(width // lanes, dtype=np.float32)
    for _ in range(steps):
        chains = chains * np.float32(0.999) + np.float32(0.001)
    assert call() == pytest.approx(float(chains.sum()) * lanes * threads, rel=1e-3)
    assert roof_module.flops_probe(threads, 0)[0]() != pytest.approx(call(), rel=0.05)
