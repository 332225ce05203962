"""PTX's types as NumPy's, and registers in their whole shape. Halves are kept as their bits."""

import numpy as np

INTEGER_TYPES = {p + str(n) for p in "usb" for n in (8, 16, 32, 64)}
DTYPES = {"f32": np.dtype("f4"), "f64": np.dtype("f8"), "f16": np.dtype("u2"), "bf16": np.dtype("u2")}
DTYPES |= {"f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4")}
DTYPES |= {p + str(8 * n): np.dtype(f"{'i' if p == 's' else 'u'}{n}") for p in "usb" for n in (1, 2, 4, 8)}


def broadcast(array, shape):
    """np.broadcast_to, which takes its time also where there is nothing to do."""
    return array if array.shape == shape else np.broadcast_to(array, shape)
