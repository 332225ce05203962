"""A token of Mamba-2 in one launch a layer: on the SIMT machine, and on a card where there is one."""

import dataclasses
import math

import pytest
import torch
from test_mamba2_kernels import off, on_both, wide

from kernels.mamba2 import layer, shapes
from kernels.mamba2.layer import LayerStep
from kernels.mamba2.step import Step
from lab import cuda

SHAPES = [
    shapes.Shape("small", 64, 3, 4, 16, 32, 96),
    shapes.Shape("odd", 72, 2, 6, 20, 24, 33, dt_limit=(0.0, 0.5)),  # rows that are no whole groups
    shapes.Shape("one", 64, 1, 2, 36, 136, 20, dtype=torch.bfloat16),  # no layer behind it; states of more than a word
]


def made(shape, device="cpu", kind=torch.float32, seed=0):
    """(a step, a state, a Step's own state behind the same token, its logits)."""
    torch.manual_seed(seed)
    weights, state = shapes.random_weights(shape, device), shapes.RandomState(shape, kind, device)
    step, mine = Step(shape, weights, shape.dtype, device), LayerStep(shape, weights, shape.dtype, device)
    for each in (step, mine):
        each.token.fill_(5), each.kv_len.fill_(1)
    there = state.copy()
    step.launch(there)
    return mine, state, there, step.logits


@on_both
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_it_is_the_steps_of_three_launches_a_layer(shape, narrow, device):
    """Logits and states, also behind a second token, whose blocks find the first one's barrier."""
    mine, state, there, logits = made(shape, device, shape.dtype if narrow else torch.float32)
    here = state.copy()
    mine.logits.fill_(math.nan)
    mine.launch(here)
    few = 1e-3 if shape.dtype is torch.float16 else 1e-2
    assert off(mine.logits, wide(logits)) < few and off(here.ssm, wide(there.ssm)) < (few if narrow else few / 100)
    assert off(here.conv, wide(there.conv)) < few and torch.equal(here.conv[:, :, :-1], state.conv[:, :, 1:])
    first = mine.logits.clone()
    mine.token.fill_(6), mine.launch(here), mine.token.fill_(5)
    again = state.copy()
    mine.launch(again)
    assert torch.equal(mine.logits, first)
    assert torch.equal(again.conv[:, :, :-1], state.conv[:, :, 1:])


@pytest.mark.parametrize("shape", SHAPES[:2], ids=lambda shape: shape.name)
@pytest.mark.parametrize("stages", [2, 5])
def test_no_two_threads_meet(shape, stages, monkeypatch):
    """Rings that go round in each matrix, with as many groups on their way as there are slots, and with fewer."""
    mine, state, there, logits = made(shape)
    launch, found, real = cuda.Kernel.__call__, [], layer.plan.__wrapped__

    def watched(kernel, *args, **how):
        found.append(kernel.name)
        return launch(kernel, *args, **how, check_races=True)

    monkeypatch.setattr(layer, "MOST_STAGES", stages)
    monkeypatch.setattr(layer, "plan", lambda *sizes: real(*sizes)._replace(flying=2))
    monkeypatch.setattr(cuda.Kernel, "__call__", watched)
    mine.launch(state)
    assert found.count("layer") == shape.n_layers
    assert off(mine.logits, wide(logits)) < 1e-3 and off(state.ssm, wide(there.ssm)) < 1e-5


def test_each_byte_of_the_weights_is_copied_once():
    mine, state, _, _ = made(SHAPES[0])
    reports, launch, c = [], cuda.Kernel.__call__, SHAPES[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda.Kernel, "__call__", lambda kernel, *a, **k: reports.append(launch(kernel, *a, **k)))
        mine.through(mine.weights.layers[0], state.ssm[0], mine.weights.layers[1], state.conv[1])
    assert reports[0].counters["simt__bulk_load_bytes.sum"] == 2 * c.hidden * (c.in_rows + c.d_inner)


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"ngroups": 2}, "ngroups must be 1"),
        ({"hidden": 60}, "hidden must be a multiple of 8, got 60"),
        ({"headdim": 15}, "d_inner must be a multiple of 8, got 60"),
        ({"dstate": 20}, "dstate must be a multiple of 8, got 20"),
        ({"ffn": 64}, "all layers must be of Mamba-2"),
        ({"attention_layers": (1,)}, "got a hybrid"),
        ({"hidden": 65536}, "must fit into a multiprocessor, got hidden 65536"),
    ],
)
def test_what_is_not_offered_is_named(changes, why):
    shape = dataclasses.replace(SHAPES[0], **changes)
    assert why in layer.refusal(shape, device="cpu")
    assert layer.refusal(SHAPES[0], bits=8, device="cpu").startswith("weights must have 16 bits")


def test_other_states_and_weights_are_refused():
    mine, state, _, _ = made(SHAPES[0])
    for name, value, error, text in [
        ("ssm", state.ssm.double(), TypeError, "ssm must be of torch.float32 or torch.float16, got torch.float64"),
        ("ssm", state.ssm[:, :, :2], ValueError, r"ssm must have shape \(1, 4, 16, 32\)"),
        ("conv", state.conv[..., :8], ValueError, r"conv must"),
    ]:
        other = state.copy()
        setattr(other, name, value)
        with pytest.raises(error, match=f"(LayerStep|norm_in_proj): {text}|conv_state must"):
            mine.launch(other)
    mine.weights.layers[1].A = mine.weights.layers[1].A[:3]
    with pytest.raises(ValueError, match=r"LayerStep: A must have shape \(4,\)"):
        LayerStep(SHAPES[0], mine.weights, torch.float16, "cpu")
    with pytest.raises(ValueError, match="LayerStep: ngroups must be 1"):
        LayerStep(dataclasses.replace(SHAPES[0], ngroups=2), mine.weights, torch.float16, "cpu")


def test_the_plan_of_the_2_7b_model():
    c = shapes.MAMBA2_2_7B
    found = layer.plan(c.hidden, c.d_inner, c.nheads, c.dstate, 4, 132, 227 * 1024)
    slot = 4 * 2 * c.hidden
    assert found.threads == 320 and found.state_rows == 1 and found.flying * slot <= layer.FLYING
    assert found.stages * slot < found.shared <= 227 * 1024 - layer.FIXED
