"""The exercises of chapter 17: stubs say so, solutions pass, planted wrong answers are rejected."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from exercise_contract import SourceContract
from exercise_tools import expect_each_part_counts
from llm_answers import OTHERS
from wrong.llm import RIGHT, WRONG

import models
import simt
from exercises.checks import llm as checks
from exercises.checks import llm_kernels, llm_positions
from lab import notebooks
from models.weights import Checkpoint
from ref.fusion import norm_glu, rmsnorm
from ref.llm import Layer, rope, rope_frequencies, rope_interleaved

SMALL = Path(models.__file__).parent / "small"
EXERCISES = Path(notebooks.ROOT) / "exercises" / "17_llm.ipynb"
COSTS = "read_bytes", "stored_bytes", "tokens_per_second"
LAW = "fit_law", "most_launches"


class TestExercises(SourceContract):
    name, checks, right, wrong = "17_llm", checks, RIGHT, WRONG
    answers = {
        1: COSTS,
        2: "to_halves",
        3: "decode_step",
        4: "sample",
        5: LAW,
        6: "scores_source",
        7: "qkv_rope_source",
    }
    runs_already = {
        2: ("not yet: with 1 head, 1 head of keys, head_dim = 6: row 1 of Wq is", "row 3 of the original"),
        3: (
            "not yet: with 0 tokens in the cache",
            "as if the query stood at position 1, not 0, and attention saw rows",
        ),
        6: ("not yet: at a prompt of 1, kv_len = 2", "reads kv_len[0], which the launch ahead may still write"),
    }


judge = TestExercises.judge


@pytest.mark.parametrize("part", [*COSTS, *LAW])
def test_each_part_counts(part, stubs, solutions, capsys):
    number, parts = (1, COSTS) if part in COSTS else (5, LAW)
    expect_each_part_counts(judge, number, part, parts, stubs, solutions)


# What the statements say


MISTRAL = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 32000, "head_dim": None, "sliding_window": None,
}  # fmt: skip


def test_the_numbers_of_mistral(solutions):
    read, _, limit = (solutions[name] for name in COSTS)
    assert read(MISTRAL, 4096) == 14_758_199_296 and int(limit(MISTRAL, 4096, 4000)) == 271


@pytest.mark.parametrize("bits, kv_bits", [(16, 16), (8, 16), (16, 8), (16, 4)])
def test_a_model_counts_as_the_exercise_does(bits, kv_bits, solutions):
    """But for 4 bits: there a row's scales are stored in fours."""
    model = models.load(SMALL, device="simt", bits=bits, kv_bits=kv_bits)
    config = json.loads((SMALL / "config.json").read_text())
    assert solutions["read_bytes"](config, 100, bits, kv_bits) == model.step_bytes(99)


def test_the_numbers_of_the_law(solutions):
    kernels, runs = {"products": (4_000_000_000, 100), "norms": (0, 200)}, [((), [1300.0]), (("norms",), [1100.0])]
    np.testing.assert_allclose(solutions["fit_law"](kernels, runs), (4000, 1))
    assert solutions["most_launches"](4000, 1, 4_000_000_000, 0.9) == 111


def _scores(layer, rope, n_heads, n_kv_heads, head_dim, x, far):
    """Of a query at position `far` and a key at 3, for each head: what attention goes by."""
    frequencies, q, k = rope_frequencies(head_dim), *(W @ x for W in (layer.Wq, layer.Wk))
    if layer.bq is not None:
        q, k = q + layer.bq, k + layer.bk
    q, k = q.reshape(n_heads, head_dim), k.reshape(n_kv_heads, head_dim)
    if layer.q_norm is not None:
        q, k = rmsnorm(q, layer.q_norm, 1e-6), rmsnorm(k, layer.k_norm, 1e-6)
    k = np.repeat(rope(k, 3, frequencies), n_heads // n_kv_heads, axis=0)
    return (rope(q, far, frequencies) * k).sum(axis=1)


@pytest.mark.parametrize("biases, norms", [(False, False), (True, True)])
def test_both_layouts_give_the_same_scores(biases, norms, solutions):
    rng, sizes = np.random.default_rng(), (6, 3, 10)
    layer, x = llm_positions._layer(rng, *sizes, 7, biases, norms, np.float64), rng.standard_normal(7)
    for far in (3, 50):
        wanted = _scores(layer, rope_interleaved, *sizes, x, far)
        np.testing.assert_allclose(_scores(solutions["to_halves"](layer, *sizes), rope, *sizes, x, far), wanted)


def test_the_author_of_to_halves_saw_nothing(stubs, solutions):
    rng = np.random.default_rng()
    layer = llm_positions._layer(rng, 3, 3, 4, 5, False, False, np.float32)
    found, wanted = (vars(names["to_halves"](layer, 3, 3, 4)) for names in (stubs, solutions))
    for field in dataclasses.fields(Layer):
        np.testing.assert_array_equal(found[field.name], wanted[field.name])


def _small_model():
    """(embedding, layers, norm, ids of a text that it was not trained on) of the course's small model."""
    from models.config import read_config
    from models.tokens import Tokens

    names = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {f"W{n}": f"self_attn.{n}_proj" for n in "qkvo"} | {
        f"W_{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")
    }
    with Checkpoint(SMALL, read_config(SMALL)) as checkpoint:

        def array(name):
            return checkpoint[f"model.{name}.weight"].double().numpy()

        layers = [Layer(**{n: array(f"layers.{i}.{name}") for n, name in names.items()}) for i in range(4)]
        return array("embed_tokens"), layers, array("norm"), Tokens(SMALL)


def _perplexity(decode_step, embedding, layers, norm, ids):
    """Of a text, token by token from an empty cache."""
    keys, values = np.zeros((2, len(layers), len(ids), 2, 64))
    lost, frequencies = 0.0, rope_frequencies(64)
    for position, (token, following) in enumerate(zip(ids, ids[1:])):
        x = embedding[token]
        for layer, K, V in zip(layers, keys, values):
            normed = rmsnorm(x, layer.attention_norm, 1e-5)
            q, k, v = ((W @ normed).reshape(-1, 64) for W in (layer.Wq, layer.Wk, layer.Wv))
            x = x + layer.Wo @ decode_step(q, k, v, K, V, position, frequencies).reshape(-1)
            x = x + layer.W_down @ norm_glu(x, layer.ffn_norm, layer.W_gate, layer.W_up, 1e-5)
        logits = embedding @ rmsnorm(x, norm, 1e-5)
        lost += np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[following]
    return np.exp(lost / (len(ids) - 1))


def test_three_that_are_one_off_hardly_show(stubs, solutions):
    """As the statement says: less than a fifth. Its own text is what the model reads."""
    embedding, layers, norm, tokens = _small_model()
    (statement,) = (c.source for c in notebooks.read(EXERCISES).cells if c.id == "ex3-statement")
    ids = tokens.encode(statement)[:150]
    right, wrong = (_perplexity(names["decode_step"], embedding, layers, norm, ids) for names in (solutions, stubs))
    assert right < wrong < 1.2 * right


def test_positions_that_are_all_one_further_change_nothing():
    """As hint 2 of exercise 3 says."""
    rng, frequencies = np.random.default_rng(), rope_frequencies(8)
    q, k = rng.standard_normal((2, 5, 3, 8))
    found, wanted = (
        np.einsum("shd,thd->hst", rope(q, np.arange(5) + by, frequencies), rope(k, np.arange(5) + by, frequencies))
        for by in (1, 0)
    )
    np.testing.assert_allclose(found, wanted)


def test_the_hazard_does_not_show_in_a_launch_of_its_own(stubs):
    """As the statement says of a debugger. The machine is not told of a launch ahead."""
    rng = np.random.default_rng()
    kernel = simt.compile(stubs["scores_source"], (llm_kernels.COURSE,))["scores"]
    for prompt, kv_len, capacity in llm_kernels.TEXTS:
        K, q, length, out = llm_kernels._text(rng, prompt, kv_len, capacity)
        kernel(-(-capacity // 8), 256, K, q, length, out, np.int32(prompt), np.int32(capacity))
        np.testing.assert_allclose(out[:kv_len], K[:kv_len] @ q)


def test_the_two_launches_of_the_statement_are_right(stubs):
    shown, counted = ("".join(re.sub("//.*", "", text).split()) for text in (stubs["qkv_rope_source"], llm_kernels.TWO))
    assert shown.startswith(counted)
    rng, module = np.random.default_rng(), simt.compile(llm_kernels.TWO)
    for n_heads, n_kv_heads, head_dim, hidden, kv_len, capacity in llm_kernels.STEPS:
        given, qkv, (q, K, V) = llm_kernels._arrays(rng, n_heads, n_kv_heads, head_dim, hidden, kv_len, capacity)
        rows, sizes = len(qkv), [np.int32(n) for n in (n_heads, n_kv_heads, head_dim)]
        module["project"](-(-rows // 8), 256, given["W"], given["x"], qkv, np.int32(rows), np.int32(hidden))
        others = (given[name] for name in ("cosine", "sine", "kv_len"))
        module["rope_append"](-(-rows // 512), 256, qkv, *others, q, K, V, *sizes)
        arrays = (given[name] for name in ("W", "x", "cosine", "sine"))
        wanted = llm_kernels.truth(*arrays, kv_len - 1, n_heads, n_kv_heads, head_dim)
        for found, right in zip((q, K[kv_len - 1], V[kv_len - 1]), wanted):
            np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", OTHERS)
def test_other_right_answers_pass(way, capsys):
    number, answer = OTHERS[way]
    exercise = judge(number, answer)
    assert exercise.passed, exercise.message
