"""Models of the Llama family from a folder: what transformers says, what a folder may lack, and what is written."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_models import KINDS, write
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as kinds_of_tokenizers

import models
import ref.llm
from models import generate
from models.config import BadModel, read_config
from models.corpus import texts
from models.reference import reference
from models.sampling import choose, uniform
from models.tokens import Tokens
from models.weights import Checkpoint

HERE = Path(__file__).resolve().parent
# Seeds of models that are sure of each of 64 tokens: the two largest logits are 0.012 of their spread apart, or more.
# A random model has none of the sureness of a trained one, and rounding would decide.
SEEDS = {
    "llama2": 1, "llama3": 0, "llama_linear": 6, "mistral": 9, "mistral_window": 6, "mistral_head_dim": 1, "qwen2": 3,
    "qwen2_tied": 1, "qwen3": 2, "qwen3_one_kv_head": 0,
}  # fmt: skip
TOKENS = [int(t) for t in np.random.default_rng(1).integers(0, 101, size=37)]


def off(found, wanted):
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One model of each kind: {kind: folder}. Weights are float16, so that every way to run keeps them as they are."""
    root = tmp_path_factory.mktemp("kinds")
    return {kind: write(root / kind, kind, torch.float16, seed=SEEDS[kind]) for kind in KINDS}


@pytest.fixture(scope="module")
def said(folders, tmp_path_factory):
    """What transformers computes of them, in float32: in a process that has the course's `kernels` on its path."""
    root = tmp_path_factory.mktemp("said")
    command = [sys.executable, HERE / "transformers_says.py", root / "out.npz", *folders.values(), json.dumps(TOKENS)]
    more = {"PYTHONPATH": str(HERE.parent), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, cwd=root, env=os.environ | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return np.load(root / "out.npz")


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_what_transformers_computes(kind, folders, said):
    assert off(ref.llm.logits(reference(folders[kind]), TOKENS), said[kind + ".logits"]) < 3e-6


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(kind, folders, said):
    model = models.load(folders[kind])
    assert off(model.logits(TOKENS), said[kind + ".logits"]) < 5e-3
    assert list(model.generate(TOKENS, 64)) == said[kind + ".greedy"].tolist()


@pytest.mark.parametrize("kind", ["mistral_window", "qwen2_tied", "qwen3"])
def test_steps_behind_a_prompt_equal_the_whole_prompt(kind, folders):
    model = models.load(folders[kind])
    whole = model.logits(TOKENS)
    model.engine.reset()
    last = [model.engine.prefill(torch.tensor(TOKENS[:5]))[0]]
    last += [model.engine.step(token) for token in TOKENS[5:]]
    assert off(torch.stack(last), whole[4:]) < 2e-3  # the cache is float16
    assert model.engine.cache.length == len(TOKENS)


def test_long_prompts_go_in_pieces_and_the_cache_grows(tmp_path):
    folder = write(tmp_path, "llama2", max_position_embeddings=1500)
    model, tokens = models.load(folder), torch.arange(1301) % 101
    whole = model.logits(tokens)
    model.engine.reset()
    first = model.engine.prefill(tokens[:700], every=True)
    rest = model.engine.prefill(tokens[700:1300], every=True)
    last = model.engine.step(int(tokens[1300]))[None]
    assert off(torch.cat([first, rest, last]), whole) < 1e-3


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-3), (torch.bfloat16, 1e-3)], ids=str)
def test_every_type_of_weights_in_several_files(dtype, bound, tmp_path):
    one, several = write(tmp_path / "one", "qwen2", dtype), write(tmp_path / "several", "qwen2", dtype, shards=3)
    wanted = ref.llm.logits(reference(one), TOKENS)
    model = models.load(several)
    assert off(model.logits(TOKENS), wanted) < bound
    model.engine.reset()
    assert off(torch.stack([model.engine.step(t) for t in TOKENS]), wanted) < bound


# Sampling


def test_sampling_is_the_reference():
    rng = np.random.default_rng(4)
    for _ in range(200):
        logits = torch.from_numpy(rng.standard_normal(23).astype(np.float32)).mul(3)
        how = rng.choice([0.3, 1.0, 2.0]), rng.choice([None, 1, 5, 40]), rng.choice([None, 0.1, 0.7, 1.0])
        u = rng.random()
        assert int(choose(logits, u, *how)) == ref.llm.draw(ref.llm.probabilities(logits, *how), u)


def test_uniform_numbers_are_uniform_and_apart():
    found = np.array([uniform(seed, position) for seed in range(40) for position in range(500)])
    assert 0 <= found.min() and found.max() < 1 and len(set(found)) == len(found)
    counts = np.histogram(found, 16, (0, 1))[0]
    assert abs(counts - len(found) / 16).max() < 5 * (len(found) / 16) ** 0.5
    assert uniform(0, 0) == (0xE220A8397B1DCDAF >> 11) / 2**53  # SplitMix64's first value of seed 0


def test_the_same_seed_writes_the_same(folders):
    model = models.load(folders["llama2"])
    write_ = lambda **how: list(model.generate(TOKENS, 20, temperature=1.0, **how))  # noqa: E731
    assert write_(seed=3) == write_(seed=3) != write_(seed=4)
    assert write_(seed=3, top_k=1) == list(model.generate(TOKENS, 20))


@pytest.mark.parametrize("device", ["cpu", "simt"])
def test_a_model_keeps_one_text_at_a_time(folders, device):
    model = models.load(folders["llama2"], device=device)
    first = model.generate(TOKENS[:3], 5)
    next(first)
    second = list(model.generate(TOKENS[3:5], 2))
    with pytest.raises(RuntimeError, match="has begun another text since"):
        list(first)
    assert second == list(model.generate(TOKENS[3:5], 2))
    assert len(next(zip(model.generate(TOKENS[:3], 10**12)))) == 1  # what the context holds is all that is prepared


def test_writing_ends_where_it_should(folders):
    model = models.load(folders["llama2"])
    greedy = list(model.generate(TOKENS, 10))
    assert len(greedy) == 10 and list(model.generate(TOKENS, 0)) == []
    stop = greedy[4]
    object.__setattr__(model.config, "stops", (stop,))
    assert list(model.generate(TOKENS, 10)) == greedy[: greedy.index(stop)]
    object.__setattr__(model.config, "stops", ())
    object.__setattr__(model.config, "context", len(TOKENS) + 3)
    assert list(model.generate(TOKENS, 10)) == greedy[:4]  # three in the context, and what follows the last


# Bad input


def broken(folder, how):
    """Spoil a folder in one way."""
    weights = folder / "model.safetensors"
    if how == "no folder":
        return folder / "none"
    if how in ("config.json", "model.safetensors"):
        (folder / how).unlink()
    elif how == "cut short":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "text":
        (folder / "config.json").write_text("{")
    else:
        tensors = load_file(weights)
        name = "model.layers.1.mlp.up_proj.weight"
        tensor = tensors.pop(name)
        if how == "shape":
            tensors[name] = tensor[:-1].contiguous()
        elif how == "dtype":
            tensors[name] = tensor.double()
        elif how == "nan":
            tensor[3, 5] = torch.nan
            tensors[name] = tensor
        save_file(tensors, weights)
    return folder


@pytest.mark.parametrize(
    "how, wanted",
    [
        ("no folder", "found no such folder"),
        ("config.json", "config.json: cannot be read: No such file"),
        ("text", "config.json: is not JSON"),
        ("model.safetensors", "expected weights in model.safetensors or in several"),
        ("cut short", "model.safetensors: is not a whole safetensors file"),
        ("missing", r"expected a tensor model.layers.1.mlp.up_proj.weight of shape \(80, 64\)"),
        ("shape", r"up_proj.weight must have shape \(80, 64\), got \(79, 64\)"),
        ("dtype", "up_proj.weight must be of BF16, F16, F32, got F64"),
        ("nan", r"model.layers.1.mlp.up_proj.weight: weights must be finite, got nan at \(3, 5\)"),
    ],
)
def test_what_a_folder_lacks_is_said(how, wanted, tmp_path):
    with pytest.raises(BadModel, match=wanted):
        models.load(broken(write(tmp_path), how))


@pytest.mark.parametrize(
    "changes, wanted",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "must be one of LlamaForCausalLM.*got GPT2LMHeadModel"),
        ({"hidden_size": 0}, "hidden_size must be a whole number, 1 or more, got 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 3"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"attention_bias": True}, "attention_bias must be false"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope scaling must be default, linear or llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "must have 'low_freq_factor'"),
        ({"quantization_config": {"bits": 4}}, "got a quantization_config"),
    ],
)
def test_what_is_not_offered_is_named(changes, wanted, tmp_path):
    with pytest.raises(BadModel, match=wanted):
        models.load(write(tmp_path, num_key_value_heads=4) if not changes else rewrite(write(tmp_path), changes))


def rewrite(folder, changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_a_shard_that_is_missing_is_named(tmp_path):
    folder = write(tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BadModel, match=r"names model-00002-of-00003.*it has 2 of its 3 files"):
        models.load(folder)


def test_bad_arguments_are_named(folders):
    folder, load = folders["llama2"], models.load
    model = load(folder)
    for error, wanted, call in [
        (ValueError, "at least one token id, got none", lambda: model.logits([])),
        (ValueError, "token ids must be below 101, got 101 at place 1", lambda: model.logits([1, 101])),
        (ValueError, "got -1 at place 0", lambda: model.generate([-1], 3)),
        (TypeError, "tokens must be whole numbers, got 1.5", lambda: model.generate([1.5], 3)),
        (ValueError, "at most 256 tokens here, got 257", lambda: model.generate([1] * 257, 3)),
        (ValueError, "max_tokens must be at least 0, got -1", lambda: model.generate([1], -1)),
        (ValueError, "temperature must be a number", lambda: model.generate([1], 1, temperature=-1)),
        (ValueError, "top_k must be at least 1", lambda: model.generate([1], 1, top_k=0)),
        (ValueError, "top_p must be above 0 and at most 1", lambda: model.generate([1], 1, top_p=1.5)),
        (TypeError, "seed must be a whole number", lambda: model.generate([1], 1, seed="x")),
        (ValueError, "device must be", lambda: load(folder, device="tpu")),
        (ValueError, "needs an NVIDIA GPU|found", lambda: load(folder, device="cuda:99")),
        (ValueError, "there is one 'simt', got 'simt:1'", lambda: load(folder, device="simt:1")),
        (
            ValueError,
            "bits must be 16 on the processor, got 8",
            lambda: load(folder, device="cpu", bits=8),
        ),
        (ValueError, "bits must be 16, 8, 4, got 3", lambda: load(folder, device="simt", bits=3)),
        (ValueError, "kv_bits must be 16, 8, 4, got 2", lambda: load(folder, device="simt", kv_bits=2)),
        (ValueError, "kv_bits must be 16 on the processor, got 8", lambda: load(folder, device="cpu", kv_bits=8)),
    ]:
        with pytest.raises(error, match=wanted):
            call()


def test_files_are_closed_when_opening_fails(tmp_path):
    folder = broken(write(tmp_path), "missing")
    with pytest.raises(BadModel):
        Checkpoint(folder, read_config(folder))
    (folder / "model.safetensors").unlink()  # nothing holds it


# The command


@pytest.fixture
def talker(tmp_path, monkeypatch):
    """A tiny model with a tokenizer of single characters and a template for a chat; a roof that needs no measuring."""
    monkeypatch.setattr(generate, "roof", lambda: SimpleNamespace(read=1e10))
    folder = write(tmp_path, vocab_size=128)
    tokenizer = Tokenizer(kinds_of_tokenizers.BPE({chr(i): i for i in range(128)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def test_the_command_writes_and_reports(talker, capsys):
    assert generate.main([str(talker), "--prompt", "Hello", "--max-tokens", "9"]) == 0
    out = capsys.readouterr().out
    written = Tokens(talker).decode(models.load(talker).generate([ord(c) for c in "Hello"], 9))
    assert out.startswith("Hello" + written) and "tokens/s" in out and "share" in out


def test_the_command_says_what_is_wrong(talker, capsys, tmp_path):
    for arguments, wanted in [
        ([str(talker)], "--prompt must hold some text"),
        ([str(talker), "--prompt", " "], "--prompt must hold some text"),
        ([str(tmp_path / "none"), "--prompt", "x"], "found no such folder"),
        ([str(talker), "--prompt", "x", "--top-p", "2"], "top_p must be above 0"),
        ([str(talker), "--prompt", "x" * 300], "at most 256 tokens here, got 300"),
    ]:
        assert generate.main(arguments) == 2
        said = capsys.readouterr()
        assert wanted in said.err and said.out == ""


def test_the_simt_machine_is_given_no_times(talker, capsys):
    assert generate.main([str(talker), "--prompt", "Hi", "--max-tokens", "2", "--device", "simt"]) == 0
    out = capsys.readouterr().out
    assert "2 tokens on the SIMT machine" in out and "tokens/s" not in out


def test_the_command_imports_no_compiler():
    """torch._dynamo takes three seconds to import, and a first token needs nothing of it."""
    code = (
        "import sys, models.generate, models.gpu; sys.exit(any(m in sys.modules for m in ('torch._dynamo', 'triton')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=HERE.parent).returncode == 0


def test_the_report_begins_behind_the_second_token(talker):
    """What lies between the first two is the step's compilation, too."""
    model = models.load(talker, device="cpu")
    said = generate.report(model, 5, [0.0, 1.0, 3.0, 3.5, 4.0])
    assert "written     4 tokens, 2.0 tokens/s from the second on" in said and "5.0 tokens/s to the first" in said
    assert "written     2 tokens, 0.5 tokens/s\n" in generate.report(model, 5, [0.0, 1.0, 3.0])


def test_the_bar_is_for_terminals(capsys):
    bar = generate.Bar()
    bar(5, 10)
    assert capsys.readouterr().err == ""
    bar.file.isatty = lambda: True
    bar(5, 10), bar(5, 10), bar(10, 10)
    said = capsys.readouterr().err
    assert said.count("loading") == 2 and said.endswith("\n")


def test_control_c_keeps_the_text_and_the_figures(talker, capsys, monkeypatch):
    def interrupted(self, ids, *_):
        yield from [72, 105, 33]
        raise KeyboardInterrupt

    monkeypatch.setattr(models.llm.Model, "_generate", interrupted)
    assert generate.main([str(talker), "--prompt", "x"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("xHi! (stopped)") and "tokens/s" in out


def test_a_chat_goes_through_the_template(talker):
    tokens = Tokens(talker)
    assert tokens.decode(tokens.chat("Hi")) == "<user>Hi<a>"
    (talker / "tokenizer_config.json").unlink()
    with pytest.raises(BadModel, match="expected a chat template"):
        tokens.chat("Hi")


def test_characters_of_several_bytes_come_whole(tmp_path):
    """Tokens of single bytes: nothing is shown until a character is whole."""
    tokenizer = Tokenizer(
        kinds_of_tokenizers.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = Tokens(tmp_path)
    ids = tokens.encode("aß∑b")
    pieces = list(tokens.stream(ids))
    assert "".join(pieces) == "aß∑b" and all("\ufffd" not in piece for piece in pieces) and len(ids) == 7


# The small model


def test_the_small_model_writes_sentences(capsys, monkeypatch):
    """On text that it has not seen it does better than chance, by far, and it writes words of the course."""
    monkeypatch.setattr(generate, "roof", lambda: SimpleNamespace(read=1e10))
    folder = HERE.parent / "models" / "small"
    tokens, model = Tokens(folder), models.load(folder, device="cpu")
    _, held_out = texts()
    ids = [tokens.encode(text)[:200] for text in held_out[:12]]
    losses = [F.cross_entropy(model.logits(i)[:-1], torch.tensor(i[1:]), reduction="sum").item() for i in ids]
    assert sum(losses) / sum(len(i) - 1 for i in ids) < 4.3 < np.log(model.config.vocab) - 3
    assert generate.main([str(folder), "--prompt", "A warp reads", "--device", "cpu", "--max-tokens", "30"]) == 0
    assert capsys.readouterr().out.startswith("A warp reads")
