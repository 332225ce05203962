"""A decoder layer in few launches: what stands between two matrix–vector products moves into them.

    rmsnorm, add, silu_mul     the pieces, a launch each
    norm_qkv                   RMSNorm and the three products q, k, v
    gemv_residual              a product, added to the residual stream
    norm_glu                   RMSNorm, gate, up and silu(gate) · up
    down_residual              the way out of the feed-forward block: gemv_residual by its role
    DecoderLayer               a layer without attention, in 12 launches, 4 or 1

All vectors and matrices of a call have one dtype, float16 or bfloat16, and lie contiguously on one device: CUDA
tensors run on their card, CPU tensors on the SIMT machine. Sums are fp32, rounded once to that dtype. Matrices are
row-major, (outputs, inputs), as torch.nn.Linear holds them. Any size from 1 on is legal; fast are 8 · n columns, up to
32768, where all matrices, x and norm_weight start at addresses divisible by 16. Gradients are not tracked.

eps=   what is added to a mean square: a number, 0 or more
out=   a tensor to write the result to, of the right shape, apart from all inputs
pdl=   True: programmatic dependent launch. The kernel may start before the one ahead of it in the stream ends, and,
       where that was launched so too, before the one ahead of that, and so on. It fetches weights meanwhile, the norm's
       among them, which none of them may write; other vectors it reads, and results it writes, only after all of them
       have ended.

TypeError or ValueError names the argument, what was expected and what came; nothing has been written by then.
torch.compile takes each as an operator, torch.ops.matmul_to_mamba.fusion_rmsnorm and so on.
"""

from kernels.fusion.layer import DecoderLayer
from kernels.fusion.operators import add, down_residual, gemv_residual, norm_glu, norm_qkv, rmsnorm, silu_mul

__all__ = [
    "DecoderLayer",
    "add",
    "down_residual",
    "gemv_residual",
    "norm_glu",
    "norm_qkv",
    "rmsnorm",
    "silu_mul",
]
