"""kernels.attention.decode on a card: right on hostile, long, wide and huge caches, in graphs, in chains of dependent
launches whose q and newest token come late, and the same bits every time."""

import math

import pytest
import torch
from guarded_tensors import FENCE, between, fences_stand

from kernels import attention
from kernels.attention import decoding

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")

ALLOWED = {torch.float16: 1e-3, torch.bfloat16: 4e-3}  # by the norm
# batch, kv_len, n_heads, n_kv_heads, head_dim
SHAPES = [(1, n, 32, 8, 128) for n in (1, 15, 16, 17, 127, 1009, 4096, 4097, 33333)]
SHAPES += [(1, 5003, 5, 1, 96), (3, 701, 16, 1, 64), (2, 997, 64, 1, 128), (2, 1501, 34, 2, 64), (5, 313, 7, 7, 128)]
SHAPES += [(2, 999, 32, 2, 256), (4, 555, 6, 2, 16), (3, 800, 9, 3, 80), (17, 2049, 32, 8, 128), (256, 77, 32, 8, 128)]
SHAPES += [
    (64, 1021, 32, 8, 64),
    (67, 509, 28, 4, 64),
    (3, 2049, 96, 8, 128),
    (4, 1777, 71, 1, 128),
    (2, 4001, 71, 1, 64),
]
SHAPES += [(1, 60000, 32, 32, 64), (40, 1023, 32, 8, 128), (3, 1, 71, 1, 64), (130, 3, 12, 1, 128), (264, 67, 3, 1, 64)]
LATE = [(1, 1), (1, 16), (2, 17), (1, 200), (1, 4096), (4, 1000), (1, 40000), (16, 1000), (256, 70)]  # batch, kv_len


def problem(batch, kv_len, n_heads, n_kv_heads, head_dim, dtype=torch.bfloat16):
    """q, k and v between NaNs, and out full of NaN between fences."""
    shapes = (batch, n_heads, head_dim), *2 * [(batch, kv_len, n_kv_heads, head_dim)]
    q, k, v = (between(torch.randn(shape, device="cuda").to(dtype)) for shape in shapes)
    out = between(torch.full(shapes[0], torch.nan, dtype=dtype, device="cuda"), FENCE)
    torch.cuda.synchronize()  # a dependent launch may read the cache at once
    return q, k, v, out


def wanted(q, k, v, lens=None):
    """In float64, 65,536 tokens at a time."""
    batch, n_heads, head_dim = q.shape
    n_kv_heads, piece = k.shape[2], 1 << 16
    heads = q.double().view(batch, n_kv_heads, -1, head_dim) * head_dim**-0.5
    right = torch.empty_like(heads)
    for b in range(batch):
        length = k.shape[1] if lens is None else int(lens[b])
        scores = [torch.einsum("hgd,lhd->hgl", heads[b], part.double()) for part in k[b, :length].split(piece)]
        weights = torch.cat(scores, -1).softmax(-1).split(piece, -1)
        parts = v[b, :length].split(piece)
        right[b] = sum(torch.einsum("hgl,lhd->hgd", w, part.double()) for w, part in zip(weights, parts))
    return right.view(q.shape)


def close(out, *args):
    right = wanted(*args)
    error = float((out.double() - right).norm() / right.norm())
    assert error <= ALLOWED[out.dtype], error


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_right_on_hostile_shapes(dtype, pdl):
    for shape in SHAPES:
        q, k, v, out = problem(*shape, dtype)
        assert attention.decode(q, k, v, out=out, pdl=pdl) is out
        close(out, q, k, v)
        assert fences_stand(out), shape


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_right_with_a_whole_row_for_each_block(dtype, pdl):
    """Whatever the plan says: groups of 1, 4, 7, 16, 17 and 64, fewer rows than multiprocessors, and more."""
    shapes = [(16, n, 32, 8, 128) for n in (1, 17, 4096, 5003)] + [(1, 3001, 7, 1, 80), (2, 701, 16, 1, 256)]
    for shape in [*shapes, (5, 313, 3, 3, 64), (1, 1009, 64, 1, 128), (2, 501, 34, 2, 16), (20, 999, 32, 8, 128)]:
        q, k, v, out = problem(*shape, dtype)
        for chosen in ({}, {"warps": 4}, {"warps": 2, "tile": 32, "shares": 5}, {"warps": 4, "stages": 1}):
            chosen = {"whole": True, **chosen}
            decoding._launch(q, k, v, shape[4] ** -0.5, None, out.fill_(torch.nan), pdl, chosen)
            close(out, q, k, v)
            assert fences_stand(out), shape


def test_a_mean_of_the_largest_values_is_finite():
    """As on the SIMT machine: weights that float16 rounds up by 0.04 % must be summed as they are rounded."""
    for batch, chosen in ((1, {}), (16, {"whole": True}), (16, {"whole": False})):
        q, k, v, out = problem(batch, 4096, 32, 8, 128, torch.float16)
        q.zero_(), k.zero_(), v.fill_(65504.0)
        q[..., 0], k[:, torch.arange(4096, device="cuda") % 16 > 0, :, 0] = 1.0, 1.0
        decoding._launch(q, k, v, math.log(0.5 + 0.3 / 1024), None, out, False, chosen)
        assert (out == 65504).all()


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
@pytest.mark.parametrize("batch, kv_len", [(1, 4096), (3, 300), (40, 1500), (256, 500)])
def test_lengths_of_their_own(batch, kv_len, pdl):
    q, k, v, out = problem(batch, kv_len, 32, 8, 128)
    lens = torch.randint(1, kv_len + 1, (batch,), dtype=torch.int32)
    lens[-1] = 1
    for b, length in enumerate(lens.tolist()):
        k[b, length:], v[b, length:] = torch.nan, torch.inf
    kv_lens = lens.cuda()
    torch.cuda.synchronize()
    close(attention.decode(q, k, v, kv_lens=kv_lens, out=out, pdl=pdl), q, k, v, lens)
    assert fences_stand(out)


def test_lengths_that_are_none_are_clamped():
    q, k, v, out = problem(4, 100, 8, 2, 64, torch.float16)
    k[1], v[1], k[3], v[3] = torch.nan, torch.nan, torch.nan, torch.nan
    lens = torch.tensor([100, 0, 1 << 30, -5], dtype=torch.int32, device="cuda")
    attention.decode(q, k, v, kv_lens=lens, out=out)
    assert (out[1] == 0).all() and (out[3] == 0).all()
    close(out[[0, 2]], q[[0, 2]], k[[0, 2]], v[[0, 2]])
    assert (attention.decode(q, k, v, kv_lens=lens * 0) == 0).all()


@pytest.mark.parametrize("kv_len", [1 << 20, 1_000_003])
def test_a_million_tokens(kv_len):
    q, k, v, out = problem(1, kv_len, 16, 2, 128)
    q *= 3  # else all weights are alike
    torch.cuda.synchronize()
    close(attention.decode(q, k, v, out=out), q, k, v)


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_more_than_two_to_the_31_elements(dtype):
    """In one sequence, and in a batch: what counts lies at the far end."""
    if torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("needs 14 GB of free memory on the card")
    tokens = (1 << 21) + 4096 + 37
    k, v = (torch.empty(1, tokens, 8, 128, dtype=dtype, device="cuda").normal_() for _ in range(2))
    q = torch.randn(1, 32, 128, device="cuda").to(dtype)
    k[0, -300:] *= 3
    torch.cuda.synchronize()
    close(attention.decode(q, k, v), q, k, v)
    batch = k[:, : (1 << 21) + 4096].view(-1, 2048, 8, 128)
    q = torch.randn(len(batch), 32, 128, device="cuda").to(dtype)
    torch.cuda.synchronize()
    out, last = attention.decode(q, batch, batch), slice(len(batch) - 3, None)
    close(out[last], q[last], batch[last], batch[last])


@pytest.mark.parametrize(
    "chosen",
    [dict(warps=8, side=1), dict(warps=4, side=2, shares=1000), dict(warps=1), dict(shares=3), dict(warps=8, tile=32)],
    ids=str,
)
def test_right_however_it_is_shared_out(chosen):
    for shape in ((3, 5001, 32, 8, 128), (2, 700, 20, 4, 64)):
        for lens in (None, torch.tensor([650, 3, 700][: shape[0]], dtype=torch.int32, device="cuda")):
            q, k, v, out = problem(*shape)
            decoding._launch(q, k, v, shape[4] ** -0.5, lens, out, False, chosen)
            close(out, q, k, v, lens)


def test_fifty_runs_give_the_same_bits():
    for batch, kv_len in ((1, 4096), (1, 70001), (16, 1000)):
        q, k, v, _ = problem(batch, kv_len, 32, 8, 128)
        lens = torch.full((batch,), kv_len - 5, dtype=torch.int32, device="cuda")
        for kv_lens in (None, lens):
            first = attention.decode(q, k, v, kv_lens=kv_lens)
            for n in range(50):
                # the scratch memory that the next call is given held NaN, and its neighbours are busy
                del_me = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(3)]
                del del_me
                assert torch.equal(first, attention.decode(q, k, v, kv_lens=kv_lens, pdl=n % 2 == 1))


def test_calls_of_other_shapes_take_over_the_scratch_memory():
    """A call that starts early is given the scratch memory that the merge ahead of it may still be reading."""
    shapes = (1, 4096, 32, 8, 128), (16, 300, 32, 8, 128), (1, 70, 64, 1, 128), (3, 700, 9, 3, 80)
    caches = [problem(*shape)[:3] for shape in shapes]
    right = [attention.decode(*cache) for cache in caches]
    torch.cuda.synchronize()
    for n in range(16):  # every mixture of plain and dependent calls
        for _ in range(5):
            found = [attention.decode(*cache, pdl=bool(n >> i & 1)) for i, cache in enumerate(caches)]
            assert all(torch.equal(a, b) for a, b in zip(right, found)), n


def test_a_graph_follows_its_inputs():
    q, k, v, out = problem(2, 3000, 32, 8, 128)
    lens = torch.full((2,), 3000, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the first call in this shape: code is loaded during the capture
        attention.decode(q, k, v, kv_lens=lens, out=out)
    for length in (3000, 17, 1234):
        q.normal_(), k.normal_(), v.normal_(), out.fill_(torch.nan), lens.fill_(length)
        torch.cuda.synchronize()
        graph.replay()
        close(out, q, k, v, lens)


def test_on_the_current_stream_and_on_several():
    q, k, v, _ = problem(1, 5000, 32, 8, 128)
    right, streams = attention.decode(q, k, v), [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for n in range(40):
        with torch.cuda.stream(streams[n % 4]):
            mine = torch.zeros_like(q).copy_(q)  # just before, on the same stream
            found.append(attention.decode(mine, k, v, pdl=True).clone())
    torch.cuda.synchronize()
    assert all(torch.equal(right, one) for one in found)


# Chains of dependent launches: what one of them writes is q, or the newest token of k or v, of one of the next.


class Chain:
    """Calls that hand their results on: that of number n is the newest key of n + 1, the newest value of n + 2 and the
    query of n + 3, in turns. Heads are not grouped, so that a result has the shape of a token."""

    CALLS = 24

    def __init__(self, batch, kv_len, lens):
        heads, dim = 8, 128
        self.start = [torch.randn(batch, heads, dim, device="cuda").bfloat16() for _ in range(self.CALLS)]
        self.caches = [torch.randn(2, batch, kv_len, heads, dim, device="cuda").bfloat16() for _ in range(self.CALLS)]
        newest = kv_len - 1 if lens is None else int(lens[0]) - 1
        self.kept = [cache[:, :, newest].clone() for cache in self.caches]
        self.at, self.lens, self.batch = newest, lens, batch
        self.q = [q.clone() for q in self.start]
        self.out = [torch.empty_like(q) for q in self.start]

    def reset(self):
        """NaN wherever a later call's query or newest token is still to come: read too early, it shows."""
        for n, (q, start, cache, kept) in enumerate(zip(self.q, self.start, self.caches, self.kept)):
            cache[:, :, self.at] = kept
            q.copy_(start)
            if n:
                self.target(n - 1).fill_(torch.nan)

    def target(self, n):
        """Where result n goes: a (batch, heads, dim) tensor of call n + 1."""
        if self.batch > 1 or n % 3 == 2:
            return self.q[n + 1]
        return self.caches[n + 1][n % 3, :, self.at]

    def run(self, pdl, wait):
        for n in range(self.CALLS):
            out = self.target(n) if n + 1 < self.CALLS else self.out[n]
            k, v = self.caches[n]
            attention.decode(self.q[n], k, v, 1.0, kv_lens=self.lens, out=out, pdl=pdl)
            if wait:
                torch.cuda.synchronize()

    def results(self):
        return [self.target(n).clone() if n + 1 < self.CALLS else self.out[n].clone() for n in range(self.CALLS)]


@pytest.mark.parametrize("own_lengths", [False, True], ids=["kv_len", "kv_lens"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["as called", "in a graph"])
def test_a_chain_of_dependent_launches(in_graph, own_lengths):
    for batch, kv_len in LATE:
        lens = torch.full((batch,), max(1, kv_len - 3), dtype=torch.int32, device="cuda") if own_lengths else None
        chain = Chain(batch, kv_len, lens)
        chain.reset()
        chain.run(pdl=False, wait=True)
        right = chain.results()
        assert not any(one.isnan().any() for one in right)
        chain.reset()
        torch.cuda.synchronize()
        if in_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                chain.run(pdl=True, wait=False)
        for _ in range(10):
            chain.reset()
            torch.cuda.synchronize()
            graph.replay() if in_graph else chain.run(pdl=True, wait=False)
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(right, chain.results())), (batch, kv_len)


def test_the_card_and_the_machine_agree():
    for dtype in ALLOWED:
        q, k, v, _ = problem(2, 150, 8, 2, 64, dtype)
        card, machine = attention.decode(q, k, v), attention.decode(q.cpu(), k.cpu(), v.cpu())
        assert (card.cpu().double() - machine.double()).norm() <= ALLOWED[dtype] / 2 * machine.double().norm()


def test_devices_must_agree():
    q, k, v, out = problem(1, 20, 8, 2, 64)
    with pytest.raises(ValueError, match="decode: k must be on cuda:0, like the first tensor, got one on cpu"):
        attention.decode(q, k.cpu(), v, out=out)
    with pytest.raises(ValueError, match="decode: kv_lens must be on cuda:0, like the first tensor, got one on cpu"):
        attention.decode(q, k, v, kv_lens=torch.ones(1, dtype=torch.int32), out=out)
    assert out.isnan().all()
