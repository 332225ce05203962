"""The simulated server: small traces by hand, tokens and room that are neither lost nor made, queueing's own laws, and
the law of its step times held against what was measured and against plans."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab import results
from models import serving, serving_times, text_lengths, traffic
from models.serving import POLICIES, Policy, how_many_fit, simulate
from models.serving_times import StepTimes, stored_times
from models.traffic import Request
from ref import scheduling

quick = settings(max_examples=40, deadline=None)


class OneSecond:
    """Every step takes a second; notes what it was asked."""

    def __init__(self):
        self.asked = []

    def step(self, lens, prompts=(), *, fair=True, shared=0):
        self.asked.append((list(lens), list(prompts), fair, shared))
        return 1.0


def tokens(report):
    return [times.tolist() for times in report.tokens]


def run(requests, policy, room=100, **options):
    times = OneSecond()
    options = {"context": 20} | options
    return simulate([Request(*r) for r in requests], policy, times, room=room, **options), times.asked


# By hand

TWO = [(0.0, 3, 2), (0.0, 2, 3)]


def test_one_after_another_and_then_together():
    report, asked = run(TWO, Policy(page=4))
    assert tokens(report) == [[1, 3], [2, 3, 4]]
    assert asked == [
        ([], [(3, 0)], True, 0), ([], [(2, 0)], True, 0), ([4, 3], [], True, 0), ([4], [], True, 0),
    ]  # fmt: skip
    # held and room at the end of each step: 3 of a page; 5 of two; 7 of two; then 4 of one
    assert report.steps[:, 4].tolist() == [3, 5, 7, 4] and report.steps[:, 5].tolist() == [4, 8, 8, 4]
    assert report.wasted == pytest.approx(1 - 19 / 24) and report.most == 2 and report.seconds == 4
    assert report.throughput == 5 / 4 and report.first.tolist() == [1, 2] and report.in_system.tolist() == [3, 4]
    assert report.between.tolist() == [2, 1, 1]


def test_a_static_batch_is_padded_and_ends_with_its_longest():
    report, asked = run([*TWO, (0.5, 1, 1)], Policy(continuous=False, page=None, fair=False), room=50)
    assert tokens(report) == [[1, 2], [1, 2, 3], [4]]  # the third waits until the batch is done
    assert asked[:3] == [([], [(3, 0)] * 2, False, 0), ([4, 4], [], False, 0), ([5, 5], [], False, 0)]
    assert report.steps[:, 5].tolist() == [40, 40, 40, 20] and report.steps[:, 4].tolist() == [5, 7, 8, 1]
    assert report.steps[:, 3].tolist() == [0, 1, 1, 0]


def test_room_for_the_longest_lets_fewer_in():
    report, _ = run(TWO, Policy(page=None), room=30)  # 20 for each: one at a time
    assert tokens(report) == [[1, 2], [3, 4, 5]] and report.steps[:, 5].tolist() == [20] * 5


def test_prompts_in_chunks_go_beside_the_others_tokens():
    report, asked = run(TWO, Policy(page=4, chunk=2))
    assert tokens(report) == [[2, 3], [3, 4, 5]]
    assert asked == [
        ([], [(2, 0)], True, 0), ([], [(1, 2), (1, 0)], True, 0), ([4], [(1, 1)], True, 0), ([3], [], True, 0),
        ([4], [], True, 0),
    ]  # fmt: skip


def test_who_came_last_gives_up_its_room_and_begins_again():
    report, asked = run([(0.0, 2, 4), (0.0, 1, 3), (0.0, 1, 1)], Policy(page=1), room=6)
    assert tokens(report) == [[1, 3, 4, 5], [2, 3, 6], [7]] and report.begun_again == 1
    assert [prompts for _, prompts, *_ in asked if prompts] == [[(2, 0)], [(1, 0)], [(3, 0)], [(1, 0)]]
    assert report.steps[:, 5].max() <= 6


def test_a_prompt_that_is_half_read_gives_up_all_of_its_room():
    report, asked = run([(0.0, 1, 9), (0.0, 12, 1)], Policy(page=1, chunk=4), room=15)
    assert tokens(report) == [[1, 2, 3, 4, 5, 6, 7, 8, 9], [12]] and report.begun_again == 1
    assert [prompts for _, prompts, *_ in asked if prompts][1:4] == [[(4, 3)], [(4, 7)], [(4, 0)]]
    assert report.steps[-1, 5] == 12 and report.steps[:, 5].max() == 15


def test_a_shared_beginning_is_computed_and_kept_once():
    requests = [(0.0, 7, 2, 5), (0.0, 6, 2, 5)]
    report, asked = run(requests, Policy(page=2, shared=True))
    # 4 tokens lie in whole pages and are kept for all; the fifth goes into a page of each one's own
    assert asked == [([], [(7, 0)], True, 0), ([], [(2, 4)], True, 0), ([8, 7], [], True, 5)]
    assert report.steps[:, 5].tolist() == [8, 10, 12] and report.steps[:, 4].tolist() == [7, 9, 11]
    apart, asked = run(requests, Policy(page=2))
    assert asked[1:] == [([], [(6, 0)], True, 0), ([8, 7], [], True, 0)]
    assert apart.steps[:, 5].tolist() == [8, 14, 16]


def test_time_goes_on_to_the_next_arrival():
    report, _ = run([(2.0, 1, 1), (7.5, 1, 2)], Policy())
    assert tokens(report) == [[3], [8.5, 9.5]] and report.steps[:, 0].tolist() == [2, 7.5, 8.5]


# Laws


TIGHT = [Policy(True, page, True, shared, chunk) for page in (1, 3) for chunk in (None, 4) for shared in (False, True)]
TIGHT += [Policy(continuous=False, page=None), Policy(page=None), Policy(page=None, chunk=3)]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=9),
    policy=st.sampled_from(
        TIGHT + [Policy(continuous=False, page=None), Policy(page=None), Policy(page=None, chunk=3)]
    ),
    spare=st.integers(0, 25),
    most=st.integers(1, 5),
    shared=st.integers(0, 7),
)
def test_nothing_is_lost_and_nothing_made(lengths, policy, spare, most, shared):
    """Also where the room is hardly enough for one, and a third of the requests do not begin as the others do."""
    arrivals = np.cumsum([wait for *_, wait in lengths]).tolist()
    own = [n % 3 == 1 for n in range(len(lengths))]
    requests = [Request(at, shared + p, a, 0 if o else shared) for at, (p, a, _), o in zip(arrivals, lengths, own)]
    room = spare + (40 if policy.page is None else shared + max(r.prompt + r.answer for r in requests) + 4)
    serving._expect(requests, policy, room, most, 40)
    times = OneSecond()
    server = (serving._Continuous if policy.continuous else serving._Static)(requests, policy, times, room, most, 40)
    server.run()
    for request, times_of in zip(requests, server.tokens):
        assert len(times_of) == request.answer and times_of == sorted(set(times_of))
        assert times_of[0] >= request.arrives + 1
    steps = np.array(server.steps)
    assert (steps[1:, 0] >= steps[:-1, 1]).all() and (steps[:, 2] <= most).all()
    assert (steps[:, 4] <= steps[:, 5]).all() and (steps[:, 5] <= room).all()
    firsts = [of[0] for of in server.tokens]
    assert firsts == sorted(firsts)  # first come, first served
    if policy.continuous:
        assert server.free == room // server.page - server.prefix // server.page
        given_again = sum(new for _, prompts, *_ in times.asked for new, _ in prompts)
        whole = sum(r.prompt for r in requests) - max(0, own.count(False) - 1) * server.prefix
        assert given_again >= whole and (given_again == whole or server.begun_again)


@pytest.mark.parametrize("name", POLICIES)
def test_littles_law(name):
    """Requests in the system, in the mean over time, are arrivals a second times seconds in the system. The first comes
    from the steps, the second from the tokens."""
    rate = 3.0 if name == "static batches" else 80.0
    requests = traffic.of_zipf(400, rate, longest_prompt=4096, longest_answer=256, shared=64, seed=3)
    report = simulate(requests, POLICIES[name], StepTimes(), room=131072)
    by_steps = report.mean(2) + report.mean(3)
    by_tokens = len(requests) / report.seconds * report.in_system.mean()
    assert by_steps == pytest.approx(by_tokens, rel=0.03)


def test_a_server_of_one_waits_as_queueing_says():
    """One at a time, a service that always takes as long: the mean wait is rho / (2 (1 - rho)) services."""
    rho, requests = 0.6, [Request(at, 1, 1) for at in traffic.poisson(20000, 0.6, seed=1)]
    report = simulate(requests, Policy(), OneSecond(), room=100, most=1, context=20)
    assert report.first.mean() - 1 == pytest.approx(rho / (2 * (1 - rho)), rel=0.05)


def test_fair_shares_and_pages_serve_more():
    requests = traffic.of_trace(150, 8.0, seed=2)
    found = {n: simulate(requests, POLICIES[n], stored_times(), room=200_000, context=20480) for n in POLICIES}
    ends = {name: report.seconds for name, report in found.items()}
    assert ends["static batches"] > 1.5 * ends["room for the longest"] > 1.5 * ends["pages, fair shares"]
    fair, unfair, chunked = (
        found[n] for n in ("pages, fair shares", "pages, a block a row", "and prompts in chunks")
    )  # fmt: skip
    assert np.median(fair.between) < 0.9 * np.median(unfair.between)
    assert np.quantile(chunked.between, 0.99) < 0.4 * np.quantile(fair.between, 0.99)
    assert found["room for the longest"].wasted > 0.8 and fair.wasted < 0.02


# Step times


def test_the_law_by_hand():
    times = StepTimes(weights=1.0, flops=1e12, read=1e9, price=0.25)
    m = times.model
    per_row = 2 * (m.matrix_weights - m.vocab * m.hidden) / 1e12
    assert times.token_bytes == 4096
    reading = 3000 * 4096 / 1e9 + 0.25
    assert times.attention([1000, 2000]) == pytest.approx(reading)
    assert times.step([1000, 2000]) == pytest.approx(1 + 2 * per_row + 32 * reading)
    assert times.attention([1000, 2000], fair=False) == pytest.approx(2000 * 512 * 132 / 1e9 + 0.25)
    assert times.attention([500] * 300, fair=False) == times.attention([500] * 300)  # even as they come
    assert times.attention([1000, 2000], shared=900) == pytest.approx(2100 * 4096 / 1e9 + 0.5)
    assert times.attention([1000], shared=900) == times.attention([1000])
    many = times.attention([1000] * 2000, shared=999)  # its products take longer than the bytes
    assert many == pytest.approx(4 * 2000 * 999 * 32 * 128 / 1e12 + 0.5)
    scores = 32 * 4 * 10 * (100 + 5.5) * 32 * 128 / 1e12
    assert times.step([], [(10, 100)]) == pytest.approx(1 + 10 * per_row + scores)
    assert times.step([50], [(10, 0)]) > times.step([], [(10, 0)]) + 32 * 0.25


def test_measured_steps_of_several_texts_come_first():
    times = StepTimes(weights=9.0, flops=1e12, several=((1, 2.0), (4, 3.5), (16, 4.0)))
    each = 2 * (times.model.matrix_weights - 32000 * 4096) / 1e12
    assert [times.products(n) for n in (1, 2, 4, 10, 16)] == [2.0, 2.5, 3.5, 3.75, 4.0]
    assert times.products(17) == pytest.approx(9.0 + 17 * each)  # behind them the law, and no less than they took
    assert replace(times, weights=1.0).products(17) == 4.0
    attention = times.model.layers * times.attention([128] * 4)
    rows = {"16 texts": {"128 tokens, µs": 5e6}, "4 texts": {"128 tokens, µs": 1e6 * (3 + attention)}}
    (few, seconds), (many, _) = serving_times._without_attention(times, rows)
    assert (few, many) == (4, 16) and seconds == pytest.approx(3.0)


def test_the_law_meets_what_was_measured():
    run = results.stored_on("llm")
    times = stored_times()
    assert times.source.startswith("stored run: NVIDIA H200")
    for name, row in run.table("Prompts, Mistral-7B, fp16").rows.items():
        tokens_ = int(name.split()[0])
        assert times.step([], [(tokens_, 0)]) == pytest.approx(1e-3 * row["ours, ms"], rel=0.08)
    for cell in ("16 × 4K", "64 × 4K", "64 of 64K/i", "1 × 128K and 63 × 1K", "64 of 512 to 1024"):
        found = results.stored_on("paged").ladder(f"paged decode bf16, {cell}")["decode, PDL"]
        lens = [found.bytes // times.token_bytes]  # as if of one request: bytes count
        assert times.attention(lens) == pytest.approx(found.timing.median, rel=0.05)
    times = stored_times(caches=("attention",))  # in one piece, as chapter 17's engine and chapter 08 have them
    times = replace(times, several=())  # which has products of its own for one text
    short, long = (run.ladder(f"Mistral-7B, fp16, a token behind {n}") for n in (127, 4095))
    for one, seen in ((short, 128), (long, 4096)):
        measured = one["norms, GLU and additions in the products, PDL"].timing.median
        assert times.step([seen]) == pytest.approx(measured, rel=0.04)
    for cell in ("batch 1, 4K", "batch 1, 32K", "batch 16, 4K", "batch 16, 32K"):
        batch, lens = (int(word.strip("K")) for word in cell.removeprefix("batch ").split(", "))
        measured = results.stored_on("attention").ladder(f"decode bf16, {cell}")["decode, PDL"].timing.median
        assert times.attention([1024 * lens] * batch) == pytest.approx(measured, abs=2e-6, rel=0.05)


def test_shares_take_what_plans_of_tiles_take():
    """The closed forms of `attention` are bounds, and not far below ref.scheduling, which deals each tile."""
    times = StepTimes(price=0.0)
    tile = 1e6 * 16 * 512 * 132 / times.read
    for tiles in scheduling.traces().values():
        lens = [16 * n for n in tiles]
        for fair, planner in ((True, scheduling.equal_line), (False, scheduling.whole_rows)):
            plan = planner(tiles, 8, 132)
            span = scheduling.makespan(plan, 132, scheduling.Costs(tile, 0.0, 0.0))
            assert (0.95 if fair else 0.87) * span < 1e6 * times.attention(lens, fair) <= span * (1 + 1e-9)


# Requests


def test_requests_are_those_of_their_seed_and_law():
    drawn = traffic.of_zipf(4000, 5.0, longest_prompt=1000, longest_answer=64, shared=10, seed=4)
    assert drawn == traffic.of_zipf(4000, 5.0, longest_prompt=1000, longest_answer=64, shared=10, seed=4)
    assert drawn != traffic.of_zipf(4000, 5.0, longest_prompt=1000, longest_answer=64, shared=10, seed=5)
    assert drawn[-1].arrives == pytest.approx(4000 / 5, rel=0.05)
    gaps = np.diff([r.arrives for r in drawn])
    assert gaps.min() > 0 and gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # of an exponential law
    prompts = np.array([r.prompt - 10 for r in drawn])
    assert prompts.max() == 1000 and {r.answer for r in drawn} == {64 // rank for rank in range(1, 65)}
    assert (prompts >= 500).mean() == pytest.approx(2 / 64, abs=0.01)  # two ranks of 64
    correlation = np.corrcoef(prompts, [r.answer for r in drawn])[0, 1]
    assert abs(correlation) < 0.1


def test_the_trace_is_one_of_lengths():
    pairs = traffic.trace()
    assert pairs.shape[1] == 2 and len(pairs) > 500 and pairs.min() >= 1
    prompts = np.sort(pairs[:, 0])
    assert prompts[-1] > 5 * np.median(prompts)  # a few are long
    drawn = traffic.of_trace(50, 2.0, shared=7)
    assert {(r.prompt - 7, r.answer) for r in drawn} <= {tuple(pair) for pair in pairs.tolist()}


def test_prompts_grow_along_a_section():
    cells = [("markdown", "# a b"), ("code", "x y z"), ("markdown", "c"), ("code", "w"), ("code", ""),
             ("markdown", "## d e"), ("markdown", "f"), ("code", "v v")]  # fmt: skip
    notebook = {"cells": [{"cell_type": kind, "source": [text]} for kind, text in cells]}
    assert text_lengths.pairs(notebook, lambda text: len(text.split())) == [(3, 3), (7, 1), (4, 2)]


def test_how_many_fit():
    requests = [Request(0, 30, 2, 20)] * 10
    assert how_many_fit(requests, Policy(page=None), room=100, context=40) == 2
    assert how_many_fit(requests, Policy(page=8), room=100) == 3  # 32 each
    assert how_many_fit(requests, Policy(page=8, shared=True), room=100) == 5  # 16 of all, 16 each
    assert how_many_fit(requests, Policy(page=8), room=10**6) == 10 and how_many_fit([], Policy(), room=1) == 0


BAD = {
    "room must be": ([(0, 1, 1)], Policy(), {"room": 0}),
    "policy.page must be": ([(0, 1, 1)], Policy(page=0), {}),
    "policy.chunk must be": ([(0, 1, 1)], Policy(chunk=1.5), {}),
    "static batches have no pages and no chunks": ([(0, 1, 1)], Policy(continuous=False), {}),
    "static batches have no pages": ([(0, 1, 1)], Policy(continuous=False, page=None, chunk=2), {}),
    "shared beginnings need pages": ([(0, 1, 1)], Policy(page=None, shared=True), {}),
    "room must hold one context, 20, got 19": ([(0, 1, 1)], Policy(page=None), {"room": 19}),
    "request 1 needs a prompt of its own": ([(0, 1, 1), (0, 4, 1, 4)], Policy(), {}),
    "request 0 needs a prompt of its own and an answer": ([(0, 1, 0)], Policy(), {}),
    "request 0 has more tokens than context, 20": ([(0, 15, 6)], Policy(), {}),
    "or room, 10": ([(0, 8, 3)], Policy(page=2), {"room": 10}),
    "beside|or room, 14": ([(0, 2, 3), (0, 7, 5, 4)], Policy(page=2, shared=True), {"room": 14}),
    "requests must come by arrival": ([(1, 1, 1), (0, 1, 1)], Policy(), {}),
    "must share one beginning": ([(0, 9, 1, 4), (0, 9, 1, 5)], Policy(), {}),
}


@pytest.mark.parametrize("says", BAD)
def test_bad_input(says):
    requests, policy, options = BAD[says]
    with pytest.raises((ValueError, TypeError), match=says):
        run(requests, policy, **options)


def test_bad_traffic():
    for rate in (0, -1.0, math.inf, True, "2"):
        with pytest.raises(ValueError, match="rate must be above 0"):
            traffic.poisson(3, rate)
    with pytest.raises(ValueError, match="longest must be"):
        traffic.zipf(3, 0)


def test_nobody_comes():
    report = simulate([], Policy(), OneSecond(), room=10)
    assert (report.seconds, report.throughput, report.wasted, report.most) == (0, 0, 0, 0)
    assert set(report.row().values()) == {0}
