"""The two small models as PyTorch differentiates them, for models/train_small.py; parameters have the names of Hugging
Face's Llama and Mamba2.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from models.mamba2_torch import conv1d, gated_norm, ssd
from models.positions import rotary_tables

DROP = 0.25
MAMBA2_DROP = 0.4  # it learns by heart sooner: with 0.25 what is held out gets worse from step 250 on


def linear(rows, cols):
    return nn.Linear(cols, rows, bias=False)


def rotate(x, cos, sin):
    """models.positions.rotate, in operations that PyTorch differentiates."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class LlamaLayer(nn.Module):
    """Steps 2 to 8 of ref.llm."""

    def __init__(self, c):
        super().__init__()
        hidden, ffn, q, kv = c.hidden, c.ffn, c.q_rows, c.kv_rows
        self.c, self.head_dim = c, c.head_dim
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden, c.eps), nn.RMSNorm(hidden, c.eps)
        projections = {"q_proj": linear(q, hidden), "k_proj": linear(kv, hidden), "v_proj": linear(kv, hidden)}
        self.self_attn = nn.ModuleDict(projections | {"o_proj": linear(hidden, q)})
        block = {"gate_proj": linear(ffn, hidden), "up_proj": linear(ffn, hidden), "down_proj": linear(hidden, ffn)}
        self.mlp = nn.ModuleDict(block)

    def forward(self, x, tables):
        batch, n, _ = x.shape
        normed = self.input_layernorm(x)
        q, k, v = (self.self_attn[f"{p}_proj"](normed).view(batch, n, -1, self.head_dim) for p in "qkv")
        q, k = (rotate(t.flatten(0, 1), *(table.repeat(batch, 1) for table in tables)).view_as(t) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.dropout(self.self_attn["o_proj"](mixed.transpose(1, 2).reshape(batch, n, -1)), DROP, self.training)
        normed, mlp = self.post_attention_layernorm(x), self.mlp
        block = mlp["down_proj"](F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))
        return x + F.dropout(block, DROP, self.training)


class Llama(nn.Module):
    """The model of models.prefill."""

    prefix = "model."

    def __init__(self, c):
        super().__init__()
        self.c, self.tables = c, {}
        self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(LlamaLayer(c) for _ in range(c.n_layers))
        self.norm = nn.RMSNorm(c.hidden, c.eps)
        begin(self, 2 * c.n_layers)

    def forward(self, tokens):
        x = F.dropout(self.embed_tokens(tokens), DROP, self.training)
        n = tokens.shape[1]
        if n not in self.tables:
            self.tables[n] = rotary_tables(self.c, 0, n, tokens.device)
        for layer in self.layers:
            x = layer(x, self.tables[n])
        return F.linear(self.norm(x), self.embed_tokens.weight)


def by_kernels(x, dt, A, B, C, **options):
    """Step 3 by kernels.ssd, there and back: products of bfloat16, sums in float32."""
    from kernels.ssd import fused

    return fused(*_narrow(x, dt, A, B, C), **options)


def by_mamba_ssm(x, dt, A, B, C, **options):
    """Step 3 by mamba_ssm's five kernels and those of its backward, for products of bfloat16 too."""
    from kernels.ssd import peers

    if (run := peers.mamba()) is None:
        raise ImportError("mamba_ssm is not installed: pip install mamba-ssm einops")
    return run(*_narrow(x, dt, A, B, C), chunk_size=256, **options)


def _narrow(x, dt, A, B, C):
    return x.bfloat16(), dt, A, B.bfloat16(), C.bfloat16()


SCANS = {"torch": ssd, "kernels": by_kernels, "mamba_ssm": by_mamba_ssm}  # what may run step 3; torch: in float32


class Mixer(nn.Module):
    """The block of ref.mamba2, numbered alike; decays and step sizes begin as mamba_ssm's do. scan: of SCANS."""

    def __init__(self, c, scan="torch"):
        super().__init__()
        self.c, self.scan = c, SCANS[scan]
        self.in_proj, self.out_proj = linear(c.in_rows, c.hidden), linear(c.hidden, c.d_inner)
        self.conv1d = nn.Conv1d(c.channels, c.channels, c.width, groups=c.channels)
        dt = torch.exp(torch.empty(c.nheads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt
        self.A_log = nn.Parameter(torch.empty(c.nheads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(c.nheads))
        self.norm = nn.RMSNorm(c.d_inner, c.eps)

    def forward(self, u):
        c, (batch, n, _) = self.c, u.shape
        projected = self.in_proj(u)  # 1
        with torch.autocast(u.device.type, enabled=False):  # exponents are sums of many tokens: float32
            z, xBC, dt = projected.float().split([c.d_inner, c.channels, c.nheads], dim=-1)
            xBC, _ = conv1d(xBC, self.conv1d.weight[:, 0], self.conv1d.bias)  # 2
            states = c.ngroups * c.dstate
            x, B, C = xBC.split([c.d_inner, states, states], dim=-1)
            B, C = (t.view(batch, n, c.ngroups, c.dstate) for t in (B, C))
            x = x.view(batch, n, c.nheads, c.headdim)
            y = self.scan(x, dt, -self.A_log.exp(), B, C, D=self.D, dt_bias=self.dt_bias, dt_softplus=True)  # 3
            normed = gated_norm(y.flatten(2), z, self.norm.weight, c.eps, ngroups=c.ngroups)  # 4
        return self.out_proj(normed)  # 5


class MambaLayer(nn.Module):
    def __init__(self, c, scan="torch"):
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(c.hidden, c.eps), Mixer(c, scan)

    def forward(self, x):
        return x + F.dropout(self.mixer(self.norm(x)), MAMBA2_DROP, self.training)


class Mamba2(nn.Module):
    """The model of ref.mamba2. scan, of SCANS: what runs the state space duality in training."""

    prefix = "backbone."

    def __init__(self, c, scan="torch"):
        super().__init__()
        self.c = c
        self.embeddings = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(MambaLayer(c, scan) for _ in range(c.n_layers))
        self.norm_f = nn.RMSNorm(c.hidden, c.eps)
        begin(self, c.n_layers)

    def forward(self, tokens):
        x = F.dropout(self.embeddings(tokens), MAMBA2_DROP, self.training)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm_f(x), self.embeddings.weight)


def begin(network, additions):
    """Matrices begin small; those whose products are added to the stream, `additions` of them, smaller."""
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2:
            last = name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight"))
            nn.init.normal_(parameter, std=0.02 * (additions**-0.5 if last else 1))


def decays(name):
    """Whether a parameter shrinks a little with every step of training: a block's time constants must not."""
    return not name.endswith(("A_log", "dt_bias", "mixer.D"))
