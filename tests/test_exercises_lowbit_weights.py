"""The exercises of chapter 06: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
from exercise_contract import SourceContract
from wrong.lowbit_weights import DIGITS, FOLDED, MAGIC, RIGHT, SCALED, SIGN, SIGNED, WRONG
from wrong.warp_gemv import changed

import ref.lowbit
from exercises.checks import lowbit_weights as checks


class TestExercises(SourceContract):
    name, checks, right, wrong = "06_lowbit_weights", checks, RIGHT, WRONG
    answers = {
        1: ("pack", "unpack"),
        2: "magic_source",
        3: "signed_source",
        4: "folded_source",
        5: "interleave",
        6: "digits_source",
    }
    runs_already = {3: ("not yet: wrong at a weight of -2 in place 0: ", "y[0] is 2, expected -2")}


judge = TestExercises.judge


def test_the_bugs_author_saw_nothing(stubs):
    """With weights of −1, 0 and 1 the kernel that was handed over is right."""
    kernel, rng = checks.compiled(stubs["signed_source"], "product"), np.random.default_rng()
    for rows, cols in ((1, 16), (7, 530), (9, 95)):
        weights, x = rng.integers(-1, 2, (rows, cols)), rng.integers(1, 9, cols).astype(np.float32)
        y = np.full(rows, np.nan, np.float32)
        words = ref.lowbit.pack((weights & 3).astype(np.uint8), 2)
        checks.launched(kernel, 2, checks.BLOCK, words, x, y, np.int32(rows), np.int32(cols), at="ternary weights")
        assert np.array_equal(y, weights @ x)


def test_the_check_compares_with_the_code_that_was_handed_over(stubs):
    """It counts the instructions of a copy, which must not part from the stub."""

    def words(source):
        code = source[source.index("{") :]
        return "".join("".join(line.split("//")[0] for line in code.splitlines()).split())

    assert words(checks.HANDED_OVER) == words(stubs["signed_source"])


@pytest.mark.parametrize(
    "given", [lambda *_: 3, lambda *_: (3, 4), lambda *_: "", lambda *_: np.zeros(3), lambda *_: {}]
)
def test_a_check_bears_whatever_a_function_gives(given, capsys):
    for exercise in (judge(1, given, given), judge(1, RIGHT[1][0], given), judge(5, given)):
        assert not exercise.passed and exercise.message.startswith("not yet: ")
        assert "raised" not in exercise.message


def test_an_endless_loop_ends(capsys):
    source = changed(SIGNED, ("k += 32", "k += 0"))
    assert "is there an endless loop?" in judge(3, source).message


def test_the_interleaved_words_that_are_expected_come_back():
    """The loop over columns says the same as the statement: column 1024 s + 512 w + 16 l + 2 i + h."""
    q = np.random.default_rng().integers(0, 3, (2, 1500)).astype(np.uint8)
    words = checks._interleaved(q)
    for c in range(1500):
        s, w, lane, i, h = c // 1024, c // 512 % 2, c // 16 % 32, c // 2 % 8, c % 2
        assert ((words[:, s, lane, w] >> np.uint32(2 * (8 * h + i)) & 3) == q[:, c]).all()


# Right answers that are not the solution's


def pack_by_bytes(q, bits):
    padded = np.pad(q, ((0, 0), (0, -q.shape[1] % (32 // bits))))
    for width in (2, 4):
        if bits <= width < 8:
            padded = padded[:, ::2] | padded[:, 1::2] << width
    return np.ascontiguousarray(padded).view(np.uint32)


def unpack_by_loops(words, bits, cols):
    per_word = 32 // bits
    q = np.zeros((len(words), cols), np.uint8)
    for c in range(cols):
        q[:, c] = words[:, c // per_word] >> np.uint32(bits * (c % per_word)) & np.uint32(2**bits - 1)
    return q


BY_LOP3 = changed(
    MAGIC,
    (
        "unsigned bits = word >> 4 * j & 0x000f000f | 0x43004300;",
        'unsigned bits = word >> 4 * j; asm("lop3.b32 %0, %0, %1, %2, 0x6a;" : "+r"(bits) : "r"(0x000f000f), '
        '"r"(0x43004300));',
    ),
)
BY_TABLE = changed(SIGNED, (SIGN, "            if (code >= 2) code -= 4;\n"))
BY_SHIFT = changed(SIGNED, ("int code = word >> 2 * i & 3;", "int code = (int)(word << 30 - 2 * i) >> 30;"), (SIGN, ""))
TWO_PARTS = changed(
    FOLDED,
    ("float part = 0;", "float part = 0, other = 0;"),
    ("part += w.y * x1;", "other += w.y * x1;"),
    (SCALED, "sum += __half2float(s) * (part + other);"),
)
BY_SUBTRACTION = changed(
    DIGITS,
    ("digits[k] ^= 0x80808080", "digits[k] = __vsub4(digits[k], 0x80808080)"),
)


@pytest.mark.parametrize(
    "number, answer",
    [
        (1, (pack_by_bytes, unpack_by_loops)),
        (2, BY_LOP3),
        (3, BY_TABLE),
        (3, BY_SHIFT),
        (4, TWO_PARTS),
        (5, checks._interleaved),
        (6, BY_SUBTRACTION),
    ],
)
def test_other_right_answers_pass(number, answer, capsys):
    exercise = judge(number, answer)
    assert exercise.passed, exercise.message
