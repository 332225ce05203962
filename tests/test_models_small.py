"""The small models' networks and their training, and what is stored of them."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from test_models_llm import off

import models
from models import small_networks, train_small
from models.config import read_config
from models.tokens import Tokens

TINY = {
    "llama": {"hidden_size": 32, "vocab_size": 61, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 8},
    "mamba2": {"hidden_size": 32, "vocab_size": 61, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16,
               "state_size": 8},
}  # fmt: skip


def network_of(kind, folder, seed=0):
    """A tiny one, with weights that differ from layer to layer, and its folder."""
    _, config, make = train_small.KINDS[kind]
    (folder / "config.json").write_text(json.dumps(config | TINY[kind]))
    torch.manual_seed(seed)
    network = make(read_config(folder))
    for parameter in network.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return network.eval()


@pytest.mark.parametrize("kind", TINY)
def test_a_network_is_the_model_that_is_run(kind, tmp_path):
    network, tokens = network_of(kind, tmp_path), torch.arange(70) % 61
    weights = {network.prefix + name: value.contiguous() for name, value in network.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        wanted = network(tokens[None])[0]
    assert off(models.load(tmp_path, device="cpu").logits(tokens), wanted) < 2e-3  # the cache is float16


@pytest.mark.parametrize("kind", TINY)
def test_training_learns_and_keeps_the_best(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(train_small, "BATCH", 4)
    monkeypatch.setattr(train_small, "LENGTH", 16)
    monkeypatch.setattr(train_small, "WARM_UP", 5)
    network, stream = network_of(kind, tmp_path), torch.arange(4000) * 5 % 61
    held = stream[1000:1400].clone()
    before = train_small.loss_of(network, held)
    curve = train_small.train(network, stream, held, 60)
    assert [step for step, *_ in curve] == [50, 60]
    after = train_small.loss_of(network, held)
    assert after < before - 0.5 and after == pytest.approx(min(loss for *_, loss in curve), abs=1e-3)


def test_scans_that_are_trained_with_are_the_same_layer(tmp_path):
    """Loss and gradients of the network by the course's kernels, there and back, beside PyTorch's own."""
    found = []
    for scan in ("torch", "kernels"):
        network = network_of("mamba2", tmp_path)
        for layer in network.layers:
            layer.mixer.scan = small_networks.SCANS[scan]
        tokens = torch.arange(18) * 7 % 61
        loss = torch.nn.functional.cross_entropy(network(tokens[None, :-1])[0], tokens[1:])
        names, parameters = zip(*network.named_parameters())
        found.append([loss.detach(), *torch.autograd.grad(loss, parameters)])
    for name, one, other in zip(("loss", *names), *found):
        assert off(other, one) < 4e-2, name


def test_scans_are_compared(tmp_path, monkeypatch):
    for name, value in dict(BATCH=2, LENGTH=8, COMPARED=(("torch", 0), ("mamba_ssm", 0), ("torch", 1))).items():
        monkeypatch.setattr(train_small, name, value)

    def absent(*given, **options):
        raise ImportError("mamba_ssm is not installed")

    monkeypatch.setitem(small_networks.SCANS, "mamba_ssm", absent)
    monkeypatch.setattr(
        train_small, "texts", lambda: (["A warp reads neighbouring numbers."] * 9, ["Memory answers."] * 9)
    )
    train_small.main(["--compare", "--steps", "2", "--out", str(tmp_path)])
    scans = json.loads((tmp_path / "small_mamba2" / "scans.json").read_text())["scans"]
    assert [(one["scan"], one["seed"]) for one in scans] == [("torch", 0), ("torch", 1)]
    assert all(one["step"] > 0 and len(one["curve"]) == 1 for one in scans)
    with pytest.raises(SystemExit):
        train_small.main(["mamba2", "--scan", "thought"])


def test_time_constants_begin_as_they_should_and_do_not_shrink(tmp_path):
    _, config, make = train_small.KINDS["mamba2"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    network = make(read_config(tmp_path))
    for layer in network.layers:
        steps = torch.nn.functional.softplus(layer.mixer.dt_bias)
        assert 0.99e-3 < steps.min() and steps.max() < 1.01e-1
        assert 0 <= layer.mixer.A_log.min() and layer.mixer.A_log.max() <= math.log(16)
    kept = [name for name, _ in network.named_parameters() if not small_networks.decays(name)]
    assert len(kept) == 3 * len(network.layers)
    assert {name.rpartition(".")[2] for name in kept} == {"A_log", "dt_bias", "D"}


def test_the_two_are_of_one_size(tmp_path):
    """So that what a chapter says of one beside the other is about what they are, not about how large."""
    counts = []
    for _, config, _ in train_small.KINDS.values():
        (tmp_path / "config.json").write_text(json.dumps(config))
        counts.append(read_config(tmp_path).weights)
    assert max(counts) < 1.02 * min(counts)


def test_unknown_kinds_are_named():
    with pytest.raises(SystemExit, match="kinds must be of llama, mamba2, got gpt"):
        train_small.main(["gpt"])


@pytest.mark.parametrize(
    "kind", [k for k, (name, *_) in train_small.KINDS.items() if (train_small.HERE / name).exists()]
)
def test_what_is_stored_is_as_good_as_its_curve_says(kind):
    """Perplexity on sentences that the course says of itself, far below a guess among 2,048 tokens."""
    name, config, _ = train_small.KINDS[kind]
    folder = train_small.HERE / name
    assert json.loads((folder / "config.json").read_text()) == config
    facts = json.loads((folder / "training.json").read_text())
    assert [step for step, *_ in facts["curve"]][-1] == train_small.STEPS
    tokens = Tokens(folder).encode(
        "A warp reads 32 neighbouring numbers at once, and the memory answers in sectors of 32 bytes."
    )
    logits = models.load(folder, device="cpu").logits(tokens)
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:])).item()
    assert loss < 5 and min(held for *_, held in facts["curve"]) < 4


@pytest.mark.skipif(not (train_small.HERE / "small_mamba2" / "scans.json").exists(), reason="no scans are stored")
def test_stored_scans_learn_alike():
    """From one seed the curves lie together, closer than another seed's to any of them."""
    scans = json.loads((train_small.HERE / "small_mamba2" / "scans.json").read_text())["scans"]
    assert {"kernels", "torch"} <= {one["scan"] for one in scans}
    curves = [torch.tensor([held for *_, held in one["curve"]]) for one in scans if one["seed"] == 0]
    apart = max((curve - curves[0]).abs().max() for curve in curves)
    others = [torch.tensor([held for *_, held in one["curve"]]) for one in scans if one["seed"]]
    assert apart < 1e-3 and all((other - curves[0]).abs().max() > 10 * apart for other in others)
    assert all(curve[-1] < 4 and curve[0] > 5 for curve in curves)
