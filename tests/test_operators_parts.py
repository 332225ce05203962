"""Operators of torch.library believe no part that they are given: what the real one refuses, its fake does too."""

import made_up_driver
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import attention, fusion, kv_cache, lowbit, ssd
from kernels.lowbit.gemv import CALLS as LOWBIT

OPS = torch.ops.matmul_to_mamba
HALF = torch.float16


def half(*shape):
    return torch.randn(*shape).to(HALF)


def weight_parts(**changed):
    Wq = lowbit.quantize(half(32, 256), 4, 128)
    parts = {"packed": Wq.packed, "factors": Wq.factors, "shape": list(Wq.shape), "bits": 4, "group": 128}
    return parts | {"x": half(256)} | changed


def off(tensor):
    """The same numbers at an address of no alignment."""
    wide = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    wide[1:] = tensor.flatten()
    return wide[1:].view(tensor.shape)


WEIGHT = [  # words, what is wrong
    ("packed must be of torch.int32", lambda p: {"packed": p["packed"].float()}),
    ("packed must have shape \\(2, 2, 2, 32, 4\\)", lambda p: {"packed": p["packed"][:1]}),
    ("packed must be contiguous", lambda p: {"packed": p["packed"].transpose(0, 1).contiguous().transpose(0, 1)}),
    ("packed must have shape", lambda p: {"bits": 8}),
    ("packed must have shape", lambda p: {"shape": [64, 256]}),
    ("shape must be \\(rows, cols\\)", lambda p: {"shape": [32]}),
    ("shape must be \\(rows, cols\\)", lambda p: {"shape": [32, 0]}),
    ("bits must be 8, 4 or 2", lambda p: {"bits": 3}),
    ("group must be None", lambda p: {"group": 96}),
    ("factors must have shape \\(2, 8, 8, 2, 2\\)", lambda p: {"group": 32}),
    ("factors must have shape \\(2, 16, 2\\)", lambda p: {"group": None}),
    ("factors must be of", lambda p: {"factors": p["factors"].double()}),
    ("factors must be on cpu", lambda p: {"factors": p["factors"].to("meta")}),
    ("x must have shape", lambda p: {"x": half(255)}),
]


@pytest.mark.parametrize("words, wrong", WEIGHT)
def test_parts_of_a_weight(words, wrong):
    parts = weight_parts()
    parts |= wrong(parts)
    out = torch.empty(32, dtype=HALF)
    for call in (OPS.lowbit_gemv, lambda **how: OPS.lowbit_gemv_out(**how, out=out)):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=words):
                call(**parts)
    if "meta" not in str(parts["factors"].device):
        assert_fake_refuses(OPS.lowbit_gemv, parts, words)


def assert_fake_refuses(call, parts, words):
    with FakeTensorMode() as mode, pytest.raises((TypeError, ValueError), match=words):
        call(**{n: mode.from_tensor(p) if isinstance(p, torch.Tensor) else p for n, p in parts.items()})


def test_parts_that_lie_at_no_multiple_of_16_bytes():
    parts = weight_parts()
    for name in ("packed", "factors"):
        with pytest.raises(ValueError, match=f"{name} must lie at a multiple of 16 bytes"):
            OPS.lowbit_gemv(**parts | {name: off(parts[name])})


def cache_parts(**changed):
    k, v = (
        kv_cache.quantize(torch.randn(1, 40, 2, 64), bits, role=role) for bits, role in ((8, "keys"), (4, "values"))
    )
    parts = {"q": half(1, 4, 64), "shape": [*k.shape]}
    for name, cache in (("k", k), ("v", v)):
        form = f"{cache.bits} {cache.axis} {cache.group} {cache.role}"
        parts |= {f"{name}_codes": cache.packed, f"{name}_scale": cache.scale, f"{name}_format": form}
        parts[f"{name}_peak"] = cache.peak
    return parts | changed


CACHE = [
    ("k_codes must be of torch.uint8", lambda p: {"k_codes": p["k_codes"].int()}),
    ("k_codes must have shape \\(1, 2, tiles, 1024\\)", lambda p: {"k_codes": p["k_codes"][..., :512].contiguous()}),
    ("v_codes must have a multiple of 2 tiles, 3 or more", lambda p: {"v_codes": p["v_codes"][:, :, :2].contiguous()}),
    ("v_codes must have a multiple of 2 tiles", lambda p: {"v_codes": p["v_codes"][:, :, :3].contiguous()}),
    ("v_codes must be contiguous", lambda p: {"v_codes": p["v_codes"].transpose(1, 2).contiguous().transpose(1, 2)}),
    ("k_scale must be of torch.float16", lambda p: {"k_scale": p["k_scale"].float()}),
    ("v_scale must have shape \\(1, 2, 4, 32\\)", lambda p: {"v_scale": p["v_scale"][:, :, :2].contiguous()}),
    ("k_scale must be on cpu", lambda p: {"k_scale": p["k_scale"].to("meta")}),
    ("k_format must be .*bits must be 8, 4 or 'fp8'", lambda p: {"k_format": "3 token 64 keys"}),
    ("v_format must be .*group must be a multiple of 16", lambda p: {"v_format": "4 token 24 values"}),
    ("v_format must be .*axis must be", lambda p: {"v_format": "4 tokens 32 values"}),
    ("v_format must be", lambda p: {"v_format": "4 token"}),
    ("v_format must end in the role", lambda p: {"v_format": "4 token 32 keys"}),
    ("k_peak must be finite", lambda p: {"k_peak": float("nan")}),
    ("v_peak must be finite", lambda p: {"v_peak": -1.0}),
    ("shape must be \\(batch", lambda p: {"shape": [1, 40, 2]}),
    ("shape must have none of it 0", lambda p: {"shape": [1, 0, 2, 64]}),
    ("k_format must be .*head_dim must be a multiple of 16", lambda p: {"shape": [1, 40, 2, 60]}),
    ("scale must be finite", lambda p: {"scale": float("inf")}),
]  # fmt: skip


@pytest.mark.parametrize("words, wrong", CACHE)
def test_parts_of_a_cache(words, wrong):
    parts = cache_parts()
    parts |= wrong(parts)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=words):
            OPS.kv_cache_decode(**parts)
    if "meta" not in str(parts["k_scale"].device):
        assert_fake_refuses(OPS.kv_cache_decode, parts, words)


def test_parts_of_a_cache_that_lie_at_no_multiple_of_16_bytes():
    parts = cache_parts()
    for name in ("k_codes", "v_scale"):
        with pytest.raises(ValueError, match=f"{name} must start at an address divisible by 16"):
            OPS.kv_cache_decode(**parts | {name: off(parts[name])})


def layer():
    x, dt = torch.randn(1, 19, 2, 8), torch.rand(1, 19, 2)
    return x, dt, -torch.rand(2), torch.randn(1, 19, 1, 16), torch.randn(1, 19, 1, 16)


q_k_v = lambda: (half(1, 2, 16), half(1, 9, 1, 16), half(1, 9, 1, 16))  # noqa: E731
OPTIONS = [
    (ssd.fused, layer, {"stop": -1}, "stop must be a whole number"),
    (ssd.fused, layer, {"chunk_size": 24}, "chunk_size must be a power of two"),
    (attention.split, q_k_v, {"splits": 0}, "splits must be from 1"),
    (attention.split_triton, q_k_v, {"splits": 70000}, "splits must be from 1"),
    (attention.decode, q_k_v, {"scale": float("nan")}, "scale must be finite"),
    (fusion.rmsnorm, lambda: (half(8), half(8)), {"eps": -1.0}, "eps must be"),
    (attention.decode, q_k_v, {"out": torch.empty(1, 2, 16, dtype=HALF, requires_grad=True)}, "out must not require"),
    (lowbit.digits, lambda: (lowbit.quantize(half(32, 256), 8, 128), half(256)), {}, "Wq must have 4 bits"),
    (lowbit.digits, lambda: (lowbit.quantize(half(32, 256), 4, 128), half(2, 256)), {}, "x must be one row"),
]


@pytest.mark.parametrize("kernel, given, options, words", OPTIONS)
def test_what_an_option_may_not_be_is_said_while_a_model_is_compiled(kernel, given, options, words):
    given = given()
    for call in (kernel, torch.compile(lambda *args: kernel(*args, **options), fullgraph=True, backend="eager")):
        with pytest.raises(Exception, match=words):
            call(*given, **(options if call is kernel else {}))


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(kv_cache.decoding, "_card", lambda device: (132, 227 * 1024))
    yield made_up_driver.put_in(monkeypatch)
    kv_cache.decoding.CALLS.clear(), LOWBIT.clear()


def ways(driver):
    found = {launch.way for launch in driver.launches}
    driver.launches.clear()
    return found


@pytest.mark.parametrize("out", [False, True])
def test_parts_are_refused_when_such_calls_are_prepared(driver, out):
    """Right and wrong parts alternate: a wrong one launches nothing, however often right ones have run."""
    for call, parts, cases, like in [
        (OPS.lowbit_gemv, weight_parts(), WEIGHT, torch.empty(32, dtype=HALF)),
        (OPS.kv_cache_decode, cache_parts(), CACHE, torch.empty(1, 4, 64, dtype=HALF)),
    ]:
        if out:
            call, parts = getattr(OPS, f"{call.__name__}_out"), parts | {"out": like}
        call(**parts)
        assert ways(driver) == {"checked"}
        for words, wrong in cases:
            call(**parts)
            assert ways(driver) == {"prepared"}
            with pytest.raises((TypeError, ValueError), match=words):
                call(**parts | wrong(parts))
            assert not ways(driver)


def test_the_fake_of_a_rung_refuses_what_the_rung_does():
    """Without running it: a model that is compiled never gets as far."""
    for parts in (weight_parts(x=half(2, 256)), weight_parts(x=half(256)) | {"pdl": True}):
        assert_fake_refuses(OPS.lowbit_digits, parts, "digits: (x must be one row|pdl must be False)")
    x, dt, A, B, C = layer()
    with FakeTensorMode() as mode, pytest.raises(ValueError, match="stop must be a whole number"):
        OPS.ssd_fused(*map(mode.from_tensor, (x, dt, A, B, C)), stop=-1)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match="splits must be from 1"):
        OPS.attention_split(*map(mode.from_tensor, q_k_v()), splits=0)
