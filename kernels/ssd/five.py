"""five: the SSD layer in five kernels, each of which reads what the last one left in memory.

1 chunk_cumsum   dt, A                 -> dt, cum      (batch, H, chunks, Q), float32
2 chunk_bmm      B, C                  -> CB           (batch, chunks, G, Q, Q), float32
3 chunk_state    x, B, dt, cum         -> states       (batch, chunks, H, P, N), what each chunk adds
4 state_passing  states, cum           -> states at chunk starts, in the same memory, and the final state
5 chunk_scan     x, C, CB, dt, cum, states -> y

float32 has kernels of its own in the places of 2 to 5 (float32.py), but for several sequences in a row and for tensors
whose addresses or strides are no multiples of 16.

L seqlen   Q chunk_size   H nheads   P headdim   G ngroups   N dstate
"""

import torch

from kernels.ssd import chunk_bmm, chunk_cumsum, chunk_scan, chunk_state, float32, state_passing
from kernels.ssd.arguments import NO_LIMIT, expect_ssd

FILES = ("arguments", "launching", "chunk_cumsum", "chunk_bmm", "chunk_state", "state_passing", "chunk_scan", "five")
SOURCES = tuple(f"kernels/ssd/{name}.py" for name in FILES)
CHUNK = 256  # where none is given: of 64, 128 and 256 the fastest on an H200 from 1K tokens to 256K; but half of it in
# float32, of which a tile takes twice the room


def five(
    x, dt, A, B, C, *, chunk_size=None, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
    cu_seqlens=None, dt_softplus=False, dt_limit=NO_LIMIT, return_final_states=False, return_varlen_states=False,
    out=None, state_dtype=torch.float32,
):  # fmt: skip
    """y (batch, L, H, P), like x; or a tuple of y and the states that are asked for.

    x               (batch, L, H, P), float16, bfloat16 or float32; P at most 128
    dt              (batch, L, H), like x or float32
    A               (H,) float32, below 0 and finite
    B, C            (batch, L, G, N), like x; head h reads group h // (H // G); N at most 256
    chunk_size      a power of two from 16 to 512; CHUNK unless given, or half of it in float32
    D, z            D (H,) or (H, P): adds D x. z (batch, L, H, P): y is multiplied by silu(z)
    dt_bias, dt_softplus, dt_limit    what dt takes, in this order; dt_bias (H,)
    initial_states  (batch, H, P, N): the state before token 0
    seq_idx         (batch, L) int32, never falling: where it changes, a new sequence begins, with a state of 0. The
                    initial state is that of token 0's sequence
    cu_seqlens      (sequences + 1,) int32 or int64, for a batch of 1: where sequences begin, from 0 to L; in place of
                    seq_idx, or beside it, if they agree
    return_final_states    also the state after the last token, (batch, H, P, N) float32
    return_varlen_states   also the state after each sequence of cu_seqlens, (sequences, H, P, N) float32
    out             a tensor like x to write to, apart from all others
    state_dtype     of the states in memory between kernels 3, 4 and 5: float32, or the dtype of x, at half the bytes

    Products of matrices take factors rounded to the dtype of x (states too), and add in float32. In float32 factors
    are split in two bfloat16, of 8 bits each, and three products of these are added (C B^T: two parts of 11 bits): a
    product is off by 3 * 2**-16 at most, and y and states, sums of many, by 4e-6 to 7e-6 of their norm (less than
    1e-5), single numbers by some 1e-5 of the largest. Decays are off by 1e-7 of the longest exponent of a chunk, so
    that a chunk of 512 doubles these. The same from run to run, bit for bit.
    On the CPU, bfloat16 is computed in float32. `work` gives the bytes and flops. What is not finite reaches the
    outputs that it should, as NaN or infinity, and no others.
    """
    problem = expect_ssd(
        "five", x, dt, A, B, C, chunk_size, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states,
        seq_idx=seq_idx, cu_seqlens=cu_seqlens, dt_limit=dt_limit, return_varlen_states=return_varlen_states, out=out,
        state_dtype=state_dtype,
    )  # fmt: skip
    chunk_size = chunk_size or (CHUNK if x.element_size() == 2 else CHUNK // 2)
    if seq_idx is None and cu_seqlens is not None:
        seq_idx = sequence_numbers(cu_seqlens, problem.seqlen)
    y = x.new_empty(x.shape) if out is None else out
    tensors = x, B, C, D, z, dt, dt_bias, initial_states
    if x.is_cpu and x.dtype is torch.bfloat16:  # of which Triton's interpreter would multiply the bits
        wide = torch.empty(x.shape)
        tensors = (None if tensor is None else tensor.float() for tensor in tensors)
        final, varlen = _run(wide, *tensors, A, seq_idx, cu_seqlens, chunk_size, dt_softplus, dt_limit,
                             return_varlen_states, torch.float32)  # fmt: skip
        y.copy_(wide)
    elif x.dtype is torch.float32 and seq_idx is None and float32.takes(y, *tensors[:5]):
        final, varlen = float32.run(y, *tensors, A, chunk_size, dt_softplus, dt_limit), None
    else:
        final, varlen = _run(y, *tensors, A, seq_idx, cu_seqlens, chunk_size, dt_softplus, dt_limit,
                             return_varlen_states, state_dtype)  # fmt: skip
    asked = (y, *([final] if return_final_states else []), *([varlen] if return_varlen_states else []))
    return asked if len(asked) > 1 else y


def _run(
    y, x, B, C, D, z, dt, dt_bias, initial_states, A, seq_idx, cu_seqlens, chunk_size, dt_softplus, dt_limit, ends,
    state_dtype,
):  # fmt: skip
    """The five kernels; y is written. Returns (final states, states of cu_seqlens or None)."""
    steps, cum = chunk_cumsum.run(dt, A, chunk_size, dt_bias, seq_idx, dt_softplus, dt_limit)
    CB = chunk_bmm.run(B, C, chunk_size)
    states, strange = chunk_state.run(x, B, steps, cum, seq_idx, state_dtype)
    starts, final = state_passing.run(states, cum, x.shape[1], initial_states, seq_idx, states)
    chunk_scan.run(x, C, CB, steps, cum, starts, strange, D, z, seq_idx, y)
    return final, chunk_state.varlen_states(x, B, steps, cum, cu_seqlens, starts) if ends else None


def sequence_numbers(cu_seqlens, seqlen):
    """Which sequence each token is of: (1, L) int32, from where sequences begin."""
    tokens = torch.arange(seqlen, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:], tokens, right=True, out_int32=True)[None]


def work(batch, seqlen, nheads, headdim, ngroups, dstate, chunk_size, size=2, state_size=4):
    """{step: (bytes, flops)} of the five kernels. Their sum is far above `least`: what is between them."""
    sizes = batch, seqlen, nheads, headdim, ngroups, dstate, chunk_size, size
    return {
        "chunk_cumsum": chunk_cumsum.work(batch, seqlen, nheads, chunk_size, size),
        "chunk_bmm": chunk_bmm.work(batch, seqlen, ngroups, dstate, chunk_size, size),
        "chunk_state": chunk_state.work(*sizes, state_size),
        "state_passing": state_passing.work(batch, seqlen, nheads, headdim, dstate, chunk_size, state_size),
        "chunk_scan": chunk_scan.work(*sizes, state_size),
    }


def least(batch, seqlen, nheads, headdim, ngroups, dstate, chunk_size=64, size=2):
    """(bytes, flops) of a call in which nothing goes through memory between steps: x, dt, B and C once, y once.

    The flops are those of chunks of chunk_size.
    """
    tokens = batch * seqlen
    moved = size * tokens * (2 * nheads * headdim + nheads + 2 * ngroups * dstate)
    steps = work(batch, seqlen, nheads, headdim, ngroups, dstate, chunk_size, size)
    return moved, sum(flops for _, flops in steps.values())
