"""kernels.latent on the SIMT machine: every rung right on hostile lengths, heads, pages and plans, without races; what
is no number reaches its own rows alone; and an error before anything is written for whatever is not allowed."""

import math
import re
import sys

import pytest
import torch
from guarded_tensors import FENCE, between, fences_stand

from kernels import latent
from kernels.latent import decoding, splitting
from kernels.latent.arguments import LATENT, WIDTH
from tests.latent_cases import caches, error, wanted

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

HALF, BFLOAT = torch.float16, torch.bfloat16
WITHIN = {HALF: 1e-3, BFLOAT: 6e-3}
SCALE = 192**-0.5
RUNGS = ("split", "last", "in_place")


def problem(lens, n_heads, dtype, paged=False, seed=0, sharp=3.0):
    """(q, cache or pages, table or None, kv_lens), between NaNs."""
    generator = torch.Generator().manual_seed(seed + 1)  # not what the cache is made with
    q = (sharp * torch.randn(len(lens), n_heads, WIDTH, generator=generator)).to(dtype)
    cache, table, kv_lens = caches(lens, dtype, "cpu", seed, paged)
    return between(q), between(cache), table, kv_lens


def run(rung, q, cache, table, kv_lens, scale=SCALE, **how):
    out = between(torch.full((*q.shape[:2], LATENT), math.nan, dtype=q.dtype), FENCE)
    of = cache if table is None else latent.LatentPages(cache, table)
    reports = latent.counters(q, of, kv_lens=kv_lens, scale=scale, out=out, rung=rung, **how)
    assert fences_stand(out)
    return out, reports


# lengths, heads, dtype, in pages, what is chosen of the plan
CASES = [
    ([65, 3, 0, 130], 40, BFLOAT, True, {"shares": 3}),  # cut, whole, none; a head tile of 64 that is partly filled
    ([200, 0], 5, HALF, False, {"shares": 4}),  # heads that do not fill 16
    ([97, 1, 64], 40, HALF, True, {"shares": 2, "heads": 32, "tile": 32, "stages": 3}),  # two head tiles
    ([33, 34], 128, BFLOAT, False, {"shares": 3}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
@pytest.mark.parametrize("rung", RUNGS)
def test_right_without_races(rung, case):
    lens, n_heads, dtype, paged, chosen = case
    p = problem(lens, n_heads, dtype, paged)
    found, _ = run(rung, *p, check_races=True, **chosen)
    assert error(found, wanted(*p, SCALE)) < WITHIN[dtype]


@pytest.mark.parametrize("rung", ["last", "in_place", "amla"])
@pytest.mark.parametrize("order", ["reverse", 7])
def test_right_in_whatever_order_blocks_run(rung, order):
    p = problem([150, 40, 260], 16, HALF)
    out = torch.full((3, 16, LATENT), math.nan, dtype=HALF)
    q, cache, table, kv_lens = p
    how = {"chosen": {"shares": 5}, "order": order}
    (decoding.RUNGS | decoding.TRIALS)[rung](q, cache, table, kv_lens, SCALE * decoding.LOG2_E, out, False, **how)
    assert error(out, wanted(*p, SCALE)) < WITHIN[HALF]


@pytest.mark.parametrize("teams", [1, 2, 4])
def test_a_merge_by_several_teams_is_the_same(teams):
    p = problem([1280], 3, HALF)  # 20 segments
    found, _ = run("split", *p, shares=20, teams=teams)
    assert error(found, wanted(*p, SCALE)) < WITHIN[HALF]


def test_a_second_launch_finds_its_counters_as_the_first():
    """On the processor each launch has new ones, so they are handed over here."""
    q, cache, table, kv_lens = problem([150, 40], 16, HALF)
    for rung in ("last", "in_place", "amla"):
        counters = torch.zeros(64, dtype=torch.int64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(splitting, "claim", lambda device, words, found=counters: found)
            for _ in range(2):
                found, _ = run(rung, q, cache, table, kv_lens, shares=4)
                assert error(found, wanted(q, cache, table, kv_lens, SCALE)) < WITHIN[HALF], rung
                assert not counters.any(), rung


@pytest.mark.parametrize("rung", ["split", "last", "in_place"])
def test_values_of_zero_are_zero(rung):
    q, cache, table, kv_lens = problem([256], 3, HALF)
    cache[:, :, 5:9] = 0
    found, _ = run(rung, q, cache, table, kv_lens, shares=4)
    assert not found[..., 5:9].any() and error(found, wanted(q, cache, table, kv_lens, SCALE)) < WITHIN[HALF]


def test_amla_is_right_where_no_sum_is_zero():
    p = problem([65, 0, 130], 40, BFLOAT, True)
    found, _ = run("amla", *p, check_races=True, shares=3)
    assert error(found, wanted(*p, SCALE)) < WITHIN[BFLOAT]


def test_sums_of_zero_break_additions_to_exponents():
    """What amla.cu is there to show: a sum of 0 becomes a huge number, or none, when its reference grows."""
    q, cache, table, kv_lens = problem([256], 3, HALF, sharp=1.0)
    cache[:, :256, 5:9] = 0
    cache[:, :64, 64:128] = 4 * q[:, 0, 64:128].sign()  # the first share is added last, and is the highest
    found, _ = run("amla", q, cache, table, kv_lens, shares=4)
    assert not (found[0, 0, 5:9].abs() < 1e4).any()
    right, _ = run("in_place", q, cache, table, kv_lens, shares=4)
    assert error(right, wanted(q, cache, table, kv_lens, SCALE)) < WITHIN[HALF]


def test_two_tokens_may_cancel_to_a_sum_of_zero():
    """It takes no values of 0: numbers of eight bits cancel now and then. Here 9/32 of 10/32 is as much as 45/512."""
    q, cache, table, kv_lens = problem([66], 1, BFLOAT, sharp=1.0)
    q[0, 0], cache[:, :66] = 0, 0
    q[0, 0, :2] = torch.tensor([8.0, 1.0])
    cache[0, :64, 0], cache[0, :64, 3] = 1, 1
    cache[0, 65, 1] = -1.83  # times log2(e), its weight is 9/32, rounded
    cache[0, 64:66, 3] = torch.tensor([45 / 512, -10 / 32])
    found, _ = run("amla", q, cache, table, kv_lens, scale=0.6931471805599453, shares=2)
    right, _ = run("split", q, cache, table, kv_lens, scale=0.6931471805599453, shares=2)
    assert abs(float(right[0, 0, 3]) - 1) < 0.01 and not abs(float(found[0, 0, 3])) < 1e4


@pytest.mark.parametrize("rung", ["split", "last", "in_place", "hopper"])
def test_numbers_that_are_none_reach_their_own_rows_alone(rung):
    q, cache, table, kv_lens = problem([70, 50, 40], 18, HALF, True)
    want = wanted(q, cache, table, kv_lens, SCALE)
    q[0, 3, 8], cache[table[1, 0], 7, 520] = math.nan, math.nan
    found, _ = run(rung, q, cache, table, kv_lens, shares=5)
    assert found[0, 3].isnan().all() and found[1].isnan().all()
    keep = torch.ones(3, 18, dtype=torch.bool)
    keep[0, 3] = keep[1] = False
    assert error(found[keep], want[keep]) < WITHIN[HALF]


@pytest.mark.parametrize("rung", ["split", "last", "in_place", "hopper"])
def test_scores_of_minus_infinity_in_a_whole_row_give_zeros(rung):
    q, cache, table, kv_lens = problem([140], 2, BFLOAT)
    q[0, 0], q[0, 0, -1] = 0, -1
    cache[..., -1] = math.inf
    q[0, 1, -1] = 0.5
    cache[0, :, -1] = 3e38  # times 1, and scaled by more, it is beyond float32
    found, _ = run(rung, q, cache, table, kv_lens, scale=10.0, shares=3)
    assert not found[0, 0].any()


def test_lengths_and_pages_are_clamped_as_on_a_card():
    q, cache, table, kv_lens = problem([70, 40], 4, HALF, True)
    lens, pages = kv_lens.clone(), table.clone()
    lens[0], lens[1] = table.shape[1] * 64 + 100, -5
    pages[0, 2:] = 10**9
    last = pages.clamp(max=len(cache) - 1)
    cache.nan_to_num_()
    out = torch.full((2, 4, LATENT), math.nan, dtype=HALF)
    splitting.launch(q, cache, pages, lens, SCALE * decoding.LOG2_E, out, False)
    full = torch.tensor([table.shape[1] * 64, 0])
    assert error(out, wanted(q, cache, last, full, SCALE)) < WITHIN[HALF]


def test_the_same_bits_every_time_and_out_is_returned():
    q, cache, _, kv_lens = problem([70, 130], 7, BFLOAT)
    out = torch.empty(2, 7, LATENT, dtype=BFLOAT)
    assert latent.split(q, cache, kv_lens=kv_lens, scale=SCALE, out=out) is out
    assert torch.equal(latent.split(q, cache, kv_lens=kv_lens, scale=SCALE), out)


def test_decode_takes_the_rung_that_takes_the_call():
    q, cache, _, _ = problem([20], 2, BFLOAT)
    kv_lens = torch.tensor([20], dtype=torch.int32)
    for scale in (SCALE, -SCALE):  # hopper.cu takes none below 0
        assert decoding.best(q, scale) == ("hopper" if scale > 0 else "split")
        found = latent.decode(q, cache, kv_lens=kv_lens, scale=scale)
        assert error(found, wanted(q, cache, None, kv_lens, scale)) < WITHIN[BFLOAT]


def test_one_tile_in_shared_memory_serves_both_products():
    """Global reads: the cache once for each head tile, and queries."""
    q, cache, table, kv_lens = problem([128], 64, HALF)
    _, (first, _) = run("split", q, cache, table, kv_lens, shares=1)
    read = 32 * first.counters["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"]
    assert read < 1.02 * (128 + 64) * 2 * WIDTH
    assert first.counters["l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"] == 0


# Wrong


def good():
    q, cache, table, kv_lens = problem([70, 40], 4, HALF, True)
    return {"q": q, "cache": latent.LatentPages(cache, table), "kv_lens": kv_lens, "scale": SCALE}


def contiguous():
    q, cache, _, kv_lens = problem([70, 40], 4, HALF)
    return {"q": q, "cache": cache, "kv_lens": kv_lens, "scale": SCALE}


def with_table(**changes):
    table = good()["cache"].table.clone()
    for place, value in changes.items():
        table[int(place[1]), int(place[2])] = value
    return latent.LatentPages(good()["cache"].pages, table)


WRONG = [
    (
        lambda: good() | {"q": torch.zeros(2, 4, 512, dtype=HALF)},
        ValueError,
        "decode: q must have 512 latent and 64 rope dimensions, 576, got 512",
    ),
    (
        lambda: good() | {"q": torch.zeros(2, 129, 576, dtype=HALF)},
        ValueError,
        "decode: q must have at most 128 heads, got 129",
    ),
    (
        lambda: good() | {"q": torch.zeros(2, 4, 576)},
        TypeError,
        "decode: q must be of torch.float16 or torch.bfloat16, got torch.float32",
    ),
    (lambda: good() | {"q": torch.zeros(2, 0, 576, dtype=HALF)}, ValueError, "decode: q must have shape"),
    (
        lambda: good() | {"q": torch.zeros(3, 4, 576, dtype=HALF)},
        ValueError,
        "decode: table must have shape (3, max_pages)",
    ),
    (
        lambda: good() | {"q": torch.zeros(2, 4, 576, dtype=BFLOAT)},
        TypeError,
        "decode: pages must be of torch.bfloat16, like the first tensor, got torch.float16",
    ),
    (
        lambda: contiguous() | {"cache": torch.zeros(2, 9, 512, dtype=HALF)},
        ValueError,
        "cache must have shape (2, kv_len, 576), none of it 0, got (2, 9, 512)",
    ),
    (
        lambda: contiguous() | {"cache": torch.zeros(3, 9, 576, dtype=HALF)},
        ValueError,
        "decode: cache must have shape (2, kv_len, 576)",
    ),
    (
        lambda: contiguous() | {"cache": torch.zeros(2, 9, 1152, dtype=HALF)[..., ::2]},
        ValueError,
        "decode: cache must be contiguous",
    ),
    (lambda: good() | {"cache": [1]}, TypeError, "decode: cache must be a torch tensor or LatentPages, got list"),
    (
        lambda: good() | {"cache": latent.LatentPages(torch.zeros(4, 32, 576, dtype=HALF), good()["cache"].table)},
        ValueError,
        "decode: pages must have shape (n_pages, 64, 576)",
    ),
    (
        lambda: good() | {"kv_lens": None},
        ValueError,
        "decode: kv_lens must be given where the cache is in pages, got None",
    ),
    (
        lambda: good() | {"kv_lens": torch.tensor([70, 400], dtype=torch.int32)},
        ValueError,
        "kv_lens must be from 0 to 192, what a row of table has room for, got 400",
    ),
    (
        lambda: contiguous() | {"kv_lens": torch.tensor([70, -1], dtype=torch.int32)},
        ValueError,
        "decode: kv_lens must be from 0 to 73, kv_len, got -1",
    ),
    (
        lambda: contiguous() | {"kv_lens": torch.tensor([70, 1])},
        TypeError,
        "decode: kv_lens must be of torch.int32, got torch.int64",
    ),
    (
        lambda: good() | {"cache": with_table(t11=99, t10=-1)},
        ValueError,
        "decode: table must name pages from 0 to 4, got -1 in sequence 1",
    ),
    (
        lambda: good() | {"scale": None},
        TypeError,
        "scale must be a number, as it is that of heads before absorption, got None",
    ),
    (lambda: good() | {"scale": math.inf}, ValueError, "decode: scale must be finite, got inf"),
    (
        lambda: good() | {"out": torch.zeros(2, 4, 576, dtype=HALF)},
        ValueError,
        "decode: out must have shape (2, 4, 512)",
    ),
    (lambda: good() | {"out": torch.zeros(2, 4, 512)}, TypeError, "decode: out must be of torch.float16"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[2])
def test_what_is_wrong_is_named(case):
    make, kind, words = case
    with pytest.raises(kind, match=re.escape(words)):
        latent.decode(**make())


def test_nothing_is_written_over_an_input():
    q, cache, _, _ = problem([70], 4, HALF)
    with pytest.raises(ValueError, match="out must not share memory with cache"):
        latent.decode(q, cache, scale=SCALE, out=cache.view(-1)[: 4 * LATENT].view(1, 4, LATENT))
    odd = torch.zeros(4 * WIDTH + 1, dtype=HALF)[1:].view(1, 4, WIDTH)
    with pytest.raises(ValueError, match="q must start at an address divisible by 16"):
        latent.decode(odd, cache, scale=SCALE)


def test_blocks_that_wait_for_each_other_are_no_more_than_fit():
    q, cache, table, kv_lens = problem([4700], 100, HALF)
    for rung in ("in_place", "amla"):
        with pytest.raises(ValueError, match="blocks wait for each other, so 132 may be there"):
            run(rung, q, cache, table, kv_lens, shares=70)


def test_counters_need_the_processor_and_a_rung():
    q, cache, _, _ = problem([70], 4, HALF)
    with pytest.raises(ValueError, match="counters: rung must be one of split, last, in_place, hopper, amla, got 'x'"):
        latent.counters(q, cache, scale=SCALE, rung="x")
