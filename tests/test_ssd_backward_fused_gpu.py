"""The SSD backwards in CUDA C++ (kernels/ssd_backward/fused.py) on a Hopper card: hostile and large calls, the same
bits, prepared calls, graphs, streams."""

import pytest
import torch
from ssd_backward_cases import CARD, CASES, MAMBA, check, make

from kernels.ssd_backward.fused import CALLS, fused

HERE = torch.cuda.is_available() and torch.version.cuda is not None and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU of compute capability 9.0")
DTYPES = [torch.float16, torch.bfloat16]
ALLOWED = {torch.float16: 8e-3, torch.bfloat16: 4e-2}  # dA, a sum of both signs
OTHERS = "D, z, dt_bias, softplus, limit, initial_states, dfinal_states"  # all but D per column


def without_columns(cases, names):
    """Those cases, with D a number for each head."""
    return {name: (cases[name][0], cases[name][1].replace("D per column", "D"), *cases[name][2:]) for name in names}


SMALL = without_columns(
    CASES,
    ["three chunks, odd heads", "groups", "wide head", "columns that fill no tile", "few columns", "a huge step",
     "a token less", "limits that clip", "dt in float32", "sequences end to end", "views of one projection"],
)  # fmt: skip
LARGE = without_columns(
    CARD,
    ["2.7B, 2K", "a batch of short ones", "many groups", "wide heads, 5 groups of one", "130M", "16K, few heads",
     "slow decay", "fast decay", "sequences"],
)  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_on_hostile_calls(name, dtype):
    check(fused, name, dtype, "cuda", allowed=ALLOWED[dtype], cases=SMALL, again=True)


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_on_large_calls(name, dtype):
    check(fused, name, dtype, "cuda", allowed=ALLOWED[dtype], cases=LARGE, again=True)


def same(found, wanted):
    return all(torch.equal(one, other) for one, other in zip(found, wanted) if one is not None)


def test_prepared_calls_graphs_and_streams():
    dy, call = make((1, 300, 8, 64, 1, 128), MAMBA + ", initial_states, dfinal_states", torch.bfloat16, "cuda")
    wanted, kept = fused(dy, **call), CALLS.kept
    moved = {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in call.items()}
    again = fused(dy.clone(), **moved)  # other addresses, prepared by now
    assert same(again, wanted) and CALLS.kept == kept
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fused(dy, **call)
    for gradient in found:
        if gradient is not None:
            gradient.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert same(found, wanted)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = fused(dy, **call)
    stream.synchronize()
    assert same(found, wanted)


def test_states_of_16_bits():
    """The same as when they are widened."""
    dy, call = make((2, 200, 4, 64, 2, 64), OTHERS, torch.float16, "cuda")
    narrow = call | {name: call[name].half() for name in ("initial_states", "dfinal_states", "D", "dt_bias")}
    wide = call | {name: narrow[name].float() for name in ("initial_states", "dfinal_states", "D", "dt_bias")}
    found, wanted = fused(dy, **narrow), fused(dy, **wide)
    assert found.D.dtype is torch.float16 and found.initial_states.dtype is torch.float16
    assert same(found, [one if one is None else one.to(other.dtype) for one, other in zip(wanted, found)])
