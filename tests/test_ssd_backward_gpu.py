"""The SSD backwards in Triton (kernels/ssd_backward/few.py) on a card: hostile and large calls, and the same bits."""

import pytest
import torch
from ssd_backward_cases import CASES, check, make

from kernels.ssd_backward import few

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ALLOWED = {torch.float32: 5e-5, torch.float16: 8e-3, torch.bfloat16: 4e-2}  # dA, a sum of both signs


@pytest.mark.parametrize("name", ["three chunks, odd heads", "groups", "wide head", "few columns", "a huge step"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_on_hostile_calls(name, dtype):
    check(few, name, dtype, "cuda", allowed=ALLOWED[dtype], cases=CASES, again=True)


LARGE = ["2.7B, 2K", "many groups", "columns that fill no tile", "a state of 256", "sequences"]


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_on_large_calls(name, dtype):
    check(few, name, dtype, "cuda", allowed=ALLOWED[dtype], again=True)


def test_in_a_graph_and_on_another_stream():
    dy, call = make((1, 300, 8, 64, 1, 128), "D, dt_bias, softplus", torch.bfloat16, "cuda")
    wanted = few(dy, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = few(dy, **call)
    for gradient in found:
        if gradient is not None:
            gradient.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(wanted, found) if a is not None)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again = few(dy, **call)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(wanted, again) if a is not None)
