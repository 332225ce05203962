"""The exercises of chapter 15: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
from exercise_contract import SourceContract
from wrong.fused_ssd import CHAIN, COUNTS, FLAG, RELEASE, RIGHT, ROLES, WRONG
from wrong.warp_gemv import changed

from exercises.checks import fused_ssd as checks


class TestExercises(SourceContract):
    name, checks, right, wrong = "15_fused_ssd", checks, RIGHT, WRONG
    answers = {1: "cut_line", 2: "chunks_that_count", 3: "pass_1", 4: "chain_source", 5: "roles_source"}


judge = TestExercises.judge


def test_an_array_of_shares_passes(capsys):
    exercise = judge(1, lambda *args: np.array(RIGHT[1](*args)))
    assert exercise.passed, exercise.message


def _token_by_token(x, dt, A, B, Q, bits):
    """From the back, with a decay that each token makes smaller; and a log of NumPy's."""
    state, decay, log = np.zeros((x.shape[1], B.shape[1])), 1.0, np.float64(0)
    for t in range(len(dt) - 1, -1, -1):
        if (t + 1) % Q == 0 and log < -bits:
            break
        state = state + decay * dt[t] * np.outer(x[t], B[t])
        decay, log = decay * np.exp(A * dt[t]), log + A * dt[t] / np.log(2)
    return state, log


APART = """    if (warp == 1) {
        Phase<2> to;
        for (int step = 0; step < steps; ++step) {
            ring.wait_full(phase);
            if (!is_local(step)) {
                scores_ring.wait_empty(to);
                score(scores[to.stage], tiles[phase.stage], step);
                __syncwarp();
                if (threadIdx.x % 32 == 0) scores_ring.full[to.stage].arrive();
                to.advance();
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) ring.release(phase);
            phase.advance();
        }
        return;
    }
    int scored = 0;
    for (int step = 0; step < steps; ++step, phase.advance()) {
        const int *scores_of_step = is_local(step) ? nullptr : scores[scored % 2];
        ring.full[phase.stage].wait(phase.parity);
        if (scores_of_step) scores_ring.full[scored % 2].wait(scored / 2 & 1);
        multiply(tiles[phase.stage], scores_of_step, y, step);
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            if (scores_of_step) scores_ring.empty[scored % 2].arrive();
            ring.empty[phase.stage].arrive();
        }
        scored += scores_of_step != nullptr;
    }
}
"""
LANES = (COUNTS, "ring.init(32, 2), scores_ring.init(1, 1);")
FENCED = ("store_release(flags + share, launch);", "__threadfence(), store_relaxed(flags + share, launch);")
BEHIND = (FLAG, "while ((int)(load_acquire(flags + share - 1) - launch) < 0) {")
OTHERS = {
    "token by token": (3, _token_by_token),
    "until the flag is not behind": (4, changed(CHAIN, BEHIND)),
    "a fence, and a relaxed store": (4, changed(CHAIN, FENCED)),
    "lanes arrive for their warps, a loop for each role": (
        5,
        changed(ROLES[: ROLES.index("    Phase<2> turn;")], LANES) + APART,
    ),
    "the barrier itself": (5, changed(ROLES, (RELEASE, "        ring.empty[phase.stage].arrive();\n"))),
}


@pytest.mark.parametrize("way", OTHERS)
def test_other_right_answers_pass(way, capsys):
    number, answer = OTHERS[way]
    exercise = judge(number, answer)
    assert exercise.passed, exercise.message
