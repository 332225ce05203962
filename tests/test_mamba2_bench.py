"""The bench of Mamba-2, on the SIMT machine: its rungs are right, wrong ones are found, and its tables add up."""

import dataclasses

import pytest
import torch

from kernels import benching, mamba2
from kernels.mamba2 import bench, prompt, prompt_bench, shapes, studies
from lab import results
from models import mamba2_torch

TINY = shapes.Shape("tiny", 64, 2, 4, 16, 32, 100)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(benching, "DEVICE", "cpu")


def test_every_rung_is_right_and_a_wrong_one_is_found():
    weights, state = shapes.random_weights(TINY, "cpu"), shapes.RandomState(TINY, device="cpu")
    wanted, names = shapes.wanted_logits(TINY, weights, state, bench.TOKEN), []
    for name, (step, sources) in bench.rungs(TINY, weights):
        assert bench.checked(name, step, state, wanted) < 5e-3, name
        assert all((results.ROOT / source).is_file() for source in sources)
        names.append(name)
    assert len(names) == 7 and names[-1] == "one launch"
    step.token.fill_(3)
    with pytest.raises(ValueError, match="is not right, so it is not timed"):
        bench.checked(name, step, state, wanted)
    assert all((results.ROOT / source).is_file() for source in prompt_bench.SOURCES)


def test_a_tokens_bytes_are_those_of_weights_and_of_states_twice():
    weights, state = shapes.random_weights(TINY, "cpu"), shapes.RandomState(TINY, device="cpu")
    c = TINY
    layer = 2 * (c.in_rows * c.hidden + c.hidden * c.d_inner + c.hidden + c.d_inner) + 4 * (
        5 * c.channels + 3 * c.nheads
    )
    assert weights.bytes == 2 * layer + 2 * (c.vocab * c.hidden + 2 * c.hidden)
    assert state.bytes == 2 * 2 * (2 * 3 * c.channels + 4 * c.d_inner * c.dstate)
    assert bench.flops_of(dataclasses.replace(c, n_layers=0)) == 2 * c.vocab * c.hidden


def test_a_prompt_is_its_tokens_one_after_another():
    """By the kernels of a prompt on the SIMT machine, but for the scan, which chapter 15 holds to the reference."""
    torch.manual_seed(2)
    weights, state = shapes.random_weights(TINY, "cpu"), shapes.RandomState(TINY, device="cpu")
    tokens = [5, 17, 3]
    residual = weights.embedding[tokens].float()
    mine, there = state.copy(), state.copy()
    normed = prompt.layers(TINY, weights, residual, mine)
    for at, token in enumerate(tokens):
        wanted = shapes.wanted_logits(TINY, weights, there, token)
        off = float((weights.head.double() @ normed[at].double() - wanted).norm() / wanted.norm())
        assert off < 5e-3
        step = bench.Step(TINY, weights, TINY.dtype, "cpu")
        step.token.fill_(token)
        step.launch(there)
    assert float((mine.ssm - there.ssm).norm() / there.ssm.norm()) < 5e-3
    assert float((mine.conv - there.conv).float().norm() / there.conv.float().norm()) < 5e-3
    assert mamba2_torch.CHUNK


def test_few_bits_cost_digits():
    table = studies.precision(tokens=(4, 8), piece=4, device="cpu")
    errors = {name: row["after 8 tokens"] for name, row in table.rows.items()}
    assert errors["32 bits"] < 1e-6 < errors["16 bits"] < 1e-3 < errors["8 bits"] < 2e-2
    assert isinstance(mamba2.QuantizedState.of(torch.zeros(1, 2)), mamba2.QuantizedState)
