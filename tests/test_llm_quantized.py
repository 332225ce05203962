"""rope_append into a cache of 8 or 4 bits, and the cache of fixed capacity that it writes to."""

import math

import pytest
import torch
from test_llm_kernels import arguments, in_both, off, on_both

from kernels import kv_cache, llm
from kernels.kv_cache import decode, empty, first, put, quantize
from lab.cuda.launch import Kernel

ROLES = ("keys", "values")
in_few_bits = pytest.mark.parametrize("bits", [8, 4])


def littered(capacity, n_kv_heads, head_dim, bits, dtype, device):
    """Two caches with any codes and scales in them."""
    caches = [empty(1, capacity, n_kv_heads, head_dim, bits, role, dtype=dtype, device=device) for role in ROLES]
    for cache in caches:
        cache.packed.copy_(torch.randint(0, 256, cache.packed.shape))
        cache.scale.copy_(torch.rand(cache.scale.shape))
    return caches


def both(cache):
    return cache.codes(), cache.scales()


@on_both
@in_both
@in_few_bits
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 128, 256])
def test_the_codes_are_those_of_quantize(head_dim, bits, dtype, device):
    """Bit for bit, at any place in a tile; and nothing else changes."""
    capacity = 64
    more = {}
    for position in (0, 15, 16, 17, 24, capacity - 1):
        call = arguments(head_dim, capacity=capacity, kv_len=position + 1, dtype=dtype, device=device)
        call["qkv"][-1] *= 2.0**-12  # subnormal scales
        call["qkv"][-2, : head_dim // 2] = 0  # groups of nothing
        q = llm.rope_append(**call, **more)
        keys, values = littered(capacity, 2, head_dim, bits, dtype, device)
        before = both(keys), both(values)
        found = llm.rope_append(**call | {"k": keys, "v": values}, **more)
        assert torch.equal(found, q)
        for cache, was, exact, role in zip((keys, values), before, (call["k"], call["v"]), ROLES):
            wanted = both(quantize(exact[None, position : position + 1], bits, role=role))
            for now, then, new in zip(both(cache), was, wanted):
                then[:, position] = new[:, 0]
                assert now.dtype == then.dtype and torch.equal(now, then), (role, position)
        more = {"bias": torch.randn_like(q[:1]).expand_as(call["qkv"]).contiguous()}


@on_both
def test_numbers_between_two_codes_go_where_quantize_puts_them(device):
    """Exactly between: only a division that rounds as it should says so."""
    call = arguments(128, 11, 11, capacity=16, kv_len=3, device=device)
    units = torch.arange(5, 16, dtype=torch.float64)[:, None] / 1024
    exact = units * (torch.arange(128) - 63.5)
    exact[:, :1] = 127 * units
    call["qkv"][-11:] = exact
    keys, values = littered(16, 11, 128, 8, torch.float16, device)
    llm.rope_append(**call | {"k": keys, "v": values})
    wanted = quantize(call["qkv"][None, None, -11:], 8)
    assert torch.equal(wanted.scales()[0, 0].double().cpu(), units)
    assert torch.equal(values.codes()[:, 2], wanted.codes()[:, 0])


@in_few_bits
def test_no_race(bits, monkeypatch):
    launch = Kernel.__call__
    checked = lambda self, *args, pdl=False, **options: launch(self, *args, check_races=True, **options)  # noqa: E731
    monkeypatch.setattr(Kernel, "__call__", checked)
    keys, values = littered(32, 2, 48, bits, torch.float16, "cpu")
    assert llm.rope_append(**arguments(48, kv_len=10) | {"k": keys, "v": values}).isfinite().all()


@on_both
@in_few_bits
def test_a_length_outside_of_the_cache_writes_nothing(bits, device):
    for kv_len in (0, -3, 17):
        keys, values = littered(16, 2, 16, bits, torch.float16, device)
        before = [t.clone() for cache in (keys, values) for t in (cache.packed, cache.scale)]
        call = arguments(16, kv_len=kv_len, device=device) | {"k": keys, "v": values}
        out = torch.full((6, 16), 7.0, dtype=torch.float16, device=device)
        llm.rope_append(**call, out=out)
        now = [t for cache in (keys, values) for t in (cache.packed, cache.scale)]
        assert (out == 7).all() and all(torch.equal(a, b) for a, b in zip(now, before))


@on_both
@in_few_bits
def test_put_and_decode_see_what_counts(bits, device):
    """Put in pieces, anywhere in a tile; then decode with kv_lens sees what it would of a cache that ends there."""
    batch, capacity, head_dim, lens = 2, 96, 64, (37, 50)
    kv = [torch.randn(batch, 50, 2, head_dim).half().to(device) for _ in ROLES]
    caches = []
    for x, role in zip(kv, ROLES):
        cache = empty(batch, capacity, 2, head_dim, bits, role, dtype=torch.float16, device=device)
        cache.packed.fill_(0x5A)
        put(cache, torch.full_like(x, 300.0), 30)  # an earlier text
        for begin, end in ((0, 20), (20, 21), (21, 32), (32, 50)):
            put(cache, x[:, begin:end], begin)
        wanted = quantize(x, bits, role=role)
        assert all(torch.equal(a, b) for a, b in zip(both(first(cache, 50)), both(wanted)))
        assert first(cache, 50).nbytes == wanted.nbytes and cache.shape == (batch, capacity, 2, head_dim)
        caches.append(cache)
    q = torch.randn(batch, 4, head_dim).half().to(device)
    found = decode(q, *caches, kv_lens=torch.tensor(lens, dtype=torch.int32, device=device))
    for b, kv_len in enumerate(lens):
        alone = [quantize(x[b : b + 1, :kv_len], bits, role=role) for x, role in zip(kv, ROLES)]
        assert off(found[b : b + 1], decode(q[b : b + 1], *alone).double().cpu().numpy()) < 2e-3


def test_large_values_raise_the_peak_that_decode_goes_by():
    keys, values = (empty(1, 16, 1, 16, 4, role, dtype=torch.bfloat16, device="cpu") for role in ROLES)
    x = torch.full((1, 3, 1, 16), 4e4, dtype=torch.bfloat16)
    put(keys, x, 0), put(values, x, 0)
    assert values.peak == pytest.approx(5e3, rel=0.01)
    q = torch.ones(1, 1, 16, dtype=torch.bfloat16)
    found = decode(q / 1e4, keys, values, kv_lens=torch.tensor([3], dtype=torch.int32))
    assert off(found, values.dequantize()[:, 0].double().numpy()) < 4e-3
    with pytest.raises(ValueError, match="put: kv must be finite"):
        put(values, x * math.inf, 0)


def test_bad_arguments_are_named():
    call = arguments(32) | dict(zip("kv", littered(16, 2, 32, 8, torch.float16, "cpu")))
    keys, values = call["k"], call["v"]
    of = lambda **other: empty(  # noqa: E731
        **dict(batch=1, capacity=16, n_kv_heads=2, head_dim=32, bits=8, role="keys", dtype=torch.float16, device="cpu")
        | other
    )
    for changes, error, wanted in [
        ({"v": torch.zeros(16, 2, 32).half()}, TypeError, "two tensors or two QuantizedKV, got Tensor as v"),
        ({"k": of(head_dim=16)}, ValueError, r"k must have shape \(1, capacity, n_kv_heads, 32\)"),
        ({"k": of(batch=2)}, ValueError, r"k must have shape \(1, capacity.*got \(2, 16, 2, 32\)"),
        ({"v": of(capacity=32)}, ValueError, "v must be like k"),
        ({"v": of(bits=4)}, ValueError, "v must be like k"),
        ({"k": values, "v": keys}, ValueError, "k must be .*role='keys', got"),
        ({"k": quantize(torch.ones(1, 16, 2, 32), 8, group=16, role="keys")}, ValueError, "their default group"),
        ({"k": quantize(torch.ones(1, 16, 2, 32), "fp8", role="keys")}, ValueError, "of 8 or 4 bits"),
        ({"v": quantize(torch.ones(1, 16, 2, 32).half(), 8)}, ValueError, "v must be made for scales up to 16"),
        ({"k": of(dtype=torch.bfloat16)}, TypeError, "k must be of torch.float16 on cpu, like qkv, got torch.bfloat16"),
    ]:
        with pytest.raises(error, match="rope_append: .*" + wanted):
            llm.rope_append(**call | changes)
    for changes, error, wanted in [
        ({"capacity": 24}, ValueError, "capacity must be a multiple of 16, got 24"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1"),
        ({"head_dim": 24}, ValueError, "head_dim must be a multiple of 16, 256 at most, got 24"),
        ({"bits": "fp8"}, ValueError, "bits must be 8 or 4, got 'fp8'"),
        ({"role": None}, ValueError, "role must be 'keys' or 'values', got None"),
        ({"dtype": torch.int8}, TypeError, "dtype must be .*, got torch.int8"),
    ]:
        with pytest.raises(error, match="empty: " + wanted):
            of(**changes)
    kv = torch.ones(1, 10, 2, 32).half()
    for arguments_, error, wanted in [
        ((keys, kv, 7), ValueError, "10 tokens at 7 must end within 16"),
        ((keys, kv, -1), ValueError, "position must be at least 0"),
        ((keys, kv.float(), 0), TypeError, "kv must be of torch.float16 on cpu, like the cache"),
        ((keys, kv[0], 0), ValueError, r"kv must have shape \(1, n, 2, 32\)"),
        ((quantize(kv, 8, axis="channel"), kv, 0), ValueError, "cache must have axis='token', got 'channel'"),
    ]:
        with pytest.raises(error, match="put: " + wanted):
            kv_cache.put(*arguments_)
    with pytest.raises(ValueError, match="first: tokens must be at most 16, got 17"):
        first(keys, 17)
