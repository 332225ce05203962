"""Chapter 13's rungs in Triton, on a card: right on hostile shapes and inputs, in graphs, on two streams, each time."""

import math

import pytest
import torch

from kernels.ssd.overlap import fused_overlap
from kernels.ssd.published import fused_published
from kernels.ssd.registers import fused_registers
from kernels.ssd.segments import fused_segments
from kernels.ssd.tuned import fused_tuned

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")

RUNGS = [fused_published, fused_overlap, fused_registers, fused_segments, fused_tuned]
ALLOWED = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
MAMBA = 1, 80, 64, 1, 128  # batch, nheads, headdim, ngroups, dstate


@pytest.fixture(autouse=True)
def poison():
    """Memory that the allocator hands out again is full of NaN."""
    torch.manual_seed(13)
    torch.full((1 << 27,), torch.nan, device="cuda")


def inputs(seqlen, batch, nheads, headdim, ngroups, dstate, dtype=torch.float16, rates=(1, 16), steps=(1e-3, 1e-1)):
    """x, B and C are views of one projection."""

    def draw(*shape):
        return torch.randn(shape, device="cuda")

    sizes = nheads * headdim, ngroups * dstate, ngroups * dstate
    x, B, C = draw(batch, seqlen, sum(sizes)).to(dtype).split(sizes, -1)
    step = torch.exp(torch.empty(nheads, device="cuda").uniform_(*map(math.log, steps)))
    return {
        "x": x.unflatten(-1, (nheads, headdim)),
        "dt": (0.5 * draw(batch, seqlen, nheads)).to(dtype),
        "A": -torch.empty(nheads, device="cuda").uniform_(*rates),
        "B": B.unflatten(-1, (ngroups, dstate)),
        "C": C.unflatten(-1, (ngroups, dstate)),
        "D": draw(nheads),
        "dt_bias": step + torch.log(-torch.expm1(-step)),
        "dt_softplus": True,
    }


def truth(x, dt, A, B, C, *, D, dt_bias, dt_softplus, z=None, dt_limit=(0, math.inf), initial_states=None):
    """The recurrence, in float64."""
    x, dt, A, B, C, D = (v.double() for v in (x, dt, A, B, C, D))
    dt = torch.nn.functional.softplus(dt + dt_bias.double()).clamp(*dt_limit)
    B, C = (v.repeat_interleave(x.shape[2] // B.shape[2], 2) for v in (B, C))
    state = torch.zeros(*x[:, 0].shape, B.shape[3], dtype=torch.float64, device="cuda")
    if initial_states is not None:
        state += initial_states
    y, kept, added = torch.empty_like(x), torch.exp(A * dt), dt[..., None] * x
    for t in range(x.shape[1]):
        state = kept[:, t, :, None, None] * state + added[:, t, ..., None] * B[:, t, :, None]
        y[:, t] = (state @ C[:, t, ..., None])[..., 0]
    y += D[:, None] * x if D.ndim == 1 else D * x
    return y if z is None else y * torch.nn.functional.silu(z.double()), state


def error(have, want):
    return float((have.double() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("rung", RUNGS)
def test_right_on_hostile_shapes(rung, dtype):
    for seqlen, *sizes in [(1, 2, 4, 64, 2, 128), (777, 2, 6, 40, 3, 72), (515, 1, 3, 128, 1, 64)]:
        call = inputs(seqlen, *sizes, dtype)
        batch, nheads, headdim, _, dstate = sizes
        call["z"], call["D"] = torch.randn_like(call["x"]), torch.randn(nheads, headdim, device="cuda")
        call["initial_states"] = torch.randn(batch, nheads, headdim, dstate, device="cuda")
        call["dt_limit"] = (2e-3, 0.3)
        home = torch.full((call["x"].numel() + 16,), 1234.0, dtype=dtype, device="cuda")
        out = home[8:-8].view(call["x"].shape).fill_(torch.nan)
        y, final = rung(**call, return_final_states=True, out=out)
        want, state = truth(**call)
        assert y is out and error(y, want) < ALLOWED[dtype] and error(final, state) < ALLOWED[dtype]
        assert (home[:8] == 1234).all() and (home[-8:] == 1234).all()


@pytest.mark.parametrize("cuts", [1, 2, 3, 7, None])
@pytest.mark.parametrize("decay", ["slow", "usual", "fast"])
def test_segments_with_every_decay(decay, cuts):
    rates, steps = {"slow": ((0.01, 0.1), (1e-3, 1e-1)), "usual": ((1, 16), (1e-3, 1e-1)), "fast": ((16, 17), (2, 9))}[
        decay
    ]
    call = inputs(2999, *MAMBA, rates=rates, steps=steps)
    want, state = truth(**call)
    for stop in (64, 0):
        y, final = fused_tuned(**call, segments=cuts, stop=stop, return_final_states=True)
        assert error(y, want) < 1e-3 and error(final, state) < 1e-3


@pytest.mark.parametrize("what", ["huge", "infinite", "NaN"])
def test_what_the_early_stop_would_lose_is_found(what):
    """The state of the first segments matters to the last ones, though it has decayed by more than 2^-64."""
    call = inputs(640, 1, 4, 64, 1, 128, torch.bfloat16, steps=(0.07, 0.08))
    call["A"] = -torch.tensor([1, 5.5, 6, 6.5], device="cuda")  # 128 tokens: 2^-15 to 2^-100 or so
    call["x"][:, 10, :, 7] = {"huge": 1e30, "infinite": math.inf, "NaN": math.nan}[what]
    want = truth(**call)[0]
    y = fused_tuned(**call, segments=5)
    assert (torch.isfinite(y) == torch.isfinite(want)).all()
    if what == "huge":
        for block in range(0, 640, 64):
            for head in range(4):
                here = slice(None), slice(block, block + 64), head
                assert error(y[here], want[here]) < 2e-2


@pytest.mark.parametrize("rung", RUNGS)
def test_what_is_not_finite_reaches_what_it_should(rung):
    for name in ("x", "B", "C", "dt"):
        call = inputs(500, 1, 4, 64, 1, 128)
        call[name].select(1, 333).flatten()[70 % call[name].select(1, 333).numel()] = math.nan
        if name == "x":
            call["x"][:, 77, 2, 3] = math.inf
        y, want = rung(**call), truth(**call)[0]
        assert (torch.isfinite(y) == torch.isfinite(want)).all(), name


@pytest.mark.parametrize("rung", RUNGS)
def test_the_same_bits_each_time(rung):
    call = inputs(2500, *MAMBA)
    first = rung(**call, return_final_states=True)
    for _ in range(100):
        assert all((a == b).all() for a, b in zip(first, rung(**call, return_final_states=True)))


@pytest.mark.parametrize("rung", RUNGS)
def test_graphs_and_streams(rung):
    """Two graphs and two streams at the same time: no launch may see the flags of another."""
    calls = [inputs(1500, *MAMBA), inputs(2300, *MAMBA)]
    wanted = [rung(**call) for call in calls]
    outs, graphs = [torch.empty_like(y) for y in wanted], []
    for call, out in zip(calls, outs):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            rung(**call, out=out)
            rung(**call, out=out)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(20):
        for out in outs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        results = []
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results.append(graphs[n].replay() if n < 2 else rung(**calls[n - 2]))
        torch.cuda.synchronize()
        assert all((have == want).all() for have, want in zip([*outs, *results[2:]], 2 * wanted))


def test_offsets_beyond_32_bits():
    seqlen = 440_000  # of 80 heads of 64: more than 2^31 elements
    call = inputs(seqlen, *MAMBA)
    y = fused_tuned(**call)
    late = {k: v[:, -4096:] if k in ("x", "dt", "B", "C") else v for k, v in call.items()}
    want, fast = truth(**late)[0][:, -256:], call["A"] < -8
    assert error(y[:, -256:][:, :, fast], want[:, :, fast]) < 1e-3
