"""Chapter 08's ladder on the CPU: right on hostile shapes, no race, the counters that the chapter states, the same bits
every time, and an error before anything is written for whatever the contract does not allow."""

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
from kernels.attention import rungs
from kernels.attention.arguments import DTYPES
from lab import cuda
from lab.source import inlined

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

NAMES = [rung.name for rung in rungs.RUNGS]
COUNTED = [name for name in NAMES if name != "split_triton"]
# batch, kv_len, n_heads, n_kv_heads, head_dim: few dims, for each is compiled; groups of 1, 2, 3, 4, 5 and 17
SHAPES = [
    (1, 1, 1, 1, 8),
    (2, 7, 4, 2, 8),
    (1, 65, 5, 1, 40),
    (3, 129, 8, 2, 40),
    (1, 257, 17, 1, 40),
    (2, 66, 9, 3, 40),
]
ALLOWED = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_{}.sum"


def run(name, *args, **options):
    return getattr(rungs, name)(*args, **options)


def problem(batch, kv_len, n_heads, n_kv_heads, head_dim, dtype=torch.float32, seed=0):
    """q, k and v between NaNs, and out full of NaN between fences, off multiples of 16 bytes."""
    rng = torch.Generator().manual_seed(seed + 1000 * kv_len + n_heads)
    shapes = (batch, n_heads, head_dim), *2 * [(batch, kv_len, n_kv_heads, head_dim)]
    q, k, v = (between(torch.randn(shape, generator=rng).to(dtype), skip=1) for shape in shapes)
    return q, k, v, between(torch.full(shapes[0], torch.nan, dtype=dtype), FENCE, skip=1)


def reference(q, k, v, scale=None, kv_lens=None):
    arrays = (x.double().numpy() for x in (q, k, v))
    return ref.attention.decode_attention(*arrays, scale, kv_lens=None if kv_lens is None else kv_lens.numpy())


def close(out, wanted, factor=1):
    error = np.linalg.norm(out.double().numpy() - wanted) / np.linalg.norm(wanted)
    assert error <= factor * ALLOWED[out.dtype], error


# Right


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_right_on_hostile_shapes(name, dtype):
    for shape in SHAPES:
        q, k, v, out = problem(*shape, dtype)
        before = [x.clone() for x in (q, k, v)]
        assert run(name, q, k, v, out=out) is out
        close(out, reference(q, k, v))
        assert fences_stand(out)
        assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v)))


@pytest.mark.parametrize("name", NAMES)
def test_without_out_a_new_tensor_comes_back(name):
    q, k, v, _ = problem(1, 5, 2, 1, 8, torch.float16)
    out = run(name, q, k, v.requires_grad_())
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous() and not out.requires_grad
    close(out, reference(q, k, v.detach()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_lengths_of_their_own_and_whatever_lies_behind_them(name, dtype):
    q, k, v, out = problem(4, 130, 4, 2, 40, dtype)
    kv_lens = torch.tensor([1, 130, 64, 97], dtype=torch.int32)
    for b, length in enumerate(kv_lens.tolist()):
        k[b, length:], v[b, length:] = torch.nan, torch.inf
    run(name, q, k, v, kv_lens=kv_lens, out=out)
    close(out, reference(q, k, v, kv_lens=kv_lens))


@pytest.mark.parametrize("name", NAMES)
def test_scale(name):
    q, k, v, out = problem(1, 33, 2, 1, 8)
    for scale in (1.0, 0, -0.5, np.float32(0.125)):
        close(run(name, q, k, v, scale, out=out), reference(q, k, v, float(scale)))


@pytest.mark.parametrize("name", NAMES)
def test_scores_that_would_overflow(name):
    """e^3000 is infinite: without the shift by the maximum the result would be NaN."""
    q, k, v, out = problem(1, 70, 4, 2, 8)
    for where in (0, 35, 69):  # the largest score first, within and last
        for top in (3000.0, -3000.0):
            k[:] = 0.01 * torch.randn_like(k)
            k[:, :, :, 0] = top
            k[:, where, :, 0] = top + 30
            q[:] = 0.01 * torch.randn_like(q)
            q[..., 0] = 1
            close(run(name, q, k, v, 1.0, out=out), reference(q, k, v, 1.0), 1e3)  # fp32 has 3000 to 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_scores_of_minus_infinity_weigh_nothing(name):
    q, k, v, out = problem(1, 70, 2, 1, 8)
    q[..., 0] = q[..., 0].abs() + 0.1
    k[:, [0, 1, 5, 8, 40, 69], :, 0] = -torch.inf
    close(run(name, q, k, v, out=out), reference(q, k, v))


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_show(name):
    q, k, v, out = problem(2, 70, 4, 2, 8)
    k[0, 33, 1, 2] = torch.nan  # sequence 0, heads 2 and 3
    v[1, 5, 0, 7] = torch.inf  # sequence 1, heads 0 and 1, channel 7
    run(name, q, k, v, out=out)
    assert out[0, 2:].isnan().all() and (out[1, :2, 7] == torch.inf).all()
    wanted = out.isfinite()
    assert wanted.sum() == 2 * 4 * 8 - 16 - 2


@pytest.mark.parametrize("name", ["split", "split_triton"])
def test_any_number_of_splits(name):
    """More splits than tokens too: most are empty then."""
    for kv_len in (1, 7, 130):
        q, k, v, out = problem(2, kv_len, 2, 1, 40)
        kv_lens = torch.tensor([kv_len, max(1, kv_len // 3)], dtype=torch.int32)
        for splits in (1, 2, 7, kv_len + 1):
            run(name, q, k, v, kv_lens=kv_lens, out=out.fill_(torch.nan), splits=splits)
            close(out, reference(q, k, v, kv_lens=kv_lens))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_every_time(name, dtype):
    q, k, v, out = problem(2, 300, 4, 2, 40, dtype)
    first = run(name, q, k, v).clone()
    for _ in range(3):
        assert torch.equal(run(name, q, k, v, out=out.fill_(torch.nan)), first)


@pytest.mark.parametrize("name", NAMES)
def test_heads_of_a_group_are_neighbours(name):
    """Query head h reads kv head h // group: with one token, out is its v."""
    q, k, v, out = problem(2, 1, 6, 3, 8)
    run(name, q, k, v, out=out)
    assert torch.equal(out, v[:, 0].repeat_interleave(2, 1))


def test_triton_is_left_as_it_was():
    import triton.language as tl

    before = tl.max, tl.sum
    rungs.split_triton(*problem(1, 3, 1, 1, 8)[:3])
    assert (tl.max, tl.sum) == before
    q, k, v, _ = problem(1, 3, 1, 1, 8)
    k[:] = 1e30  # whatever happens within
    rungs.split_triton(q, k, v)
    assert (tl.max, tl.sum) == before


# Counters: one sequence of 256 tokens, 8 query heads, 2 kv heads, head_dim 128

HEADS, KV_HEADS, TOKENS, DIM = 8, 2, 256, 128


def counted(name, dtype=torch.float16, **options):
    q, k, v, _ = problem(1, TOKENS, HEADS, KV_HEADS, DIM, dtype)
    return rungs.counters(name, q.clone(), k.clone(), v.clone(), **options)


def requests(report, op="ld"):
    return report.counters[REQUESTS.format(op)]


def test_every_query_head_reads_the_cache_for_itself():
    walk = HEADS * TOKENS * DIM // 32  # requests for K, or for V: 32 elements each
    query = HEADS * 8 * DIM // 32  # of 8 warps each
    (online,) = counted("online")
    assert requests(online) == 2 * walk + query
    split, merge = counted("split", splits=4)
    assert requests(split) == 2 * walk + 4 * query
    scores, softmax, mix = counted("two_pass")
    assert requests(scores) == walk + HEADS * TOKENS * DIM // 32  # each warp loads q for its one token
    assert requests(mix) == walk + HEADS * TOKENS  # and a score for each token
    assert requests(softmax) == 3 * HEADS * TOKENS // 32 and requests(softmax, "st") == 2 * HEADS * TOKENS // 32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_requests_are_coalesced(dtype):
    for name in ("online", "split"):
        assert counted(name, dtype)[0].sectors_per_request("ld") == dtype.itemsize  # 32 neighbours


@pytest.mark.parametrize("name", COUNTED)
def test_no_race(name):
    q, k, v, _ = problem(2, 67, 4, 2, 40)
    kv_lens = torch.tensor([67, 5], dtype=torch.int32)
    rungs.counters(name, q, k, v, kv_lens=kv_lens, splits=3, check_races=True)


@pytest.mark.parametrize("name, barrier", [("online", 0), ("split", 0), ("two_pass", 0), ("two_pass", 1)])
def test_the_race_check_would_see_a_missing_barrier(name, barrier, monkeypatch):
    source = inlined(f"kernels/attention/{name}.cu")
    at = [found.start() for found in re.finditer(r"__syncthreads\(\);", source)]
    assert len(at) == (2 if name == "two_pass" else 1)
    source = source[: at[barrier]] + source[at[barrier] + len("__syncthreads();") :]
    monkeypatch.setattr(rungs, "_module", lambda *_: cuda.compile(source, ["-DHEAD_DIM=40"]))
    q, k, v, _ = problem(1, 67, 2, 1, 40)
    with pytest.raises(simt.SimtError):
        rungs.counters(name, q, k, v, splits=2, check_races=True)


def test_counters_errors():
    q, k, v, _ = problem(1, 3, 2, 1, 8)
    with pytest.raises(ValueError, match="counters: rung must be one of two_pass, online, split, got 'split_triton'"):
        rungs.counters("split_triton", q, k, v)
    with pytest.raises(ValueError, match="online: v must have shape"):
        rungs.counters("online", q, k, v[:, :2].contiguous())


# How it is launched


@settings(max_examples=300, deadline=None)
@given(some.integers(1, 1 << 20), some.integers(1, 1 << 22), some.integers(1, 200))
def test_splits_fill_the_card_and_no_more(groups, kv_len, multiprocessors):
    splits = rungs.split_count(groups, kv_len, multiprocessors)
    assert 1 <= splits <= rungs.MOST
    assert splits == 1 or splits * groups <= rungs.BLOCKS * multiprocessors
    assert splits == 1 or kv_len / splits > rungs.LEAST / 2
    most = min(rungs.MOST, -(-kv_len // rungs.LEAST))
    assert splits == most or (splits + 1) * groups > rungs.BLOCKS * multiprocessors


def test_the_bytes_and_flops_of_a_call():
    q, k, v, _ = problem(2, 10, 4, 2, 8, torch.float16)
    assert rungs.work(q, k) == (2 * (2 * 2 * 10 * 2 * 8 + 2 * 2 * 4 * 8), 4 * 2 * 10 * 4 * 8)
    kv_lens = torch.tensor([3, 10], dtype=torch.int32)
    assert rungs.work(q, k, kv_lens) == (2 * (2 * 13 * 2 * 8 + 2 * 2 * 4 * 8), 4 * 13 * 4 * 8)


def test_sources_are_there():
    for rung in rungs.RUNGS:
        assert all((rungs.HERE.parent.parent / source).is_file() for source in rung.sources)


# Errors, before anything is written

q, k, v, _ = problem(2, 5, 4, 2, 8)
q, k, v = q.clone(), k.clone(), v.clone()
lens = torch.tensor([5, 1], dtype=torch.int32)
BAD = {
    "q an array": ((q.numpy(), k, v), {}, TypeError, "q must be a torch tensor, got ndarray"),
    "k an array": ((q, k.numpy(), v), {}, TypeError, "k must be a torch tensor, got ndarray"),
    "q float64": ((q.double(), k, v), {}, TypeError, "q must be of torch.float32 or torch.float16 or torch.bfloat16"),
    "k of another dtype": ((q, k.half(), v), {}, TypeError, "k must be of torch.float32, like the first tensor, got"),
    "q of rank 2": ((q[0], k, v), {}, ValueError, "q must have shape (batch, n_heads, head_dim), none of it 0, got"),
    "k of rank 3": ((q, k[0], v), {}, ValueError, "k must have shape (2, kv_len, n_kv_heads, 8), none of it 0, got"),
    "k of another batch": ((q, k[:1], v[:1]), {}, ValueError, "k must have shape (2, kv_len, n_kv_heads, 8)"),
    "head_dim differs": ((q, k.view(2, 10, 2, 4), v), {}, ValueError, "k must have shape (2, kv_len, n_kv_heads, 8)"),
    "v shorter": ((q, k, v[:, :4].contiguous()), {}, ValueError, "v must have shape (2, 5, 2, 8), none of it 0, got"),
    "an empty cache": ((q, k[:, :0], v[:, :0]), {}, ValueError, "none of it 0, got (2, 0, 2, 8)"),
    "heads do not divide": ((q[:, :3].contiguous(), k, v), {}, ValueError, "n_heads must be a multiple of n_kv_heads"),
    "head_dim 4": ((q.view(2, 8, 4), k.view(2, 10, 2, 4), v.view(2, 10, 2, 4)), {}, ValueError, "head_dim must be"),
    "k strided": ((q, k.transpose(1, 2).contiguous().transpose(1, 2), v), {}, ValueError, "k must be contiguous"),
    "q on meta": ((q.to("meta"), k, v), {}, ValueError, "q must be on the CPU or on a CUDA device, got"),
    "v on meta": ((q, k, v.to("meta")), {}, ValueError, "v must be on cpu, like the first tensor, got one on meta"),
    "scale a tensor": ((q, k, v, torch.ones(())), {}, TypeError, "scale must be a number or None, got Tensor"),
    "scale NaN": ((q, k, v, float("nan")), {}, ValueError, "scale must be finite, got nan"),
    "kv_lens a list": ((q, k, v), {"kv_lens": [5, 1]}, TypeError, "kv_lens must be a torch tensor, got list"),
    "kv_lens int64": (
        (q, k, v),
        {"kv_lens": lens.long()},
        TypeError,
        "kv_lens must be of torch.int32, got torch.int64",
    ),
    "kv_lens of 1": ((q, k, v), {"kv_lens": lens[:1]}, ValueError, "kv_lens must have shape (2,)"),
    "a length of 0": ((q, k, v), {"kv_lens": lens - 1}, ValueError, "kv_lens must be from 1 to kv_len, 5, got 0"),
    "a length of 6": ((q, k, v), {"kv_lens": lens + 1}, ValueError, "kv_lens must be from 1 to kv_len, 5, got 6"),
    "out of another dtype": ((q, k, v), {"out": q.half()}, TypeError, "out must be of torch.float32"),
    "out too small": ((q, k, v), {"out": torch.ones(2, 4, 7)}, ValueError, "out must have shape (2, 4, 8)"),
    "out is q": ((q, k, v), {"out": q}, ValueError, "out must not share memory with q"),
    "out in v": ((q, k, v), {"out": v.view(-1)[:64].view(2, 4, 8)}, ValueError, "out must not share memory with v"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_not_allowed_is_named(what, monkeypatch):
    args, options, error, words = BAD[what]
    stop = dict.fromkeys(NAMES, lambda *a, **o: pytest.fail("it was launched"))
    monkeypatch.setattr(rungs, "LAUNCHES", stop)
    for name in NAMES:
        with pytest.raises(error, match=re.escape(words)) as caught:
            run(name, *args, **options)
        assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize("name", ["split", "split_triton"])
def test_splits_must_be_a_number_that_a_grid_can_have(name):
    for splits, error, words in (
        (0, ValueError, "splits must be from 1 to 65535, got 0"),
        (1 << 16, ValueError, "got 65536"),
        (2.0, TypeError, "splits must be an int or None, got float"),
        (True, TypeError, "got bool"),
    ):
        with pytest.raises(error, match=words):
            run(name, q, k, v, splits=splits)
