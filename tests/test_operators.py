"""The kernels as operators of torch.library, on the SIMT machine: what torch.compile and its checks make of them."""

import inspect
import timeit

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from kernels import (
    attention,
    collective,
    fusion,
    gemv,
    kv_cache,
    latent,
    llm,
    lowbit,
    mamba2,
    matmul,
    paged,
    ssd,
    ssd_backward,
)
from kernels.lowbit import fused as lowbit_fused  # operators of its own
from lab import operators, show

ALL = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
OPS = torch.ops.matmul_to_mamba
WANTED = "gemv_naive gemv_warp gemv_wide gemv_vector gemv gemv_rows gemv_ring lowbit_gemv lowbit_digits matmul_linear "
WANTED += "attention_mix_naive attention_mix_split attention_mix_shared attention_decode attention_two_pass "
WANTED += "attention_online attention_split attention_split_triton kv_cache_decode fusion_rmsnorm fusion_add "
WANTED += (
    "fusion_silu_mul fusion_gemv_residual fusion_down_residual fusion_norm_qkv fusion_norm_glu ssd_five ssd_fused "
)
WANTED += "mamba_chunk_scan_combined llm_embed llm_rope_append llm_rope_append_quantized "
WANTED += "llm_greedy llm_attend lowbit_norm_gemv lowbit_norm_glu lowbit_gemv_residual mamba2_conv1d mamba2_conv_step "
WANTED += "mamba2_gated_norm mamba2_add_norm mamba2_norm_in_proj mamba2_norm_out_proj mamba2_state_step "
WANTED += "mamba2_state_step_coded ssd_backward ssd_backward_plain "
WANTED += "ssd_backward_few ssd_backward_fused paged_decode paged_append_attention"
WANTED += " paged_decode_shared latent_decode latent_split latent_last latent_in_place"
WANTED += " collective_all_reduce collective_all_reduce_norm collective_product"


def randn(*shape, dtype=torch.float32, scale=1.0):
    return torch.randn(*shape, generator=GENERATOR).mul_(scale).to(dtype)


assert latent and lowbit_fused and paged and ssd_backward  # they define operators
GENERATOR = torch.Generator().manual_seed(0)


def half(*shape):
    return randn(*shape, dtype=torch.float16)


def caches(kv_len=20):
    k, v = (randn(1, kv_len, 1, 64) for _ in range(2))
    return kv_cache.quantize(k, 8, role="keys"), kv_cache.quantize(v, 4)


def of_cache(cache):
    return cache.packed, cache.scale, f"{cache.bits} {cache.axis} {cache.group} {cache.role}", cache.peak


def of_weight(bits=4, rows=16, cols=256, group=128):
    W = lowbit.quantize(half(rows, cols), bits, group)
    return W.packed, W.factors, W.shape, W.bits, W.group


def layer(dtype=torch.float32, seqlen=19):
    x, dt = randn(1, seqlen, 2, 8, dtype=dtype), randn(1, seqlen, 2).abs().to(dtype)
    return x, dt, -randn(2).abs(), randn(1, seqlen, 1, 16, dtype=dtype), randn(1, seqlen, 1, 16, dtype=dtype)


def state_token():
    return half(1, 2, 8), half(1, 2), -randn(2).abs(), half(1, 1, 16), half(1, 1, 16)


def coded():
    state = mamba2.QuantizedState.of(randn(1, 2, 8, 16))
    return state.codes, state.scale


def lengths(*n):
    return torch.tensor(n, dtype=torch.int32)


def quantised():
    k, v = caches()
    return half(1, 2, 64), *of_cache(k), *of_cache(v), [*k.shape]


def pages(*new):
    """q, a pool of six pages, and the table, lengths and slots of two requests."""
    table = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)
    return half(2, *new, 4, 16), half(6, 2, 4, 16), half(6, 2, 4, 16), table, lengths(9, 3), lengths(1, 0)


def token(quantised=False):
    """Queries, keys and values of a token, its position, and a cache."""
    qkv, turns, kv_len = half(8, 64), torch.rand(32, dtype=torch.float64), lengths(5)
    if not quantised:
        return qkv, turns, kv_len, half(9, 2, 64), half(9, 2, 64)
    k, v = of_capacity()
    return qkv, turns, kv_len, k.packed, k.scale, v.packed, v.scale, [*k.shape], 8, k.group, v.peak


def of_capacity(bits=8, peak=None):
    k, v = (kv_cache.empty(1, 32, 2, 64, bits, role, dtype=torch.float16, device="cpu") for role in ("keys", "values"))
    v.peak = peak or v.peak
    return k, v


def shared_pages():
    """Two requests that share a page."""
    cache = paged.PagedCache(3, 8, 1, 64, dtype=torch.float16, device="cpu", max_requests=2)
    cache.k_pages, cache.v_pages, first = half(*cache.k_pages.shape), half(*cache.v_pages.shape), cache.new()
    cache.reserve([first], 8)
    requests = [first, cache.fork(first)]
    cache.reserve(requests, 3)
    p = cache.shared_prefixes(requests, [(requests, 8)])
    return half(2, 2, 64), cache.k_pages, cache.v_pages, cache.table, cache.lens, p.items, p.count, p.rows, p.levels


CASES = {
    **{name: lambda: (randn(5, 33), randn(33)) for name in WANTED.split() if name.startswith("gemv")},
    "lowbit_gemv": lambda: (*of_weight(2, 5, 70, None), half(2, 70)),
    "lowbit_digits": lambda: (*of_weight(), half(256)),
    "matmul_linear": lambda: (half(2, 3, 16), half(8, 16)),
    **{f"attention_mix_{name}": lambda: (randn(2, 9), randn(9, 1, 8)) for name in ("naive", "split", "shared")},
    **{f"attention_{name}": lambda: (randn(1, 2, 8), randn(1, 9, 1, 8), randn(1, 9, 1, 8))
       for name in ("two_pass", "online", "split", "split_triton")},
    "attention_decode": lambda: (half(2, 2, 16), half(2, 9, 1, 16), half(2, 9, 1, 16), 0.5, lengths(9, 3)),
    "kv_cache_decode": quantised,
    "paged_decode": lambda: (*pages(), 0.5),
    "paged_append_attention": lambda: (*pages(3), None, True, True),
    "paged_decode_shared": shared_pages,
    **{f"latent_{name}": lambda: (half(1, 2, 576), half(1, 9, 576), 0.07, None, lengths(8))
       for name in ("decode", "split", "last", "in_place")},
    "collective_all_reduce": lambda: ([half(9), half(9)],),
    "collective_all_reduce_norm": lambda: tuple([half(*n), half(*n)] for n in ((2, 16), (2, 16), (16,), (2, 16))),
    "collective_product": lambda: tuple([half(*n), half(*n)] for n in ((5, 16), (16,), (5,))),
    "fusion_rmsnorm": lambda: (half(40), half(40), 1e-3),
    "fusion_add": lambda: (half(9), half(9)),
    "fusion_silu_mul": lambda: (half(9), half(9)),
    "fusion_gemv_residual": lambda: (half(5, 16), half(16), half(5)),
    "fusion_down_residual": lambda: (half(5, 16), half(16), half(5)),
    "fusion_norm_qkv": lambda: (half(16), half(16), half(4, 16), half(2, 16), half(2, 16)),
    "fusion_norm_glu": lambda: (half(16), half(16), half(4, 16), half(4, 16)),
    "ssd_five": lambda: (*layer(), 16),
    "ssd_fused": lambda: layer(),
    "mamba_chunk_scan_combined": lambda: (*layer(), 16),
    "ssd_backward": lambda: (randn(1, 19, 2, 8), *layer()),
    "ssd_backward_plain": lambda: (randn(1, 19, 2, 8), *layer()),
    "ssd_backward_few": lambda: (randn(1, 9, 2, 8), *layer(seqlen=9)),
    "ssd_backward_fused": lambda: (half(1, 9, 2, 8), *layer(torch.float16, 9)),
    "llm_embed": lambda: (half(9, 40), torch.tensor([3])),
    "llm_rope_append": token,
    "llm_rope_append_quantized": lambda: token(quantised=True),
    "llm_greedy": lambda: (half(50), torch.tensor([3]), lengths(5), torch.zeros(2, dtype=torch.int64)),
    "llm_attend": token,
    "lowbit_norm_gemv": lambda: (*of_weight(), half(256), half(256), 1e-3),
    "lowbit_norm_glu": lambda: (*of_weight(rows=32), half(256), half(256)),
    "lowbit_gemv_residual": lambda: (*of_weight(), half(256), half(16)),
    "mamba2_conv1d": lambda: (half(2, 5, 8), randn(8, 4), randn(8), half(2, 3, 8)),
    "mamba2_conv_step": lambda: (half(2, 3, 8), half(2, 8), randn(8, 4)),
    "mamba2_gated_norm": lambda: (half(3, 16), half(3, 16), half(16), 1e-3, 2),
    "mamba2_add_norm": lambda: (half(3, 16), randn(3, 16), half(16)),
    "mamba2_norm_in_proj": lambda: (
        randn(16), half(16), half(9, 16), 1e-5, None, half(3, 4), randn(4, 4), None, 2
    ),
    "mamba2_norm_out_proj": lambda: (half(16), half(16), half(9, 16), randn(9)),
    "mamba2_state_step": lambda: (randn(1, 2, 8, 16), *state_token()),
    "mamba2_state_step_coded": lambda: (*coded(), *state_token()),
}  # fmt: skip


def test_every_public_kernel_is_an_operator():
    assert {name.removesuffix("_out") for name in dir(OPS) if not name.startswith("_") and name != "name"} == set(CASES)
    assert set(WANTED.split()) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_pytorchs_own_checks_pass(name):
    alike = name.startswith(("gemv_", "fusion_", "attention_mix")) and name not in ("gemv_wide", "fusion_norm_qkv")
    opcheck(getattr(OPS, name).default, CASES[name](), test_utils=("test_schema", "test_faketensor") if alike else ALL)


@pytest.mark.parametrize("name, like", [("gemv", 5), ("kv_cache_decode", (1, 2, 64)), ("ssd_five", (1, 19, 2, 8))])
def test_they_pass_with_a_tensor_to_write_to(name, like):
    dtype = torch.float16 if name.startswith("kv") else torch.float32
    out = torch.full((like,) if isinstance(like, int) else like, torch.nan, dtype=dtype)
    before = out._version
    opcheck(getattr(OPS, f"{name}_out").default, CASES[name](), {"out": out})
    getattr(OPS, f"{name}_out")(*CASES[name](), out=out)
    assert out._version > before and not out.isnan().any()


class Model(torch.nn.Module):
    """A step of something like a language model: each kernel stands where it would stand in one."""

    def __init__(self):
        super().__init__()
        self.W = torch.nn.Parameter(half(64, 48), requires_grad=False)
        self.norm = torch.nn.Parameter(half(64), requires_grad=False)
        self.low = lowbit.quantize(half(32, 64), 4, 32)
        self.x, self.dt, self.A, self.B, self.C = layer()

    def forward(self, token, k, v, cache_k, cache_v):
        x = gemv.gemv(self.W, token * 2)
        x = fusion.rmsnorm(x, self.norm)
        y = lowbit.gemv(self.low, x.tanh())
        q = (y.view(1, 2, 16) + 1).contiguous()
        mixed = attention.decode(q, k, v, scale=0.25)
        far = kv_cache.decode(x.view(1, 1, 64), cache_k, cache_v)
        z = matmul.linear(mixed.view(2, 16), self.W.view(192, 16))
        scan, states = ssd.mamba_chunk_scan_combined(
            self.x * float(token.shape[0]), self.dt, self.A, self.B, self.C, 16, return_final_states=True
        )
        into = torch.empty_like(x)
        gemv.gemv(self.W, token, out=into)
        return y.float().sum() + z.float().sum() + far.float().mean() + scan.sum() + states.mean(), into * 2


@pytest.fixture(scope="module")
def model():
    return Model(), (half(48), half(1, 9, 1, 16), half(1, 9, 1, 16), *caches())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_compiles_whole_with_the_same_results(model, backend):
    step, given = model
    wanted = step(*given)
    with torch.no_grad():
        found = torch.compile(step, fullgraph=True, backend=backend)(*given)
    for one, other in zip(found, wanted):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["fused", "unfused"])
def test_a_layer_with_buffers_of_its_own_compiles_whole(name):
    hidden, kv, ffn = 16, 8, 24
    shapes = [(hidden,), (hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden), (hidden,)]
    weights = [half(*shape) for shape in [*shapes, (ffn, hidden), (ffn, hidden), (hidden, ffn)]]
    layer, x = fusion.DecoderLayer(*weights), half(hidden)
    wanted, qkv = getattr(layer, name)(x).clone(), layer.qkv.clone()
    layer.qkv.zero_()
    compiled = torch.compile(lambda: getattr(layer, name)(x) * 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(), wanted) and torch.equal(layer.qkv, qkv)
    with pytest.raises(Exception, match="one_launch: torch.compile cannot take a launch with barriers"):
        torch.compile(lambda: layer.one_launch(x), fullgraph=True, backend="eager")()


def test_sums_over_devices_compile_whole():
    xs = [half(9) for _ in range(2)]
    wanted = (xs[0].float() + xs[1].float()).half()

    def step(xs):
        y = collective.all_reduce([x * 1 for x in xs])
        return y[0] * 2, y[1] * 2

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(xs)
    assert all(torch.equal(y, wanted * 2) for y in found)
    with pytest.raises(Exception, match="tensors must be one tensor for each of 2 to 8 devices, got one device only"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(xs[:1])


def test_a_second_copy_of_the_course_shares_the_operators():
    def again(W, x, *, out=None):
        raise AssertionError("the first copy's runs")

    again = operators.operator("gemv", "Tensor W, Tensor x", fake=None)(again)
    assert torch.compile(again, fullgraph=True, backend="eager")(randn(3, 4), randn(4)).shape == (3,)


def test_a_cache_that_grows_is_compiled_for_no_more_than_a_few_lengths():
    counted = []

    def backend(graph, _):
        counted.append(graph)
        return graph

    q, new = half(1, 2, 64), randn(1, 1, 1, 64)
    k, v = (
        kv_cache.quantize(randn(1, 20, 1, 64), 8, role="keys", capacity=64),
        kv_cache.quantize(randn(1, 20, 1, 64), 8, capacity=64),
    )
    k.peak = v.peak = 1.0  # as after the first long text: later tokens are no larger
    decode = torch.compile(lambda: kv_cache.decode(q, k, v), fullgraph=True, backend=backend)
    for _ in range(4):
        for cache in (k, v):
            cache.append(new * 1e-3)
        assert torch.equal(decode(), kv_cache.decode(q, k, v))
    assert len(counted) <= 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_step_that_writes_into_its_cache_compiles_whole(backend, bits):
    E, at = half(9, 512), torch.tensor([3])
    _, turns, kv_len, *plain = token()
    weights = {"q_norm": half(64), "k_norm": half(64), "bias": half(8, 64)}

    def step(k, v):
        x = llm.embed(E, at).view(8, 64)
        q = llm.rope_append(x, turns, kv_len, k, v, **weights)
        if bits == 16:
            return q * 1, attention.decode(q[None], k[None], v[None], kv_lens=kv_len)
        return q * 1, kv_cache.decode(q[None], k, v, kv_lens=kv_len)

    def cache():
        return (plain[0].clone(), plain[1].clone()) if bits == 16 else of_capacity(bits)

    one, two = cache(), cache()
    wanted = step(*one)
    with torch.no_grad():
        found = torch.compile(step, fullgraph=True, backend=backend)(*two)
    for a, b in zip([*wanted, *one], [*found, *two]):
        a, b = (t if isinstance(t, torch.Tensor) else t.dequantize() for t in (a, b))
        assert torch.equal(a, b)


def test_gradients_where_a_matrix_learns():
    W, x = randn(5, 12).requires_grad_(), randn(12).requires_grad_()
    wanted = torch.autograd.grad((W @ x).sin().sum(), (W, x))
    compiled = torch.compile(lambda: gemv.gemv(W, x).sin().sum(), fullgraph=True, backend="aot_eager")
    for y in (gemv.gemv(W, x).sin().sum(), compiled()):
        for found, other in zip(torch.autograd.grad(y, (W, x)), wanted):
            assert torch.allclose(found, other, atol=1e-5)
    A, M = half(2, 3, 8).requires_grad_(), half(4, 8).requires_grad_()
    wanted = torch.autograd.grad((A.float() @ M.float().T).sum(), (A, M))
    for found, other in zip(torch.autograd.grad(matmul.linear(A, M).sum(), (A, M)), wanted):
        assert torch.allclose(found, other, rtol=1e-2, atol=1e-2)
    assert torch.autograd.grad(matmul.linear(A.detach(), M).sum(), M)[0].shape == M.shape
    with torch.no_grad():
        assert not gemv.gemv(W, x).requires_grad
    assert not gemv.gemv(W, x, out=torch.empty(5)).requires_grad  # as PyTorch's own refuse to


def test_the_others_say_that_they_have_none():
    q, k, v = half(1, 2, 16).requires_grad_(), half(1, 9, 1, 16), half(1, 9, 1, 16)
    assert not attention.decode(q, k, v).requires_grad
    y = torch.compile(attention.decode, fullgraph=True, backend="eager")(q, k, v)
    with pytest.raises(NotImplementedError, match="attention_decode: gradients are not tracked; call it under"):
        y.sum().backward()


BAD = [  # words, kernel, arguments
    ("gemv: x must have shape \\(33,\\), got \\(32,\\)", gemv.gemv, lambda: (randn(5, 33), randn(32))),
    ("warp: x must be of torch.float32, like the first tensor, got", gemv.warp, lambda: (randn(5, 33), half(33))),
    ("gemv: Wq must be a QuantizedWeight, got Tensor", lowbit.gemv, lambda: (half(4, 32), half(32))),
    ("decode: k must have shape", attention.decode, lambda: (half(1, 2, 16), half(1, 9, 1, 8), half(1, 9, 1, 8))),
    ("got one for both", kv_cache.decode, lambda: (half(1, 2, 64), *caches()[:1] * 2)),
    ("must lie as keys before torch.compile", kv_cache.decode, lambda: (half(1, 2, 64), *caches()[::-1])),
    ("rmsnorm: weight must have shape", fusion.rmsnorm, lambda: (half(8), half(9))),
    ("five: x must be a dense torch tensor|five: x must have shape", ssd.five, lambda: (layer()[1], *layer()[1:])),
    ("linear: W must have shape", matmul.linear, lambda: (half(2, 16), half(8, 24))),
    ("embed: token must be of torch.int64", llm.embed, lambda: (half(9, 8), lengths(3))),
    ("rope_append: turns must have shape", llm.rope_append, lambda: (token()[0], token()[1][:9], *token()[2:])),
    ("two tensors or two QuantizedKV", llm.rope_append, lambda: (*token()[:3], of_capacity()[0], half(9, 2, 64))),
    ("v must be made for scales up to 16", llm.rope_append, lambda: (*token()[:3], *of_capacity(peak=1.0))),
]


@pytest.mark.parametrize("words, kernel, given", BAD, ids=lambda it: it if isinstance(it, str) else "")
def test_what_is_wrong_is_named_while_a_model_is_compiled(words, kernel, given):
    given = given()
    with pytest.raises(Exception, match=words):
        torch.compile(lambda: kernel(*given), fullgraph=True, backend="eager")()


def test_tensors_without_memory_get_shapes():
    with FakeTensorMode():
        W, x = torch.empty(5, 33), torch.empty(33)
        assert gemv.gemv(W, x).shape == (5,)
        with pytest.raises(ValueError, match="gemv: x must have shape"):
            gemv.gemv(W, W)
        y, states = ssd.five(torch.empty(1, 9, 2, 8), torch.empty(1, 9, 2), torch.empty(2), torch.empty(1, 9, 1, 16),
                             torch.empty(1, 9, 1, 16), return_final_states=True)  # fmt: skip
        assert y.shape == (1, 9, 2, 8) and states.shape == (1, 2, 8, 16)


# Called from Python


def test_called_from_python_it_is_the_function():
    assert gemv.gemv.__doc__.startswith("The best.") and gemv.gemv.__name__ == "gemv"
    assert list(inspect.signature(attention.decode).parameters) == ["q", "k", "v", "scale", "kv_lens", "out", "pdl"]
    shown = show(gemv.gemv)
    assert shown.title == "kernels/gemv/__init__.py" and "return _run(" in str(shown)
    with pytest.raises(TypeError, match="gemv: W must be a torch tensor, got int"):
        gemv.gemv(3, randn(3))
    with pytest.raises(TypeError, match="unexpected keyword argument 'pdf'"):
        gemv.gemv(randn(2, 3), randn(3), pdf=True)


def test_the_look_at_who_calls_costs_little():
    def plain(W, x, *, out=None, pdl=False):
        return x

    def seconds(function):
        names = {"f": function, "W": W, "x": x}
        return min(timeit.repeat("f(W, x, pdl=True)", globals=names, number=20_000, repeat=15)) / 20_000

    W, x = randn(2, 2), randn(2)
    wrapped = [operators._wrapped(plain, None, tracked, None) for tracked in ((), ("W", "x"))]
    before = seconds(plain)
    costs = [seconds(function) - before for function in wrapped]
    print([f"{cost * 1e9:.0f} ns" for cost in costs])
    assert max(costs) < 1e-6  # 0.1 µs, and 0.2 with gradients: but other processes run beside this one
