"""The parts of a Mamba-2 block in PyTorch's own operations: for prompts on the processor, and for training, as PyTorch
differentiates them. Letters, shapes and numbers of the steps: ref/mamba2.py and ref/ssd.py.
"""

import torch
import torch.nn.functional as F

CHUNK = 64  # tokens of ssd's chunks, unless another is asked for: its matrices are (CHUNK, CHUNK) for every head


def conv1d(xBC, weight, bias=None, *, initial_state=None):
    """Step 2: causal convolution of each channel, then silu. → (like xBC, final state)

    xBC (batch, L, channels), weight (channels, W), bias (channels,), states (batch, W - 1, channels)
    """
    W = weight.shape[1]
    if initial_state is None:
        initial_state = xBC.new_zeros(len(xBC), W - 1, xBC.shape[2])
    seen = torch.cat([initial_state.to(xBC.dtype), xBC], dim=1)  # (batch, W - 1 + L, channels)
    out = sum(weight[:, w] * seen[:, w : w + xBC.shape[1]] for w in range(W))
    return F.silu(out if bias is None else out + bias), seen[:, xBC.shape[1] :]


def ssd(
    x, dt, A, B, C, *, chunk_size=CHUNK, D=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, float("inf")),
    initial_states=None, return_final_states=False,
):  # fmt: skip
    """Step 3, in float32. x (batch, L, H, P), dt (batch, L, H), A (H,), B, C (batch, L, G, N), D and dt_bias (H,),
    states (batch, H, P, N) → y like x, or (y, final states). Any L, from 1 on.
    """
    (batch, L, H, P), (G, N), Q = x.shape, B.shape[2:], min(chunk_size, x.shape[1])
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    pad = -L % Q
    chunks = lambda t: F.pad(t.float(), (0, 0) * (t.ndim - 2) + (0, pad)).unflatten(1, (-1, Q))  # noqa: E731
    dt = chunks(dt).transpose(2, 3)  # (batch, K, H, Q)
    xs = chunks(x).transpose(2, 3)  # (batch, K, H, Q, P)
    Bs, Cs = (chunks(t).transpose(2, 3) for t in (B, C))  # (batch, K, G, Q, N)
    sums = (A[:, None] * dt).cumsum(-1)  # 1: (batch, K, H, Q)
    CB = (Cs @ Bs.transpose(-1, -2)).repeat_interleave(H // G, dim=2)  # 2: (batch, K, H, Q, Q)
    later = torch.ones(Q, Q, dtype=torch.bool, device=x.device).triu(1)
    decay = (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -torch.inf).exp()
    Bs, Cs = (t.repeat_interleave(H // G, dim=2) for t in (Bs, Cs))  # of each group, for its heads
    xdt = xs * dt[..., None]
    to_end = (sums[..., -1:] - sums).exp()[..., None]
    added = (xdt * to_end).transpose(-1, -2) @ Bs  # 3: (batch, K, H, P, N)
    state = x.new_zeros(batch, H, P, N, dtype=torch.float32) if initial_states is None else initial_states.float()
    lives, starts = sums[..., -1].exp()[..., None, None], []
    for k in range(added.shape[1]):  # 4
        starts.append(state)
        state = lives[:, k] * state + added[:, k]
    before = Cs @ torch.stack(starts, dim=1).transpose(-1, -2)  # (batch, K, H, Q, P)
    y = (CB * decay) @ xdt + sums.exp()[..., None] * before  # 5
    y = y.transpose(2, 3).flatten(1, 2)[:, :L]
    y = y if D is None else y + D[:, None] * x.float()
    return (y, state) if return_final_states else y


def gated_norm(y, z, weight, eps=1e-5, *, ngroups=1):
    """Step 4: y · silu(z), normed within each group, times a weight. y, z (..., d_inner) → float32."""
    gated = (y.float() * F.silu(z.float())).unflatten(-1, (ngroups, -1))
    return F.rms_norm(gated, gated.shape[-1:], eps=eps).flatten(-2) * weight
