"""A checkpoint's config.json as the numbers that a model needs, or a sentence about why not.

Llama (2, 3), Mistral, Qwen2 and Qwen3, as Hugging Face's transformers writes them, before its version 5 and since.
"""

import json
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


class BadModel(ValueError):
    """A folder that holds no model that can be run; the message says what is wrong and where."""


@dataclass(frozen=True)
class Config:
    """Sizes and constants; names as in ref.llm. kind: one of ARCHITECTURES' values; context: tokens, the most."""

    kind: str
    hidden: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    theta: float
    scaling: tuple | None
    window: int | None
    context: int
    tied: bool
    stops: tuple  # token ids that end a text
    begin: int | None  # token id that begins one

    @property
    def biases(self):
        """Whether queries, keys and values have biases."""
        return self.kind == "qwen2"

    @property
    def head_norms(self):
        """Whether each head of queries and keys is normed."""
        return self.kind == "qwen3"

    @property
    def q_rows(self):
        return self.n_heads * self.head_dim

    @property
    def kv_rows(self):
        return self.n_kv_heads * self.head_dim

    @property
    def weights(self):
        """How many weights one token's step reads: all matrices of the layers, norms, biases, the head."""
        layer = self.hidden * (2 * self.q_rows + 2 * self.kv_rows + 3 * self.ffn) + 2 * self.hidden
        layer += (self.q_rows + 2 * self.kv_rows) * self.biases + 2 * self.head_dim * self.head_norms
        return self.n_layers * layer + self.hidden + self.vocab * self.hidden


def read_config(folder):
    """The Config of a folder. BadModel names the file and the entry, what was expected and what came."""
    folder = Path(folder)
    if not folder.is_dir():
        raise BadModel(f"{folder}: expected a folder with config.json, weights and tokenizer, found no such folder")
    found = read_json(folder / "config.json")
    names = found.get("architectures") or []
    kind = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if kind is None:
        named = ", ".join(map(str, names)) or found.get("model_type", "none")
        raise BadModel(f"{folder}: architecture must be one of {', '.join(ARCHITECTURES)}, got {named}")
    for name in SIZES:
        _expect_size(folder, found, name)
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
    theta, scaling = _positions(folder, found)
    stops, begin = _ends(folder, found)
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


def read_json(path):
    """What a JSON file holds, an object; BadModel if it is missing, unreadable or holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadModel(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise BadModel(f"{path}: is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadModel(f"{path}: must hold a JSON object, got {type(found).__name__}")
    return found


def _expect_size(folder, found, name):
    size = found.get(name)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise BadModel(f"{folder}/config.json: {name} must be a whole number, 1 or more, got {size!r}")


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


def _positions(folder, found):
    """(theta, scaling) as ref.llm.rope_frequencies takes them."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}  # since transformers 5, and before
    theta = rope.get("rope_theta", found.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    try:
        if kind == "default":
            return float(theta), None
        if kind == "linear":
            return float(theta), ("linear", float(rope["factor"]))
        if kind == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            return float(theta), ("llama3", *(float(rope[name]) for name in names))
    except KeyError as missing:
        raise BadModel(f"{folder}/config.json: rope scaling {kind!r} must have {missing}") from None
    raise BadModel(f"{folder}/config.json: rope scaling must be default, linear or llama3, got {kind!r}")


def _ends(folder, found):
    """(ids that end a text, the id that begins one): generation_config.json says it, where there is one."""
    path = folder / "generation_config.json"
    if path.exists():
        found = {**found, **{k: v for k, v in read_json(path).items() if v is not None}}
    stops, begin = found.get("eos_token_id"), found.get("bos_token_id")
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    return tuple(stops), begin[0] if isinstance(begin, list) else begin
