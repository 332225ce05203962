"""The exercises of chapter 19: stubs say so, solutions pass, wrong answers are rejected."""

import pytest
from exercise_contract import SourceContract
from exercise_tools import expect_each_part_counts
from wrong.across_gpus import MEETINGS, PUSH, RIGHT, SENT, SITES, TELL, WAIT, WRONG, changed

from exercises.checks import across_gpus as checks


class TestExercises(SourceContract):
    name, checks, right, wrong = "19_across_gpus", checks, RIGHT, WRONG
    answers = {
        1: ("tokens_per_second", "slowest_exchange"),
        2: "push_source",
        3: "meetings_source",
        4: "sent_source",
        5: "sites_source",
    }
    runs_already = {
        2: ("not yet: at 2 exchanges of 1 number", "between devices it takes __threadfence_system()"),
        3: ("not yet: right, but with 64 numbers an exchange of pulled writes 64 bytes",),
        4: ("not yet: right, but 32 bytes go over the link for each word of 16 bytes; wanted: 16",),
    }


judge = TestExercises.judge


@pytest.mark.parametrize("part", TestExercises.answers[1])
def test_each_part_of_the_prediction_counts(part, stubs, solutions, capsys):
    expect_each_part_counts(judge, 1, part, TestExercises.answers[1], stubs, solutions)


@pytest.mark.parametrize("mistake", ["fences of one card", "no barrier in front", "a flag that must be equal"])
def test_each_of_the_three_defects_shows_alone(mistake, capsys):
    assert not judge(2, WRONG[2][mistake][0]).passed


# Right answers that are not the solution's

BY_ASM = changed(
    PUSH,
    ("        __threadfence_system();\n        *(volatile unsigned *)their_flag = now;",
     '        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(their_flag), "r"(now) : "memory");'),
    ("*(volatile unsigned *)flag - now", "atomicAdd_system((unsigned *)flag, 0) - now"),
)  # fmt: skip
BY_ATOMIC = changed(
    PUSH,
    (TELL, "atomicExch_system(their_flag, now);"),
    ("(int)(*(volatile unsigned *)flag - now) < 0", "atomicAdd_system((unsigned *)flag, 0) - now > 1u"),
)
ALL_THREADS_FENCE = changed(
    PUSH,
    ("    __syncthreads();\n    if (threadIdx", "    __threadfence_system();\n    __syncthreads();\n    if (threadIdx"),
)
BOXES_THE_OTHER_WAY = changed(MEETINGS, ("now % 2 * n", "(1 - now % 2) * n"))
OTHER_NUMBERS = changed(MEETINGS, ("meet(flag, their_flag, now)", "meet(flag, their_flag, 2 * now + 5)"))
PAIRS = changed(SENT, (WAIT, "!has_come(a.x) || !has_come(a.z)"))
PUT_BACK_LAST = changed(
    SENT,
    ("    send(box + at, make_float4(-0.0f, -0.0f, -0.0f, -0.0f));\n", ""),
    ("v.w + a.w);\n", "v.w + a.w);\n    send(box + at, make_float4(-0.0f, -0.0f, -0.0f, -0.0f));\n"),
)
SITE_IN_FLAG = SITES.replace("const unsigned now = *token;", "const unsigned now = (*token << 8) + site;")
LOWEST_BIT = SITES.replace("const unsigned now = *token;", "const unsigned now = 2 * site + *token % 2 + 1;")
AT_LEAST = changed(SITES, ("(unsigned)(word >> 32) != now", "(int)((unsigned)(word >> 32) - now) < 0"))


@pytest.mark.parametrize(
    "number, answer",
    [
        (2, BY_ASM),
        (2, BY_ATOMIC),
        (2, ALL_THREADS_FENCE),
        (3, BOXES_THE_OTHER_WAY),
        (3, OTHER_NUMBERS),
        (4, PAIRS),
        (4, PUT_BACK_LAST),
        (5, SITE_IN_FLAG),
        (5, LOWEST_BIT),
        (5, AT_LEAST),
    ],
)
def test_other_right_answers_pass(number, answer, capsys):
    exercise = judge(number, answer)
    assert exercise.passed, exercise.message
