"""The SSD backwards in Triton (kernels/ssd_backward/few.py) in Triton's interpreter, against float64; and its plan."""

import pytest
import torch
from ssd_backward_cases import EVERYTHING, check, compare, make

from kernels.ssd_backward import few
from kernels.ssd_backward.few import few as run_few
from kernels.ssd_backward.plan import Plan, plan, spread

WIDE, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
# dA is a sum of both signs, which in one of the cases leaves a tenth of what it usually does. BF16 is computed in WIDE.
ALLOWED = {WIDE: 2e-5, HALF: 8e-3, BF16: 1e-2}


@pytest.mark.parametrize(
    "name",
    [
        "one token of one number",
        "one token, everything",
        "a token more",
        "columns that fill no tile",
        "prime sizes",
        "fast decay",
        "a huge step",
        "limits that clip",
        "dt as it is, below 0 too",
        "sequences",
        "a sequence that ends with a chunk",
        "sequences end to end",
    ],
)
def test_right_in_float32(name):
    check(run_few, name, WIDE, allowed=ALLOWED[WIDE])


@pytest.mark.parametrize("name", ["one token, everything", "columns that fill no tile"])
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_right_in_16_bits(name, dtype):
    check(run_few, name, dtype, allowed=ALLOWED[dtype])


CUT = dict(rows=16, columns=16, width=16, state_columns=16)


@pytest.mark.parametrize(
    "shape, chosen, again",
    [
        ((1, 70, 3, 40, 1, 24), CUT | dict(runs=2, inter_runs=4), True),  # several tiles of all; runs that end early
        ((2, 33, 4, 16, 2, 24), CUT | dict(runs=1, inter_runs=2), False),
        ((1, 32, 3, 8, 1, 8), CUT | dict(runs=4, inter_runs=1), False),  # one that has nothing to do
    ],
)
def test_cut_in_other_ways_and_the_same_bits(shape, chosen, again):
    check(run_few, "cut", WIDE, allowed=ALLOWED[WIDE], cases={"cut": (shape, EVERYTHING)}, again=again, **chosen)


def test_sequences_of_a_chunk_that_many_meet_in():
    dy, call = make((1, 70, 2, 16, 1, 16), EVERYTHING, WIDE, begins=(0, 1, 2, 15, 16, 17, 31, 32, 33, 40, 64, 69))
    compare("sequences", run_few(dy, **call, **CUT), dy, call, ALLOWED[WIDE])


def test_inputs_that_lie_in_a_larger_tensor():
    """dy as autograd may make it: every second token of another."""
    dy, call = make((1, 50, 2, 16, 1, 16), "D", WIDE)
    apart = torch.full((1, 50, 2, 2, 16), torch.nan)
    apart[:, :, 0] = dy
    compare("a view", run_few(apart[:, :, 0], **call), dy, call, ALLOWED[WIDE])


def test_bad_input_is_named():
    dy, call = make((1, 20, 2, 16, 1, 16), "dfinal_states", HALF)
    for changed, error, said in (
        (dict(dy=dy[:, :10]), ValueError, r"few: dy must have shape \(1, 20, 2, 16\).* got \(1, 10, 2, 16\)"),
        (dict(dy=dy.float()), TypeError, r"few: dy must be of torch.float16, got torch.float32"),
        (dict(dy=dy.mT.contiguous().mT), ValueError, "few: dy must be contiguous along its last axis"),
        (dict(dy=None), TypeError, "few: dy must be a dense torch tensor, got None"),
        (dict(dfinal_states=call["dfinal_states"][:, :1]), ValueError, r"few: dfinal_states must have shape"),
        (dict(A=call["A"].half()), TypeError, "few: A must be of torch.float32"),
        (dict(chunk_size=100), ValueError, "few: chunk_size must be a power of two"),
    ):
        with pytest.raises(error, match=said):
            few(**({"dy": dy} | call | changed))


def test_a_plan_for_the_2_7B_model():
    """A run of heads as long as can be, while all of an H200 has work."""
    found = plan(1, 8192, 80, 64, 1, 128, BF16, 132)
    assert isinstance(found, Plan) and (found.rows, found.columns, found.width) == (64, 64, 128)
    assert (found.runs, found.inter_runs, found.state_columns) == (2, 1, 128)
    assert plan(1, 8192, 80, 64, 1, 128, BF16, 132, runs=5).runs == 5
    assert plan(1, 300, 2, 64, 1, 128, BF16, 132).state_columns == 32  # few walks: narrower ones
    wide = plan(1, 8192, 80, 128, 1, 256, WIDE, 132)
    assert (wide.rows, wide.columns, wide.width) == (32, 32, 64)


def test_spread():
    assert spread(264, 80, 264) == 1 and spread(1, 1, 264) == 1
    assert spread(66, 80, 264) == 4
    for blocks, lines in ((1, 80), (7, 24), (32, 10), (1000, 3)):
        runs = spread(blocks, lines, 264)
        assert 1 <= runs <= lines and -(-lines // runs) * (runs - 1) < lines  # none is empty
