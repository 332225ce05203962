"""Pages of 8 and 4 bits on a card: right on hostile lengths, pages, groups and plans, the codes of kernels.kv_cache
however tokens come, in graphs, in chains of dependent launches, and the same bits every time."""

import numpy as np
import pytest
import torch
from guarded_tensors import fences_stand
from paged_codes import CodeProblem, kept
from paged_problems import ALLOWED

from kernels import paged
from kernels.paged import code_decoding, code_pages

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")

HEADS = [(32, 8), (28, 4), (16, 1), (8, 8), (71, 1)]
ALL = (8, "fp8", 4)


def problem(bits, lens, page_size, n_heads, n_kv_heads, head_dim, **how):
    how = {"dtype": torch.bfloat16} | how
    return CodeProblem(bits, lens, page_size, n_heads, n_kv_heads, head_dim, device="cuda", **how)


def call(p, **how):
    run = paged.append_attention if p.q.ndim == 4 else paged.decode
    return run(p.q, p.cache, p.requests, out=p.out.fill_(torch.nan), **how)


def lengths(page_size, count=24, longest=3000):
    """0, 1, one past a page and a tile, primes, and some at random."""
    draw = np.random.default_rng(page_size)
    return [0, 1, page_size, page_size + 1, 15, 16, 17, 33, 127, 1009, *draw.integers(0, longest, count).tolist()]


@pytest.mark.parametrize("bits", ALL)
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_right_for_all_pages(page_size, bits):
    for n, (n_heads, n_kv_heads) in enumerate(HEADS):
        dtype, pieces = list(ALLOWED)[n % 2], (10_000, 37)[n % 2]
        sizes = lengths(page_size), page_size, n_heads, n_kv_heads, (128, 64, 80)[n % 3]
        p = problem(bits, *sizes, dtype=dtype, pieces=pieces)
        for request, said in zip(p.requests[:12], p.said):
            pages = p.cache.pool.pages[request.slot]
            found = code_pages.dequantized(p.cache, pages, p.cache.pool.lens[request.slot])
            assert all(torch.equal(one.double(), wanted) for one, wanted in zip(found, said[:, 0]))
        for how in ({}, {"pdl": True}, {"invariant": True, "pdl": True}):
            p.close(call(p, **how))
            assert fences_stand(p.out), (n_heads, n_kv_heads, how)


@pytest.mark.parametrize("new", [1, 2, 4, 7, 16, 33])
def test_right_for_several_new_tokens(new):
    for n, (n_heads, n_kv_heads) in enumerate(HEADS[:4]):
        p = problem(ALL[n % 3], lengths(16, 10, 900), 16, n_heads, n_kv_heads, (128, 64)[n % 2], new=new)
        for how in ({}, {"pdl": True}, {"invariant": True}):
            p.close(call(p, **how))
            assert fences_stand(p.out), (n_heads, n_kv_heads, how)


@pytest.mark.parametrize("bits", ALL)
def test_one_long_request_and_many_short_ones(bits):
    for lens in ([100_003] + [1009] * 40, [70_001], [1] * 300, [0, 0, 5], [4096] * 16, [700] * 64):
        p = problem(bits, lens, 16, 32, 8, 128)
        for how in ({}, {"pdl": True}, {"invariant": True, "pdl": True}):
            p.close(call(p, **how))
            assert fences_stand(p.out)


@pytest.mark.parametrize(
    "chosen",
    [dict(warps=8, team=8), dict(warps=8, team=1), dict(warps=8, team=2, shares=1000), dict(warps=1), dict(shares=3),
     dict(warps=4, team=4, tile=16, stages=3)],
    ids=str,
)  # fmt: skip
def test_right_however_it_is_shared_out(chosen):
    for bits, page_size in ((8, 16), ("fp8", 64), (4, 32)):
        p = problem(bits, [5001, 3, 0, 700, 2049], page_size, 32, 8, 128)
        for invariant in (False, True):
            how = 1, False, invariant
            code_decoding.launch(p.q, p.cache, p.slots, 128**-0.5, p.out.fill_(torch.nan), *how, chosen=chosen)
            p.close(p.out)


@pytest.mark.parametrize("bits", ALL)
def test_appends_forks_and_frees(bits):
    """A server's life: tokens come, requests fork, end, and others get their pages, which held NaN."""
    draw, p = np.random.default_rng(3), problem(bits, [40], 16, 32, 8, 128)
    rng = torch.Generator("cuda").manual_seed(3)
    how = {"dtype": torch.bfloat16, "device": "cuda", "bits": bits}
    pool = paged.PagedCache(600, 16, 8, 128, max_requests=9, max_len=2000, **how)
    pool.k_pages.fill_(255), pool.v_pages.fill_(255), pool.scales.fill_(torch.nan)
    p.cache, p.requests, p.said = pool, [], []
    for step in range(60):
        if step % 6 == 0 or not p.requests:
            p.requests.append(pool.new()), p.said.append(torch.empty(2, 1, 0, 8, 128, device="cuda").double())
        if step % 7 == 3:
            at = int(draw.integers(len(p.requests)))
            p.requests.append(pool.fork(p.requests[at])), p.said.append(p.said[at])
        while len(p.requests) > 6:
            at = int(draw.integers(len(p.requests)))
            for page in pool.pool.pages[p.requests[at].slot]:
                if pool.pool.shared[page] == 1:  # nobody else's: let it hold NaN
                    pool.k_pages[page], pool.v_pages[page], pool.scales[page] = 255, 255, torch.nan
            pool.free(p.requests.pop(at)), p.said.pop(at)
        some = [p.requests[n] for n in draw.permutation(len(p.requests))[: draw.integers(1, 5)]]
        x = torch.randn(2, len(some), int(draw.integers(1, 40)), 8, 128, generator=rng, device="cuda").bfloat16()
        pool.append(some, *x)
        for n, one in enumerate(some):
            at = p.requests.index(one)
            p.said[at] = torch.cat([p.said[at], torch.stack([kept(of[n : n + 1], bits) for of in x])], dim=2)
        p.q = torch.randn(len(p.requests), 32, 128, generator=rng, device="cuda").bfloat16()
        p.close(paged.decode(p.q, pool, p.requests, pdl=step % 2 == 1))


@pytest.mark.parametrize("bits", ALL)
def test_a_graph_follows_tables_and_lengths(bits):
    """A captured step: new tokens are quantised and written, and looked back from."""
    lens = [40, 170, 0, 1000]
    p = problem(bits, [n + 30 for n in lens], 16, 32, 8, 128)
    cache = paged.PagedCache(200, 16, 8, 128, dtype=torch.bfloat16, device="cuda", bits=bits, max_requests=8)
    p.cache, p.requests = cache, [cache.new() for _ in lens]
    x = torch.randn(2, 1, 1000, 8, 128, device="cuda").bfloat16()
    for n, (request, tokens) in enumerate(zip(p.requests, lens)):
        p.said[n] = torch.stack([kept(of[:, :tokens], bits) for of in x])
        if tokens:
            cache.append([request], *x[:, :, :tokens].contiguous())
    slots = torch.full((6,), -1, dtype=torch.int32, device="cuda")  # room for six
    slots[:4] = cache.slots(p.requests)
    q, k, v = (torch.zeros(6, *shape, device="cuda").bfloat16() for shape in ((32, 128), (1, 8, 128), (1, 8, 128)))
    out, graph = torch.zeros_like(q), torch.cuda.CUDAGraph()

    def step():
        cache.write(slots, k, v, pdl=True)
        paged.decode(q, cache, slots, out=out, pdl=True)

    cache.reserve(p.requests, 1)
    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    for turn in range(20):
        if turn:
            cache.reserve(p.requests, 1)
        for tensor in (q, k, v):
            tensor.normal_()
        out.fill_(torch.nan)
        graph.replay()
        for n in range(4):
            new = torch.stack([kept(of[n : n + 1], bits) for of in (k, v)])
            p.said[n] = torch.cat([p.said[n], new], dim=2)
        p.q = q[:4]
        p.close(out[:4])
        assert (out[4:] == 0).all()


def test_invariant_results_do_not_hang_on_the_others():
    lens = [1, 130, 7000, 3000, 16, 0, 260, 40_000, 1009]
    for bits, new in ((8, None), (4, 3)):
        p = problem(bits, lens, 16, 32, 8, 128, new=new)
        run = paged.append_attention if new else paged.decode
        found = call(p, invariant=True).clone()
        for n, request in enumerate(p.requests):
            for pdl in (False, True):
                one = run(p.q[n : n + 1], p.cache, [request], invariant=True, pdl=pdl)
                assert torch.equal(one[0], found[n]), (lens[n], pdl)


def test_fifty_runs_give_the_same_bits():
    p = problem("fp8", [4096] * 5 + [30_000, 17], 16, 32, 8, 128)
    first = call(p).clone()
    for n in range(50):
        del_me = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(3)]  # scratch memory held NaN
        del del_me
        assert torch.equal(first, paged.decode(p.q, p.cache, p.requests, pdl=n % 2 == 1))


def chain(p, codes, pdl):
    """Each call's result is the next one's query, and its newest key and value."""
    cache, slots, q, found = p.cache, p.slots, p.q.clone(), []
    for there, was in zip((cache.k_pages, cache.v_pages, cache.scales), codes):
        there.copy_(was)
    torch.cuda.synchronize()
    for _ in range(12):
        cache.write(slots, q[:, None], q[:, None], pdl=pdl)
        q = paged.decode(q, cache, slots, 1.0, pdl=pdl)
        if not pdl:
            torch.cuda.synchronize()
        found.append(q)
    torch.cuda.synchronize()
    return torch.stack(found)


@pytest.mark.parametrize("bits", ALL)
def test_a_chain_of_dependent_launches(bits):
    p = problem(bits, [300, 17, 4096], 16, 8, 8, 128)
    codes = [t.clone() for t in (p.cache.k_pages, p.cache.v_pages, p.cache.scales)]
    right = chain(p, codes, False)
    assert right.isfinite().all()
    for _ in range(10):
        assert torch.equal(right, chain(p, codes, True))
