"""A Mamba-2 layer beside its state space scan (kernels/ssd): convolution, norms, products of a token, and the step."""

from kernels.mamba2.operations import add_norm, conv1d, conv_step, embed, gated_norm, norm_in_proj, norm_out_proj
from kernels.mamba2.states import QuantizedState
from kernels.mamba2.stepping import state_step

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
