"""What each topic's prepared calls launch is what its checked calls launch, on a card that is this CPU."""

import made_up_driver
import pytest
import torch

from kernels import gemv, lowbit, matmul
from kernels.lowbit.gemv import CALLS as LOWBIT

HALF = torch.float16


@pytest.fixture
def driver(monkeypatch):
    yield made_up_driver.put_in(monkeypatch)
    for calls in (gemv.CALLS, LOWBIT, matmul.CALLS):
        calls.clear()


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows, cols", [(5, 7), (600, 4096)])
def test_gemv(driver, rows, cols, pdl):
    def call():
        W, x, out = torch.randn(rows, cols).half(), torch.randn(cols).half(), torch.empty(rows, dtype=HALF)
        return lambda: gemv.gemv(W, x, out=out, pdl=pdl)

    (launch,) = made_up_driver.expect_the_same(driver, gemv.CALLS, call(), call())
    assert launch.pdl == pdl


@pytest.mark.parametrize("m", [None, 1, 4, 16])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_lowbit(driver, bits, m):
    weights = [lowbit.quantize(torch.randn(64, 1024).half(), bits, 64) for _ in range(2)]

    def call(Wq):
        x = torch.randn(*([m] if m else []), 1024).half()
        out = torch.empty(*([m] if m else []), 64, dtype=HALF)
        return lambda: lowbit.gemv(Wq, x, out=out)

    made_up_driver.expect_the_same(driver, LOWBIT, *map(call, weights), apart={"gemv.y", "merge.parts"})


@pytest.mark.parametrize("m, n, k", [(128, 256, 64), (100, 72, 4096), (33, 77, 512)])
def test_linear(driver, m, n, k):
    def call():
        x, W, out = torch.randn(1, m, k).half(), torch.randn(n, k).half(), torch.empty(1, m, n, dtype=HALF)
        return lambda: matmul.linear(x, W, out=out)

    made_up_driver.expect_the_same(driver, matmul.CALLS, call(), call(), apart={"matmul.y", "merge.parts"})
