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
MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 3,
    "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "conv_kernel": 4, "expand": 2, "chunk_size": 8,
    "vocab_size": 101, "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True, "hidden_act": "silu",
    "tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
BAMBA = {
    "architectures": ["BambaForCausalLM"], "model_type": "bamba", "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 80, "vocab_size": 101,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 8,
    "mamba_conv_bias": True, "mamba_proj_bias": False, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "rope_theta": 10000.0, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
SSM = {"layer": "Mamba2", "d_state": 16, "headdim": 16, "chunk_size": 8}
STATE_SPACES = {
    "d_model": 64, "d_intermediate": 0, "n_layer": 3, "vocab_size": 101, "ssm_cfg": SSM, "attn_layer_idx": [],
    "attn_cfg": {}, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 16,
    "tie_embeddings": True,
}  # fmt: skip
MAMBA_KINDS = {  # beside KINDS: those with states
    "mamba2": MAMBA2,
    "mamba2_groups": MAMBA2 | {"n_groups": 4, "conv_kernel": 3, "use_bias": True},
    "mamba2_no_bias": MAMBA2 | {"use_conv_bias": False, "state_size": 24, "num_heads": 4, "head_dim": 32},
    "state_spaces": STATE_SPACES,
    "state_spaces_groups": STATE_SPACES | {"ssm_cfg": SSM | {"ngroups": 2}, "tie_embeddings": False},
    "bamba": BAMBA,
    "bamba_groups": BAMBA | {"mamba_n_groups": 2, "attn_layer_indices": [2], "mamba_proj_bias": True},
    "bamba_tied": BAMBA | {"attn_layer_indices": [0], "num_hidden_layers": 2, "tie_word_embeddings": True},
}


def config_of(kind):
    if kind in MAMBA_KINDS:
        return MAMBA_KINDS[kind]
    architecture, changes = KINDS[kind]
    return BASE | {"architectures": [architecture], "model_type": TYPES.get(architecture, "qwen3")} | changes


def weights_of(config, dtype, seed):
    """Random weights that keep the residual stream alive: norms around 1, and biases that count."""
    made = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in all_shapes(config).items():
        values = torch.randn(shape, generator=made)
        if name.endswith("A_log"):  # decays of all speeds, and step sizes from 0.01 to 1, as training makes them
            values = torch.rand(shape, generator=made).mul(15).add(1).log()
        elif name.endswith("dt_bias"):
            values = values - 2
        elif name.endswith("conv1d.weight"):
            values = values / shape[2] ** 0.5
        elif "norm" in name or name.endswith(".D"):
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
