"""Small models with random weights, laid out as Hugging Face does: one of each kind that models.load takes."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from models.config import read_config
from models.weights import all_shapes

BASE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 80, "vocab_size": 101, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "hidden_act": "silu", "eos_token_id": None,
    "bos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
KINDS = {
    "llama2": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama3": ("LlamaForCausalLM", {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "llama_linear": ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None, "num_hidden_layers": 3}),
    "mistral_window": ("MistralForCausalLM", {"sliding_window": 7}),
    "mistral_head_dim": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("Qwen2ForCausalLM", {"use_sliding_window": False, "rope_theta": 1e6}),
    "qwen2_tied": ("Qwen2ForCausalLM", {"use_sliding_window": False, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": False, "rope_theta": 1e6}),
    "qwen3_one_kv_head": ("Qwen3ForCausalLM", {"head_dim": 32, "attention_bias": False, "num_key_value_heads": 1}),
}
TYPES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2"}


def config_of(kind):
    architecture, changes = KINDS[kind]
    return BASE | {"architectures": [architecture], "model_type": TYPES.get(architecture, "qwen3")} | changes


def weights_of(config, dtype, seed):
    """Random weights that keep the residual stream alive: norms around 1, and biases that count."""
    made = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in all_shapes(config).items():
        values = torch.randn(shape, generator=made)
        if "norm" in name:
            values = 1 + 0.2 * values
        elif name.endswith("bias"):
            values = 0.5 * values
        elif "embed" not in name:
            values = values * 1.5 / shape[1] ** 0.5
        found[name] = values.to(dtype)
    return found


def write(folder, kind="llama2", dtype=torch.float32, seed=0, shards=1, **changes):
    """A folder with such a model: config.json and weights, in one file or several. Returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(kind) | changes))
    weights = weights_of(read_config(folder), dtype, seed)
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    index = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(weights.items())[number::shards])
        save_file(part, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder
