"""Chapter 08's ladder on a card: right on hostile, on long and on large shapes, in graphs, the same bits every time."""

import pytest
import torch
from guarded_tensors import FENCE, between, fences_stand

from kernels.attention import rungs
from kernels.attention.arguments import DTYPES

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")

NAMES = [rung.name for rung in rungs.RUNGS]
ALLOWED = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
# batch, kv_len, n_heads, n_kv_heads, head_dim
SHAPES = [(1, 1, 8, 8, 128), (3, 17, 20, 4, 128), (2, 1009, 34, 2, 40), (5, 4099, 16, 4, 40)]


def run(name, *args, **options):
    return getattr(rungs, name)(*args, **options)


def problem(batch, kv_len, n_heads, n_kv_heads, head_dim, dtype):
    """q, k and v between NaNs, and out full of NaN between fences, off multiples of 16 bytes."""
    shapes = (batch, n_heads, head_dim), *2 * [(batch, kv_len, n_kv_heads, head_dim)]
    q, k, v = (between(torch.randn(shape, device="cuda").to(dtype), skip=1) for shape in shapes)
    return q, k, v, between(torch.full(shapes[0], torch.nan, dtype=dtype, device="cuda"), FENCE, skip=1)


def reference(q, k, v, kv_lens=None):
    """In float64, one KV head of one sequence at a time."""
    group, out = q.shape[1] // k.shape[2], torch.empty(q.shape, dtype=torch.float64, device="cuda")
    for b in range(len(q)):
        length = k.shape[1] if kv_lens is None else int(kv_lens[b])
        for g in range(k.shape[2]):
            heads = slice(g * group, (g + 1) * group)
            scores = q[b, heads].double() @ k[b, :length, g].double().T * q.shape[2] ** -0.5
            out[b, heads] = scores.softmax(-1) @ v[b, :length, g].double()
    return out


def close(out, wanted):
    error = float((out.double() - wanted).norm() / wanted.norm())
    assert error <= ALLOWED[out.dtype], error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_right_on_hostile_shapes(name, dtype):
    for shape in SHAPES:
        q, k, v, out = problem(*shape, dtype)
        assert run(name, q, k, v, out=out) is out
        close(out, reference(q, k, v))
        assert fences_stand(out)


@pytest.mark.parametrize("name", NAMES)
def test_lengths_of_their_own(name):
    """And lengths that are none: they are brought to what there is, and no token gives zeros."""
    q, k, v, out = problem(6, 1009, 16, 4, 40, torch.bfloat16)
    kv_lens = torch.tensor([1, 1009, 1000, 127, 0, -5], dtype=torch.int32, device="cuda")
    for b, length in enumerate(kv_lens.tolist()):
        k[b, max(0, length) :], v[b, max(0, length) :] = torch.nan, torch.inf
    run(name, q, k, v, kv_lens=kv_lens, out=out)
    close(out[:4], reference(q[:4], k, v, kv_lens))
    assert not out[4:].any()
    k[1], v[1], kv_lens[1] = 1, 2, 1 << 30
    assert (run(name, q, k, v, kv_lens=kv_lens, out=out)[1] == 2).all()


@pytest.mark.parametrize("name", NAMES)
def test_long_and_wide(name):
    for shape in ((1, 131_101, 8, 2, 128), (256, 300, 16, 4, 128)):
        q, k, v, out = problem(*shape, torch.float16)
        close(run(name, q, k, v, out=out), reference(q, k, v))


@pytest.mark.parametrize("name", NAMES)
def test_more_than_two_to_the_31_elements(name):
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free memory on the card")
    shape = 1, (1 << 21) + 5, 8, 128
    k, v = (torch.empty(shape, dtype=torch.float16, device="cuda").normal_() for _ in range(2))
    q = torch.randn(1, 8, 128, device="cuda").half()
    k[0, -1] = q[0]  # the last token weighs a lot
    k[0, -1] *= 2
    out = torch.full_like(q, torch.nan)
    close(run(name, q, k, v, out=out), reference(q, k, v))


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_follows_its_inputs(name):
    q, k, v, out = problem(2, 1009, 16, 4, 128, torch.bfloat16)
    kv_lens = torch.tensor([1009, 3], dtype=torch.int32, device="cuda")
    run(name, q, k, v, kv_lens=kv_lens, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(name, q, k, v, kv_lens=kv_lens, out=out)
    for length in (1, 500, 1009):
        for x in (q, k, v):
            x.normal_()
        kv_lens[1] = length
        out.fill_(torch.nan)
        graph.replay()
        close(out, reference(q, k, v, kv_lens))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_every_time(name):
    q, k, v, out = problem(2, 5003, 16, 4, 128, torch.bfloat16)
    first = run(name, q, k, v).clone()
    for _ in range(30):
        full = torch.full((1 << 22,), torch.nan, device="cuda")  # what the workspace may find
        del full
        assert torch.equal(run(name, q, k, v, out=out.fill_(torch.nan)), first)


@pytest.mark.parametrize("name", NAMES)
def test_the_card_and_the_machine_agree(name):
    q, k, v, out = problem(2, 130, 8, 4, 40, torch.float32)
    here, there = run(name, q, k, v, out=out).cpu(), run(name, q.cpu(), k.cpu(), v.cpu())
    assert (here - there).abs().max() <= 1e-5
