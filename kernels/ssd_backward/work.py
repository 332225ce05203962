"""What the SSD layer of Mamba-2 2.7B asks for, backwards and both ways: bytes and flops."""

from kernels.ssd import bench as prefill
from kernels.ssd.five import least as least_forward


def least(seqlen, both=True, chunk_size=64, size=2):
    """(bytes, flops) of the layer backwards, or both ways: dy, x, dt, B and C are read once, their gradients written.

    Products, with chunks of chunk_size: dy x^T and (C B^T L)^T dy inside of a chunk; h and dh from chunk to chunk, and
    dh B, h^T dy and dh^T x out of them. Those without heads are left out.
    """
    shape = prefill.Shape()
    _, nheads, headdim, ngroups, dstate = shape
    moved = size * seqlen * (3 * nheads * headdim + 2 * nheads + 4 * ngroups * dstate)
    flops = 2 * seqlen * nheads * headdim * (2 * ((chunk_size + 1) // 2) + 5 * dstate)
    if both:
        more = least_forward(1, seqlen, *shape[1:])
        moved, flops = moved + more[0], flops + more[1]
    return moved, flops
