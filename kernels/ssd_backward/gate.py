"""With z, y = v silu(z): launch 0 of few makes dz = dy v silu'(z), and dy silu(z), the gradient of v, from which all
else follows. v is what the forward gives without z. Reads three numbers, writes two; both in the dtype of x."""

import triton
import triton.language as tl

from kernels.ssd.launching import launch

ROWS = 16  # tokens of a program, of one head


@triton.jit(do_not_specialize=["seqlen", "nheads"])
def gate_kernel(
    dy, z, v, dz, dv, seqlen, nheads, dy_b, dy_l, dy_h, z_b, z_l, z_h,
    P: tl.constexpr, WP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """grid (H * spans of tokens, batch, 1); v, dz and dv are contiguous."""
    h, b = (tl.program_id(0) % nheads).to(tl.int64), tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0) // nheads).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    p = tl.arange(0, WP)
    there = (token < seqlen)[:, None] & (p < P)[None, :]
    at = ((b * seqlen + token) * nheads + h)[:, None] * P + p[None, :]
    dys = tl.load(dy + b * dy_b + h * dy_h + token[:, None] * dy_l + p[None, :], there, other=0).to(tl.float32)
    zs = tl.load(z + b * z_b + h * z_h + token[:, None] * z_l + p[None, :], there, other=0).to(tl.float32)
    vs = tl.load(v + at, there, other=0).to(tl.float32)
    opened = 1 / (1 + tl.exp(-zs))
    tl.store(dz + at, (dys * vs * opened * (1 + zs * (1 - opened))).to(dz.dtype.element_ty), there)
    tl.store(dv + at, (dys * zs * opened).to(dv.dtype.element_ty), there)


def run(dy, z, v):
    """(dz, dy silu(z)), contiguous and like v; v may be written over by neither."""
    batch, seqlen, nheads, headdim = v.shape
    dz, dv = v.new_empty(v.shape), v.new_empty(v.shape)
    grid = nheads * -(-seqlen // ROWS), batch, 1
    numbers = seqlen, nheads, *dy.stride()[:3], *z.stride()[:3]
    width = max(16, 1 << (headdim - 1).bit_length())
    launch(gate_kernel, grid, (dy, z, v, dz, dv), numbers, (headdim, width, ROWS), num_warps=4)
    return dz, dv
