"""Chapter 15's rungs on a card: right at odd lengths, in both types, and each time the same."""

import pytest
import torch
from test_ssd_rungs_gpu import MAMBA, error, inputs, truth

from kernels.ssd.by_hand import RUNGS

HERE = torch.cuda.is_available() and torch.version.cuda is not None
HOPPER = HERE and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of compute capability 9.0")
ALLOWED = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("seqlen, shape", [(1, MAMBA), (1000, MAMBA), (4099, MAMBA), (777, (3, 10, 64, 2, 64))])
def test_right_and_the_same_each_time(seqlen, shape, dtype):
    torch.manual_seed(15)
    call = {k: v.contiguous() if k in "xBC" else v for k, v in inputs(seqlen, *shape, dtype=dtype).items()}
    wanted, _ = truth(**call)
    for rung in RUNGS:
        out = torch.full_like(call["x"], torch.nan)
        first = rung.function(**call, out=out).clone()
        assert error(first, wanted) < ALLOWED[dtype], rung.name
        for _ in range(20):
            out.fill_(torch.nan)
            assert torch.equal(rung.function(**call, out=out), first), rung.name
