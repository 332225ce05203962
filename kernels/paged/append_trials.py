"""What append.cu owes to each of its ideas, on a card: `python -m kernels.paged.append_trials [check|time] [peers]`."""

import functools
import math
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.paged import appending
from kernels.paged.appending import append_attention, prefix_attention
from lab import cuda, cuda_timing
from lab.source import inlined
from lab.tensors import DTYPES

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


def reference(q, k, v, limits):
    """q (rows, n_heads, head_dim), row i sees limits[i] tokens -> values, not divided, and (maximum in log 2, sum)."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("rhd,thd->rht", q, k) * (q.shape[-1] ** -0.5 * math.log2(math.e))
    s = s.masked_fill(torch.arange(len(k), device=q.device) >= limits[:, None, None], -math.inf)
    m = s.amax(-1).clamp_min(-1e30)
    p = torch.exp2(s - m[..., None])
    return torch.einsum("rht,thd->rhd", p, v), m, p.sum(-1)


def check_append(lens, new, n_heads, n_kv_heads, head_dim, page_size, dtype, **chosen):
    k, v, table, all_lens, slots = pool([max(n, 1) for n in lens], n_kv_heads, head_dim, page_size, dtype)
    for i, n in enumerate(lens):
        if n <= 0:
            all_lens[slots[i]], slots[i] = 0, (slots[i] if n == 0 else -1)
    q = torch.randn(len(lens), new, n_heads, head_dim, device=DEVICE).to(dtype)
    out = torch.full_like(q, math.nan)
    append_attention(q, k, v, table, all_lens, slots, out=out, chosen=chosen)
    error = 0.0
    for i, n in enumerate(lens):
        want = torch.zeros_like(q[i], dtype=torch.float64)
        if n > 0:
            limits = n - new + 1 + torch.arange(new, device=DEVICE)
            o, _, l = reference(q[i], gathered(k, table, slots[i], n), gathered(v, table, slots[i], n), limits)
            want = torch.where(limits[:, None, None] > 0, o / l.clamp_min(1e-300)[..., None], 0.0)
        error = max(error, float((out[i].double() - want).norm() / want.norm().clamp_min(1e-30)) if n > 0 else float(out[i].abs().max()))
    return error


def check_prefix(n_heads, n_kv_heads, head_dim, page_size, dtype, items, lens, n_q, **chosen):
    """items: (request, first, tokens, rows)"""
    k, v, table, all_lens, slots = pool(lens, n_kv_heads, head_dim, page_size, dtype)
    q = torch.randn(n_q, n_heads, head_dim, device=DEVICE).to(dtype)
    listed, rows = [], []
    for request, first, tokens, mine in items:
        listed.append([int(slots[request]), first, tokens, len(rows), len(mine)])
        rows += mine
    as_int = functools.partial(torch.tensor, dtype=torch.int32, device=DEVICE)
    o, ml = prefix_attention(q, k, v, table, all_lens, as_int(listed), as_int(rows), chosen=chosen)
    error, at = 0.0, 0
    for request, first, tokens, mine in items:
        n = lens[request]
        kk, vv = (gathered(p, table, slots[request], n)[first : first + tokens] for p in (k, v))
        want, m, l = reference(q[mine], kk, vv, torch.full((len(mine),), len(kk), device=DEVICE))
        got, found = o[at : at + len(mine)].double(), ml[at : at + len(mine)].double()
        w = torch.exp2(found[..., 0] - m)
        error = max(error, float((got * (w / l)[..., None] - want / l[..., None]).norm() / (want / l[..., None]).norm()),
                    float((found[..., 1] * w / l - 1).abs().max()))  # fmt: skip
        at += len(mine)
    return error


def check():
    half, bf = torch.float16, torch.bfloat16
    line = {"whole": False}
    worst = {}
    for dtype, limit in ((half, 2e-3), (bf, 1e-2)):
        cases = [
            ([130, 7, 129, 300, 1], 1, 8, 2, 64, 8, {}), ([1, 2, 127, 128, 129, 4097], 3, 14, 2, 128, 16, line),
            ([130, 0, -1, 3], 7, 32, 8, 128, 16, {}), ([513, 1025, 512], 512, 32, 8, 128, 16, line),
            ([5000], 511, 32, 8, 128, 64, line), ([5000], 511, 32, 8, 128, 64, {}),
            ([777] * 5 + [3001], 129, 16, 16, 128, 32, line), ([100, 2000, 31], 63, 71, 1, 64, 16, line),
            ([9001], 17, 32, 8, 128, 16, line | {"rows": 64}), ([9001, 12], 17, 32, 8, 64, 8, {"rows": 64}),
            ([40000], 512, 32, 8, 128, 16, line), ([4608] * 8, 512, 32, 8, 128, 16, line),
            ([4608] * 3, 512, 32, 8, 128, 16, {"turns": False}),
        ]  # fmt: skip
        for *shape, chosen in cases:
            error = check_append(*shape, dtype, **chosen)
            worst["append", str(dtype)] = max(worst.get(("append", str(dtype)), 0), error)
            if not error < limit:
                print("WRONG append", shape if len(shape[0]) < 9 else shape[1:], dtype, chosen, error)
        everyone = list(range(128))
        many = [(0, 0, 4096, everyone), (0, 4096, 512, everyone[::2]), (1, 64, 1000, [5, 3, 127]), (1, 0, 64, [9] * 40)]
        for rows in (64, 128):
            for team in (1, 2, 4):
                for items in (many, [(0, 0, 5000, everyone)], [(0, 0, 8, [1]), (1, 1088, 900, everyone[7:50])]):
                    error = check_prefix(32, 8, 128, 16, dtype, items, [5000, 1200], 128, rows=rows, team=team)
                    worst["prefix", str(dtype)] = max(worst.get(("prefix", str(dtype)), 0), error)
                    if not error < limit:
                        print("WRONG prefix", rows, team, len(items), dtype, error)
    print("largest relative errors:", {k: f"{e:.1e}" for k, e in worst.items()})


def time_of(call):
    return float(np.median(cuda_timing.Graph([call]).turn())) * 1e6


CHANGES = {
    "": (),
    "L2 keeps": (("NO_POLICY = 0x1000000000000000", "NO_POLICY = 0x14F0000000000000"),),
    "never rescaled (wrong)": (("RESCALE_ABOVE = 8;", "RESCALE_ABOVE = 3e38f;"),),
    "always rescaled": (("rises = __any_sync(~0u, rises);", "rises = true;"),),
    "registers 232, 40": (("give_registers<96>", "give_registers<40>"), ("take_registers<208>", "take_registers<232>")),
    "no softmax (wrong)": (("        const bool rises = sums.online_softmax(scores, to_log2);\n", "        const bool rises = false;\n"),),
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
    for name, us in rows:
        print(f"  {name:44s} {us:9.1f} us {flops / us / 1e6:7.0f} TFLOP/s")


def time_append(n_requests, context, new, peers, variants, n_heads=32, n_kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16):
    lens = [context + new] * n_requests
    k, v, table, all_lens, slots = pool(lens, n_kv_heads, head_dim, page_size, dtype)
    q = torch.randn(n_requests, new, n_heads, head_dim, device=DEVICE).to(dtype)
    out = torch.empty_like(q)
    flops = 4 * head_dim * n_heads * n_requests * (new * context + new * (new + 1) // 2)
    rows = []
    for name, chosen in variants.items():
        call = functools.partial(append_attention, q, k, v, table, all_lens, slots, out=out, chosen=chosen)
        rows.append((name, time_of(call)))
    if peers:
        rows += list(time_peers(q, k, v, table, all_lens, slots, lens, context))
    show(f"append {new} on {n_requests} x {context}, head_dim {head_dim}", rows, flops)


def time_peers(q, k, v, table, all_lens, slots, lens, context):
    """SDPA on contiguous tensors: all queries see all keys, or, where there is no context, causal; fa3, if installed."""
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
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE), "HND", backend="fa3")
        page_size = k.shape[2]
        count = -(-lens[0] // page_size)
        indices = torch.cat([table[s, :count] for s in slots.tolist()])
        starts = functools.partial(torch.arange, n + 1, dtype=torch.int32, device=DEVICE)
        wrapper.plan(starts() * new, starts() * count, indices, torch.full((n,), (lens[0] - 1) % page_size + 1, dtype=torch.int32, device=DEVICE),
                     n_heads, k.shape[1], head_dim, page_size, causal=True, q_data_type=q.dtype)  # fmt: skip
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
    rows = []
    for name, chosen in variants.items():
        call = functools.partial(prefix_attention, q, k, v, table, all_lens, items, listed, out=out, chosen=chosen)
        rows.append((name, time_of(call)))
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
    asked = sys.argv[1:] or ["check", "time", "peers"]
    print(torch.cuda.get_device_name())
    if "check" in asked:
        check()
    if "time" in asked:
        times("peers" in asked)
