"""A decoder layer without attention, step by step from 12 launches to one."""

import torch
from torch.compiler import is_dynamo_compiling

from kernels.fusion.arguments import expect_eps, expect_vector
from kernels.fusion.launches import MAX_THREADS, VEC, layer_plan, module
from kernels.fusion.operators import add, down_residual, gemv_residual, norm_glu, norm_qkv, rmsnorm, silu_mul
from kernels.gemv import gemv
from lab.tensors import expect, memory


class DecoderLayer:
    """A Llama-style decoder layer for one token, without attention: the queries stand in for attention's output.

    attention_norm, ffn_norm (hidden,), Wq, Wo (hidden, hidden), Wk, Wv (kv_rows, hidden), W_gate, W_up (ffn, hidden),
    W_down (hidden, ffn)

    unfused(x), fused(x), one_launch(x) → y (hidden,); self.qkv (hidden + 2 · kv_rows,) then holds what attention would
    be given. All write to the same buffers at every call, so that a CUDA graph can replay them: copy what is to stay.
    x must not be one of those buffers, such as the last call's y.
    """

    names = "attention_norm Wq Wk Wv Wo ffn_norm W_gate W_up W_down".split()

    def __init__(self, attention_norm, Wq, Wk, Wv, Wo, ffn_norm, W_gate, W_up, W_down, eps=1e-5):
        expect_vector("DecoderLayer", "attention_norm", attention_norm)
        hidden = len(attention_norm)
        for name, value, rows in (("Wk", Wk, "kv_rows"), ("W_gate", W_gate, "ffn")):  # they say how many rows
            expect("DecoderLayer", name, value, attention_norm, (rows, hidden))
        kv_rows, ffn = len(Wk), len(W_gate)
        shapes = {"Wq": (hidden, hidden), "Wv": (kv_rows, hidden), "Wo": (hidden, hidden), "ffn_norm": (hidden,)}
        shapes |= {"W_up": (ffn, hidden), "W_down": (hidden, ffn)}
        for (name, shape), value in zip(shapes.items(), (Wq, Wv, Wo, ffn_norm, W_up, W_down)):
            expect("DecoderLayer", name, value, attention_norm, shape)
        expect_eps("DecoderLayer", eps)
        self.attention_norm, self.ffn_norm, self.eps = attention_norm, ffn_norm, eps
        self.Wq, self.Wk, self.Wv, self.Wo = Wq, Wk, Wv, Wo
        self.W_gate, self.W_up, self.W_down = W_gate, W_up, W_down
        self.qkv, self.gate, self.up, self.a, self.normed, self.product, self.h, self.y = (
            attention_norm.new_empty(n) for n in (hidden + 2 * kv_rows, ffn, ffn, ffn, hidden, hidden, hidden, hidden)
        )
        self.barrier = torch.zeros(1, dtype=torch.int32, device=attention_norm.device)
        self.q, self.k, self.v = self.qkv.split([hidden, kv_rows, kv_rows])
        second_half = "normed gate up a product y".split()
        self._written = {"h": [(name, *memory(getattr(self, name))) for name in second_half]}
        self._written["x"] = self._written["h"] + [(name, *memory(getattr(self, name))) for name in ("qkv", "h")]

    def unfused(self, x, *, pdl=False):
        """Every operation a launch: 12 of them."""
        self._expect_input("unfused", "x", x)
        rmsnorm(x, self.attention_norm, self.eps, out=self.normed, pdl=pdl)  # 1
        gemv(self.Wq, self.normed, out=self.q, pdl=pdl)
        gemv(self.Wk, self.normed, out=self.k, pdl=pdl)
        gemv(self.Wv, self.normed, out=self.v, pdl=pdl)
        gemv(self.Wo, self.q, out=self.product, pdl=pdl)  # 2
        add(x, self.product, out=self.h, pdl=pdl)
        return self.unfused_feed_forward(self.h, pdl=pdl)

    def unfused_feed_forward(self, h, *, pdl=False):
        """The second half alone, h (hidden,) → y (hidden,): 6 launches."""
        self._expect_input("unfused_feed_forward", "h", h)
        rmsnorm(h, self.ffn_norm, self.eps, out=self.normed, pdl=pdl)  # 3
        gemv(self.W_gate, self.normed, out=self.gate, pdl=pdl)
        gemv(self.W_up, self.normed, out=self.up, pdl=pdl)
        silu_mul(self.gate, self.up, out=self.a, pdl=pdl)
        gemv(self.W_down, self.a, out=self.product, pdl=pdl)  # 4
        return add(h, self.product, out=self.y, pdl=pdl)

    def fused(self, x, *, pdl=False):
        """Every product a launch, and nothing besides: 4 of them."""
        self._expect_input("fused", "x", x)
        norm_qkv(x, self.attention_norm, self.Wq, self.Wk, self.Wv, self.eps, out=self.qkv, pdl=pdl)  # 1
        gemv_residual(self.Wo, self.q, x, out=self.h, pdl=pdl)  # 2
        return self.feed_forward(self.h, pdl=pdl)

    def feed_forward(self, h, *, pdl=False):
        """The second half alone, h (hidden,) → y (hidden,): 2 launches."""
        self._expect_input("feed_forward", "h", h)
        norm_glu(h, self.ffn_norm, self.W_gate, self.W_up, self.eps, out=self.a, pdl=pdl)  # 3
        return down_residual(self.W_down, self.a, h, out=self.y, pdl=pdl)  # 4

    def work(self):
        """(bytes, flops) that one token must move and do in this layer: every weight once, two flops for each."""
        weights = [self.Wq, self.Wk, self.Wv, self.Wo, self.W_gate, self.W_up, self.W_down]
        vectors = 2 * self.y.nbytes + self.qkv.nbytes + self.attention_norm.nbytes + self.ffn_norm.nbytes
        return sum(W.nbytes for W in weights) + vectors, 2 * sum(W.numel() for W in weights)

    def feed_forward_work(self):
        """The same for the second half."""
        weights = [self.W_gate, self.W_up, self.W_down]
        return sum(W.nbytes for W in weights) + 3 * self.y.nbytes, 2 * sum(W.numel() for W in weights)

    def _expect_input(self, where, name, x):
        """Raise unless x, or h for the second half alone, can go in: it must still be there when it is read again."""
        if is_dynamo_compiling():
            return  # there is no memory yet; the operators look at their tensors themselves
        expect(where, name, x, self.attention_norm, (len(self.attention_norm),))
        x_begin, x_end = memory(x)
        for buffer, begin, end in self._written[name]:
            if begin < x_end and x_begin < end:
                raise ValueError(f"{where}: {name} must not be a buffer that the layer writes to, got its {buffer}")

    def one_launch(self, x, *, pdl=False):
        """The whole layer in a single launch, with barriers of the whole grid instead of launches: see layer.cu.

        hidden and ffn must be multiples of 8, at most 8192 and 16384, all addresses of 16. The sums of a block must fit
        in its shared memory: on the SIMT machine, which has 8 blocks for this kernel, up to an ffn of about 11000.
        The kernel takes the whole card: never run two at a time, on two streams, as each would wait for blocks that the
        other keeps out. Not for torch.compile, which takes `fused`.
        """
        if is_dynamo_compiling():
            raise RuntimeError("one_launch: torch.compile cannot take a launch with barriers of its own; fused it can")
        self._expect_input("one_launch", "x", x)
        hidden, kv_rows, ffn = len(self.attention_norm), len(self.Wk), len(self.W_gate)
        weights = (self.attention_norm, self.Wq, self.Wk, self.Wv, self.Wo, self.ffn_norm)
        weights += (self.W_gate, self.W_up, self.W_down)
        if hidden % VEC or ffn % VEC or hidden > 2 * MAX_THREADS * VEC or ffn > 4 * MAX_THREADS * VEC:
            raise ValueError(
                "one_launch: hidden and ffn must be multiples of 8, at most 8192 and 16384, "
                f"got hidden {hidden} and ffn {ffn}"
            )
        for name, tensor in zip(("x", *self.names), (x, *weights)):
            if tensor.data_ptr() % 16:
                raise ValueError(f"one_launch: {name} must start at a multiple of 16 bytes, got {tensor.data_ptr():#x}")
        grid, threads, shared, *sizes = layer_plan(x.device, hidden, kv_rows, ffn)
        args = (x, *weights, self.qkv, self.h, self.a, self.y, self.barrier, hidden, kv_rows, ffn, float(self.eps))
        try:
            module("layer", x.dtype, *sizes).layer(grid, threads, *args, shared=shared, pdl=pdl)
        except BaseException:
            if not x.is_cuda:
                self.barrier.zero_()  # a run of the SIMT machine that was interrupted has counted some of its blocks
            raise
        return self.y
