"""float32, kernel 4 of five: the state at the start of each chunk, one after another, cut into its parts.

    H nheads   P headdim   N dstate

    state_0 = initial state,   state_c+1 = 2**cum_last state_c + what chunk c adds

As state_passing.py: states are carried on in float32. What kernel 5 multiplies by is written cut, (batch, chunks, H, P,
2, N), in as many bytes.
"""

import triton
import triton.language as tl

from kernels.ssd.float32_scores import cut, part_type
from kernels.ssd.launching import filled_up, launch

ELEMENTS = 512  # of a program's state


@triton.jit(do_not_specialize=["nchunks", "nheads"])
def passing_kernel(
    states, cum, initial, starts, final, nheads, nchunks,
    HEADDIM: tl.constexpr, DSTATE: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """grid (tiles of a state, H, batch). ROWS: of a state, W long; STAGES: chunks whose loads are under way."""
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    p, n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, W)[None, :]
    there, e = (p < HEADDIM) & (n < DSTATE), p * DSTATE + n
    to = starts + 2 * p * DSTATE + n
    state = tl.full((ROWS, W), 0, tl.float32)
    if initial is not None:
        state = tl.load(initial + (b * nheads + h) * (HEADDIM * DSTATE) + e, there, other=0).to(tl.float32)
    at = (b * nchunks * nheads + h) * (HEADDIM * DSTATE)
    decays = cum + (b * nheads + h) * nchunks * Q + Q - 1
    for _ in tl.range(0, nchunks, num_stages=STAGES):
        added = tl.load(states + at + e, there, other=0)
        high, low = cut(state, starts.dtype.element_ty)
        tl.store(to + 2 * at, high, there)
        tl.store(to + 2 * at + DSTATE, low, there)
        state = state * tl.exp2(tl.load(decays)) + added
        at += nheads * (HEADDIM * DSTATE)
        decays += Q
    tl.store(final + (b * nheads + h) * (HEADDIM * DSTATE) + e, state, there)


def run(states, cum, initial_states, elements=ELEMENTS, stages=8, num_warps=4):
    """(states at chunk starts, cut; the last state) of tensors that have been looked at."""
    batch, nchunks, nheads, headdim, dstate = states.shape
    starts = states.new_empty((batch, nchunks, nheads, headdim, 2, dstate), dtype=part_type(states))
    final = cum.new_empty((batch, nheads, headdim, dstate))
    W = filled_up(dstate)
    rows = max(1, elements // W)
    tensors = states, cum, initial_states, starts, final
    constants = headdim, dstate, cum.shape[3], rows, W, stages
    grid = -(-headdim // rows), nheads, batch
    launch(passing_kernel, grid, tensors, (nheads, nchunks), constants, num_warps=num_warps)
    return starts, final
