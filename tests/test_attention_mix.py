"""The attention mix on the SIMT machine: right on hostile shapes, the counters that the chapter states, no race, and an
error before anything is written for whatever the contract does not allow."""

import itertools
import sys

import numpy as np
import pytest
import torch
from guarded_tensors import FENCE, between, fences_stand
from hypothesis import given, settings
from hypothesis import strategies as some

import ref.attention
import simt
from kernels.attention import mix
from lab import cuda
from lab.source import inlined

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

NAMES = [rung.name for rung in mix.RUNGS]
DTYPES = list(mix.DTYPES)
# n_heads, kv_len, n_kv_heads, head_dim: one of each, primes, groups of 1 to 7, one past a warp, a block and a split
SHAPES = [
    (7, 97, 1, 33),
    (1, 1, 1, 1),
    (6, 31, 3, 40),
    (4, 1, 4, 256),
    (2, 64, 2, 65),
    (12, 33, 4, 31),
    (1, 1031, 1, 2),
]
REQUESTS, SECTORS = ("l1tex__t_" + what + "_pipe_lsu_mem_global_op_{}.sum" for what in ("requests", "sectors"))


def run(name, *args, **options):
    return getattr(mix, name)(*args, **options)


def problem(n_heads, kv_len, n_kv_heads, head_dim, dtype=torch.float32, seed=0):
    """att and v between NaNs, out full of NaN between fences. The shares are positive and grow, the newest largest."""
    rng = torch.Generator().manual_seed(seed + 1000 * kv_len + head_dim)
    att = torch.rand(n_heads, kv_len, generator=rng) + torch.linspace(0, 1, kv_len)
    v = torch.randn(kv_len, n_kv_heads, head_dim, generator=rng)
    out = torch.full((n_heads, head_dim), torch.nan, dtype=dtype)
    return between(att.to(dtype)), between(v.to(dtype)), between(out, FENCE)


def truth(att, v):
    return torch.from_numpy(ref.attention.attention_mix(att.double().numpy(), v.double().numpy()))


def close(out, att, v):
    wanted = truth(att, v)
    error = (out.double() - wanted).norm() / max(float(wanted.norm()), float(truth(att.abs(), v.abs()).norm()) * 1e-3)
    assert error <= max(torch.finfo(out.dtype).eps, 1e-6), error


# Right


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_right_on_hostile_shapes(name, dtype):
    for shape in SHAPES:
        att, v, out = problem(*shape, dtype)
        before = att.clone(), v.clone()
        assert run(name, att, v, out=out) is out
        close(out, att, v)
        assert fences_stand(out)
        assert torch.equal(att, before[0]) and torch.equal(v, before[1])


@pytest.mark.parametrize("name", NAMES)
def test_no_token_is_lost(name):
    """Every length around a warp and around a split, each token with a weight of its own: sums are exact in fp32."""
    for kv_len in [*range(1, 36), 63, 64, 65, 95, 96, 97, 127, 129]:
        att, v = torch.ones(2, kv_len), torch.zeros(kv_len, 1, 3)
        v[:, 0, 0], v[:, 0, 1], v[-1, 0, 2] = 1, torch.arange(kv_len) + 1, 1
        wanted = [kv_len, kv_len * (kv_len + 1) // 2, 1]
        assert run(name, att, v).tolist() == [wanted, wanted], kv_len


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 16, 40])
def test_any_number_of_splits_is_right(splits):
    """More than there are tokens, too: the shares of the others are empty."""
    for kv_len in (1, 2, 15, 16, 17, 31, 97):
        att, v, _ = problem(4, kv_len, 2, 40)
        sums = torch.zeros(4, 40)
        mix._kernel("mix_split", torch.float32)((2, splits), 128, att, v, sums, 4, 2, kv_len, 40)
        close(sums, att, v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_without_out_a_new_tensor_comes_back(name, dtype):
    att, v, _ = problem(6, 70, 3, 20, dtype)
    out = run(name, att, v)
    assert out.shape == (6, 20) and out.dtype == dtype and out.device == att.device and out.is_contiguous()
    close(out, att, v)


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_stay_where_they_belong(name):
    att, v, out = problem(4, 67, 2, 33)
    v[66, 0, 5], v[0, 1, 32], v[33, 1, 0] = torch.nan, torch.inf, -torch.inf  # kv head 0 is of heads 0 and 1
    run(name, att, v, out=out)
    assert out[:2, 5].isnan().all() and (out[2:, 32] == torch.inf).all() and (out[2:, 0] == -torch.inf).all()
    v[66, 0, 5] = v[0, 1, 32] = v[33, 1, 0] = 0
    rest = torch.ones(4, 33, dtype=torch.bool)
    rest[:2, 5] = rest[2:, 32] = rest[2:, 0] = False
    assert ((out - truth(att, v))[rest].abs() < 1e-3).all()


@pytest.mark.parametrize("name", NAMES)
def test_sums_are_wider_than_the_result(name):
    att = torch.ones(1, 288, dtype=torch.float16)
    v = torch.ones(288, 1, 3, dtype=torch.float16)
    v[:2, 0, 0] = torch.tensor([2048, 2])  # 2048 + 1 is no fp16, so whoever keeps a sum in fp16 loses some of the ones
    v[:, 0, 1], v[:144, 0, 2], v[144:, 0, 2] = 30000, 30000, -30000  # too large at the end, and only on the way
    assert run(name, att, v).tolist() == [[2048 + 2 + 286, torch.inf, 0]]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_not_tracked(name):
    att, v, _ = problem(2, 5, 1, 3)
    assert not run(name, att.requires_grad_(), v.requires_grad_()).requires_grad


# Counters: 32 heads would be the same eight times over


def counted(name, dtype=torch.float32, kv_len=256, **options):
    att, v, _ = problem(4, kv_len, 1, 128, dtype)
    return mix.counters(name, att, v, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_naive_touches_a_sector_for_each_lane(dtype):
    report = counted("mix_naive", dtype)
    loads = 4 * 128 * 256 // 32  # of v, and as many of att, whose lanes are neighbours
    assert report.counters[REQUESTS.format("ld")] == 2 * loads
    assert report.counters[SECTORS.format("ld")] == (32 + dtype.itemsize) * loads
    assert report.counters[REQUESTS.format("st")] == 4 * 128 and report.sectors_per_request("st") == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES[1:])
def test_lanes_along_channels_read_whole_sectors(name, dtype):
    report = counted(name, dtype)
    loads = 4 * 128 * 256 // 32  # of v; and as many of att, in which all lanes want the same score
    assert report.counters[REQUESTS.format("ld")] == 2 * loads
    assert report.counters[SECTORS.format("ld")] == (dtype.itemsize + 1) * loads


def test_split_adds_once_for_each_output_and_split():
    report = counted("mix_split")
    (_, splits), _ = mix.plan("mix_split", 4, 256, 128)
    assert splits == 256 // 32
    assert report.counters[REQUESTS.format("red")] == 4 * 128 // 32 * splits
    assert report.counters[SECTORS.format("red")] == 4 * 128 // 8 * splits
    assert report.counters[REQUESTS.format("st")] == report.counters[REQUESTS.format("atom")] == 0


def test_shared_stores_once_and_has_no_conflict():
    for dtype in DTYPES:
        report = counted("mix_shared", dtype)
        assert report.counters[REQUESTS.format("st")] == 4 * 128 // 32
        assert report.sectors_per_request("st") == dtype.itemsize
        assert report.counters[REQUESTS.format("red")] == report.counters[REQUESTS.format("atom")] == 0
        blocks = 4 * 128 // 32
        assert report.counters["smsp__inst_executed_op_shared_st.sum"] == 32 * blocks
        assert report.counters["smsp__inst_executed_op_shared_ld.sum"] == 31 * blocks
        assert report.bank_conflicts == 0


@pytest.mark.parametrize("name", NAMES)
def test_counters_launches_what_the_rung_launches(name):
    att, v, _ = problem(6, 130, 3, 40, torch.bfloat16)
    report = mix.counters(name, att, v)
    grid, block = mix.plan(name, 6, 130, 40)
    assert report.grid[:2] == (grid if isinstance(grid, tuple) else (grid, 1))
    assert report.block[:2] == (block if isinstance(block, tuple) else (block, 1))
    assert report.counters == mix.counters(name, torch.nn.Parameter(att), v).counters


def test_counters_errors():
    att, v, _ = problem(4, 5, 2, 3)
    with pytest.raises(ValueError, match="rung must be one of mix_naive, mix_split, mix_shared, got 'best'"):
        mix.counters("best", att, v)
    with pytest.raises(ValueError, match=r"mix_split: v must have shape \(5, n_kv_heads, head_dim\)"):
        mix.counters("mix_split", att, v[:4])


def test_work():
    att, v, _ = problem(4, 5, 2, 3, torch.float16)
    assert mix.work(att, v) == (2 * (4 * 5 + 5 * 2 * 3 + 4 * 3), 2 * 4 * 5 * 3)


# Races, and the order of additions


@pytest.mark.parametrize("name", NAMES)
def test_no_race(name):
    for shape in ((4, 70, 2, 40), (1, 33, 1, 1)):
        att, v, _ = problem(*shape)
        mix.counters(name, att, v, check_races=True)


def changed(name, *pairs):
    text = inlined(f"kernels/attention/{name}.cu")
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return cuda.compile(text).mix


def test_the_race_check_would_see_a_missing_barrier():
    att, v, out = problem(2, 70, 1, 40)
    with pytest.raises(simt.SimtError):
        changed("mix_shared", ("__syncthreads();", ""))((2, 2), (32, 32), att, v, out, 2, 1, 70, 40, check_races=True)


def test_the_race_check_would_see_a_lost_update():
    att, v, out = problem(2, 70, 1, 40)
    plain = changed("mix_split", ("atomicAdd(&sums[i], sum);", "sums[i] += sum;"))
    with pytest.raises(simt.RaceError, match="race on sums"):
        plain((1, 4), 128, att, v, out.zero_(), 2, 1, 70, 40, check_races=True)


def test_shared_adds_the_slices_in_order():
    """Bit for bit what NumPy gets in fp32, slice by slice: no atomic, no order left to chance."""
    att, v, out = problem(2, 97, 1, 33)
    att[:], v[:] = att.round(decimals=2), v.round(decimals=1)
    run("mix_shared", att, v, out=out)
    products = att.double().numpy()[:, :, None] * v.double().numpy()[None, :, 0]  # exact: what the kernel fuses
    slices = np.zeros((32, 2, 33), np.float32)
    for t in range(97):
        slices[t % 32] = (slices[t % 32].astype(np.float64) + products[:, t]).astype(np.float32)
    total = slices[0].copy()
    for one in slices[1:]:
        total += one
    assert np.array_equal(out.numpy(), total)


# How it is launched


@settings(max_examples=300, deadline=None)
@given(
    n_heads=some.integers(1, 300),
    kv_len=some.integers(1, 1 << 40) | some.integers(1, 300),
    head_dim=some.integers(1, 300),
    sms=some.integers(1, 300),
)
def test_plans_cover_every_output_within_the_cards_limits(n_heads, kv_len, head_dim, sms):
    grid, block = mix.plan("mix_naive", n_heads, kv_len, head_dim, sms)
    assert block == 256 and (grid - 1) * 8 < n_heads * head_dim <= grid * 8
    (tiles, splits), block = mix.plan("mix_split", n_heads, kv_len, head_dim, sms)
    assert block == 128 and (tiles - 1) * 128 < n_heads * head_dim <= tiles * 128
    assert 1 <= splits <= min(65535, -(-kv_len // 32)) and (splits - 1) * tiles < 16 * sms
    (heads, tiles), block = mix.plan("mix_shared", n_heads, kv_len, head_dim, sms)
    assert block == (32, 32) and heads == n_heads and (tiles - 1) * 32 < head_dim <= tiles * 32


# Bad input


def bad(**changes):
    given = dict(zip(("att", "v", "out"), problem(4, 5, 2, 3))) | changes
    return given.pop("att"), given.pop("v"), given


BAD = {
    "att is a NumPy array": ({"att": np.ones((4, 5), "f4")}, TypeError, "att must be a torch tensor, got ndarray"),
    "att is of float64": ({"att": torch.ones(4, 5).double()}, TypeError, "att must be of torch.float32 or"),
    "att has three axes": ({"att": torch.ones(1, 4, 5)}, ValueError, r"att must have shape \(n_heads, kv_len\)"),
    "no token": (
        {"att": torch.ones(4, 0), "v": torch.ones(0, 2, 3)},
        ValueError,
        r"att must have shape \(n_heads, kv_len\), none of it 0, got \(4, 0\)",
    ),
    "no head": ({"att": torch.ones(0, 5)}, ValueError, "att must have shape"),
    "v of another dtype": ({"v": torch.ones(5, 2, 3).half()}, TypeError, "v must be of torch.float32, like the first"),
    "v of another length": ({"v": torch.ones(6, 2, 3)}, ValueError, r"v must have shape \(5, n_kv_heads, head_dim\)"),
    "v without channels": ({"v": torch.ones(5, 2, 0)}, ValueError, "none of it 0"),
    "heads that do not divide": (
        {"v": torch.ones(5, 3, 3)},
        ValueError,
        "n_heads must be a multiple of n_kv_heads, got 4 query heads and 3 kv heads",
    ),
    "v in another order": ({"v": torch.ones(2, 5, 3).transpose(0, 1)}, ValueError, "v must be contiguous, got"),
    "out too small": ({"out": torch.ones(4, 2)}, ValueError, r"out must have shape \(4, 3\)"),
    "out of another dtype": ({"out": torch.ones(4, 3).half()}, TypeError, "out must be of torch.float32"),
    "out wants gradients": ({"out": torch.ones(4, 3, requires_grad=True)}, ValueError, "out must not require grad"),
    "on the meta device": ({"att": torch.ones(4, 5, device="meta")}, ValueError, "att must be on the CPU or on a CUDA"),
}


@pytest.mark.parametrize("name, mistake", list(itertools.product(NAMES, BAD)))
def test_bad_input_is_named_and_nothing_is_written(name, mistake):
    changes, error, says = BAD[mistake]
    att, v, rest = bad(**changes)
    before = rest["out"].clone()
    with pytest.raises(error, match=says) as caught:
        run(name, att, v, **rest)
    assert str(caught.value).startswith(f"{name}: ")
    assert torch.equal(before.isnan(), rest["out"].isnan())


@pytest.mark.parametrize("name", NAMES)
def test_out_must_not_lie_over_an_input(name):
    att = torch.ones(3, 3)
    with pytest.raises(ValueError, match=f"{name}: out must not share memory with att"):
        run(name, att, torch.ones(3, 1, 3), out=att)
