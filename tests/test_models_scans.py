"""What the layers of a Mamba-2 hand to their scans, beside the reference's own steps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_models_llm import off
from tiny_models import write

import ref.mamba2
from models import scans
from models.config import BadModel
from models.corpus import texts
from models.mamba2_reference import reference
from models.tokens import Tokens

SMALL = str(Path(scans.__file__).with_name("small_mamba2"))


@pytest.mark.parametrize("kind", ["mamba2_groups", "state_spaces"])
def test_they_are_those_of_the_reference(kind, tmp_path, monkeypatch):
    folder = write(tmp_path / kind, kind, torch.float16)
    model, asked, step = reference(folder), [], ref.mamba2.state_step

    def noted(state, x, dt, A, B, C, **options):
        asked.append((x, dt, A, B, C, options))
        return step(state, x, dt, A, B, C, **options)

    monkeypatch.setattr(ref.mamba2, "state_step", noted)
    tokens, state = torch.arange(530) * 7 % 101, ref.mamba2.State.empty(model.config)  # in two pieces: 512 and 18
    for token in tokens.tolist():
        ref.mamba2.step(model, token, state)
    found = scans.of(folder, tokens)
    layers = len(found)
    assert layers == model.config.n_layers and len(asked) == len(tokens) * layers
    for index, layer in enumerate(found):
        for place, name in enumerate(scans.NAMES):
            wanted = [call[place] for call in asked[index::layers]]
            wanted = wanted[0] if name == "A" else np.stack(wanted, axis=1)
            assert layer[name].dtype == torch.float32 and off(layer[name], torch.from_numpy(wanted)) < 1e-5
        options = asked[index][-1]
        assert all(off(layer[name], torch.from_numpy(options[name])) < 1e-6 for name in ("D", "dt_bias"))
        assert layer["dt_softplus"] is True and layer["dt_limit"] == options["dt_limit"]


def test_the_held_out_text_begins_again_at_its_end():
    text = scans.held_out(SMALL, 60_000)
    whole = [token for paragraph in texts()[1] for token in Tokens(SMALL).encode(paragraph)]
    n = len(whole)
    assert text.shape == (60_000,) and n < 60_000 and text[:n].tolist() == whole
    assert text[n:].tolist() == (whole * (60_000 // n))[: 60_000 - n]


def test_the_command_writes_them(tmp_path):
    scans.main([SMALL, "9", str(tmp_path / "scans.pt")])
    found, wanted = torch.load(tmp_path / "scans.pt"), scans.of(SMALL, scans.held_out(SMALL, 9))
    assert len(found) == 6 and all(torch.equal(f["x"], w["x"]) for f, w in zip(found, wanted))


def test_what_is_refused(tmp_path):
    tokens = torch.arange(4)
    for kind in ("llama2", "bamba"):
        with pytest.raises(BadModel, match=f"expected a Mamba-2 without attention, got {kind[:5]}"):
            scans.of(write(tmp_path / kind, kind, torch.float16), tokens)
    for wrong in (tokens[None], tokens[:0]):
        with pytest.raises(ValueError, match=r"tokens must be \(n,\), n >= 1, got shape"):
            scans.of(SMALL, wrong)
    for wrong in (0, 2.5):
        with pytest.raises((ValueError, TypeError), match="held_out: count must be"):
            scans.held_out(SMALL, wrong)
