"""The exercises of chapter 13: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
from exercise_contract import ExerciseContract
from wrong.fused_ssd import CHAIN, RIGHT, WRONG, changed

from exercises.checks import fused_ssd as checks


class TestExercises(ExerciseContract):
    name, checks, right, wrong = "13_fused_ssd", checks, RIGHT, WRONG
    answers = {1: "cut_line", 2: "never_end", 3: "look_back", 4: "chunks_that_count", 5: "chain_source"}
    runs_already = {5: ("not yet: at chunks = 2, 32 numbers: ", "race on")}


judge = TestExercises.judge


def test_the_bugs_author_saw_nothing(stubs):
    """For a chain of one chunk, as the statement says, the kernel with three defects is right."""
    kernel = checks.compiled(stubs["chain_source"], "hand_on")
    added, state = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    kernel(1, 128, added, np.ones(1, np.float32), np.zeros(128, np.float32), state, np.zeros(2, np.uint32))
    assert (state == added).all()


@pytest.mark.parametrize(
    "given", [None, 3, "x", lambda: 0, lambda *args: None, lambda *args: "x", lambda *args: np.array(3)]
)
def test_a_check_bears_whatever_it_is_given(given, capsys):
    for number in TestExercises.answers:
        exercise = judge(number, given)
        assert not exercise.passed and exercise.message.startswith("not yet: ")


# Right answers that are not the solution's


def forward_from_the_cut(published, initial):
    cuts = [n for n, (_, decay) in enumerate(published) if decay is None]
    state, rest = (published[cuts[-1]][0], published[cuts[-1] + 1 :]) if cuts else (initial, published)
    for added, decay in rest:
        state = decay * state + added
    return state


def by_a_fence_in_each_thread():
    """Each thread's own fence before the barrier."""
    return changed(
        CHAIN,
        ("    __syncthreads(); // 2\n", "    __threadfence();\n    __syncthreads();\n"),
        ("__threadfence(); // 3", ""),
    )


def by_acquire_and_release():
    """No fence: the instructions themselves say so."""
    spin = 'asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(counters + 1) : "memory");'
    raise_flag = 'asm volatile("st.release.gpu.u32 [%0], %1;" :: "l"(counters + 1), "r"(chunk + 1) : "memory");'
    wait = (
        "        while (atomicAdd(counters + 1, 0) < chunk) {}\n        __threadfence();\n",
        f"        for (unsigned seen = 0; seen < chunk;) {spin}\n",
    )
    release = (
        "        __threadfence(); // 3\n        atomicExch(counters + 1, chunk + 1);\n",
        f"        {raise_flag}\n",
    )
    return changed(CHAIN, wait, release)


@pytest.mark.parametrize(
    "number, answer",
    [
        (1, lambda *a: np.array(RIGHT[1](*a))),
        (2, lambda *a: set(RIGHT[2](*a))),
        (3, forward_from_the_cut),
        (5, by_a_fence_in_each_thread()),
        (5, by_acquire_and_release()),
    ],
)
def test_other_right_answers_pass(number, answer, capsys):
    exercise = judge(number, answer)
    assert exercise.passed, exercise.message
