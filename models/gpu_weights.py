"""A checkpoint's weights on a card: in 16 bits, or quantised to 8 or 4 as they are read."""

from types import SimpleNamespace

import torch

from kernels import lowbit
from kernels.lowbit import fused
from models.upload import Upload
from models.weights import expect_finite


def quantized(W, bits):
    """A matrix in 8 bits, a scale for each row, or in 4, a scale and a zero for each 128 columns (64 or 32 where those
    do not divide a row)."""
    return lowbit.quantize(W, bits, group_of(W.shape[1], bits))


def group_of(cols, bits):
    """Columns that share a scale; None: all of them."""
    return None if bits == 8 else next((g for g in (128, 64, 32) if cols % g == 0), None)


class Loader:
    """Puts a checkpoint's tensors into their places on a device, one after another."""

    def __init__(self, config, checkpoint, progress, dtype, bits, device):
        self.config, self.checkpoint, self.progress = config, checkpoint, progress
        self.dtype, self.bits, self.device = dtype, bits, device
        self.read_bytes = 0  # of weights that a step reads
        self.upload, self.coming = None, []  # to a card; what is on its way: (name, as it is stored, its place)
        self.fused = bits != 16 and self._all_fit()

    def _all_fit(self):
        """Whether the fused products in few bits take all of this model's matrices."""
        c = self.config
        shapes = (c.q_rows + 2 * c.kv_rows, c.hidden), (c.hidden, c.q_rows), (2 * c.ffn, c.hidden), (c.hidden, c.ffn)
        shapes += ((c.vocab, c.hidden),)
        fit = [fused.fits(s, self.bits, group_of(s[1], self.bits), self.dtype, self.device) for s in shapes]
        return all(fit) and c.ffn % fused.HALF_TILE == 0

    def all(self):
        """What models.prefill says; and parts of joined matrices by their own names, for the steps."""
        if self.device.type != "cuda":
            return self._all()
        with torch.cuda.device(self.device), Upload(self.device, self.progress) as self.upload:
            found = self._all()
            self.arrive()
        return found

    def _all(self):
        c, few = self.config, self.bits != 16
        embedding = (self.taken if few and c.tied else self.take)("model.embed_tokens.weight")[0]
        layers = [self.layer(f"model.layers.{index}.") for index in range(c.n_layers)]
        norm = self.counted(self.take("model.norm.weight")[0])
        if c.tied:
            head = self.counted(quantized(embedding, self.bits) if few else embedding)
        else:
            head = self.matrix("lm_head.weight")[0]
        everything = {"embedding": embedding, "layers": layers, "norm": norm, "head": head}
        return SimpleNamespace(**everything, read_bytes=self.read_bytes)

    def layer(self, at):
        projections = [f"{at}self_attn.{name}_proj" for name in "qkv"]
        layer = SimpleNamespace(bqkv=None, bias_rows=None, q_norm=None, k_norm=None)
        layer.attention_norm = self.vector(at + "input_layernorm.weight")
        layer.Wqkv, (layer.Wq, layer.Wk, layer.Wv) = self.matrix(*(name + ".weight" for name in projections))
        if self.config.biases:
            layer.bqkv = self.vector(*(name + ".bias" for name in projections))
            layer.bias_rows = layer.bqkv.view(-1, self.config.head_dim)
        if self.config.head_norms:
            layer.q_norm, layer.k_norm = (self.vector(f"{at}self_attn.{name}_norm.weight") for name in "qk")
        layer.Wo = self.matrix(at + "self_attn.o_proj.weight")[0]
        layer.ffn_norm = self.vector(at + "post_attention_layernorm.weight")
        names = at + "mlp.gate_proj.weight", at + "mlp.up_proj.weight"
        if self.fused:
            pairs = fused.paired(self.taken(*names)[0])
            layer.W_glu = self.counted(fused.Paired(quantized(pairs, self.bits)))
        else:
            layer.W_glu, (layer.W_gate, layer.W_up) = self.matrix(*names)
        layer.W_down = self.matrix(at + "mlp.down_proj.weight")[0]
        return layer

    def vector(self, *names):
        return self.counted(self.take(*names)[0])

    def matrix(self, *names):
        """Matrices one above another, as one, in the bits that were asked for; and in 16 bits each of them, else
        None."""
        if self.bits == 16:
            joined, parts = self.take(*names)
            return self.counted(joined), parts
        joined, parts = self.taken(*names)
        return self.counted(quantized(joined, self.bits)), [None] * len(parts)

    def counted(self, weights):
        self.read_bytes += weights.nbytes
        return weights

    def take(self, *names):
        """Tensors one above another, as one; and each of them."""
        shapes = [self.checkpoint.shape(name) for name in names]
        joined = torch.empty((sum(s[0] for s in shapes), *shapes[0][1:]), dtype=self.dtype, device=self.device)
        parts = joined.split([shape[0] for shape in shapes])
        for name, part in zip(names, parts):
            self.put(name, part)
        return joined, parts

    def taken(self, *names):
        """The same, and there."""
        found = self.take(*names)
        self.arrive()
        return found

    def put(self, name, place):
        """Copy a tensor to its place, or begin to: see `arrive`."""
        tensor = self.checkpoint[name]  # mapped, and not yet read
        if self.upload is None:
            expect_finite(name, tensor)
            place.copy_(tensor)
            if tensor.dtype != self.dtype:
                expect_finite(f"{name}, as {self.dtype}", place)
            self.progress(tensor.nbytes)
            return
        there = place if tensor.dtype == self.dtype else torch.empty_like(place, dtype=tensor.dtype)
        self.upload.copy(self.checkpoint.place(name), there)
        self.coming.append((name, there, place))

    def arrive(self):
        """Until all that was put has arrived, and is found to be finite: a sum that is not says where to look."""
        if self.upload is None:
            return
        self.upload.wait()
        coming, self.coming = self.coming, []
        for _, there, place in coming:
            if there is not place:
                place.copy_(there)
        arrived = [t for _, there, place in coming for t in ([there] if there is place else [there, place])]
        sums = [t.sum(dtype=torch.float32) for t in arrived]
        if sums and not torch.isfinite(torch.stack(sums)).all():
            for name, there, place in coming:
                expect_finite(name, there)
                expect_finite(f"{name}, as {self.dtype}", place)
