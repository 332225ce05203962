"""kernels.attention.decode on the SIMT machine: right on hostile lengths, groups and plans, the counters that it is
built for, no race, the same bits every time, and an error before anything is written for whatever is not allowed."""

import functools
import re
import sys

import numpy as np
import pytest
import torch
from guarded_tensors import FENCE, between, fences_stand
from hypothesis import given, settings
from hypothesis import strategies as some

import ref.attention
import simt
from kernels import attention
from kernels.attention import decoding
from kernels.attention.plan import TILE, options, plan
from lab import cuda
from lab.source import inlined
from lab.stream import still_running

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

ALLOWED = {torch.float16: 1e-3, torch.bfloat16: 4e-3}  # by the norm
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"
SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_{}.sum"
ROOM = 227 * 1024


def problem(batch, kv_len, n_heads, n_kv_heads, head_dim, dtype=torch.float16, seed=0, skip=0):
    """q, k and v between NaNs, and out full of NaN between fences."""
    rng = torch.Generator().manual_seed(seed + 1000 * kv_len + n_heads)
    shapes = (batch, n_heads, head_dim), *2 * [(batch, kv_len, n_kv_heads, head_dim)]
    q, k, v = (between(torch.randn(shape, generator=rng).to(dtype), skip=skip) for shape in shapes)
    return q, k, v, between(torch.full(shapes[0], torch.nan, dtype=dtype), FENCE, skip)


def whole_source(name):
    """A kernel's source with its headers in it."""
    return inlined(f"kernels/attention/{name}")


def wanted(q, k, v, scale=None, kv_lens=None):
    lens = None if kv_lens is None else kv_lens.numpy()
    return ref.attention.decode_attention(*(t.double().numpy() for t in (q, k, v)), scale, kv_lens=lens)


def close(out, q, k, v, scale=None, kv_lens=None):
    right = wanted(q, k, v, scale, kv_lens)
    error = np.linalg.norm(out.double().numpy() - right) / np.linalg.norm(right)
    assert error <= ALLOWED[out.dtype], error


def launch(q, k, v, out, kv_lens=None, scale=None, check_races=False, **chosen):
    """decode, with a plan of our choice."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    decoding._launch(q, k, v, scale, kv_lens, out, False, chosen, check_races=check_races)
    return out


def changed(name, change, constants):
    """A kernel's module with change(source) in its source's place; the one that other tests have, if that changes
    nothing."""
    source = whole_source(name)
    if change(source) == source:
        return cuda.load(decoding.HERE / name, constants)
    return cuda.compile(change(source), constants)


def launch_changed(change, q, k, v, out, kv_lens=None, scale=None, check_races=False, **chosen):
    """What decode launches, with change(source) compiled instead of each source. Scratch memory is in two pieces, no
    larger than the plan says, and full of NaN."""
    (batch, n_heads, head_dim), (_, kv_len, n_kv_heads, _) = q.shape, k.shape
    card = decoding.card(q.device)
    p = plan(batch, n_heads, n_kv_heads, head_dim, kv_len, *card, lens=kv_lens is not None, **chosen)
    sizes, scale = (kv_len, batch, p.rows, p.each, p.rest), head_dim**-0.5 if scale is None else scale
    args, races = (*sizes, scale * decoding.LOG2_E, 0), {"check_races": check_races}
    both = options(q.dtype, p.shape, p.schedule)
    split = changed("decode.cu", change, (*both, f"-DRING_STAGES={p.stages}")).decode
    if p.whole:
        split(p.shares, 32 * p.warps, q, k, v, None, out, None, None, *args, shared=p.shared, **races)
        return out
    both += f"-DTHREADS={p.threads}", f"-DTOGETHER={p.together}"
    merge = changed("merge.cu", change, both).merge
    scratch = [torch.full((size,), torch.nan) for size in (p.sums_at, p.floats - p.sums_at)]
    split(p.shares, 32 * p.warps, q, k, v, kv_lens, None, *scratch, *args, shared=p.shared, **races)
    merge(batch * n_heads // p.together, p.threads, *scratch, kv_lens, out, *sizes, p.shares, **races)
    return out


# Right


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_right_on_hostile_lengths(dtype):
    for kv_len in (1, 15, 16, 17, 127, 1009):
        q, k, v, out = problem(1, kv_len, 8, 2, 64, dtype)
        before = [t.clone() for t in (q, k, v)]
        assert attention.decode(q, k, v, out=out) is out
        close(out, q, k, v)
        assert fences_stand(out)
        assert all(torch.equal(a, b) for a, b in zip((q, k, v), before))


# batch, kv_len, n_heads, n_kv_heads, head_dim: groups of 1, 4, 5, 8, 16, 17 and 64
SHAPES = [
    (3, 33, 5, 1, 96),
    (2, 31, 3, 3, 128),
    (1, 50, 64, 1, 64),
    (2, 37, 16, 1, 256),
    (1, 40, 34, 2, 32),
    (2, 70, 16, 2, 16),
    (5, 18, 8, 8, 80),
    (2, 65, 32, 8, 128),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_for_all_groups_and_head_dims(shape):
    q, k, v, out = problem(*shape, torch.bfloat16 if shape[4] == 128 else torch.float16)
    close(attention.decode(q, k, v, out=out), q, k, v)
    assert fences_stand(out)


# With lengths or without is another kernel, as with other warps or another side. So each has one of the two, and each
# number of warps and each side has both: one warp, two, and one side without lengths in scores_that_rise_fall_and_jump.
SHARED_OUT = [
    ([140, 1, 47], dict(warps=8, side=1, tile=16)),
    (None, dict(warps=8, side=2, tile=16, stages=1)),
    (None, dict(warps=4, side=4, tile=32, stages=2)),
    ([140, 1, 47], dict(warps=1, side=1, tile=16, shares=1)),
    ([140, 1, 47], dict(warps=2, side=1, tile=32, shares=7)),
    ([140, 1, 47], dict(warps=4, side=2, tile=16, shares=40, threads=64)),
    ([140, 1, 47], dict(warps=8, side=4, tile=32, shares=3, threads=512)),
    (None, dict(warps=8, side=2, tile=16, stages=1, shares=7)),  # shares with several rows, and parts of rows
]


@pytest.mark.parametrize("lens, chosen", SHARED_OUT, ids=str)
def test_right_however_it_is_shared_out(lens, chosen):
    """Shares that begin and end anywhere in a row, hold several rows, or leave warps without a tile."""
    q, k, v, out = problem(3, 140, 8, 4, 64)
    kv_lens = lens and torch.tensor(lens, dtype=torch.int32)
    close(launch(q, k, v, out, kv_lens, **chosen), q, k, v, kv_lens=kv_lens)
    assert fences_stand(out)


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_nothing_behind_the_length_leaks(dtype):
    """NaN and infinity in the cache behind kv_lens; more than 32 sequences, so that lengths are summed in two goes."""
    rng = torch.Generator().manual_seed(1)
    kv_lens = torch.randint(1, 70, (37,), generator=rng, dtype=torch.int32)
    kv_lens[:4] = torch.tensor([1, 70, 16, 17])
    q, k, v, out = problem(37, 70, 4, 2, 32, dtype)
    for b, length in enumerate(kv_lens.tolist()):
        k[b, length:], v[b, length:] = torch.nan, torch.inf if b % 2 else torch.nan
    close(attention.decode(q, k, v, kv_lens=kv_lens, out=out), q, k, v, kv_lens=kv_lens)
    assert fences_stand(out)
    alone = attention.decode(q[3:4], k[3:4, :17].contiguous(), v[3:4, :17].contiguous(), kv_lens=kv_lens[3:4])
    close(alone, q[3:4], k[3:4, :17], v[3:4, :17])


@pytest.mark.parametrize("lens", [[100, 0, 1 << 30, -5], [0, 0, 0, 0], [0, 1, 0, 0]], ids=str)
def test_lengths_that_are_none_are_clamped(lens):
    """As on a card, where nobody has looked at them; shares without a tile, and sequences in no share."""
    q, k, v, out = problem(4, 100, 4, 2, 32)
    for b, length in enumerate(lens):
        k[b, max(0, length) :], v[b, max(0, length) :] = torch.nan, torch.nan
    launch(q, k, v, out, torch.tensor(lens, dtype=torch.int32), check_races=True)
    for b, length in enumerate(min(max(length, 0), 100) for length in lens):
        if length:
            close(out[b : b + 1], q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length])
        else:
            assert (out[b] == 0).all()
    assert fences_stand(out)


def test_scratch_memory_may_hold_anything_and_is_as_large_as_it_must_be():
    """The sums lie behind the partials in one tensor; apart, either shows whoever goes past its end."""
    lens = torch.tensor([90, 1, 33], dtype=torch.int32)  # what a plan takes does not depend on them: once is enough
    for batch, n_heads, n_kv_heads, kv_lens, chosen in (
        (3, 4, 2, lens, {}),
        (1, 34, 2, None, dict(shares=5)),
        (2, 6, 2, None, dict(warps=2)),
    ):
        q, k, v, out = problem(batch, 90, n_heads, n_kv_heads, 32)
        launch_changed(lambda source: source, q, k, v, out, kv_lens, **chosen)
        close(out, q, k, v, kv_lens=kv_lens)


# batch, kv_len, n_heads, n_kv_heads, head_dim: groups of 1, 4, 7, 16, 17, 20 and 64, lengths that are no tiles, or few.
# Groups of one head tile and of several, and short and long rows, are of both dtypes: with one for each shape all is
# compiled that may differ.
SHORT_RING = dict(warps=2, stages=1, side=1, tile=16)
WHOLE = [
    ((2, 50, 3, 3, 64), torch.float16, {}),
    ((3, 150, 8, 2, 128), torch.bfloat16, SHORT_RING),
    ((1, 300, 7, 1, 80), torch.float16, {}),
    ((2, 1, 16, 1, 256), torch.bfloat16, SHORT_RING),
    ((1, 33, 17, 1, 16), torch.float16, {}),
    ((2, 130, 40, 2, 32), torch.bfloat16, SHORT_RING | dict(side=2, shares=3)),
    ((5, 75, 6, 2, 64), torch.bfloat16, dict(warps=2, side=2, tile=32, shares=2)),  # without a join, several rows
    ((1, 37, 64, 1, 64), torch.float16, {}),
]


@pytest.mark.parametrize("shape, dtype, chosen", WHOLE, ids=str)
def test_right_with_a_whole_row_for_each_block(shape, dtype, chosen):
    q, k, v, out = problem(*shape, dtype)
    close(launch(q, k, v, out, whole=True, **chosen), q, k, v)
    assert fences_stand(out)


def test_whole_rows_where_they_are_as_many_as_multiprocessors(monkeypatch):
    """As decode is called: one launch; with lengths, in shares, or against the plan's will it is two."""
    monkeypatch.setattr(decoding, "card", lambda device: (6, ROOM))
    monkeypatch.setattr(decoding, "_prepared", decoding._prepared.__wrapped__)  # which remembers the real card
    q, k, v, out = problem(3, 300, 8, 2, 64)
    first, second = decoding.counters(q, k, v)
    assert first.grid == (6, 1, 1) and second is None
    assert first.counters[SECTORS.format("st")] == q.numel() * q.element_size() // 32
    lens = torch.tensor([300, 1, 47], dtype=torch.int32)
    assert decoding.counters(q, k, v, whole=False)[1] and decoding.counters(q, k, v, kv_lens=lens)[1]
    for pdl in (False, True):
        still_running(writes=(q, k[:, -1], v[:, -1], out))
        close(attention.decode(q, k, v, out=out.fill_(torch.nan), pdl=pdl), q, k, v)
        still_running(writes=[q, out] + [cache[b, n - 1] for cache in (k, v) for b, n in enumerate(lens)])
        close(attention.decode(q, k, v, kv_lens=lens, out=out.fill_(torch.nan), pdl=pdl), q, k, v, kv_lens=lens)
    close(decoding.decode_in_shares(q, k, v, 5, out=out.fill_(torch.nan)), q, k, v)


def means_of_the_largest(launch=launch):
    """In each tile one weight of 1 and 15 that float16 rounds up by 0.04 %: not so in the sum that divides, it gives
    65504 * 1.00034, which float16 rounds to infinity."""
    q, k, v, out = problem(1, 320, 4, 1, 64)
    q[:], k[:], v[:] = 0.0, 0.0, 65504.0
    q[..., 0], k[:, torch.arange(320) % 16 > 0, :, 0] = 1.0, 1.0
    v[..., 1] = -65504.0
    for chosen in (dict(), dict(whole=True), dict(warps=1, side=1, shares=3, stages=3)):
        launch(q, k, v, out.fill_(torch.nan), scale=float(np.log(0.5 + 0.3 / 1024)), **chosen)
        assert torch.equal(out, v[:, :1, 0].expand_as(out)), "largest"


def test_a_mean_of_the_largest_values_is_finite():
    means_of_the_largest()
    sums = "mma_m16n8k16(weights, w[t], ones, ones, T());", ""
    weights = (
        "w[t][2 * n + r] = pack(low, high, T());",
        (
            "w[t][2 * n + r] = pack(low, high, T()); float both = low + high; both += __shfl_xor_sync(~0u, both, 1);"
            "weights[2 * r] += both + __shfl_xor_sync(~0u, both, 2);"
        ),
    )
    assert all(whole_source("decode.cu").count(old) == 1 for old, _ in (sums, weights))
    with pytest.raises(AssertionError, match="largest"):
        means_of_the_largest(functools.partial(launch_changed, lambda source: source.replace(*sums).replace(*weights)))


def scores_that_rise_fall_and_jump(launch=launch, **chosen):
    tokens, chosen = 400, chosen or dict(warps=2, side=1, shares=3)
    for ramp in (0.05, 0.4, -0.4, 3.0, -3.0):
        q, k, v, out = problem(1, tokens, 4, 1, 64)
        q[:], k[:] = 0.0, 0.0
        q[..., 0] = torch.tensor([1.0, -1.0, 0.5, 2.0])
        k[0, :, 0, 0] = ramp * torch.arange(-tokens // 2, tokens // 2)
        k[0, 123, 0, 0] = 90.0
        close(launch(q, k, v, out, scale=0.7, **chosen), q, k, v, 0.7)


MANY = dict(warps=1, side=1, shares=25, threads=32)  # a team of merge.cu has more segments than it loads at once


def test_scores_that_rise_fall_and_jump():
    """The running maximum is left behind by up to 8 in units of log 2: rising scores move it, the others must not."""
    scores_that_rise_fall_and_jump()
    scores_that_rise_fall_and_jump(whole=True)
    scores_that_rise_fall_and_jump(**MANY)


MISTAKES = {
    "the sum of weights is not corrected": ("weights[2 * r] *= scale;", ""),
    "the weighted values are not corrected": ("values[n][2 * r] *= scale, values[n][2 * r + 1] *= scale;", ";"),
    "the maximum stays too far behind": ("constexpr float RESCALE_ABOVE = 8;", "constexpr float RESCALE_ABOVE = 40;"),
    "warps are joined without their maxima": (
        "const float scale = exp2_approx(sums.maximum[r] - high);",
        "const float scale = 1;",
    ),
    "warps are joined without the maxima of their sums": (
        "total += pair.y * exp2_approx(pair.x - high);",
        "total += pair.y;",
    ),
    "segments are merged without their maxima": (
        "const float w = exp2_approx(pair[d].x - high);",
        "const float w = 1;",
    ),
    "the sums of earlier segments are not corrected": ("total *= scale;", "total *= 1;"),
    "the values of earlier segments are not corrected": ("sum.w * scale), total", "sum.w), total"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_online_softmax_would_be_seen(mistake):
    old, new = MISTAKES[mistake]
    assert old in whole_source("decode.cu") + whole_source("merge.cu")
    mistaken = functools.partial(launch_changed, lambda source: source.replace(old, new))
    for chosen in (MANY,) if "segments" in mistake else ({}, dict(whole=True)):
        with pytest.raises(AssertionError, match="<= 0.001"):
            scores_that_rise_fall_and_jump(mistaken, **chosen)


def test_scores_of_minus_infinity_count_for_nothing():
    q, k, v, out = problem(1, 100, 4, 1, 64)
    q.abs_()
    k[0, :70] = -torch.inf  # whole tiles, from the first on, and whole segments
    kept = torch.arange(70, 100)
    launch(q, k, v, out, warps=2, side=1, shares=4)
    close(out, q, k[:, kept], v[:, kept])


def test_scores_that_are_all_minus_infinity_are_nan_as_in_the_reference():
    q, k, v, out = problem(1, 100, 8, 2, 64)
    q.abs_()
    k[:, :, 1] = -torch.inf
    attention.decode(q, k, v, out=out)
    with np.errstate(invalid="ignore"):
        assert np.array_equal(np.isnan(wanted(q, k, v)), out.isnan().numpy())
    close(out[:, :4], q[:, :4], k[:, :, :1], v[:, :, :1])


def test_nan_stays_in_its_heads():
    q, k, v, out = problem(2, 90, 8, 2, 64)
    k[0, 50, 1, 3] = torch.nan
    v[1, 89, 0, 63] = torch.inf
    attention.decode(q, k, v, out=out)
    assert out[0, 4:].isnan().all() and (out[1, :4, 63] == torch.inf).all()
    mine = q.clone()
    mine[1, 6, 0] = torch.nan  # of one head of a head tile
    assert torch.equal(
        attention.decode(mine, k, v).isnan().all(-1).nonzero(), torch.tensor([*[[0, h] for h in range(4, 8)], [1, 6]])
    )
    rest = out[1, 4:], q[1:, 4:], k[1:, :, 1:], v[1:, :, 1:]
    close(rest[0][None], *rest[1:])
    assert not out[0, :4].isnan().any() and not out[1, :4, :63].isnan().any()


def test_in_shares():
    q, k, v, out = problem(1, 300, 4, 1, 64)
    for shares in (1, 3, 1000):
        close(decoding.decode_in_shares(q, k, v, shares, out=out.fill_(torch.nan)), q, k, v)
    for bad, kind in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(kind, match="decode_in_shares: shares must be"):
            decoding.decode_in_shares(q, k, v, bad)


def test_scales():
    for scale in (0.0, -0.3, 2, np.float32(0.5)):
        q, k, v, out = problem(1, 45, 4, 1, 64)
        close(attention.decode(q, k, v, scale, out=out), q, k, v, float(scale))


def test_the_same_bits_again_and_with_pdl():
    q, k, v, _ = problem(2, 333, 8, 2, 64, torch.bfloat16)
    once = attention.decode(q, k, v)
    assert torch.equal(once, attention.decode(q, k, v))
    still_running(writes=(q, k[:, -1], v[:, -1]))
    assert torch.equal(once, attention.decode(q, k, v, pdl=True))


def test_what_the_tensor_cores_do_not_take_goes_to_split():
    q, k, v, out = problem(1, 40, 4, 1, 40)  # not a multiple of 16
    close(attention.decode(q, k, v, out=out), q, k, v)
    q, k, v, out = problem(1, 40, 4, 1, 64, skip=1)  # addresses that are no multiples of 16 bytes
    close(attention.decode(q, k, v, out=out, pdl=True), q, k, v)
    q, k, v, _ = problem(1, 40, 4, 1, 64)
    for n in range(4):  # it is enough that one of them lies so
        q, k, v, out = (problem(1, 40, 4, 1, 64, skip=int(i == n))[i] for i in range(4))
        with pytest.raises(
            ValueError, match="decode_in_shares: " + ("decode leaves" if n == 3 else "[qkv] must start")
        ):
            decoding.decode_in_shares(q, k, v, 3, out=out)
        close(attention.decode(q, k, v, out=out), q, k, v)
    q, k, v, out = problem(1, 40, 4, 1, 64, torch.float32)
    right = wanted(q, k, v)
    assert np.abs(attention.decode(q, k, v, out=out).double().numpy() - right).max() < 1e-5 * np.abs(right).max()
    with pytest.raises(ValueError, match="counters: decode leaves these tensors to the rung split"):
        decoding.counters(q, k, v)


# The promise of pdl: what happens before griddepcontrol.wait


def until_the_wait(name, options, *changes):
    """A kernel that ends where it would wait for the one before, with its source changed."""
    source = whole_source(name)
    for old, new in (('asm volatile("griddepcontrol.wait;" ::: "memory");', 'asm volatile("exit;");'), *changes):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return getattr(cuda.compile(source, options), name.removesuffix(".cu"))


def run_until_the_wait(length, kv_len, shares, early, *changes, own_lengths=True, cache=None, whole=False):
    """With one element of everything that the kernels ahead may write or still read, and a cache that ends before the
    newest token: who touches more goes past an end. Returns the report."""
    p = plan(1, 8, 2, 64, kv_len, 132, ROOM, True, own_lengths, shares=shares, whole=whole)
    constants = *options(torch.float16, p.shape, p.schedule), f"-DRING_STAGES={p.stages}"
    kernel = until_the_wait("decode.cu", constants, *changes)
    q, out, partial, sums = (torch.ones(1, dtype=dtype) for dtype in (*2 * [torch.float16], *2 * [torch.float32]))
    k = v = torch.ones(length - 1 if cache is None else cache, 2, 64, dtype=torch.float16)
    lens = torch.tensor([length], dtype=torch.int32) if own_lengths else None
    sizes = kv_len, 1, p.rows, p.each, p.rest
    return kernel(p.shares, 32 * p.warps, q, k, v, lens, out, partial, sums, *sizes, 0.1, early, shared=p.shared)


@pytest.mark.parametrize("length", [2, 16, 17, 100, 1000])
def test_what_may_come_late_is_not_touched_before_the_wait(length):
    for shares in (1, 7, 1000):
        report = run_until_the_wait(length, 1000, shares, 1)
        if length > 100:
            assert report.counters["smsp__inst_executed_op_ldgsts.sum"] > 0  # and the ring is filled
        if length == 1000:
            run_until_the_wait(length, 1000, shares, 1, own_lengths=False)
    run_until_the_wait(length, length, None, 1, own_lengths=False, whole=True)


def test_blocks_without_work_wait_too():
    """No sequence has a token: who waits for this launch takes what is ahead of it as done, too."""
    q, k, v, out = problem(2, 40, 4, 2, 32)
    still_running(writes=(q,), reads=(out,))
    decoding._launch(q, k, v, 0.1, torch.zeros(2, dtype=torch.int32), out, True)
    assert (out == 0).all() and fences_stand(out)


def test_a_plain_launch_touches_nothing_before_the_wait():
    """Not even the lengths: the kernel before may write them."""
    report = run_until_the_wait(1000, 1000, 7, 0, cache=1)
    assert report.counters[SECTORS.format("ld")] == report.counters[SECTORS.format("st")] == 0


def test_who_reads_the_newest_token_early_is_found_out():
    newest = "if (prefetcher.at_newest_token()) wait_for_previous_kernel();", ""
    query = "if (!early) queries.load(", "queries.load("
    for change in (newest, query):
        with pytest.raises(simt.MemoryFault):
            run_until_the_wait(100, 1000, 7, 1, change)
        with pytest.raises(simt.MemoryFault):
            run_until_the_wait(100, 100, None, 1, change, own_lengths=False, whole=True)


def test_merge_reads_lengths_alone_before_the_wait():
    constants = *options(torch.float16, (64, 4), (4, TILE, 2, True, False)), "-DTHREADS=64"
    lens, one = torch.tensor([100, 7], dtype=torch.int32), torch.ones(1)
    kernel = until_the_wait("merge.cu", constants)
    report = kernel(16, 64, one, one, lens, one.half(), 1000, 2, 1, 0, 0, 9)
    assert report.counters[SECTORS.format("ld")] > 0 and report.counters[SECTORS.format("st")] == 0


# What the machine counts


# With lengths, without, and for whole rows there are three kernels for each choice. All three have the short ring,
# where slots are used again at once; of the others each number of warps and each side has one at least.
GROUPS_OF_2 = 3, 150, 8, 4, 64
GROUPS_OF_20 = 2, 150, 40, 2, 32  # two head tiles: teams of two warps that share a ring
RACES = [
    (GROUPS_OF_2, dict(warps=4, side=4, tile=16), ["lengths"]),
    (GROUPS_OF_2, dict(warps=4, side=1, tile=16, stages=2), ["none", "lengths", "whole"]),
    (GROUPS_OF_2, dict(warps=8, side=2, tile=16), ["none", "whole"]),
    (GROUPS_OF_2, dict(warps=4, side=4, tile=32, stages=1), ["none", "whole"]),
    (GROUPS_OF_20, dict(warps=4, side=2, tile=16, stages=2), ["none", "lengths", "whole"]),
    (GROUPS_OF_20, dict(warps=4, side=4, tile=32, stages=1), ["none"]),
    ((1, 75, 39, 1, 32), dict(warps=9, side=3, tile=16, stages=1), ["none", "whole"]),  # an odd number of everything
]


@pytest.mark.parametrize("shape, chosen, kinds", RACES, ids=str)
def test_no_race(shape, chosen, kinds):
    """Several rows in a share: shared memory that is used again, a short ring's too, and segments that others merge."""
    q, k, v, out = problem(*shape)
    for kind in kinds:
        lens = torch.tensor([150, 16, 99][: shape[0]], dtype=torch.int32) if kind == "lengths" else None
        how = chosen | dict(shares=2 if kind == "whole" else 5, whole=kind == "whole")
        close(launch(q, k, v, out.fill_(torch.nan), lens, check_races=True, **how), q, k, v, kv_lens=lens)


BARRIERS = {  # in which kernel, with its headers; what is taken out, and which of several
    "the copies of other lanes": ("decode.cu", "sync_team(team);", 0),
    "who still reads a slot of the ring": ("decode.cu", "sync_team(team);", 1),
    "the queries": ("decode.cu", "        __syncwarp();", 1),
    "the maxima of all warps": ("decode.cu", "        __syncthreads();", 0),
    "the sums of all warps": ("decode.cu", "        __syncthreads();", 1),
    "who still reads the sums of all warps": ("decode.cu", "        __syncthreads();", 2),
    "the sums of all teams": ("merge.cu", "    __syncthreads();", 0),
    "the copies of its own": ("decode.cu", "<STAGES * PARTS - 1 - PART>", 0),
}


@pytest.mark.parametrize("what", BARRIERS)
def test_the_race_check_would_see_a_missing_wait_for(what):
    name, wait, number = BARRIERS[what]

    def change(source):
        if source != whole_source(name):
            return source
        parts = source.split(wait)
        instead = "<STAGES * PARTS - PART>" if "STAGES" in wait else ""
        return wait.join(parts[: number + 1]) + instead + wait.join(parts[number + 1 :])

    q, k, v, out = problem(*GROUPS_OF_2)
    chosen = dict(warps=4, side=1, tile=16, stages=2, check_races=True)
    with pytest.raises((simt.RaceError, simt.MemoryFault)):
        launch_changed(change, q, k, v, out, shares=5, **chosen)
    if name == "decode.cu":
        with pytest.raises((simt.RaceError, simt.MemoryFault)):
            launch_changed(change, q, k, v, out, whole=True, shares=2, **chosen)
    if "sync_team" in wait:
        q, k, v, out = problem(*GROUPS_OF_20)
        with pytest.raises((simt.RaceError, simt.MemoryFault)):
            launch_changed(change, q, k, v, out, shares=5, **chosen | dict(side=2))


@pytest.mark.parametrize(
    "n_heads, n_kv_heads, head_dim",
    [*((8, 4, head_dim) for head_dim in (16, 64, 80, 96, 128)), (64, 1, 64), (36, 2, 128)],
)
def test_the_cache_is_read_once_and_without_bank_conflicts(n_heads, n_kv_heads, head_dim):
    q, k, v, _ = problem(1, 992, n_heads, n_kv_heads, head_dim)
    first, second = decoding.counters(q, k, v, stages=2, shares=20, **({} if n_heads > 8 else {"warps": 4}))
    read = 2 * k.numel() * k.element_size() // 32
    queries = first.counters[SECTORS.format("ld")] - read
    most = 4 * 20 * n_heads * head_dim * 2 // 32 + 20 * 4 * 8  # each share reads q, and little else
    assert 0 < queries <= most
    assert first.counters["smsp__inst_executed_op_ldgsts.sum"] == read * 32 // 512
    assert first.counters[CONFLICTS.format("ld")] == 0
    assert second.counters[SECTORS.format("st")] == q.numel() * q.element_size() // 32


def test_counters_say_what_was_launched():
    q, k, v, _ = problem(2, 100, 8, 2, 64)
    first, second = decoding.counters(q, k, v, warps=2, side=1, shares=9)
    assert first.grid == (9, 1, 1) and first.block == (64, 1, 1) and second.grid == (16, 1, 1)


# The plan


@settings(max_examples=300, deadline=None)
@given(
    batch=some.integers(1, 256),
    n_kv_heads=some.integers(1, 64),
    group=some.integers(1, 64),
    head_dim=some.integers(1, 16).map(lambda n: 16 * n),
    kv_len=some.integers(1, 1 << 21),
    pdl=some.booleans(),
    card=some.sampled_from([(132, ROOM), (108, 163 * 1024), (46, 99 * 1024), (1, ROOM)]),
)
def test_a_plan_fits_its_card_and_shares_out_every_tile(batch, n_kv_heads, group, head_dim, kv_len, pdl, card):
    p = plan(batch, group * n_kv_heads, n_kv_heads, head_dim, kv_len, *card, pdl)
    warps, tile, side, *_ = p.schedule
    head_tiles = -(-group // 16)
    heads = -(-group // head_tiles)
    assert side * p.rows == n_kv_heads * head_tiles and warps == p.warps and warps % side == 0
    assert p.stages >= 1 and p.shared <= card[1]
    units = batch * p.rows * (1 if p.whole else -(-kv_len // tile))
    assert p.shares * p.each + p.rest == units and 0 <= p.rest < p.shares <= card[0]
    teams = warps // min(side, head_tiles)  # each has a ring
    assert head_tiles % min(side, head_tiles) == 0 == side % min(side, head_tiles) and teams < 16
    assert p.shared >= p.stages * teams * 2 * tile * head_dim * 2
    assert p.each >= 1
    assert p.threads % 32 == 0 and p.together * head_dim // 4 <= p.threads <= 1024
    assert heads % p.together == 0 and group % p.together == 0
    segments = (p.shares + batch * p.rows) * side * heads
    assert p.sums_at == segments * head_dim and p.floats == p.sums_at + 2 * segments


def test_a_share_for_each_multiprocessor():
    for batch, kv_len in ((1, 4096), (1, 131072), (16, 32768)):
        p = plan(batch, 32, 8, 128, kv_len, 132, ROOM)
        assert p.shares == 132
        small = p.shared < ROOM // 2
        assert p.warps == (8 if batch > 1 else 4)
        assert small == (kv_len == 4096)  # only short shares may stand beside those of the next kernel
    assert plan(1, 32, 8, 128, 20, 132, ROOM).shares == 4  # two tiles for each half of the heads


def test_whole_rows_only_where_they_pay():
    def whole(batch=16, n_heads=32, kv_len=4096, processors=132, **chosen):
        return plan(batch, n_heads, 8, 128, kv_len, processors, ROOM, **chosen).whole

    assert whole() and whole(kv_len=17) and whole(pdl=True) and whole(processors=128)
    assert plan(16, 32, 8, 128, 4096, 132, ROOM).shares == 128
    assert not whole(batch=11) and not whole(batch=17) and not whole(processors=184)  # many would be idle
    assert whole(batch=24, kv_len=1024) and not whole(batch=24, kv_len=1024, pdl=True)  # a launch costs less then
    assert not whole(kv_len=32768) and not whole(batch=8, n_heads=256, kv_len=16384)  # idle for long
    assert not whole(whole=False) and not whole(lens=True) and not whole(shares=132) and not whole(warps=8)
    assert whole(warps=4, whole=True)
    with pytest.raises(ValueError, match="plan: whole takes no lengths, got lens=True"):
        whole(whole=True, lens=True)


def test_many_short_sequences_are_whole_rows_of_several_heads():
    """Two rows a block, or one of as many kv heads as fit, and pieces of 256 bytes at least: all blocks alike."""
    for batch, kv_len, n_heads, n_kv_heads, head_dim, side, each in (
        (64, 1024, 32, 8, 128, 2, 2),
        (64, 1024, 32, 8, 64, 2, 2),
        (256, 512, 32, 8, 64, 8, 2),
        (64, 1024, 28, 4, 64, 2, 1),
        (32, 1024, 32, 8, 128, 1, 2),
    ):
        for pdl in (False, True):
            p = plan(batch, n_heads, n_kv_heads, head_dim, kv_len, 132, ROOM, pdl)
            assert p.whole and p.schedule[2] == side and (p.shares, p.each, p.rest) == (128, each, 0)


def test_shares_that_end_where_rows_do():
    """Of large groups, and of several long sequences: one segment for each share."""
    p = plan(4, 96, 8, 128, 8192, 132, ROOM)
    assert (p.shares, p.rest, p.schedule[2]) == (128, 0, 1) and not p.whole
    p = plan(4, 32, 32, 128, 16384, 132, ROOM)  # heads that are not grouped: four side by side
    assert (p.shares, p.rest, p.schedule[2]) == (128, 0, 4) and not p.whole
    p = plan(8, 71, 1, 64, 4096, 132, ROOM)
    assert (p.shares, p.rest, p.schedule[:3]) == (128, 0, (10, 32, 5))  # two teams of five warps
    assert plan(8, 32, 8, 128, 4096, 132, ROOM).shares == 128
    assert plan(3, 32, 8, 128, 65536, 132, ROOM).shares == 132  # 120 shares of 24 rows would leave too many idle


# Errors


def raises(kind, message, *args, **options):
    out = torch.full((2, 8, 64), torch.nan, dtype=torch.float16)
    with pytest.raises(kind, match=re.escape(message)):
        attention.decode(*args, **{"out": out, **options})
    assert out.isnan().all()


def test_errors_name_the_argument():
    q, k, v, _ = problem(2, 20, 8, 2, 64)
    raises(TypeError, "decode: q must be a torch tensor, got list", [1], k, v)
    raises(
        TypeError, "decode: k must be of torch.float16, like the first tensor, got torch.bfloat16", q, k.bfloat16(), v
    )
    raises(TypeError, "decode: q must be of torch.float32 or torch.float16 or torch.bfloat16, got torch.float64",
           q.double(), k, v)  # fmt: skip
    raises(ValueError, "decode: q must have shape (batch, n_heads, head_dim), none of it 0, got (2, 512)",
           q.view(2, 512), k, v)  # fmt: skip
    raises(
        ValueError,
        "decode: k must have shape (2, kv_len, n_kv_heads, 64), none of it 0, got (1, 20, 2, 64)",
        q,
        k[:1],
        v,
    )
    raises(ValueError, "decode: k must have shape (2, kv_len, n_kv_heads, 64), none of it 0, got (2, 0, 2, 64)",
           q, k[:, :0], v[:, :0])  # fmt: skip
    raises(ValueError, "decode: v must have shape (2, 20, 2, 64), none of it 0, got (2, 19, 2, 64)", q, k, v[:, 1:])
    raises(ValueError, "decode: k must have shape (2, kv_len, n_kv_heads, 64), none of it 0, got (2, 20, 2, 32)",
           q, k[..., :32], v[..., :32])  # fmt: skip
    raises(ValueError, "decode: n_heads must be a multiple of n_kv_heads, got 7 query heads and 2 kv heads",
           q[:, :7].contiguous(), k, v)  # fmt: skip
    raises(ValueError, "decode: head_dim must be a multiple of 8 and at most 256, got 12",
           q[..., :12].contiguous(), k[..., :12].contiguous(), v[..., :12].contiguous())  # fmt: skip
    raises(ValueError, "decode: v must be contiguous", q, k, v.transpose(1, 2).contiguous().transpose(1, 2))
    raises(TypeError, "decode: scale must be a number or None, got Tensor", q, k, v, torch.ones(()))
    raises(ValueError, "decode: scale must be finite, got inf", q, k, v, float("inf"))
    raises(TypeError, "decode: kv_lens must be of torch.int32, got torch.int64", q, k, v, kv_lens=torch.ones(2).long())
    raises(ValueError, "decode: kv_lens must have shape (2,), none of it 0, got (3,)", q, k, v,
           kv_lens=torch.ones(3, dtype=torch.int32))  # fmt: skip
    for bad in (0, -3, 21):
        lens = torch.tensor([5, bad], dtype=torch.int32)
        raises(ValueError, f"decode: kv_lens must be from 1 to kv_len, 20, got {bad}", q, k, v, kv_lens=lens)
    raises(ValueError, "decode: out must have shape (2, 8, 64)", q, k, v, out=q[:1].clone())
    raises(ValueError, "decode: out must not share memory with v", q, k, v, out=v.view(-1)[:1024].view(2, 8, 64))
    raises(ValueError, "decode: out must not share memory with q", q, k, v, out=q)


BAD = {  # what changes of q, k, v and the options, the error, its words
    "k an array": ({"k": np.ones((2, 20, 2, 64), "f2")}, TypeError, "k must be a torch tensor, got ndarray"),
    "no sequence": (
        {"q": torch.ones(0, 8, 64).half()},
        ValueError,
        "q must have shape (batch, n_heads, head_dim), none",
    ),
    "more kv heads than heads": ({"q": torch.ones(2, 1, 64).half()}, ValueError, "got 1 query heads and 2 kv heads"),
    "head_dim 264": (
        {"q": torch.ones(2, 8, 264).half(), **dict.fromkeys("kv", torch.ones(2, 20, 2, 264).half())},
        ValueError,
        "head_dim must be a multiple of 8 and at most 256, got 264",
    ),
    "q sparse": ({"q": torch.ones(2, 8, 64).half().to_sparse()}, ValueError, "q must be a dense tensor, got layout"),
    "k between two bytes": (
        {"k": torch.frombuffer(bytearray(2 * 20 * 2 * 64 * 2 + 1), dtype=torch.float16, offset=1).view(2, 20, 2, 64)},
        ValueError,
        "k must be aligned to its element size, got 0x",
    ),
    "all on meta": (
        {name: torch.ones(shape, device="meta").half() for name, shape in (("q", (2, 8, 64)), ("k", (2, 20, 2, 64)))},
        ValueError,
        "q must be on the CPU or on a CUDA device, got a tensor on meta",
    ),
    "v on meta": (
        {"v": torch.ones(2, 20, 2, 64, device="meta").half()},
        ValueError,
        "v must be on cpu, like the first",
    ),
    "scale a truth value": ({"scale": True}, TypeError, "scale must be a number or None, got bool"),
    "scale NaN": ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    "kv_lens a list": ({"kv_lens": [5, 5]}, TypeError, "kv_lens must be a torch tensor, got list"),
    "kv_lens of rank 2": (
        {"kv_lens": torch.ones(2, 1).int()},
        ValueError,
        "kv_lens must have shape (2,), none of it 0",
    ),
    "kv_lens of every other": ({"kv_lens": torch.ones(4).int()[::2]}, ValueError, "kv_lens must be contiguous"),
    "out of another dtype": ({"out": torch.ones(2, 8, 64)}, TypeError, "out must be of torch.float16, like the first"),
    "out strided": ({"out": torch.ones(2, 64, 8).half().mT}, ValueError, "out must be contiguous"),
    "out wants gradients": (
        {"out": torch.ones(2, 8, 64).half().requires_grad_()},
        ValueError,
        "out must not require gradients",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_nothing_is_launched_on_bad_input(what, monkeypatch):
    changes, kind, words = BAD[what]
    monkeypatch.setattr(decoding, "_launch", lambda *_, **__: pytest.fail("it was launched"))
    q, k, v, out = problem(2, 20, 8, 2, 64)
    given = {"q": q, "k": k, "v": v, "out": out} | changes
    with pytest.raises(kind, match=re.escape(words)) as caught:
        attention.decode(**given)
    assert str(caught.value).startswith("decode: ") and out.isnan().all() and fences_stand(out)


def test_out_must_not_lie_over_the_lengths():
    home = torch.zeros(2 * 8 * 64, dtype=torch.float16)
    lens = home[:4].view(torch.int32).fill_(5)
    q, k, v, _ = problem(2, 20, 8, 2, 64)
    with pytest.raises(ValueError, match="decode: out must not share memory with kv_lens"):
        attention.decode(q, k, v, kv_lens=lens, out=home.view(2, 8, 64))
    assert lens.tolist() == [5, 5]
