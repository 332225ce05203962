"""mamba_chunk_scan_combined, as mamba_ssm has it: same arguments, same results, by the best rung that there is."""

import torch

from kernels.ssd.arguments import NO_LIMIT
from kernels.ssd.fused import CALLS, STOP, fused


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=NO_LIMIT, return_final_states=False, return_varlen_states=False,
):  # fmt: skip
    """y like x (batch, L, H, P); or a tuple of y, the final states, and the states of cu_seqlens, if asked for.

    In the place of mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined, whose arguments these are; `five` says
    what each is, and which dtypes it may have. As there, cu_seqlens counts only with return_varlen_states, and tensors
    are copied where their strides do not fit. Different from there:

        seq_idx      must never fall along the sequence. The initial state is that of token 0's sequence, whatever its
                     number; there it is that of number 0
        cu_seqlens   with no seq_idx beside it, no state goes from one sequence to the next. There one does, in y, in
                     the final states, and in those of sequences that end in a later chunk than they begin
        the states of sequences    are float32, there the dtype of C. The first has the initial state in it; there it
                     is left out of a sequence that ends in chunk 0. An empty one's is 0
        gradients    of y and the final states, by kernels.ssd_backward; of no states of sequences, as there. Gradients
                     of gradients: NotImplementedError
    """
    tensors = x, dt, A, B, C, D, z, dt_bias, initial_states
    if not return_varlen_states:  # which fused prepares by itself, with what it makes of cu_seqlens
        how = chunk_size, dt_softplus, dt_limit, return_final_states, return_varlen_states, torch.float32, STOP
        found = CALLS.run_tracked(how, None, None, None, *tensors, seq_idx, None, None)
        if found is not None:
            return found[:2] if return_final_states else found[0]
    x, dt, B, C, z = (_last_axis_contiguous(t) for t in (x, dt, B, C, z))
    if isinstance(seq_idx, torch.Tensor) and seq_idx.dtype is torch.int64:
        seq_idx = seq_idx.int()
    A, D, dt_bias, initial_states, seq_idx, cu_seqlens = (
        t.contiguous() if isinstance(t, torch.Tensor) else t
        for t in (A, D, dt_bias, initial_states, seq_idx, cu_seqlens)
    )
    return fused(
        x, dt, A, B, C, chunk_size=chunk_size, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states,
        seq_idx=seq_idx, cu_seqlens=cu_seqlens if return_varlen_states else None, dt_softplus=dt_softplus,
        dt_limit=dt_limit, return_final_states=return_final_states, return_varlen_states=return_varlen_states,
    )  # fmt: skip


def _last_axis_contiguous(tensor):
    if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.stride(-1) != 1:
        return tensor.contiguous()
    return tensor
