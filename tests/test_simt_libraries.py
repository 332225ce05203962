"""What CUDA's headers bring beside arithmetic, on the SIMT machine: groups, pipelines, atomics on vectors."""

import numpy as np
import pytest

import simt

F32, I32 = np.float32, np.int32

GRID = r"""
#include <cooperative_groups.h>
extern "C" __global__ void turns(int* a, int* b, int rounds) {
    auto grid = cooperative_groups::this_grid();
    int i = grid.thread_rank(), n = grid.size();
    a[i] = i;
    for (int r = 0; r < rounds; r++) {
        grid.sync();
        b[i] = a[n - 1 - i] + r;
        grid.sync();
        a[i] = b[(i + 37) % n];
    }
}"""


def test_blocks_wait_for_each_other():
    turns, wanted = simt.compile(GRID)["turns"], np.arange(600 * 128)
    for r in range(3):
        wanted = np.roll(wanted[::-1] + r, -37)
    a, b = np.zeros((2, 600 * 128), I32)
    turns(600, 128, a, b, I32(3))  # three parts of the machine's
    assert (a == wanted).all()
    small, other = np.zeros((2, 96), I32)
    with pytest.raises(simt.Deadlock, match="has not begun"):
        turns(3, 32, small, other, I32(1), places=2)
    turns(3, 32, small, other, I32(1), check_races=True)  # what the failed launch left does not count
    assert (small == np.roll(np.arange(96)[::-1], -37)).all()


VECTORS = r"""
extern "C" __global__ void add(float2* pairs, float4* four, float4* old, int n) {
    int i = threadIdx.x;
    if (i < n) {
        atomicAdd(pairs + i % 2, make_float2(i, 1));
        old[i] = atomicAdd(four, make_float4(1, 2, 3, 4));
    }
}"""


def test_atomics_on_vectors():
    add, old = simt.compile(VECTORS)["add"], np.zeros((64, 4), F32)
    pairs, four = np.zeros((2, 2), F32), np.zeros(4, F32)
    report = add(1, 64, pairs, four, old, I32(40))
    assert pairs.tolist() == [[380, 20], [400, 20]] and four.tolist() == [40, 80, 120, 160]
    assert (old[:40, 0] == np.arange(40)).all() and (old[:40, 3] == 4 * old[:40, 0]).all()
    assert report.counters["l1tex__t_requests_pipe_lsu_mem_global_op_atom.sum"] == 2
    assert report.counters["l1tex__t_requests_pipe_lsu_mem_global_op_red.sum"] == 2
    with pytest.raises(simt.MemoryFault, match=r"pairs\[0\] on: 8 bytes at once must start at a multiple of 8"):
        add(1, 64, simt.Buffer(pairs, 4), four, old, I32(40))
    with pytest.raises(simt.MemoryFault, match=r"16 bytes from four\[0\] on, but four has 2 elements"):
        add(1, 64, pairs, four[:2], old, I32(40))
