"""A whole token of Mamba-2 in one launch: on the SIMT machine, and on a card where there is one."""

import dataclasses
import functools
import math

import pytest
import torch
from test_mamba2_kernels import DEVICES, off, on_both, wide

from kernels.mamba2 import one_launch, shapes, trials
from kernels.mamba2.one_launch import OneLaunch
from kernels.mamba2.step import Step

SHAPES = [
    shapes.Shape("small", 64, 3, 4, 16, 32, 96),
    shapes.Shape("odd", 72, 2, 4, 18, 12, 33, dt_limit=(0.0, 0.5)),  # words past a row's end, a group of two rows
    shapes.Shape("long", 4104, 1, 2, 8, 8, 11),  # two words of x a thread, fewer slots than warps that finish
    shapes.Shape("wide", 64, 1, 2, 36, 132, 20),  # states of more than a warp's words
]


def made(shape, device="cpu", seed=0, kind=OneLaunch):
    """(a step, a state, a Step's own state behind the same token, its logits)."""
    torch.manual_seed(seed)
    weights, state = shapes.random_weights(shape, device), shapes.RandomState(shape, device=device)
    step, one = Step(shape, weights, shape.dtype, device), kind(shape, weights, shape.dtype, device)
    for each in (step, one):
        each.token.fill_(5), each.kv_len.fill_(1)
    there = state.copy()
    step.launch(there)
    return one, state, there, step.logits


@functools.cache
def behind(shape, device="cpu"):
    """(the logits of one launch, the state behind it), for all tests that ask for the same bits."""
    one, state, _, _ = made(shape, device)
    one.launch(state)
    assert one.turn.tolist() == [0, 1, 0]
    return one.logits, state


@on_both
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_it_is_the_steps_of_three_launches_a_layer(shape, device):
    """Logits and states, and so in the launch behind it, which finds the first one's numbers."""
    one, state, there, logits = made(shape, device)
    mine = state.copy()
    one.logits.fill_(math.nan)
    one.launch(mine)
    assert off(one.logits, wide(logits)) < 1e-3 and off(mine.ssm, wide(there.ssm)) < 5e-4
    assert off(mine.conv, wide(there.conv)) < 6e-4 and torch.equal(mine.conv[:, :, :-1], state.conv[:, :, 1:])
    if shape.name == "long" and device == "cpu":  # which takes as long as all others; they look at launches behind it
        return
    again = state.copy()
    one.token.fill_(6), one.launch(state.copy()), one.token.fill_(5)
    first = one.logits.clone()
    one.launch(again)
    assert torch.equal(again.ssm, mine.ssm) and torch.equal(again.conv, mine.conv)
    assert not torch.equal(first, one.logits) and one.turn.tolist() == [0, 3, 0]


@on_both
def test_a_token_outside_of_the_vocabulary_is_nan(device):
    one, state, _, _ = made(SHAPES[0], device)
    one.token.fill_(96)
    one.launch(state.copy())
    assert one.logits.isnan().all()


@pytest.mark.parametrize("shape", SHAPES[:2], ids=lambda shape: shape.name)
def test_nothing_races(shape):
    """In a launch behind another one, which must not take its numbers."""
    one, state, there, logits = made(shape)
    one.launch(state.copy())
    mine = state.copy()
    one.logits.fill_(math.nan)
    one.launch(mine, check_races=True)
    assert off(one.logits, wide(logits)) < 1e-3 and off(mine.ssm, wide(there.ssm)) < 5e-4


def test_any_number_of_blocks_ends():
    """One at a time, too: a task waits only for those in front of it. The bits do not hang on who does what."""
    one, state, _, _ = made(SHAPES[0])
    wanted, _ = behind(SHAPES[0])
    for grid, places, order in ((1, None, "forward"), (5, 1, "reverse"), (5, 2, 3)):
        one.grid = grid
        one.logits.fill_(math.nan)
        one.launch(state.copy(), order=order, places=places)
        assert torch.equal(one.logits, wanted)


TRIALS = {
    "2 a ticket": (2, 8, "false", "true"),  # the line's end is the second of a ticket
    "4 a ticket": (4, 9, "true", "false", 4, 3),
}


@on_both
@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)
def test_a_trial_changes_no_bit(trial, device):
    logits, state = behind(SHAPES[1], device)
    other, mine, _, _ = made(SHAPES[1], device, kind=trials.variant(trial))
    how = {"check_races": True, "order": "reverse"} if device == "cpu" else {}
    other.launch(mine, **how)
    assert torch.equal(logits, other.logits) and other.turn.tolist() == [0, 1, 0]
    assert torch.equal(state.ssm, mine.ssm) and torch.equal(state.conv, mine.conv)


@on_both
def test_tasks_dealt_out_change_no_bit(device):
    logits, state = behind(SHAPES[0], device)
    other, mine, _, _ = made(SHAPES[0], device)
    trials.rewritten(other, trials.DEALT).launch(mine)
    assert torch.equal(logits, other.logits) and torch.equal(state.ssm, mine.ssm)


@pytest.mark.parametrize("changes", [trials.UNREAD, trials.UNFINISHED, trials.UNMULTIPLIED])
def test_what_leaves_something_out_ends(changes):
    one, state, _, logits = made(SHAPES[0], kind=trials.variant(trials.ALL))
    trials.rewritten(one, changes).launch(state.copy())
    assert one.turn.tolist() == [0, 1, 0] and not off(one.logits, wide(logits)) < 0.1


def test_layers_past_those_in_registers():
    """Where two of the three are, in registers, and where the last is, in memory."""
    logits, state = behind(SHAPES[0])
    other, mine, _, _ = made(SHAPES[0])
    trials.rewritten(other, {"constexpr int HELD = 32;": "constexpr int HELD = 1;"})
    other.launch(mine)
    assert torch.equal(logits, other.logits) and torch.equal(state.ssm, mine.ssm)


def test_a_number_that_is_taken_too_early_is_noticed():
    """Without looking at dates the result is another one."""
    one, state, _, logits = made(SHAPES[0])
    trials.rewritten(one, trials.UNWAITED).launch(state.copy())
    assert not off(one.logits, wide(logits)) < 0.1


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"ngroups": 2}, "ngroups must be 1"),
        ({"hidden": 60}, "hidden must be a multiple of 8, got 60"),
        ({"headdim": 15}, "d_inner must be a multiple of 8, got 60"),
        ({"nheads": 8, "headdim": 15}, "headdim must be a multiple of 2, got 15"),
        ({"dstate": 18}, "dstate must be a multiple of 4, got 18"),
        ({"dstate": 260}, "dstate must be at most 256, got 260"),
        ({"ffn": 64}, "all layers must be of Mamba-2"),
        ({"hidden": 65536}, "must fit into shared memory"),
    ],
)
def test_what_is_not_offered_is_named(changes, why):
    shape = dataclasses.replace(SHAPES[0], **changes)
    assert why in one_launch.refusal(shape, device="cpu")
    assert one_launch.refusal(SHAPES[0], bits=8, device="cpu").startswith("weights must have 16 bits")


def test_another_state_is_refused():
    one, state, _, _ = made(SHAPES[0])
    for name, value, error, text in [
        ("ssm", state.ssm.half(), TypeError, "ssm must be of torch.float32, got torch.float16"),
        ("ssm", state.ssm[:2], ValueError, r"ssm must have shape \(3, 1, 4, 16, 32\)"),
        ("conv", state.conv[:, :, 1:], ValueError, r"conv must have shape \(3, 1, 3, 128\)"),
    ]:
        other = state.copy()
        setattr(other, name, value)
        with pytest.raises(error, match="OneLaunch: " + text):
            one.launch(other)
    assert DEVICES
