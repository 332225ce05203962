"""A Mamba-2's config.json as the numbers that a model needs, or a sentence about why not. Three layouts:

state-spaces   {"d_model": ..., "ssm_cfg": {"layer": "Mamba2", ...}}, as mamba_ssm writes it; backbone.layers.0.mixer
transformers   Mamba2ForCausalLM; the same names of weights but for the embedding
Bamba          BambaForCausalLM, a hybrid: attention in some layers, and a feed-forward block in each
"""

import math
from dataclasses import dataclass

import ref.mamba2
from models.mamba2_names import all_shapes
from models.reading import BadModel, OfAText, ends, expect_size, positions

ARCHITECTURES = ("Mamba2ForCausalLM", "BambaForCausalLM")
ANY_LENGTH = 1 << 40  # tokens: a state takes no more room for them
WIDTHS = (2, 3, 4)  # of the convolution, as causal_conv1d offers them
# What a Mamba2 of mamba_ssm may be made with that says nothing of how it runs.
OF_TRAINING = {"A_init_range", "conv_init", "dt_init_floor", "dt_max", "dt_min", "use_mem_eff_path"}


@dataclass(frozen=True, kw_only=True)
class Config(OfAText, ref.mamba2.Config):
    """The reference's sizes, and what a folder says besides. layout: "state-spaces", "transformers" or "bamba"; biases:
    whether in_proj and out_proj have some; conv_bias: whether the convolution has one."""

    layout: str
    biases: bool
    conv_bias: bool
    window: None = None  # no layer's attention has one

    @property
    def kind(self):
        """ "bamba" for a hybrid, else "mamba2"."""
        return "bamba" if self.layout == "bamba" else "mamba2"

    @property
    def mamba_layers(self):
        """Indices of the layers with a Mamba-2 block."""
        return tuple(i for i in range(self.n_layers) if i not in self.attention_layers)

    @property
    def state_numbers(self):
        """Numbers that one sequence keeps of its past whatever its length, in all Mamba-2 layers."""
        return len(self.mamba_layers) * ((self.width - 1) * self.channels + self.d_inner * self.dstate)

    @property
    def weights(self):
        """How many weights one token's step reads: all but the embedding's other rows."""
        read = sum(math.prod(shape) for shape in all_shapes(self).values())
        return read if self.tied else read - self.vocab * self.hidden


def offers(found):
    """Whether a config.json is one of these."""
    return "ssm_cfg" in found or any(name in ARCHITECTURES for name in found.get("architectures") or [])


def read(folder, found):
    """The Config of what config.json holds. BadModel names the entry, what was expected and what came."""
    if "ssm_cfg" in found:
        config = _state_spaces(folder, found)
    elif "Mamba2ForCausalLM" in found["architectures"]:
        config = _transformers(folder, found)
    else:
        config = _bamba(folder, found)
    if found.get("quantization_config"):
        raise BadModel(f"{folder}/config.json: weights must be bf16, fp16 or fp32, got a quantization_config")
    return config


def _state_spaces(folder, found):
    at, ssm = f"{folder}/config.json", found["ssm_cfg"]
    if not isinstance(ssm, dict) or ssm.get("layer") != "Mamba2":
        layer = ssm.get("layer", "Mamba1") if isinstance(ssm, dict) else ssm
        raise BadModel(f"{at}: ssm_cfg's layer must be Mamba2, got {layer!r}")
    wanted = {"rms_norm": True, "attn_layer_idx": [], "d_intermediate": 0}
    _expect_values(at, {name: found.get(name, value) for name, value in wanted.items()}, wanted)
    wanted = {"rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False}
    _expect_values(f"{at}: ssm_cfg", {name: ssm.get(name, value) for name, value in wanted.items()}, wanted)
    sizes = {"d_state": 128, "d_conv": 4, "expand": 2, "headdim": 64, "ngroups": 1, "chunk_size": 256}
    known = {"layer", "conv_bias", "bias", "dt_limit", *wanted, *sizes, *OF_TRAINING}
    if strange := sorted(set(ssm) - known):
        raise BadModel(f"{at}: ssm_cfg must have no entries but {', '.join(sorted(known))}, got {strange[0]}")
    ssm = sizes | ssm
    for name in sizes:
        expect_size(folder, ssm, name)
    hidden = expect_size(folder, found, "d_model")
    multiple = expect_size(folder, {"pad_vocab_size_multiple": 8} | found, "pad_vocab_size_multiple")
    inner = ssm["expand"] * hidden
    if inner % ssm["headdim"]:
        raise BadModel(f"{at}: expand · d_model must be a multiple of headdim, got {inner} and {ssm['headdim']}")
    stops, begin = ends(folder, found)
    return _checked(folder, Config(
        layout="state-spaces", hidden=hidden, n_layers=expect_size(folder, found, "n_layer"),
        nheads=inner // ssm["headdim"], headdim=ssm["headdim"], dstate=ssm["d_state"], ngroups=ssm["ngroups"],
        width=ssm["d_conv"], chunk_size=ssm["chunk_size"],
        vocab=-(-expect_size(folder, found, "vocab_size") // multiple) * multiple, eps=1e-5,
        dt_limit=_limit(at, ssm.get("dt_limit")), biases=bool(ssm.get("bias", False)),
        conv_bias=bool(ssm.get("conv_bias", True)), context=ANY_LENGTH, tied=bool(found.get("tie_embeddings", True)),
        stops=stops, begin=begin,
    ))  # fmt: skip


def _transformers(folder, found):
    at = f"{folder}/config.json"
    _expect_values(at, {"hidden_act": found.get("hidden_act", "silu")}, {"hidden_act": "silu"})
    sizes = {"hidden_size", "num_hidden_layers", "num_heads", "head_dim", "state_size", "vocab_size"}
    found = {"n_groups": 8, "conv_kernel": 4, "chunk_size": 256, "expand": 2} | found
    for name in (*sorted(sizes), "n_groups", "conv_kernel", "chunk_size"):
        expect_size(folder, found, name)
    _expect_inner(at, found["expand"] * found["hidden_size"], found["num_heads"], found["head_dim"])
    stops, begin = ends(folder, found)
    return _checked(folder, Config(
        layout="transformers", hidden=found["hidden_size"], n_layers=found["num_hidden_layers"],
        nheads=found["num_heads"], headdim=found["head_dim"], dstate=found["state_size"], ngroups=found["n_groups"],
        width=found["conv_kernel"], chunk_size=found["chunk_size"], vocab=found["vocab_size"],
        eps=float(found.get("layer_norm_epsilon", 1e-5)), dt_limit=_limit(at, found.get("time_step_limit")),
        biases=bool(found.get("use_bias", False)), conv_bias=bool(found.get("use_conv_bias", True)),
        context=ANY_LENGTH, tied=bool(found.get("tie_word_embeddings", False)), stops=stops, begin=begin,
    ))  # fmt: skip


def _bamba(folder, found):
    at = f"{folder}/config.json"
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    _expect_values(at, {name: found.get(name, value) for name, value in wanted.items()}, wanted)
    found = {"mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
             "mamba_chunk_size": 256, "max_position_embeddings": 262144} | found  # fmt: skip
    sizes = "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"
    of_mamba = "n_heads", "n_groups", "d_state", "d_conv", "expand", "chunk_size"
    for name in (*sizes, "max_position_embeddings", *(f"mamba_{name}" for name in of_mamba)):
        expect_size(folder, found, name)
    hidden, heads, nheads = found["hidden_size"], found["num_attention_heads"], found["mamba_n_heads"]
    inner = found["mamba_expand"] * hidden
    headdim = found.get("mamba_d_head", "auto")
    headdim = inner // nheads if headdim == "auto" else headdim
    _expect_inner(at, inner, nheads, headdim)
    kv_heads, head_dim = found.get("num_key_value_heads") or heads, found.get("head_dim") or hidden // heads
    if heads % kv_heads:
        raise BadModel(
            f"{at}: num_attention_heads must be a multiple of num_key_value_heads, got {heads} and {kv_heads}"
        )
    if head_dim % 4:
        raise BadModel(f"{at}: head_dim must be a multiple of 4, as half of its numbers turn in pairs, got {head_dim}")
    turning = {"attn_rotary_emb": head_dim // 2, "partial_rotary_factor": 0.5}
    rope = found | (found.get("rope_parameters") or {})
    _expect_values(at, {name: rope.get(name, value) for name, value in turning.items()}, turning)
    theta, scaling = positions(folder, found)
    stops, begin = ends(folder, found)
    return _checked(folder, Config(
        layout="bamba", hidden=hidden, n_layers=found["num_hidden_layers"], nheads=nheads, headdim=headdim,
        dstate=found["mamba_d_state"], ngroups=found["mamba_n_groups"], width=found["mamba_d_conv"],
        chunk_size=found["mamba_chunk_size"], vocab=found["vocab_size"], eps=float(found.get("rms_norm_eps", 1e-5)),
        dt_limit=_limit(at, found.get("time_step_limit")), biases=bool(found.get("mamba_proj_bias", False)),
        conv_bias=bool(found.get("mamba_conv_bias", True)), context=found["max_position_embeddings"],
        tied=bool(found.get("tie_word_embeddings", False)), stops=stops, begin=begin,
        attention_layers=_attention_layers(at, found), n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim,
        rotary=head_dim // 2, theta=theta, scaling=scaling, ffn=found["intermediate_size"],
    ))  # fmt: skip


def _attention_layers(at, found):
    n = found["num_hidden_layers"]
    indices = found.get("attn_layer_indices") or []
    good = isinstance(indices, list) and all(type(i) is int and 0 <= i < n for i in indices)
    if not good or len(set(indices)) != len(indices):
        raise BadModel(f"{at}: attn_layer_indices must be different whole numbers from 0 to {n - 1}, got {indices}")
    return tuple(sorted(indices))


def _expect_values(at, found, wanted):
    """What would be computed otherwise than here is refused by name."""
    for name, value in wanted.items():
        if found[name] != value:
            raise BadModel(f"{at}: {name} must be {_json(value)}, got {_json(found[name])}")


def _json(value):
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, list) else str(value)


def _expect_inner(at, inner, heads, headdim):
    if inner != heads * headdim:
        raise BadModel(
            f"{at}: heads times their width must be expand times hidden_size, got {heads} · {headdim} for {inner}"
        )


def _limit(at, limit):
    limit = [0.0, math.inf] if limit is None else limit
    good = isinstance(limit, (list, tuple)) and len(limit) == 2 and all(isinstance(v, (int, float)) for v in limit)
    if not good or not 0 <= limit[0] <= limit[1]:
        raise BadModel(f"{at}: the time step's limit must be [low, high], 0 <= low <= high, got {limit!r}")
    return tuple(map(float, limit))


def _checked(folder, c):
    """What no way to run offers is refused for all layouts at once."""
    if c.width not in WIDTHS:
        raise BadModel(f"{folder}/config.json: the convolution's width must be 2, 3 or 4, got {c.width}")
    if c.nheads % c.ngroups:
        raise BadModel(
            f"{folder}/config.json: heads must be a multiple of the groups of B and C, got {c.nheads} heads and "
            f"{c.ngroups} groups"
        )
    return c
