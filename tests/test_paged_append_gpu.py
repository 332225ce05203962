"""kernels/paged/append.cu on a card: hostile lengths and pages, and a captured graph that follows them."""

import math

import pytest
import torch

from kernels import paged
from kernels.paged.appending import append_tensors
from tests.paged_append_cases import append_error, attend, error, pool, shared_error, tokens_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
HALF, BFLOAT = torch.float16, torch.bfloat16
WITHIN = {HALF: 1.5e-3, BFLOAT: 1e-2}
EVERYONE = list(range(128))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("team, dtype", [(1, HALF), (2, BFLOAT)])
@pytest.mark.parametrize(
    ("lens", "new", "group", "n_kv_heads", "head_dim", "page_size", "chosen"),
    [
        ([130, 7, 129, 300, 1], 1, 4, 2, 64, 8, {}),
        ([1, 2, 127, 128, 129, 4097], 3, 7, 2, 128, 16, {}),
        ([130, 0, None, 3], 7, 4, 8, 128, 16, {}),
        ([513, 1025, 512], 512, 4, 8, 128, 16, {}),
        ([5000], 511, 4, 8, 128, 64, {}),
        ([777] * 5 + [3001], 129, 1, 16, 128, 32, {}),
        ([100, 2000, 31], 63, 71, 1, 64, 16, {}),
        ([9001, 12], 17, 4, 8, 64, 8, {"rows": 64}),
        ([40000], 16, 4, 8, 128, 16, {"rows": 64}),
        ([5] * 7 + [1100], 1, 1, 1, 64, 64, {"rows": 64, "blocks": 2}),  # eight segments, the last a first part
        ([40000], 512, 4, 8, 128, 16, {}),
        ([4608] * 64, 33, 8, 4, 128, 16, {}),
    ],
)
def test_append(lens, new, group, n_kv_heads, head_dim, page_size, chosen, dtype, whole, team):
    sizes = new, group, n_kv_heads, head_dim, page_size, dtype
    assert append_error(lens, *sizes, device="cuda", whole=whole, team=team, **chosen) < WITHIN[dtype]


@pytest.mark.parametrize("rows, team", [(64, 1), (128, 1), (128, 2)])
@pytest.mark.parametrize(
    "items",
    [
        [(0, 0, 5000, EVERYONE)],
        [(0, 0, 4096, EVERYONE), (0, 4096, 512, EVERYONE[::2]), (1, 64, 1000, [5, 3, 127]), (1, 0, 64, [9] * 40)],
        [(0, 0, 8, [1]), (1, 1088, 900, EVERYONE[7:50])],
        [(0, 0, 128, EVERYONE[:70]), (1, 0, 1200, [3])],
    ],
)
def test_shared(items, rows, team):
    for dtype in (HALF, BFLOAT):
        sizes = len(EVERYONE), 4, 8, 128, 16, dtype
        assert shared_error([5000, 1200], items, *sizes, device="cuda", rows=rows, team=team) < WITHIN[dtype]


def test_a_graph_follows_prefixes():
    """decode with prefixes, captured once: replayed with longer requests, other groups, and fewer requests. It gives
    what decode without prefixes gives."""
    cache = paged.PagedCache(2000, 16, 8, 128, dtype=BFLOAT, device="cuda", max_requests=80)
    cache.k_pages.normal_(), cache.v_pages.normal_()
    root, lone = cache.new(), cache.new()
    cache.reserve([root], 3000), cache.reserve([lone], 77)
    some = [cache.fork(root) for _ in range(40)]
    cache.reserve(some[:9], 200)
    more = [cache.fork(some[2]) for _ in range(20)]
    batch = [lone, *some, *more]
    prefixes, q = cache.shared_prefixes(batch), torch.randn(61, 32, 128, device="cuda").to(BFLOAT)
    out = torch.empty_like(q)
    for pdl in (False, True):
        paged.decode(q, cache, batch, out=out, prefixes=prefixes, pdl=pdl)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            paged.decode(q, cache, batch, out=out, prefixes=prefixes, pdl=pdl)
        for step in range(4):
            if step == 1:
                cache.reserve(batch, 1)
            if step == 2:
                prefixes.update(batch[::-1])
            if step == 3:
                prefixes.update([None, *batch[1:30], None, *batch[31:]])
            slots = torch.tensor(prefixes.slots, dtype=torch.int32, device="cuda")
            want = paged.decode(q, cache, slots)
            out.fill_(math.nan)
            graph.replay()
            assert error(out, want.double()) < WITHIN[BFLOAT]
        prefixes.update(batch)


@pytest.mark.parametrize("whole", [True, False])
def test_a_graph_follows_lengths_and_tables(whole):
    """Captured once; replayed with other lengths, other pages and other slots. NaN lies wherever no token does."""
    n, new, n_kv_heads, head_dim, page_size = 6, 40, 2, 128, 16
    tensors = pool([3000] * n, n_kv_heads, head_dim, page_size, BFLOAT, "cuda", 0)
    q = torch.randn(n, new, 4 * n_kv_heads, head_dim, device="cuda").to(BFLOAT)
    out = torch.empty_like(q)
    chosen = {"whole": whole}
    append_tensors(q, *tensors, out=out, chosen=chosen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append_tensors(q, *tensors, out=out, chosen=chosen)
    for seed, lens in enumerate(([40, 2999, None, 129, 0, 1000], [3000, 128, 41, None, 700, 2048]), 1):
        other = pool([3000] * n, n_kv_heads, head_dim, page_size, BFLOAT, "cuda", seed)
        for mine, new_one in zip(tensors, other):
            mine.copy_(new_one)
        k, v, table, all_lens, slots = tensors
        for i, length in enumerate(lens):
            all_lens[slots[i]] = length or 0
            page, at = divmod(length or 0, page_size)
            tail = table[slots[i], page:-1].long()
            if len(tail):
                k[tail[0], :, at:] = v[tail[0], :, at:] = math.nan
                k[tail[1:]] = v[tail[1:]] = math.nan
            if length is None:
                slots[i] = -1
        out.fill_(math.nan)
        graph.replay()
        for i, length in enumerate(lens):
            want = torch.zeros_like(q[i], dtype=torch.float64)
            if length:
                limits = length - new + 1 + torch.arange(new, device="cuda")
                values, _, sums = attend(q[i], *(tokens_of(p, table, slots[i], length) for p in (k, v)), limits)
                want = torch.where(limits[:, None, None] > 0, values / sums[..., None].clamp_min(1e-300), 0.0)
            assert error(out[i], want) < WITHIN[BFLOAT]


def test_the_same_bits_again():
    k, v, table, lens, slots = pool([3001, 700, 5000], 8, 128, 16, HALF, "cuda", 3)
    q = torch.randn(3, 300, 32, 128, device="cuda").to(HALF)
    first = [append_tensors(q, k, v, table, lens, slots, chosen={"whole": whole}) for whole in (True, False)]
    for _ in range(20):
        for whole, want in zip((True, False), first):
            assert torch.equal(append_tensors(q, k, v, table, lens, slots, chosen={"whole": whole}), want)
