"""Mamba-2 and its hybrid from a folder: what transformers says, how texts go on from a state, what folders lack."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from test_models_llm import off, rewrite
from tiny_models import MAMBA_KINDS, write
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as kinds_of_tokenizers

import models
import ref.mamba2
from models import generate, mamba2_torch, to_safetensors
from models.config import BadModel, read_config
from models.mamba2 import State
from models.mamba2_reference import reference
from models.tokens import Tokens

HERE = Path(__file__).resolve().parent
# Seeds of models that are sure of each of 64 tokens, as in test_models_llm.py.
SEEDS = {
    "mamba2": 14, "mamba2_groups": 6, "mamba2_no_bias": 5, "state_spaces": 2, "state_spaces_groups": 7, "bamba": 15,
    "bamba_groups": 7, "bamba_tied": 3,
}  # fmt: skip
TOKENS = [int(t) for t in np.random.default_rng(1).integers(0, 101, size=37)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One model of each kind: {kind: folder}. Weights are float16, so that every way to run keeps them as they are."""
    root = tmp_path_factory.mktemp("kinds")
    return {kind: write(root / kind, kind, torch.float16, seed=SEEDS[kind]) for kind in MAMBA_KINDS}


def as_transformers(folder, to):
    """A state-spaces folder's model in transformers' layout, which differs in the config and in one name."""
    found, config = json.loads((folder / "config.json").read_text()), read_config(folder)
    changes = {
        "vocab_size": config.vocab, "n_groups": config.ngroups, "tie_word_embeddings": found["tie_embeddings"],
        "pad_token_id": 0,
    }  # fmt: skip
    to.mkdir(parents=True)
    (to / "config.json").write_text(json.dumps(tiny_models.MAMBA2 | changes))
    weights = load_file(folder / "model.safetensors")
    weights["backbone.embeddings.weight"] = weights.pop("backbone.embedding.weight")
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.fixture(scope="module")
def said(folders, tmp_path_factory):
    """What transformers computes of them, in float32, in a process of its own, as in test_models_llm.py."""
    root = tmp_path_factory.mktemp("said")
    asked = [
        as_transformers(folder, root / kind) if kind.startswith("state_spaces") else folder
        for kind, folder in folders.items()
    ]
    command = [sys.executable, HERE / "transformers_says.py", root / "out.npz", *asked, json.dumps(TOKENS)]
    more = {"PYTHONPATH": str(HERE.parent), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, cwd=root, env=os.environ | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return np.load(root / "out.npz")


@pytest.mark.parametrize("kind", MAMBA_KINDS)
def test_the_reference_is_what_transformers_computes(kind, folders, said):
    model, wanted = reference(folders[kind]), said[kind + ".logits"]
    assert off(ref.mamba2.logits(model, TOKENS), wanted) < 3e-6
    state = ref.mamba2.State.empty(model.config)
    assert off([ref.mamba2.step(model, token, state) for token in TOKENS], wanted) < 3e-6


@pytest.mark.parametrize("kind", MAMBA_KINDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(kind, folders, said):
    model = models.load(folders[kind], device="cpu")
    bound = 5e-3 if "bamba" in kind else 1e-5  # a hybrid's cache is float16
    assert off(model.logits(TOKENS), said[kind + ".logits"]) < bound
    assert list(model.generate(TOKENS, 64)) == said[kind + ".greedy"].tolist()


# States


@pytest.mark.parametrize("kind", ["mamba2_groups", "state_spaces", "bamba"])
def test_steps_behind_a_prompt_equal_the_whole_prompt(kind, folders):
    model = models.load(folders[kind], device="cpu")
    whole = model.logits(TOKENS)
    model.engine.reset()
    last = [model.engine.prefill(torch.tensor(TOKENS[:5]))[0]]
    last += [model.engine.step(token) for token in TOKENS[5:]]
    assert off(torch.stack(last), whole[4:]) < (2e-3 if kind == "bamba" else 2e-6)
    assert model.engine.state.length == len(TOKENS)


@pytest.mark.parametrize("kind", ["mamba2", "bamba"])
@pytest.mark.parametrize("cuts", [(1, 36), (2, 1, 34), (8, 29), (20, 17)], ids=str)
def test_a_prompt_in_pieces_equals_the_prompt_at_once(kind, cuts, folders):
    model = models.load(folders[kind], device="cpu")
    whole = model.logits(TOKENS)
    states = model.engine.state.copy()
    model.engine.reset()
    parts = [model.engine.prefill(part, every=True) for part in torch.tensor(TOKENS).split(list(cuts))]
    bound = 2e-3 if kind == "bamba" else 2e-6
    assert off(torch.cat(parts), whole) < bound
    assert off(model.engine.state.ssm, states.ssm) < bound and off(model.engine.state.conv, states.conv) < bound


def test_a_prompt_of_many_pieces_and_one_text_over_another(folders):
    """No trace of an earlier text is left, and a state takes no more room for more tokens."""
    model, tokens = models.load(folders["mamba2"], device="cpu"), torch.arange(1301) % 101
    first, size = model.logits(TOKENS), model.engine.state.nbytes
    long = model.logits(tokens)
    assert off(long[:512], model.logits(tokens[:512])) < 1e-6
    assert model.engine.state.nbytes == size and model.step_bytes(0) == model.step_bytes(10**6)
    np.testing.assert_array_equal(model.logits(TOKENS), first)


def test_a_hybrid_counts_the_cache_of_its_attention_layers(folders):
    model = models.load(folders["bamba"], device="cpu")
    assert model.step_bytes(9) - model.step_bytes(8) == 2 * 2 * 2 * model.config.kv_rows  # two layers, keys and values
    model.generate([1] * 256, 1)
    with pytest.raises(ValueError, match="at most 256 tokens here, got 257"):
        model.generate([1] * 257, 1)


def test_a_text_goes_on_from_a_state_that_was_kept(folders):
    model, other = (models.load(folders["mamba2"], device="cpu") for _ in range(2))
    model.engine.prefill(torch.tensor(TOKENS[:20]))
    kept = model.engine.state.copy()
    wanted = [model.engine.step(token) for token in TOKENS[20:]]
    assert kept.length == 20 and (kept.ssm != model.engine.state.ssm).any()
    other.engine.state.take(kept)
    np.testing.assert_array_equal(torch.stack([other.engine.step(token) for token in TOKENS[20:]]), torch.stack(wanted))


def test_a_state_of_another_kind_is_refused(folders):
    model = models.load(folders["mamba2"], device="cpu")
    state, other = model.engine.state, State(read_config(folders["mamba2_groups"]))
    state.ssm += 1
    batch, double, elsewhere = state.copy(), state.copy(), state.copy()
    batch.ssm = batch.ssm.repeat(1, 2, 1, 1, 1)
    double.ssm = double.ssm.double()
    elsewhere.conv = elsewhere.conv.to("meta")
    for error, wanted, what in [
        (TypeError, "state must be a State, got Tensor", state.ssm),
        (ValueError, r"conv must have shape \(3, 1, 3, 160\), got \(3, 1, 2, 256\)", other),
        (ValueError, r"ssm must have shape \(3, 1, 8, 16, 16\), got \(3, 2, 8, 16, 16\)", batch),
        (TypeError, "ssm must be torch.float32, got torch.float64", double),
        (ValueError, "conv must be on cpu, got meta", elsewhere),
    ]:
        with pytest.raises(error, match=wanted):
            state.take(what)
    assert (state.ssm == 1).all()  # nothing was written


# Parts


@pytest.mark.parametrize("length, chunk", [(1, 8), (7, 8), (50, 8), (50, 64), (64, 16)])
def test_ssd_in_torch_is_the_reference(length, chunk):
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal(s) for s in ((2, length, 4, 6), (2, length, 4), (2, length, 2, 5), (2, length, 2, 5))]
    x, dt, B, C = arrays
    A, D, bias, state = -rng.uniform(1, 16, 4), *rng.standard_normal((2, 4)), rng.standard_normal((2, 4, 6, 5))
    options = {"D": D, "dt_bias": bias, "dt_softplus": True, "dt_limit": (0.01, 0.9), "initial_states": state}
    y, final = ref.mamba2.ssd_chunked(x, dt, A, B, C, chunk_size=8, **options)
    single = lambda t: torch.from_numpy(t).float() if isinstance(t, np.ndarray) else t  # noqa: E731
    found, last = mamba2_torch.ssd(
        *map(single, (x, dt, A, B, C)), chunk_size=chunk, return_final_states=True,
        **{name: single(value) for name, value in options.items()},
    )  # fmt: skip
    assert off(found, y) < 1e-6 and off(last, final) < 1e-6


def test_ssd_in_torch_is_differentiated_as_the_steps_are():
    """Training goes through chunks, decays behind the diagonal among them: gradients are finite and a recurrence's."""
    torch.manual_seed(0)
    x, dt, B, C = torch.randn(1, 21, 2, 3), torch.randn(1, 21, 2), torch.randn(1, 21, 1, 4), torch.randn(1, 21, 1, 4)
    A = -torch.tensor([1.0, 900.0])
    inputs = [t.requires_grad_() for t in (x, dt, A, B, C)]
    found = torch.autograd.grad(mamba2_torch.ssd(*inputs, chunk_size=8, dt_softplus=True).square().sum(), inputs)
    h, total, step = torch.zeros(1, 2, 3, 4), 0, torch.nn.functional.softplus(dt)
    for t in range(21):
        h = torch.exp(A * step[:, t])[..., None, None] * h
        h = h + (step[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        total = total + (h * C[:, t, :, None]).sum(-1).square().sum()
    for ours, theirs in zip(found, torch.autograd.grad(total, inputs)):
        assert torch.isfinite(ours).all() and off(ours, theirs) < 1e-4


# Bad input


@pytest.mark.parametrize(
    "kind, changes, wanted",
    [
        ("mamba2", {"hidden_size": 0}, "hidden_size must be a whole number, 1 or more, got 0"),
        ("mamba2", {"num_heads": None}, "num_heads must be a whole number, 1 or more, got None"),
        ("mamba2", {"conv_kernel": 5}, "the convolution's width must be 2, 3 or 4, got 5"),
        ("mamba2", {"n_groups": 3}, "heads must be a multiple of the groups of B and C, got 8 heads and 3 groups"),
        ("mamba2", {"head_dim": 24}, "must be expand times hidden_size, got 8 · 24 for 128"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act must be silu, got gelu"),
        ("mamba2", {"time_step_limit": [0.5, 0.1]}, "0 <= low <= high, got"),
        ("mamba2", {"time_step_limit": "inf"}, "must be .low, high., 0 <= low <= high, got 'inf'"),
        ("mamba2", {"quantization_config": {"bits": 4}}, "got a quantization_config"),
        ("state_spaces", {"ssm_cfg": {}}, "ssm_cfg's layer must be Mamba2, got 'Mamba1'"),
        ("state_spaces", {"ssm_cfg": {"layer": "Mamba1"}}, "ssm_cfg's layer must be Mamba2, got 'Mamba1'"),
        (
            "state_spaces",
            {"ssm_cfg": {"layer": "Mamba2", "d_ssm": 64}},
            "ssm_cfg must have no entries but .* got d_ssm",
        ),
        ("state_spaces", {"ssm_cfg": {"layer": "Mamba2", "rmsnorm": False}}, "rmsnorm must be true, got false"),
        ("state_spaces", {"ssm_cfg": {"layer": "Mamba2", "d_conv": 9}}, "width must be 2, 3 or 4, got 9"),
        ("state_spaces", {"attn_layer_idx": [1]}, r"attn_layer_idx must be \[\], got \[1\]"),
        ("state_spaces", {"d_intermediate": 64}, "d_intermediate must be 0, got 64"),
        ("state_spaces", {"rms_norm": False}, "rms_norm must be true, got false"),
        ("state_spaces", {"d_model": 31}, "expand · d_model must be a multiple of headdim, got 62 and 16"),
        ("bamba", {"attn_layer_indices": [1, 4]}, r"different whole numbers from 0 to 3, got \[1, 4\]"),
        ("bamba", {"attn_layer_indices": [1, 1]}, r"different whole numbers from 0 to 3, got \[1, 1\]"),
        ("bamba", {"mamba_d_conv": 1}, "width must be 2, 3 or 4, got 1"),
        ("bamba", {"mamba_n_groups": 5}, "got 8 heads and 5 groups"),
        ("bamba", {"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads, got 4 and 3"),
        ("bamba", {"head_dim": 6}, "head_dim must be a multiple of 4"),
        ("bamba", {"attn_rotary_emb": 16}, "attn_rotary_emb must be 8, got 16"),
        ("bamba", {"rope_parameters": {"partial_rotary_factor": 1.0}}, "partial_rotary_factor must be 0.5, got 1.0"),
        ("state_spaces", {"pad_vocab_size_multiple": 0}, "pad_vocab_size_multiple must be a whole number, 1 or more"),
        ("bamba", {"attention_bias": True}, "attention_bias must be false, got true"),
        ("bamba", {"mamba_d_head": 8}, "must be expand times hidden_size, got 8 · 8 for 128"),
    ],
)
def test_what_is_not_offered_is_named(kind, changes, wanted, tmp_path):
    with pytest.raises(BadModel, match=wanted):
        models.load(rewrite(write(tmp_path, kind), changes), device="cpu")


@pytest.mark.parametrize(
    "indices, wanted",
    [
        (
            [1],
            "layer 3 must be Mamba by attn_layer_indices, and its weights are model.layers.3.self_attn.q_proj.weight",
        ),
        (
            [0, 1, 3],
            "layer 0 must be attention by attn_layer_indices, and its weights are model.layers.0.mamba.in_proj",
        ),
    ],
)
def test_a_list_of_layers_that_the_weights_do_not_match(indices, wanted, tmp_path):
    with pytest.raises(BadModel, match=wanted):
        models.load(rewrite(write(tmp_path, "bamba"), {"attn_layer_indices": indices}), device="cpu")


@pytest.mark.parametrize("how", ["missing", "shape", "nan", "dtype", "cut short"])
@pytest.mark.parametrize("kind", ["mamba2", "state_spaces", "bamba"])
def test_what_a_folder_lacks_is_said(kind, how, tmp_path):
    folder = write(tmp_path, kind)
    path, mixer = folder / "model.safetensors", "mamba" if kind == "bamba" else "mixer"
    name = f"{'model' if kind == 'bamba' else 'backbone'}.layers.2.{mixer}.conv1d.weight"
    tensors = load_file(path)
    tensor = tensors.pop(name)
    if how == "shape":
        tensors[name] = tensor[:, 0].contiguous()
    elif how == "nan":
        tensor[3, 0, 2] = torch.nan
        tensors[name] = tensor
    elif how == "dtype":
        tensors[name] = tensor.double()
    save_file(tensors, path)
    if how == "cut short":
        path.write_bytes(path.read_bytes()[:-100])
    wanted = {
        "missing": rf"expected a tensor {name} of shape \(160, 1, 4\), found none",
        "shape": rf"{name} must have shape \(160, 1, 4\), got \(160, 4\)",
        "nan": rf"{name}: weights must be finite, got nan at \(3, 0, 2\)",
        "dtype": f"{name} must be of BF16, F16, F32, got F64",
        "cut short": "model.safetensors: is not a whole safetensors file",
    }
    with pytest.raises(BadModel, match=wanted[how]):
        models.load(folder, device="cpu")


def test_what_mamba_ssm_saves_is_converted_by_a_command(tmp_path, folders, capsys):
    """Tied matrices share their memory there, and a head that is not needed is left behind."""
    folder, whole = write(tmp_path, "state_spaces", torch.float16, seed=2), folders["state_spaces"]
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["backbone.embedding.weight"]
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadModel, match="found pytorch_model.bin.*python -m models.to_safetensors"):
        models.load(folder, device="cpu")
    assert to_safetensors.main([str(folder)]) == 0
    assert list(models.load(folder, device="cpu").generate(TOKENS, 9)) == list(
        models.load(whole, device="cpu").generate(TOKENS, 9)
    )
    assert to_safetensors.main([str(folder)]) == 2
    assert "model.safetensors is there already" in capsys.readouterr().err


def test_a_pickle_that_does_more_than_hold_tensors_is_not_run(tmp_path, capsys):
    folder = write(tmp_path, "state_spaces")
    (folder / "model.safetensors").unlink()
    assert to_safetensors.main([str(folder)]) == 2
    assert "expected pytorch_model.bin, found none" in capsys.readouterr().err
    torch.save({"weights": Path("x")}, folder / "pytorch_model.bin")
    assert to_safetensors.main([str(folder)]) == 2
    assert "pytorch_model.bin: does not hold tensors alone" in capsys.readouterr().err
    assert not (folder / "model.safetensors").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_type_of_weights_in_several_files(dtype, tmp_path):
    one, several = write(tmp_path / "one", "bamba", dtype), write(tmp_path / "several", "bamba", dtype, shards=3)
    wanted = ref.mamba2.logits(reference(one), TOKENS)
    model = models.load(several, device="cpu")
    assert off(model.logits(TOKENS), wanted) < 2e-3
    model.engine.reset()
    assert off(torch.stack([model.engine.step(t) for t in TOKENS]), wanted) < 2e-3


# The command


@pytest.mark.parametrize("kind, wanted", [("mamba2", "states read and written"), ("bamba", "states, keys and values")])
def test_the_command_writes_and_says_what_a_token_moves(kind, wanted, tmp_path, monkeypatch, capsys):
    """By a name of the course's own, too, where no folder has it."""
    monkeypatch.setattr(generate, "roof", lambda: SimpleNamespace(read=1e10))
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "there", kind, vocab_size=128)
    monkeypatch.setitem(generate.SHIPPED, "mamba2", folder)
    tokenizer = Tokenizer(kinds_of_tokenizers.BPE({chr(i): i for i in range(128)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    arguments = ["--prompt", "Hello", "--max-tokens", "9", "--device", "cpu"]
    for name in (str(folder), "mamba2"):
        assert generate.main([name, *arguments]) == 0
        out = capsys.readouterr().out
        written = Tokens(folder).decode(models.load(folder, device="cpu").generate([ord(c) for c in "Hello"], 9))
        assert out.startswith("Hello" + written) and wanted in out and "share" in out
    assert generate.main(["llama3", *arguments]) == 2
    assert "llama3: expected a folder" in capsys.readouterr().err
