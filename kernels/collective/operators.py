"""The exchanges within one process as operators of torch.library, so that torch.compile(fullgraph=True) takes them:
torch.ops.matmul_to_mamba.collective_all_reduce, collective_all_reduce_norm and collective_product, of lists of tensors.

They run in the group that is kept for the tensors' devices. The fakes make the same checks. kernels.collective's own
functions become these while torch.compile looks at them; between processes it is processes.py's operator.
"""

from collections.abc import Sequence

import torch

from kernels.collective import fused
from kernels.collective.arguments import expect_tensors
from lab.operators import _WithoutMemory

NAMESPACE = "matmul_to_mamba"


def register(all_reduce):
    """Define the operators; all_reduce is the function that the first of them runs. Returns it."""

    @torch.library.custom_op(f"{NAMESPACE}::collective_all_reduce", mutates_args={"tensors"})
    def run(tensors: Sequence[torch.Tensor], pdl: bool = False) -> None:
        """Each device's tensor becomes the sum of all."""
        all_reduce(list(tensors), pdl=pdl)

    @run.register_fake
    def _(tensors, pdl=False):
        with _WithoutMemory():
            expect_tensors("all_reduce", "tensors", tensors)

    return run


@torch.library.custom_op(f"{NAMESPACE}::collective_all_reduce_norm", mutates_args={"residuals", "out"})
def all_reduce_norm(
    tensors: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor], weights: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor], eps: float = 1e-5, pdl: bool = False,
) -> None:  # fmt: skip
    """As kernels.collective.all_reduce_norm, with out: PyTorch takes no lists back from what writes to lists."""
    fused.all_reduce_norm(list(tensors), list(residuals), list(weights), eps, out=list(out), pdl=pdl)


@all_reduce_norm.register_fake
def _(tensors, residuals, weights, out, eps=1e-5, pdl=False):
    where = "all_reduce_norm"
    with _WithoutMemory():
        expect_tensors(where, "tensors", tensors, shape=("rows", "hidden"))
        expect_tensors(where, "residuals", residuals, like=tensors, shape=tuple(tensors[0].shape))
        expect_tensors(where, "weights", weights, like=tensors, shape=(tensors[0].shape[1],))
        expect_tensors(where, "out", out, like=tensors, shape=tuple(tensors[0].shape))


@torch.library.custom_op(f"{NAMESPACE}::collective_product", mutates_args=())
def product(
    Ws: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor], pdl: bool = False
) -> list[torch.Tensor]:
    """As kernels.collective.product."""
    return fused.product(list(Ws), list(xs), list(residuals), pdl=pdl)


@product.register_fake
def _(Ws, xs, residuals, pdl=False):
    with _WithoutMemory():
        expect_tensors("product", "Ws", Ws, shape=("rows", "cols"), dtypes=(torch.float16, torch.bfloat16))
        expect_tensors("product", "xs", xs, like=Ws, shape=(Ws[0].shape[1],))
        expect_tensors("product", "residuals", residuals, like=Ws, shape=(Ws[0].shape[0],))
    return [torch.empty_like(residual) for residual in residuals]
