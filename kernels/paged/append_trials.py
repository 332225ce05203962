"""What append.cu owes to each of its ideas, on a card: `python -m kernels.paged.append_trials [alone]`."""

import functools
import math
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.paged import appending
from kernels.paged.appending import append_tensors, prefix_tensors
from lab import cuda, cuda_timing
from lab.source import inlined

DEVICE = "cuda"
PAGES = "kernels/paged/append.cu"


def pool(lens, n_kv_heads, head_dim, page_size, dtype=torch.bfloat16, seed=0):
    """Pages in random order, NaN where no token is; (k_pages, v_pages, table, lens, slots)."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    need = [-(-n // page_size) for n in lens]
    n_pages = sum(need) + 5
    pages = torch.randperm(n_pages, generator=generator, device=DEVICE).to(torch.int32)
    k = torch.randn(n_pages, n_kv_heads, page_size, head_dim, generator=generator, device=DEVICE).to(dtype)
    v = torch.randn(n_pages, n_kv_heads, page_size, head_dim, generator=generator, device=DEVICE).to(dtype)
    slots = torch.randperm(len(lens) + 2, generator=generator, device=DEVICE)[: len(lens)].to(torch.int32)
    table = torch.full((len(lens) + 2, max(need) + 1), 2**30, dtype=torch.int32, device=DEVICE)
    all_lens = torch.full((len(lens) + 2,), 9, dtype=torch.int32, device=DEVICE)
    used, at = torch.zeros(n_pages, dtype=torch.bool, device=DEVICE), 0
    for slot, n, count in zip(slots.tolist(), lens, need):
        mine = pages[at : at + count]
        at += count
        table[slot, :count], all_lens[slot] = mine, n
        used[mine.long()] = True
        if n % page_size:
            k[int(mine[-1]), :, n % page_size :] = v[int(mine[-1]), :, n % page_size :] = math.nan
    k[~used] = v[~used] = math.nan
    return k, v, table, all_lens, slots


def gathered(pages, table, slot, n):
    """(n, n_kv_heads, head_dim) of a request."""
    page_size = pages.shape[2]
    mine = pages[table[slot, : -(-n // page_size)].long()]
    return mine.transpose(1, 2).reshape(-1, pages.shape[1], pages.shape[3])[:n]


def time_of(call):
    return float(np.median(cuda_timing.Graph([call]).turn())) * 1e6


CHANGES = {
    "": (),
    "L2 keeps": (("NO_POLICY = 0x1000000000000000", "NO_POLICY = 0x14F0000000000000"),),
    "never rescaled (wrong)": (("RESCALE_ABOVE = 8;", "RESCALE_ABOVE = 1e30f;"),),
    "always rescaled": (("rises = __any_sync(~0u, rises);", "rises = true;"),),
    "registers 232, 40": (("MULTIPLY_REGISTERS = 208", "MULTIPLY_REGISTERS = 232"),),
    "no softmax (wrong)": (("const bool rises = sums.online_softmax(scores, to_log2);", "const bool rises = false;"),),
}  # fmt: skip


@functools.cache
def kernels(dtype, head_dim, group, page_size, use, rows, stages, turns, extra):
    shape = ", ".join(map(str, (dtype, head_dim, group, page_size, use, rows, stages, str(turns).lower())))
    text = inlined(PAGES)
    for old, new in CHANGES[extra or ""]:
        if text.count(old) != 1:
            raise RuntimeError(f"{old!r} is there {text.count(old)} times")
        text = text.replace(old, new)
    append = cuda.compile(text, (f"-DSHAPE=AppendShape<{shape}>",), name="append.cu", arch="sm_90a").append
    return append, cuda.load(appending.HERE / "append_merge.cu", (f"-DSHAPE=AppendShape<{shape}>",)).merge


def show(title, rows, flops):
    print(f"\n{title}  ({flops / 1e9:.1f} GFLOP)")
    for name, us, *far in rows:
        print(
            f"  {name:44s} {us:9.1f} us {flops / us / 1e6:7.0f} TFLOP/s",
            *(f"  far from the first: {d:.1e}" for d in far),
        )


def distance(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def time_append(
    n_requests,
    context,
    new,
    peers,
    variants,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    page_size=16,
    dtype=torch.bfloat16,
):
    lens = [context + new] * n_requests
    k, v, table, all_lens, slots = pool(lens, n_kv_heads, head_dim, page_size, dtype)
    q = torch.randn(n_requests, new, n_heads, head_dim, device=DEVICE).to(dtype)
    out = torch.empty_like(q)
    flops = 4 * head_dim * n_heads * n_requests * (new * context + new * (new + 1) // 2)
    rows, first = [], None
    for name, chosen in variants.items():
        call = functools.partial(append_tensors, q, k, v, table, all_lens, slots, out=out, chosen=chosen)
        out.fill_(math.nan)
        rows.append((name, time_of(call), distance(out, first) if rows else 0.0))
        first = first if len(rows) > 1 else out.clone()
    if peers:
        rows += list(time_peers(q, k, v, table, all_lens, slots, lens, context))
    show(f"append {new} on {n_requests} x {context}, head_dim {head_dim}", rows, flops)


def time_peers(q, k, v, table, all_lens, slots, lens, context):
    """SDPA on contiguous tensors, causal where there is no context, else all queries see all keys; and FlashInfer."""
    n, new, n_heads, head_dim = q.shape
    kk, vv = (torch.stack([gathered(p, table, s, lens[0]) for s in slots.tolist()]).transpose(1, 2) for p in (k, v))
    qq = q.transpose(1, 2)
    causal = context == 0
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):

        def call(backend=backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(qq, kk, vv, is_causal=causal, enable_gqa=True)

        try:
            yield f"SDPA {name}{'' if causal else ', no mask'}", time_of(call)
        except Exception as error:  # noqa: BLE001
            print(f"  SDPA {name}: {str(error)[:100]}")
    try:
        import flashinfer
    except ImportError:
        return
    try:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE), "HND", backend="fa3"
        )
        page_size = k.shape[2]
        count = -(-lens[0] // page_size)
        indices = torch.cat([table[s, :count] for s in slots.tolist()])
        starts = functools.partial(torch.arange, n + 1, dtype=torch.int32, device=DEVICE)
        last = torch.full((n,), (lens[0] - 1) % page_size + 1, dtype=torch.int32, device=DEVICE)
        sizes = n_heads, k.shape[1], head_dim, page_size
        wrapper.plan(starts() * new, starts() * count, indices, last, *sizes, causal=True, q_data_type=q.dtype)
        flat = q.view(-1, n_heads, head_dim)
        yield "FlashInfer fa3", time_of(lambda: wrapper.run(flat, (k, v)))
    except Exception as error:  # noqa: BLE001
        print(f"  FlashInfer: {str(error)[:200]}")


def time_prefix(n_rows, tokens, variants, n_heads=32, n_kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16):
    k, v, table, all_lens, slots = pool([tokens], n_kv_heads, head_dim, page_size, dtype)
    q = torch.randn(n_rows, n_heads, head_dim, device=DEVICE).to(dtype)
    as_int = functools.partial(torch.tensor, dtype=torch.int32, device=DEVICE)
    items, listed = as_int([[int(slots[0]), 0, tokens, 0, n_rows]]), as_int(list(range(n_rows)))
    out = (torch.empty(n_rows, n_heads, head_dim, device=DEVICE), torch.empty(n_rows, n_heads, 2, device=DEVICE))
    rows, first = [], None
    for name, chosen in variants.items():
        call = functools.partial(prefix_tensors, q, k, v, table, all_lens, items, listed, out=out, chosen=chosen)
        out[0].fill_(math.nan)
        rows.append((name, time_of(call), distance(out[0] / out[1][..., 1:], first) if rows else 0.0))
        first = first if len(rows) > 1 else out[0] / out[1][..., 1:]
    show(f"prefix {tokens} shared by {n_rows}", rows, 4 * head_dim * n_heads * n_rows * tokens)


def times(peers):
    appending._kernels = kernels
    whole, line = {"whole": True}, {"whole": False}
    basic = {"whole, turns": whole, "whole, no turns": whole | {"turns": False}, "line, turns": line,
             "line, no turns": line | {"turns": False}}  # fmt: skip
    full = basic | {f"whole, {what}": whole | {"extra": what} for what in CHANGES if what}
    time_append(1, 0, 512, peers, basic | {"whole, rows 64": whole | {"rows": 64}})
    time_append(1, 4096, 512, peers, basic)
    time_append(1, 32768, 512, peers, full)
    time_append(8, 4096, 512, peers, full)
    time_append(1, 0, 8192, peers, basic)
    time_append(1, 32768, 512, peers, basic, head_dim=64)
    time_append(1, 32768, 512, False, {"pages of 64": whole, "line": line}, page_size=64)
    time_append(1, 32768, 512, False, {"pages of 8": whole, "line": line}, page_size=8)
    time_append(16, 8192, 16, False, {"whole": whole, "line": line, "line, rows 64": line | {"rows": 64}})
    for n, teams in ((16, (1,)), (64, (1, 2)), (128, (1, 2, 4))):
        variants = {f"rows 128, teams of {t}": {"team": t} for t in teams}
        variants |= {f"rows 64, teams of {t}": {"team": t, "rows": 64} for t in teams}
        variants |= {f"rows 128, teams of {teams[-1]}, no turns": {"team": teams[-1], "turns": False}}
        time_prefix(n, 32768, variants)


if __name__ == "__main__":
    print(torch.cuda.get_device_name())
    times("alone" not in sys.argv)
