"""The quantised cache: the codes of ref/kv_cache.py bit for bit, errors as promised, appending, and decode attention on
the SIMT machine: right on hostile shapes, without a race, with an error for what the contract does not allow."""

import math
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as some

import ref.attention
import ref.kv_cache
import simt
from kernels import kv_cache
from kernels.kv_cache import QuantizedKV, counters, decode, quantize
from kernels.kv_cache.plan import plan
from kernels.kv_cache.rounding import default_group
from lab import cuda
from lab.source import inlined
from lab.stream import still_running

on_machine = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")
BITS = [8, 4, "fp8"]
AXES = ["token", "channel"]
GUARD, FENCE = 64, 1234.0
ROOM = 227 * 1024  # bytes of shared memory that a block may have on an H200


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def outliers(kv, channels=(3, 17, 40, 63), times=20):
    kv = kv.clone()
    kv[..., list(channels)] *= times
    return kv


def relative(out, wanted):
    out, wanted = (np.asarray(x.double() if isinstance(x, torch.Tensor) else x, np.float64) for x in (out, wanted))
    return np.linalg.norm(out - wanted) / np.linalg.norm(wanted)


def same(cache, quantized):
    """A cache against what ref.kv_cache.quantize returns, bit for bit."""
    assert np.array_equal(cache.codes().numpy(), quantized.codes)
    assert np.array_equal(cache.scales().view(torch.int16).numpy(), quantized.scale.view(np.int16))


# The format


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
def test_codes_and_scales_are_the_references(bits, axis, dtype, monkeypatch):
    monkeypatch.setattr(kv_cache.quantization, "SLICE", 1 << 14)  # so that it goes by slices
    for batch, kv_len, n_kv_heads, head_dim, group in [
        (2, 203, 3, 64, None),
        (1, 1, 1, 128, None),
        (2, 97, 2, 128, 64),
        (1, 33, 1, 80, None),
        (1, 50, 2, 112, 16),
        (1, 40, 1, 96, 32),
        (1, 17, 1, 16, None),
    ]:
        kv = normal(batch, kv_len, n_kv_heads, head_dim, dtype=dtype)
        kv[0, 0, 0, :32] = 0
        kv[-1, -1, -1] *= 2.0**-13  # float16 scales are subnormal here
        kv[0, 0, -1, 40:] = -0.0
        group = group if axis == "token" else None if group == 16 else group
        cache = quantize(kv, bits, axis=axis, group=group)
        wanted = ref.kv_cache.quantize(kv.float().numpy(), bits, axis=axis, group=cache.group)
        same(cache, wanted)
        exact = torch.from_numpy(ref.kv_cache.dequantize(wanted))
        assert torch.equal(cache.dequantize(), exact.to(dtype))
        assert torch.equal(cache.dequantize(torch.float32), exact)
        assert cache.shape == kv.shape and cache.dtype == dtype
        assert cache.peak == pytest.approx(float(np.abs(wanted.scale).max()), rel=2e-3, abs=1e-7)


@settings(max_examples=60, deadline=None)
@given(
    bits=some.sampled_from(BITS),
    axis=some.sampled_from(AXES),
    kv_len=some.integers(1, 150),
    groups=some.sampled_from([1, 2, 4]),
    exponent=some.integers(-18, 12),
    seed=some.integers(0, 1 << 20),
)
def test_any_numbers_are_the_references(bits, axis, kv_len, groups, exponent, seed):
    rng = np.random.default_rng(seed)
    kv = (
        rng.standard_normal((1, kv_len, 1, 64)) * 2.0 ** rng.integers(exponent - 4, exponent + 1, (1, kv_len, 1, 64))
    ).astype(np.float32)
    group = 64 // groups if axis == "token" else 32 * groups
    cache = quantize(torch.from_numpy(kv), bits, axis=axis, group=group)
    same(cache, ref.kv_cache.quantize(kv, bits, axis=axis, group=group))


@pytest.mark.parametrize("bits, allowed", [(8, 0.01), ("fp8", 0.03), (4, 0.09)])
def test_errors_are_as_promised(bits, allowed):
    kv = normal(1, 512, 4, 128)
    for axis in AXES:
        assert relative(quantize(kv, bits, axis=axis).dequantize(), kv) <= allowed
    kv = outliers(kv)
    ordinary = [c for c in range(128) if c not in (3, 17, 40, 63)]
    found = quantize(kv, bits, axis="channel").dequantize()
    assert relative(found, kv) <= 2 * allowed
    assert relative(found[..., ordinary], kv[..., ordinary]) <= 2 * allowed
    if bits == 4:  # which is why keys are quantised so
        assert relative(quantize(kv, bits).dequantize()[..., ordinary], kv[..., ordinary]) > 4 * allowed


def test_the_bytes_of_a_cache():
    kv = normal(2, 256, 4, 128, dtype=torch.float16)
    elements = kv.numel()
    for bits, axis, wanted in [(8, "token", 8 + 16 / 128), (8, "channel", 8 + 16 / 128), ("fp8", "token", 8 + 16 / 128),
                               (4, "token", 4 + 16 / 32), (4, "channel", 4 + 16 / 32)]:  # fmt: skip
        assert 8 * quantize(kv, bits, axis=axis).nbytes == wanted * elements
    assert 8 * quantize(kv, 4, group=128).nbytes == (4 + 16 / 128) * elements


@pytest.mark.parametrize("head_dim", [16, 48, 80, 112, 128, 240])
@pytest.mark.parametrize("bits", BITS)
def test_laid_out_anew_it_is_the_same(bits, head_dim):
    kv = normal(2, 77, 2, head_dim)
    cache = quantize(kv, bits)
    codes, scales, packed = cache.codes(), cache.scales(), cache.packed
    assert cache.role == "values" and cache.lay_out("keys").role == "keys"
    assert not torch.equal(cache.packed, packed)
    assert torch.equal(cache.packed, quantize(kv, bits, role="keys").packed)
    assert torch.equal(cache.codes(), codes) and torch.equal(cache.scales(), scales)
    assert torch.equal(cache.lay_out("values").packed, packed)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
def test_appending_is_quantising_the_whole(bits, axis):
    kv = normal(2, 331, 2, 64, dtype=torch.bfloat16)
    whole = quantize(kv, bits, axis=axis)
    for capacity in (None, 400):
        cache = quantize(kv[:, :1], bits, axis=axis, capacity=capacity)
        at = 1
        for n in (1, 13, 1, 16, 17, 1, 100, 3, 128, 50):
            assert cache.append(kv[:, at : at + n]) is cache
            at += n
        assert at == 331 and cache.shape == kv.shape and cache.capacity >= (capacity or at)
        assert torch.equal(cache.codes(), whole.codes()) and torch.equal(cache.scales(), whole.scales())
        assert torch.equal(cache.recent, whole.recent) and cache.peak == whole.peak
    room = quantize(kv[:, :100], bits, axis=axis, capacity=331)
    packed = room.packed
    assert room.append(kv[:, 100:]).packed is packed


def test_a_cache_does_not_keep_what_it_was_made_of():
    kv = normal(1, 40, 1, 64)
    cache = quantize(kv, 8, axis="channel")
    assert cache.recent.untyped_storage().nbytes() == 40 * 64 * 4
    before = cache.recent.clone()
    kv.zero_()
    assert torch.equal(cache.recent, before)


BAD_QUANTIZE = {
    "bits": ((normal(1, 3, 1, 64), 3), {}, ValueError, "bits must be 8, 4 or 'fp8', got 3"),
    "bits as a bool": ((normal(1, 3, 1, 64), True), {}, ValueError, "bits must be"),
    "axis": ((normal(1, 3, 1, 64), 8), {"axis": "head"}, ValueError, "axis must be 'token' or 'channel', got 'head'"),
    "group": ((normal(1, 3, 1, 64), 4), {"group": 24}, ValueError, "group must be a multiple of 16"),
    "group over head_dim": ((normal(1, 3, 1, 64), 4), {"group": 128}, ValueError, "divisor of head_dim, 64"),
    "group of tokens": ((normal(1, 3, 1, 64), 4), {"group": 16, "axis": "channel"}, ValueError, "multiple of 32"),
    "role": ((normal(1, 3, 1, 64), 4), {"role": "values", "axis": "channel"}, ValueError, "role must be"),
    "capacity": ((normal(1, 3, 1, 64), 4), {"capacity": 2}, ValueError, "capacity must be a whole number of kv_len, 3"),
    "not a tensor": ((np.zeros((1, 3, 1, 64)), 8), {}, TypeError, "kv must be a torch tensor, got ndarray"),
    "dtype": ((normal(1, 3, 1, 64).double(), 8), {}, TypeError, "got torch.float64"),
    "rank": ((normal(3, 1, 64), 8), {}, ValueError, r"kv must have shape \(batch, kv_len, n_kv_heads, head_dim\)"),
    "empty": ((normal(1, 0, 1, 64), 8), {}, ValueError, r"none of it 0, got \(1, 0, 1, 64\)"),
    "head_dim": ((normal(1, 3, 1, 72), 8), {}, ValueError, "head_dim must be a multiple of 16, 256 at most, got 72"),
    "long heads": (
        (normal(1, 3, 1, 272), 8),
        {},
        ValueError,
        "a multiple of 16, 256 at most, got 272",
    ),
}


@pytest.mark.parametrize("what", BAD_QUANTIZE)
def test_what_cannot_be_quantised_is_named(what):
    args, options, kind, words = BAD_QUANTIZE[what]
    with pytest.raises(kind, match=words):
        quantize(*args, **options)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", BITS)
def test_nan_and_infinity_are_named(bits, bad, monkeypatch):
    monkeypatch.setattr(kv_cache.quantization, "SLICE", 1 << 12)
    kv = normal(2, 200, 2, 64, dtype=torch.float16)
    kv[1, 123, 1, 7] = kv[1, 150, 0, 0] = bad
    with pytest.raises(ValueError, match=r"kv must be finite, got -?(nan|inf) at \(1, 123, 1, 7\)"):
        quantize(kv, bits, axis="channel")
    cache = quantize(kv[:1], bits)
    packed, shape = cache.packed.clone(), cache.shape
    with pytest.raises(ValueError, match=r"kv_new must be finite, got -?(nan|inf) at \(0, 3, 1, 7\)"):
        cache.append(kv[1:, 120:])
    assert cache.shape == shape and torch.equal(cache.packed, packed)
    kv = normal(1, 5, 1, 64)
    kv[0, 4, 0, 2] = 65504 * 449
    with pytest.raises(ValueError, match=r"kv must not pass .* at \(0, 4, 0, 2\)"):
        quantize(kv, bits)


def test_what_cannot_be_appended_is_named():
    cache = quantize(normal(2, 5, 1, 64), 8)
    with pytest.raises(ValueError, match=r"kv_new must have shape \(2, n, 1, 64\)"):
        cache.append(normal(1, 5, 1, 64))
    with pytest.raises(TypeError, match="torch.float32 on cpu, like the cache, got torch.float16 on cpu"):
        cache.append(normal(2, 5, 1, 64).half())


# Decode attention


def between(tensor):
    """A copy that lies between fences."""
    home = torch.full((tensor.numel() + 2 * GUARD,), FENCE, dtype=tensor.dtype)
    return home[GUARD : GUARD + tensor.numel()].view(tensor.shape).copy_(tensor), home


def caches(batch, kv_len, n_kv_heads, head_dim, bits, axis, group=None, value_bits=None):
    k, v = (normal(batch, kv_len, n_kv_heads, head_dim, seed=seed) for seed in (1, 2))
    return quantize(k, bits, axis=axis, group=group), quantize(v, value_bits or bits)


def attention(q, k, v, scale=None, kv_lens=None):
    lens = None if kv_lens is None else kv_lens.numpy()
    k, v = (x.dequantize(torch.float32).numpy().astype(np.float64) for x in (k, v))
    return ref.attention.decode_attention(q.double().numpy(), k, v, scale, kv_lens=lens)


def newest(cache, lens):
    """What an append to the newest group of tokens of each sequence changes."""
    for b, n in enumerate(int(n) - 1 for n in lens):
        group = cache.group if cache.axis == "channel" else 16
        yield cache.packed[b, :, n // group * group // 16 :]
        yield cache.scale[b, :, n // group :]


SHAPES = [  # batch, n_heads, n_kv_heads, kv_len, head_dim
    (1, 4, 1, 1, 128),
    (2, 8, 2, 33, 64),
    (1, 5, 1, 127, 128),
    (2, 3, 3, 200, 64),
]
FORMATS = [(8, "channel", None), (4, "channel", None), (4, "token", None), ("fp8", "token", None), (8, "token", 32)]


@on_machine
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits, axis, group", FORMATS)
def test_right_on_hostile_shapes(bits, axis, group, dtype):
    # lengths are the same to all formats: the shortest and the oddest for each, all for one
    shapes = SHAPES[1:2] if dtype == torch.bfloat16 else SHAPES if (bits, axis) == (8, "channel") else SHAPES[::2]
    for batch, n_heads, n_kv_heads, kv_len, head_dim in shapes:
        q = normal(batch, n_heads, head_dim, dtype=dtype, seed=3)
        k, v = caches(batch, kv_len, n_kv_heads, head_dim, bits, axis, group)
        out, home = between(torch.full(q.shape, torch.nan, dtype=dtype))
        assert decode(q, k, v, out=out) is out
        assert relative(out, attention(q, k, v)) <= 2e-3
        assert (home[:GUARD] == FENCE).all() and (home[-GUARD:] == FENCE).all()
        still_running(writes=[q, out, *newest(k, [kv_len] * batch), *newest(v, [kv_len] * batch)])
        assert torch.equal(decode(q, k, v, pdl=True), out)


@on_machine
@pytest.mark.parametrize("n_heads, n_kv_heads, head_dim", [(16, 1, 64), (20, 1, 64), (2, 2, 256), (3, 1, 192)])
def test_any_group_of_heads_and_long_heads(n_heads, n_kv_heads, head_dim):
    q = normal(1, n_heads, head_dim, dtype=torch.float16)
    k, v = caches(1, 70, n_kv_heads, head_dim, 4, "channel", value_bits=8)
    assert relative(decode(q, k, v), attention(q, k, v)) <= 2e-3


@on_machine
@pytest.mark.parametrize("bits, axis", [(8, "channel"), (4, "token"), ("fp8", "channel")])
def test_lengths_of_their_own(bits, axis):
    batch, kv_len = 5, 150
    q = normal(batch, 4, 64, dtype=torch.float16)
    lens = torch.tensor([1, 150, 32, 149, 33], dtype=torch.int32)
    k, v = (normal(batch, kv_len, 2, 64, seed=seed) for seed in (1, 2))
    for b, n in enumerate(lens):  # what lies behind must not count
        k[b, n:], v[b, n:] = 30, 60000
    k, v = quantize(k, bits, axis=axis, group=32), quantize(v, bits)
    out = decode(q, k, v, 0.3, kv_lens=lens)
    assert relative(out, attention(q, k, v, 0.3, lens)) <= 2e-3
    still_running(writes=[q, *newest(k, lens), *newest(v, lens)])
    assert torch.equal(decode(q, k, v, 0.3, kv_lens=lens, pdl=True), out)


@on_machine
def test_blocks_without_work_wait_too():
    """No sequence has a token: who waits for this launch takes what is ahead of it as done, too."""
    q, out = normal(2, 4, 64, dtype=torch.float16), torch.full((2, 4, 64), torch.nan, dtype=torch.float16)
    k, v = caches(2, 70, 2, 64, 4, "token")
    still_running(writes=(q,), reads=(out,))
    kv_cache.decoding._launch(q, k, v, 0.1, torch.zeros(2, dtype=torch.int32), out, True)
    assert (out == 0).all()


@on_machine
def test_large_and_small_numbers():
    """Operands are float16: queries, scales and weights must stay in its range."""
    q, k, v = normal(1, 4, 64), normal(1, 100, 1, 64, seed=1), normal(1, 100, 1, 64, seed=2)
    for large, small in [(1e30, 1e-33), (1e-20, 1e17), (3e4, 1e-6)]:
        for times in (1e-4, 60000.0 / 4):
            x = (q * large).to(torch.bfloat16)
            for bits, axis in [(8, "channel"), (4, "token")]:
                a, b = quantize(k * min(times, 100), bits, axis=axis), quantize((v * times).clamp(-60000, 60000), bits)
                scale = small / min(times, 100)
                assert relative(decode(x, a, b, scale), attention(x, a, b, scale)) <= 4e-3, (large, times, bits)


@pytest.fixture
def one_multiprocessor(monkeypatch):
    """So that a warp has several tiles one after another, and a block several segments."""
    monkeypatch.setattr(kv_cache.decoding, "_card", lambda device: (1, ROOM))


# With lengths or without is another kernel: each number of warps (4 bits have more) and groups of tokens have both.
# Groups of channels without lengths are in test_no_race_and_every_byte_once.
ROUNDS = [
    (8, "channel", 64, [1300, 65, 777]),
    (4, "channel", 32, None),
    (4, "token", None, [1300, 65, 777]),
    ("fp8", "channel", 128, None),
]


@on_machine
@pytest.mark.parametrize("bits, axis, group, lens", ROUNDS)
def test_the_ring_goes_round(bits, axis, group, lens, one_multiprocessor):
    q = normal(3, 4, 64, dtype=torch.float16)
    k, v = caches(3, 1300, 1, 64, bits, axis, group)
    lens = None if lens is None else torch.tensor(lens, dtype=torch.int32)
    assert relative(decode(q, k, v, kv_lens=lens), attention(q, k, v, None, lens)) <= 2e-3


def jumping():
    """Scores that grow, fall and jump by hundreds: the maximum that a warp knows is stale. q, k, and v."""
    n = 1500
    slopes = [
        torch.linspace(-30, 30, n),
        torch.linspace(30, -30, n),
        40.0 * (torch.arange(n) % 100 == 63),
        torch.linspace(0, 3, n),
    ]
    k = torch.stack(slopes)[:, :, None, None] + 0.3 * normal(4, n, 1, 64)
    return (
        torch.ones(4, 2, 64, dtype=torch.float16),
        quantize(k, 8, axis="channel", group=64),
        quantize(normal(4, n, 1, 64), 4),
    )


@on_machine
def test_the_maximum_may_come_late_or_early(one_multiprocessor):
    q, k, v = jumping()
    for b, (out, wanted) in enumerate(zip(decode(q, k, v, 0.4), attention(q, k, v, 0.4))):
        assert relative(out, wanted) <= 2e-3, b


READ_CODES = """
#include <cuda_fp16.h>
#include "codes.cuh"
extern "C" __global__ void read(const unsigned *words, __half *keys, __half *values) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned own[FORMAT::WORDS], a[4];
    for (int w = 0; w < FORMAT::WORDS; w++) own[w] = words[i * FORMAT::WORDS + w];
    FORMAT::keys(a, own);
    *reinterpret_cast<uint4 *>(keys + 8 * i) = make_uint4(a[0], a[1], a[2], a[3]);
    FORMAT::values(a, own);
    *reinterpret_cast<uint4 *>(values + 8 * i) = make_uint4(a[0], a[1], a[2], a[3]);
}
"""


@on_machine
@pytest.mark.parametrize("bits", BITS)
def test_every_code_becomes_its_number(bits):
    """All codes in every place of a lane's words, without an error in any bit; e4m3's two NaN are never stored."""
    name, header = kv_cache.decoding.FORMATS[bits], kv_cache.decoding.HERE / "codes.cuh"
    every = np.array([c for c in range(16 if bits == 4 else 256) if bits != "fp8" or c & 127 != 127])
    stored = np.stack([np.roll(every, 37 * place + 5) for place in range(8)], 1)  # (codes, places of a lane)
    stored = np.concatenate([stored, np.repeat(every[:, None], 8, 1)])
    stored = np.concatenate([stored, np.repeat(stored[:1], -len(stored) % 32, 0)])
    if bits == 4:  # a byte has a number of the first two registers below, and one of the last two above
        words = (stored[:, :4] | stored[:, 4:] << 4).astype(np.uint8)
        order = [0, 2, 1, 3, 4, 6, 5, 7]  # bytes 0 and 2 are the halves of a register, and 1 and 3
    else:
        words, order = stored.astype(np.uint8), range(8)
    module = cuda.compile(READ_CODES, (f"-DFORMAT={name}", f"-I{header.parent}"))
    keys, values = (torch.zeros(len(stored), 8, dtype=torch.float16) for _ in range(2))
    words = torch.from_numpy(words.reshape(len(stored), -1).copy()).view(torch.int32).view(torch.uint32)
    module.read(len(stored) // 32, 32, words, keys, values)
    if bits == "fp8":
        key = value = ref.kv_cache.E4M3[stored]
    else:
        offset, unit = (8, 2.0**-9) if bits == 4 else (128, 2.0**-9)
        key, value = stored * 2.0**-24, (stored - offset) * unit
        if bits == 4:
            key = key * np.array([1, 1, 1, 1, 16, 16, 16, 16])
    assert np.array_equal(keys.double().numpy(), key[:, order])
    assert np.array_equal(values.double().numpy(), value[:, order])


def every_code(bits, n):
    """Numbers whose codes, with scale 1 (int4: -1), are all there are; over and over to make n of them."""
    codes = {8: np.arange(-127, 128), 4: np.arange(7, -9, -1), "fp8": ref.kv_cache.E4M3[np.arange(256) & 127 != 127]}
    return torch.from_numpy(np.resize(-codes[4] if bits == 4 else codes[bits], n).astype(np.float32))


@on_machine
@pytest.mark.parametrize("bits", BITS)
def test_every_code_of_values_comes_out(bits):
    """Keys that are 0 give all tokens the same weight, so tokens that are the same are the result, to the last bit."""
    v = torch.stack([every_code(bits, 256).roll(17 * b) for b in range(4)]).view(4, 1, 4, 64)
    v[..., 0] = {8: 127, 4: 8, "fp8": 448}[bits]  # the largest of each group, so that scales are 1
    v = v.expand(4, 32, 4, 64)
    k, cache = quantize(torch.zeros_like(v), 8, axis="channel"), quantize(v, bits, group=64)
    assert torch.equal(cache.dequantize(), v)
    assert torch.equal(decode(normal(4, 8, 64, dtype=torch.float16), k, cache), v[:, 0].half().repeat_interleave(2, 1))


@on_machine
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
def test_every_code_of_keys_weighs_what_it_should(bits, axis):
    """Query head h looks at channel h: the log of the quotient of two weights is code · scale. Each code is seen with
    the scale that brings it to where float16 tells neighbours apart."""
    batch, largest = 1 if bits == 4 else 5, {8: 127, 4: 8, "fp8": 448}[bits]
    k = torch.zeros(batch, 3, 1, 64)
    k[:, 1] = every_code(bits, batch * 63).view(batch, 1, 63)[..., [0, *range(63)]]
    k[:, 1, :, 0] = k[:, 2] = largest  # so that scales are 1; the third token does not count
    cache, lens = quantize(k, bits, axis=axis, group={"token": 64, "channel": 32}[axis]), torch.full((batch,), 2).int()
    assert torch.equal(cache.dequantize(), k)
    v = torch.zeros(batch, 3, 1, 64)
    v[:, 0, :, 0] = v[:, 1, :, 1] = 1
    v = quantize(v, 8)
    q = torch.eye(64, dtype=torch.float16).expand(batch, 64, 64).contiguous()
    wanted = k[:, 1, 0].double()
    found = torch.where(wanted == 0, 0.0, math.nan).double()
    for e in range(-9, 10, 2):
        score = wanted.abs() * 2.0**e
        seen = (score > 0.7) & (score <= 2.8)
        if seen.any():
            out = decode(q, cache, v, 2.0**e, kv_lens=lens).double()
            found = torch.where(seen, torch.log(out[..., 1] / out[..., 0]) / 2.0**e, found)
    half_a_step = wanted.abs() / 32 if bits == "fp8" else 0.5  # to the next code, at the least
    assert ((found - wanted).abs() <= 0.9 * half_a_step).all()


@on_machine
@pytest.mark.parametrize("scale", [0.0, -0.2, -3])
def test_any_scale(scale):
    q, (k, v) = normal(2, 4, 64, dtype=torch.bfloat16), caches(2, 41, 2, 64, 8, "channel")
    assert relative(decode(q, k, v, scale), attention(q, k, v, scale)) <= 4e-3


@on_machine
def test_out_may_begin_anywhere_that_is_a_multiple_of_4_bytes():
    q, (k, v) = normal(1, 4, 64, dtype=torch.float16), caches(1, 20, 2, 64, 8, "channel")
    home = torch.full((300,), FENCE, dtype=torch.float16)
    assert torch.equal(decode(q, k, v, out=home[2:258].view(1, 4, 64)), decode(q, k, v))
    home.fill_(FENCE)
    with pytest.raises(ValueError, match="out must start at an address divisible by 4"):
        decode(q, k, v, out=home[1:257].view(1, 4, 64))
    assert (home == FENCE).all()


@on_machine
@pytest.mark.parametrize("bits", BITS)
def test_small_values(bits):
    q, k, v = normal(1, 4, 64, dtype=torch.float16), normal(1, 300, 2, 64, seed=1), normal(1, 300, 2, 64, seed=2)
    a, b = quantize(k[:, :31], 8, axis="channel"), quantize(v[:, :31] * 1e-3, bits)  # in one launch, the rest in two
    assert relative(decode(q, a, b), attention(q, a, b)) <= 2e-3
    a, b = quantize(k, 8, axis="channel"), quantize(v * 1e-4, bits)  # as float16 the result were subnormal
    assert relative(decode(q.bfloat16(), a, b), attention(q.bfloat16(), a, b)) <= 4e-3


@on_machine
@pytest.mark.parametrize("bits", BITS)
def test_keys_and_values_may_change_places(bits):
    """Caches that were laid out anew are read and appended to as before."""
    a, b = normal(1, 75, 2, 64, seed=1), normal(1, 75, 2, 64, seed=2)
    q, k, v = normal(1, 8, 64, dtype=torch.bfloat16), quantize(a[:, :41], bits), quantize(b[:, :41], bits)
    assert relative(decode(q, k, v), attention(q, k, v)) <= 4e-3
    assert relative(decode(q, v, k), attention(q, v, k)) <= 4e-3
    k.append(a[:, 41:]), v.append(b[:, 41:])
    assert (k.role, v.role) == ("values", "keys")
    assert torch.equal(decode(q, k, v), decode(q, quantize(a, bits, role="keys"), quantize(b, bits)))
    same(k, ref.kv_cache.quantize(a.numpy(), bits, group=k.group))


MISTAKES = {  # in decode.cu and its headers: (what stands there, what is put in its place)
    "values are not waited for": ("ring.wait_full<1>();", ""),
    "keys come too late": ("copy_async_wait<STAGES * PARTS - 1 - PART>", "copy_async_wait<STAGES * PARTS - PART>"),
    "lanes do not meet": ("+ K_SCALES;\n    __syncwarp();", "+ K_SCALES;"),
    "no barrier in the exchange": (
        "shared.max_and_sum, member, lane);\n            meet(team);",
        "shared.max_and_sum, member, lane);",
    ),
    "q of the first row for all": ("if (here.left > 0) queries.load", "if (false) queries.load"),
    "the sum of weights is not scaled": ("weights[n][i] *= scale;", ""),
    "scales of the first group for all": ("(new_segment || here.at_new_group())", "new_segment"),
    "scales at whole groups only": ("|| new_segment || next.at_new_group()", "|| next.at_new_group()"),
    "a token too many": (">= tokens) s[t]", "> tokens) s[t]"),
    "slices relative to different maxima": (
        "const float share = exp2_approx(max_and_sum[w * HEADS + head].x - found.x);",
        "const float share = 1;",
    ),
    "offset of keys forgotten": ("OFFSETS && step <", "false && step <"),
    "queries of all teams in one place": ("{all_queries + team * HEADS * PITCH,", "{all_queries,"),
    "a team does not meet": ("else named_barrier<32 * TEAM>(1 + team);", "else __syncwarp();"),
    "each team has the first one's share": ("team * gridDim.x + blockIdx.x;", "blockIdx.x;"),
}
TEAMS = {  # of four warps, for these mistakes; 1 for all others
    "no barrier in the exchange": 4,
    "slices relative to different maxima": 4,
    "queries of all teams in one place": 2,
    "a team does not meet": 2,
}


@on_machine
@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_in_the_kernel_would_be_seen(what, one_multiprocessor, monkeypatch):
    right, wrong = MISTAKES[what]
    text = inlined("kernels/kv_cache/decode.cu")
    assert text.count(right) == 1

    def load(path, options):
        if path.name != "decode.cu":
            return cuda.load(path, options)
        return cuda.compile(text.replace(right, wrong), options)

    monkeypatch.setattr(kv_cache.decoding, "cuda", types.SimpleNamespace(load=load))
    for cached in ("_kernels", "_prepared"):
        monkeypatch.setattr(kv_cache.decoding, cached, getattr(kv_cache.decoding, cached).__wrapped__)
    q, k, v = jumping()
    q = q * torch.tensor([1, 0.75, 0.5, 0.25], dtype=q.dtype)[:, None, None]
    lens = torch.tensor([1500, 1409, 777, 1490], dtype=torch.int32)
    try:
        scale, out = 0.4, torch.empty_like(q)
        chosen = {"warps": 4, "team": TEAMS.get(what, 1)}
        kv_cache.decoding._launch(q, k, v, scale, lens, out, False, chosen, check_races=True)
    except simt.SimtError:
        return  # a race, or a read of shared memory that has not come yet
    wanted = attention(q, k, v, scale, lens)
    assert not max(relative(o, w) for o, w in zip(out, wanted)) <= 4e-3


# Lengths: one token, primes, all alike, one long among short ones, none at all; more shares than tiles, and fewer
LENGTHS = [[1, 1, 1, 1, 1], [127, 2, 31, 97, 61], [64] * 5, [1, 7, 400, 3, 2], [0, 33, 0, 0, 129], [0, 0, 0, 0, 32]]


@on_machine
@pytest.mark.parametrize("bits, axis, head_dim, tile", [
    (4, "channel", 64, 32), (8, "token", 80, 32), ("fp8", "channel", 48, 16), (4, "token", 96, 16)
])  # fmt: skip
def test_a_share_for_each_warp(bits, axis, head_dim, tile):
    q = normal(5, 6, head_dim, dtype=torch.float16)
    k, v = caches(5, 400, 2, head_dim, bits, axis)
    for lens, processors in zip(map(torch.tensor, LENGTHS), (2, 3, 1, 2, 3, 200)):
        out, home = between(torch.full(q.shape, torch.nan, dtype=q.dtype))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kv_cache.decoding, "_card", lambda device, count=processors: (count, ROOM))
            chosen = {"team": 1, "warps": 4, "tile": tile}
            args = q, k, v, head_dim**-0.5, lens.int(), out, False, chosen
            kv_cache.decoding._launch(*args, check_races=True)
        some = lens > 0
        wanted = attention(q, k, v, None, lens.clamp(min=1).int())
        assert relative(out[some], wanted[some.numpy()]) <= 2e-3 and (out[~some] == 0).all(), lens
        assert (home[:GUARD] == FENCE).all() and (home[-GUARD:] == FENCE).all()


@on_machine
@pytest.mark.parametrize("bits, axis, n_heads, head_dim", [(4, "channel", 16, 128), (8, "token", 20, 64)])
def test_a_share_for_each_warp_without_lengths(bits, axis, n_heads, head_dim):
    q = normal(2, n_heads, head_dim, dtype=torch.bfloat16)
    k, v = caches(2, 150, 1, head_dim, bits, axis)
    out = torch.full_like(q, torch.nan)
    chosen = {"team": 1, "warps": 2}
    split, _ = kv_cache.decoding._launch(q, k, v, head_dim**-0.5, None, out, False, chosen, check_races=True)
    assert relative(out, attention(q, k, v)) <= 4e-3


@on_machine
def test_what_lies_behind_a_sequence_is_never_seen():
    """Scales that are NaN behind the last tile, and behind the last token in it."""
    q = normal(2, 4, 80, dtype=torch.float16)
    for bits, axis in [(4, "token"), (8, "channel")]:
        k, v = caches(2, 200, 1, 80, bits, axis)
        lens = torch.tensor([64, 199], dtype=torch.int32)
        wanted = attention(q, k, v, None, lens)
        k.lay_out("keys")
        v.scale[0, :, 64 // 16 :] = torch.nan
        k.scale[0, :, 64 // (k.group if axis == "channel" else 16) + (axis == "channel") :] = torch.nan
        for team in (1, 2):
            out = torch.full_like(q, torch.nan)
            chosen = {"team": team, "warps": 2}
            kv_cache.decoding._launch(q, k, v, 80**-0.5, lens, out, False, chosen)
            assert relative(out, wanted) <= 2e-3


@on_machine
def test_after_appending():
    q = normal(1, 8, 64, dtype=torch.bfloat16)
    k, v = normal(1, 75, 2, 64, seed=1), normal(1, 75, 2, 64, seed=2)
    a, b = quantize(k[:, :40], 4, axis="channel"), quantize(v[:, :40], 4)
    a.append(k[:, 40:]), b.append(v[:, 40:])
    assert torch.equal(decode(q, a, b), decode(q, quantize(k, 4, axis="channel"), quantize(v, 4)))


# Each format, float16 as a short cache has it in test_right_on_hostile_shapes; each dtype, two head tiles, and a group
# of no power of two with two formats or more: heads know nothing of formats but whether they have offsets.
WHOLE = [
    ((2, 8, 2, 333, 128), 8, "channel", torch.float16),
    ((2, 8, 2, 333, 128), 4, "channel", torch.float16),
    ((2, 8, 2, 333, 128), 4, "token", torch.float16),
    ((2, 8, 2, 333, 128), "fp8", "channel", torch.float16),
    ((1, 20, 1, 77, 64), 8, "channel", torch.bfloat16),
    ((1, 20, 1, 77, 64), 4, "token", torch.bfloat16),
    ((1, 5, 1, 1, 128), 4, "channel", torch.bfloat16),
    ((1, 5, 1, 1, 128), "fp8", "channel", torch.bfloat16),
]


@on_machine
@pytest.mark.parametrize("shape, bits, axis, dtype", WHOLE, ids=str)
def test_a_block_for_each_row_needs_no_merge(shape, bits, axis, dtype):
    batch, n_heads, n_kv_heads, kv_len, head_dim = shape
    q = normal(batch, n_heads, head_dim, dtype=dtype)
    k, v = caches(batch, kv_len, n_kv_heads, head_dim, bits, axis)
    out, home = between(torch.full(q.shape, torch.nan, dtype=q.dtype))
    args = (q, k, v, head_dim**-0.5, None, out, False)
    _, merge = kv_cache.decoding._launch(*args, {"whole": True}, check_races=True)
    assert merge is None and relative(out, attention(q, k, v)) <= (2e-3 if dtype == torch.float16 else 4e-3)
    assert (home[:GUARD] == FENCE).all() and (home[-GUARD:] == FENCE).all()


@on_machine
@pytest.mark.parametrize("bits, team, warps", [(4, 1, 4), (4, 4, 8), ("fp8", 2, 6), (8, 2, 2)])
def test_a_team_for_each_row_needs_no_merge(bits, team, warps):
    """With lengths, one of them 0; more teams than rows; two head tiles."""
    lens = torch.tensor([203, 0, 33], dtype=torch.int32)
    q = normal(3, 34, 64, dtype=torch.bfloat16)
    k, v = caches(3, 203, 2, 64, bits, "channel")
    out, home = between(torch.full(q.shape, torch.nan, dtype=q.dtype))
    chosen = {"whole": True, "team": team, "warps": warps, "stages": 2}
    split, merge = kv_cache.decoding._launch(q, k, v, 0.125, lens, out, False, chosen, check_races=True)
    assert merge is None and split.grid[0] * (warps // team) >= 12 and (out[1] == 0).all()
    some = torch.tensor([0, 2])
    lens[1] = 1  # the reference knows no empty sequence
    assert relative(out[some], attention(q, k, v, 0.125, lens)[some]) <= 4e-3
    assert (home[:GUARD] == FENCE).all() and (home[-GUARD:] == FENCE).all()


@on_machine
def test_plain_tensors_go_to_the_other_kernel():
    q = normal(1, 4, 64, dtype=torch.float16)
    k, v = (normal(1, 20, 2, 64, dtype=torch.float16, seed=seed) for seed in (1, 2))
    assert relative(decode(q, k, v), ref.attention.decode_attention(*(x.double().numpy() for x in (q, k, v)))) <= 2e-3


@on_machine
@pytest.mark.parametrize("bits, axis", [(8, "channel"), (4, "channel"), (4, "token"), ("fp8", "token")])
def test_no_race_and_every_byte_once(bits, axis):
    q = normal(2, 5, 128, dtype=torch.float16)
    k, v = caches(2, 256, 1, 128, bits, axis)
    split, merge = counters(q, k, v, check_races=True)
    sectors = split.counters["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"]
    extra = 2 * 128 * 5 * 2 / 32  # q: one warp reads a head, for each share
    least = (k.nbytes + v.nbytes) / 32
    assert least <= sectors <= 1.4 * least + extra * 16  # scales of channels are read by each warp that needs them
    assert "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum" in split.counters


@on_machine
def test_a_short_ring_has_no_race(one_multiprocessor):
    q = normal(1, 4, 64, dtype=torch.float16)
    k, v = caches(1, 400, 1, 64, 4, "token")
    counters(q, k, v, check_races=True, warps=4, stages=2)


# How it is launched


@settings(max_examples=300, deadline=None)
@given(
    batch=some.integers(1, 256),
    n_kv_heads=some.integers(1, 16),
    group=some.integers(1, 70),
    head_dim=some.sampled_from([16, 64, 80, 128, 240, 256]),
    kv_len=some.integers(1, 1 << 21),
    low=some.booleans(),
    lens=some.booleans(),
    processors=some.integers(1, 200),
    room=some.sampled_from([ROOM, 163 * 1024, 99 * 1024]),
)
@example(60, 1, 16, 240, 100, False, False, 84, 99 * 1024)  # room for one warp, which hands on a whole row
@example(64, 8, 4, 128, 1024, True, True, 132, ROOM)  # four rows of a block
@example(64, 8, 8, 256, 1000, False, True, 132, 99 * 1024)  # ... for which there is no room
def test_plans_fit_and_cover_all_tiles(batch, n_kv_heads, group, head_dim, kv_len, low, lens, processors, room):
    held = (1 if low else 2) * head_dim + 8, 2 * head_dim
    p = plan(batch, group * n_kv_heads, n_kv_heads, head_dim, kv_len, held, low, processors, room, lens)
    tiles = batch * p.rows * -(-kv_len // p.tile)
    assert 1 <= p.blocks <= processors and p.shares == p.blocks * (p.warps // p.team) and p.warps % p.team == 0
    assert p.whole or p.shares * p.each + p.rest == tiles and 0 <= p.rest < p.shares
    assert p.whole or p.team < p.warps or p.each >= 1
    assert p.stages >= 1 and p.threads <= 1024 and p.threads % 32 == 0
    assert p.threads >= p.together * head_dim // 4 and (batch * group * n_kv_heads) % p.together == 0
    assert p.rows % n_kv_heads == 0 and p.rows // n_kv_heads * 16 >= group
    assert p.shared <= room
    assert not p.whole or p.shares - p.warps // p.team < batch * p.rows <= p.shares  # each row has a team
    segments, heads = p.shares + batch * p.rows, -(-group // -(-group // 16))
    assert p.sums_at == segments * heads * head_dim and p.floats == p.sums_at + 2 * segments * heads


def test_the_room_for_weights_is_the_kernels():
    header = (kv_cache.decoding.HERE.parent / "attention" / "softmax.cuh").read_text()
    assert f"constexpr float RESCALE_ABOVE = {kv_cache.decoding.RESCALE_ABOVE};" in header


def test_the_default_groups():
    assert [default_group(bits, axis, 128) for bits in BITS for axis in AXES] == [128, 128, 32, 32, 128, 128]


def bad_calls():
    q = normal(1, 4, 64, dtype=torch.float16)
    k, v = quantize(normal(1, 9, 2, 64), 8, axis="channel"), quantize(normal(1, 9, 2, 64), 8)
    lens = torch.tensor([9], dtype=torch.int32)
    yield "q of float32", (q.float(), k, v), {}, TypeError, "q must be of torch.float16 or torch.bfloat16"
    yield (
        "one plain tensor",
        (q, k, normal(1, 9, 2, 64)),
        {},
        TypeError,
        "two QuantizedKV or two tensors, got Tensor as v",
    )
    yield (
        "heads",
        (normal(1, 3, 64, dtype=torch.float16), k, v),
        {},
        ValueError,
        "n_heads must be a multiple of n_kv_heads",
    )
    yield (
        "head_dim",
        (normal(1, 4, 128, dtype=torch.float16), k, v),
        {},
        ValueError,
        r"k must have shape \(1, kv_len, n_kv",
    )
    yield "lengths", (q, k, quantize(normal(1, 8, 2, 64), 8)), {}, ValueError, r"v must have shape \(1, 9, 2, 64\)"
    yield (
        "v by channel",
        (q, k, quantize(normal(1, 9, 2, 64), 8, axis="channel")),
        {},
        ValueError,
        "v must be quantised with",
    )
    yield "one cache", (q, v, v), {}, ValueError, "two caches, got one for both"
    yield "kv_lens", (q, k, v), {"kv_lens": lens + 1}, ValueError, "kv_lens must be from 1 to kv_len, 9, got 10"
    yield "kv_lens' dtype", (q, k, v), {"kv_lens": lens.long()}, TypeError, "kv_lens must be of torch.int32"
    yield "scale", (q, k, v), {"scale": math.inf}, ValueError, "scale must be finite"
    yield "out", (q, k, v), {"out": q}, ValueError, "out must not share memory with q"
    yield "out's shape", (q, k, v), {"out": q.new_empty(1, 4, 32)}, ValueError, r"out must have shape \(1, 4, 64\)"


@pytest.mark.parametrize("what", [call[0] for call in bad_calls()])
def test_what_is_not_allowed_is_named(what, monkeypatch):
    monkeypatch.setattr(kv_cache.decoding, "_launch", lambda *args: pytest.fail("launched"))
    _, args, options, kind, words = next(call for call in bad_calls() if call[0] == what)
    role = args[1].role
    with pytest.raises(kind, match=words):
        decode(*args, **options)
    assert args[1].role == role


def test_what_a_cache_says_of_itself():
    assert repr(quantize(normal(1, 9, 2, 64), 4)) == "<QuantizedKV (1, 9, 2, 64) bits=4 axis='token' group=32 values>"
    assert isinstance(quantize(normal(1, 9, 2, 64), 4), QuantizedKV)
