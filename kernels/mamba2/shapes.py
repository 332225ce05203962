"""Models to be measured: their sizes, random weights and states of them, and what a token's logits must be."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

WIDTH = 4


@dataclass(frozen=True)
class Shape:
    """What kernels.mamba2.step takes as config, and the type of its numbers."""

    name: str
    hidden: int
    n_layers: int
    nheads: int
    headdim: int
    dstate: int
    vocab: int
    dtype: torch.dtype = torch.float16
    ngroups: int = 1
    eps: float = 1e-5
    dt_limit: tuple = (0.0, float("inf"))
    attention_layers: tuple = ()
    ffn: int = 0

    @property
    def d_inner(self):
        return self.nheads * self.headdim

    @property
    def channels(self):
        return self.d_inner + 2 * self.ngroups * self.dstate

    @property
    def in_rows(self):
        return self.d_inner + self.channels + self.nheads


MAMBA2_2_7B = Shape("Mamba-2 2.7B", 2560, 64, 80, 64, 128, 50288)


def random_weights(shape, device="cuda"):
    """What kernels.mamba2.step takes as weights; `bytes`: of what a token reads of them. A and dt as Mamba-2's
    initialisation has them; the head is the embedding."""
    kind = dict(device=device, dtype=shape.dtype)
    matrix = lambda rows, cols: torch.empty(rows, cols, **kind).normal_(0, cols**-0.5)  # noqa: E731
    norm = lambda n: (1 + torch.randn(n, device=device) / 10).to(shape.dtype)  # noqa: E731
    layers = []
    for _ in range(shape.n_layers):
        dt = torch.exp(torch.rand(shape.nheads, device=device) * 4.6 - 6.9)  # from 1e-3 to 1e-1
        layers.append(
            SimpleNamespace(
                kind="mamba",
                b_in=None,
                b_out=None,
                norm=norm(shape.hidden),
                W_in=matrix(shape.in_rows, shape.hidden),
                conv_weight=torch.rand(shape.channels, WIDTH, device=device) - 0.5,
                conv_bias=torch.rand(shape.channels, device=device) - 0.5,
                dt_bias=dt + torch.log(-torch.expm1(-dt)),
                A=-1 - 15 * torch.rand(shape.nheads, device=device),
                D=torch.ones(shape.nheads, device=device),
                gated_norm=norm(shape.d_inner),
                W_out=matrix(shape.hidden, shape.d_inner),
            )
        )
    embedding = matrix(shape.vocab, shape.hidden)
    last = norm(shape.hidden)
    read = [
        last,
        embedding,
        embedding[0],
        *(t for layer in layers for t in vars(layer).values() if isinstance(t, torch.Tensor)),
    ]
    return SimpleNamespace(
        embedding=embedding, head=embedding, norm=last, layers=layers, bytes=sum(tensor.nbytes for tensor in read)
    )


class RandomState:
    """States of a text that has gone on for some time, of `dtype` where it is no QuantizedState's. bytes: those that a
    token reads and writes."""

    def __init__(self, shape, dtype=torch.float32, device="cuda", batch=1):
        self.conv = torch.randn(
            shape.n_layers, batch, WIDTH - 1, shape.channels, device=device
        ).to(shape.dtype)  # fmt: skip
        self.ssm = torch.empty(
            shape.n_layers, batch, shape.nheads, shape.headdim, shape.dstate, device=device, dtype=dtype
        ).normal_(0, 0.1)  # fmt: skip
        self.bytes = 2 * (self.conv.nbytes + self.ssm.nbytes)

    def copy(self):
        """The same states in memory of their own."""
        other = object.__new__(type(self))
        other.conv, other.ssm, other.bytes = self.conv.clone(), self.ssm.clone(), self.bytes
        return other


def wanted_logits(shape, weights, state, token):
    """Logits in float64, (vocab,), from this state, which stays as it is."""
    x = weights.embedding[token].double()
    for index, layer in enumerate(weights.layers):
        projected = layer.W_in.double() @ _norm(x, layer.norm.double(), shape.eps)
        z, xBC, dt = projected.split((shape.d_inner, shape.channels, shape.nheads))
        inputs = torch.cat((state.conv[index][0].double(), xBC[None]))
        xBC = torch.nn.functional.silu((inputs * layer.conv_weight.double().T).sum(dim=0) + layer.conv_bias.double())
        groups = shape.ngroups * shape.dstate
        xs, B, C = xBC.split((shape.d_inner, groups, groups))
        xs, B, C = xs.view(shape.ngroups, -1, shape.headdim, 1), *(t.view(shape.ngroups, 1, 1, -1) for t in (B, C))
        dt = torch.nn.functional.softplus(dt + layer.dt_bias.double()).clamp(*shape.dt_limit)
        per_head = lambda v: v.view(shape.ngroups, -1, 1, 1)  # noqa: E731
        h = state.ssm[index][0].double().view(*xs.shape[:3], -1)
        h = per_head(torch.exp(layer.A.double() * dt)) * h + per_head(dt) * xs * B
        y = ((h * C).sum(dim=-1, keepdim=True) + per_head(layer.D.double()) * xs).view(-1)
        gated = (y * torch.nn.functional.silu(z)).view(shape.ngroups, -1)
        normed = gated / (gated.square().mean(dim=1, keepdim=True) + shape.eps).sqrt()
        x = x + layer.W_out.double() @ (normed.view(-1) * layer.gated_norm.double())
    return weights.head.double() @ _norm(x, weights.norm.double(), shape.eps)


def _norm(x, weight, eps):
    return x * weight / (x.square().mean() + eps).sqrt()
