"""A norm, a gated unit or an addition in the launch of a product in few bits."""

import pytest
import torch

from kernels import lowbit
from kernels.llm import attending
from kernels.lowbit import fused
from kernels.lowbit.fused import gemv_residual, norm_gemv, norm_glu, paired, unpaired

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
EPS = 1e-5
SHAPES = [(48, 256), (16, 128), (33, 200), (2 * 264, 640)]


def weights(rows, cols, bits, dtype, device, seed=0, group=None):
    made = torch.Generator().manual_seed(seed)
    W = (torch.randn(rows, cols, generator=made) * cols**-0.5).to(dtype).to(device)
    return lowbit.quantize(W, bits, group)


def vector(n, dtype, device, seed=1, scale=1.0):
    return (scale * torch.randn(n, generator=torch.Generator().manual_seed(seed))).to(dtype).to(device)


def normed(x, norm):
    x = x.double()
    return x / (x.square().mean() + EPS).sqrt() * norm.double()


def off(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits, group", [(8, None), (4, 128), (4, 32), (2, None)])
def test_each_is_what_its_parts_make(bits, group, dtype, device):
    bound = 1e-3 + torch.finfo(dtype).eps
    for rows, cols in SHAPES[:2] if device == "cpu" and bits == 2 else SHAPES:
        if group and cols % group:
            continue
        Wq = weights(rows, cols, bits, dtype, device, group=group)
        x, norm = vector(cols, dtype, device, scale=7), 1 + vector(cols, dtype, device, 2, 0.2)
        residual, W = vector(rows, dtype, device, 3), Wq.dequantize(torch.float64)
        n = normed(x, norm)
        for pdl in (False, True) if dtype == torch.float16 else (True,):
            assert off(norm_gemv(Wq, x, norm, EPS, pdl=pdl), W @ n) < bound
            assert off(gemv_residual(Wq, x, residual, pdl=pdl), residual.double() + W @ x.double()) < bound
        if rows % 16 == 0:
            gate, up = unpaired(W @ n).chunk(2)
            out = torch.full((rows // 2,), torch.nan, dtype=dtype, device=device)
            assert norm_glu(Wq, x, norm, EPS, out=out) is out
            assert off(out, gate / (1 + (-gate).exp()) * up) < 2 * bound


def test_pairs_are_eights_by_turns():
    rows = torch.arange(48)
    assert paired(rows).tolist() == [
        *range(8),
        *range(24, 32),
        *range(8, 16),
        *range(32, 40),
        *range(16, 24),
        *range(40, 48),
    ]
    assert unpaired(paired(rows)).tolist() == rows.tolist()
    assert paired(torch.arange(32 * 3).view(32, 3)).shape == (32, 3)


@pytest.mark.parametrize("device", DEVICES)
def test_x_beside_the_range_of_its_type_is_normed_all_the_same(device):
    """x times the norm's weight may be larger than the largest float16: it is never rounded to one."""
    Wq = weights(16, 128, 8, torch.float16, device)
    x, norm = torch.full((128,), 3e4, dtype=torch.float16, device=device), vector(128, torch.float16, device, scale=8)
    found = norm_gemv(Wq, x, norm, EPS)
    assert torch.isfinite(found).all() and off(found, Wq.dequantize(torch.float64) @ normed(x, norm)) < 3e-3
    x[5] = torch.nan
    assert not torch.isfinite(norm_gemv(Wq, x, norm, EPS)).any()


def test_no_race_and_no_launch_but_one():
    Wq = weights(64, 256, 4, torch.float16, "cpu", group=128)
    x, norm = vector(256, torch.float16, "cpu"), vector(256, torch.float16, "cpu", 2)
    out = torch.empty(32, dtype=torch.float16)
    report = fused._launch("norm_glu", Wq, x, norm, EPS, out, False, check_races=True)
    assert torch.equal(out, norm_glu(Wq, x, norm, EPS)) and report is not None


def test_what_does_not_fit_is_said():
    Wq = weights(32, 256, 8, torch.float16, "cpu")
    odd = weights(24, 256, 8, torch.float16, "cpu")
    x, norm, residual = (vector(n, torch.float16, "cpu") for n in (256, 256, 32))
    for call, error, text in (
        (lambda: norm_gemv(Wq, x[:-1], norm), ValueError, r"norm_gemv: x must have shape \(256,\).*, got \(255,\)"),
        (lambda: norm_gemv(Wq, x[None], norm), ValueError, r"x must be one row of shape \(256,\), got \(1, 256\)"),
        (lambda: norm_gemv(Wq, x, norm.float()), TypeError, "norm_gemv: norm must be"),
        (lambda: norm_gemv(Wq, x, norm, -1.0), ValueError, "norm_gemv: eps must be 0 or more, and finite, got -1.0"),
        (lambda: norm_gemv(Wq, x, norm, None), TypeError, "norm_gemv: eps must be a number, got NoneType"),
        (lambda: norm_glu(Wq, x, norm, "1"), TypeError, "norm_glu: eps must be a number, got str"),
        (lambda: gemv_residual(Wq, x, x), ValueError, r"residual must have shape \(32,\).*, got \(256,\)"),
        (lambda: gemv_residual(Wq, x, residual, out=residual), ValueError, "gemv_residual: out must"),
        (lambda: gemv_residual(residual, x, residual), TypeError, "gemv_residual: Wq must be a QuantizedWeight"),
        (lambda: norm_glu(odd, x, norm), ValueError, "a multiple of 16 rows, in pairs, got 24"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()
    wide = weights(16, 20000, 8, torch.float16, "cpu")
    assert not fused.fits(wide.shape, 8, None, torch.float16, "cpu")
    assert fused.fits(Wq.shape, 8, None, torch.float16, "cpu")
    with pytest.raises(ValueError, match="gemv_residual: Wq has columns that would be split, 20000 of them"):
        gemv_residual(wide, vector(20000, torch.float16, "cpu"), vector(16, torch.float16, "cpu"))


def test_torch_compile_takes_them():
    Wq = weights(32, 128, 4, torch.float16, "cpu", group=128)
    x, norm = vector(128, torch.float16, "cpu"), vector(128, torch.float16, "cpu", 2)

    def layer(x, norm):
        return gemv_residual(Wq, x, norm_gemv(Wq, x, norm)) + 0 * norm_glu(Wq, x, norm).sum()

    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, norm)
    assert torch.equal(found, layer(x, norm))


MISTRAL = {"qkv": (6144, 4096), "wo": (4096, 4096), "glu": (28672, 4096), "down": (4096, 14336), "head": (32000, 4096)}


def plans(bits, shared, pdl=True):
    group = None if bits == 8 else 128
    room = 132, shared
    return {name: fused._plan(shape, bits, group, torch.float16, room, True, pdl) for name, shape in MISTRAL.items()}


@pytest.mark.parametrize("bits", [8, 4])
def test_neighbours_in_a_layer_share_a_multiprocessor(bits):
    """One of each product beside one of attention, of 228 KB, 1 for each block."""
    found, between = plans(bits, 232448), attending.plan(4, 8, 128, 132, 232448, 8, *attending.FEW_WARPS)
    for name in ("qkv", "wo"):
        assert found[name].shared + fused.RESERVED + between.shared + 2048 <= 228 << 10, name
    assert all(plan.stages_before_wait == (2 if bits == 8 else 1) for plan in found.values())


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_plans_keep_within_the_card(bits):
    for shared in (232448, 166912, 101376):
        for name, plan in plans(bits, shared).items():
            if plan is not None:
                assert 0 < plan.stages_before_wait <= plan.stages and plan.shared <= shared - fused.RESERVED, name
        plain = plans(bits, shared, pdl=False)
        assert all(plan is None or plan.stages <= 3 and plan.stages_before_wait == 0 for plan in plain.values())
