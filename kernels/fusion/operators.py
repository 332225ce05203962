"""The operations of a layer as operators of torch.library: fusion_rmsnorm and so on.

torch.compile looks through DecoderLayer's `fused` and `unfused`, and takes these.
"""

from kernels.fusion import rungs
from kernels.fusion.arguments import DTYPES, expect_eps
from lab.operators import operator
from lab.tensors import expect, expect_first


def _operation(rung, result, **axes):
    """A rung, its tensors' axes by name, and those of its result, which are added up."""
    where = rung.__name__
    eps = where in ("rmsnorm", "norm_qkv", "norm_glu")

    def fake(eps=0.0, pdl=False, **tensors):
        expect_eps(where, eps)
        tensors = {name: tensors[name] for name in axes}  # in order: the first says what the others must be like
        (name, first), sizes = next(iter(tensors.items())), {}
        expect_first(where, name, first, axes[name], tuple(DTYPES))
        for name, tensor in tensors.items():
            expect(where, name, tensor, first, tuple(sizes.get(axis, axis) for axis in axes[name]))
            sizes.update(zip(axes[name], tensor.shape))
            if tensor.ndim == 2:
                rungs.expect_rows(where, name, len(tensor))
        return first.new_empty(sum(sizes[axis] for axis in result))

    inputs = "".join(f"Tensor {name}, " for name in axes) + "float eps=1e-05, " * eps + "bool pdl=False"
    return operator(f"fusion_{where}", inputs, fake=fake)(rung)


H, V = ("hidden",), ("n",)
rmsnorm = _operation(rungs.rmsnorm, H, x=H, weight=H)
add = _operation(rungs.add, V, a=V, b=V)
silu_mul = _operation(rungs.silu_mul, V, gate=V, up=V)
gemv_residual = _operation(rungs.gemv_residual, ("rows",), W=("rows", "cols"), x=("cols",), residual=("rows",))
down_residual = _operation(rungs.down_residual, H, W_down=("hidden", "ffn"), x=("ffn",), residual=H)
norm_glu = _operation(rungs.norm_glu, ("ffn",), x=H, norm_weight=H, W_gate=("ffn", "hidden"), W_up=("ffn", "hidden"))
norm_qkv = _operation(
    rungs.norm_qkv,
    ("q_rows", "k_rows", "v_rows"),
    x=H,
    norm_weight=H,
    Wq=("q_rows", "hidden"),
    Wk=("k_rows", "hidden"),
    Wv=("v_rows", "hidden"),
)
