"""A Mamba-2 checkpoint's weights as models/mamba2.py names them, on a device."""

from types import SimpleNamespace

import torch

from kernels.rotary import rotary_order
from models import gpu_weights, mamba2_names
from models.weights import expect_finite


class Loader(gpu_weights.Loader):
    """Puts a checkpoint's tensors into their places on a device: matrices in 16 bits or few, norms and biases in the
    model's type, and what a block computes its steps with in float32."""

    def _all_fit(self):
        return False

    def _all(self):
        c, few = self.config, self.bits != 16
        embedding, layer, norm = mamba2_names.names(c)
        embedding = (self.taken if few and c.tied else self.take)(embedding)[0]
        layers = [self.layer(layer.format(index), index) for index in range(c.n_layers)]
        norm = self.vector(norm)
        if c.tied:
            head = self.counted(gpu_weights.quantized(embedding, self.bits) if few else embedding)
        else:
            head = self.matrix("lm_head.weight")[0]
        everything = {"embedding": embedding, "layers": layers, "norm": norm, "head": head}
        return SimpleNamespace(**everything, read_bytes=self.read_bytes)

    def layer(self, at, index):
        c = self.config
        norm, mixer = mamba2_names.layer_names(c)
        kind = "attention" if index in c.attention_layers else "mamba"
        layer = SimpleNamespace(kind=kind, norm=self.vector(at + norm))
        if kind == "attention":
            layer.Wqkv = self.attention_matrix(*(f"{at}self_attn.{name}_proj.weight" for name in "qkv"))
            layer.Wq, layer.Wk, layer.Wv = (
                layer.Wqkv.split((c.q_rows, c.kv_rows, c.kv_rows)) if self.bits == 16 else [None] * 3
            )
            layer.Wo = self.matrix(at + "self_attn.o_proj.weight")[0]
        else:
            self.block(layer, at + mixer)
        if c.ffn:
            layer.ffn_norm = self.vector(at + "pre_ff_layernorm.weight")
            names = (f"{at}feed_forward.{name}_proj.weight" for name in ("gate", "up"))
            layer.W_glu, (layer.W_gate, layer.W_up) = self.matrix(*names)
            layer.W_down = self.matrix(at + "feed_forward.down_proj.weight")[0]
        return layer

    def block(self, layer, at):
        c = self.config
        layer.W_in, layer.b_in = self.matrix(at + "in_proj.weight")[0], None
        layer.conv_weight = self.constant(at + "conv1d.weight")[:, 0].contiguous()
        layer.conv_bias = self.constant(at + "conv1d.bias") if c.conv_bias else None
        layer.dt_bias, layer.D = self.constant(at + "dt_bias"), self.constant(at + "D")
        layer.A = -self.constant(at + "A_log").exp()
        layer.gated_norm, layer.W_out = self.vector(at + "norm.weight"), self.matrix(at + "out_proj.weight")[0]
        layer.b_out = None
        if c.biases:
            layer.b_in, layer.b_out = self.vector(at + "in_proj.bias"), self.vector(at + "out_proj.bias")

    def constant(self, name):
        """A small tensor in float32, there at once."""
        tensor = self.checkpoint[name]
        expect_finite(name, tensor)
        self.progress(tensor.nbytes)
        return self.counted(tensor.float().to(self.device))

    def attention_matrix(self, *names):
        """Rows of queries, keys and values as one matrix, those of q and k in kernels.rotary.rotary_order."""
        joined = self.taken(*names)[0][self.order]
        return self.counted(joined if self.bits == 16 else gpu_weights.quantized(joined, self.bits))

    @property
    def order(self):
        c = self.config
        return qkv_order(c).to(self.device)


def qkv_order(config):
    """Rows of Wq, Wk and Wv, one above another, as the model keeps them: (q_rows + 2 · kv_rows,) int64."""
    c = config
    q, k = (rotary_order(heads, c.head_dim, c.rotary) for heads in (c.n_heads, c.n_kv_heads))
    v = torch.arange(c.q_rows + c.kv_rows, c.q_rows + 2 * c.kv_rows)
    return torch.cat([torch.from_numpy(q), torch.from_numpy(k) + c.q_rows, v])
