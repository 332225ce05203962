"""A folder's weights as the reference wants them: for small models, that others are held to it, or it writes itself.

ref.llm.logits(reference(folder), tokens)
"""

import ref.llm
from models.config import read_config
from models.weights import Checkpoint, layer_shapes


def reference(folder):
    """The ref.llm.Model of a folder, its numbers in float64. BadModel as for models.load."""
    config = read_config(folder)
    with Checkpoint(folder, config) as checkpoint:

        def array(name):
            return checkpoint[name].double().numpy()

        layers = []
        for index in range(config.n_layers):
            found = {name: array(f"model.layers.{index}.{name}") for name in layer_shapes(config)}
            layers.append(ref.llm.Layer(**{NAMES[name]: weights for name, weights in found.items()}))
        embedding, norm = array("model.embed_tokens.weight"), array("model.norm.weight")
        head = embedding if config.tied else array("lm_head.weight")
    return ref.llm.Model(config, embedding, layers, norm, head)


NAMES = {  # in a layer, Hugging Face's: the reference's
    "input_layernorm.weight": "attention_norm",
    "post_attention_layernorm.weight": "ffn_norm",
    **{f"self_attn.{name}_proj.weight": f"W{name}" for name in "qkvo"},
    **{f"self_attn.{name}_proj.bias": f"b{name}" for name in "qkv"},
    **{f"self_attn.{name}_norm.weight": f"{name}_norm" for name in "qk"},
    **{f"mlp.{name}_proj.weight": f"W_{name}" for name in ("gate", "up", "down")},
}
