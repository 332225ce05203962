"""Right answers to the exercises of chapter 18 that are not the solutions': a check must let each of them pass."""

import numpy as np
from wrong.mamba2 import HALF, RIGHT
from wrong.mamba2_kernels import NORM, STEP
from wrong.warp_gemv import changed

from ref.ssd_steps import silu


def token_by_token(xBC, weight, bias, ring, position):
    """One token after the other, by index."""
    out, n = np.zeros_like(xBC), len(ring)
    for t, now in enumerate(xBC):
        out[t] = bias + weight[:, n] * now
        for w in range(n):
            out[t] += weight[:, w] * ring[(position + t + w) % n]
        ring[(position + t) % n] = now
    return silu(out)


def with_a_large_negative_step(block, xBC, dt, conv_state, ssm_state, piece):
    """dt of −10,000 for tokens that are not there, and states kept in one array of all inputs."""
    tokens, rows, y = len(xBC), len(conv_state), []
    seen = np.concatenate([conv_state, xBC])
    for begin in range(0, tokens, piece):
        inputs, steps = np.zeros((piece, xBC.shape[1])), np.full((piece, dt.shape[1]), -1e4)
        count = min(piece, tokens - begin)
        inputs[:count], steps[:count] = xBC[begin : begin + count], dt[begin : begin + count]
        out, ssm_state = block(inputs, steps, seen[begin : begin + rows], ssm_state)
        y.append(out[:count])
    return np.concatenate(y), seen[tokens:], ssm_state


def half_by_neighbours(h, u):
    """Two candidates on both sides of the nearest, in float64."""
    near = h.astype(np.float16)
    below, above = (np.nextafter(near, np.float16(far)) for far in (-np.inf, np.inf))
    low = np.where(near <= h, near, below).astype(np.float64)
    high = np.where(near >= h, near, above).astype(np.float64)
    return np.where(h - low > u.astype(np.float64) * (high - low), high, low).astype(np.float16)


def codes_cut(h, u):
    """As the quotient comes in float32, and cut to −127 to 127."""
    scales = (np.abs(h).max(axis=1) / 127).astype(np.float32)
    q = np.divide(h, scales[:, None], where=scales[:, None] > 0, out=np.zeros_like(h))
    return np.clip(np.floor(q) + (q - np.floor(q) > u), -127, 127).astype(np.int8), scales


BY_SHUFFLE_DOWN = changed(STEP, ("__shfl_xor_sync", "__shfl_down_sync"))
ALL_STAY = changed(
    STEP,
    ("    if (channel >= headdim) return;\n", ""),
    ("at = x[row];", "at = channel < headdim ? x[row] : 0;"),
    ("n < dstate; n += 32", "n < dstate && channel < headdim; n += 32"),
    ("if (lane == 0) y", "if (lane == 0 && channel < headdim) y"),
)
G_IN_SHARED = changed(
    NORM,
    ("    float g[4], sum = 0;\n", "    __shared__ float g[1024];\n    float sum = 0;\n"),
    ("        g[i] = 0;\n", "        g[n] = 0;\n"),
    ("if (n < size) g[i] =", "if (n < size) g[n] ="),
    ("sum += g[i] * g[i]", "sum += g[n] * g[n]"),
    ("= g[i] * scale", "= g[n] * scale"),
)
OTHERS = {
    "a ring token by token": (2, token_by_token),
    "a large negative dt": (3, with_a_large_negative_step),
    "neighbours in float64, codes cut": (4, (half_by_neighbours, codes_cut)),
    "codes cut": (4, (HALF, codes_cut)),
    "codes of the other right answer": (4, (half_by_neighbours, RIGHT[4][1])),
    "a sum by shuffles down": (5, BY_SHUFFLE_DOWN),
    "no thread leaves early": (5, ALL_STAY),
    "numbers wait in shared memory": (6, G_IN_SHARED),
}
