"""Wrong answers to the exercises of chapter 15. Each says the mistake that it makes.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer, and words that
the check's verdict must hold. RIGHT has the answers that they were made from.
"""

import math

import numpy as np

from wrong.warp_gemv import changed

# Exercise 1: shares of a line


def _line(twice=lambda length, before: min(length, before), fits=lambda cost, limit: cost <= limit, stops=False):
    """twice(length of the share, chunks of its last pair in front of its end) -> chunks walked twice."""

    def cut_line(pairs, chunks, limit, again):
        lengths, begin = [], 0
        while begin < pairs * chunks:
            longest = 1
            for length in range(1, pairs * chunks - begin + 1):
                if fits(length + again * twice(length, (begin + length) % chunks), limit):
                    longest = length
                elif stops:
                    break
            lengths.append(longest)
            begin += longest
        return lengths

    return cut_line


def _at_the_ends_too(pairs, chunks, limit, again):
    """Walks the last piece twice, even where its pair ends there."""
    lengths, begin = [], 0
    while begin < pairs * chunks:
        ends = range(begin + 1, pairs * chunks + 1)
        dear = {end: min(end - begin, (end - 1) % chunks + 1) for end in ends}
        fitting = [end for end in ends if end - begin + again * dear[end] <= limit]
        lengths.append(max(fitting) - begin)
        begin = max(fitting)
    return lengths


def _equal(pairs, chunks, limit, again):
    shares = len(_line()(pairs, chunks, limit, again))
    cuts = [n * pairs * chunks // shares for n in range(shares + 1)]
    return [b - a for a, b in zip(cuts, cuts[1:])]


# Exercise 2: what counts

LN2 = math.log(2)


def _counts(go_on=lambda after, bits: not after < -bits, own=False, clean=lambda log: log, base=LN2, least=0):
    def chunks_that_count(dt, A, Q, bits):
        logs = (A * dt / base).reshape(-1, Q).sum(axis=1)
        count, after = 0, 0.0
        for log in logs[::-1]:
            log = clean(log)
            if not go_on(after + log if own else after, bits):
                break
            count, after = count + 1, after + log
        return max(count, least)

    return chunks_that_count


def _from_the_front(dt, A, Q, bits):
    return _counts()(dt[::-1], A, Q, bits)


def _each_alone(dt, A, Q, bits):
    logs = (A * dt / math.log(2)).reshape(-1, Q).sum(axis=1)
    return 1 + int((~(logs[1:] < -bits)).cumprod().sum())


# Exercise 3: pass 1


def _pass_1(
    weigh=lambda dt, log, u: dt * 2 ** (log + u[-1] - u), stops=lambda log, bits, own: log < -bits,
    keeps=lambda state, decay: state, gives=lambda state, log: (state, log), over=lambda a, dt: a * dt,
):  # fmt: skip
    def pass_1(x, dt, A, B, Q, bits):
        state, log = np.zeros((x.shape[1], B.shape[1])), 0.0
        for end in range(len(dt), 0, -Q):
            t = slice(end - Q, end)
            u = np.cumsum(over(A, dt[t]) / math.log(2))
            if stops(log, bits, u[-1]):
                break
            state = keeps(state, 2 ** u[-1]) + (x[t] * weigh(dt[t], log, u)[:, None]).T @ B[t]
            log += u[-1]
        return gives(state, log)

    return pass_1


def _all_at_once(x, dt, A, B, Q, bits):
    """Sums over the whole piece, of which a front that does not count is NaN."""
    w = dt * np.exp(A * (dt.sum() - dt.cumsum()))
    return (x * w[:, None]).T @ B, A * dt.sum() / math.log(2)


def _from_the_first(x, dt, A, B, Q, bits):
    state, log = np.zeros((x.shape[1], B.shape[1])), 0.0
    for begin in range(0, len(dt), Q):
        if log < -bits:
            break
        t = slice(begin, begin + Q)
        u = np.cumsum(A * dt[t] / math.log(2))
        state = 2 ** u[-1] * state + (x[t] * (dt[t] * 2 ** (u[-1] - u))[:, None]).T @ B[t]
        log += u[-1]
    return state, log


# Exercise 4: launches that clear nothing

CHAIN = """
#include "kernels/device/grid.cuh"
__device__ int row_sum(const int *row, int lane) {
    int sum = row[lane];
    for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
    return sum;
}
extern "C" __global__ void chain(const int *x, int *sums, unsigned long long *counter, unsigned *flags, int shares) {
    const int lane = threadIdx.x;
    const unsigned of_launch = shares + gridDim.x;
    while (true) {
        unsigned long long taken = 0;
        if (lane == 0) taken = atomicAdd(counter, 1ull);
        taken = __shfl_sync(~0u, taken, 0);
        const unsigned launch = taken / of_launch + 1;
        const int share = taken % of_launch;
        if (share >= shares) return;
        int sum = row_sum(x + 32 * share, lane);
        if (lane == 0) {
            if (share > 0) {
                while (load_acquire(flags + share - 1) != launch) {
                }
                sum += sums[share - 1];
            }
            sums[share] = sum;
            store_release(flags + share, launch);
        }
    }
}
"""
FLAG, WRITTEN, RAISED = (
    "while (load_acquire(flags + share - 1) != launch) {",
    "sums[share] = sum;",
    ("store_release(flags + share, launch);"),
)
LEAVE = "if (share >= shares) return;"
LAUNCH, TAKEN = "taken / of_launch + 1;", "unsigned long long taken = 0;"


def _chain(*pairs):
    return changed(CHAIN, *pairs)


# Exercise 5: roles that count apart

ROLES = """
#include "kernels/device/hopper/mbarrier.cuh"
__device__ bool is_local(int step);
__device__ void bring(int *tile, const int *x, int step);
__device__ void score(int *scores, const int *tile, int step);
__device__ void multiply(const int *tile, const int *scores, int *y, int step);
extern "C" __global__ void roles(const int *x, int *y, int steps) {
    __shared__ int tiles[3][32], scores[2][32];
    __shared__ Ring<3> ring;
    __shared__ Ring<2> scores_ring;
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) ring.init(32, 64), scores_ring.init(32, 32);
    __syncthreads();
    Phase<3> phase;
    if (warp == 0) {
        for (int step = 0; step < steps; step++, phase.advance()) {
            ring.wait_empty(phase);
            bring(tiles[phase.stage], x, step);
            ring.full[phase.stage].arrive();
        }
        return;
    }
    Phase<2> turn;
    for (int step = 0; step < steps; step++, phase.advance()) {
        ring.wait_full(phase);
        const int *tile = tiles[phase.stage];
        if (warp == 1) {
            if (!is_local(step)) {
                scores_ring.wait_empty(turn);
                score(scores[turn.stage], tile, step);
                scores_ring.full[turn.stage].arrive();
                turn.advance();
            }
        } else if (is_local(step)) {
            multiply(tile, nullptr, y, step);
        } else {
            scores_ring.wait_full(turn);
            multiply(tile, scores[turn.stage], y, step);
            scores_ring.release(turn);
            turn.advance();
        }
        ring.release(phase);
    }
}
"""
COUNTS, FULL = "ring.init(32, 64), scores_ring.init(32, 32);", "        ring.wait_full(phase);\n"
ROOM, SCORED = "                scores_ring.wait_empty(turn);\n", "            scores_ring.wait_full(turn);\n"
SCORE = "                score(scores[turn.stage], tile, step);\n"
SCORES_FULL = "                scores_ring.full[turn.stage].arrive();\n"
TURN, RELEASE = "                turn.advance();\n", "        ring.release(phase);\n"
MULTIPLY = "            multiply(tile, scores[turn.stage], y, step);\n"
READ, READ_TURN = (
    "            scores_ring.release(turn);\n",
    "            turn.advance();\n        }\n        ring.release",
)


def _roles(*pairs):
    return changed(ROLES, *pairs)


RIGHT = {1: _line(), 2: _counts(), 3: _pass_1(), 4: CHAIN, 5: ROLES}

WRONG = {
    1: {
        "stops at the first that is too dear": (_line(stops=True), "expected [4]"),
        "nothing is walked twice": (_line(twice=lambda length, before: 0), "expected ["),
        "the whole share twice": (_line(twice=lambda length, before: length if before else 0), "expected ["),
        "more of the pair than it has": (_line(twice=lambda length, before: before), "expected ["),
        "twice at the end of a pair as well": (_at_the_ends_too, "expected [4]"),
        "below the limit": (_line(fits=lambda cost, limit: cost < limit), "expected ["),
        "equal shares": (_equal, "expected ["),
        "where shares end": (lambda *a: np.cumsum(_line()(*a)).tolist(), "expected ["),
        "how many": (lambda *a: len(_line()(*a)), "expected a list"),
    },
    2: {
        "a NaN ends it": (_counts(go_on=lambda after, bits: after >= -bits), "with dt = "),
        "a NaN is nothing": (_counts(clean=lambda log: 0.0 if math.isnan(log) else log), "with dt = "),
        "at most in place of below": (_counts(go_on=lambda after, bits: not after <= -bits, least=1), "with dt = "),
        "its own decay as well": (_counts(own=True, least=1), "with dt = "),
        "in powers of e": (_counts(base=1.0), "with dt = "),
        "from the front": (_from_the_front, "with dt = "),
        "each chunk alone": (_each_alone, "with dt = "),
    },
    3: {
        "the token's own decay as well": (
            _pass_1(weigh=lambda dt, log, u: dt * 2 ** (log + u[-1] - u + np.diff(u, prepend=0))),
            "a token's own decay is part of its weight",
        ),
        "without dt": (_pass_1(weigh=lambda dt, log, u: 2 ** (log + u[-1] - u)), "dt is not part of the weight"),
        "to the chunk's end": (_pass_1(weigh=lambda dt, log, u: dt * 2 ** (u[-1] - u)), "ends where its chunk does"),
        "from the front to the token": (_pass_1(weigh=lambda dt, log, u: dt * 2**u), "from the front to the token"),
        "the state decays, as it does forwards": (
            _pass_1(keeps=lambda state, decay: decay * state, weigh=lambda dt, log, u: dt * 2 ** (u[-1] - u)),
            "state[",
        ),
        "a quotient of powers": (_pass_1(weigh=lambda dt, log, u: dt * 2 ** (log + u[-1]) * 2**-u), "overflow"),
        "never stops": (_pass_1(stops=lambda log, bits, own: False), "holds NaN"),
        "stops before the chunk that goes below": (_pass_1(stops=lambda log, bits, own: log + own < -bits), "state["),
        "stops at the limit, too": (_pass_1(stops=lambda log, bits, own: log <= -bits), "state["),
        "from the first chunk on": (_from_the_first, "NaN"),
        "all at once": (_all_at_once, "holds NaN"),
        "a natural logarithm": (_pass_1(gives=lambda s, log: (s, log * LN2)), "that is the natural logarithm"),
        "the decay itself": (_pass_1(gives=lambda s, log: (s, 2.0**log)), "the log is"),
        "the state alone": (_pass_1(gives=lambda s, log: s), "expected two things"),
        "transposed": (_pass_1(gives=lambda s, log: (s.T, log)), "has shape (3, 2), expected (2, 3)"),
        "without A": (_pass_1(over=lambda a, dt: -dt), "state["),
    },
    4: {
        "blocks take no ticket that is none": (
            _chain(("unsigned of_launch = shares + gridDim.x;", "unsigned of_launch = shares;"), (">= shares", "< 0")),
            "endless loop",
        ),
        "the tickets that are none are not counted": (
            _chain(("of_launch = shares + gridDim.x;", "of_launch = shares + 1;")),
            "at 3 blocks, 2 shares, launch",
        ),
        "launches count from 0": (_chain((LAUNCH, "taken / of_launch;")), "hold [0], expected 1"),
        "a flag is 1, whatever the launch": (_chain((LAUNCH, "1;")), "launch 2"),
        "any launch's flag will do": (_chain((FLAG, "while (load_acquire(flags + share - 1) == 0) {")), "launch 2"),
        "nobody waits": (_chain((FLAG, "while (false) {")), "race"),
        "the flag before the sum": (
            _chain((WRITTEN, RAISED), (" " * 12 + RAISED + "\n        }", " " * 12 + WRITTEN + "\n        }")),
            "race",
        ),
        "no release": (_chain((RAISED, "flags[share] = launch;")), "race"),
        "no acquire": (
            _chain((FLAG, "while (*(volatile unsigned *)(flags + share - 1) != launch) {")),
            "race",
        ),
        "the block's number for a share": (
            _chain(("share = taken % of_launch;", "share = taken % of_launch < shares ? blockIdx.x : shares;")),
            "at 1 block, 4 shares, launch 1",
        ),
        "the counter is cut to 32 bits": (_chain((TAKEN, "unsigned taken = 0;")), "launch 1,000,000,001"),
        "the last one clears the counter": (
            _chain((LEAVE, "if (lane == 0 && share == of_launch - 1) *counter = 0;\n        " + LEAVE)),
            "at 1 block, 1 share, launch 1",
        ),
        "one share a block": (
            _chain(
                (
                    "            store_release(flags + share, launch);\n        }\n    }",
                    "            store_release(flags + share, launch);\n        }\n        return;\n    }",
                )
            ),
            "at 1 block, 1 share, launch 1",
        ),
        "lane 31's ticket": (
            _chain(("__shfl_sync(~0u, taken, 0)", "__shfl_sync(~0u, taken, 31)")),
            "endless loop",
        ),
        "the share alone": (_chain(("                sum += sums[share - 1];\n", "")), "differ"),
    },
    5: {
        "turns advance at every step": (
            _roles((TURN, ""), (READ_TURN, "        }\n        turn.advance();\n        ring.release")),
            "at steps ",
        ),
        "the scorer's turn advances at every step": (
            _roles((TURN + "            }\n", "            }\n            turn.advance();\n")),
            "deadlock at steps LLPPP",
        ),
        "multiply does not wait for scores": (_roles((SCORED, "")), "at steps P: "),
        "nobody waits for a tile": (_roles((FULL, "")), "at steps P: "),
        "scores are written over": (_roles((ROOM, "")), "at steps PPP: "),
        "one reader is counted": (_roles((COUNTS, COUNTS.replace("64", "32"))), "at steps "),
        "all three warps are counted": (_roles((COUNTS, COUNTS.replace("64", "96"))), "deadlock at steps LLPPP"),
        "lane 0 is counted": (_roles((COUNTS, "ring.init(1, 2), scores_ring.init(1, 1);")), "at steps "),
        "the scorer does not release a local step": (
            _roles((RELEASE, "        if (warp == 2 || !is_local(step)) ring.release(phase);\n")),
            "deadlock at steps LLPPP",
        ),
        "multiply waits for scores of local steps": (
            _roles(("} else if (is_local(step)) {", "} else if (false) {")),
            "deadlock at steps L, ",
        ),
        "scores of all steps": (
            _roles(("if (!is_local(step)) {", "if (true) {")),
            "scores are made of it: nobody needs them",
        ),
        "scores are never given back": (_roles((READ, "")), "deadlock at steps PPP"),
        "a tile is given back before it is read": (
            _roles((RELEASE, ""), (FULL, FULL + RELEASE)),
            "at steps LLPPP: ",
        ),
        "scores are full before they are made": (_roles((SCORE + SCORES_FULL, SCORES_FULL + SCORE)), "at steps P: "),
        "scores are given back before they are read": (_roles((MULTIPLY + READ, READ + MULTIPLY)), "at steps PPP: "),
        "scores lie where the tile's number says": (
            _roles((SCORE, SCORE.replace("turn.stage", "phase.stage % 2"))),
            "at steps ",
        ),
        "the scorer waits until its scores were read": (
            _roles((SCORES_FULL, SCORES_FULL + "                scores_ring.empty[turn.stage].wait(turn.parity);\n")),
            "right, but nobody works ahead: at steps PP",
        ),
        "multiply runs without scores": (
            _roles((MULTIPLY, MULTIPLY.replace("scores[turn.stage]", "nullptr"))),
            "differ",
        ),
    },
}
