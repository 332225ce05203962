"""One token of a Mamba-2 model, or of a hybrid with attention layers, as launches: from a token and a length that lie
on the card to the logits, also there.

    Step              fused, 16 bits: three launches a Mamba-2 layer; with pdl, TMA brings the weights
    OneOperationEach  every operation a launch of its own, six a layer; weights in 16 bits, or fewer
    TorchOperations   the same by PyTorch's operations, for models without attention layers

A Step owns what lies between its launches; weights and state are given. All launches but the first are dependent ones
(PDL) where that is asked for: the states of a token are read before the wait, and what wrote them came before the
first launch of this one.

    config    hidden, vocab, eps, nheads, headdim, dstate, ngroups, d_inner, channels, dt_limit; attention_layers, and
              where there are any n_heads, n_kv_heads, head_dim, theta, scaling, rotary; ffn (0: no feed-forward block)
    weights   .embedding (vocab, hidden), .norm (hidden,), .head (vocab, hidden), .layers, each with .kind:
              "mamba"      norm (hidden,), W_in (d_inner + channels + nheads, hidden), conv_weight (channels, width),
                           conv_bias, dt_bias, A, D (nheads,), gated_norm (d_inner,), W_out (hidden, d_inner), and
                           b_in, b_out, biases of both or None
              "attention"  norm, Wqkv, Wo; rows of q and k such that number i of a head turns with i + head_dim/2
              and, with config.ffn, ffn_norm, W_glu of W_gate and W_up, W_down behind either
    state     .conv[i] (1, width - 1, channels), .ssm[i] (1, nheads, headdim, dstate), or a QuantizedState, of the i-th
              Mamba-2 layer; .cache.layer(i): keys and values of the i-th attention layer
"""

import functools

import torch
import torch.nn.functional as F

from kernels import attention, fusion, gemv, llm, lowbit, mamba2
from kernels.rotary import rope_frequencies


class Step:
    """token (1,) int64 and kv_len (1,) int32, tokens so far with this one: written by the caller. logits (vocab,).

    bulk  whether TMA brings what the products read (rows_ring.cuh); None: where launches are dependent
    """

    def __init__(self, config, weights, dtype, device, *, pdl=True, bulk=None):
        self.config, self.weights, self.pdl = config, weights, pdl
        self.device, hybrid = torch.device(device), bool(config.attention_layers)
        self.bulk = pdl if bulk is None else bulk
        make = lambda *shape, dtype=dtype: torch.zeros(shape, dtype=dtype, device=self.device)  # noqa: E731
        self.token, self.kv_len = make(1, dtype=torch.int64), make(1, dtype=torch.int32)
        self.state = make(2, dtype=torch.int64)  # of `choose`
        # Two attention models in three keep it in the weights' type, and so do their kernels
        self.residual = make(config.hidden, dtype=dtype if hybrid or config.ffn else torch.float32)
        c = config
        self.projected, self.mixed = make(c.d_inner + c.channels + c.nheads), make(c.d_inner)
        self.z, xBC, dt = self.projected.split((c.d_inner, c.channels, c.nheads))
        self.xBC, self.dt = xBC[None], dt[None]
        self.logits, self.normed, self.part = make(c.vocab), make(c.hidden), make(c.hidden)
        self.conv, self.gated = make(1, c.channels), make(c.d_inner)
        if hybrid:
            frequencies = torch.from_numpy(rope_frequencies(c.head_dim, c.theta, c.scaling, c.rotary))
            self.turns = (frequencies / (2 * torch.pi)).to(self.device)
            self.qkv = make((c.n_heads + 2 * c.n_kv_heads) * c.head_dim)
            self.q, self.heads = make(1, c.n_heads, c.head_dim), make(1, c.n_heads, c.head_dim)
        if config.ffn:
            self.glu, self.gate_up = make(c.ffn), make(2 * c.ffn)

    def launch(self, state):
        """From self.token to self.logits; the states move on by it."""
        for part in self.parts(state):
            part()

    def parts(self, state, once=False):
        """The launches, each a call. once: those of the first layer of each kind alone, which compile all that there
        is to compile."""
        yield self.begin
        seen, layers = {"mamba": 0, "attention": 0}, self.weights.layers
        for number, layer in enumerate(layers):
            index = seen[layer.kind]
            seen[layer.kind] += 1
            if once and index:
                continue
            if layer.kind == "mamba":
                conv, ssm = state.conv[index], state.ssm[index]
                yield functools.partial(self.enter, layer, conv)
                yield functools.partial(self.move, layer, ssm)
                yield functools.partial(self.leave, layer, self.first_matrix(layers, number + 1))
            else:
                yield functools.partial(self.project, layer)
                yield functools.partial(self.attend, layer, *state.cache.layer(index))
                yield functools.partial(self.back, layer)
            if self.config.ffn:
                yield functools.partial(self.feed, layer)
        yield self.end

    def first_matrix(self, layers, number):
        """What is multiplied with behind the layer in front of this one; behind the last layer, the head."""
        if self.config.ffn:
            return None
        if number == len(layers):
            return self.weights.head
        return layers[number].W_in if layers[number].kind == "mamba" else layers[number].Wqkv

    def begin(self):
        """Not a dependent launch: see above."""
        mamba2.embed(self.weights.embedding, self.token, out=self.residual)

    def enter(self, layer, conv):
        """z, x, B, C and dt of the token, the convolution's step and silu behind it."""
        mamba2.norm_in_proj(
            self.residual, layer.norm, layer.W_in, self.config.eps, bias=layer.b_in, conv_state=conv[0],
            conv_weight=layer.conv_weight, conv_bias=layer.conv_bias, inner=self.config.d_inner, bulk=self.bulk,
            out=self.projected, pdl=self.pdl,
        )  # fmt: skip

    def move(self, layer, ssm):
        """The state's step, and y · silu(z); of several groups the norm behind it, too, in a launch of its own."""
        if self.config.ngroups == 1:
            self.state_step(layer, ssm, self.xBC, self.z)
        else:
            self.state_step(layer, ssm, self.xBC, None)
            self.gate(layer)

    def state_step(self, layer, ssm, xBC, z):
        c = self.config
        x, B, C = xBC.split((c.d_inner, c.ngroups * c.dstate, c.ngroups * c.dstate), dim=1)
        heads = (1, c.nheads, c.headdim)
        mamba2.state_step(
            ssm, x.view(heads), self.dt, layer.A, B.view(1, c.ngroups, -1), C.view(1, c.ngroups, -1), D=layer.D,
            z=None if z is None else z.view(heads), dt_bias=layer.dt_bias, dt_softplus=True, dt_limit=c.dt_limit,
            out=self.mixed.view(heads), pdl=self.pdl,
        )  # fmt: skip

    def leave(self, layer, following):
        """The gated norm, out_proj and the residual stream. following: the matrix of the product behind it."""
        one = self.config.ngroups == 1
        y, norm = (self.mixed, layer.gated_norm) if one else (self.gated, None)
        mamba2.norm_out_proj(
            y, norm, layer.W_out, self.residual, self.config.eps, bias=layer.b_out, bulk=self.bulk,
            ahead=following, pdl=self.pdl,
        )  # fmt: skip

    def gate(self, layer):
        """The gated norm alone."""
        c = self.config
        mamba2.gated_norm(
            self.mixed[None], self.z[None], layer.gated_norm, c.eps, ngroups=c.ngroups, out=self.gated[None],
            pdl=self.pdl,
        )  # fmt: skip

    def project(self, layer):
        """Queries, keys and values."""
        mamba2.norm_in_proj(
            self.residual, layer.norm, layer.Wqkv, self.config.eps, bulk=self.bulk, out=self.qkv, pdl=self.pdl
        )  # fmt: skip

    def attend(self, layer, keys, values):
        """Positions, the cache, and attention."""
        c = self.config
        one = llm.attends(c.n_heads, c.n_kv_heads, c.head_dim, len(keys), self.device)
        (llm.attend if one else llm.rope_append)(
            self.qkv.view(-1, c.head_dim), self.turns, self.kv_len, keys, values, eps=c.eps,
            out=(self.heads if one else self.q)[0], pdl=self.pdl,
        )  # fmt: skip
        if not one:
            attention.decode(self.q, keys[None], values[None], kv_lens=self.kv_len, out=self.heads, pdl=self.pdl)

    def back(self, layer):
        mamba2.norm_out_proj(self.heads.view(-1), None, layer.Wo, self.residual, bulk=self.bulk, pdl=self.pdl)

    def feed(self, layer):
        """The feed-forward block, two launches."""
        matrices = layer.W_gate, layer.W_up
        fusion.norm_glu(self.residual, layer.ffn_norm, *matrices, self.config.eps, out=self.glu, pdl=self.pdl)
        mamba2.norm_out_proj(self.glu, None, layer.W_down, self.residual, bulk=self.bulk, pdl=self.pdl)

    def end(self):
        weights = self.weights
        mamba2.norm_in_proj(
            self.residual, weights.norm, weights.head, self.config.eps, bulk=self.bulk, out=self.logits, pdl=self.pdl,
        )  # fmt: skip

    def choose(self):
        """The likeliest token becomes self.token, and self.kv_len counts it."""
        llm.greedy(self.logits, self.token, self.kv_len, self.state, pdl=self.pdl)

    def norm(self, weight):
        """self.normed = RMSNorm of the residual stream."""
        mamba2.add_norm(None, self.residual[None], weight, self.config.eps, out=self.normed[None], pdl=self.pdl)

    def product(self, W, x, out):
        """out = W x, W in 16 bits or fewer."""
        (lowbit if isinstance(W, lowbit.QuantizedWeight) else gemv).gemv(W, x, out=out, pdl=self.pdl)


class OneOperationEach(Step):
    """Norm, product, convolution, state, gated norm, product, addition: seven launches a layer, and one more for each
    product in few bits whose columns are split."""

    def enter(self, layer, conv):
        self.norm(layer.norm)
        self.product(layer.W_in, self.normed, self.projected)
        if layer.b_in is not None:
            self.projected += layer.b_in
        mamba2.conv_step(conv, self.xBC, layer.conv_weight, layer.conv_bias, out=self.conv, pdl=self.pdl)

    def move(self, layer, ssm):
        self.state_step(layer, ssm, self.conv, None)

    def leave(self, layer, following):
        self.gate(layer)
        self.add(layer.W_out, self.gated, layer.b_out)

    def add(self, W, x, bias=None):
        self.product(W, x, self.part)
        if bias is not None:
            self.part += bias
        weights = self.weights.norm  # of whose norm nothing comes of here
        mamba2.add_norm(
            self.part[None], self.residual[None], weights, self.config.eps, out=self.normed[None], pdl=self.pdl
        )  # fmt: skip

    def project(self, layer):
        self.norm(layer.norm)
        self.product(layer.Wqkv, self.normed, self.qkv)

    def back(self, layer):
        self.add(layer.Wo, self.heads.view(-1))

    def feed(self, layer):
        ffn = self.config.ffn
        self.norm(layer.ffn_norm)
        self.product(layer.W_glu, self.normed, self.gate_up)
        fusion.silu_mul(self.gate_up[:ffn], self.gate_up[ffn:], out=self.glu, pdl=self.pdl)
        self.add(layer.W_down, self.glu)

    def end(self):
        self.norm(self.weights.norm)
        self.product(self.weights.head, self.normed, self.logits)


class TorchOperations(OneOperationEach):
    """PyTorch's own kernels, in 16 bits."""

    def begin(self):
        self.residual.copy_(self.weights.embedding[self.token][0])

    def norm(self, weight):
        x = self.residual.float()
        self.normed.copy_(F.rms_norm(x, x.shape, weight.float(), self.config.eps))

    def product(self, W, x, out):
        torch.mv(W, x, out=out)

    def enter(self, layer, conv):
        self.norm(layer.norm)
        self.product(layer.W_in, self.normed, self.projected)
        inputs = torch.cat((conv[0], self.xBC))
        conv[0].copy_(inputs[1:])
        sums = (inputs.float() * layer.conv_weight.T).sum(dim=0)
        self.conv.copy_(F.silu(sums if layer.conv_bias is None else sums + layer.conv_bias))

    def state_step(self, layer, ssm, xBC, z):
        c = self.config
        x, B, C = xBC[0].float().split((c.d_inner, c.ngroups * c.dstate, c.ngroups * c.dstate))
        B, C = (t.view(c.ngroups, 1, 1, -1) for t in (B, C))
        x = x.view(c.ngroups, -1, c.headdim, 1)
        dt = F.softplus(self.dt[0].float() + layer.dt_bias).clamp(*c.dt_limit)
        h = ssm.view(*x.shape[:3], -1)
        per_head = lambda v: v.view(c.ngroups, -1, 1, 1)  # noqa: E731
        h.mul_(per_head(torch.exp(layer.A * dt))).add_(per_head(dt) * x * B)
        y = (h * C).sum(dim=-1, keepdim=True) + per_head(layer.D) * x
        self.mixed.copy_(y.view(-1))

    def leave(self, layer, following):
        c = self.config
        gated = (self.mixed.float() * F.silu(self.z.float())).view(c.ngroups, -1)
        normed = F.rms_norm(gated, gated.shape[1:], eps=c.eps).view(-1) * layer.gated_norm.float()
        self.gated.copy_(normed)
        self.add(layer.W_out, self.gated)

    def add(self, W, x, bias=None):
        self.product(W, x, self.part)
        self.residual += self.part
