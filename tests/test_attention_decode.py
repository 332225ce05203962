"""kernels.attention.decode on the SIMT machine: right on hostile lengths, groups and plans, the counters that it is
built for, no race, the same bits every time, and an error before anything is written for whatever is not allowed."""

import re
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import ref.attention
from kernels import attention
from kernels.attention import decoding
from kernels.attention.plan import TILE, plan

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

GUARD, FENCE = 64, 1234.0  # elements around a tensor: a multiple of 16 bytes, so that they do not spoil its alignment
ALLOWED = {torch.float16: 1e-3, torch.bfloat16: 4e-3}  # by the norm
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"
SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_{}.sum"
ROOM = 227 * 1024


def between(tensor, fence=torch.nan, skip=0):
    """A copy that lies between guards, `skip` elements further on than an aligned address."""
    home = torch.full((tensor.numel() + 2 * GUARD + skip,), fence, dtype=tensor.dtype)
    return home[GUARD + skip : GUARD + skip + tensor.numel()].view(tensor.shape).copy_(tensor)


def problem(batch, kv_len, n_heads, n_kv_heads, head_dim, dtype=torch.float16, seed=0, skip=0):
    """q, k and v between NaNs, and out full of NaN between fences."""
    rng = torch.Generator().manual_seed(seed + 1000 * kv_len + n_heads)
    shapes = (batch, n_heads, head_dim), *2 * [(batch, kv_len, n_kv_heads, head_dim)]
    q, k, v = (between(torch.randn(shape, generator=rng).to(dtype), skip=skip) for shape in shapes)
    return q, k, v, between(torch.full(shapes[0], torch.nan, dtype=dtype), FENCE, skip)


def fences_stand(out):
    home = torch.empty(0, dtype=out.dtype).set_(out.untyped_storage())
    first, last = out.storage_offset(), out.storage_offset() + out.numel()
    return bool((home[:first] == FENCE).all() and (home[last:] == FENCE).all())


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


@pytest.mark.parametrize(
    "chosen",
    [
        dict(warps=8, side=1),
        dict(warps=8, side=2, stages=1),
        dict(warps=4, side=4, stages=2),
        dict(warps=1, side=1, shares=1),
        dict(warps=2, side=1, shares=7),
        dict(warps=4, side=2, shares=40, threads=64),
        dict(warps=8, side=4, shares=3, threads=512),
    ],
    ids=str,
)
def test_right_however_it_is_shared_out(chosen):
    """Shares that begin and end anywhere in a row, hold several rows, or leave warps without a tile."""
    lens = torch.tensor([300, 1, 47], dtype=torch.int32)
    for kv_lens in (None, lens):
        q, k, v, out = problem(3, 300, 8, 4, 64)
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
    alone = attention.decode(q[3:4], k[3:4, :17].contiguous(), v[3:4, :17].contiguous())
    close(alone, q[3:4], k[3:4, :17], v[3:4, :17])


def test_scores_that_rise_fall_and_jump():
    """The running maximum is left behind by up to 8 in units of log 2: rising scores move it, the others must not."""
    tokens = 400
    for ramp in (0.05, 0.4, -0.4, 3.0, -3.0):
        q, k, v, out = problem(1, tokens, 4, 1, 64)
        q[:], k[:] = 0.0, 0.0
        q[..., 0] = torch.tensor([1.0, -1.0, 0.5, 2.0])
        k[0, :, 0, 0] = ramp * torch.arange(-tokens // 2, tokens // 2)
        k[0, 123, 0, 0] = 90.0
        close(launch(q, k, v, out, scale=0.7, warps=2, side=1, shares=3), q, k, v, 0.7)


def test_scores_of_minus_infinity_count_for_nothing():
    q, k, v, out = problem(1, 100, 4, 1, 64)
    q.abs_()
    k[0, :70] = -torch.inf  # whole tiles, from the first on, and whole segments
    kept = torch.arange(70, 100)
    launch(q, k, v, out, warps=2, side=1, shares=4)
    close(out, q, k[:, kept], v[:, kept])


def test_nan_stays_in_its_heads():
    q, k, v, out = problem(2, 90, 8, 2, 64)
    k[0, 50, 1, 3] = torch.nan
    v[1, 89, 0, 63] = torch.inf
    attention.decode(q, k, v, out=out)
    assert out[0, 4:].isnan().all() and (out[1, :4, 63] == torch.inf).all()
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
    assert torch.equal(once, attention.decode(q, k, v)) and torch.equal(once, attention.decode(q, k, v, pdl=True))


def test_what_the_tensor_cores_do_not_take_goes_to_split():
    q, k, v, out = problem(1, 40, 4, 1, 40)  # not a multiple of 16
    close(attention.decode(q, k, v, out=out), q, k, v)
    q, k, v, out = problem(1, 40, 4, 1, 64, skip=1)  # addresses that are no multiples of 16 bytes
    close(attention.decode(q, k, v, out=out, pdl=True), q, k, v)
    q, k, v, out = problem(1, 40, 4, 1, 64, torch.float32)
    right = wanted(q, k, v)
    assert np.abs(attention.decode(q, k, v, out=out).double().numpy() - right).max() < 1e-5 * np.abs(right).max()
    with pytest.raises(ValueError, match="counters: decode leaves these tensors to the rung split"):
        decoding.counters(q, k, v)


# What the machine counts


@pytest.mark.parametrize("chosen", [dict(warps=4, side=4), dict(warps=4, side=1), dict(warps=8, side=2)], ids=str)
def test_no_race(chosen):
    """Several rows in a share: shared memory that is used again, and segments that others merge."""
    q, k, v, out = problem(3, 150, 8, 4, 64)
    launch(q, k, v, out, shares=5, check_races=True, **chosen)
    launch(q, k, v, out, torch.tensor([150, 16, 99], dtype=torch.int32), shares=5, check_races=True, **chosen)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_the_cache_is_read_once_and_without_bank_conflicts(head_dim):
    q, k, v, _ = problem(1, 992, 8, 4, head_dim)
    first, second = decoding.counters(q, k, v, stages=2, shares=20)
    read = 2 * k.numel() * k.element_size() // 32
    queries = first.counters[SECTORS.format("ld")] - read
    assert 0 < queries <= 20 * 8 * head_dim * 2 // 32 + 20 * 4 * 8  # each share reads q, and little else
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
    constants = dict(p.constants)
    panels = -(-group // 16)
    heads = -(-group // panels)
    assert constants["SIDE"] * p.rows == n_kv_heads * panels and p.warps % constants["SIDE"] == 0
    assert p.stages >= 1 and p.shared <= card[1]
    assert p.shares * p.each + p.rest == batch * p.rows * -(-kv_len // TILE) and 0 <= p.rest < p.shares <= card[0]
    assert p.each >= 1
    assert p.threads % 32 == 0 and p.together * head_dim // 4 <= p.threads <= 1024
    assert heads % p.together == 0 and group % p.together == 0
    segments = (p.shares + batch * p.rows) * constants["SIDE"] * heads
    assert p.sums_at == segments * head_dim and p.floats == p.sums_at + 2 * segments


def test_a_share_for_each_multiprocessor():
    for batch, kv_len in ((1, 4096), (1, 131072), (16, 32768)):
        p = plan(batch, 32, 8, 128, kv_len, 132, ROOM)
        assert p.shares == 132
        small = p.shared < ROOM // 2
        assert p.warps == (8 if batch > 1 else 4)
        assert small == (kv_len == 4096)  # only short shares may stand beside those of the next kernel
    assert plan(1, 32, 8, 128, 20, 132, ROOM).shares == 4  # two tiles for each half of the heads


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
