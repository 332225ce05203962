"""One token of a language model as launches: from a token and a length that lie on the card to the logits, also there.

    Step              16 bits, fused: norms, GLU and additions in the products (chapter 05)
    FewBits           the same for weights of 8 and 4 bits
    OneOperationEach  every operation a launch of its own; in 16 bits, or fewer
    TorchOperations   the same by PyTorch's operations, for a length that is known on the host

Steps 1 to 9 of ref.llm. A Step owns what lies between its launches; weights and cache are given. All launches but the
first are dependent ones (PDL) where that is asked for: attention reads the length at once, before it waits, and what
writes the length comes before the first launch.

    weights   .embedding (vocab, hidden), .norm (hidden,), .head (vocab, hidden), .layers: each with attention_norm,
              ffn_norm (hidden,), Wqkv and its parts Wq, Wk, Wv, Wo, W_glu and its parts W_gate, W_up, W_down; bias_rows
              (n_heads + 2 · n_kv_heads, head_dim), q_norm and k_norm (head_dim,), or None. In 16 bits tensors; in fewer
              kernels.lowbit.QuantizedWeight, without parts, and W_glu a kernels.lowbit.fused.Paired for FewBits
    cache     .layer(index): keys and values, as kernels.llm.rope_append and attention take them
    config    hidden, n_heads, n_kv_heads, head_dim, ffn, vocab, eps, theta and scaling (kernels/rotary.py)
"""

import functools

import torch
import torch.nn.functional as F

from kernels import attention, fusion, gemv, kv_cache, llm, lowbit
from kernels.lowbit import fused
from kernels.rotary import rope_frequencies


class Step:
    """Five launches a layer, and two for the model. Seven a layer without one_attention, or where attention in one
    launch is not offered, or not the better way (kernels.llm.attends).

    token (1,) int64 and kv_len (1,) int32, tokens in the cache with this one: written by the caller. logits (vocab,).
    """

    beside = False  # whether blocks of attention, with PDL, leave room for other launches' blocks beside them

    def __init__(self, config, weights, dtype, device, *, pdl=True, one_attention=True):
        self.config, self.weights, self.pdl, self.one_attention = config, weights, pdl, one_attention
        self.device = torch.device(device)
        frequencies = torch.from_numpy(rope_frequencies(config.head_dim, config.theta, config.scaling))
        self.turns = (frequencies / (2 * torch.pi)).to(self.device)
        make = lambda *shape, dtype=dtype: torch.zeros(shape, dtype=dtype, device=self.device)  # noqa: E731
        self.token, self.kv_len = make(1, dtype=torch.int64), make(1, dtype=torch.int32)
        self.state = make(2, dtype=torch.int64)  # of `choose`
        heads = config.n_heads + 2 * config.n_kv_heads
        self.x, self.h, self.normed, self.part = (make(config.hidden) for _ in range(4))
        self.qkv, self.q = make(heads * config.head_dim), make(1, config.n_heads, config.head_dim)
        self.mixed, self.logits = torch.empty_like(self.q), make(config.vocab)
        self.glu, self.gate_up = make(config.ffn), make(2 * config.ffn)

    def launch(self, cache):
        """From self.token, at position self.kv_len - 1, to self.logits; its keys and values go into the cache."""
        self.begin()
        for index, layer in enumerate(self.weights.layers):
            self.project(layer)
            self.attend(layer, *cache.layer(index))
            self.back(layer)
            self.feed(layer)
            self.down(layer)
        self.end()

    def parts(self, cache):
        """The launches of the beginning, the first layer and the end, each a call: what they compile can be compiled
        side by side, ahead of the first token."""
        layer = self.weights.layers[0]
        yield from (self.begin, self.end, functools.partial(self.attend, layer, *cache.layer(0)))
        for part in (self.project, self.back, self.feed, self.down):
            yield functools.partial(part, layer)

    def begin(self):
        """Step 1. Not a dependent launch: see above."""
        llm.embed(self.weights.embedding, self.token, out=self.x)

    def project(self, layer):
        """Step 2."""
        matrices = (layer.Wq, layer.Wk, layer.Wv)
        fusion.norm_qkv(self.x, layer.attention_norm, *matrices, self.config.eps, out=self.qkv, pdl=self.pdl)

    def attend(self, layer, keys, values):
        """Steps 3 to 5: one launch, or three."""
        if self.one_attention and self._attends(keys):
            self._place(llm.attend, layer, keys, values, self.mixed[0], beside=self.beside and self.pdl)
        else:
            self.rotate(layer, keys, values)
            self.mix(keys, values)

    def _attends(self, keys):
        c = self.config
        return isinstance(keys, torch.Tensor) and llm.attends(
            c.n_heads, c.n_kv_heads, c.head_dim, len(keys), self.device
        )

    def rotate(self, layer, keys, values):
        """Steps 3 and 4."""
        self._place(llm.rope_append, layer, keys, values, self.q[0])

    def _place(self, launch, layer, keys, values, out, **options):
        c = self.config
        launch(
            self.qkv.view(-1, c.head_dim), self.turns, self.kv_len, keys, values, bias=layer.bias_rows,
            q_norm=layer.q_norm, k_norm=layer.k_norm, eps=c.eps, out=out, pdl=self.pdl, **options,
        )  # fmt: skip

    def mix(self, keys, values):
        """Step 5: two launches."""
        if isinstance(keys, torch.Tensor):
            keys, values, decode = keys[None], values[None], attention.decode
        else:
            decode = kv_cache.decode
        decode(self.q, keys, values, kv_lens=self.kv_len, out=self.mixed, pdl=self.pdl)

    def back(self, layer):
        """Step 6."""
        fusion.gemv_residual(layer.Wo, self.mixed.view(-1), self.x, out=self.h, pdl=self.pdl)

    def feed(self, layer):
        """Step 7."""
        fusion.norm_glu(
            self.h, layer.ffn_norm, layer.W_gate, layer.W_up, self.config.eps, out=self.glu, pdl=self.pdl
        )  # fmt: skip

    def down(self, layer):
        """Step 8."""
        fusion.down_residual(layer.W_down, self.glu, self.h, out=self.x, pdl=self.pdl)

    def end(self):
        """Step 9: the head is three matrices to a kernel that wants three."""
        third = self.config.vocab // 3
        parts = self.weights.head.split((self.config.vocab - 2 * third, third, third))
        fusion.norm_qkv(self.x, self.weights.norm, *parts, self.config.eps, out=self.logits, pdl=self.pdl)

    def choose(self):
        """The likeliest token becomes self.token, and self.kv_len counts it."""
        llm.greedy(self.logits, self.token, self.kv_len, self.state, pdl=self.pdl)

    def norm(self, x, weight):
        """self.normed = RMSNorm of x."""
        fusion.rmsnorm(x, weight, self.config.eps, out=self.normed, pdl=self.pdl)

    def product(self, W, x, out):
        """out = W x, W in 16 bits or fewer."""
        (lowbit if isinstance(W, lowbit.QuantizedWeight) else gemv).gemv(W, x, out=out, pdl=self.pdl)


class FewBits(Step):
    """As many launches, of products in few bits, whose neighbours' blocks share multiprocessors."""

    beside = True

    def project(self, layer):
        fused.norm_gemv(layer.Wqkv, self.x, layer.attention_norm, self.config.eps, out=self.qkv, pdl=self.pdl)

    def back(self, layer):
        fused.gemv_residual(layer.Wo, self.mixed.view(-1), self.x, out=self.h, pdl=self.pdl)

    def feed(self, layer):
        pairs = layer.W_glu.weight
        fused.norm_glu(pairs, self.h, layer.ffn_norm, self.config.eps, out=self.glu, pdl=self.pdl)

    def down(self, layer):
        fused.gemv_residual(layer.W_down, self.glu, self.h, out=self.x, pdl=self.pdl)

    def end(self):
        weights = self.weights
        fused.norm_gemv(weights.head, self.x, weights.norm, self.config.eps, out=self.logits, pdl=self.pdl)


class OneOperationEach(Step):
    """Twelve launches a layer, and one more for each product in few bits whose columns are split."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options, one_attention=False)

    def project(self, layer):
        self.norm(self.x, layer.attention_norm)
        self.product(layer.Wqkv, self.normed, self.qkv)

    def back(self, layer):
        self.product(layer.Wo, self.mixed.view(-1), self.part)
        fusion.add(self.x, self.part, out=self.h, pdl=self.pdl)

    def feed(self, layer):
        ffn = self.config.ffn
        self.norm(self.h, layer.ffn_norm)
        self.product(layer.W_glu, self.normed, self.gate_up)
        fusion.silu_mul(self.gate_up[:ffn], self.gate_up[ffn:], out=self.glu, pdl=self.pdl)

    def down(self, layer):
        self.product(layer.W_down, self.glu, self.part)
        fusion.add(self.h, self.part, out=self.x, pdl=self.pdl)

    def end(self):
        self.norm(self.x, self.weights.norm)
        self.product(self.weights.head, self.normed, self.logits)


class TorchOperations(OneOperationEach):
    """PyTorch's own kernels, in 16 bits, without biases and norms of heads. `length`: what kv_len holds, on the host,
    as each of these operations is told its sizes from there."""

    def __init__(self, *args, length, **options):
        super().__init__(*args, **options)
        self.length = length
        turn = (length - 1) * self.turns
        angle = 2 * torch.pi * (turn - turn.floor())
        self.cos, self.sin = angle.cos().to(self.x.dtype), angle.sin().to(self.x.dtype)

    def begin(self):
        torch.index_select(self.weights.embedding, 0, self.token, out=self.x.view(1, -1))

    def project(self, layer):
        self.norm(self.x, layer.attention_norm)
        self.product(layer.Wqkv, self.normed, self.qkv)

    def rotate(self, layer, keys, values):
        c, at = self.config, self.length - 1
        q, k, v = self.qkv.view(-1, c.head_dim).split((c.n_heads, c.n_kv_heads, c.n_kv_heads))
        self.q.copy_(self.turned(q))
        keys[at], values[at] = self.turned(k), v

    def turned(self, x):
        a, b = x.chunk(2, dim=1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), dim=1)

    def mix(self, keys, values):
        k, v = (t[None, : self.length].transpose(1, 2) for t in (keys, values))
        found = F.scaled_dot_product_attention(self.q.transpose(0, 1)[None], k, v, enable_gqa=True)
        self.mixed.copy_(found[0].transpose(0, 1))

    def back(self, layer):
        torch.addmv(self.x, layer.Wo, self.mixed.view(-1), out=self.h)

    def feed(self, layer):
        ffn = self.config.ffn
        self.norm(self.h, layer.ffn_norm)
        self.product(layer.W_glu, self.normed, self.gate_up)
        torch.mul(F.silu(self.gate_up[:ffn]), self.gate_up[ffn:], out=self.glu)

    def down(self, layer):
        torch.addmv(self.h, layer.W_down, self.glu, out=self.x)

    def norm(self, x, weight):
        self.normed.copy_(F.rms_norm(x, weight.shape, weight, self.config.eps))

    def product(self, W, x, out):
        torch.mv(W, x, out=out)


def best(weights):
    """The class whose launches are fewest for these weights."""
    layer = weights.layers[0]
    if isinstance(layer.Wqkv, torch.Tensor):
        return Step
    return FewBits if isinstance(layer.W_glu, fused.Paired) else OneOperationEach
