"""The operators on a card: PyTorch's own checks, and a model that torch.compile takes whole, in a graph of CUDA's."""

import pytest
import test_operators as on_machine
import torch
from torch.library import opcheck

from kernels import attention, fusion, gemv, kv_cache, lowbit, matmul, ssd

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")

OPS = torch.ops.matmul_to_mamba
HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, KV_LEN, TOKENS = 1024, 2048, 8, 2, 128, 513, 200
WHOLE = "gemv", "lowbit_gemv", "attention_decode", "kv_cache_decode", "matmul_linear", "ssd_fused"


def rand(*shape, scale=1.0, dtype=torch.bfloat16):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def layer(tokens=TOKENS):
    x, dt = rand(1, tokens, 4, 64), rand(1, tokens, 4).abs()
    return x, dt, -rand(4, dtype=torch.float32).abs(), rand(1, tokens, 1, 128), rand(1, tokens, 1, 128)


ELSEWHERE = {"attention_split_triton", *(name for name in on_machine.CASES if "collective" in name)}


@pytest.mark.parametrize("name", sorted(on_machine.CASES.keys() - ELSEWHERE))
def test_pytorchs_own_checks_pass(name):
    given = layer() if name == "ssd_fused" else on_machine.CASES[name]()
    given = [value.cuda() if isinstance(value, torch.Tensor) else value for value in given]
    quick = {} if name in WHOLE else {"test_utils": ("test_schema", "test_faketensor")}
    opcheck(getattr(OPS, name).default, given, **quick)


class Model(torch.nn.Module):
    """A step of something like a language model; weights are parameters, as in one that was trained."""

    def __init__(self):
        super().__init__()
        self.W_q = torch.nn.Parameter(rand(HEADS * HEAD_DIM, HIDDEN, scale=HIDDEN**-0.5))
        self.norm = torch.nn.Parameter(rand(HIDDEN))
        self.up = lowbit.quantize(rand(FFN, HIDDEN, scale=HIDDEN**-0.5), 4, 128)
        self.down = torch.nn.Parameter(rand(HIDDEN, FFN, scale=FFN**-0.5))
        self.scan = layer()

    def forward(self, x, k, v, cache_k, cache_v, tokens):
        q = gemv.gemv(self.W_q, fusion.rmsnorm(x, self.norm)).view(1, HEADS, HEAD_DIM)
        mixed = attention.decode(q, k, v) + kv_cache.decode(q, cache_k, cache_v)
        up = torch.nn.functional.silu(lowbit.gemv(self.up, mixed.view(-1)))
        y = gemv.gemv(self.down, up, out=torch.empty_like(x)) + x
        wide = matmul.linear(tokens, self.down)
        scanned, states = ssd.mamba_chunk_scan_combined(*self.scan, 64, return_final_states=True)
        return y, wide * 2, scanned + 1, states * 0.5


def given(lie="keys"):
    k, v = (rand(1, KV_LEN, KV_HEADS, HEAD_DIM) for _ in range(2))
    caches = kv_cache.quantize(k, 8, role=lie), kv_cache.quantize(v, 4)
    return rand(HIDDEN), k, v, *caches, rand(160, FFN)


def near(found, wanted):
    return all(
        float((a.double() - b.double()).norm()) <= 0.02 * float(b.double().norm()) for a, b in zip(found, wanted)
    )


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_model_compiles_whole_with_the_same_results(mode):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, (x, *others) = Model(), given()
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with torch.no_grad():
        for _ in range(5):  # the first run warms up, before anything was called from Python; the next is captured
            x = rand(HIDDEN)
            found = [result.clone() for result in compiled(x, *others)]
            assert near(found, model(x, *others))
    counters = torch._dynamo.utils.counters
    assert counters["inductor"]["cudagraph_skips"] == 0, dict(counters["inductor"])
    assert not counters["graph_break"]


def test_a_matrix_learns_when_compiled():
    torch._dynamo.reset()
    W, x = rand(64, 128, dtype=torch.float32).requires_grad_(), rand(128, dtype=torch.float32).requires_grad_()
    wanted = torch.autograd.grad((W @ x).sin().sum(), (W, x))
    compiled = torch.compile(lambda: gemv.gemv(W, x).sin().sum(), fullgraph=True)
    for y in (compiled(), gemv.gemv(W, x).sin().sum()):
        for found, other in zip(torch.autograd.grad(y, (W, x)), wanted):
            assert torch.allclose(found, other, rtol=1e-3, atol=1e-3)


def test_what_is_wrong_is_named_while_a_model_is_compiled():
    torch._dynamo.reset()
    compiled = torch.compile(lambda W, x: gemv.gemv(W, x), fullgraph=True)
    assert compiled(rand(8, 16), rand(16)).shape == (8,)
    with pytest.raises(Exception, match="gemv: x must be on cuda:0, like the first tensor"):
        compiled(rand(8, 16), rand(16).cpu())
