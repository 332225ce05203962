"""Mamba-2 and its hybrid by the card's kernels: on the SIMT machine, and on a card where there is one."""

import pytest
import torch
from test_models_gpu import TOKENS, off
from tiny_models import MAMBA_KINDS, write

import models
from models.config import BadModel

DEVICES = ["simt"] + ["cuda"] * torch.cuda.is_available()
SOME = "mamba2", "mamba2_groups", "state_spaces_groups", "bamba", "bamba_groups"  # have all that differs
on_both = pytest.mark.parametrize("device", DEVICES)


def stepped(engine, tokens, behind):
    """Logits behind a prompt of so many tokens, and behind each of the others, by steps."""
    engine.reset()
    last = [engine.prefill(torch.tensor(tokens[:behind]))[0].cpu()]
    return torch.stack(last + [engine.step(token) for token in tokens[behind:]])


@on_both
@pytest.mark.parametrize("kind", MAMBA_KINDS)
def test_a_step_is_what_the_processor_computes(kind, device, tmp_path):
    """And those behind a prompt, and the greedy text."""
    if device == "simt" and kind not in SOME:
        pytest.skip("five kinds have all that differs; a card runs them all")
    folder = write(tmp_path, kind, torch.float16, seed=3)
    there, here = models.load(folder, device="cpu"), models.load(folder, device=device)
    wanted = there.logits(TOKENS)
    assert off(here.logits(TOKENS), wanted) < 5e-3
    assert off(stepped(here.engine, TOKENS, 3), wanted[2:]) < 5e-3
    count = 4 if device == "simt" else 64
    assert list(here.generate(TOKENS, count)) == list(there.generate(TOKENS, count))
    assert list(here.generate(TOKENS, count)) == list(there.generate(TOKENS, count))  # no trace of the first text


@on_both
@pytest.mark.parametrize("kind", ["mamba2", "state_spaces"])
def test_one_launch_is_what_the_processor_computes(kind, device, tmp_path):
    folder = write(tmp_path, kind, torch.float16, seed=3)
    there, here = models.load(folder, device="cpu"), models.load(folder, device=device, engine="one_launch")
    assert off(stepped(here.engine, TOKENS[:4], 3), there.logits(TOKENS[:4])[2:]) < 5e-3
    count = 2 if device == "simt" else 64
    assert list(here.generate(TOKENS, count)) == list(there.generate(TOKENS, count))


@on_both
@pytest.mark.parametrize("kind", ["mamba2", "bamba"])
def test_a_prompt_in_pieces_equals_the_prompt_at_once(kind, device, tmp_path):
    """Of one token, too, and behind a step; and the states that are handed on."""
    engine = models.load(write(tmp_path, kind, torch.float16, seed=3), device=device).engine
    tokens = torch.tensor((TOKENS * 20)[:100])
    engine.reset()
    whole, states = engine.prefill(tokens, every=True).cpu(), engine.state.copy()
    engine.reset()
    parts = [engine.prefill(tokens[:1], every=True), engine.prefill(tokens[1:70], every=True)]
    parts += [engine.step(int(tokens[70]))[None], engine.prefill(tokens[71:], every=True)]
    assert off(torch.cat([part.cpu() for part in parts]), whole) < 3e-3
    assert off(engine.state.ssm, states.ssm) < 2e-3 and off(engine.state.conv, states.conv) < 2e-3
    assert engine.state.length == len(tokens)


@on_both
@pytest.mark.parametrize("kind", ["state_spaces", "bamba"])
@pytest.mark.parametrize("bits, bound", [(8, 0.05), (4, 0.6)])
def test_weights_of_few_bits(bits, bound, kind, device, tmp_path):
    """Off by their rounding, which random weights suffer from most. A step reads them as they are, a prompt widened."""
    folder = write(tmp_path, kind, torch.float16, seed=3)
    wanted = models.load(folder, device="cpu").logits(TOKENS)
    model = models.load(folder, device=device, bits=bits)
    found = model.logits(TOKENS)
    assert 1e-3 < off(found, wanted) < bound
    assert off(stepped(model.engine, TOKENS, 1), found) < 5e-3


@on_both
def test_a_state_takes_as_much_room_behind_any_text(device, tmp_path):
    model = models.load(write(tmp_path, "mamba2", torch.float16, seed=3), device=device)
    first = model.logits(TOKENS)
    room = model.engine.state.nbytes
    model.logits((TOKENS * 100)[:300])
    assert model.engine.state.nbytes == room and model.step_bytes(0) == model.step_bytes(10**6)
    assert torch.equal(model.logits(TOKENS), first)


def test_what_is_not_offered_is_named(tmp_path):
    folder = write(tmp_path / "a", "mamba2_groups", torch.float16, seed=3)
    with pytest.raises(BadModel, match="kv_bits must be 16 for a model with states, got 8"):
        models.load(folder, device="simt", kv_bits=8)
    with pytest.raises(BadModel, match="engine='one_launch' does not run this model.*ngroups must be 1"):
        models.load(folder, device="simt", engine="one_launch")
    hybrid = write(tmp_path / "b", "bamba", torch.float16, seed=3)
    with pytest.raises(BadModel, match="got a hybrid"):
        models.load(hybrid, device="simt", engine="one_launch")
    engine, other = (models.load(folder, device="simt").engine for _ in range(2))
    other.state.ssm = other.state.ssm.double()
    with pytest.raises(TypeError, match="ssm must be torch.float32, got torch.float64"):
        engine.state.take(other.state)
