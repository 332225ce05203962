"""Chapter 15's rungs on the SIMT machine: each against a float64 recurrence, without a race; and what they refuse."""

import pytest
import torch
from test_ssd_five import off, problem, recurrence

from kernels.ssd import by_hand
from kernels.ssd.by_hand import RUNGS
from simt import nvrtc

HALF, BF16 = torch.float16, torch.bfloat16
ALLOWED = {HALF: 1e-3, BF16: 6e-3}
OWN = ("chunk", "ring", "roles")  # kernels of their own; the others are fused.cu's


def call_of(seqlen, nheads, ngroups=1, dstate=64, dtype=HALF, batch=1):
    found = problem(batch, seqlen, nheads, 64, ngroups, dstate, dtype, rest=False)
    generator = torch.Generator().manual_seed(15)
    return found | {name: torch.randn(nheads, generator=generator) for name in ("D", "dt_bias")}


# heads that are no pairs in their group, and a place of the ring that is used twice
@pytest.mark.parametrize("shape", [(200, 3, 1, 64, HALF), (67, 2, 2, 128, BF16, 2), (1, 1)], ids=str)
def test_right_on_hostile_shapes(shape):
    call = call_of(*shape)
    wanted, _ = recurrence(**call)
    for rung in RUNGS if shape[0] == 200 else RUNGS[:3]:  # fused.cu has tests of its own
        home = torch.full((wanted.numel() + 16,), 1234.0, dtype=call["x"].dtype)
        out = home[8:-8].view(wanted.shape).fill_(torch.nan)
        assert rung.function(**call, out=out) is out
        assert (home[:8] == 1234).all() and (home[-8:] == 1234).all(), rung.name
        assert off(out, wanted) < ALLOWED[out.dtype], rung.name


def test_no_race(counted):
    call = call_of(200, 2)
    for name in OWN:
        report = by_hand.counters(name, **call, check_races=True)
        products = {"chunk": 2 * 4 * 18, "ring": 2 * 4 * 18, "roles": 4 * (4 + 2 * 14)}
        assert report.counters["simt__wgmma.sum"] == products[name]  # C B^T once for both heads


def test_products_are_not_serialised():
    for name in OWN:
        module = by_hand._kernel(name, HALF, HALF, 128)[0].module
        log = nvrtc.compiler_log(module.source, (*module.options, "--ptxas-options=-v"), "sm_90a", module.name)
        assert "C75" not in log
        assert by_hand.resources(name)["spill_stores"] == 0


def test_what_they_do_not_take_is_named():
    call = call_of(64, 2)
    wide = torch.cat([call["x"], call["x"]], -1)
    for change, problem_ in (
        ({"x": wide}, "headdim must be 64 .* got 128 and 64; fused takes others"),
        ({"B": call["B"][..., :40], "C": call["C"][..., :40]}, "dstate 64 or 128, got 64 and 40"),
        ({"D": None}, r"D must be \(2,\) float32, got None"),
        ({"D": torch.ones(2, 64)}, r"D must be \(2,\) float32, got \(\(2, 64\)"),
        ({"dt_softplus": False}, "dt_softplus must be True, got False"),
        ({"x": wide[..., :64]}, "x must be contiguous"),
    ):
        with pytest.raises(ValueError, match=problem_):
            by_hand.ring(**(call | change))
    with pytest.raises(TypeError, match="x must be float16 or bfloat16, got torch.float32"):
        by_hand.chunk(**{name: t.float() if isinstance(t, torch.Tensor) else t for name, t in call.items()})
