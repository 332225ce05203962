"""A checkpoint's config.json as the numbers that a model needs, or a sentence about why not.

Llama (2, 3), Mistral, Qwen2 and Qwen3, as Hugging Face's transformers writes them, before its version 5 and since.
Mamba-2 and its hybrid are in models/mamba2_config.py.
"""

from dataclasses import dataclass
from pathlib import Path

import ref.llm
from models import mamba2_config
from models.reading import BadModel, OfAText, ends, expect_size, positions, read_json

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class Config(OfAText, ref.llm.Config):
    """The reference's sizes, and what a folder says besides. kind: one of ARCHITECTURES' values."""

    kind: str

    @property
    def biases(self):
        """Whether queries, keys and values have biases."""
        return self.kind == "qwen2"

    @property
    def head_norms(self):
        """Whether each head of queries and keys is normed."""
        return self.kind == "qwen3"

    @property
    def weights(self):
        """How many weights one token's step reads: all matrices of the layers, norms, biases, the head."""
        layer = self.hidden * (2 * self.q_rows + 2 * self.kv_rows + 3 * self.ffn) + 2 * self.hidden
        layer += (self.q_rows + 2 * self.kv_rows) * self.biases + 2 * self.head_dim * self.head_norms
        return self.n_layers * layer + self.hidden + self.vocab * self.hidden


def read_config(folder):
    """The Config of a folder; a Mamba-2's is a models.mamba2_config.Config. BadModel names the file and the entry, what
    was expected and what came."""
    folder = Path(folder)
    if not folder.is_dir():
        raise BadModel(f"{folder}: expected a folder with config.json, weights and tokenizer, found no such folder")
    found = read_json(folder / "config.json")
    if mamba2_config.offers(found):
        return mamba2_config.read(folder, found)
    names = found.get("architectures") or []
    kind = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if kind is None:
        named = ", ".join(map(str, names)) or found.get("model_type", "none")
        offered = ", ".join((*ARCHITECTURES, *mamba2_config.ARCHITECTURES))
        raise BadModel(f"{folder}: architecture must be one of {offered}, got {named}")
    for name in SIZES:
        expect_size(folder, found, name)
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    kv_heads = found.get("num_key_value_heads") or heads
    head_dim = found.get("head_dim") or hidden // heads
    if heads % kv_heads:
        raise BadModel(
            f"{folder}: num_attention_heads must be a multiple of num_key_value_heads, got {heads} and {kv_heads}"
        )
    if head_dim % 2:
        raise BadModel(
            f"{folder}/config.json: head_dim must be even, as positions turn pairs of numbers, got {head_dim}"
        )
    _refuse(folder, found, kind)
    theta, scaling = positions(folder, found)
    stops, begin = ends(folder, found)
    return Config(
        kind=kind,
        hidden=hidden,
        n_layers=found["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=found["intermediate_size"],
        vocab=found["vocab_size"],
        eps=float(found.get("rms_norm_eps", 1e-6)),
        theta=theta,
        scaling=scaling,
        window=found.get("sliding_window") if kind == "mistral" else None,
        context=int(found.get("max_position_embeddings") or 2048),
        tied=bool(found.get("tie_word_embeddings", False)),
        stops=stops,
        begin=begin,
    )


def _refuse(folder, found, kind):
    """What would be computed otherwise than here is refused by name."""
    act = found.get("hidden_act", "silu")
    if act != "silu":
        raise BadModel(f"{folder}/config.json: hidden_act must be silu, got {act!r}")
    for name in ("attention_bias", "mlp_bias"):
        if found.get(name) and kind != "qwen2":
            raise BadModel(f"{folder}/config.json: {name} must be false for this architecture, got {found[name]!r}")
    if kind in ("qwen2", "qwen3") and found.get("use_sliding_window"):
        raise BadModel(f"{folder}/config.json: use_sliding_window must be false, got true")
    if found.get("quantization_config"):
        raise BadModel(f"{folder}/config.json: weights must be bf16, fp16 or fp32, got a quantization_config")
