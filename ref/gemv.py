"""Matrix–vector product.

W  (rows, cols)   weights: one row for each output
x  (cols,)        input
y  (rows,)        output, y[r] = sum over c of W[r, c] · x[c]
"""

import numpy as np


def gemv(W, x):
    """W (rows, cols) times x (cols,), summed in float64 and returned in float64.

    float64 because the reference must be better than anything that is held against it: a float32 sum of n terms is
    off by about n·6e-8 in the worst case, a float64 sum by n·1e-16.
    """
    return np.asarray(W, np.float64) @ np.asarray(x, np.float64)


def gemv_loops(W, x):
    """The same, spelled out: the order in which every kernel of this course does its sums is a variation on this."""
    n_rows, n_cols = W.shape
    y = np.zeros(n_rows)
    for r in range(n_rows):
        for c in range(n_cols):
            y[r] += float(W[r, c]) * float(x[c])
    return y
