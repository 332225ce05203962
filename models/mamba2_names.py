"""What a Mamba-2 checkpoint's weights are called, and their shapes, in each layout of models/mamba2_config.py."""

from models.reading import BadModel


def names(config):
    """(embedding, a layer's beginning with {} for its index, last norm) of a layout."""
    if config.layout == "bamba":
        return "model.embed_tokens.weight", "model.layers.{}.", "model.final_layernorm.weight"
    embedding = "embedding" if config.layout == "state-spaces" else "embeddings"
    return f"backbone.{embedding}.weight", "backbone.layers.{}.", "backbone.norm_f.weight"


def layer_names(config):
    """(norm, mixer's beginning) within a layer with a Mamba-2 block."""
    return ("input_layernorm.weight", "mamba.") if config.layout == "bamba" else ("norm.weight", "mixer.")


def layer_shapes(config, index):
    """{name in a layer: shape}."""
    c = config
    norm, mixer = layer_names(c)
    shapes = {norm: (c.hidden,)}
    if index in c.attention_layers:
        rows = {"q": c.q_rows, "k": c.kv_rows, "v": c.kv_rows}
        shapes |= {f"self_attn.{name}_proj.weight": (count, c.hidden) for name, count in rows.items()}
        shapes["self_attn.o_proj.weight"] = (c.hidden, c.q_rows)
    else:
        shapes |= {
            mixer + "in_proj.weight": (c.in_rows, c.hidden),
            mixer + "conv1d.weight": (c.channels, 1, c.width),
            **{mixer + name: (c.nheads,) for name in ("dt_bias", "A_log", "D")},
            mixer + "norm.weight": (c.d_inner,),
            mixer + "out_proj.weight": (c.hidden, c.d_inner),
        }
        if c.conv_bias:
            shapes[mixer + "conv1d.bias"] = (c.channels,)
        if c.biases:
            shapes |= {mixer + "in_proj.bias": (c.in_rows,), mixer + "out_proj.bias": (c.hidden,)}
    if c.ffn:
        shapes["pre_ff_layernorm.weight"] = (c.hidden,)
        shapes |= {f"feed_forward.{name}_proj.weight": (c.ffn, c.hidden) for name in ("gate", "up")}
        shapes["feed_forward.down_proj.weight"] = (c.hidden, c.ffn)
    return shapes


def all_shapes(config):
    """{name: shape} of every tensor of a checkpoint."""
    embedding, layer, norm = names(config)
    shapes = {embedding: (config.vocab, config.hidden)}
    for index in range(config.n_layers):
        shapes |= {layer.format(index) + name: shape for name, shape in layer_shapes(config, index).items()}
    shapes[norm] = (config.hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab, config.hidden)
    return shapes


def expect_layers(folder, config, stored):
    """Raise BadModel where the weights of a layer are of the other kind than the list of attention layers says."""
    layer = names(config)[1]
    for index in range(config.n_layers if config.kind == "bamba" else 0):
        said, other = (
            ("attention", "mamba.in_proj") if index in config.attention_layers else ("Mamba", "self_attn.q_proj")
        )
        if (name := f"{layer.format(index)}{other}.weight") in stored:
            raise BadModel(f"{folder}: layer {index} must be {said} by attn_layer_indices, and its weights are {name}")
