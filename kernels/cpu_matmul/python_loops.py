"""Rung 1, Python loops: the definition, one element at a time, on NumPy arrays."""


def matmul(A, B, C):
    """C = A B, written into C. A (m, k), B (k, n), C (m, n)."""
    (m, k), n = A.shape, B.shape[1]
    for i in range(m):
        for j in range(n):
            acc = 0.0
            for p in range(k):
                acc += A[i, p] * B[p, j]
            C[i, j] = acc
