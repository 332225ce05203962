"""The exercises of chapter 18: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
from exercise_contract import SourceContract
from exercise_tools import expect_each_part_counts
from mamba2_answers import OTHERS
from wrong.mamba2 import RIGHT, WRONG

from exercises.checks import mamba2 as checks
from exercises.checks import mamba2_states
from ref.mamba2 import conv1d

COSTS, ROUNDINGS = ("token_bytes", "crossing"), ("to_half", "to_codes")


class TestExercises(SourceContract):
    name, checks, right, wrong = "18_mamba2", checks, RIGHT, WRONG
    answers = {
        1: COSTS,
        2: "conv_tokens",
        3: "prefill",
        4: ROUNDINGS,
        5: "state_step_source",
        6: "gated_norm_source",
    }
    runs_already = {
        2: ("not yet: with width = 4, calls of 6, 1, 1 tokens, the call at position 7", "row 0 of the ring"),
        3: ("not yet: with width = 4, piece = 4, prompts of 7 tokens, prompt 1: the conv state", "that are not there"),
    }


judge = TestExercises.judge


@pytest.mark.parametrize("part", [*COSTS, *ROUNDINGS])
def test_each_part_counts(part, stubs, solutions, capsys):
    number, parts = (1, COSTS) if part in COSTS else (4, ROUNDINGS)
    expect_each_part_counts(judge, number, part, parts, stubs, solutions)


# What the statements say


EXAMPLE = {
    "hidden": 64, "nheads": 2, "headdim": 8, "dstate": 16, "ngroups": 1, "width": 4, "n_heads": 4, "n_kv_heads": 2,
    "head_dim": 32, "ffn": 0, "vocab": 100,
}  # fmt: skip


def test_the_numbers_of_the_example(solutions):
    layers = ["mamba", "attention"]
    assert solutions["token_bytes"](EXAMPLE, layers, 5) == (76_568, 1_568)
    assert solutions["crossing"](EXAMPLE, layers) == 11


def test_a_ring_is_the_references_convolution(solutions):
    rng = np.random.default_rng()
    text, weight, bias = rng.standard_normal((9, 5)), rng.standard_normal((5, 4)), rng.standard_normal(5)
    wanted, _ = conv1d(text[None], weight, bias)
    ring, found = np.zeros((3, 5)), []
    for first, end in ((0, 5), (5, 6), (6, 9)):
        found.append(solutions["conv_tokens"](text[first:end], weight, bias, ring, first))
    np.testing.assert_allclose(np.concatenate(found), wanted[0])


def test_the_author_of_the_ring_saw_nothing(stubs, solutions):
    rng = np.random.default_rng()
    text, weight, bias = rng.standard_normal((7, 2)), rng.standard_normal((2, 4)), rng.standard_normal(2)
    rings, found = np.zeros((2, 3, 2)), []
    for names, ring in zip((stubs, solutions), rings):
        found.append([names["conv_tokens"](text[f:e], weight, bias, ring, f) for f, e in ((0, 6), (6, 7))])
    for a, b in zip(*found):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("tokens, piece, right", [(16, 4, True), (7, 4, False)])
def test_the_author_of_prefill_saw_nothing(tokens, piece, right, stubs):
    """Four pieces are right; of 7 tokens in pieces of 4 only y is."""
    rng = np.random.default_rng()
    weights = mamba2_states.Weights(rng, 4)
    xBC, dt = rng.standard_normal((tokens, mamba2_states.CHANNELS)), rng.standard_normal((tokens, 2))
    states = np.zeros((3, mamba2_states.CHANNELS)), np.zeros((2, 3, 4))

    def block(*given):
        y, _, state = weights.run(*given)
        return y, state

    found, wanted = stubs["prefill"](block, xBC, dt, *states, piece), weights.run(xBC, dt, *states)
    np.testing.assert_allclose(found[0], wanted[0])
    assert [np.allclose(*pair) for pair in zip(found[1:], wanted[1:])] == [right, right]


def _stays(keep, steps=3000):
    """How far states are below the truth after the example's steps, rounded by keep."""
    wanted, h = np.zeros((4, 8)), np.zeros((4, 8), np.float32)
    wanted[:, 0], h[:, 0] = 200, 200
    add = np.full((4, 8), 0.01, np.float32)
    add[:, 0] = 0.2
    for _ in range(steps):
        wanted, h = 0.999 * wanted + add, keep(np.float32(0.999) * h + add)
    return 1 - h[:, 1:].mean() / wanted[:, 1:].mean()


def test_to_the_nearest_a_state_stands_still():
    assert 0.15 < _stays(lambda h: h.astype(np.float16).astype(np.float32)) < 0.4

    def nearest(h):
        scale = np.abs(h).max(axis=1, keepdims=True) / 127
        return np.rint(h / scale) * scale

    assert _stays(nearest) == 1


@pytest.mark.parametrize("way", OTHERS)
def test_other_right_answers_pass(way, capsys):
    number, answer = OTHERS[way]
    exercise = judge(number, answer)
    assert exercise.passed, exercise.message
