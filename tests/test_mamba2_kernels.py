"""Convolution and norms of Mamba-2 against the reference: on the SIMT machine, and on a card where there is one."""

import math

import numpy as np
import pytest
import torch

import ref.mamba2
from kernels.mamba2 import add_norm, conv1d, conv_step, embed, gated_norm
from kernels.mamba2.convolution import launch_conv1d
from ref.fusion import rmsnorm

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
ALLOWED = {torch.float16: 5.2e-4, torch.bfloat16: 4.1e-3}  # rounding a result, at its worst, and a little
on_both = pytest.mark.parametrize("device", DEVICES)
in_both = pytest.mark.parametrize("dtype", ALLOWED, ids=str)


def off(found, wanted):
    found = found.double().cpu().numpy() if isinstance(found, torch.Tensor) else found
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def wide(tensor):
    return None if tensor is None else tensor.double().cpu().numpy()


def inputs(batch, seqlen, channels, width=4, dtype=torch.float16, device="cpu", gap=8):
    """A view of a projection that is wider, between NaNs, and weights."""
    projected = torch.full((batch, seqlen, channels + 2 * gap), math.nan).to(dtype).to(device)
    xBC = projected[:, :, gap : gap + channels]
    xBC.copy_(torch.randn(batch, seqlen, channels))
    weight, bias = torch.randn(channels, width).to(device), torch.randn(channels).to(device)
    return xBC, weight, bias, torch.randn(batch, width - 1, channels).to(dtype).to(device)


@on_both
@in_both
@pytest.mark.parametrize(
    "batch, seqlen, channels, width, gap",
    [(1, 1, 8, 4, 8), (2, 37, 24, 4, 8), (1, 16, 13, 4, 1), (1, 17, 40, 2, 4), (3, 5, 6, 3, 2), (1, 49, 16, 8, 0)],
)
def test_conv1d(batch, seqlen, channels, width, gap, dtype, device):
    """Every width of word, one token, one past a walk, a window longer than the text."""
    xBC, weight, bias, state = inputs(batch, seqlen, channels, width, dtype, device, gap)
    for options in ({}, {"bias": bias}, {"bias": bias, "initial_state": state}):
        found, final = conv1d(xBC, weight, **options)
        wanted, last = ref.mamba2.conv1d(
            wide(xBC), wide(weight), *(wide(options.get(n)) for n in ("bias", "initial_state"))
        )
        assert off(found, wanted) < ALLOWED[dtype]
        np.testing.assert_array_equal(wide(final), last)
    starts = torch.randint(0, 3, (batch, seqlen)).cumsum(1).int().to(device) // 3
    found, final = conv1d(xBC, weight, bias, initial_state=state, seq_idx=starts)
    wanted, last = ref.mamba2.conv1d(
        wide(xBC), wide(weight), wide(bias), wide(state), seq_idx=starts.cpu().numpy()
    )  # fmt: skip
    assert off(found, wanted) < ALLOWED[dtype]
    np.testing.assert_array_equal(wide(final), last)


@on_both
@in_both
@pytest.mark.parametrize("channels, width, gap", [(24, 4, 8), (13, 2, 1), (6, 3, 2), (16, 8, 0)])
@pytest.mark.parametrize("begins", [(0, 45), (0, 1, 2, 45), (0, 0, 3, 3, 3, 19, 20, 45, 45), (0, 16, 32, 45)])
def test_conv1d_of_sequences_end_to_end(begins, channels, width, gap, dtype, device):
    """Sequences shorter than the window, without tokens at either end and between, at the ends of walks."""
    xBC, weight, bias, _ = inputs(1, begins[-1], channels, width, dtype, device, gap)
    state = torch.randn(len(begins) - 1, width - 1, channels).to(dtype).to(device)
    cu_seqlens = torch.tensor(begins, dtype=torch.int32, device=device)
    for initial in (None, state):
        last = torch.full_like(state, math.nan)
        found, final = conv1d(xBC, weight, bias, initial_state=initial, cu_seqlens=cu_seqlens, final_state=last)
        wanted, states = ref.mamba2.conv1d(*map(wide, (xBC, weight, bias, initial)), cu_seqlens=begins)
        assert final is last and off(found, wanted) < ALLOWED[dtype]
        np.testing.assert_array_equal(wide(final), states)
    alone = [
        conv1d(xBC[:, a:b], weight, bias, initial_state=state[i, None])[0]
        for i, (a, b) in enumerate(zip(begins, begins[1:]))
        if a < b
    ]
    assert torch.equal(torch.cat(alone, dim=1), found)


@pytest.mark.parametrize(
    "begins",
    [
        (10**9, 2 * 10**9, 45),  # the first token is of nobody
        (5, 20, 45),
        (-7, -2, 45),
        (-(2**31), 2**31 - 1, -(2**31)),
        (0, 30, 10, 30, 2**31 - 1),  # falling
        (0, 2, 1, 1, 44, 3, -1),
        (0, 100, 200, 45),
    ],
)
@pytest.mark.parametrize("vec, tokens", [(4, 16), (1, 45), (2, 7)])
def test_wrong_cu_seqlens_that_nobody_looks_at_lead_nowhere(vec, tokens, begins):
    """As on a card, where values are not looked at: nothing is read or written but the tensors, which the SIMT machine
    would notice, and every token is written."""
    xBC, weight, bias, _ = inputs(1, 45, 16, gap=0)
    state = torch.randn(len(begins) - 1, 3, 16).half()
    out, final = torch.full((1, 45, 16), math.nan).half(), torch.zeros_like(state)
    for initial in (None, state):
        tensors = xBC, weight, bias, initial, None, torch.tensor(begins, dtype=torch.int32)
        launch_conv1d(*tensors, out.fill_(math.nan), final, 4, False, tokens=tokens, vec=vec)
        assert out.isfinite().all() and final.isfinite().all()
    whole, _ = conv1d(xBC, weight, bias, cu_seqlens=torch.tensor([0, 45], dtype=torch.int32))
    if min(begins[1:-1]) >= 45:  # the first sequence, wherever it is said to begin, has all tokens
        launch_conv1d(*tensors[:3], None, None, tensors[5], out, final, 4, False, tokens=tokens, vec=vec)
        assert torch.equal(out, whole)


@on_both
def test_conv1d_in_pieces_is_conv1d_at_once_bit_for_bit(device):
    xBC, weight, bias, state = inputs(2, 45, 24, device=device)
    whole, last = conv1d(xBC, weight, bias, initial_state=state)
    for cuts in ((1, 44), (2, 1, 42), (20, 25)):
        parts, at = [], state
        for piece in xBC.split(cuts, dim=1):
            found, at = conv1d(piece, weight, bias, initial_state=at)
            parts.append(found)
        assert torch.equal(torch.cat(parts, dim=1), whole) and torch.equal(at, last)


@on_both
@in_both
def test_a_step_of_the_convolution_is_conv1d_bit_for_bit(dtype, device):
    xBC, weight, bias, state = inputs(3, 6, 40, dtype=dtype, device=device)
    whole, last = conv1d(xBC, weight, bias, initial_state=state)
    out = torch.full_like(xBC[:, 0].contiguous(), math.nan)
    for t in range(6):
        assert conv_step(state, xBC[:, t], weight, bias, out=out) is out and torch.equal(out, whole[:, t])
    assert torch.equal(state, last)


@pytest.mark.parametrize("vec, tokens", [(8, 16), (4, 5), (2, 3), (1, 64)])
def test_no_two_threads_of_conv1d_meet(vec, tokens):
    xBC, weight, bias, state = inputs(2, 33, 16)
    out, final = torch.full((2, 33, 16), math.nan).half(), torch.full((2, 3, 16), math.nan).half()
    tensors, how = (xBC, weight, bias, state), dict(tokens=tokens, vec=vec, check_races=True)
    launch_conv1d(*tensors, None, None, out, final, 4, False, **how)
    wanted, last = ref.mamba2.conv1d(*map(wide, tensors))
    assert off(out, wanted) < ALLOWED[torch.float16] and (wide(final) == last).all()
    begins = [0, 0, 2, 16, 17, 33, 33]
    tensors = xBC[:1], weight, bias, torch.randn(6, 3, 16).half()
    out, final = torch.full((1, 33, 16), math.nan).half(), torch.full((6, 3, 16), math.nan).half()
    launch_conv1d(*tensors, None, torch.tensor(begins, dtype=torch.int32), out, final, 4, False, **how)
    wanted, last = ref.mamba2.conv1d(*map(wide, tensors), cu_seqlens=begins)
    assert off(out, wanted) < ALLOWED[torch.float16] and (wide(final) == last).all()


@on_both
@in_both
@pytest.mark.parametrize(
    "tokens, columns, ngroups", [(1, 8, 1), (3, 40, 5), (2, 13, 1), (2, 26, 2), (5, 1032, 1), (1, 8200, 1)]
)
def test_gated_norm(tokens, columns, ngroups, dtype, device):
    made = lambda *shape: torch.randn(shape).to(dtype).to(device)  # noqa: E731
    y, z, weight = made(tokens, columns), made(tokens, columns + 8)[:, 8:], made(columns)
    out = torch.full_like(y, math.nan)
    assert gated_norm(y, z, weight, 1e-5, ngroups=ngroups, out=out) is out
    assert off(out, ref.mamba2.gated_norm(*map(wide, (y, z, weight)), 1e-5, ngroups)) < ALLOWED[dtype]
    z[:] = -200  # silu is 0 there, and no NaN
    assert not gated_norm(y, z, weight).isnan().any()


@on_both
@in_both
@pytest.mark.parametrize("wide_residual", [False, True])
@pytest.mark.parametrize("tokens, hidden", [(1, 8), (3, 40), (2, 13), (2, 2560)])
def test_add_norm(tokens, hidden, wide_residual, dtype, device):
    made = lambda *shape: torch.randn(shape).to(dtype).to(device)  # noqa: E731
    x, weight = made(tokens, hidden), made(hidden)
    residual = made(tokens, hidden).to(torch.float32 if wide_residual else dtype)
    total = wide(x) + wide(residual)
    for add, wanted in ((None, wide(residual)), (x, total)):
        found = add_norm(add, residual, weight, 1e-5)
        assert off(residual, wanted) < (1e-6 if wide_residual else ALLOWED[dtype])
        truth = np.stack([rmsnorm(row, wide(weight), 1e-5) for row in wanted])
        assert off(found, truth) < 1.5 * ALLOWED[dtype]


@on_both
@in_both
def test_embed(dtype, device):
    E = torch.randn(13, 257).to(dtype).to(device)
    for out in (torch.empty(257, device=device), torch.empty(257, dtype=dtype, device=device)):
        assert embed(E, torch.tensor([7], device=device), out=out) is out and torch.equal(out, E[7].to(out.dtype))
        for token in (-1, 13, 2**40):
            assert embed(E, torch.tensor([token], device=device), out=out).isnan().all()


def test_bad_arguments_are_named():
    xBC, weight, bias, state = inputs(2, 5, 8)
    out = torch.full((2, 5, 8), 7.0).half()
    call = {"xBC": xBC, "weight": weight, "bias": bias, "initial_state": state, "out": out}
    for changes, error, wanted in [
        ({"xBC": xBC.float()}, TypeError, "xBC must be of torch.float16 or torch.bfloat16, got torch.float32"),
        ({"xBC": xBC[0]}, ValueError, r"xBC must have shape \(batch, seqlen, channels\), none of it 0, got \(5, 8\)"),
        ({"xBC": xBC.mT}, ValueError, "xBC must be contiguous along its last 1 axes"),
        ({"xBC": xBC[:, :1].expand(2, 5, 8)}, ValueError, "xBC must not repeat its memory"),
        ({"weight": weight.half()}, TypeError, "weight must be of torch.float32, got torch.float16"),
        ({"weight": torch.ones(8, 9)}, ValueError, "weight must have from 2 to 8 taps a channel, got 9"),
        ({"bias": bias[:3]}, ValueError, r"bias must have shape \(8,\)"),
        ({"initial_state": state[:1]}, ValueError, r"initial_state must have shape \(2, 3, 8\).*got \(1, 3, 8\)"),
        ({"initial_state": state.float()}, TypeError, "initial_state must be of torch.float16"),
        ({"seq_idx": torch.zeros(2, 5, dtype=torch.int64)}, TypeError, "seq_idx must be of torch.int32"),
        ({"cu_seqlens": torch.tensor([0, 5])}, TypeError, "cu_seqlens must be of torch.int32"),
        (
            {"cu_seqlens": torch.tensor([0, 5]).int()},
            ValueError,
            "xBC must have batch 1 where cu_seqlens is given, got 2",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 5]).int(), "seq_idx": torch.zeros(2, 5).int()},
            ValueError,
            "seq_idx and cu_seqlens must not both be given",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 3, 2, 5]).int(), "xBC": xBC[:1], "out": None},
            ValueError,
            r"cu_seqlens must go from 0 to 5, never falling, got \[0, 3, 2, 5\]",
        ),
        ({"out": out.float()}, TypeError, "out must be of torch.float16"),
        ({"final_state": state}, ValueError, "final_state must not share memory with initial_state"),
    ]:
        with pytest.raises(error, match="conv1d: " + wanted):
            conv1d(**call | changes)
    with pytest.raises(ValueError, match=r"conv_step: conv_state must have shape \(2, 3, 8\).*got \(1, 3, 8\)"):
        conv_step(state[:1], xBC[:, 0], weight)
    y, z, norm = torch.randn(3, 12).half(), torch.randn(3, 12).half(), torch.randn(12).half()
    for call, error, wanted in [
        ((y, z[:2], norm), ValueError, r"z must have shape \(3, 12\)"),
        ((y, z, norm[:3]), ValueError, r"weight must have shape \(12,\)"),
        ((y, z, norm, math.nan), ValueError, "eps must be 0 or more"),
    ]:
        with pytest.raises(error, match="gated_norm: " + wanted):
            gated_norm(*call)
    with pytest.raises(ValueError, match="gated_norm: ngroups must divide d_inner, 12, got 5"):
        gated_norm(y, z, norm, ngroups=5)
    with pytest.raises(ValueError, match="add_norm: residual must not share memory with x"):
        add_norm(y, y, norm)
    assert (out == 7).all()
