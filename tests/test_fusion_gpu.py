"""Chapter 05's kernels on a GPU: real shapes, programmatic dependent launch, CUDA graphs."""

import pytest
import torch
import torch.nn.functional as F

from kernels import fusion

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DTYPES = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
SIZES = [(4096, 1024, 14336), (2048, 512, 5632), (1000, 40, 1003), (8192, 1024, 3592), (33, 5, 70)]


def layer(hidden, kv_rows, ffn, dtype):
    def matrix(rows, cols):
        return (torch.randn(rows, cols, device="cuda") * cols**-0.5).to(dtype)

    def norm():
        return (1 + torch.randn(hidden, device="cuda") / 4).to(dtype)

    first = norm(), matrix(hidden, hidden), matrix(kv_rows, hidden), matrix(kv_rows, hidden), matrix(hidden, hidden)
    return fusion.DecoderLayer(*first, norm(), matrix(ffn, hidden), matrix(ffn, hidden), matrix(hidden, ffn))


def truth(it, x):
    """(y, qkv) in float64, by PyTorch on the card: the reference's steps."""

    def norm(x, weight):
        return x / (x.square().mean() + it.eps).sqrt() * weight.double()

    n = norm(x.double(), it.attention_norm)
    qkv = torch.cat([W.double() @ n for W in (it.Wq, it.Wk, it.Wv)])
    h = x.double() + it.Wo.double() @ qkv[: len(x)]
    n = norm(h, it.ffn_norm)
    return h + it.W_down.double() @ (F.silu(it.W_gate.double() @ n) * (it.W_up.double() @ n)), qkv


def close(out, wanted, dtype, times=1):
    error = torch.linalg.vector_norm(out.double() - wanted) / torch.linalg.vector_norm(wanted)
    assert error <= times * DTYPES[dtype]


def steps(it):
    found = [it.unfused, it.fused]
    return [*found, it.one_launch] if len(it.y) % 8 == 0 and len(it.a) % 8 == 0 else found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_layer_in_all_its_steps(sizes, dtype):
    it = layer(*sizes, dtype)
    for step in steps(it):
        for pdl in (False, True):
            x = torch.randn(sizes[0], device="cuda").to(dtype)
            it.y.fill_(torch.nan), it.qkv.fill_(torch.nan)
            step(x, pdl=pdl)
            y, qkv = truth(it, x)
            close(it.y, y, dtype, times=3)
            close(it.qkv, qkv, dtype)


@pytest.mark.parametrize("name", ["unfused", "fused", "one_launch"])
@pytest.mark.parametrize("pdl", [False, True])
def test_a_graph_of_layers_follows_its_input(name, pdl):
    """Three layers in a graph. x changes between replays, so that a kernel that reads too early gets old numbers."""
    layers = [layer(512, 128, 1536, torch.float16) for _ in range(3)]
    x = torch.randn(512, device="cuda").half()

    def chain():
        y = x
        for it in layers:
            y = getattr(it, name)(y, pdl=pdl)
        return y

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(20):
        x.copy_(torch.randn(512, device="cuda"))
        graph.replay()
        wanted = x
        for it in layers:
            wanted, _ = truth(it, wanted)
        close(y, wanted, torch.float16, times=5)


@pytest.mark.parametrize("name", ["fused", "one_launch"])
def test_the_same_input_gives_the_same_bits(name):
    it = layer(4096, 1024, 14336, torch.bfloat16)
    x = torch.randn(4096, device="cuda").bfloat16()
    first = getattr(it, name)(x).clone()
    for _ in range(50):
        assert torch.equal(getattr(it, name)(x, pdl=True), first)


def test_all_rows_of_a_product_longer_than_one_round():
    W = torch.randn(100003, 64, device="cuda").half()
    x, residual = torch.randn(64, device="cuda").half(), torch.randn(100003, device="cuda").half()
    wanted = residual.double() + W.double() @ x.double()
    close(fusion.gemv_residual(W, x, residual), wanted, torch.float16)


def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GB of free GPU memory")
    rows, cols = (1 << 31) // 16384 + 5, 16384
    W = torch.empty(rows, cols, device="cuda", dtype=torch.float16).normal_()
    x, residual = torch.randn(cols, device="cuda").half() / 128, torch.zeros(rows, device="cuda").half()
    out = fusion.gemv_residual(W, x, residual)
    close(out[-64:], W[-64:].double() @ x.double(), torch.float16)
    close(out[:64], W[:64].double() @ x.double(), torch.float16)
