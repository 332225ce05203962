"""A Mamba-2's folder as the reference wants it: for small models, as models/reference.py does for the Llama family.

ref.mamba2.logits(reference(folder), tokens)
"""

import numpy as np

import ref.mamba2
from models import mamba2_names
from models.config import read_config
from models.weights import Checkpoint


def reference(folder):
    """The ref.mamba2.Model of a folder, its numbers in float64. BadModel as for models.load."""
    config = read_config(folder)
    embedding, layer, norm = mamba2_names.names(config)
    with Checkpoint(folder, config) as checkpoint:

        def array(name):
            return checkpoint[name].double().numpy()

        layers = []
        for index in range(config.n_layers):
            at = layer.format(index)
            found = {name: array(at + name) for name in mamba2_names.layer_shapes(config, index)}
            layers.append(_layer(config, found))
        embedding, norm = array(embedding), array(norm)
        head = embedding if config.tied else array("lm_head.weight")
    return ref.mamba2.Model(config, embedding, layers, norm, head)


def _layer(config, found):
    """A ref.mamba2.Layer of one layer's arrays by their names in the checkpoint."""
    norm, at = mamba2_names.layer_names(config)
    if "self_attn.q_proj.weight" in found:
        matrices = {f"W{name}": found[f"self_attn.{name}_proj.weight"] for name in "qkvo"}
        mixer = ref.mamba2.Attention(attention_norm=found[norm], **matrices)
    else:
        mixer = ref.mamba2.Block(
            W_in=found[at + "in_proj.weight"], conv_weight=found[at + "conv1d.weight"][:, 0],
            conv_bias=found.get(at + "conv1d.bias"), dt_bias=found[at + "dt_bias"], A=-np.exp(found[at + "A_log"]),
            D=found[at + "D"], gated_norm=found[at + "norm.weight"], W_out=found[at + "out_proj.weight"],
            b_in=found.get(at + "in_proj.bias"), b_out=found.get(at + "out_proj.bias"),
        )  # fmt: skip
    feed = {f"W_{name}": found.get(f"feed_forward.{name}_proj.weight") for name in ("gate", "up", "down")}
    return ref.mamba2.Layer(found[norm], mixer, found.get("pre_ff_layernorm.weight"), **feed)
