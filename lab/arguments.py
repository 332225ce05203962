"""Check an argument before anything is computed, and say what is wrong in one sentence."""

import numpy as np


def expect_array(where, name, value, *, dtype, shape, writeable=False):
    """Raise unless `value` is a C-contiguous NumPy array of this dtype and shape.

    where      the function's name, for the message
    dtype      one NumPy dtype, or several of which one must fit
    shape      a tuple: an int is an exact length, a str ("rows") names a free one
    writeable  True for an output: it must not be read-only

    TypeError for a wrong type or dtype, ValueError for a wrong shape or layout. Nothing is cast or copied.
    """
    dtypes = dtype if isinstance(dtype, (list, tuple)) else (dtype,)

    def wanted():  # made only for a message: most calls need none
        return f"{' or '.join(str(np.dtype(d)) for d in dtypes)} array of shape {_shape(shape)}"

    def got():
        return f"{value.dtype} {_shape(value.shape)}"

    if not isinstance(value, np.ndarray):
        raise TypeError(f"{where}: {name} must be a NumPy {wanted()}, got {type(value).__name__}")
    if not any(value.dtype == d for d in dtypes):
        raise TypeError(f"{where}: {name} must be a {wanted()}, got {got()}")
    if value.ndim != len(shape):
        raise ValueError(f"{where}: {name} must have {len(shape)} dimension(s), {_shape(shape)}, got {got()}")
    if any(isinstance(want, (int, np.integer)) and want != have for want, have in zip(shape, value.shape)):
        raise ValueError(f"{where}: {name} must be a {wanted()}, got {got()}")
    flags = value.flags
    if not flags.c_contiguous:
        raise ValueError(
            f"{where}: {name} must be C-contiguous (rows one after another in memory), got {got()} with strides "
            f"{value.strides}; np.ascontiguousarray({name}) makes a contiguous copy"
        )
    if not flags.aligned:
        raise ValueError(f"{where}: {name} must be aligned to its element size, got an unaligned view")
    if writeable and not flags.writeable:
        raise ValueError(f"{where}: {name} must be writeable, got a read-only array")


def expect_count(where, name, value, *, low=1, high=None):
    """Raise unless `value` is a whole number between `low` and `high`; return it as an int."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{where}: {name} must be a whole number, got {value!r}")
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{where}: {name} must be {limits}, got {value}")
    return int(value)


def expect_apart(where, out, **inputs):
    """Raise if the output shares memory with an input: it would be overwritten while it is read."""
    for name, value in inputs.items():
        if np.may_share_memory(out, value):
            raise ValueError(f"{where}: out must not share memory with {name}")


def _shape(shape):
    inner = ", ".join(str(s) for s in shape)
    return f"({inner},)" if len(shape) == 1 else f"({inner})"
