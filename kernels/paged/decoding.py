"""decode and append_attention over pages, by decode.cu and merge.cu: as fast as their pages can be read.

Two launches. The second starts early and waits for the first, whether pdl is asked for or not.
"""

import functools
import math
from pathlib import Path

import torch

from kernels.paged import appending, code_decoding
from kernels.paged.arguments import expect_attention
from kernels.paged.cache import PagedCache
from kernels.paged.plan import MOST_ROWS, card, options, plan
from kernels.paged.variants import Variant, kernel
from lab import cuda
from lab.prepared import Calls, scratch

HERE = Path(__file__).resolve().parent
SOURCES = tuple(f"kernels/paged/{name}" for name in ("decode.cu", "merge.cu", "plan.py")) + (
    "kernels/attention/plan.py",
)
LOG2_E = math.log2(math.e)
DECODES, APPENDS = Calls("paged.decode"), Calls("paged.append_attention")


def decode(q, cache, requests, scale=None, *, out=None, pdl=False, invariant=False, prefixes=None, variant=None):
    """softmax(scale · q Kᵀ) V for one token of each request, which is in the cache already.

    q          (n_requests, n_heads, head_dim), like the cache in dtype and device; n_heads is a multiple of its
               n_kv_heads
    cache      a PagedCache. With fewer than 16 bits neither prefixes nor a variant are offered
    requests   a sequence of its requests; or their slots, int32 (n_requests,) on the device, -1 for nobody
    scale      head_dim**-0.5 unless given
    out        a tensor like q to write into, apart from all others
    pdl        True: may start before the kernel ahead of it in the stream ends (programmatic dependent launch), and,
               where that was launched so too, before the one ahead of that, and so on. They may write q, out and the
               newest token of each request; never older tokens, slots, tables or lengths, which are read at once
    invariant  True: a request's result is the same, bit for bit, whoever else is in the batch, and how many. Its tokens
               are then cut into chunks of 128, or a 128th part of them where that is more, and shares end where chunks
               do: they are less even. Takes 4 · (head_dim + 2) bytes of scratch memory for each head and chunk that the
               requests have room for
    prefixes   what requests share is read once for all of them, on the tensor cores of compute capability 9.0:
               "shared"                 whole pages that they have in common from the front, by forks, are looked for
               [(requests, tokens)]     groups that begin with so many tokens on the same pages; nested ones, too
               Prefixes                 what cache.shared_prefixes(requests) returns: for graphs
               Reads then as many bytes for a group's tokens as for one request. For head_dim 64 or 128 and pages of 8
               tokens or more; else each request reads all, and a warning says why
    variant    a Variant (variants.py): other scores, fewer tokens, turned keys. Compiled in the first call. Its tensors
               are read at once, and no kernel ahead may write them

    A request without tokens, or nobody, gets zeros. Lengths, tables and slots are read by the card: a captured graph
    follows them when it is replayed, for as many requests as it was captured for. On a card they are not looked at
    beforehand: a slot out of range is nobody, a length the nearest that the table has room for, and a page number out
    of the pool stands for one in it.

    Moves 4 · tokens · head_dim bytes for each request and kv head (of codes, bits / 8 a number and 2 a scale), and
    little else. The same from run to run, bit for bit, for one `pdl`; with `invariant` for either. Scores and sums are
    float32; a weight is rounded to the dtype of q, for the sum that divides as for the values (of codes, to float16,
    for the values alone).
    A head whose scores are all -inf gives zeros, as one without tokens.

    TypeError or ValueError names the argument, what was expected and what came; nothing has been written by then.
    """
    slots = slots_of("decode", cache, requests)
    if cache.bits != 16:
        _expect_plain("decode", cache, prefixes, variant)
        return code_decoding.decode(q, cache, slots, scale, out, pdl, invariant)
    pool = cache.k_pages, cache.v_pages, cache.table, cache.lens
    if prefixes is not None:
        if variant is not None:
            raise ValueError("decode: variant must be None with prefixes")
        done = appending.decode_shared(q, cache, requests, scale, out, pdl, invariant, prefixes)
        if done is not None:
            return done
    if variant is not None:
        return _varied("decode", q, pool, slots, scale, out, pdl, invariant, variant)
    return decode_tensors(q, *pool, slots, scale, out=out, pdl=pdl, invariant=invariant)


def append_attention(q, cache, requests, scale=None, *, out=None, pdl=False, invariant=False, variant=None):
    """Causal attention of the `new` newest tokens of each request, whose keys and values are in the cache already.

    q  (n_requests, new, n_heads, head_dim). The i-th of a request's new tokens sees its first length - new + i + 1
       tokens; one that sees none gets zeros. The values of the newest must be finite: an earlier one weighs them by 0

    All else as for `decode`. A row is a new token and a head of those that share a kv head. Up to 64 rows of a kv head,
    as in speculation, keys and values are read once, by decode.cu. More go to append.cu, on the tensor cores of compute
    capability 9.0, for head_dim 64 or 128, pages of 8 tokens or more and `out` at a multiple of 16 bytes, as new ones
    are: 4 · head_dim flops for each query, head and token that it sees. Elsewhere decode.cu reads keys and values once
    for each 64 rows. With fewer bits decode_codes.cu reads codes once for each 16 rows, whatever there is to do: for a
    long prompt much slower than append.cu.
    """
    slots = slots_of("append_attention", cache, requests)
    if cache.bits != 16:
        _expect_plain("append_attention", cache, None, variant)
        return code_decoding.append_attention(q, cache, slots, scale, out, pdl, invariant)
    pool = cache.k_pages, cache.v_pages, cache.table, cache.lens
    if variant is not None:
        return _varied("append_attention", q, pool, slots, scale, out, pdl, invariant, variant)
    return append_tensors(q, *pool, slots, scale, out=out, pdl=pdl, invariant=invariant)


def _expect_plain(where, cache, prefixes, variant):
    """Raise for what is not offered over codes."""
    for name, given in (("prefixes", prefixes), ("variant", variant)):
        if given is not None:
            raise ValueError(
                f"{where}: {name} must be None over a cache with bits={cache.bits!r}: only pages of 16 bits take them"
            )


def _varied(where, q, pool, slots, scale, out, pdl, invariant, variant):
    """Either of them with a variant; nothing is prepared."""
    if type(variant) is not Variant:
        raise TypeError(f"{where}: variant must be a Variant, got {type(variant).__name__}")
    several = where == "append_attention"
    factor, result = expect_attention(where, q, *pool, slots, scale, out, "new" if several else None)
    variant.expect(where, q)
    if several:
        _launch_pieces(q, pool, slots, factor, result, pdl, invariant, variant)
    else:
        launch(q, *pool, slots, factor, result, 1, pdl, invariant, variant=variant)
    return result


def decode_tensors(q, k_pages, v_pages, table, lens, slots, scale=None, *, out=None, pdl=False, invariant=False):
    """decode, given the tensors of a cache."""
    pool = k_pages, v_pages, table, lens
    if (done := DECODES.run((scale, bool(pdl), bool(invariant)), out, q, *pool, slots)) is not None:
        return done
    factor, result = expect_attention("decode", q, *pool, slots, scale, out)
    with DECODES.preparing((scale, bool(pdl), bool(invariant)), (out,), (result,), (q, *pool, slots)):
        launch(q, *pool, slots, factor, result, 1, pdl, invariant)
    return result


def append_tensors(q, k_pages, v_pages, table, lens, slots, scale=None, *, out=None, pdl=False, invariant=False):
    """append_attention, given the tensors of a cache."""
    pool = k_pages, v_pages, table, lens
    if (done := APPENDS.run((scale, bool(pdl), bool(invariant)), out, q, *pool, slots)) is not None:
        return done
    factor, result = expect_attention("append_attention", q, *pool, slots, scale, out, "new")
    if q.shape[1] <= _piece(q, k_pages):
        with APPENDS.preparing((scale, bool(pdl), bool(invariant)), (out,), (result,), (q, *pool, slots)):
            launch(q, *pool, slots, factor, result, q.shape[1], pdl, invariant)
        return result
    if not appending.why_not(q, k_pages, factor, result):
        with APPENDS.preparing((scale, bool(pdl), bool(invariant)), (out,), (result,), (q, *pool, slots)):
            chosen = {"whole": True} if invariant else None  # a tile that is not cut hangs on its own request alone
            appending.launch("APPEND", q, pool, (slots,), factor, result, pdl, chosen)
        return result
    _launch_pieces(q, pool, slots, factor, result, pdl, invariant)
    return result


def _piece(q, k_pages):
    """So many new tokens at once."""
    return max(1, MOST_ROWS // (q.shape[2] // k_pages.shape[1]))


def _launch_pieces(q, pool, slots, factor, result, pdl, invariant, variant=None):
    new, piece = q.shape[1], _piece(q, pool[0])
    if new <= piece:
        launch(q, *pool, slots, factor, result, new, pdl, invariant, variant=variant)
        return
    for begin in range(0, new, piece):
        part = q[:, begin : begin + piece].contiguous()
        into, newer = torch.empty_like(part), new - begin - part.shape[1]
        launch(part, *pool, slots, factor, into, part.shape[1], False, invariant, newer, variant=variant)
        result[:, begin : begin + piece] = into


def counters(q, cache, requests, scale=None, *, check_races=False, invariant=False, **chosen):
    """Run decode (q of three dimensions) or append_attention (of four) on the SIMT machine, on CPU tensors: the reports
    (simt.report) of its two kernels. chosen: what `plan` takes by name."""
    slots, pool = slots_of("counters", cache, requests), (cache.k_pages, cache.v_pages, cache.table, cache.lens)
    if not q.is_cpu:
        raise ValueError(f"counters: q must be on the CPU, got a tensor on {q.device}")
    if cache.bits != 16:
        return code_decoding.counters(q, cache, slots, scale, invariant, check_races, chosen)
    scale, out = expect_attention("counters", q, *pool, slots, scale, None, "new" if q.ndim == 4 else None)
    new = q.shape[1] if q.ndim == 4 else 1
    return launch(q, *pool, slots, scale, out, new, False, invariant, chosen=chosen, check_races=check_races)


def slots_of(where, cache, requests):
    """The slots of these requests, as kernels are told."""
    if type(cache) is not PagedCache:
        raise TypeError(f"{where}: cache must be a PagedCache, got {type(cache).__name__}")
    return requests if isinstance(requests, torch.Tensor) else cache.slots(requests)


def launch(q, k_pages, v_pages, table, lens, slots, scale, out, new, pdl, invariant, newer=0, chosen=None, variant=None,
           **options):  # fmt: skip
    """The two launches, on tensors that were looked at. newer: tokens behind the last one that asks."""
    pdl, invariant = bool(pdl), bool(invariant)
    p, split, merge = _prepared(
        q.shape, k_pages.shape, table.shape[1], q.dtype, q.device, new, pdl, invariant,
        *((variant.text, variant.skips) if variant else ()), **(chosen or {}),
    )  # fmt: skip
    (max_requests, max_pages), (n_pages, _, page_size, _) = table.shape, k_pages.shape
    partial = scratch(q, p.floats, torch.float32)
    sums, n_requests = partial[p.sums_at :], q.shape[0]
    args = (q, k_pages, v_pages, slots, lens, table, partial, sums, n_requests, p.rows, max_requests, max_pages)
    factor = scale if variant and variant.scores else scale * LOG2_E
    args += (n_pages, newer, factor, int(pdl))  # looked at, or made here: unchecked
    if variant:
        args = variant.tensors + args
    first = split.unchecked(p.shares, 32 * p.warps, *args, shared=p.shared, pdl=pdl, **options)
    args = (partial, sums, slots, lens, out, n_requests, p.rows, max_requests, max_pages * page_size, newer, p.shares)
    return first, merge.unchecked(p.merge_blocks, p.threads, *args, pdl=True, **options)


@functools.lru_cache(maxsize=1024)
def _prepared(q_shape, pages_shape, max_pages, dtype, device, new, pdl, invariant, text="", skips=False, **chosen):
    """What all calls with such tensors share: (plan, the two kernels)."""
    (n_requests, *_, n_heads, head_dim), (n_pages, n_kv_heads, page_size, _) = q_shape, pages_shape
    n_rows = n_heads // n_kv_heads * new
    sizes = n_requests, n_rows, n_kv_heads, head_dim, n_pages, page_size, max_pages
    p = plan(*sizes, *card(device), pdl, invariant, **chosen)
    return p, *_kernels(options(dtype, p, page_size, new, invariant), p.stages, p.threads, text, skips)


@functools.cache
def _kernels(options, stages, threads, text="", skips=False):
    """decode.cu and merge.cu, with a variant's text in front of the first, and, if it skips tokens, of both."""
    flags = {"decode": (*options, f"-DRING_STAGES={stages}"), "merge": (*options, f"-DTHREADS={threads}")}
    varied = {"decode": bool(text), "merge": skips}
    return [
        kernel(name, text, flags[name]) if varied[name] else cuda.load(HERE / f"{name}.cu", flags[name])[name]
        for name in flags
    ]
