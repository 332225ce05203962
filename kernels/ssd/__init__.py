"""The Mamba-2 layer's state space duality (SSD): h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_t^T,  y_t = C_t h_t + D x_t.

    five                         chapter 12: five kernels in Triton, chunk by chunk
    fused                        chapter 15: one launch, the best rung; `which` says what runs in its place, and why
    mamba_chunk_scan_combined    with the signature of mamba_ssm's, by the best rung there is

    x (batch, seqlen, nheads, headdim), dt (batch, seqlen, nheads), A (nheads,),
    B and C (batch, seqlen, ngroups, dstate) -> y like x, or (y, final_states (batch, nheads, headdim, dstate))

Head h reads group h // (nheads // ngroups). dt takes dt_bias, softplus and dt_limit, in this order. CUDA tensors run on
their card; CPU tensors in Triton's interpreter, where bfloat16 is computed in float32, or, if fused.cu takes them, on
the SIMT machine. Sums are float32, offsets 64 bits. Gradients are tracked, of y and the final states, and made by
kernels.ssd_backward; what runs then keeps its inputs and nothing else. TypeError, ValueError or NotImplementedError
names the argument, what was expected and what came; nothing has been written by then.
torch.compile takes each as an operator: ssd_five, ssd_fused and mamba_chunk_scan_combined of torch.ops.matmul_to_mamba.
"""

from kernels.ssd.fused import which
from kernels.ssd.operators import five, fused, mamba_chunk_scan_combined

__all__ = ["five", "fused", "mamba_chunk_scan_combined", "which"]
