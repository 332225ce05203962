"""The exercises of chapter 02: stubs say so, solutions pass, planted wrong answers are rejected."""

import itertools
import os
import socket
import time

import numpy as np
import pytest
from exercise_contract import SourceContract
from exercise_tools import printed
from wrong.cpu_matmul import WRONG

from exercises.checks import cpu_matmul as checks
from exercises.checks import own_process
from exercises.checks.own_process import OwnProcess
from lab.exercise import Wrong


class TestExercises(SourceContract):
    name, checks, wrong = "02_cpu_matmul", checks, WRONG
    answers = {1: "row_range", 2: "dot_source", 3: "matmul_source", 4: "visit", 5: "half_source"}
    runs_already = {
        3: (
            "not yet: wrong at m = 1, n = 1, k = 2: 1 of 1 element of C wrong with A and B all ones. "
            "C[0, 0] is 1, expected 2",
        )
    }
    draws = 3
    test_what_the_wrong_answers_were_made_from_is_right = None  # here each stands by itself

    def test_wrong_answer_is_rejected(self, number, mistake, monkeypatch, capsys):
        if any(words in self.wrong[number][mistake][1] for words in ("still running", "never ends")):
            # An endless loop in C counts as one after a second. The others keep their time: on a busy machine the first
            # call waits longer than that for a Python with NumPy to begin.
            patient = OwnProcess.call
            monkeypatch.setattr(OwnProcess, "call", lambda *args, **named: patient(*args, **{**named, "limit": 1}))
        super().test_wrong_answer_is_rejected(number, mistake, capsys, monkeypatch)
        said = capsys.readouterr().out.strip()
        assert "\n" not in said or "does not compile" in said

    def test_the_notebook_prints_what_the_checks_say(self):
        said = printed("exercises", self.name)
        assert len(said) == 6  # five checks and the table of plain orders
        assert all(text.count("\n") == 1 for id, text in said.items() if id != "ex4-plain")
        assert sum("not done yet" in text for text in said.values()) == 4


judge = TestExercises.judge


@pytest.mark.parametrize("given", [None, 3, "two words", (1,), (0, None), (0.0, 1.0), (True, 2), (2, 1), [], 1j])
def test_a_check_bears_whatever_a_function_gives(given, capsys):
    for number in (1, 4):
        exercise = judge(number, lambda *_: given)
        assert not exercise.passed and exercise.message.startswith("not yet: ")
        assert "raised" not in exercise.message


def test_an_error_in_the_answer_is_shown(capsys):
    def row_range(thread, n_threads, rows):
        return thread // (n_threads - n_threads), rows

    assert "your code raised ZeroDivisionError" in judge(1, row_range).message


def test_a_generator_that_never_yields_is_stopped(monkeypatch, capsys):
    limit = checks.time_limit
    monkeypatch.setattr(checks, "time_limit", lambda *_: limit(0.2))

    def visit(n):
        while True:
            pass
        yield

    assert "still running" in judge(4, visit).message


# Right answers that are not the solution's


@pytest.mark.parametrize(
    "begin",
    [
        lambda t, threads, rows: t * (rows // threads) + min(t, rows % threads),  # the first ones take one more
        lambda t, threads, rows: -(-t * rows // threads),  # rounded up
        lambda t, threads, rows: np.int64(t * rows // threads),
    ],
)
def test_other_ways_to_share_rows_pass(begin, capsys):
    assert judge(1, lambda t, threads, rows: [begin(t, threads, rows), begin(t + 1, threads, rows)]).passed


def accumulators(count, kind="float"):
    return f"""
    float dot(const float *a, const float *b, int64_t n) {{
        {kind} acc[{count}] = {{0}}, total = 0;
        for (int64_t i = 0; i < n; i++) acc[i % {count}] += ({kind})a[i] * b[i];
        for (int k = 0; k < {count}; k++) total += acc[k];
        return total;
    }}"""


GROUPS = """
float dot(const float *a, const float *b, int64_t n) {
    float s = 0;
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        s += a[i] * b[i] + a[i + 1] * b[i + 1] + a[i + 2] * b[i + 2] + a[i + 3] * b[i + 3];
    for (; i < n; i++) s += a[i] * b[i];
    return s;
}"""
PAIRWISE = """
float dot(const float *a, const float *b, int64_t n) {
    if (n <= 1) return n ? a[0] * b[0] : 0;
    return dot(a, b, n / 2) + dot(a + n / 2, b + n / 2, n - n / 2);
}"""
FUSED = """
#include <math.h>
float dot(const float *a, const float *b, int64_t n) {
    float acc[8] = {0};
    for (int64_t i = n; i-- > 0;) acc[i % 8] = fmaf(a[i], b[i], acc[i % 8]);
    return ((acc[0] + acc[1]) + (acc[2] + acc[3])) + ((acc[4] + acc[5]) + (acc[6] + acc[7]));
}"""


@pytest.mark.parametrize(
    "source, longest",
    [
        (accumulators(4), 66),  # 63 additions in a chain, and three that put the chains together
        (accumulators(5), 55),
        (accumulators(4, "double"), 66),
        (accumulators(8, "long double"), 38),
        (accumulators(13), 31),
        (accumulators(64), 66),
        (GROUPS, 66),  # one accumulator, but four products are added up before they join it
        (PAIRWISE, 8),
        (FUSED, 34),
    ],
)
def test_other_orders_of_additions_pass_and_are_measured(source, longest, capsys):
    exercise = judge(2, source)
    assert exercise.passed, exercise.message
    assert exercise.message.endswith(f"is {longest} additions")


def test_an_order_that_is_no_tree_of_additions_is_refused(capsys):
    # right on ordinary numbers, which it adds in int64; no order of floating-point additions can be seen
    source = """
    float dot(const float *a, const float *b, int64_t n) {
        int64_t sum = 0;
        for (int64_t i = 0; i < n; i++) sum += (int64_t)(a[i] * 64 * b[i]);
        return sum / 64.0f;
    }"""
    exercise = judge(2, source)
    assert not exercise.passed and "cannot be read" in exercise.message


def blocks(corners, inside, **size):
    """visit() by blocks of size i, j, p: their corners in one order of loops, the steps in a block in another."""

    def visit(n):
        for corner in itertools.product(*(range(0, n, size[axis]) for axis in corners)):
            first = dict(zip(corners, corner))
            ranges = [range(first[axis], min(first[axis] + size[axis], n)) for axis in inside]
            for step in itertools.product(*ranges):
                at = dict(zip(inside, step))
                yield at["i"], at["j"], at["p"]

    return visit


@pytest.mark.parametrize(
    "visit, misses",
    [
        (blocks("ijp", "pij", i=24, j=16, p=48), 864),  # a tile of C stays while p runs over its whole range
        (blocks("jip", "pji", i=24, j=16, p=48), 864),
        (blocks("ijp", "ijp", i=24, j=16, p=16), 1140),  # but not if its sums are done one after another
        (blocks("jpi", "ipj", i=24, j=16, p=64), 720),  # a tall tile of B stays
        (blocks("pij", "ijp", i=16, j=48, p=16), 720),  # a tall tile of A
    ],
)
def test_other_shapes_of_a_tile(visit, misses, capsys):
    exercise = judge(4, visit)
    assert exercise.passed == (misses <= checks.MOST_MISSES)
    assert f"{misses:,} misses at n = 48" in exercise.message


@pytest.mark.parametrize("order", ["ijp", "jpi", "pij"])
def test_square_tiles_are_not_enough(order, capsys):
    for size in (16, 24):
        assert not judge(4, blocks(order, "ipj", i=size, j=size, p=size)).passed


def test_the_plain_orders_fail_by_far(solutions, capsys):
    checks.plain_orders()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ijp", "ipj", "jip", "jpi", "pij", "pji"]
    assert min(int(line.split()[1].replace(",", "")) for line in lines) > 4 * checks.MOST_MISSES
    assert "720 misses at n = 48 (A 432, B 144, C 144)" in judge(4, solutions["visit"]).message


@pytest.mark.parametrize("words", ["// no _Float16 here", "/* _mm256_cvtph_ps */", "/* asm */"])
def test_hardware_may_be_named_in_a_comment(words, solutions, capsys):
    assert judge(5, solutions["half_source"] + words + "\n").passed


# What stands around the checks


def test_the_race_and_the_picture_wait_for_an_answer(stubs, solutions, capsys):
    checks.race(stubs["dot_source"])
    assert checks.draw_yours(stubs["visit"]) is None
    assert capsys.readouterr().out.splitlines() == [
        "the race starts when exercise 2 passes",
        "the picture comes when visit(48) gives every step once",
    ]
    checks.race(solutions["dot_source"])
    names, times, verdict = capsys.readouterr().out.splitlines()
    assert names.split() == ["accumulators", "1", "2", "4", "8", "16", "yours"]
    assert len(times.split()) == 3 + 6 and all(float(t) > 0 for t in times.split()[3:])
    assert verdict.startswith("Yours is ")
    picture = checks.draw_yours(solutions["visit"])
    assert [axis.get_xlabel() for axis in picture.axes] == 2 * ["column p", "column j", "column j"]
    assert [axis.get_ylabel() for axis in picture.axes] == 2 * ["row i", "row p", "row i"]
    assert picture.axes[4].get_title("left") == "B: 144 misses in all"


def test_a_process_is_stopped_when_the_check_ends():
    with OwnProcess("int one(void) { return 1; }", {}) as c:
        assert c.call("one") == 1
    assert c._process.returncode is not None


def test_what_makes_copies_may_be_killed():
    with OwnProcess("int one(void) { return 1; }", {}) as c:
        copies = own_process._copies(os.getpid())
        copies.process.kill()
        copies.process.wait()
        assert c.call("one") == 1
    with OwnProcess("int two(void) { return 2; }", {}) as c:
        assert c.call("two") == 2
    assert own_process._copies(os.getpid()) is not copies


def test_an_interrupted_question_gets_no_late_answer(monkeypatch):
    with OwnProcess("int one(void) { return 1; }", {}) as c:
        assert c.call("one") == 1
        copies = own_process._copies(os.getpid())

    def interrupted(asked, size):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(socket.socket, "recv", interrupted)
    with pytest.raises(KeyboardInterrupt):
        OwnProcess("int one(void) { return 1; }", {})
    with OwnProcess("int two(void) { return 2; }", {}) as c:
        assert c.call("two") == 2
    assert own_process._copies(os.getpid()) is not copies


def test_an_endless_loop_costs_its_limit_and_no_more():
    with OwnProcess("int spin(void) { for (volatile int i = 1; i;) {} return 0; }", {}) as c:
        started = time.perf_counter()
        with pytest.raises(Wrong, match="still running after 0.3 seconds at n = 4: is there a loop"):
            c.call("spin", doing="n = 4", limit=0.3)
    assert time.perf_counter() - started < 10


def test_memory_has_an_end(monkeypatch):
    monkeypatch.setattr("exercises.checks.own_process.MEMORY", 1 << 28)
    source = """
    #include <stdlib.h>
    #include <string.h>
    int hoard(void) { for (;;) memset(malloc(1 << 24), 1, 1 << 24); }
    void leave(void) { exit(3); }
    """
    with OwnProcess(source, {}) as c:
        with pytest.raises(
            Wrong, match="crashed at n = 4 .segmentation fault.*more than 0.25 GB of memory malloc gives"
        ):
            c.call("hoard", doing="n = 4")
    with OwnProcess(source, {}) as c:
        with pytest.raises(Wrong, match="the program ended itself at n = 4, with exit status 3"):
            c.call("leave", doing="n = 4")


def test_what_printf_writes_is_seen(capfd):
    source = '#include <stdio.h>\nint hello(int n) { printf("n is %d\\n", n); return n; }'
    with OwnProcess(source, {}) as c:
        c.call("hello", 3)
    assert capfd.readouterr().out == "n is 3\n"


def test_what_is_written_into_guards_comes_back():
    source = "void put(float *x, int64_t at) { x[at] = 7; }"
    home = np.zeros(10, np.float32)
    with OwnProcess(source, {"put": "void put(float *x, int64_t at)"}) as c:
        c.call("put", home[4:6], 2)
    assert home.tolist() == [0, 0, 0, 0, 0, 0, 7, 0, 0, 0]
