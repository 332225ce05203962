"""The SSD backwards in Triton (kernels/ssd_backward/few.py) on a card: hostile and large calls, and the same bits."""

import pytest
import torch
from ssd_backward_cases import CASES, check, make

from kernels.ssd_backward import few

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ALLOWED = {torch.float32: 5e-5, torch.float16: 8e-3, torch.bfloat16: 4e-2}  # dA, a sum of both signs


WIDE, HALF, BF16 = DTYPES
HOSTILE = [("groups", BF16), ("wide head", HALF), ("few columns", WIDE), ("a huge step", WIDE), ("a huge step", BF16)]
LARGE = [  # each compiles for ten seconds
    ("2.7B, 2K", HALF),
    ("2.7B, 2K", BF16),
    ("many groups", BF16),
    ("columns that fill no tile", WIDE),
    ("columns that fill no tile", BF16),
    ("a state of 256", HALF),
    ("sequences", WIDE),
    ("sequences", BF16),
]


@pytest.mark.parametrize("name, dtype", HOSTILE)
def test_right_on_hostile_calls(name, dtype):
    check(few, name, dtype, "cuda", allowed=ALLOWED[dtype], cases=CASES, again=True)


@pytest.mark.parametrize("name, dtype", LARGE)
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
