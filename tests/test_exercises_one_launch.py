"""The exercises of chapter 13: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
from exercise_contract import ExerciseContract
from wrong.one_launch import CHAIN, NO_ACQUIRE, NO_RELEASE, NO_TWO, PATH, RAISE, RIGHT, WRONG, changed
from wrong.one_launch import _stuck as stuck

from exercises.checks import one_launch as checks
from lab.check import unset


class TestExercises(ExerciseContract):
    name, checks, right, wrong = "13_one_launch", checks, RIGHT, WRONG
    answers = {1: "places_needed", 2: "look_back", 3: "chain_source", 4: "path_source"}
    runs_already = {3: ("not yet: at 2 chunks of 32 numbers: ", "race on published")}


judge = TestExercises.judge


def test_the_bugs_author_saw_nothing(stubs):
    """As the statement says: on the machine as it is, and without a look for races, the three defects do not show."""
    kernel, rng = checks.compiled(stubs["chain_source"], "look_back"), np.random.default_rng()
    for chunks in (1, 2, 20):
        x, decay = rng.integers(-4, 5, (chunks, 4, 64)).astype(np.float32), np.ones(chunks, np.float32)
        starts, published = unset((chunks, 64)), unset((chunks, 64))
        kernel(chunks, 64, x, decay, starts, published, np.zeros(chunks, np.uint32), np.zeros(1, np.uint32))
        assert (starts == np.cumsum(x.sum(axis=1), axis=0) - x.sum(axis=1)).all()


# Right answers that are not the solution's


def forward_from_the_cut(published, initial):
    states = initial.copy()
    for head in range(len(initial)):
        cuts = [n for n, (_, _, cut) in enumerate(published) if cut[head]]
        rest = published[cuts[-1] + 1 :] if cuts else published
        if cuts:
            states[head] = published[cuts[-1]][0][head]
        for added, decay, _ in rest:
            states[head] = decay[head] * states[head] + added[head]
    return states


def by_trying(order, waits):
    """Room for one, for two, ..., as the chapter's function tells who is stuck."""
    return next((room for room in range(1, len(order) + 1) if not stuck(order, waits, room)), None)


def by_acquire_and_release():
    """No fence: the instructions themselves say so."""
    spin = 'asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(flags + p) : "memory");'
    raise_flag = 'asm volatile("st.release.gpu.u32 [%0], %1;" :: "l"(flags + chunk), "r"(1) : "memory");'
    wait = "            while (!atomicAdd(flags + p, 0)) {}\n", f"            for (unsigned seen = 0; !seen;) {spin}\n"
    return changed(CHAIN, NO_RELEASE, NO_ACQUIRE, (RAISE, f"        {raise_flag}\n"), wait)


def each_thread_waits():
    """Each thread reads the flags, and has a fence of its own: no barrier behind the wait."""
    return changed(CHAIN, NO_TWO, (RAISE, RAISE + "    }\n    {\n"))


def by_columns():
    """Tickets go down the columns: both neighbours still have earlier ones."""
    return changed(PATH, ("cell = ticket", "cell = ticket % rows * cols + ticket / rows"))


def each_thread_waits_twice():
    """Each thread asks for both flags, and has a fence of its own."""
    wait = PATH[PATH.index("        if (r > 0)\n") : PATH.index("    __syncthreads(); // after")]
    return changed(PATH, ("    if (i == 0) {\n" + wait + "    __syncthreads(); // after\n", "    {\n" + wait))


def by_counts():
    """A flag counts the neighbours that are done: each cell tells the two behind it."""
    start, end = PATH.index("        if (r > 0)\n"), PATH.index("        __threadfence(); // acquire")
    wait = "        while (atomicAdd(flags + cell, 0) < (r > 0) + (c > 0)) {}\n"
    below = "if (r + 1 < rows) atomicAdd(flags + cell + cols, 1);"
    right = "if (c + 1 < cols) atomicAdd(flags + cell + 1, 1);"
    return changed(PATH[:start] + wait + PATH[end:], ("atomicExch(flags + cell, 1);", f"{below}\n        {right}"))


def two_threads_wait():
    """Thread 0 for the cell above, thread 1 for the one to the left, each with a fence of its own."""
    apart = "        __threadfence();\n    }\n    if (i == 1) {\n        if (c > 0)\n            while"
    return changed(PATH, ("        if (c > 0)\n            while", apart))


@pytest.mark.parametrize(
    "number, answer",
    [
        (1, by_trying),
        (2, forward_from_the_cut),
        (3, by_acquire_and_release()),
        (3, each_thread_waits()),
        (4, by_columns()),
        (4, each_thread_waits_twice()),
        (4, by_counts()),
        (4, two_threads_wait()),
    ],
)
def test_other_right_answers_pass(number, answer, capsys):
    exercise = judge(number, answer)
    assert exercise.passed, exercise.message
