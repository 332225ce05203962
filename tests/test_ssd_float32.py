"""float32's own SSD kernels in Triton's interpreter: parts, layouts, decays from tile to tile, what is not finite.

Here they are called by themselves, at any strides; `five` calls them where they are multiples of 16.
"""

import math

import pytest
import torch
import triton
import triton.language as tl
from test_ssd_five import off, problem, recurrence

from kernels.ssd import chunk_cumsum, five, float32, float32_passing, float32_scan, float32_scores, float32_state
from kernels.ssd.float32_scores import cut
from kernels.ssd.launching import launch


def own(call, chunk_size):
    """y and the final states, by float32's own kernels."""
    y = torch.full_like(call["x"], math.nan)
    x, B, C, dt, A = (call[name] for name in ("x", "B", "C", "dt", "A"))
    D, z, dt_bias, initial_states = (call.get(name) for name in ("D", "z", "dt_bias", "initial_states"))
    limit = call.get("dt_limit", (0.0, math.inf))
    return y, float32.run(y, x, B, C, D, z, dt, dt_bias, initial_states, A, chunk_size, call["dt_softplus"], limit)


@triton.jit
def cut_kernel(value, high, low, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    high_i, low_i = cut(tl.load(value + i), high.dtype.element_ty)
    tl.store(high + i, high_i)
    tl.store(low + i, low_i)


def test_two_parts():
    """Of 11 bits here: Triton's interpreter does not round to bfloat16, it cuts off."""
    value = torch.randn(1024)
    high, low = torch.empty(2, 1024, dtype=torch.float16).unbind()
    launch(cut_kernel, (1, 1, 1), (value, high, low), (), (1024,))
    assert torch.equal(high, value.half()) and torch.equal(low, (value - high.float()).half())
    assert low.any() and off(high.double() + low.double(), value.double()) < 2**-21
    launch(cut_kernel, (1, 1, 1), (value, *(parts := torch.empty(2, 1024)).unbind()), (), (1024,))
    assert torch.equal(parts[0], value) and not parts[1].any()


@pytest.mark.parametrize("seqlen, groups, dstate, chunk_size", [(150, 2, 70, 128), (33, 1, 130, 16), (5, 1, 16, 256)])
def test_scores_and_parts(seqlen, groups, dstate, chunk_size):
    B, C = torch.randn(2, 2, seqlen, groups, dstate).unbind()
    CB, cut_CB, cut_B, cut_C = float32_scores.run(B, C, chunk_size)
    tile = min(float32_scores.TILE, chunk_size)
    whole = torch.einsum("blgn,bsgn->bgls", C.double(), B.double())
    for c in range(CB.shape[1]):
        at = slice(c * chunk_size, (c + 1) * chunk_size)
        part = whole[:, :, at, at].tril()
        rows = part.shape[2]
        assert off(CB[:, c, :, :rows, :rows].tril(), part) < 1e-6
        t = torch.arange(chunk_size) // tile
        under = t[:, None] > t  # tiles under the diagonal
        assert torch.equal(cut_CB[:, c].sum(3)[:, :, :rows][:, :, under[:rows]], CB[:, c, :, :rows][:, :, under[:rows]])
    for tensor, parts in ((B, cut_B), (C, cut_C)):
        assert torch.equal(parts.sum(3)[:, :, :seqlen, :dstate], tensor.transpose(1, 2))
        assert not parts[:, :, seqlen:].any() and not parts[..., dstate:].any()


def test_products_of_parts(monkeypatch):
    """With parts of 11 bits, which Triton's interpreter multiplies as they are: a product left out would be off by
    2**-12 of it."""
    for module in (float32_scores, float32_passing):
        monkeypatch.setattr(module, "part_type", lambda x: torch.float16)
    for shape, chunk_size in (((1, 150, 2, 16, 1, 24), 128), ((2, 40, 4, 20, 2, 140), 16)):
        call = problem(*shape)
        y, final = own(call, chunk_size)
        wanted, states = recurrence(**call)
        assert off(y, wanted) < 2e-6 and off(final, states[:, -1]) < 2e-6


def test_states_are_handed_on_cut():
    states, cum = torch.randn(2, 3, 2, 20, 30), -torch.rand(2, 2, 3, 16)
    initial = torch.randn(2, 2, 20, 30)
    starts, final = float32_passing.run(states, cum, initial)
    assert starts.shape == (2, 3, 2, 20, 2, 30)
    state = initial.double()
    for c in range(3):
        assert off(starts[:, c].sum(3), state) < 1e-6
        state = state * torch.exp2(cum[:, :, c, -1, None, None].double()) + states[:, c]
    assert off(final, state) < 1e-6


@pytest.mark.parametrize("chunk_size", [16, 64, 128, 256, 512])
@pytest.mark.parametrize("rate", [0.01, 16.0, 1e4])  # a tile decays by nothing, by 2**-150, or a token by 2**-200
def test_decays_from_tile_to_tile(chunk_size, rate):
    call = problem(1, 300, 2, 16, 1, 16, rest=False) | {"A": torch.tensor([-rate, -rate / 3])}
    y, final = own(call, chunk_size)
    wanted, states = recurrence(**call)
    # sums of A dt, of which decays are differences, grow with a chunk
    assert off(y, wanted) < 1e-5 and off(final, states[:, -1]) < 1e-5


def test_one_group_and_many():
    for heads, groups in ((6, 1), (6, 2), (3, 3)):
        call = problem(2, 150, heads, 20, groups, 24)
        assert off(own(call, 128)[0], recurrence(**call)[0]) < 2e-6


@pytest.mark.parametrize("tokens", [(3,), (70,), (127, 128), (199,)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_reaches_later_tokens_only(tokens, value):
    """In a tile on the diagonal, in one under it, at the chunk's end, in the last token. D has a number a head."""
    call = problem(1, 200, 2, 16, 1, 16, rest=False) | {"D": torch.randn(2)}
    for token in tokens:
        call["x"][0, token, 1, 3] = value
    y, wanted = own(call, 128)[0], recurrence(**call)[0]
    assert (~wanted.isfinite()).any() and torch.equal(y.isfinite(), wanted.isfinite())
    assert off(y[y.isfinite()], wanted[wanted.isfinite()]) < 2e-6


def test_numbers_at_the_end_of_float32():
    """Rounded to 8 bits they are infinite: the chunk is then computed token by token, without parts."""
    call = problem(1, 70, 2, 16, 1, 16, rest=False)
    call["x"][0, 20, 0, 3] = torch.finfo(torch.float32).max
    call["dt"][:] = -20  # softplus: 2e-9
    y, wanted = own(call, 64)[0], recurrence(**call)[0]
    assert y.isfinite().all() and off(y, wanted) < 1e-5


def test_five_leaves_float32_to_them(monkeypatch):
    """But for several sequences, and for tensors that are not at multiples of 16; and they agree with the kernels of
    all types."""
    call = problem(1, 70, 1, 48, 1, 80)
    one = torch.zeros(1, 70, dtype=torch.int32)
    y, final = own(call, 64)
    found = five(**call, chunk_size=64, return_final_states=True, out=(out := torch.empty_like(y)))
    assert torch.equal(found[0], y) and torch.equal(found[1], final) and found[0] is out
    assert off(y, five(**call, chunk_size=64, seq_idx=one).double()) < 2e-6
    monkeypatch.setattr(float32, "run", None)  # which the rest must do without
    for shape in ((1, 70, 1, 40, 1, 80), (1, 70, 1, 48, 1, 72), (1, 70, 1, 48, 1, 80, torch.float16)):
        five(**problem(*shape), chunk_size=64)
    for name in ("x", "B", "C", "D", "z", "out"):
        moved = {name: shifted({**call, "out": out}[name])}
        assert off(five(**call | moved, chunk_size=64), y.double()) < 2e-6
    with pytest.raises(TypeError):
        five(**call, chunk_size=64)


def shifted(tensor):
    """A copy that begins one element after a multiple of 16 bytes."""
    home = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return home[1:].view(tensor.shape).copy_(tensor)


def test_steps_one_after_another():
    call = problem(1, 45, 2, 20, 1, 30, rest=False)
    x, B, C = call["x"], call["B"], call["C"]
    steps, cum = chunk_cumsum.chunk_cumsum(call["dt"], call["A"], 16, dt_softplus=True)
    CB, cut_CB, cut_B, cut_C = float32_scores.run(B, C, 16)
    states, strange = float32_state.run(x, cut_B, steps, cum, 30)
    assert not strange.any() and states.shape == (1, 3, 2, 20, 30)
    starts, final = float32_passing.run(states, cum, None)
    y = float32_scan.run(x, cut_C, CB, cut_CB, steps, cum, starts, strange, None, None, torch.full_like(x, math.nan))
    wanted, every = recurrence(**call)
    assert off(y, wanted) < 1e-6 and off(final, every[:, -1]) < 1e-6
    assert torch.equal(y, own(call, 16)[0])
