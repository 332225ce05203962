"""Kernel 4 of five: the state at the start of each chunk, one after another.

    L seqlen   Q chunk_size   H nheads   P headdim   N dstate

    state_0 = initial state,   state_c+1 = 2**cum_last state_c + what chunk c adds

The one step of SSD that is serial, but only along chunks: every element of every state goes its own way, H P N of them.
A program takes ELEMENTS of one head through all chunks. What it loads does not depend on what it computes, so loads of
several chunks are under way at once.

Reads and writes a state for each chunk and head: 2 P N states for every Q tokens, and no flops to speak of. The most
costly of the five in bytes for its work.
"""

import torch
import triton
import triton.language as tl

from kernels.ssd.arguments import expect_apart, expect_sizes, expect_step
from kernels.ssd.launching import filled_up, launch

ELEMENTS = 1024  # of a program's state


@triton.jit(do_not_specialize=["seqlen", "nchunks", "nheads"])
def passing_kernel(
    states, cum, initial, seq_idx, starts, final, seqlen, nheads, nchunks, size,
    Q: tl.constexpr, ELEMENTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grid (tiles of a state, H, batch). size: elements of a state; STAGES: chunks whose loads are under way."""
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    e = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    there = e < size
    state = tl.full((ELEMENTS,), 0, tl.float32)
    if initial is not None:
        state = tl.load(initial + (b * nheads + h) * size + e, there, other=0).to(tl.float32)
    at = (b * nchunks * nheads + h) * size
    decays = cum + (b * nheads + h) * nchunks * Q + Q - 1
    if seq_idx is not None:
        sequence = tl.load(seq_idx + b * seqlen)  # token 0's is the one that the initial state belongs to
    for chunk in tl.range(0, nchunks, num_stages=STAGES):
        added = tl.load(states + at + e, there, other=0)
        tl.store(starts + at + e, state, there)
        kept = state * tl.exp2(tl.load(decays))
        if seq_idx is not None:  # another sequence ends this chunk than the one before: nothing is kept, not even NaN
            last = tl.load(seq_idx + b * seqlen + tl.minimum(chunk * Q + Q, seqlen) - 1)
            kept = tl.where(last == sequence, kept, 0)
            sequence = last
        state = kept + added.to(tl.float32)
        at += nheads * size
        decays += Q
    tl.store(final + (b * nheads + h) * size + e, state, there)


def state_passing(states, cum, seqlen, *, initial_states=None, seq_idx=None, out=None):
    """The state at the start of each chunk, like states, and (batch, H, P, N) float32 at the very end.

    states  (batch, chunks, H, P, N), what each chunk adds, as chunk_state gives it
    cum     (batch, H, chunks, Q), as chunk_cumsum gives it; seqlen: tokens of the sequence
    out     a tensor like states to write to; it may be states itself, and is apart from all others
    """
    expect_step("state_passing", states, states=(states, ("batch", "nchunks", "nheads", "headdim", "dstate"), STATES))
    batch, nchunks, nheads, headdim, dstate = states.shape
    expect_step(
        "state_passing", states,
        cum=(cum, (batch, nheads, nchunks, "chunk_size"), (torch.float32,)),
        initial_states=(initial_states, (batch, nheads, headdim, dstate), STATES),
        seq_idx=(seq_idx, (batch, seqlen), (torch.int32,)),
        out=(out, tuple(states.shape), (states.dtype,)),
    )  # fmt: skip
    expect_sizes(
        "state_passing", batch=batch, seqlen=seqlen, nheads=nheads, nchunks=nchunks, chunk_size=cum.shape[3]
    )  # fmt: skip
    if out is not None:
        same = out.data_ptr() == states.data_ptr()
        expect_apart(
            "state_passing", out, states=None if same else states, cum=cum, initial_states=initial_states
        )  # fmt: skip
    return run(states, cum, seqlen, initial_states, seq_idx, torch.empty_like(states) if out is None else out)


STATES = (torch.float32, torch.float16, torch.bfloat16)


def run(states, cum, seqlen, initial_states, seq_idx, starts, elements=ELEMENTS, stages=4, num_warps=4):
    """As state_passing, on tensors that have been looked at."""
    batch, nchunks, nheads, headdim, dstate = states.shape
    size = headdim * dstate
    final = cum.new_empty((batch, nheads, headdim, dstate))
    elements = min(elements, filled_up(size))
    tensors = states, cum, initial_states, seq_idx, starts, final
    numbers = seqlen, nheads, nchunks, size
    constants = cum.shape[3], elements, stages
    launch(passing_kernel, (-(-size // elements), nheads, batch), tensors, numbers, constants, num_warps=num_warps)
    return starts, final


def work(batch, seqlen, nheads, headdim, dstate, chunk_size, state_size=4):
    """(bytes, flops) of a call: a state read and one written for each chunk and head."""
    elements = batch * -(-seqlen // chunk_size) * nheads * headdim * dstate
    return 2 * state_size * elements, 2 * elements
