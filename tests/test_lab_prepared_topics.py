"""What each topic's prepared calls launch is what its checked calls launch, on a card that is this CPU."""

import made_up_driver
import pytest
import torch

from kernels import attention, fusion, gemv, kv_cache, llm, lowbit, matmul, ssd
from kernels.fusion.rungs import CALLS as FUSION
from kernels.llm import operations
from kernels.lowbit.gemv import CALLS as LOWBIT
from kernels.ssd.fused import CALLS as SSD

HALF = torch.float16


@pytest.fixture
def driver(monkeypatch):
    yield made_up_driver.put_in(monkeypatch)
    own = operations.EMBED, operations.APPEND, operations.APPEND_QUANTIZED
    for calls in (gemv.CALLS, LOWBIT, matmul.CALLS, FUSION, SSD, *own):
        calls.clear()


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows, cols", [(5, 7), (600, 4096)])
def test_gemv(driver, rows, cols, pdl):
    def call():
        W, x, out = torch.randn(rows, cols).half(), torch.randn(cols).half(), torch.empty(rows, dtype=HALF)
        return lambda: gemv.gemv(W, x, out=out, pdl=pdl)

    (launch,) = made_up_driver.expect_the_same(driver, gemv.CALLS, call(), call())
    assert launch.pdl == pdl


@pytest.mark.parametrize("m", [None, 1, 4, 16])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_lowbit(driver, bits, m):
    weights = [lowbit.quantize(torch.randn(64, 1024).half(), bits, 64) for _ in range(2)]

    def call(Wq):
        x = torch.randn(*([m] if m else []), 1024).half()
        out = torch.empty(*([m] if m else []), 64, dtype=HALF)
        return lambda: lowbit.gemv(Wq, x, out=out)

    made_up_driver.expect_the_same(driver, LOWBIT, *map(call, weights))


@pytest.mark.parametrize("m, n, k", [(128, 256, 64), (100, 72, 4096), (33, 77, 512)])
def test_linear(driver, m, n, k):
    def call():
        x, W, out = torch.randn(1, m, k).half(), torch.randn(n, k).half(), torch.empty(1, m, n, dtype=HALF)
        return lambda: matmul.linear(x, W, out=out)

    made_up_driver.expect_the_same(driver, matmul.CALLS, call(), call())


FUSED = {
    "rmsnorm": ((72,), (72,)),
    "add": ((72,), (72,)),
    "silu_mul": ((72,), (72,)),
    "gemv_residual": ((40, 72), (72,), (40,)),
    "down_residual": ((40, 72), (72,), (40,)),
    "norm_qkv": ((72,), (72,), (40, 72), (8, 72), (8, 72)),
    "norm_glu": ((72,), (72,), (40, 72), (40, 72)),
}


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_fusion(driver, name, pdl):
    def call():
        tensors = [torch.randn(shape).half() for shape in FUSED[name]]
        out = torch.empty({"norm_qkv": 56}.get(name, min(shape[0] for shape in FUSED[name])), dtype=HALF)
        return lambda: getattr(fusion, name)(*tensors, out=out, pdl=pdl)

    (launch,) = made_up_driver.expect_the_same(driver, FUSION, call(), call())
    assert launch.pdl == pdl


SSD_OPTIONS = {
    "plain": {},
    "all": {"D": (2,), "z": (1, 130, 2, 64), "dt_bias": (2,), "initial_states": (1, 2, 64, 64)},
    "numbers": {"seq_idx": (1, 130)},
}


def ssd_call(name):
    """Tensors of a call, x, B and C as views of one projection, as a model has them."""
    both = torch.randn(1, 130, 2 * 64 + 2 * 64).half()
    x, B, C = both.split([128, 64, 64], dim=-1)
    call = {"x": x.unflatten(-1, (2, 64)), "dt": torch.rand(1, 130, 2), "A": -torch.rand(2)}
    call |= {"B": B[:, :, None], "C": C[:, :, None]}
    for option, shape in SSD_OPTIONS[name].items():
        kind = {"z": HALF, "seq_idx": torch.int32}.get(option, torch.float32)
        call[option] = torch.zeros(shape, dtype=kind)
    return call


@pytest.mark.parametrize("name", SSD_OPTIONS)
def test_ssd(driver, name):
    """The drop-in asks first, fused second: both know what either has prepared."""

    def call(**options):
        tensors, out = ssd_call(name), torch.empty(1, 130, 2, 64, dtype=HALF)
        return lambda: ssd.fused(**tensors, out=out, dt_softplus=True, **options)

    made_up_driver.expect_the_same(driver, SSD, call(), call())
    y, final = (call(return_final_states=True))()
    assert y.shape == (1, 130, 2, 64) and final.shape == (1, 2, 64, 64)
    tensors = ssd_call(name)
    positional = [tensors.pop(argument) for argument in ("x", "dt", "A", "B", "C")]
    driver.launches.clear()
    for _ in range(2):
        y = ssd.mamba_chunk_scan_combined(*positional, 64, **tensors)
        y, final = ssd.mamba_chunk_scan_combined(*positional, 64, return_final_states=True, **tensors)
    assert [launch.way for launch in driver.launches] == ["checked"] * 2 + ["prepared"] * 2
    for _ in range(2):
        with pytest.raises(ValueError, match="return_varlen_states needs cu_seqlens"):
            ssd.mamba_chunk_scan_combined(*positional, 64, return_varlen_states=True, **tensors)
        asking = positional[0].clone().requires_grad_()  # of which a prepared call would know nothing
        assert ssd.mamba_chunk_scan_combined(asking, *positional[1:], 64, **tensors).grad_fn is not None


def test_eps_is_an_option(driver):
    x, weight = torch.randn(72).half(), torch.randn(72).half()
    for eps in (1e-5, 1e-6, 1, 1e-5, 1):
        fusion.rmsnorm(x, weight, eps)
    assert [launch.way for launch in driver.launches] == ["checked"] * 3 + ["prepared"] * 2
    assert [round(launch.values[-1], 7) for launch in driver.launches] == [1e-5, 1e-6, 1, 1e-5, 1]
    for _ in range(2):
        with pytest.raises(TypeError, match="rmsnorm: eps must be a number, got bool"):
            fusion.rmsnorm(x, weight, True)


def test_memory_that_was_freed_is_refused_by_the_checked_way():
    """A call that cannot be prepared for lack of memory falls back to the look at everything: that must refuse it."""
    k, q = torch.randn(1, 32, 2, 64).half(), torch.randn(1, 4, 64).half()
    keys, values = kv_cache.quantize(k, 8, role="keys"), kv_cache.quantize(k, 8)
    Wq = lowbit.quantize(torch.randn(64, 128).half(), 4, 128)
    v = k.clone()
    for tensor in (k, keys.packed, Wq.packed):
        tensor.untyped_storage().resize_(0)
    for call, name in [
        (lambda: attention.decode(q, k, v), "decode: k "),
        (lambda: kv_cache.decode(q, keys, values), "decode: k "),
        (lambda: lowbit.gemv(Wq, torch.randn(128).half()), "gemv: Wq.packed "),
    ]:
        with pytest.raises(ValueError, match=name + "must have memory of .* got a storage of 0"):
            call()


@pytest.mark.parametrize("pdl", [False, True])
def test_embed(driver, pdl):
    def call(token):
        E, at, out = torch.randn(9, 300).half(), torch.tensor([token]), torch.empty(300, dtype=HALF)
        return lambda: llm.embed(E, at, out=out, pdl=pdl)

    (launch,) = made_up_driver.expect_the_same(driver, operations.EMBED, call(1), call(2))
    assert launch.pdl == pdl


def token_call(bits=16, options=True, **changed):
    """A token whose keys and values go into a cache of 16, 8 or 4 bits."""
    half = lambda *shape: torch.randn(shape).half()  # noqa: E731
    if bits == 16:
        k, v = half(9, 2, 64), half(9, 2, 64)
    else:
        made = lambda role: kv_cache.empty(1, 32, 2, 64, bits, role, dtype=HALF, device="cpu")  # noqa: E731
        k, v = made("keys"), made("values")
    call = {"qkv": half(8, 64), "turns": torch.rand(32, dtype=torch.float64), "k": k, "v": v, "eps": 1e-5}
    call |= {"kv_len": torch.tensor([5], dtype=torch.int32), "out": torch.empty(4, 64, dtype=HALF)}
    if options:
        call |= {"bias": half(8, 64), "q_norm": half(64), "k_norm": half(64)}
    return lambda **other: llm.rope_append(**call | changed | other)


@pytest.mark.parametrize("options", [False, True])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_rope_append(driver, bits, options):
    calls = operations.APPEND if bits == 16 else operations.APPEND_QUANTIZED
    made_up_driver.expect_the_same(driver, calls, token_call(bits, options), token_call(bits, options))
    call = token_call(bits, options)
    for _ in range(3):
        driver.launches.clear()
        assert call(out=None).shape == (4, 64)
        for wrong, words in [
            ({"eps": -1.0}, "eps must be 0 or more"),
            ({"kv_len": torch.tensor([5])}, "kv_len must be of torch.int32"),
            ({"turns": torch.rand(31, dtype=torch.float64)}, "turns must have shape"),
            ({"q_norm": torch.ones(64).half(), "k_norm": None}, "must both be given"),
            ({"k": None}, "k must be|k and v must be"),
            ({"out": torch.empty(8, 64, dtype=HALF)}, "out must have shape"),
        ]:
            with pytest.raises((TypeError, ValueError), match=words):
                call(**wrong)
        assert len(driver.launches) == 1
    assert driver.launches[0].way == "prepared"


def test_rope_append_to_caches_that_overlap_or_are_not_for_it(driver):
    both = torch.zeros(17, 2, 64, dtype=HALF)
    small = [kv_cache.empty(1, 32, 2, 64, 8, role, dtype=HALF, device="cpu") for role in ("keys", "values")]
    token_call(16)(), token_call(8)()
    for _ in range(2):
        with pytest.raises(ValueError, match="k must not share memory with v"):
            token_call(16, k=both[:9], v=both[8:])()
        with pytest.raises(ValueError, match="k must be of 8 or 4 bits.*role='keys'"):
            token_call(8, k=small[1], v=small[0])()
        small[1].peak = 1.0
        with pytest.raises(ValueError, match="v must be made for scales up to 16"):
            token_call(8, k=small[0], v=small[1])()
        small[1].peak = 16.0
