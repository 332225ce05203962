"""Which rung `fused` runs: fused.cu, where the card and the tensors allow it; and if not, why."""

import functools

import torch

from lab.card import capability

MOST_OF_BATCH = 65535  # rows of heads, 64 columns each: a share holds its pair in 16 bits
TUNED_DSTATE = 128  # what fused_tuned can do, at most
SEQUENCES_DSTATE = 128  # of fused.cu with seq_idx


def choose(problem, x, B, C, z, initial_states, out, sequences, state_dtype):
    """("fused", ""), ("fused_tuned", why not fused.cu) or ("five", why)."""
    tensors = (
        [("x", x), ("B", B), ("C", C)] + ([] if z is None else [("z", z)]) + ([] if out is None else [("out", out)])
    )
    seen = tuple((name, t.shape, t.stride(), t.data_ptr() % 16) for name, t in tensors)
    in_pairs = initial_states is None or initial_states.data_ptr() % (2 * initial_states.element_size()) == 0
    return _choice(problem, x.dtype, x.device, seen, in_pairs, sequences, state_dtype)


@functools.lru_cache(maxsize=1024)
def _choice(problem, dtype, device, seen, in_pairs, sequences, state_dtype):
    """(rung, why it is not fused.cu)"""
    if state_dtype is not torch.float32:
        return "five", "states between kernels are five's"
    if dtype is torch.float32:  # of which fused_tuned spills registers
        return "five", "x is float32"
    why = ""
    if (has := capability(device)) != (9, 0):
        why = f"compute capability 9.0 is needed, this card has {has}"
    elif problem.headdim % 8:
        why = f"headdim is {problem.headdim}, no multiple of 8"
    elif problem.dstate % 8:
        why = f"dstate is {problem.dstate}, no multiple of 8"
    elif sequences and problem.dstate > SEQUENCES_DSTATE:
        why = f"dstate is {problem.dstate}, with seq_idx or cu_seqlens up to {SEQUENCES_DSTATE}"
    elif not in_pairs:
        why = "initial_states is not at an address of two elements"
    elif problem.batch * problem.nheads * -(-problem.headdim // 64) > MOST_OF_BATCH:
        why = f"there are more than {MOST_OF_BATCH} heads, or halves of 128, in the batch"
    elif not all(_fits_tma(*tensor[1:]) for tensor in seen):
        name = next(name for name, *tensor in seen if not _fits_tma(*tensor))
        why = f"{name} is not at addresses and strides of 16 bytes"
    if why:
        return ("fused_tuned" if problem.dstate <= TUNED_DSTATE and not sequences else "five"), why
    return "fused", ""


def _fits_tma(shape, strides, address):
    apart = (stride for n, stride in zip(shape[:-1], strides) if n > 1)
    return address == 0 and all(stride > 0 and stride % 8 == 0 for stride in apart)
