"""The five SSD kernels on a card: right between NaNs, in graphs, on long sequences, and the same bits every time."""

import sys

import pytest
import torch
from test_ssd_five import ALLOWED, off, problem, recurrence

from kernels.ssd import dropin, five, float32_scores, launching, mamba_chunk_scan_combined, peers
from kernels.ssd.five import sequence_numbers

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")

# dtype, all options or none; batch, seqlen, nheads, headdim, ngroups, dstate, chunk_size. Each is compiled: so, few
CASES = [
    (torch.float16, True, (2, 777, 4, 24, 2, 40, 64)),
    (torch.float16, False, (1, 515, 8, 64, 1, 128, 256)),
    (torch.float32, True, (1, 300, 3, 70, 3, 130, 512)),
    (torch.float32, False, (1, 1, 2, 16, 1, 16, 16)),
    (torch.float32, True, (2, 777, 4, 24, 2, 40, 64)),
    (torch.float32, True, (1, 700, 6, 128, 2, 256, 256)),
    (torch.bfloat16, True, (1, 700, 2, 128, 1, 256, 128)),
]


def between(tensor, fence=torch.nan):
    """A copy on the card that lies between guards, off a multiple of 16 bytes."""
    home = torch.full((tensor.numel() + 129,), fence, dtype=tensor.dtype, device="cuda")
    return home[65 : 65 + tensor.numel()].view(tensor.shape).copy_(tensor)


def on_card(call):
    return {name: between(value) if isinstance(value, torch.Tensor) else value for name, value in call.items()}


@pytest.mark.parametrize("dtype, rest, shape", CASES, ids=str)
def test_right_on_hostile_shapes(dtype, rest, shape):
    call = on_card(problem(*shape[:-1], dtype, rest=rest))
    out = between(torch.full_like(call["x"], torch.nan), 1234)
    y, final = five(**call, chunk_size=shape[-1], return_final_states=True, out=out)
    wanted, states = recurrence(**call)
    # of float32, what the docstring promises; sums of A dt, of which decays are differences, grow with a chunk
    allowed = (1e-5 if dtype is torch.float32 else ALLOWED[dtype]) * max(1, shape[-1] / 256)
    assert y is out and off(y, wanted) < allowed and off(final, states[:, -1]) < allowed
    home = torch.empty(0, dtype=dtype, device="cuda").set_(out.untyped_storage())
    assert (home[:65] == 1234).all() and (home[65 + out.numel() :] == 1234).all()


# of float32's own kernels, which want multiples of 16
OWN = [
    (True, (1, 700, 6, 128, 2, 256, 256)),
    (True, (2, 777, 4, 64, 2, 128, 128)),
    (False, (1, 515, 8, 64, 1, 128, 256)),
    (True, (1, 300, 3, 80, 3, 144, 512)),
    (False, (2, 777, 4, 32, 2, 48, 64)),
    (True, (1, 1, 2, 16, 1, 16, 16)),
]


@pytest.mark.parametrize("rest, shape", OWN, ids=str)
def test_float32s_own_kernels(monkeypatch, rest, shape):
    """Right, hardly a number spills, the same bits each time, whatever memory has held; and they are what runs."""
    call = {name: value.cuda() if isinstance(value, torch.Tensor) else value
            for name, value in problem(*shape[:-1], rest=rest).items()}  # fmt: skip
    monkeypatch.setattr(sys.modules["kernels.ssd.five"], "_run", None)
    launching._compiled.clear()
    first = five(**call, chunk_size=shape[-1], return_final_states=True)
    wanted, states = recurrence(**call)
    for got, right in zip(first, (wanted, states[:, -1])):
        assert off(got, right) < 1e-5 * max(1, shape[-1] / 256)
    assert len(launching._compiled) == 5 and max(kernel.n_spills for kernel in launching._compiled.values()) <= 16
    for value in (torch.nan, 3e38, 0.0, 1.0) * 10:
        for size in (12, 16, 18, 20, 22):  # what the workspace may find
            full = [torch.full((1 << size,), value, device="cuda") for _ in range(6)]
            del full
        again = five(**call, chunk_size=shape[-1], return_final_states=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first))


def test_sequences_of_a_row():
    call = on_card(problem(1, 700, 4, 64, 1, 128, torch.float16))
    cu_seqlens = torch.tensor([0, 0, 13, 400, 401, 640, 700], device="cuda")
    y, ends = five(**call, cu_seqlens=cu_seqlens, return_varlen_states=True)
    wanted, states = recurrence(**call, seq_idx=sequence_numbers(cu_seqlens, 700))
    assert off(y, wanted) < 1e-3 and off(ends[1:], states[0, cu_seqlens[2:] - 1]) < 1e-3 and not ends[0].any()


@pytest.mark.parametrize(
    "name, at", [("x", (0, 321, 1, 3)), ("dt", (0, 321, 1)), ("B", (0, 321, 0, 3)), ("C", (0, 321, 0, 3))]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_nan_reaches_what_it_should_and_nothing_else(dtype, name, at):
    call = problem(1, 700, 4, 64, 2, 128, dtype, rest=False)
    call[name][at] = torch.nan
    call = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in call.items()}
    y, wanted = five(**call), recurrence(**call)[0]
    assert (~wanted.isfinite()).any() and torch.equal(y.isfinite(), wanted.isfinite())
    assert off(y[y.isfinite()], wanted[wanted.isfinite()]) < (1e-5 if dtype is torch.float32 else 1e-3)


def test_parts_of_float32():
    """bfloat16, rounded, which Triton's interpreter does not do."""
    B, C = torch.randn(2, 2, 150, 2, 70, device="cuda").unbind()
    CB, cut_CB, *parts = float32_scores.run(B, C, 128)
    for tensor, part in (
        (B.transpose(1, 2), parts[0][:, :, :150, :, :70]),
        (C.transpose(1, 2), parts[1][:, :, :150, :, :70]),
    ):
        high = tensor.bfloat16()
        assert torch.equal(part[:, :, :, 0], high) and torch.equal(part[:, :, :, 1], (tensor - high.float()).bfloat16())
    under = CB[:, 0, :, 64:, :64]
    assert torch.equal(cut_CB[:, 0, :, 64:, 0, :64], under.bfloat16())


@pytest.mark.parametrize("chunk_size", [16, 64, 128, 256, 512])
def test_float32s_own_kernels_agree_with_the_others(chunk_size):
    call = {name: value.cuda() if isinstance(value, torch.Tensor) else value
            for name, value in problem(2, 777, 4, 64, 2, 128).items()}  # fmt: skip
    one = torch.zeros(2, 777, dtype=torch.int32, device="cuda")
    (y, final), (other, last) = (
        five(**call, chunk_size=chunk_size, return_final_states=True, seq_idx=seq_idx) for seq_idx in (None, one)
    )
    assert off(y, other.double()) < 1.5e-5 and off(final, last.double()) < 1.5e-5


def long(seqlen, dtype=torch.float16, batch=1):
    call = problem(1, 16, 80, 64, 1, 128, rest=False)
    for name in ("x", "dt", "B", "C"):
        shape = batch, seqlen, *call[name].shape[2:]
        call[name] = torch.empty(shape, dtype=dtype, device="cuda").normal_()
    call["dt"] -= 4
    call["A"] = call["A"].cuda() - 1
    return call


def test_long_sequences_go_on_as_short_ones():
    """Half a sequence, and the other half from the state in between."""
    call = long(10_000)
    y, final = five(**call, return_final_states=True)
    parts = [{k: v[:, at] if v.ndim > 1 else v for k, v in call.items() if k not in ("dt_softplus",)} for at in HALVES]
    first, state = five(**parts[0], dt_softplus=True, return_final_states=True)
    second, last = five(**parts[1], dt_softplus=True, initial_states=state, return_final_states=True)
    assert (
        torch.equal(first, y[:, :5120])
        and off(second, y[:, 5120:].double()) < 1e-3
        and off(last, final.double()) < 1e-5
    )


HALVES = slice(0, 5120), slice(5120, None)


def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GB of free memory on the card")
    call = long(430_000)
    assert call["x"].numel() > 1 << 31
    y, final = five(**call, return_final_states=True, state_dtype=torch.float16)
    tail = {k: v[:, -4000:] if v.ndim > 1 else v for k, v in call.items() if k != "dt_softplus"}  # the rest has decayed
    wanted, last = five(**tail, dt_softplus=True, return_final_states=True)
    assert off(y[:, -1000:], wanted[:, -1000:].double()) < 2e-3 and off(final, last.double()) < 2e-3


def test_a_graph_follows_its_inputs():
    call = long(3000)
    out = torch.empty_like(call["x"])
    five(**call, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        five(**call, out=out)
    for _ in range(2):
        call["x"].normal_()
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, five(**call))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_same_bits_every_time(dtype):
    call = long(5003, dtype)
    first, state = five(**call, return_final_states=True)
    for _ in range(100):
        full = torch.full((1 << 24,), torch.nan, device="cuda")  # what the workspace may find
        del full
        y, final = five(**call, return_final_states=True)
        assert torch.equal(y, first) and torch.equal(final, state)


def test_the_card_and_the_interpreter_agree():
    """The interpreter first: what is compiled after it must be right, too."""
    call = problem(1, 70, 2, 16, 1, 16)
    there, here = five(**call, chunk_size=32), five(**on_card(call), chunk_size=32).cpu()
    assert off(here, there.double()) < 1e-5  # there, float32 is multiplied as it is


def test_mamba_ssm_agrees(monkeypatch):
    """In the same place, with the same arguments."""
    monkeypatch.setattr(dropin, "fused", five)
    if peers.mamba() is None:
        pytest.skip("mamba_ssm is not installed")
    call = on_card(problem(2, 777, 8, 64, 2, 128, torch.float16))
    seq_idx = (torch.arange(777, device="cuda") // 300).int().repeat(2, 1)
    del call["initial_states"]
    for more in ({}, {"seq_idx": seq_idx}):
        theirs, last = peers.mamba()(**call, chunk_size=128, return_final_states=True, **more)
        with torch.no_grad():
            ours, final = mamba_chunk_scan_combined(**call, chunk_size=128, return_final_states=True, **more)
        assert off(ours, theirs.double()) < 2e-3 and off(final, last.double()) < 2e-3
