"""Matrix product, as one line and as the loops that the kernels rearrange.

A  (m, k)
B  (k, n)
C  (m, n)   C[i, j] = sum over p of A[i, p] · B[p, j]

A linear layer has its matrix the other way round, W (n, k): a row of W for each column of y = x W^T. Then both factors
are read along k.
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


def linear(x, W):
    """x (..., k) times the transpose of W (n, k), summed in float64: (..., n), float64."""
    return np.asarray(x, np.float64) @ np.asarray(W, np.float64).T


def linear_tiled(x, W, tile=(128, 128, 64), band=16):
    """The same for x (m, k), as the kernels walk: tile by tile, in the order of `tile_order`.

    1. A tile of y, tile[0] × tile[1].
    2. Walk along k in steps of tile[2]: as many rows of x and of W as the tile has rows and columns.
    3. Multiply the two and add to the tile's sums.
    4. Store the sums.
    """
    (m, k), n = x.shape, len(W)
    x, W = np.asarray(x, np.float64), np.asarray(W, np.float64)
    y = np.full((m, n), np.nan)
    for row, column in tile_order(-(-m // tile[0]), -(-n // tile[1]), band):  # 1
        rows, columns = slice(row * tile[0], (row + 1) * tile[0]), slice(column * tile[1], (column + 1) * tile[1])
        sums = np.zeros((len(x[rows]), len(W[columns])))
        for p in range(0, k, tile[2]):  # 2
            sums += x[rows, p : p + tile[2]] @ W[columns, p : p + tile[2]].T  # 3
        y[rows, columns] = sums  # 4
    return y


def tile_order(rows, columns, band):
    """Row and column of each of rows × columns tiles, so that tiles which follow each other share rows of x and of W:
    bands of `band` rows of tiles, from left to right, each column of a band from top to bottom."""
    for top in range(0, rows, band):
        for column in range(columns):
            for row in range(top, min(top + band, rows)):
                yield row, column
