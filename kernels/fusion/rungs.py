"""The operations of a layer, a launch each. What eps=, out= and pdl= are, and which inputs are legal: __init__.py."""

from kernels.fusion.arguments import expect_eps, expect_vector
from kernels.fusion.launches import launch, module
from lab.prepared import Calls
from lab.tensors import expect, output

MOST_ROWS = 2**31 - 8  # of a kernel's matrix, or of those it takes as one: it counts rows, in whole groups, in 32 bits
CALLS = Calls("fusion")


def rmsnorm(x, weight, eps=1e-5, *, out=None, pdl=False):
    """x · weight / √(mean of x² + eps). x, weight (hidden,) → (hidden,). 6 bytes and 4 flops an element, one launch."""
    options = "rmsnorm", eps, pdl
    if (y := CALLS.run(options, out, x, weight)) is not None:
        return y
    expect_vector("rmsnorm", "x", x)
    expect("rmsnorm", "weight", weight, x, tuple(x.shape))
    expect_eps("rmsnorm", eps)
    y = output("rmsnorm", out, x, tuple(x.shape), x=x, weight=weight)
    threads = min(1024, -(-x.numel() // 32) * 32)
    with CALLS.preparing(options, (out,), (y,), (x, weight)):
        module("rmsnorm", x.dtype).rmsnorm(1, threads, x, weight, y, x.numel(), float(eps), pdl=pdl)
    return y


def add(a, b, *, out=None, pdl=False):
    """a + b. (n,) → (n,). 6 bytes and 1 flop an element, one launch."""
    return _elementwise("add", "a", a, "b", b, out, pdl)


def silu_mul(gate, up, *, out=None, pdl=False):
    """gate / (1 + exp(-gate)) · up. (n,) → (n,). 6 bytes an element, one launch."""
    return _elementwise("silu_mul", "gate", gate, "up", up, out, pdl)


def gemv_residual(W, x, residual, *, out=None, pdl=False):
    """residual + W x. W (rows, cols), x (cols,), residual (rows,) → (rows,).

    2 · (rows · cols + cols + 2 · rows) bytes, 2 · rows · cols flops, one launch; as two launches 4 · rows bytes more.
    """
    return _gemv_residual("gemv_residual", "W", W, x, residual, out, pdl)


def down_residual(W_down, x, residual, *, out=None, pdl=False):
    """residual + W_down x. W_down (hidden, ffn), x (ffn,), residual (hidden,) → (hidden,). See gemv_residual."""
    return _gemv_residual("down_residual", "W_down", W_down, x, residual, out, pdl)


def norm_qkv(x, norm_weight, Wq, Wk, Wv, eps=1e-5, *, out=None, pdl=False):
    """Wq n, Wk n and Wv n one after another, n = rmsnorm(x, norm_weight).

    x, norm_weight (hidden,), Wq (q_rows, hidden), Wk (k_rows, hidden), Wv (v_rows, hidden)
    → (q_rows + k_rows + v_rows,)

    2 · (hidden · rows + 2 · hidden + rows) bytes, 2 · hidden · rows flops for `rows` in all; one launch, not four.
    """
    where = "norm_qkv"
    options = where, eps, pdl
    if (y := CALLS.run(options, out, x, norm_weight, Wq, Wk, Wv)) is not None:
        return y
    expect_vector(where, "x", x)
    hidden = x.numel()
    expect(where, "norm_weight", norm_weight, x, (hidden,))
    for name, W in (("Wq", Wq), ("Wk", Wk), ("Wv", Wv)):
        expect(where, name, W, x, ("rows", hidden))
    expect_eps(where, eps)
    rows = len(Wq) + len(Wk) + len(Wv)
    expect_rows(where, "Wq, Wk and Wv", rows, " in all")
    y = output(where, out, x, (rows,), x=x, norm_weight=norm_weight, Wq=Wq, Wk=Wk, Wv=Wv)
    args = (x, norm_weight, Wq, Wk, Wv, y, len(Wq), len(Wk), len(Wv), hidden, float(eps))
    with CALLS.preparing(options, (out,), (y,), args[:5]):
        launch(where, x.dtype, args[:5], rows, hidden, args, pdl)
    return y


def norm_glu(x, norm_weight, W_gate, W_up, eps=1e-5, *, out=None, pdl=False):
    """silu(W_gate n) · (W_up n), n = rmsnorm(x, norm_weight), silu(a) = a / (1 + exp(-a)).

    x, norm_weight (hidden,), W_gate, W_up (ffn, hidden) → (ffn,)

    2 · (2 · hidden · ffn + 2 · hidden + ffn) bytes, 4 · hidden · ffn flops; one launch, not four.
    """
    where = "norm_glu"
    options = where, eps, pdl
    if (y := CALLS.run(options, out, x, norm_weight, W_gate, W_up)) is not None:
        return y
    expect_vector(where, "x", x)
    hidden = x.numel()
    expect(where, "norm_weight", norm_weight, x, (hidden,))
    expect(where, "W_gate", W_gate, x, ("ffn", hidden))
    expect(where, "W_up", W_up, x, (len(W_gate), hidden))
    expect_eps(where, eps)
    expect_rows(where, "W_gate", len(W_gate))
    y = output(where, out, x, (len(W_gate),), x=x, norm_weight=norm_weight, W_gate=W_gate, W_up=W_up)
    args = (x, norm_weight, W_gate, W_up, y, len(W_gate), hidden, float(eps))
    with CALLS.preparing(options, (out,), (y,), args[:4]):
        launch(where, x.dtype, args[:4], len(W_gate), hidden, args, pdl, per_output=2)
    return y


def _gemv_residual(where, name, W, x, residual, out, pdl):
    options = "gemv_residual", pdl
    if (y := CALLS.run(options, out, W, x, residual)) is not None:
        return y
    expect_vector(where, "x", x)
    expect(where, name, W, x, ("rows", x.numel()))
    expect(where, "residual", residual, x, (len(W),))
    expect_rows(where, name, len(W))
    y = output(where, out, x, (len(W),), **{name: W, "x": x, "residual": residual})
    args = (W, x, residual, y, *W.shape)
    with CALLS.preparing(options, (out,), (y,), (W, x, residual)):
        launch("gemv_residual", x.dtype, (W, x), *W.shape, args, pdl)
    return y


def expect_rows(where, name, rows, in_all=""):
    if rows > MOST_ROWS:
        raise ValueError(f"{where}: {name} must have at most {MOST_ROWS} rows{in_all}, got {rows}")


def _elementwise(where, first, a, second, b, out, pdl):
    options = where, pdl
    if (y := CALLS.run(options, out, a, b)) is not None:
        return y
    expect_vector(where, first, a)
    expect(where, second, b, a, tuple(a.shape))
    y = output(where, out, a, tuple(a.shape), **{first: a, second: b})
    with CALLS.preparing(options, (out,), (y,), (a, b)):
        module("elementwise", a.dtype)[where](-(-a.numel() // 256), 256, a, b, y, a.numel(), pdl=pdl)
    return y
