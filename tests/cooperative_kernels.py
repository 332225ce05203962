"""Kernels whose blocks wait for each other, for tests on the SIMT machine and on a card."""

import numpy as np

TURNS = r"""
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
}
"""


def turned(count, rounds):
    """What `turns` leaves in a, with so many threads."""
    wanted = np.arange(count, dtype=np.int32)
    for r in range(rounds):
        wanted = np.roll(wanted[::-1] + np.int32(r), -37)
    return wanted
