"""kernels.latent on a card: every rung right on hostile lengths, heads and dtypes, in pages and in one piece; in a
graph whose lengths and tables change; in chains of dependent launches; on two streams at a time; and the same bits
every time, but for in_place. (hopper.cu alone: test_latent_hopper_gpu.py.)"""

import math

import pytest
import torch

from kernels import latent
from tests.latent_cases import caches, error, wanted

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")
HALF, BFLOAT = torch.float16, torch.bfloat16
WITHIN = {HALF: 1.5e-3, BFLOAT: 1e-2}
SCALE = 192**-0.5
RUNGS = {name: getattr(latent, name) for name in ("decode", "split", "last", "in_place")}
LENGTHS = {
    "one token": [1],
    "4K": [4096],
    "33001": [33001],
    "ragged": [0, 65, 4097, 0, 12, 30000, 1, 640],
    "as many as shares": [2048] * 66,
    "many": [*range(1, 400, 3), 0],
}


def problem(lens, n_heads, dtype, paged, seed=0):
    """(q, cache or LatentPages, kv_lens, what decode must give)"""
    tensors = caches(lens, dtype, "cuda", seed, paged)
    torch.manual_seed(seed + 1)  # not what the cache is made with
    q = (3 * torch.randn(len(lens), n_heads, 576)).to("cuda", dtype)
    cache = latent.LatentPages(*tensors[:2]) if paged else tensors[0]
    torch.cuda.synchronize()  # a dependent launch may read at once
    return q, cache, tensors[2], wanted(q, *tensors, SCALE)


def call(run, q, cache, kv_lens, **how):
    out = torch.full((*q.shape[:2], 512), math.nan, dtype=q.dtype, device="cuda")
    torch.cuda.synchronize()
    return run(q, cache, kv_lens=kv_lens, scale=SCALE, out=out, **how)


@pytest.mark.parametrize("lens", LENGTHS)
@pytest.mark.parametrize("rung", RUNGS)
def test_right(rung, lens):
    for n, n_heads in enumerate((128, 1, 16, 17, 33, 65, 100)):
        dtype, paged = (HALF, BFLOAT)[n % 2], n % 3 == 0
        *given, want = problem(LENGTHS[lens], n_heads, dtype, paged)
        for pdl in (False, True):
            assert error(call(RUNGS[rung], *given, pdl=pdl), want) < WITHIN[dtype], (n_heads, pdl)


@pytest.mark.parametrize("rung", ["decode", "split", "last"])
def test_the_same_bits_every_time(rung):
    for lens in ([4096] * 3, LENGTHS["ragged"]):
        *given, _ = problem(lens, 128, BFLOAT, True)
        first = call(RUNGS[rung], *given)
        for _ in range(20):
            assert torch.equal(call(RUNGS[rung], *given, pdl=True), first)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_graph_follows_lengths_and_tables(rung):
    q, cache, kv_lens, _ = problem([5000] * 5, 128, BFLOAT, True)
    cache.pages.nan_to_num_(0.5)
    lens, out = [5000, 640, 64, 4000, 1], torch.empty(5, 128, 512, dtype=BFLOAT, device="cuda")
    how = {"kv_lens": kv_lens, "scale": SCALE, "out": out, "pdl": True}
    RUNGS[rung](q, cache, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        RUNGS[rung](q, cache, **how)
    for step in range(6):
        lens = lens[1:] + [lens[0] - 63 if step % 2 else 0]
        kv_lens.copy_(torch.tensor(lens).clamp(0, 5000))
        cache.table.copy_(cache.table.flip(0))
        out.fill_(math.nan)
        graph.replay()
        assert error(out, wanted(q, *cache, kv_lens, SCALE)) < WITHIN[BFLOAT]


@pytest.mark.parametrize("rung", RUNGS)
def test_a_chain_of_dependent_launches(rung):
    """Each call's queries are what the one before gave: the latent part of them."""
    q, cache, kv_lens, _ = problem([700, 4000, 33], 64, HALF, True)
    for _ in range(10):
        chain, want = [q.clone() for _ in range(9)], q.clone()
        torch.cuda.synchronize()
        for before, after in zip(chain, chain[1:]):
            after[..., :512] = RUNGS[rung](before, cache, kv_lens=kv_lens, scale=SCALE, pdl=True)
        for _ in range(8):
            want[..., :512] = latent.split(want, cache, kv_lens=kv_lens, scale=SCALE)
        assert error(chain[-1][..., :512].contiguous(), want[..., :512].contiguous().double()) < 5e-3


@pytest.mark.parametrize("rung", ["split", "last", "decode"])
def test_two_streams_at_a_time(rung):
    """Counters are each stream's own. (in_place needs the whole card.)"""
    given = [problem([3000, 500, 40], 128, BFLOAT, True, seed) for seed in (0, 1)]
    streams = [torch.cuda.Stream() for _ in given]
    for _ in range(20):
        outs = []
        for stream, (*one, _) in zip(streams, given):
            with torch.cuda.stream(stream):
                outs.append(RUNGS[rung](one[0], one[1], kv_lens=one[2], scale=SCALE))
        torch.cuda.synchronize()
        for out, (*_, want) in zip(outs, given):
            assert error(out, want) < WITHIN[BFLOAT]


def test_lengths_and_pages_out_of_range_are_clamped():
    q, cache, kv_lens, _ = problem([70, 400], 16, HALF, True)
    pages, table = cache.pages.nan_to_num_(), cache.table.clone()
    table[0] = 10**9
    lens = torch.tensor([10**6, -5], dtype=torch.int32, device="cuda")
    clamped, full = table.clamp(max=len(pages) - 1), torch.tensor([table.shape[1] * 64, 0])
    for name, run in RUNGS.items():
        found = call(run, q, latent.LatentPages(pages, table), lens)
        assert error(found, wanted(q, pages, clamped, full, SCALE)) < WITHIN[HALF], name
