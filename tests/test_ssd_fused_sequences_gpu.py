"""fused.cu with several sequences in a row of tokens, on a card: nothing goes from one to the next, in each run."""

import math

import pytest
import torch
from test_ssd_fused_gpu import ALLOWED, needs_hopper, off, poison  # noqa: F401, a fixture
from test_ssd_rungs_gpu import HERE, MAMBA, inputs, truth

from kernels.ssd import fused, which
from kernels.ssd.five import five, sequence_numbers

pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")
SLOW = (1e-6, 1e-5)  # rates at which what leaks is still there at the end
ALONG = "x", "dt", "B", "C", "z"  # what has tokens


def row_of(*lengths):
    """cu_seqlens."""
    return torch.tensor([0, *lengths], device="cuda").cumsum(0)


def each_alone(call, cu_seqlens):
    """y and the state behind each sequence, in float64, as if it were alone."""
    ys, states = [], []
    for begin, end in zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist()):
        own = {k: v[:, begin:end] if k in ALONG else v for k, v in call.items()}
        if begin > 0:
            own.pop("initial_states", None)
        y, state = truth(**own)
        ys.append(y), states.append(state)
    return ys, torch.cat(states)


@needs_hopper
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("rates", [SLOW, (1, 16)])
@pytest.mark.parametrize(
    "lengths",
    [(1, 14, 1, 1, 47, 64, 63, 129, 700), (64, 128, 256, 552), (999, 1), (1000,), (1,) * 150 + (850,)],
    ids=lambda lengths: str(len(lengths)),
)
def test_each_sequence_is_as_if_alone(lengths, rates, dtype):
    call, cu_seqlens = inputs(sum(lengths), *MAMBA, dtype=dtype, rates=rates), row_of(*lengths)
    call["initial_states"] = torch.randn(1, *MAMBA[1:3], MAMBA[4], device="cuda")
    assert which(**call, cu_seqlens=cu_seqlens) == ("fused", "")
    out = torch.full(call["x"].shape, torch.nan, dtype=dtype, device="cuda")
    y, final, ends = fused(
        **call, cu_seqlens=cu_seqlens, out=out, return_final_states=True, return_varlen_states=True
    )  # fmt: skip
    wanted, states = each_alone(call, cu_seqlens)
    for found, right in zip(y.split(list(lengths), 1), wanted):
        assert off(found, right) < 3 * ALLOWED[dtype]
    for found, right in zip(ends, states):
        assert off(found, right) < ALLOWED[dtype]
    assert torch.equal(final[0], ends[-1])
    assert torch.equal(y, fused(**call, seq_idx=sequence_numbers(cu_seqlens, y.shape[1]) * 3 - 5))


@needs_hopper
@pytest.mark.parametrize("shape", [(3, 7, 64, 1, 128), (2, 24, 128, 2, 64), (2, 5, 80, 5, 40)])
def test_a_batch_with_all_options(shape):
    batch, nheads, headdim, _, dstate = shape
    call = inputs(777, *shape)
    call["D"] = torch.randn(nheads, headdim, device="cuda")
    call["z"] = torch.randn_like(call["x"])
    call["initial_states"] = torch.randn(batch, nheads, headdim, dstate, device="cuda").half()
    call["dt_limit"] = (0.002, 0.2)
    rows = [row_of(100 + 13 * b, 277, 400 - 13 * b) for b in range(batch)]
    seq_idx = torch.cat([sequence_numbers(row, 777) for row in rows])
    y, final = fused(**call, seq_idx=seq_idx, return_final_states=True)
    for b, row in enumerate(rows):
        one = {k: v[b : b + 1] if k in (*ALONG, "initial_states") else v for k, v in call.items()}
        wanted, states = each_alone(one, row)
        assert off(y[b], torch.cat(wanted, 1)[0]) < 1e-3 and off(final[b], states[-1]) < 1e-3


@needs_hopper
def test_the_same_bits_a_hundred_times_and_near_those_of_five():
    call, cu_seqlens = inputs(6000, *MAMBA, rates=SLOW), row_of(10, 500, 90, 2400, 1000, 2000)
    options = {"cu_seqlens": cu_seqlens, "return_varlen_states": True}
    y, ends = fused(**call, **options)
    for _ in range(100):
        again, same = fused(**call, **options)
        assert torch.equal(y, again) and torch.equal(ends, same)
    other, others = five(**call, **options)
    assert off(y, other.double()) < 2e-3 and off(ends, others.double()) < 2e-3


@needs_hopper
def test_what_is_not_finite_stays_in_its_sequence():
    call, cu_seqlens = inputs(7000, 1, 6, 64, 1, 128, rates=SLOW), row_of(3000, 30, 3970)
    clean = fused(**call, cu_seqlens=cu_seqlens)
    for name, where, reached in (
        ("x", (0, 333, 2, 17), (slice(333, 3000), 2, 17)),
        ("B", (0, 3010, 0, 5), (slice(3010, 3030),)),
        ("dt", (0, 2999, 3), (2999, 3)),
    ):
        for bad in (math.nan, math.inf):
            changed = call | {name: call[name].clone()}
            changed[name][where] = bad
            expected = torch.zeros(clean.shape, dtype=torch.bool, device="cuda")
            expected[(0, *reached)] = True
            for options in ({}, {"stop": 0}):
                y = fused(**changed, cu_seqlens=cu_seqlens, **options)
                assert torch.equal(~y.isfinite(), expected)
                # what a marked pair did in pieces it does as one, and rounds otherwise: to 2^-11 of the greatest
                apart = (y[~expected].float() - clean[~expected].float()).abs().max()
                assert apart < 2e-3 * clean.abs().max()


@needs_hopper
def test_in_a_graph_whose_sequences_change():
    call, cu_seqlens = inputs(3000, *MAMBA, rates=SLOW), row_of(1000, 2000)
    options = {"cu_seqlens": cu_seqlens, "return_varlen_states": True}
    fused(**call, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, ends = fused(**call, **options)
    for middle in (1000, 1999, 64):
        cu_seqlens[1] = middle
        graph.replay()
        right, states = fused(**call, **options)
        assert torch.equal(y, right) and torch.equal(ends, states)
