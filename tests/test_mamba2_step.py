"""A token of Mamba-2: the state's step and the two products against references in float64, and the whole of it."""

import math

import numpy as np
import pytest
import torch
from test_mamba2_kernels import ALLOWED, in_both, off, on_both, wide

import ref.mamba2
from kernels.mamba2 import QuantizedState, launches, norm_in_proj, norm_out_proj, shapes, state_step, stepping
from kernels.mamba2.one_launch import OneLaunch
from kernels.mamba2.step import OneOperationEach, Step, TorchOperations
from lab import cuda

SMALL = shapes.Shape("small", 64, 3, 4, 16, 32, 96)
GROUPS = shapes.Shape("groups", 40, 2, 6, 10, 12, 33, ngroups=2, dt_limit=(0.0, 0.5))


def arguments(batch, nheads, headdim, dstate, ngroups, dtype=torch.float16, device="cpu"):
    """Views of one projection, as a layer has them, and a state."""
    inner, group = nheads * headdim, ngroups * dstate
    projected = torch.randn(batch, 2 * inner + 2 * group + nheads).to(dtype).to(device)
    z, x, B, C, dt = projected.split((inner, inner, group, group, nheads), dim=1)
    made = lambda: torch.randn(nheads).to(device)  # noqa: E731
    heads, groups = (batch, nheads, headdim), (batch, ngroups, dstate)
    return {
        "x": x.view(heads), "dt": dt, "A": -4 * torch.rand(nheads).to(device), "B": B.view(groups),
        "C": C.view(groups), "D": made(), "z": z.view(heads), "dt_bias": made(), "dt_softplus": True,
        "dt_limit": (0.1, 2.0),
    }, torch.randn(batch, nheads, headdim, dstate).to(device)  # fmt: skip


def wanted(state, call):
    call = {name: wide(value) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    return ref.mamba2.state_step(wide(state), *(call.pop(name) for name in ("x", "dt", "A", "B", "C")), **call)


SIZES = [(1, 4, 64, 128, 1), (2, 6, 5, 16, 2), (3, 2, 33, 17, 1), (1, 2, 64, 256, 1), (1, 1, 1, 1, 1), (2, 3, 7, 40, 3)]


@on_both
@in_both
@pytest.mark.parametrize("batch, nheads, headdim, dstate, ngroups", SIZES)
def test_state_step(batch, nheads, headdim, dstate, ngroups, dtype, device):
    call, state = arguments(batch, nheads, headdim, dstate, ngroups, dtype, device)
    for kind in (torch.float32, dtype, 8):
        if kind == 8 and dstate % 16:
            continue
        mine = QuantizedState.of(state) if kind == 8 else state.to(kind).clone()
        numbers = lambda: wide(mine.dequantize() if isinstance(mine, QuantizedState) else mine)  # noqa: B023, E731
        y, h = wanted(torch.from_numpy(numbers()), call)
        out = torch.full_like(call["x"].contiguous(), math.nan)
        assert state_step(mine, **call, out=out) is out
        assert off(out, y) < 1.2 * ALLOWED[dtype]
        if kind == 8:  # half of a code is the most that a number is off by
            assert (abs(numbers() - h) <= 0.501 * abs(h).max(-1, keepdims=True) / 127).all()
        else:
            assert off(numbers(), h) < (2e-6 if kind is torch.float32 else ALLOWED[dtype])


@on_both
def test_what_may_be_left_out(device):
    call, state = arguments(2, 4, 16, 32, 1, device=device)
    for left_out in ("D", "z", "dt_bias", "dt_softplus", "dt_limit"):
        less = {name: value for name, value in call.items() if name != left_out}
        y, h = wanted(state, less)
        mine = state.clone()
        assert off(state_step(mine, **less), y) < ALLOWED[torch.float16] and off(mine, h) < 1e-6


@on_both
def test_a_row_of_zeros_has_the_scale_0_and_comes_alive(device):
    call, state = arguments(1, 2, 16, 32, 1, device=device)
    mine, _ = QuantizedState.of(0 * state), state
    call["x"].zero_()
    assert not state_step(mine, **call).isnan().any() and (mine.scale == 0).all() and (mine.codes == 0).all()
    call["x"].fill_(1)
    state_step(mine, **call)
    assert (mine.scale > 0).all() and (mine.codes.abs().amax(-1) == 127).all()


@on_both
@pytest.mark.parametrize("less", [(), ("dt_limit",), ("dt_limit", "dt_softplus")], ids=str)
def test_nan_in_dt_reaches_its_head_and_no_other(less, device):
    """No limit takes its place; and NaN in x reaches its row."""
    call, state = arguments(2, 4, 21, 32, 2, device=device)
    call = {name: value for name, value in call.items() if name not in less}
    call["dt"], call["x"] = call["dt"].clone(), call["x"].clone()
    for kind in (32, 16, 8):
        make = {32: state.clone, 16: state.half, 8: lambda: QuantizedState.of(state)}[kind]
        numbers = lambda h: h.dequantize() if isinstance(h, QuantizedState) else h  # noqa: E731
        for name, place in (("dt", (1, 2)), ("x", (0, 3, 5))):
            mine, clean, value = make(), make(), call[name].clone()
            wanted = state_step(clean, **call)
            value[place] = math.nan
            y = state_step(mine, **call | {name: value})
            assert y[place].isnan().all() and numbers(mine)[place].isnan().all()
            wanted[place], numbers_of_others = math.nan, numbers(clean).clone()
            numbers_of_others[place] = math.nan
            torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(numbers(mine), numbers_of_others, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows, threads", [(1, 64), (2, 128), (4, 32)])
@pytest.mark.parametrize("coded", [False, True])
def test_no_two_threads_meet(rows, threads, coded):
    call, state = arguments(2, 4, 21, 32, 2)
    mine = QuantizedState.of(state) if coded else state.clone()
    codes, scale = (mine.codes, mine.scale) if coded else (mine, None)
    y, h = wanted(mine.dequantize() if coded else state, call)
    out = torch.full((2, 4, 21), math.nan).half()
    found = stepping.plan(32, 16 // codes.element_size(), 1, rows, threads)
    tensors = [call[name] for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")]
    stepping._launch(found, codes, scale, *tensors, out, True, call["dt_limit"], False, check_races=True)
    assert off(out, y) < ALLOWED[torch.float16]
    assert off(mine.dequantize() if coded else mine, h) < (1e-2 if coded else 1e-6)


def test_bad_arguments_are_named():
    call, state = arguments(2, 4, 16, 32, 2)
    out = torch.full((2, 4, 16), 7.0).half()
    coded = QuantizedState.of(torch.randn(2, 4, 16, 8))
    for changes, error, text in [
        ({"x": call["x"].float()}, TypeError, "x must be of torch.float16 or torch.bfloat16"),
        ({"state": state[:1]}, ValueError, r"state must have shape \(2, 4, 16, dstate\).*got \(1, 4, 16, 32\)"),
        ({"state": state.double()}, TypeError, "state must be of torch.float32 or torch.float16, got torch.float64"),
        ({"state": state.mT.contiguous().mT}, ValueError, "state must be contiguous"),
        ({"state": coded, "B": call["B"][..., :8]}, ValueError, "state of 8 bits must have dstate a multiple of 16"),
        ({"B": call["B"][..., :5]}, ValueError, r"B must have shape \(2, ngroups, 32\)"),
        (
            {"B": call["B"][:, :1].repeat(1, 3, 1), "C": call["C"][:, :1].repeat(1, 3, 1)},
            ValueError,
            "nheads must be a",
        ),
        ({"dt": call["dt"].float()}, TypeError, "dt must be of torch.float16"),
        ({"A": call["A"].half()}, TypeError, "A must be of torch.float32"),
        ({"dt_limit": (2, 1)}, ValueError, "dt_limit must be .lowest, highest., got"),
        ({"dt_limit": 3}, TypeError, "dt_limit must be two numbers, got"),
        ({"out": out[:1]}, ValueError, r"out must have shape \(2, 4, 16\)"),
        ({"z": state.view(-1)[:64].half().view(1, 4, 16)}, ValueError, r"z must have shape \(2, 4, 16\)"),
    ]:
        with pytest.raises(error, match="state_step: " + text):
            state_step(**{"state": state, "out": out, **call} | changes)
    assert (out == 7).all()


# The two products

PRODUCTS = [(50, 16, 24, 64), (37, 10, 17, 33), (300, 128, 160, 128), (5, 0, 5, 8), (1, 0, 1, 1), (1100, 500, 90, 520)]


@on_both
@in_both
@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("wide_residual", [False, True])
@pytest.mark.parametrize("rows, inner, channels, cols", PRODUCTS)
def test_norm_in_proj(rows, inner, channels, cols, wide_residual, bulk, dtype, device):
    made = lambda *shape, dtype=dtype: torch.randn(shape).to(dtype).to(device)  # noqa: E731
    residual, norm = made(cols, dtype=torch.float32 if wide_residual else dtype), made(cols)
    W, bias = (made(rows, cols) * cols**-0.5).contiguous(), made(rows)
    state, weight, conv_bias = made(3, channels), made(channels, 4, dtype=torch.float32), made(channels).float()
    x = wide(residual)
    product = wide(W) @ (x / np.sqrt((x * x).mean() + 1e-5) * wide(norm))
    assert off(norm_in_proj(residual, norm, W, bulk=bulk), product) < ALLOWED[dtype]
    product = product + wide(bias)
    before = state.clone()
    out = torch.full((rows,), math.nan).to(dtype).to(device)
    how = {"conv_state": state, "conv_weight": weight, "conv_bias": conv_bias, "inner": inner, "bulk": bulk}
    assert norm_in_proj(residual, norm, W, bias=bias, **how, ahead=W[:7] if bulk else None, out=out) is out
    assert torch.equal(state[:2], before[1:]) and off(state[2], product[inner : inner + channels]) < 2 * ALLOWED[dtype]
    seen = torch.cat((before, state[2:]))  # the newest as it was rounded
    convolved, _ = ref.mamba2.conv1d(wide(seen)[None], wide(weight), wide(conv_bias))
    assert off(out[inner : inner + channels], convolved[0, 3]) < ALLOWED[dtype]
    rest = np.delete(np.arange(rows), slice(inner, inner + channels))
    if len(rest):
        assert off(out[torch.from_numpy(rest).to(device)], product[rest]) < 2 * ALLOWED[dtype]


@on_both
@in_both
@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("wide_residual", [False, True])
@pytest.mark.parametrize("rows, cols", [(50, 64), (37, 33), (300, 128), (1, 1), (13, 8200)])
def test_norm_out_proj(rows, cols, wide_residual, bulk, dtype, device):
    made = lambda *shape, dtype=dtype: torch.randn(shape).to(dtype).to(device)  # noqa: E731
    x, norm, bias, W = made(cols), made(cols), made(rows), (made(rows, cols) * cols**-0.5).contiguous()
    a = wide(x)
    normed = a / np.sqrt((a * a).mean() + 1e-5) * wide(norm)
    for options, vector in (({"norm_weight": norm, "bias": bias}, normed), ({"norm_weight": None}, a)):
        residual = made(rows, dtype=torch.float32 if wide_residual else dtype)
        total = wide(residual) + wide(W) @ vector + (wide(bias) if "bias" in options else 0)
        how = options | {"bulk": bulk, "ahead": W if bulk else None}
        assert norm_out_proj(x, W=W, residual=residual, **how) is residual
        assert off(residual, total) < (2e-6 if wide_residual else ALLOWED[dtype])


@pytest.mark.parametrize("rows, cols, processors", [(70, 64, 3), (9, 4104, 2), (41, 128, 1)])
def test_weights_by_tma_give_what_others_give_and_no_two_threads_meet(rows, cols, processors, monkeypatch):
    """A ring that goes round, groups that are not whole, a block with fewer rows; and two words of a row a thread."""
    launch, seen = cuda.Kernel.__call__, []

    def watched(kernel, grid, block, *args, **how):
        seen.append((kernel.name, grid))
        return launch(kernel, grid, block, *args, **how, check_races=True)

    monkeypatch.setattr(launches, "multiprocessors", lambda device: processors)
    monkeypatch.setattr(cuda.Kernel, "__call__", watched)
    W, norm, bias = (torch.randn(rows, cols) * cols**-0.5).half(), torch.randn(cols).half(), torch.randn(rows).half()
    residual, x, total = torch.randn(cols), torch.randn(cols).half(), torch.randn(rows)
    channels, window = min(rows, 30), torch.randn(3, min(rows, 30)).half()
    weight, found = torch.randn(channels, 4), {}
    for bulk in (False, True):
        state, sums = window.clone(), total.clone()
        conv = {"conv_state": state, "conv_weight": weight, "inner": rows - channels}
        y = norm_in_proj(residual, norm, W, bias=bias, **conv, bulk=bulk, ahead=W)
        norm_out_proj(x, norm, W, sums, bias=bias, bulk=bulk, ahead=W[:5])
        found[bulk] = wide(y), wide(state), wide(sums)
    names = {name for name, _ in seen}
    assert names == {"norm_in_proj", "norm_out_proj", "in_proj_ring", "out_proj_ring"}
    assert max(grid for name, grid in seen if name.endswith("ring")) == processors
    for mine, others in zip(found[True], found[False]):
        assert off(mine, others) < ALLOWED[torch.float16]


def test_the_plan_of_a_ring():
    room = 227 * 1024
    for rows, cols in ((10576, 2560), (2560, 5120), (50288, 2560), (4096, 14336), (1, 8), (3, 5128), (9, 40000)):
        grid, threads, teams, per_group, stages, flying, shared = launches.ring_plan(rows, cols, 132, room)
        slot = per_group * cols * 2
        assert 1 <= teams and threads * teams < 1024 and 2 <= flying <= stages
        assert stages * slot <= max(2 * slot, launches.RING) and shared + 2048 <= room
        assert threads % 32 == 0 and threads * -(-cols // 8 // threads) * 8 >= cols and grid <= min(132, rows)
    assert launches.ring_plan(100, 33, 132, room) is None  # no whole words
    assert launches.ring_plan(100, 80000, 132, room) is None  # a ring of one group is none


def test_bad_products_are_named():
    W, x, residual, norm = torch.ones(6, 8).half(), torch.ones(8).half(), torch.ones(6), torch.ones(8).half()
    wide_x, state, weight = torch.ones(8), torch.ones(3, 4).half(), torch.ones(4, 4)
    for call, error, text in [
        ((x[:3], norm, W), ValueError, r"residual must have shape \(8,\)"),
        ((wide_x, norm.float(), W), TypeError, "norm_weight must be of torch.float16"),
        ((wide_x, norm, W.float()), TypeError, "W must be of torch.float16 or torch.bfloat16"),
    ]:
        with pytest.raises(error, match="norm_in_proj: " + text):
            norm_in_proj(*call)
    for options, text in [
        ({"conv_state": state}, "conv_state and conv_weight must both be given, or neither"),
        ({"conv_state": state, "conv_weight": weight, "inner": 3}, "inner must be from 0 to 2, got 3"),
        ({"conv_state": state[:2], "conv_weight": weight}, r"conv_state must have shape \(3, 4\)"),
        ({"conv_state": state, "conv_weight": torch.ones(4, 12)}, "weight must have from 2 to 8 taps"),
        ({"bias": x}, r"bias must have shape \(6,\)"),
        ({"ahead": x}, r"ahead must have shape \(rows, hidden\), none of it 0, got \(8,\)"),
    ]:
        with pytest.raises(ValueError, match="norm_in_proj: " + text):
            norm_in_proj(wide_x, norm, W, **options)
    with pytest.raises(TypeError, match="norm_out_proj: ahead must be of torch.float16"):
        norm_out_proj(x, norm, W, residual, ahead=W.float())
    for call, error, text in [
        ((x, norm, W, residual[:5]), ValueError, r"residual must have shape \(6,\)"),
        ((x[:5], norm, W, residual), ValueError, r"x must have shape \(8,\)"),
        ((x, norm, torch.ones(8, 8).half(), x), ValueError, "residual must not share memory with x"),
    ]:
        with pytest.raises(error, match="norm_out_proj: " + text):
            norm_out_proj(*call)


# The whole


@on_both
@pytest.mark.parametrize("shape", [SMALL, GROUPS], ids=lambda shape: shape.name)
@pytest.mark.parametrize("kind", [Step, OneOperationEach, TorchOperations])
def test_a_token_is_what_float64_says(kind, shape, device):
    """Logits, and the states behind it; with PDL too, whose hazards the SIMT machine watches."""
    torch.manual_seed(3)
    weights, state = shapes.random_weights(shape, device), shapes.RandomState(shape, device=device)
    wanted = shapes.wanted_logits(shape, weights, state, 5)
    after = None
    for pdl in (False, True):
        step, mine = kind(shape, weights, shape.dtype, device, pdl=pdl), state.copy()
        step.token.fill_(5), step.kv_len.fill_(9)
        step.launch(mine)
        assert off(step.logits, wide(wanted)) < 3e-3
        assert torch.equal(mine.conv[:, :, :-1], state.conv[:, :, 1:])
        assert after is None or torch.equal(mine.ssm, after)
        after = mine.ssm


@on_both
@pytest.mark.parametrize("kind", [Step, OneOperationEach, TorchOperations, OneLaunch])
def test_a_step_that_is_nan_stays_nan(kind, device):
    """In the last layer: in that head's state and in no other, and in the logits."""
    torch.manual_seed(3)
    weights, state = shapes.random_weights(SMALL, device), shapes.RandomState(SMALL, device=device)
    found = []
    for value in (0.0, math.nan):
        weights.layers[-1].dt_bias[2] = value
        step, mine = kind(SMALL, weights, SMALL.dtype, device), state.copy()
        step.token.fill_(5)
        step.launch(mine)
        found.append(mine.ssm)
    clean, with_nan = found
    assert step.logits.isnan().all() and with_nan[-1, :, 2].isnan().all()
    clean[-1, :, 2] = math.nan
    torch.testing.assert_close(with_nan, clean, rtol=0, atol=0, equal_nan=True)


@on_both
def test_states_of_16_and_8_bits_stay_near(device):
    torch.manual_seed(4)
    weights, state = shapes.random_weights(SMALL, device), shapes.RandomState(SMALL, device=device)
    step = Step(SMALL, weights, SMALL.dtype, device)
    found = {}
    for kind in (32, 16, 8):
        mine = state.copy()
        if kind == 16:
            mine.ssm = mine.ssm.half()
        elif kind == 8:
            mine.ssm = QuantizedState.of(mine.ssm)
        step.token.fill_(5)
        for _ in range(3):
            step.launch(mine)
        found[kind] = step.logits.double().clone()
    assert off(found[16], wide(found[32])) < 5e-3 and 1e-5 < off(found[8], wide(found[32])) < 5e-2
