"""The exercises of chapter 08: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
from exercise_contract import ExerciseContract
from wrong.five_kernels import from_source
from wrong.flash_decoding import LOAD, MERGE, ONLINE, RIGHT, STALE, WRONG, changed

from exercises.checks import flash_decoding as checks
from exercises.checks import launches


class TestExercises(ExerciseContract):
    name, checks, right, wrong = "08_flash_decoding", checks, RIGHT, WRONG
    answers = {1: "stream_mean", 2: "merge", 3: "share", 4: "best_splits", 5: "stale_source", 6: "online_source"}
    answers[7] = "merge_splits"
    runs_already = {5: ("not yet: ", "out[0] is 2.25, expected 3")}
    draws = 2


judge = TestExercises.judge


def test_the_verdict_on_the_bug_ends_with_what_came(stubs):
    assert judge(5, stubs["stale_source"]).message.endswith("out[0] is 2.25, expected 3")


def test_the_bugs_author_saw_nothing(stubs):
    """With a query of zeros, as the statement says, the kernel with the two defects is right to five digits."""
    kernel = checks.compiled(stubs["stale_source"], "stale")
    for kv_len in (8, 1000):
        inputs = checks._inputs(np.random.default_rng(), 1, kv_len, "all equal")
        checks._stale(kernel, *inputs, "", 1e-5)


def test_each_of_the_two_defects_shows_alone():
    for mistake in ("only the sums are merged right", "half of the channels are not corrected"):
        assert not judge(5, WRONG[5][mistake][0]).passed


def test_an_endless_loop_ends(monkeypatch, capsys):
    monkeypatch.setattr(launches, "STEPS", 3000)  # the limit as it is has a test in chapter 03
    assert "is there an endless loop?" in judge(6, changed(ONLINE, ("t++", "t += 0"))).message


def test_a_kernel_without_its_launch_and_a_launch_without_its_kernel_are_not_done_yet(capsys):
    unlaunched = from_source(
        MERGE, ("        kernel[(heads,)](", '        raise NotImplementedError("not done yet")\n        (')
    )
    begun = from_source(MERGE, ("    h, s, c =", '    raise NotImplementedError("not done yet")\n    h, s, c ='))
    assert judge(7, unlaunched).message == judge(7, begun).message == "not done yet"


def test_a_triton_kernel_that_stops_is_told_in_a_sentence(capsys):
    tiles = from_source(MERGE, ("triton.next_power_of_2(splits),", "splits,"))  # 3 is no power of 2
    message = judge(7, tiles).message
    assert message.startswith("not yet: the kernel stopped: ") and "power of 2" in message and "\n" not in message


@pytest.mark.parametrize("launch, says", [
    ("kernel", "launched with a grid, as in kernel[grid](...)"),
    ("kernel[heads]", "a grid is a tuple, such as (3,), got 1"),
    ("merge_kernel[(heads,)]", "launch the kernel that `interpreter` gives"),
    ("partial, lse, out = partial, lse, out.clone(); kernel[(heads,)]", "outside all arrays"),
    ("heads = None; kernel[(1,)](heads); kernel[(1,)]", "the signature of merge_kernel: missing a required argument"),
])  # fmt: skip
def test_what_is_no_launch_is_told_in_a_sentence(launch, says, capsys):
    message = judge(7, from_source(MERGE, ("kernel[(heads,)]", launch))).message
    assert message.startswith("not yet: ") and says in message and "raised" not in message


# Right answers that are not the solution's


def shifted_by_the_first(pairs):
    """Sums in logarithms: the largest score is never kept."""
    lse, mean = -np.inf, 0.0
    for s, value in pairs:
        if s > -np.inf:
            new = np.logaddexp(lse, s)
            mean = mean + np.exp(s - new) * (value - mean)
            lse = new
    return mean


def in_lists(pairs):
    """Without NumPy, and without a correction where the maximum stays."""
    highest, total, mixed = -np.inf, 0.0, None
    for s, value in pairs:
        mixed = mixed or [0.0] * len(value)
        if s > highest:
            correction, highest = np.exp(highest - s), s
            total, mixed = total * correction, [m * correction for m in mixed]
        p = np.exp(s - highest) if s > -np.inf else 0.0
        total, mixed = total + p, [m + p * v for m, v in zip(mixed, value)]
    return [m / total for m in mixed]


def by_logarithms(out_a, lse_a, out_b, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    if lse == -np.inf:
        return np.zeros_like(out_a), -np.inf
    return np.exp(lse_a - lse) * out_a + np.exp(lse_b - lse) * out_b, lse


def long_ones_first(kv_len, splits, i):
    each, rest = divmod(-(-kv_len // 16), splits)
    first = each * i + min(i, rest)
    return min(kv_len, 16 * first), min(kv_len, 16 * (first + each + (i < rest)))


def by_numpy(kv_len, heads, room, step, merge):
    splits = np.arange(1, kv_len + 1)
    return int(np.argmin(-(-heads * splits // room) * -(-kv_len // splits) * step + splits * merge)) + 1


ALWAYS_CORRECTED = changed(STALE, ("if (s > m + 8) {", "if (s > m) {"))
TWO_TOKENS = changed(  # float2 words: half of the requests, 8 sectors each
    ONLINE,
    (
        "float q0 = q[head * 64 + lane], q1 = q[head * 64 + lane + 32];",
        "float2 u = ((const float2 *)q)[head * 32 + lane];",
    ),
    (
        "        float s = q0 * key[lane] + q1 * key[lane + 32];",
        "        float2 a = ((const float2 *)key)[lane], b = ((const float2 *)value)[lane];\n"
        "        float s = u.x * a.x + u.y * a.y;",
    ),
    ("value[lane];", "b.x;"),
    ("value[lane + 32];", "b.y;"),
    ("out[head * 64 + lane] =", "out[head * 64 + 2 * lane] ="),
    ("out[head * 64 + lane + 32] =", "out[head * 64 + 2 * lane + 1] ="),
)


ONE_BY_ONE = from_source(  # the online softmax, over splits
    MERGE,
    (MERGE[MERGE.index("    h, s, c") : MERGE.index("    tl.store")], """
    h, c = tl.program_id(0), tl.arange(0, CHANNELS)
    channels, m = c < head_dim, -1e30
    total, mixed = 0.0, tl.zeros((CHANNELS,), tl.float32)
    for s in range(splits):
        weight = tl.load(lse + s * heads + h)
        m_new = tl.maximum(m, weight)
        part = tl.load(partial + (s * heads + h) * head_dim + c, channels, other=0)
        total = tl.exp2(m - m_new) * total + tl.exp2(weight - m_new)
        mixed = tl.exp2(m - m_new) * mixed + tl.exp2(weight - m_new) * part
        m = m_new
    total = tl.where(total == 0, 1, total)
"""),
    ("tl.sum(weight[:, None] * part, 0) / total", "mixed / total"),
)  # fmt: skip
NAMED_SIZES = from_source(  # and a grid that is made of them
    MERGE,
    ("kernel[(heads,)]", 'kernel[lambda sizes: (sizes["heads"],)]'),
    ("head_dim, SPLITS, CHANNELS)", "head_dim, CHANNELS=CHANNELS, SPLITS=2 * SPLITS)"),
)
ONLY_WHAT_WEIGHS = from_source(MERGE, (LOAD, LOAD.replace("there[:, None]", "(weight > 0)[:, None]")))


@pytest.mark.parametrize(
    "number, answer",
    [
        (1, shifted_by_the_first),
        (1, in_lists),
        (2, by_logarithms),
        (3, long_ones_first),
        (4, by_numpy),
        (5, ALWAYS_CORRECTED),
        (6, TWO_TOKENS),
        (7, ONE_BY_ONE),
        (7, NAMED_SIZES),
        (7, ONLY_WHAT_WEIGHS),
    ],
)
def test_other_right_answers_pass(number, answer, capsys):
    exercise = judge(number, answer)
    assert exercise.passed, exercise.message
