"""The Mamba-2 layer's SSD (kernels.ssd) run backwards: from the gradient of y to those of all that y was made of.

    plain        by torch's own products, chunk by chunk: any device, size and dtype
    few          a few launches in Triton
    fused        four launches in CUDA C++ for Hopper; `which` says what runs in its place, and why
    gradients    the best rung for the arguments; `which` says which, and why

    rung(dy, x, dt, A, B, C, *, chunk_size=None, dfinal_states=None, D=None, z=None, dt_bias=None, initial_states=None,
         seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0, inf)) -> Gradients

    dy             (batch, L, H, P), of the dtype of x, its last axis contiguous: the gradient of y, behind D and z
    dfinal_states  (batch, H, P, N), float32 or the dtype of x: that of the final states; None: 0
    Gradients      a tuple of x, dt, A, B, C, D, z, dt_bias, initial_states: each like the argument of its name in shape
                   and dtype, None where that was not given

All else is what kernels.ssd.five takes, and means the same; nothing but these arguments is kept from the way there.
With seq_idx or cu_seqlens nothing goes from one sequence to another, and dfinal_states are of the last. The gradient of
dt is 0 where dt_limit clips. Sums are float32; the gradients of A, B, C, D and dt_bias are sums over all who read them,
added in one order, so that bits are the same from run to run. Gradients of gradients are not computed.

Nobody needs to call these: kernels.ssd.fused, five and mamba_chunk_scan_combined have gradients, and call `gradients`.
TypeError, ValueError or NotImplementedError names the argument, what was expected and what came. torch.compile takes
each as an operator of torch.ops.matmul_to_mamba: ssd_backward, ssd_backward_plain and so on.
"""

from kernels.ssd_backward.arguments import Gradients
from kernels.ssd_backward.choice import which
from kernels.ssd_backward.operators import few, fused, gradients, plain

__all__ = ["Gradients", "few", "fused", "gradients", "plain", "which"]
