"""Who may come to a barrier, and whom lanes may name: the SIMT machine's verdicts, and beside them a card's."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from simt_truth.synccheck import BLOCKS, KERNELS, THREADS, WORDS, N, source

import simt
from simt.execute import divergence

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

STORED = Path(__file__).parent / "simt_truth" / "h200_synccheck.json"
CARD = json.loads(STORED.read_text())["kernels"] if STORED.exists() else {}
# What synccheck does not report: values of shuffles that are undefined, and a barrier that a part of a warp passes by
# when, by the time the others are there, it has left.
UNSEEN = {"shuffle_reads_who_has_left", "shuffle_reads_who_is_not_named", "shuffle_by_who_is_not_named"}
UNSEEN |= {"rounds_that_differ"}
# What it reports though it is legal, and ends, and is right: those that return have something to store first, and are
# not gone when the others of their warp come to the barrier.
TOO_STRICT = {"early_return_that_stores"}


def run(name):
    y = np.zeros(WORDS, np.int32)
    simt.compile(source())[name](BLOCKS, THREADS, y, np.int32(N))
    return y


@pytest.mark.parametrize("name", KERNELS)
def test_what_the_machine_says(name):
    error = KERNELS[name][1]
    if error is None:
        run(name)
        return
    with pytest.raises(getattr(simt, error)) as caught:
        run(name)
    said = str(caught.value)
    assert f"kernel {name}" in said and "line " in said and "thread (" in said and "block (" in said
    assert error != "BarrierFault" or ": divergent threads: " in said


@pytest.mark.parametrize("name", CARD)
def test_what_an_h200_says(name):
    """An H200's synccheck reports what the machine reports, or the kernel hangs; what is legal ends and writes the
    same."""
    legal, card = KERNELS[name][1] is None, CARD[name]
    told = bool(card["synccheck"]) or not card["ended"]
    assert told == (name in TOO_STRICT if legal else name not in UNSEEN)
    if legal:
        assert card["ended"] and card["wrote"] == run(name).tolist()


def test_part_of_a_warp_at_a_barrier_is_told_by_lines_and_threads():
    text = """extern "C" __global__ void k(int* y) {
      if (threadIdx.x % 32 >= 8)
        __syncthreads();
      y[threadIdx.x] = 1; }"""
    with pytest.raises(simt.BarrierFault) as caught:
        simt.compile(text)["k"](1, 64, np.zeros(64, np.int32))
    assert str(caught.value) == (
        "kernel k, line 3 `__syncthreads();`: divergent threads: of warp 0 of block (0, 0, 0), lanes 8-31 wait at this "
        "barrier, and lane 0 (thread (0, 0, 0)) has gone past it, to line 4 `y[threadIdx.x] = 1; }`; all threads of a "
        "warp that have not left the kernel must come to a barrier together"
    )


def test_a_shuffle_in_a_branch_is_told_before_the_barrier_that_others_wait_at():
    text = """extern "C" __global__ void k(int* y) { int t = threadIdx.x;
      if (t % 4) y[t] = __shfl_xor_sync(~0u, t, 1) + 1;
      __syncthreads(); }"""
    with pytest.raises(simt.LaneFault, match="line 2 .*the mask names lanes 0, 4, 8, 12, 16, 20, 24, 28, which"):
        simt.compile(text)["k"](1, 32, np.zeros(64, np.int32))


def test_what_tells_of_a_barrier():
    """Most kernels have no such block of code; none is looked for behind a barrier that all come to."""
    module = simt.compile(source())
    assert not module["early_return_of_a_part"].program.tells
    program = module["a_part_of_a_warp"].program
    ((barrier, behind),) = program.tells.items()
    assert divergence.aligned(program.blocks[barrier].instructions[-1]) and min(behind) > barrier
