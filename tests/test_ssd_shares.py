"""How fused.cu puts rows in order and cuts the line of all pairs (shares.cuh), beside a plain loop."""

import math
from pathlib import Path

import numpy as np
import pytest

import simt
from kernels.ssd.fused_plan import MOST_ROWS, plan

FOLDER = Path(__file__).parents[1] / "kernels/ssd"
SHAPE = "Shape<__half, {}, {}, Steps<__half, float, true>, Skip<float, D_PER_HEAD>, NO_Z, float>"
SOURCE = """
#include "shares.cuh"

extern "C" __global__ void share(const float *a, const float *dt_bias, unsigned *cuts, unsigned short *order,
                                 int *walked, int heads, int groups, int pairs, int chunks, int tickets, int rows,
                                 int pairs_of_group, int side_by_side, float log2_negligible) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const Sizes sizes{64 * chunks, heads, groups, pairs, chunks, tickets, rows, pairs_of_group, 1, side_by_side,
                      log2_negligible, 0, 1e30f, 0, 0, 0};
    share_out(s, sizes, a, dt_bias);
    __syncthreads();
    for (int i = threadIdx.x; i <= tickets >> side_by_side; i += blockDim.x) cuts[i] = s.cuts[i];
    for (int i = threadIdx.x; i < rows * groups; i += blockDim.x) order[i] = s.order[i];
    if (threadIdx.x >= tickets) return;
    const Share share{s, sizes, (int)threadIdx.x};
    for (int pair = share.last_pair(); pair >= share.first_pair(); pair -= sizes.together())
        for (int i = share.begin(pair); i < share.end(pair); i++) walked[(long long)pair * chunks + i]++;
}
"""


def left_of(A, dt_bias, negligible=-127.0):
    """Chunks until nothing is left of a head."""
    return np.minimum(-negligible / (-A * np.logaddexp(0, dt_bias) * 64 / math.log(2)), 1e9)


def shared_out(p, nheads, ngroups, headdim, dstate, A, dt_bias, negligible=-127.0):
    cuts, order = np.zeros((p.tickets >> p.side_by_side) + 1, np.uint32), np.zeros(p.rows * ngroups, np.uint16)
    walked = np.zeros((p.pairs, p.chunks), np.int32)
    options = (f"-DSHAPE={SHAPE.format(headdim, dstate)}", f"-I{FOLDER}")
    kernel = simt.compile(SOURCE, options, "sm_90a", str(FOLDER / "share.cu"))["share"]
    sizes = nheads, ngroups, p.pairs, p.chunks, p.tickets, p.rows, p.pairs_of_group, p.side_by_side
    A, dt_bias = np.asarray(A, np.float32), np.asarray(dt_bias, np.float32)
    kernel(1, 512, A, dt_bias, cuts, order, walked, *map(np.int32, sizes), np.float32(negligible), shared=200 << 10,
           check_races=True)  # fmt: skip
    assert (walked == 1).all()  # each chunk by one ticket, or the race check has seen two
    return cuts, order


def check(p, left, ngroups, headdim, dstate, cuts, order):
    """left: of each row. Slow rows come first, in each group; all shares of bundles cost the same."""
    together = 1 << p.side_by_side
    wanted, slower = [], []
    for group in np.arange(p.rows * ngroups).reshape(ngroups, p.rows):
        wanted += sorted(group.tolist(), key=lambda row: -left[row])
        slower += wanted[-p.rows :: together if dstate > 128 else 2 * together]
    share, pass_1 = 1.2, 0.5 if p.chunks > 768 else 0.43
    for _ in range(2):  # a guess, and a better one
        budget = share * p.chunks * p.pairs / p.tickets
        cost = budget / np.maximum(budget / (1 + pass_1), budget - pass_1 * left[slower])
        share = cost.mean()
    assert np.allclose(left[order], left[wanted], rtol=1e-3) and sorted(order) == sorted(wanted)
    before = np.concatenate([[0], np.cumsum(np.tile(cost, p.pairs // together // len(cost)))])
    at = np.interp(cuts / 65536, np.arange(p.pairs // together + 1), before)  # in the line
    assert np.abs(at - before[-1] * np.linspace(0, 1, len(cuts))).max() < 3e-4


@pytest.mark.parametrize(
    "batch, chunks, nheads, headdim, ngroups, dstate, processors",
    [
        (1, 64, 80, 64, 1, 128, 132),
        (3, 50, 7, 64, 1, 64, 19),  # a row alone
        (2, 40, 24, 128, 8, 64, 132),  # heads of two rows, groups of six
        (1, 9, 15, 64, 5, 64, 3),
        (1, 800, 15, 64, 5, 64, 30),  # bundles of two, and of four
        (2, 800, 16, 64, 2, 128, 12),
        (1, 800, 12, 64, 1, 256, 16),
        (1, 30, 17, 80, 1, 200, 7),  # halves of a state
        (5, 3, 1, 64, 1, 64, 1),
        (1, 16, MOST_ROWS, 64, 2, 256, 159),  # as many pairs as can be
        (1, 4, MOST_ROWS, 64, MOST_ROWS, 64, 132),
        (300, 1, 4, 64, 1, 128, 132),
    ],
)
def test_rows_are_in_order_and_shares_cost_the_same(batch, chunks, nheads, headdim, ngroups, dstate, processors):
    draw = np.random.default_rng(chunks)
    p = plan(batch, 64 * chunks, nheads, headdim, ngroups, dstate, processors, sort=1)
    A, dt = -draw.uniform(1, 16, nheads), np.exp(draw.uniform(math.log(1e-3), math.log(1e-1), nheads))
    dt_bias = dt + np.log(-np.expm1(-dt))
    cuts, order = shared_out(p, nheads, ngroups, headdim, dstate, A, dt_bias)
    left = np.repeat(left_of(A, dt_bias), p.rows * ngroups // nheads)
    check(p, left, ngroups, headdim, dstate, cuts, order)


def test_rows_that_decay_alike_keep_their_order():
    """And those that never decay, or whose decay is no number, are the slowest of all."""
    A = np.repeat([-1.0, -2.0, 0.0, 3.0, math.nan, -math.inf], 4)
    p = plan(1, 64 * 99, len(A), 64, 1, 64, 5, sort=1)
    left = np.repeat([1.0, 0.5, 2.0, 2.0, 2.0, 0.0], 4)
    for negligible in (-127.0, -math.inf, np.finfo(np.float32).min):
        cuts, order = shared_out(p, len(A), 1, 64, 64, A, np.zeros(len(A)), negligible)
        if negligible == -127.0:
            assert order.tolist() == sorted(range(len(A)), key=lambda row: -left[row])
        assert sorted(order) == list(range(len(A)))
        assert p.side_by_side == 0 and cuts[0] == 0 and cuts[-1] == p.pairs << 16
        assert (np.diff(cuts.astype(int)) > 0).all()
