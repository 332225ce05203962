"""Measure chapters 07 and 08 on a GPU: 32 query heads, 8 KV heads, head_dim 128, from 4K tokens to 1M; and the best
rung of chapter 08 in the shapes of other models.

The attention mix, decode attention beside the peers of peers.py, and the time over the number of splits. Every call
finds its cache cold. Each rung and peer is held against float64 on the card before it is timed and after; rungs also on
hostile shapes between NaNs. Of a peer the fastest mode counts, and stands behind the colon in its row. The last row
only reads the cache: what a launch costs without PDL. Rungs slower than SLOW are left out with a printed sentence.
"""

import functools
import time

import numpy as np
import torch

import ref.attention
from kernels import running
from kernels.attention import decoding, mix, mix_answers, peers, rungs
from kernels.benching import Row as Row  # trials take it from here
from kernels.benching import ahead, between_nans, empty, ladder_of, our_row, peer_rows, reading, short, wait
from lab import check, cuda_timing

DEVICE = "cuda"
N_HEADS, N_KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MIX_CELLS = [(name, kv_len) for name in ("fp32", "fp16") for kv_len in (4096, 32768)]  # dtype, kv_len
CELLS = [(1, 4096), (1, 32768), (1, 131072), (1, 1 << 20), (16, 4096), (16, 32768), (16, 131072)]  # batch, kv_len
FP16_CELLS, FLEX_CELLS = CELLS[:2], [(1, 4096), (16, 4096)]
OTHERS = [  # batch, kv_len, n_heads, n_kv_heads, head_dim, and a model that has such heads
    (64, 1024, 32, 8, 128, "Llama-3.1-8B"),
    (64, 1024, 32, 8, 64, "Llama-3.2-1B"),
    (256, 512, 32, 8, 64, "Llama-3.2-1B"),
    (1, 131072, 32, 8, 64, "Llama-3.2-1B"),
    (64, 1024, 28, 4, 128, "Qwen2.5-7B"),
    (4, 8192, 96, 8, 128, "Mistral-Large"),
    (8, 4096, 71, 1, 64, "Falcon-7B"),
    (4, 16384, 32, 32, 128, "Llama-2-7B"),
]
SPLITS = {4096: (1, 2, 4, 8, 16, 24, 25, 32, 64), 32768: (1, 4, 8, 16, 24, 25, 32, 48, 64, 128)}  # of the rung `split`
SLOW = 20e-3  # seconds
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}  # ‖out − ref‖ / ‖ref‖
HOSTILE = [  # batch, n_heads, n_kv_heads, kv_len, head_dim; of few kinds, as each is compiled for
    (2, 8, 2, 1009, 128),
    (1, 4, 4, 1, 64),
    (3, 3, 3, 17, 64),
    (1, 16, 4, 127, 128),
    (2, 32, 8, 4099, 128),
]
DECODE = tuple(f"kernels/attention/{name}" for name in ("decode.cu", "merge.cu", "plan.py"))  # its sources


def ladders(seconds=0.1):
    """Check, then time, every rung and peer. Returns the Ladders."""
    cuda_timing.expect_gpu("the attention ladders")
    mixes = [cell for cell in MIX_CELLS if running.wants(_mix_title(*cell))]
    cells = [("bf16", *cell) for cell in CELLS] + [("fp16", *cell) for cell in FP16_CELLS]
    cells = [cell for cell in cells if running.wants(_title(*cell))]
    mix_rungs = [rung.function for rung in (*mix.RUNGS, *mix_answers.RUNGS)]
    in_cuda = [rung.function for rung in rungs.RUNGS if rung.name != "split_triton"]  # Triton is not for threads
    decode_rungs = [*in_cuda, decoding.decode, _dependent]
    calls = hostile_calls(mix_rungs, mix_arrays, {DTYPES[name] for name, *_ in mixes})
    ahead(calls + hostile_calls(decode_rungs, decode_arrays, {DTYPES[name] for name, *_ in cells}))
    found = [_mix(*cell, seconds) for cell in mixes] + [_decode(*cell, seconds) for cell in cells]
    found += [_other(*shape, seconds) for shape in OTHERS if running.wants(_other_title(*shape))]
    return found + [_splits(*cell, seconds) for cell in SPLITS.items() if running.wants(_splits_title(cell[0]))]


def further(roof, versions):
    """The trials, in a file of their own. Returns the paths written."""
    from kernels import trials  # whose modules stand on this one

    return trials.store("attention", roof, versions)


def hostile_calls(functions, arrays, dtypes):
    """Calls of these functions on the shapes of HOSTILE, for what it compiles. arrays: as for `checked`"""

    def call(function, shape, dtype):
        function(*(torch.randn(size, device=DEVICE).to(dtype) for size in arrays(*shape)))

    return [functools.partial(call, f, shape, dtype) for dtype in dtypes for shape in HOSTILE for f in functions]


def decode_arrays(batch, n_heads, n_kv_heads, kv_len, head_dim):
    """The shapes of q, k and v."""
    cache = batch, kv_len, n_kv_heads, head_dim
    return (batch, n_heads, head_dim), cache, cache


def mix_arrays(batch, n_heads, n_kv_heads, kv_len, head_dim):
    """The shapes of att and v."""
    return (n_heads, kv_len), (kv_len, n_kv_heads, head_dim)


@functools.cache
def checked(function, reference, arrays, dtypes):
    """The Verdict of function(*tensors) on HOSTILE, inputs between NaNs, against reference(*float64 arrays).

    arrays  gives the shapes of the inputs for a shape of HOSTILE;  dtypes  of the inputs, in order
    """

    def inputs(rng, *shape):
        return [rng.standard_normal(size).astype(np.float32) for size in arrays(*shape)]

    def rounded(found):
        return [torch.from_numpy(np.ascontiguousarray(x)).to(dtype) for x, dtype in zip(found, dtypes)]

    def wanted(*found):
        return reference(*(tensor.double().numpy() for tensor in rounded(found)))

    def on_card(*found):
        tensors = [between_nans(tensor) for tensor in rounded(found)]
        wait()  # a dependent launch may read the cache before what is ahead of it has ended
        return function(*tensors).double().cpu().numpy()

    # an average over many tokens is small: sizes are those of the values
    return check(on_card, wanted, inputs, HOSTILE, tolerance=TOLERANCE[dtypes[-1]], size=0.01)


# Chapter 07: the attention mix


def _mix_title(name, kv_len):
    return f"attention mix {name}, {N_HEADS} heads, {N_KV_HEADS} KV heads, {kv_len} tokens"


def _mix(name, kv_len, seconds):
    empty()
    inputs = random_mixes(DTYPES[name], DTYPES[name], kv_len)
    rows = mix_rows([*mix.RUNGS, *mix_answers.RUNGS], inputs, *mix.work(*inputs[0]))
    peer = "torch.matmul", {"a product for each KV head": lambda: [functools.partial(by_matmul, *p) for p in inputs]}
    tolerance = max(2 * torch.finfo(DTYPES[name]).eps, 1e-5)
    facts = {"wanted": rows[0].wanted, "bytes": rows[0].bytes, "flops": rows[0].flops}
    rows[-1:-1] = peer_rows([peer], tolerance, ladder=_mix_title(name, kv_len), **facts)
    return ladder_of(_mix_title(name, kv_len), rows, seconds)


def random_mixes(att_dtype, dtype, kv_len):
    """(att, v) pairs, all the same, with 1 GB of v or more in all."""
    att = torch.softmax(torch.randn(N_HEADS, kv_len, device=DEVICE), dim=1).to(att_dtype)
    values = cuda_timing.cold_copies(torch.randn(kv_len, N_KV_HEADS, HEAD_DIM, device=DEVICE).to(dtype))
    return [(att.clone(), v) for v in values]


def mix_rows(ladder, inputs, moved, flops):
    """A row for each of these rungs, and one that only reads v."""
    att, v = inputs[0]
    wanted, dtypes = by_matmul(att.double(), v.double()), (att.dtype, v.dtype)
    facts = {"wanted": wanted, "bytes": moved, "flops": flops, "tolerance": TOLERANCE[v.dtype]}
    like = torch.empty(wanted.shape, dtype=att.dtype, device=att.device)
    rows = []
    for rung in ladder:
        verdict = checked(rung.function, ref.attention.attention_mix, mix_arrays, dtypes)
        rows.append(our_row(rung.title, rung.function, inputs, like, verdict=verdict, sources=rung.sources, **facts))
    return [*rows, reading([v for _, v in inputs], moved, flops)]


def by_matmul(att, v):
    """A peer, and the truth in float64: one product for each KV head. (n_heads, head_dim)"""
    grouped = att.view(v.shape[1], -1, v.shape[0])  # (n_kv_heads, heads of a group, kv_len)
    return torch.matmul(grouped, v.transpose(0, 1)).view(att.shape[0], v.shape[2])


# Chapter 08: decode attention


def _title(name, batch, kv_len):
    return f"decode {name}, batch {batch}, {short(kv_len)}"


def _decode(name, batch, kv_len, seconds):
    empty()
    dtype, title = DTYPES[name], _title(name, batch, kv_len)
    homes, inputs, facts = problem(dtype, batch, kv_len)
    q, caches, rows = *_cold(inputs), []
    for rung in rungs.RUNGS:
        if _fast_enough(title, rung, inputs[-1]):
            rows.append(_rung_row(rung.title, rung.function, rung.sources, inputs, facts))
    rows += decode_rows(inputs, facts)
    families = list(peers.sixteen_bit(q, caches))
    if name == "bf16" and (batch, kv_len) in FLEX_CELLS:
        families += peers.flex(q, caches)
    # they may round more often than we do
    rows += peer_rows(families, 2 * torch.finfo(dtype).eps, ladder=title, **facts)
    rows.append(reading(homes, facts["bytes"], facts["flops"]))
    return ladder_of(title, rows, seconds, sustain=("decode", "decode, PDL"))


def _other_title(batch, kv_len, n_heads, n_kv_heads, head_dim, model):
    return f"decode bf16, {model}: {n_heads}/{n_kv_heads} heads of {head_dim}, batch {batch}, {short(kv_len)}"


def _other(batch, kv_len, n_heads, n_kv_heads, head_dim, model, seconds):
    """The best rung beside the peers, in the shape of another model."""
    empty()
    title = _other_title(batch, kv_len, n_heads, n_kv_heads, head_dim, model)
    homes, inputs, facts = problem(torch.bfloat16, batch, kv_len, n_heads, n_kv_heads, head_dim)
    rows = decode_rows(inputs, facts)
    rows += peer_rows(peers.sixteen_bit(*_cold(inputs)), 2 * torch.finfo(torch.bfloat16).eps, ladder=title, **facts)
    return ladder_of(title, [*rows, reading(homes, facts["bytes"], facts["flops"])], seconds)


def _cold(inputs):
    """q, and the list of caches."""
    return inputs[0][0], [cache for _, *cache in inputs]


def problem(dtype, batch, kv_len, n_heads=None, n_kv_heads=None, head_dim=None):
    """Random inputs, all the same, with 1 GB of caches or more in all, and what is asked of a call on them.

    Returns (tensors that each hold one cache whole, [(q, k, v), ...], {"wanted", "bytes", "flops"}).
    """
    n_heads, n_kv_heads, head_dim = n_heads or N_HEADS, n_kv_heads or N_KV_HEADS, head_dim or HEAD_DIM
    cache = torch.randn(2, batch, kv_len, n_kv_heads, head_dim, device=DEVICE, dtype=dtype)
    q = torch.randn(batch, n_heads, head_dim, device=DEVICE, dtype=dtype)
    moved, flops = rungs.work(q, cache[0])
    homes = cuda_timing.cold_copies(cache)
    facts = {"wanted": truth(q, *cache), "bytes": moved, "flops": flops}
    return homes, [(q, home[0], home[1]) for home in homes], facts


def truth(q, k, v):
    """What decode attention must give, in float64: one KV head of one sequence at a time, for want of room."""
    out, group = torch.empty(q.shape, dtype=torch.float64, device=q.device), q.shape[1] // k.shape[2]
    for b in range(len(q)):
        for h in range(k.shape[2]):
            heads = slice(h * group, (h + 1) * group)
            scores = q[b, heads].double() @ k[b, :, h].double().T * q.shape[2] ** -0.5
            out[b, heads] = torch.softmax(scores, dim=1) @ v[b, :, h].double()
    return out


def decode_rows(inputs, facts, title="decode"):
    """The best rung on a 16-bit cache, plain and under programmatic dependent launch."""
    rows = [_rung_row(title, decoding.decode, DECODE, inputs, facts)]
    return [*rows, _rung_row(f"{title}, PDL", _dependent, DECODE, inputs, facts)]


def _dependent(q, k, v, *, out=None):
    return decoding.decode(q, k, v, out=out, pdl=True)


def _rung_row(title, function, sources, inputs, facts):
    q = inputs[0][0]
    verdict = checked(function, ref.attention.decode_attention, decode_arrays, (q.dtype,) * 3)
    about = {"verdict": verdict, "sources": sources, "tolerance": TOLERANCE[q.dtype]}
    return our_row(title, function, inputs, q, **about, **facts)


def _fast_enough(title, rung, inputs):
    """Whether one call takes SLOW at most; if not, say that the rung is left out."""
    for _ in range(2):  # the first compiles
        wait()
        begin = time.perf_counter()
        rung.function(*inputs)
        wait()
        taken = time.perf_counter() - begin
    if taken > SLOW:
        print(f"{title}: {rung.title} takes {1e3 * taken:.0f} ms: it is left out")
    return taken <= SLOW


def _splits_title(kv_len):
    return f"splits at {short(kv_len)}"


def _splits(kv_len, counts, seconds):
    """The rung `split`, by how many blocks share the tokens of a head; batch 1, bf16."""
    empty()
    homes, inputs, facts = problem(torch.bfloat16, 1, kv_len)
    (rung,) = (rung for rung in rungs.RUNGS if rung.name == "split")
    rows = []
    for count in counts:
        row = _rung_row(f"{count} split{'s' * (count > 1)}", rung.function, rung.sources, inputs, facts)
        row.calls = [functools.partial(call, splits=count) for call in row.calls]
        rows.append(row)
    return ladder_of(_splits_title(kv_len), [*rows, reading(homes, facts["bytes"], facts["flops"])], seconds)
