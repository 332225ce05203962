"""The exercises of chapter 16: stubs say so, solutions pass, wrong answers are rejected."""

import numpy as np
import pytest
from exercise_contract import SourceContract
from exercise_tools import expect_each_part_counts
from wrong.latent_attention import MERGED, RIGHT, WRONG, changed

from exercises.checks import latent_attention as checks
from exercises.checks import latent_kernels
from exercises.checks.launches import compiled


class TestExercises(SourceContract):
    name, checks, right, wrong = "16_latent_attention", checks, RIGHT, WRONG
    answers = {1: "latent_decode", 2: ("latent_cost", "ridge_heads"), 3: "times_power", 4: "attend", 5: "merged_source"}
    runs_already = {5: ("not yet: ", "at parts = 2, rows = 1")}
    draws = 2


judge = TestExercises.judge


@pytest.mark.parametrize("part", TestExercises.answers[2])
def test_each_part_of_the_costs_counts(part, stubs, solutions, capsys):
    expect_each_part_counts(judge, 2, part, TestExercises.answers[2], stubs, solutions)


def test_the_bugs_author_saw_nothing(stubs):
    """One part of positive maxima is right, as the statement says."""
    kernel = compiled(stubs["merged_source"], "merged")
    for rows in (1, 5):
        latent_kernels._merged(kernel, np.random.default_rng(), 1, rows, 5, 1, "forward")


@pytest.mark.parametrize("mistake", ["bits as they are", "no barrier in front", "the second meeting waits for nobody"])
def test_each_of_the_three_defects_shows_alone(mistake, capsys):
    assert not judge(5, WRONG[5][mistake][0]).passed


# Right answers that are not the solution's


def by_tokens(q_nope, q_rope, cache, w_uk, w_uv, scale):
    latent = w_uk.shape[2]
    c, turned = cache[:, :latent], cache[:, latent:]
    s = ((q_nope[:, None] @ w_uk)[:, 0] @ c.T + q_rope @ turned.T) * scale
    if not len(cache):
        return np.zeros((len(q_nope), w_uv.shape[1]))
    p = np.exp(s - s.max(1, keepdims=True))
    return (w_uv @ ((p / p.sum(1, keepdims=True)) @ c)[..., None])[..., 0]


def cost_by_cards(batch, tokens, heads, cards):
    mine = max(len(range(card, heads, cards)) for card in range(cards))
    tiles = (mine + 63) // 64
    queries, results, cache = batch * mine * 576, batch * mine * 512, batch * tokens * 576
    return 2 * (queries + results + cache), float(
        tiles * 64 * batch * tokens * 2 * 576 + tiles * 64 * batch * tokens * 1024
    )


def ridge_by_trying(read, flops):
    heads = 1
    while 2 * (576 + 512) * heads / flops < 1152 / read:
        heads += 1
    return heads


def by_assignment(x, n):
    n = np.broadcast_to(np.where(np.isnan(n), -30, n).clip(-30, 30).round().astype(np.int64), x.shape)
    bits = np.array(x.view(np.int32), copy=True)
    e = (bits >> 23) & 0xFF
    out = (bits + n * 2**23).astype(np.int64)
    sign = np.where(bits < 0, np.int64(-(2**31)), 0)
    out[e + n > 254] = (sign + (255 << 23))[e + n > 254]
    out[(e + n < 1) | (e == 0)] = sign[(e + n < 1) | (e == 0)]
    out[e == 255] = bits[e == 255]
    return out.astype(np.int32).view(np.float32)


def as_one(s, v, rescale):
    """The sum of weights as one more column of values."""
    kept, r = np.zeros(v.shape[2] + 1, np.float32), -np.inf
    for t, values in zip(s, v):
        if (top := float(t.max())) > r + 8:
            if r > -np.inf:
                kept = rescale(kept, int(r) - int(np.ceil(top)))
            r = np.ceil(top)
        if top > -np.inf:
            p = np.exp2(t - r).astype(np.float32)
            kept = kept + p @ np.concatenate([values, np.ones((len(values), 1), np.float32)], axis=1)
    return kept[:-1] / (kept[-1] or 1)


BY_SIGN = changed(
    MERGED,
    ("return bits >> 31 ? ~bits : bits | 0x80000000;", "return bits ^ ((int)bits < 0 ? 0xffffffff : 0x80000000);"),
)
TWO_COUNTERS = changed(
    MERGED,
    ("atomicAdd(arrived, 1);", "atomicAdd(arrived, count > gridDim.x ? 1 : 1);"),
    ("    meet(arrived, 2 * parts);\n", "    meet(arrived, parts + gridDim.x);\n"),
)


@pytest.mark.parametrize(
    "number, answer",
    [
        (1, by_tokens),
        (2, (cost_by_cards, ridge_by_trying)),
        (3, by_assignment),
        (4, as_one),
        (5, BY_SIGN),
        (5, TWO_COUNTERS),
    ],
)
def test_other_right_answers_pass(number, answer, capsys):
    exercise = judge(number, answer)
    assert exercise.passed, exercise.message
