"""Measure chapter 09 on a GPU: decode attention over a quantised cache; and chapter 07's mix with fp16 values.

The shapes, checks and way of timing of kernels/attention/bench.py. Keys have a scale for each channel and group of
tokens, values one for each token and group of channels; q is bf16. Peers: our own decode on the bf16 cache, and
FlashInfer on a cache of e4m3 without scales. Truth is attention over the dequantised cache, in float64.

Beside them what a server asks for, our own alone: sequences of different lengths, and heads of 80 and 96 channels.
"""

import copy
import functools
import math

import numpy as np
import torch

import ref.attention
from kernels import attention, kv_cache, running
from kernels.attention import bench, peers
from kernels.attention import rungs as rungs_of_attention
from kernels.benching import ahead, empty, ladder_of, our_row, peer_rows, reading, short
from kernels.kv_cache import rungs
from lab import cuda_timing

BITS = {"fp8": "fp8", "int8": 8, "int4": 4}
MIX_TOKENS = (4096, 32768)
OTHERS = [  # batch, the shortest sequence, the longest (and what there is room for), head_dim
    *((64, 512, longest, 128) for longest in (1024, 8192)),
    *((16, 4096, 4096, head_dim) for head_dim in (80, 96)),
]
OTHER_BITS = "fp8", "int4"
TOLERANCE = 4e-3  # of the kernel, against attention over the dequantised cache: a rounding to bf16, and one of weights
FP8_PRODUCTS = 0.06  # of a peer that rounds q and the weights to e4m3


def ladders(seconds=0.1):
    """Check, then time, every format, rung and peer. Returns the Ladders."""
    cuda_timing.expect_gpu("the ladders of the quantised cache")
    found = [name for name in BITS for cell in bench.CELLS if running.wants(_title(name, *cell))]
    found += [name for name in OTHER_BITS for cell in OTHERS if running.wants(_other_title(name, *cell))]
    decodes = [_through(BITS[name], pdl) for name in dict.fromkeys(found) for pdl in (False, True)]
    ahead(bench.hostile_calls(decodes, bench.decode_arrays, [torch.bfloat16]))
    found = [_mix(kv_len, seconds) for kv_len in MIX_TOKENS if running.wants(_mix_title(kv_len))]
    found += [ladder for cell in bench.CELLS for ladder in _cell(*cell, seconds)]
    return found + [ladder for cell in OTHERS for ladder in _other(*cell, seconds)]


def further(roof, versions):
    """The trials, in a file of their own. Returns the paths written."""
    from kernels import trials  # whose modules stand on this one

    return trials.store("kv_cache", roof, versions)


def _title(name, batch, kv_len):
    return f"decode {name}, batch {batch}, {short(kv_len)}"


def _cell(batch, kv_len, seconds):
    """A ladder for each format. All decode the same q and the same cache, quantised."""
    wanted = {name: bits for name, bits in BITS.items() if running.wants(_title(name, batch, kv_len))}
    if not wanted:
        return
    empty()
    homes, plain, facts = bench.problem(torch.bfloat16, batch, kv_len)
    for name, bits in wanted.items():
        title = _title(name, batch, kv_len)
        rows = [*_ours(bits, plain[0], facts), *bench.decode_rows(plain, facts, "decode, bf16 cache")]
        if name == "fp8":
            rows += _fp8_peers(title, *plain[0], facts)
        moved = rows[0].bytes
        rows.append(reading(_as_many_bytes(moved), moved, facts["flops"]))
        yield ladder_of(title, rows, seconds, sustain=("decode", "decode, PDL") if name == "fp8" else ())
        del rows
        empty()


def _other_title(name, batch, least, kv_len, head_dim):
    span = short(kv_len) if least == kv_len else f"{short(least)} to {short(kv_len)}"
    heads = "" if head_dim == bench.HEAD_DIM else f", head_dim {head_dim}"
    return f"decode {name}, batch {batch}, {span}{heads}"


def _other(batch, least, kv_len, head_dim, seconds):
    """A ladder for each of OTHER_BITS: our decode over a quantised cache, and over one of 16 bits."""
    wanted = {name: _other_title(name, batch, least, kv_len, head_dim) for name in OTHER_BITS}
    wanted = {name: title for name, title in wanted.items() if running.wants(title)}
    if not wanted:
        return
    empty()
    k, v = torch.randn(2, batch, kv_len, bench.N_KV_HEADS, head_dim, device=bench.DEVICE).to(torch.bfloat16)
    q = torch.randn(batch, bench.N_HEADS, head_dim, device=bench.DEVICE).to(torch.bfloat16)
    lens = lengths(batch, least, kv_len)
    inputs = [(q, k, v), *((q, k.clone(), v.clone()) for _ in range(math.ceil(cuda_timing.COLD / 2 / k.nbytes) - 1))]
    moved, flops = rungs_of_attention.work(q, k, lens)
    sixteen = {"bytes": moved, "flops": flops, "wanted": _truth(q, k, v, lens)}
    for name, title in wanted.items():
        rows = [*_ours(BITS[name], inputs[0], sixteen, lens), *_sixteen_bits(inputs, sixteen, lens)]
        rows.append(reading(_as_many_bytes(rows[0].bytes), rows[0].bytes, flops))
        yield ladder_of(title, rows, seconds)
        del rows
        empty()


def lengths(batch, least, kv_len):
    """kv_lens: whole numbers from `least` to kv_len, the same in every run; None where there is no choice."""
    if least == kv_len:
        return None
    drawn = np.random.default_rng(64).integers(least, kv_len + 1, batch)
    return torch.tensor(drawn, dtype=torch.int32, device=bench.DEVICE)


def _truth(q, k, v, lens):
    """As bench.truth, of so many tokens of each sequence."""
    if lens is None:
        return bench.truth(q, k, v)
    each = [slice(b, b + 1) for b in range(len(q))]
    return torch.cat([bench.truth(q[b], k[b, :n], v[b, :n]) for b, n in zip(each, lens.tolist())])


def _sixteen_bits(inputs, facts, lens):
    """Our decode over a cache of 16 bits, plain and under programmatic dependent launch."""
    q = inputs[0][0]
    for pdl in (False, True):
        verdict = bench.checked(_plain(pdl), ref.attention.decode_attention, bench.decode_arrays, (q.dtype,) * 3)
        about = {"verdict": verdict, "sources": bench.DECODE, "tolerance": bench.TOLERANCE[q.dtype]}
        run = functools.partial(attention.decode, kv_lens=lens, pdl=pdl)
        yield our_row(f"decode, bf16 cache{', PDL' if pdl else ''}", run, inputs, q, **about, **facts)


@functools.cache
def _plain(pdl):
    return functools.partial(attention.decode, pdl=pdl)


def _ours(bits, inputs, facts, lens=None):
    """Our decode over these inputs' cache, quantised: plain, and under programmatic dependent launch."""
    q, *cache = inputs
    cache = quantized(bits, *cache)
    held, share = sum(x.nbytes for x in cache), 1 if lens is None else int(lens.sum()) / cache[0].shape[:2].numel()
    copies = [cache, *(copy.deepcopy(cache) for _ in range(math.ceil(cuda_timing.COLD / held) - 1))]
    facts = facts | {
        "wanted": _truth(q, *(x.dequantize() for x in cache), lens),
        "bytes": int(held * share) + 2 * q.nbytes,
        "tolerance": TOLERANCE,
        "sources": kv_cache.SOURCES,
    }
    for pdl in (False, True):
        verdict = bench.checked(_through(bits, pdl), _reference(bits), bench.decode_arrays, (q.dtype,) * 3)
        run = functools.partial(kv_cache.decode, kv_lens=lens, pdl=pdl)
        title = "decode, PDL" if pdl else "decode"
        yield our_row(title, run, [(q, *pair) for pair in copies], q, verdict=verdict, **facts)


def quantized(bits, k, v):
    """The cache as chapter 09 ends: keys by channel, values by token."""
    return kv_cache.quantize(k, bits, axis="channel"), kv_cache.quantize(v, bits, axis="token")


@functools.cache
def _through(bits, pdl):
    """decode(q, k, v) that quantises on its way."""

    def decode(q, k, v):
        cache = quantized(bits, k, v)
        if k.is_cuda:
            torch.cuda.synchronize()  # a dependent launch may read the cache before it is written
        return kv_cache.decode(q, *cache, pdl=pdl)

    return decode


@functools.cache
def _reference(bits):
    """What that must give: attention over the dequantised cache."""

    def decode(q, k, v):
        cache = quantized(bits, *(torch.from_numpy(x).to(torch.bfloat16) for x in (k, v)))
        return ref.attention.decode_attention(q, *(x.dequantize().double().numpy() for x in cache))

    return decode


def _fp8_peers(title, q, k, v, facts):
    """FlashInfer on the cache as e4m3, each number rounded as it is: ours divides by scales first."""
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    held = k.nbytes + v.nbytes
    caches = [(k, v), *((k.clone(), v.clone()) for _ in range(math.ceil(cuda_timing.COLD / held) - 1))]
    facts = facts | {"wanted": bench.truth(q, k, v), "bytes": held + 2 * q.nbytes}
    for name, modes in peers.eight_bit(q, caches):
        tolerance = FP8_PRODUCTS if peers.IN_FP8 in name else 2 * torch.finfo(q.dtype).eps
        yield from peer_rows([(name, modes)], tolerance, ladder=title, **facts)


def _as_many_bytes(count, step=1 << 17):
    """Tensors of so many bytes, a little more to be a multiple of `step`: for a call that only reads."""
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (step // 4 * math.ceil(count / step),), device=bench.DEVICE)
    return cuda_timing.cold_copies(words.to(torch.int32))


def _mix_title(kv_len):
    return f"attention mix, fp32 and fp16 cache, {kv_len} tokens"


def _mix(kv_len, seconds):
    """The rungs, on the values that each of them takes: fp32 or fp16, with fp32 weights."""
    empty()
    rows = []
    for dtype in (torch.float32, torch.float16):
        inputs = bench.random_mixes(torch.float32, dtype, kv_len)
        ladder = [rung for rung in rungs.RUNGS if rungs.DTYPES.get(rung.name, torch.float16) == dtype]
        *found, reading = bench.mix_rows(ladder, inputs, *rungs.work(*inputs[0]))
        reading.title += f", {'fp32' if dtype == torch.float32 else 'fp16'}"
        rows += [*found, reading]
    return ladder_of(_mix_title(kv_len), rows, seconds)
