"""The ground truth is whole, and the SIMT machine agrees with it: outputs with NumPy's, counters with an H200's."""

import functools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from simt_truth.measure import LAUNCHES, METRICS, checksum, counters

import simt

STORED = json.loads((Path(__file__).parent / "simt_truth" / "h200.json").read_text())
BY_NAME = {launch.name: launch for launch in LAUNCHES}

# Counters that PTX cannot give: ptxas unrolls, schedules and predicates.
ONLY_NEAR = {"smsp__inst_executed.sum", "smsp__thread_inst_executed_per_inst_executed.ratio"}

LD, ST = "smsp__inst_executed_op_shared_ld.sum", "smsp__inst_executed_op_shared_st.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"
SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"

COPY = "the card counts three shared loads more in each warp that uses cp.async"
BYPASS = "a copy that bypasses L1 (.cg) asks for pairs of sectors: two neighbouring ones count as one"
PREDICATE = "ptxas turns the branch into a predicate: the instruction is counted in warps where no lane takes part"
SWAP_LOOP = "a float atomic on shared memory is a loop of loads and compare-and-swap on the card"
JOINED = "ptxas joins one pair of loads of the unrolled loop less than is predicted from PTX"
LDMATRIX = "the card does not count ldmatrix among the shared loads, though its wavefronts are counted"

EXPLAINED = {
    **{(f"cp_async_{k}", LD): COPY for k in ("4", "4_offset_1", "4_stride_2", "8", "16_ca", "16_cg", "16_cg_stride_2")},
    ("cp_async_16_cg_stride_2", SECTORS): BYPASS,
    **{(k, LD): PREDICATE for k in ("transpose_padded_edges", "reduce_sequential", "scan_hillis_steele")},
    **{(k, LD): PREDICATE for k in ("reduce_interleaved", "reduce_interleaved_dense")},
    **{(k, ST): PREDICATE for k in ("transpose_padded_edges", "reduce_sequential")},
    **{(k, ST): PREDICATE for k in ("reduce_interleaved", "reduce_interleaved_dense")},
    **{(f"shared_atomic_{k}", ST): PREDICATE for k in ("same_address", "distinct", "bins", "max", "ticket")},
    **{(f"shared_atomic_float_{k}", ST): PREDICATE for k in ("distinct", "same_address")},
    **{(f"shared_atomic_float_{k}", c): SWAP_LOOP for k in ("distinct", "same_address") for c in (LD, WAVEFRONTS)},
    ("reduce_interleaved_dense", WAVEFRONTS): JOINED,
    ("reduce_interleaved_dense", CONFLICTS): JOINED,
    **{(f"ldmatrix_x1{k}", LD): LDMATRIX for k in ("", "_conflicts", "_trans")},
    **{(f"ldmatrix_x4{k}", LD): LDMATRIX for k in ("", "_conflicts", "_trans", "_padded")},
    ("ldmatrix_x2", LD): LDMATRIX,
}

nvrtc_needed = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")


@functools.cache
def simulated(name):
    """(outputs, counters) of a launch on the SIMT machine."""
    launch = BY_NAME[name]
    args = [a.copy() if isinstance(a, np.ndarray) else a for a in launch.args]
    kernel = simt.compile(launch.source, launch.options)[launch.kernel]
    report = kernel(launch.grid, launch.block, *args, shared=launch.shared)
    return [args[i] for i in launch.outputs], {m: report.counters.get(m, 0) for m in METRICS}


def differing(name):
    """{counter: (the machine's, the card's)} where they differ."""
    mine, card = simulated(name)[1], STORED["launches"][name]["counters"]
    return {m: (mine[m], card[m]) for m in METRICS if m not in ONLY_NEAR and mine[m] != card[m]}


def test_every_launch_has_a_name_of_its_own_and_was_measured():
    assert len(BY_NAME) == len(LAUNCHES) >= 60
    assert set(BY_NAME) == set(STORED["launches"]) and STORED["card"] == "NVIDIA H200"


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_gpu_gave_what_numpy_expects(name):
    launch, stored = BY_NAME[name], STORED["launches"][name]
    wanted = launch.expected(*launch.args)
    wanted = [np.asarray(w, launch.args[i].dtype) for w, i in zip(wanted, launch.outputs, strict=True)]
    if launch.exact:
        assert checksum(wanted) == stored["crc32"]
    assert set(stored["counters"]) == set(METRICS) and all(v >= 0 for v in stored["counters"].values())
    assert stored["counters"]["smsp__inst_executed.sum"] > 0


@nvrtc_needed
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_machine_gives_what_numpy_expects_and_counts_what_the_gpu_counted(name):
    launch, (outputs, mine) = BY_NAME[name], simulated(name)
    for got, want in zip(outputs, launch.expected(*launch.args), strict=True):
        want = np.asarray(want, got.dtype).reshape(got.shape)
        if launch.exact:
            assert checksum([got]) == checksum([want]), f"{np.flatnonzero(got != want)[:5]} differ"
        else:
            assert np.allclose(got, want, rtol=1e-5, atol=1e-5)
    unexplained = {m: pair for m, pair in differing(name).items() if (name, m) not in EXPLAINED}
    assert not unexplained, "counters (the machine's, the card's)"
    assert mine["smsp__inst_executed.sum"] > 0


@nvrtc_needed
def test_every_explanation_is_still_needed():
    lasting = [pair for pair, why in EXPLAINED.items() if why != JOINED]  # with NVRTC 13.0 there is nothing to explain
    needless = [(name, m) for name, m in lasting if m not in differing(name)]
    assert not needless, "these agree by now: take them out of EXPLAINED"


@nvrtc_needed
def test_nearly_all_counters_are_the_cards():
    pairs = len(LAUNCHES) * (len(METRICS) - len(ONLY_NEAR))
    equal = pairs - sum(len(differing(name)) for name in BY_NAME)
    print(f"{equal} of {pairs} counters are the card's")
    assert equal >= 0.98 * pairs


def test_ncus_table_is_read_in_launch_order():
    text = 'noise\n"ID","Kernel Name","Metric Name","Metric Value"\n'
    text += '"0","a","x","1,024"\n"0","a","y","2"\n"1","b","x","3"\n'
    assert counters(text) == [("a", {"x": 1024.0, "y": 2.0}), ("b", {"x": 3.0})]
