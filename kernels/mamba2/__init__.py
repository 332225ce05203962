"""A Mamba-2 layer beside its state space scan (kernels/ssd): convolution, norms, products of a token, and the step.

    conv1d           causal convolution and silu of a prompt, or of several end to end, with the states before and after
    conv_step        the same of one token
    gated_norm       RMSNorm of y · silu(z), in groups
    add_norm         the residual stream of a prompt: an addition in place, and RMSNorm
    state_step       a token of the state space, of states in 32, 16 or 8 bits (QuantizedState), with the gate
    norm_in_proj     of a token: RMSNorm, in_proj and the convolution's step in one launch
    norm_out_proj    of a token: RMSNorm, out_proj and the residual stream in one launch; both with bulk=True on a ring
                     that TMA fills, for launches with pdl one behind another
    embed            the residual stream's beginning, in float32 too

Vectors and matrices are float16 or bfloat16, what a block computes its steps with (A, D, dt_bias, the convolution's
weight) float32. CUDA tensors run on their card, CPU tensors on the SIMT machine. Sums are fp32, rounded once. pdl= and
out= as in kernels/fusion. TypeError or ValueError names the argument, what was expected and what came, before anything
is written. torch.compile takes each but embed as an operator: torch.ops.matmul_to_mamba.mamba2_conv1d and so on.
Gradients are not tracked.
"""

from kernels.mamba2.operators import (
    add_norm,
    conv1d,
    conv_step,
    embed,
    gated_norm,
    norm_in_proj,
    norm_out_proj,
    state_step,
)
from kernels.mamba2.states import QuantizedState

__all__ = [
    "QuantizedState",
    "add_norm",
    "conv1d",
    "conv_step",
    "embed",
    "gated_norm",
    "norm_in_proj",
    "norm_out_proj",
    "state_step",
]
