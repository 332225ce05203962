"""The five SSD kernels in Triton's interpreter: each step and the whole against a float64 recurrence, and bad input."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from guarded_tensors import between

from kernels.ssd import chunk_bmm, chunk_cumsum, chunk_scan, chunk_state, five, state_passing
from kernels.ssd.arguments import Problem, expect_ssd
from kernels.ssd.five import SOURCES, least, sequence_numbers, work

ALLOWED = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
# batch, seqlen, nheads, headdim, ngroups, dstate, chunk_size: irregular first
SHAPES = [(2, 77, 4, 24, 2, 40, 32), (1, 1, 2, 16, 1, 16, 16), (1, 33, 3, 70, 3, 130, 16), (1, 64, 2, 8, 1, 5, 64)]


def problem(batch, seqlen, nheads, headdim, ngroups, dstate, dtype=torch.float32, *, rest=True, seed=0):
    """Random tensors of a call: x, dt, A, B and C, and with `rest` all options."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape, as_type=dtype):
        return torch.randn(shape, generator=g).to(as_type)

    found = {
        "x": draw(batch, seqlen, nheads, headdim),
        "dt": draw(batch, seqlen, nheads) - 2,
        "A": -4 * torch.rand(nheads, generator=g),
        "B": draw(batch, seqlen, ngroups, dstate),
        "C": draw(batch, seqlen, ngroups, dstate),
        "dt_softplus": True,
    }
    if rest:
        found |= {
            "D": draw(nheads, headdim, as_type=torch.float32),
            "z": draw(batch, seqlen, nheads, headdim),
            "dt_bias": draw(nheads, as_type=torch.float32),
            "dt_limit": (0.01, 0.5),
            "initial_states": draw(batch, nheads, headdim, dstate, as_type=torch.float32),
        }
    return found


def recurrence(
    x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, math.inf), initial_states=None,
    seq_idx=None,
):  # fmt: skip
    """y and the state after each token, (batch, L, H, P, N), in float64, token by token."""
    x, dt, A, B, C = (t.double() for t in (x, dt, A, B, C))
    (batch, seqlen, nheads, headdim), (ngroups, dstate) = x.shape, B.shape[2:]
    dt = dt if dt_bias is None else dt + dt_bias.double()
    dt = torch.nn.functional.softplus(dt) if dt_softplus else dt
    dt = dt.clamp(*dt_limit)
    B, C = (t.repeat_interleave(nheads // ngroups, 2) for t in (B, C))
    h = x.new_zeros(batch, nheads, headdim, dstate) if initial_states is None else initial_states.double()
    y, states = torch.empty_like(x), []
    for t in range(seqlen):
        if seq_idx is not None and t:
            h = torch.where((seq_idx[:, t] != seq_idx[:, t - 1])[:, None, None, None], 0.0, h)
        h = torch.exp(A * dt[:, t])[..., None, None] * h + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        y[:, t] = (h * C[:, t, :, None]).sum(3)
        states.append(h)
    if D is not None:
        y += (D[:, None] if D.ndim == 1 else D).double() * x
    if z is not None:
        y *= torch.nn.functional.silu(z.double())
    return y, torch.stack(states, 1)


def off(got, wanted):
    """‖got − wanted‖ / ‖wanted‖."""
    return float((got.double() - wanted).norm() / wanted.norm())


def in_sequences(seqlen, batch, *ends):
    """seq_idx of sequences that end there."""
    return torch.bucketize(torch.arange(seqlen), torch.tensor(ends), right=True).int().repeat(batch, 1)


# The whole


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_on_hostile_shapes(shape, dtype):
    for rest in (True, False):
        call = problem(*shape[:-1], dtype, rest=rest)
        y, final = five(**call, chunk_size=shape[-1], return_final_states=True)
        wanted, states = recurrence(**call)
        assert y.dtype is dtype and final.dtype is torch.float32
        assert off(y, wanted) < ALLOWED[dtype] and off(final, states[:, -1]) < ALLOWED[dtype]


def test_sequences_do_not_meet():
    call = problem(2, 70, 2, 16, 1, 16)
    for ends in ((16, 32), (5, 6, 50), (33,)):  # at a chunk's end, several in a chunk, one over chunks
        seq_idx = in_sequences(70, 2, *ends)
        y, final = five(**call, seq_idx=seq_idx, chunk_size=16, return_final_states=True)
        wanted, states = recurrence(**call, seq_idx=seq_idx)
        assert off(y, wanted) < 1e-6 and off(final, states[:, -1]) < 1e-6


def test_sequences_of_a_row():
    call = problem(1, 70, 2, 16, 1, 16)
    cu_seqlens = torch.tensor([0, 0, 13, 40, 40, 64, 69, 70])
    y, final, ends = five(
        **call, cu_seqlens=cu_seqlens, chunk_size=16, return_final_states=True, return_varlen_states=True
    )
    wanted, states = recurrence(**call, seq_idx=sequence_numbers(cu_seqlens, 70))
    assert off(y, wanted) < 1e-6 and off(final, states[:, -1]) < 1e-6
    for got, begin, end in zip(ends, cu_seqlens, cu_seqlens[1:]):
        assert off(got, states[0, end - 1]) < 1e-6 if end > begin else not got.any()
    assert torch.equal(y, five(**call, cu_seqlens=cu_seqlens.int(), chunk_size=16))


@pytest.mark.parametrize("begins", [[0, 15, 45, 47], [-9, 15, 2**31 - 1, 40], [-9, 15, 40, -1]])
def test_sequences_that_go_beyond_the_row_end_there(begins):
    """As on a card, where nobody looks into cu_seqlens. Behind the row's tokens lies NaN."""
    call = problem(1, 40, 2, 16, 1, 16)
    x, B = between(call["x"]), between(call["B"])
    dt, cum = chunk_cumsum.run(call["dt"], call["A"], 16, None, None, True, (0.0, math.inf))
    states, _ = chunk_state.run(x, B, dt, cum, None, torch.float32)
    starts, _ = state_passing.run(states, cum, 40, None, None, states)

    def ends(*begins):
        return chunk_state.varlen_states(x, B, dt, cum, torch.tensor(begins, dtype=torch.int32), starts)

    assert torch.equal(ends(*begins), ends(0, 15, 40, 40)) and ends(*begins).isfinite().all()


def test_chunks_make_no_difference():
    call = problem(1, 100, 2, 16, 1, 24)
    wanted = five(**call, chunk_size=16)
    for chunk_size in (32, 64, 128, 256, 512, None):
        assert off(five(**call, chunk_size=chunk_size), wanted.double()) < 1e-6


@pytest.mark.parametrize("seqlen", [300, 80])  # whole chunks and a part; less than a share
def test_a_chunk_shared_out_to_programs(seqlen):
    call = problem(1, seqlen, 2, 24, 1, 18, torch.float16)
    x, B, C = call["x"], call["B"], call["C"]
    steps, cum = steps_of(call, 256)
    states, strange = chunk_state.chunk_state(x, B, steps, cum)
    starts, _ = state_passing.state_passing(states, cum, seqlen, initial_states=call["initial_states"])
    parts = x, C, chunk_bmm.chunk_bmm(B, C, 256), steps, cum, starts, strange, call["D"], call["z"], None
    whole = chunk_scan.run(*parts, torch.full_like(x, math.nan), share=256)
    for share in (64, 128, None):  # None: the kernel's own choice
        assert torch.equal(chunk_scan.run(*parts, torch.full_like(x, math.nan), share=share), whole)
    assert off(whole, recurrence(**call)[0]) < ALLOWED[torch.float16]


def test_views_of_one_projection():
    b, L, H, P, G, N = 2, 40, 4, 16, 2, 16
    call = problem(b, L, H, P, G, N)
    wide = torch.full((b, L, 2 * H * P + 2 * G * N + H + 3), torch.nan)
    at, parts = 1, {}
    for name in ("z", "x", "B", "C", "dt"):
        flat = call[name].flatten(2)
        wide[:, :, at : at + flat.shape[2]] = flat
        parts[name] = wide[:, :, at : at + flat.shape[2]].view(call[name].shape)
        at += flat.shape[2]
    assert not parts["x"].is_contiguous()
    assert torch.equal(five(**call | parts, chunk_size=16), five(**call, chunk_size=16))


def test_narrow_states():
    call = problem(1, 70, 2, 16, 1, 16, torch.float16)
    y, final = five(**call, chunk_size=16, state_dtype=torch.float16, return_final_states=True)
    wanted, states = recurrence(**call)
    assert off(y, wanted) < 2e-3 and 1e-5 < off(final, states[:, -1]) < 1e-3


def test_out_and_inputs_are_left_alone():
    call = problem(1, 37, 2, 16, 1, 16)
    before = {name: value.clone() for name, value in call.items() if isinstance(value, torch.Tensor)}
    home = torch.full((call["x"].numel() + 128,), 1234.0)
    out = home[64:-64].view(call["x"].shape).fill_(torch.nan)
    assert five(**call, chunk_size=16, out=out) is out
    assert torch.equal(out, five(**call, chunk_size=16)) and (home[:64] == 1234).all() and (home[-64:] == 1234).all()
    assert all(torch.equal(value, call[name]) for name, value in before.items())


@pytest.mark.parametrize("step", [1e3, 1e6, 1e30])
def test_a_huge_step_leaves_the_others_their_digits(step):
    """The sums of A dt behind it are huge, the differences between them, which count, are not."""
    call = problem(1, 64, 2, 16, 1, 16, rest=False) | {"A": torch.tensor([-16.0, -1])}
    call["dt"][0, [5, 20]] = step
    y, final = five(**call, chunk_size=64, return_final_states=True)
    wanted, states = recurrence(**call)
    for part in (slice(0, 5), slice(6, 20), slice(21, None)):
        assert off(y[:, part], wanted[:, part]) < 6e-5
    assert off(final, states[:, -1]) < 6e-5


@pytest.mark.parametrize("name", ["x", "B", "C", "dt", "z"])
def test_nothing_is_read_but_the_tensors(name):
    """Each lies between NaNs, before and after every row of it."""
    call = problem(2, 37, 4, 20, 2, 24)
    wanted = five(**call, chunk_size=16)
    wide = torch.nn.functional.pad(call[name], (3, 5, 2, 2, 1, 1)[: 6 if call[name].ndim == 4 else 4], value=torch.nan)
    call[name] = wide[:, 1:-1, 2:-2, 3:-5] if call[name].ndim == 4 else wide[:, 2:-2, 3:-5]
    assert torch.equal(five(**call, chunk_size=16), wanted)


@pytest.mark.parametrize("ends", [(1,), (33,), (16, 17, 18), (15, 31, 32), tuple(range(1, 40))], ids=str)
def test_sequences_at_the_edges_of_chunks(ends):
    """Of one token, before, at and behind an edge; numbers may begin anywhere."""
    call = problem(2, 40, 2, 16, 1, 16)
    seq_idx = in_sequences(40, 2, *ends)
    wanted, states = recurrence(**call, seq_idx=seq_idx)
    for first in (0, -2, 7):
        y, final = five(**call, seq_idx=seq_idx + first, chunk_size=16, return_final_states=True)
        assert off(y, wanted) < 1e-6 and off(final, states[:, -1]) < 1e-6


def test_strides_of_zero():
    call = problem(2, 40, 4, 16, 2, 16)
    call["x"] = call["x"][:, :, :1].expand(2, 40, 4, 16)
    call["B"] = call["B"][:, :1].expand(2, 40, 2, 16)
    call["C"] = call["C"][:1].expand(2, 40, 2, 16)
    assert torch.equal(
        five(**call, chunk_size=16),
        five(**{k: v.contiguous() if isinstance(v, torch.Tensor) else v for k, v in call.items()}, chunk_size=16),
    )


# What is not finite


@pytest.mark.parametrize(
    "name, at", [("x", (0, 21, 1, 3)), ("dt", (0, 21, 1)), ("B", (0, 21, 0, 3)), ("C", (0, 21, 0, 3))]
)
def test_nan_reaches_what_it_should_and_nothing_else(name, at):
    for value in (torch.nan, torch.inf):
        for seq_idx in (None, in_sequences(70, 1, 16, 35)):
            call = problem(1, 70, 2, 16, 1, 16, rest=False)
            call[name][at] = value
            y, final = five(**call, chunk_size=16, seq_idx=seq_idx, return_final_states=True)
            wanted, states = recurrence(**call, seq_idx=seq_idx)
            here, there = ~y.isfinite(), ~wanted.isfinite()
            assert there.any() and torch.equal(here, there), (name, value)
            assert torch.equal(final.isfinite(), states[:, -1].isfinite())
            assert off(y[~here], wanted[~there]) < 1e-6


@pytest.mark.parametrize("p", [3, 69])
def test_nan_in_any_tile_of_a_state(p):
    call = problem(1, 40, 1, 70, 1, 130, rest=False)
    call["x"][0, 20, 0, p] = torch.nan
    y, wanted = five(**call, chunk_size=32), recurrence(**call)[0]
    assert (~wanted.isfinite()).any() and torch.equal(y.isfinite(), wanted.isfinite())


def test_nan_in_a_sequence_stays_there():
    for name in ("x", "dt", "B", "C"):
        call = problem(1, 70, 2, 16, 1, 16, rest=False)
        call[name][0, 18:22] = torch.nan
        y = five(**call, chunk_size=16, seq_idx=in_sequences(70, 1, 18, 22))
        assert y[:, :18].isfinite().all() and y[:, 22:].isfinite().all() and y[:, 18:22].isnan().all()


def test_nan_among_heads_of_another_group():
    call = problem(1, 40, 4, 16, 2, 16, rest=False)
    call["B"][0, 20, 1] = torch.nan
    y = five(**call, chunk_size=16)
    assert y[:, :, :2].isfinite().all() and y[:, :20].isfinite().all() and y[:, 20:, 2:].isnan().all()


# The steps


def steps_of(call, chunk_size, seq_idx=None):
    more = {k: call[k] for k in ("dt_bias", "dt_softplus", "dt_limit") if k in call}
    return chunk_cumsum.chunk_cumsum(call["dt"], call["A"], chunk_size, seq_idx=seq_idx, **more)


def test_chunk_cumsum():
    call = problem(2, 45, 18, 16, 1, 16)
    steps, cum = steps_of(call, 16)
    assert steps.shape == cum.shape == (2, 18, 3, 16)
    wanted = torch.nn.functional.softplus(call["dt"].double() + call["dt_bias"].double()).clamp(0.01, 0.5)
    padded = torch.nn.functional.pad(wanted, (0, 0, 0, 3)).view(2, 3, 16, 18).permute(0, 3, 1, 2)
    assert off(steps, padded) < 1e-6 and not steps[:, :, 2, 13:].any()
    assert off(cum, (padded * call["A"].double()[:, None, None]).cumsum(3) * math.log2(math.e)) < 1e-6


def test_softplus_keeps_its_digits():
    """Where dt is small, as Mamba-2's are: log(1 + e**v) in float32 would lose them."""
    dt = torch.tensor([-30.0, -12, -7, -3, -1, 0, 1, 5, 19, 21, 90, torch.inf, -torch.inf, torch.nan]).view(1, -1, 1)
    steps, _ = chunk_cumsum.chunk_cumsum(dt, -torch.ones(1), 16, dt_softplus=True)
    wanted = torch.nn.functional.softplus(dt.double()).flatten()
    got = steps.flatten()[: dt.numel()].double()
    torch.testing.assert_close(got, wanted, rtol=3e-6, atol=0, equal_nan=True)


def test_the_sum_begins_anew_with_a_sequence():
    call = problem(1, 40, 2, 16, 1, 16, rest=False)
    _, cum = steps_of(call, 32, in_sequences(40, 1, 7, 9))
    steps, whole = steps_of(call, 32)
    step = whole.diff(dim=3, prepend=torch.zeros(1, 2, 2, 1))
    for begin, end in ((0, 7), (7, 9), (9, 32)):
        torch.testing.assert_close(cum[0, :, 0, begin:end], step[0, :, 0, begin:end].cumsum(1), rtol=1e-4, atol=1e-5)
    assert torch.equal(cum[0, :, 1], whole[0, :, 1])


@pytest.mark.parametrize("chunk_size", [16, 128])
def test_chunk_bmm(chunk_size):
    B, C = torch.randn(2, 2, 150, 2, 70).unbind()
    CB = chunk_bmm.chunk_bmm(B, C, chunk_size)
    assert CB.shape == (2, -(-150 // chunk_size), 2, chunk_size, chunk_size)
    whole = torch.einsum("blgn,bsgn->bgls", C.double(), B.double())
    for c in range(CB.shape[1]):
        part = whole[:, :, c * chunk_size : (c + 1) * chunk_size, c * chunk_size : (c + 1) * chunk_size].tril()
        rows = part.shape[2]
        assert off(CB[:, c, :, :rows, :rows].tril(), part) < 1e-6


def test_chunk_state_and_state_passing():
    call = problem(2, 45, 2, 20, 1, 30, rest=False)
    initial = torch.randn(2, 2, 20, 30)
    steps, cum = steps_of(call, 16)
    added, strange = chunk_state.chunk_state(call["x"], call["B"], steps, cum)
    assert not strange.any()
    alone = problem(2, 45, 2, 20, 1, 30, rest=False)
    for c in range(3):
        part = {k: alone[k][:, 16 * c : 16 * c + 16] for k in ("x", "dt", "B", "C")}
        _, states = recurrence(**alone | part)
        assert off(added[:, c], states[:, -1]) < 1e-6
    starts, final = state_passing.state_passing(added, cum, 45, initial_states=initial)
    _, states = recurrence(**call, initial_states=initial)
    assert torch.equal(starts[:, 0], initial) and off(final, states[:, -1]) < 1e-6
    for c in (1, 2):
        assert off(starts[:, c], states[:, 16 * c - 1]) < 1e-6
    again, _ = state_passing.state_passing(added, cum, 45, initial_states=initial, out=added)
    assert again is added and torch.equal(added, starts)


def test_chunk_scan():
    call = problem(1, 45, 2, 20, 1, 30)
    steps, cum = steps_of(call, 16)
    x, B, C = call["x"], call["B"], call["C"]
    added, strange = chunk_state.chunk_state(x, B, steps, cum)
    starts, _ = state_passing.state_passing(added, cum, 45, initial_states=call["initial_states"])
    CB = chunk_bmm.chunk_bmm(B, C, 16)
    y = chunk_scan.chunk_scan(x, C, CB, steps, cum, starts, strange, D=call["D"], z=call["z"])
    assert off(y, recurrence(**call)[0]) < 1e-6
    assert torch.equal(y, five(**call, chunk_size=16))


def test_steps_look_at_their_arguments():
    x = torch.randn(1, 20, 2, 16)
    steps = torch.zeros(1, 2, 2, 16)
    with pytest.raises(ValueError, match=r"chunk_bmm: C must have shape \(1, 20, 2, 16\).* got \(1, 20, 2, 15\)"):
        chunk_bmm.chunk_bmm(x, x[..., :15].contiguous(), 16)
    with pytest.raises(TypeError, match="chunk_state: B must be of torch.float32, got torch.float16"):
        chunk_state.chunk_state(x, x.half(), steps, steps)
    with pytest.raises(ValueError, match="chunk_cumsum: A must be contiguous"):
        chunk_cumsum.chunk_cumsum(x[..., 0].contiguous(), torch.zeros(4)[::2], 16)
    with pytest.raises(
        ValueError, match=r"state_passing: cum must have shape \(1, 20, 2, 'chunk_size'\)|state_passing: cum"
    ):
        state_passing.state_passing(x[..., None], steps, 20)
    with pytest.raises(ValueError, match="chunk_bmm: chunk_size must be a power of two from 16 to 512, got 48"):
        chunk_bmm.chunk_bmm(x, x, 48)
    with pytest.raises(ValueError, match=r"chunk_cumsum: dt_limit must be \(lowest, highest\), got \(1, 0\)"):
        chunk_cumsum.chunk_cumsum(x[..., 0].contiguous(), torch.zeros(2), 16, dt_limit=(1, 0))
    with pytest.raises(TypeError, match="chunk_cumsum: chunk_size must be a whole number or None, got 16.0"):
        chunk_cumsum.chunk_cumsum(x[..., 0].contiguous(), torch.zeros(2), 16.0)
    for chunks in (1, 3):
        other = torch.zeros(1, 2, chunks, 16)
        with pytest.raises(ValueError, match=f"chunk_state: nchunks must be 2, for 20 tokens .* of 16, got {chunks}"):
            chunk_state.chunk_state(x, x, other, other)
    groups = torch.randn(1, 20, 3, 16)
    with pytest.raises(ValueError, match="chunk_state: nheads must be a multiple of ngroups, got 2 heads and 3 groups"):
        chunk_state.chunk_state(x, groups, steps, steps)
    with pytest.raises(ValueError, match="chunk_scan: nheads must be a multiple of ngroups, got 2 heads and 3 groups"):
        CB, states = torch.zeros(1, 2, 3, 16, 16), torch.zeros(1, 2, 2, 16, 16)
        chunk_scan.chunk_scan(x, groups, CB, steps, steps, states, torch.zeros(1, 2, 2, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="chunk_scan: out must not share memory with x"):
        states, strange = torch.zeros(1, 2, 2, 16, 16), torch.zeros(1, 2, 2, 1, dtype=torch.int32)
        chunk_scan.chunk_scan(x, x, torch.zeros(1, 2, 2, 16, 16), steps, steps, states, strange, out=x)
    with pytest.raises(ValueError, match="chunk_state: headdim must be at most 128, got 192"):
        chunk_state.chunk_state(torch.randn(1, 20, 2, 192), x, steps, steps)
    with pytest.raises(TypeError, match="chunk_state: state_dtype must be torch.float32 .*, got torch.float64"):
        chunk_state.chunk_state(x, x, steps, steps, state_dtype=torch.float64)
    with pytest.raises(ValueError, match="state_passing: nchunks must be 32, for 500 tokens .* got 2"):
        state_passing.state_passing(states, steps, 500)
    with pytest.raises(ValueError, match="state_passing: out must not share memory with initial_states"):
        state_passing.state_passing(states[:, :1], steps[:, :, :1].contiguous(), 9, initial_states=states[:, 1],
                                    out=states[:, 1:])  # fmt: skip
    with pytest.raises(NotImplementedError, match="chunk_bmm: B must not be bfloat16 on the CPU; kernels.ssd.five"):
        chunk_bmm.chunk_bmm(x.bfloat16(), x.bfloat16(), 16)


def test_threads_take_turns():
    """What the interpreter needs is changed in the modules themselves."""
    call = problem(1, 20, 2, 16, 1, 16)
    wanted = five(**call, chunk_size=16)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(y, wanted) for y in pool.map(lambda _: five(**call, chunk_size=16), range(4)))


# Bytes and flops


def test_work():
    sizes = 1, 65536, 80, 64, 1, 128
    steps = work(*sizes, 128)
    tokens, chunks = 65536, 512
    assert list(steps) == ["chunk_cumsum", "chunk_bmm", "chunk_state", "state_passing", "chunk_scan"]
    states = chunks * 80 * 64 * 128
    assert steps["state_passing"] == (8 * states, 2 * states)
    assert steps["chunk_cumsum"] == (tokens * 80 * 10, 2 * tokens * 80)
    assert steps["chunk_state"][1] == 2 * tokens * 80 * 64 * 128
    moved, flops = least(*sizes)
    assert moved == 21_152 * tokens and flops < sum(f for _, f in steps.values())
    assert sum(b for b, _ in steps.values()) > 3 * moved
    narrow = work(*sizes, 128, state_size=2)
    assert sum(b for b, _ in steps.values()) - sum(b for b, _ in narrow.values()) == 4 * 2 * states


def test_sources_are_there():
    assert all((Path(__file__).parents[1] / source).is_file() for source in SOURCES)


# Bad input


def bad(match, kind=ValueError, **changes):
    call = problem(1, 20, 4, 16, 2, 16)
    out = torch.full_like(call["x"], 7)
    with pytest.raises(kind, match=match):
        five(**{"chunk_size": 16, "out": out} | call | changes)
    assert (out == 7).all()


def test_bad_shapes():
    r = torch.randn
    bad(r"five: dt must have shape \(1, 20, 4\), none of it 0, got \(1, 19, 4\)", dt=r(1, 19, 4))
    bad("five: nheads must be a multiple of ngroups, got 4 heads and 3 groups", B=r(1, 20, 3, 16), C=r(1, 20, 3, 16))
    bad(r"five: C must have shape \(1, 20, 2, 16\), none of it 0, got \(1, 20, 2, 8\)", C=r(1, 20, 2, 8))
    bad(
        r"five: x must have shape \(batch, seqlen, nheads, headdim\), none of it 0, got \(1, 0, 4, 16\)",
        x=r(1, 0, 4, 16),
    )
    bad(r"five: A must have shape \(4,\)", A=r(5))
    bad(r"five: D must have shape \(4, 16\)", D=r(4, 8))
    bad(r"five: z must have shape", z=r(1, 20, 4, 8))
    bad(r"five: initial_states must have shape \(1, 4, 16, 16\)", initial_states=r(1, 4, 16, 8))
    bad("five: dstate must be at most 256, got 257", B=r(1, 20, 2, 257), C=r(1, 20, 2, 257), initial_states=None)
    bad("five: headdim must be at most 128, got 129", x=r(1, 20, 4, 129), D=None, z=None, out=None)
    bad(r"five: out must have shape", out=r(1, 20, 4, 8))


def test_bad_chunks():
    bad("five: chunk_size must be a power of two from 16 to 512, got 48", chunk_size=48)
    bad("five: chunk_size must be a power of two from 16 to 512, got 1024", chunk_size=1024)
    bad("five: chunk_size must be a power of two from 16 to 512, got 8", chunk_size=8)
    five(**problem(1, 20, 4, 16, 2, 16), chunk_size=16)  # 16 == 16.0, but one is right and the other is not
    for wrong in (16.0, True, [16], "16", torch.tensor(16)):
        with pytest.raises(TypeError, match="five: chunk_size must be a whole number or None, got"):
            five(**problem(1, 20, 4, 16, 2, 16), chunk_size=wrong)


def test_bad_types_and_layouts():
    r = torch.randn
    bad("five: x must be a dense torch tensor, got list", TypeError, x=[1.0])
    bad("five: x must be of .*float16.*float32, got torch.float64", TypeError, x=r(1, 20, 4, 16).double())
    bad("five: B must be of torch.float32, got torch.float16", TypeError, B=r(1, 20, 2, 16).half())
    bad("five: A must be of torch.float32, got torch.float16", TypeError, A=r(4).half())
    bad("five: dt must be of torch.float32, got torch.float16", TypeError, dt=r(1, 20, 4).half())
    bad("five: seq_idx must be of torch.int32, got torch.int64", TypeError, seq_idx=torch.zeros(1, 20).long())
    bad("five: x must be contiguous along its last axis", x=r(1, 20, 16, 4).transpose(2, 3))
    bad("five: out must be contiguous", out=r(1, 20, 16, 4).transpose(2, 3))
    bad("five: C must be on cpu, like x, got a tensor on meta", C=torch.empty(1, 20, 2, 16, device="meta"))
    bad("five: state_dtype must be torch.float32, got torch.float16", TypeError, state_dtype=torch.float16)


def test_bad_options():
    seq_idx = torch.zeros(1, 20, dtype=torch.int32)
    seq_idx[0, :5] = 1
    bad("five: seq_idx must never fall", seq_idx=seq_idx)
    bad("five: cu_seqlens must go from 0 to seqlen, 20, and never fall, got 0 to 19", cu_seqlens=torch.tensor([0, 19]))
    bad("five: cu_seqlens must go", cu_seqlens=torch.tensor([0, 12, 9, 20]))
    bad("five: cu_seqlens must have 2 elements or more, got 1", cu_seqlens=torch.tensor([0]))
    bad("five: return_varlen_states needs cu_seqlens", return_varlen_states=True)
    bad(r"five: dt_limit must be \(lowest, highest\), got \(1, 0\)", dt_limit=(1, 0))
    bad("five: dt_limit must be two numbers, got 3", TypeError, dt_limit=3)
    call = problem(2, 20, 4, 16, 2, 16)
    with pytest.raises(ValueError, match="five: cu_seqlens needs a batch of 1, .* got 2"):
        five(**call, cu_seqlens=torch.tensor([0, 20]))
    with pytest.raises(ValueError, match="five: out must not share memory with x"):
        five(**call, out=call["x"])


def test_what_a_rung_lacks_is_named():
    call = problem(1, 20, 4, 16, 2, 16)
    sizes = {k: call[k] for k in ("x", "dt", "A", "B", "C")}
    for name in ("D", "z", "dt_bias", "initial_states"):
        with pytest.raises(NotImplementedError, match=f"rung: {name} is not supported here"):
            expect_ssd("rung", **sizes, **{name: call[name]}, lacks=(name,))
    assert expect_ssd("rung", **sizes, chunk_size=16, lacks=("z", "D", "return_varlen_states")) == Problem(
        1, 20, 4, 16, 2, 16, 16, 2
    )
