"""Timing on a GPU: turns and ratios on a made-up card with a clock of its own, and a real card where there is one."""

import contextlib
import functools
import gc
import time
from types import SimpleNamespace

import pytest
import torch

from lab import Ladder, Timing, as_called, cuda_timing, ladder, results

HERE = torch.cuda.is_available() and torch.version.cuda is not None
needs_gpu = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")
US = 1e-6


# A made-up card: a call is a number, the microseconds it takes


class Card:
    """Stands for lab.cuda_timing.Graph; everything takes slowness(now) times as long."""

    def __init__(self, slowness=lambda now: 1.0):
        self.now, self.slowness, self.log = 0.0, slowness, []

    def graph(self, call):
        def turn():
            begin, taken = self.now, US * call * self.slowness(self.now)
            self.now += 0.05
            self.log.append((call, begin))
            return [taken, taken, 9 * taken]  # a median shrugs off the last

        return SimpleNamespace(turn=turn)

    def perf_counter(self):
        return self.now


@pytest.fixture
def card(monkeypatch):
    def make(*args):
        made = Card(*args)
        monkeypatch.setattr(cuda_timing, "Graph", made.graph)
        monkeypatch.setattr(cuda_timing, "time", SimpleNamespace(perf_counter=made.perf_counter))
        return made

    return make


def test_each_turn_stands_beside_one_of_the_probe(card):
    made = card()
    found = cuda_timing.against(8, {"a": 4, "b": 20}, seconds=0.1, least_turns=3)
    assert [call for call, _ in made.log] == [8, 4, 8, 20] * 3
    assert found["a"] == (Timing.of([4 * US, 4 * US, 36 * US] * 3), 0.5)
    assert found["b"][0].median == pytest.approx(20 * US) and found["b"][1] == 2.5 and found["b"][0].runs == 9


def test_it_goes_on_for_the_seconds_asked_for(card):
    made = card()
    cuda_timing.against(8, {"a": 4, "b": 20}, seconds=1, least_turns=3)
    assert 2 <= made.now < 2.3 and len(made.log) == 40


def test_a_card_that_slows_down_does_not_move_the_ratio(card):
    card(lambda now: 1 + now)
    found = cuda_timing.against(8, {"a": 8, "b": 8}, seconds=3)
    for timing, ratio in found.values():
        assert ratio == pytest.approx(1, rel=0.05) and timing.median > 1.5 * 8 * US


def test_copies_are_cold(monkeypatch):
    tensor = torch.arange(250, dtype=torch.float32)
    copies = cuda_timing.cold_copies(tensor, total=2500)
    assert copies[0] is tensor and len(copies) == 3  # 3 of 1000 bytes are the first to reach 2500
    assert len({c.data_ptr() for c in copies}) == 3 and all(torch.equal(c, tensor) for c in copies)
    assert len(cuda_timing.cold_copies(tensor, total=1000)) == len(cuda_timing.cold_copies(tensor, total=1)) == 1
    assert cuda_timing.COLD > 8 * (60 << 20)  # the L2 cache of an H200, many times


@pytest.fixture
def collecting_as_python_does():
    """Not as seldom as conftest.py asks for, and among what is made from here on: other tests have left much more."""
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_a_graph_is_captured(collecting_as_python_does, monkeypatch, fails):
    """An old graph in a cycle of references must not be destroyed then."""

    class Old:
        destroyed_at = None

        def __del__(self):
            Old.destroyed_at = capturing

    def call():
        for _ in range(2):
            [[] for _ in range(3000)]  # would set off a collection
        if fails:
            raise RuntimeError("from the call")

    @contextlib.contextmanager
    def capture(graph, stream):
        nonlocal capturing
        capturing = True
        old = Old()
        old.itself = old
        del old
        try:
            yield
        finally:
            capturing = False

    capturing = False
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay="replay"))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    with pytest.raises(RuntimeError, match="from the call") if fails else contextlib.nullcontext():
        assert cuda_timing._capture([call], 2, None) == "replay"
    assert Old.destroyed_at is None and gc.isenabled()
    gc.collect()
    assert Old.destroyed_at is False


class Replayed:
    """Stands for what PyTorch has of a card: a capture notes calls, a replay makes them; a call takes its time."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(cuda_timing, "expect_gpu", lambda where: None)
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, value in {
            "Stream": lambda: stream, "current_stream": lambda: stream, "stream": lambda s: contextlib.nullcontext(),
            "CUDAGraph": SimpleNamespace, "graph": self.capture, "Event": self.event, "synchronize": lambda: None,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(cuda_timing, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def call(self, seconds):
        def take():
            self.now += seconds

        return take

    @contextlib.contextmanager
    def capture(self, graph, stream):
        before = self.now
        yield
        graph.replay = self.call(self.now - before)

    def event(self, enable_timing):
        def record():
            mark.at = self.now

        mark = SimpleNamespace(record=record, synchronize=lambda: None)
        mark.elapsed_time = lambda other: 1e3 * (other.at - mark.at)
        return mark


def test_every_copy_has_its_turn(monkeypatch):
    """In a graph, and sustained: the mean of all calls, and not the time of the first."""
    card = Replayed(monkeypatch)
    calls = [card.call(us * US) for us in (10, 20, 60)]
    graph = cuda_timing.Graph(calls)
    assert graph.calls % 3 == 0 and graph.seconds >= cuda_timing.REPLAY
    assert graph.turn() == pytest.approx([30 * US] * len(graph.turn()))
    assert cuda_timing.sustained(calls, seconds=0.1).median == pytest.approx(30 * US)
    timing, ratio = cuda_timing.against(card.call(15 * US), {"a": calls}, seconds=0.1)["a"]
    assert timing.median == pytest.approx(30 * US) and ratio == pytest.approx(2)


@pytest.mark.skipif(HERE, reason="this machine has a GPU")
def test_without_a_gpu_it_refuses_in_a_sentence():
    calls = [lambda: pytest.fail("called")]
    for refuse in (
        lambda: cuda_timing.Graph(calls),
        lambda: cuda_timing.against(calls, {"a": calls}),
        lambda: as_called.together({"a": calls}),
        lambda: as_called.host({"a": calls}),
        lambda: cuda_timing.read_calls([torch.zeros(4096)]),
        cuda_timing.read_probe,
        cuda_timing.flops_probe,
        lambda: Ladder("GEMV", "read", device="cuda").add("a", calls, bytes=1, flops=1),
    ):
        with pytest.raises(RuntimeError, match="needs an NVIDIA GPU that PyTorch can use, and this machine has none$"):
            refuse()


# Ladders


@pytest.fixture
def on_card(monkeypatch):
    """A probe that reads 1 GB (or does 10 GFLOP) in 1 s; a rung takes what its call says, and twice that as called."""
    log = []

    def against(probe, calls, **options):
        log.append((probe, calls, options))
        return {name: (Timing.of([call]), call) for name, call in calls.items()}

    monkeypatch.setattr(cuda_timing, "against", against)
    double, half = (
        lambda calls, by=by: {name: Timing.of([by * call]) for name, call in calls.items()} for by in (2, 0.5)
    )
    monkeypatch.setattr(as_called, "together", double)
    monkeypatch.setattr(as_called, "host", half)
    monkeypatch.setattr(cuda_timing, "read_probe", lambda: ("reads", 10**9))
    monkeypatch.setattr(cuda_timing, "flops_probe", lambda: ("multiplies", 10**10))
    monkeypatch.setattr(ladder, "read_probe", lambda: pytest.fail("the CPU's probe was asked for"))
    return log


def test_a_ladder_on_a_gpu(on_card):
    steps = Ladder("GEMV", "read", device="cuda")
    steps.plan("a", 4.0, bytes=2 * 10**9, flops=10**9)
    steps.plan("b", 2.0, bytes=2 * 10**9, flops=10**9)
    steps.again(seconds=0.25)
    ((probe, calls, options),) = on_card
    assert probe == "reads" and calls == {"a": 4.0, "b": 2.0} and options["seconds"] == 0.25
    assert steps["a"].share == 0.5 and steps["b"].share == 1 and steps["b"].called.median == 4
    assert steps["b"].host.median == 1
    card = steps.add("c", 1.0, bytes=10**9, flops=10**9)
    assert card.device == "cuda" and card.headings == steps.headings and card.rows() == steps.rows()[2:]
    product = Ladder("matmul", "flops", device="cuda")
    product.add("a", 4.0, bytes=1, flops=2 * 10**10)
    assert on_card[-1][0] == "multiplies" and product["a"].share == 0.5


def test_a_ladder_on_a_gpu_is_stored_and_read_back(on_card, tmp_path):
    from lab import Roof

    steps = Ladder("GEMV", "read", device="cuda")
    steps.add("a", 4.0, bytes=2 * 10**9, flops=10**9)
    path = results.save(tmp_path, [steps], Roof("NVIDIA H200", 4e12, 4e12, 7e14), {})
    (back,) = results.Stored(path).ladders
    assert path.name == "nvidia_h200.json" and back.device == "cuda" and back.figures == steps.figures
    assert back.rows() == steps.rows() and "stored run: NVIDIA H200, " in str(back)


def test_the_gemv_bench_times_nothing_wrong():
    from kernels.gemv import bench

    wanted = torch.tensor([3.0, -4.0, 1e-3], dtype=torch.float64)
    for dtype in (*bench.DTYPES.values(), torch.float32):
        right = wanted.to(dtype)
        assert bench._error("a", [right] * 3, wanted, dtype) <= bench.tolerance(dtype)
        unwritten, off = right.clone(), right.clone()
        unwritten[2] = torch.nan
        off[0] *= 1 + 8 * bench.tolerance(dtype)
        for wrong in (unwritten, off, -right):
            with pytest.raises(ValueError, match="^a is not right, so it is not timed: relative error"):
                bench._error("a", [right, right, wrong], wanted, dtype)


# A real card


def seconds_of(call, **options):
    return cuda_timing.against(call, {"": call}, seconds=0, least_turns=1, **options)[""][0].median


def in_quiet(holds):
    """True as soon as `holds()` is: another test may be using the card at the same time."""
    return any(holds() or time.sleep(3) for _ in range(6))


@needs_gpu
def test_time_is_per_call_whatever_the_length_of_the_list():
    def spin(cycles):
        return lambda: torch.cuda._sleep(cycles)

    found = cuda_timing.against(spin(100_000), {"1": spin(100_000), "3": [spin(100_000)] * 3, "x2": [spin(200_000)]})
    assert found["1"][1] == pytest.approx(1, rel=0.05) and found["3"][1] == pytest.approx(1, rel=0.05)
    assert found["x2"][1] == pytest.approx(2, rel=0.1)


@needs_gpu
def test_a_replay_lasts_and_goes_through_every_copy():
    seen = torch.zeros(5, device="cuda")
    graph = cuda_timing.Graph([functools.partial(one.add_, 1) for one in seen])
    assert graph.seconds > 0.5 * cuda_timing.REPLAY and graph.calls % 5 == 0
    seen.zero_()
    graph._replay()
    assert seen.tolist() == [graph.calls / 5] * 5


@needs_gpu
def test_cold_weights_are_slower_than_cached_ones():
    W = torch.randn(2048, 4096, device="cuda").half()  # 16 MB
    x = torch.randn(4096, device="cuda").half()
    cold = [functools.partial(torch.mv, copy, x) for copy in cuda_timing.cold_copies(W)]
    assert in_quiet(lambda: seconds_of(cold) > 1.15 * seconds_of(cold[:1]))


@needs_gpu
def test_the_read_probe_is_the_roof():
    call, amount = cuda_timing.read_probe()
    assert amount >= 1 << 30

    def agrees():
        timing, ratio = cuda_timing.against(call, {"": call})[""]
        share = amount / timing.median / 4800e9 if torch.cuda.get_device_name() == "NVIDIA H200" else 0.95
        return abs(ratio - 1) < 0.03 and 0.9 < share < 1

    assert in_quiet(agrees)


@needs_gpu
def test_reading_small_tensors_is_slower_per_byte_and_some_sizes_do_not_fit():
    copies = cuda_timing.cold_copies(torch.randint(0, 9, (1 << 20,), device="cuda", dtype=torch.int32))
    calls = cuda_timing.read_calls(copies)
    call, amount = cuda_timing.read_probe()
    _, ratio = cuda_timing.against(call, {"": calls}, seconds=0, least_turns=1)[""]
    assert len(calls) == len(copies) and ratio > copies[0].nbytes / amount
    with pytest.raises(ValueError, match="multiple of 16 KB, got 4004 bytes"):
        cuda_timing.read_calls([torch.zeros(1001, device="cuda", dtype=torch.int32)])
