"""Matrix product, as one line and as the loops that the kernels rearrange.

A  (m, k)
B  (k, n)
C  (m, n)   C[i, j] = sum over p of A[i, p] · B[p, j]
"""

import numpy as np


def matmul(A, B):
    """A (m, k) times B (k, n), summed in float64 and returned in float64."""
    return np.asarray(A, np.float64) @ np.asarray(B, np.float64)


def matmul_loops(A, B):
    """The definition: for each row i and column j of C, a dot product along p. In Python floats, which are float64."""
    (m, k), n = A.shape, B.shape[1]
    C = np.zeros((m, n))
    for i in range(m):
        for j in range(n):
            for p in range(k):
                C[i, j] += float(A[i, p]) * float(B[p, j])
    return C


def matmul_tiled(A, B, tile=32):
    """The same sums, tile by tile.

    1. Cut C into tiles; each is computed on its own.
    2. Walk along p in steps of `tile`: a tile of A and a tile of B.
    3. Multiply the two and add to the tile of C.

    The last tile of a row or column may be smaller: Python's slices stop at the edge by themselves, C's loops do not.
    """
    (m, k), n = A.shape, B.shape[1]
    A, B = np.asarray(A, np.float64), np.asarray(B, np.float64)
    C = np.zeros((m, n))
    for i in range(0, m, tile):  # 1
        for j in range(0, n, tile):
            for p in range(0, k, tile):  # 2
                C[i : i + tile, j : j + tile] += A[i : i + tile, p : p + tile] @ B[p : p + tile, j : j + tile]  # 3
    return C
