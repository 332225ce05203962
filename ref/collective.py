"""Sums over devices, in NumPy: what each device has afterwards.

A list has one array for each device. Sums are float64, in the order of devices, so that all get the same.

    all_reduce       every device the sum of all
    two_shot         the same in two steps: each device sums a share, and hands it to all
    all_reduce_norm  the sum added to a residual, and the RMSNorm of that
    product          residual + W x, where each device has some columns of W and the same part of x
"""

import numpy as np


def all_reduce(arrays):
    """[sum of all arrays] for each device. arrays: one shape each, any dtype; float64 comes back."""
    expect_alike(arrays)
    total = np.zeros(arrays[0].shape)
    for array in arrays:
        total += array
    return [total.copy() for _ in arrays]


def two_shot(arrays):
    """The same: 1. device d sums share d of all arrays (reduce-scatter); 2. it hands the sum to all (all-gather).

    So a device reads (devices - 1) / devices of an array from the others and writes as much, where in one step it would
    read devices - 1 arrays.
    """
    expect_alike(arrays)
    shape, count = arrays[0].shape, len(arrays)
    flat = [np.asarray(array, np.float64).reshape(-1) for array in arrays]
    out = [np.zeros(flat[0].size) for _ in arrays]
    each = -(-flat[0].size // count)
    for device in range(count):
        share = slice(device * each, (device + 1) * each)
        total = sum(array[share] for array in flat)  # 1
        for other in range(count):
            out[other][share] = total  # 2
    return [array.reshape(shape) for array in out]


def all_reduce_norm(arrays, residual, weight, eps=1e-5):
    """(new residual, its norm), the same on all devices.

    arrays (rows, cols) of each device, residual (rows, cols), weight (cols,).
    1. and 2. residual + the sum over devices; 3. the mean of its squares; 4. scaled by 1 / √(mean + eps), weighted.
    """
    kept = residual + all_reduce(arrays)[0]  # 1, 2
    square = (kept**2).mean(axis=-1, keepdims=True)  # 3
    return kept, kept / np.sqrt(square + eps) * weight  # 4


def product(Ws, xs, residual):
    """residual + Σ W x over devices. Ws (rows, cols) and xs (cols,): each device's columns, and its part of x."""
    return residual + all_reduce([np.float64(W) @ np.float64(x) for W, x in zip(Ws, xs, strict=True)])[0]


def link_bytes(devices, message, steps=1):
    """Bytes that each device sends over the link, of a message of so many: pushed to all in one step, or in two."""
    return (devices - 1) * message if steps == 1 else 2 * (devices - 1) * -(-message // devices)


def expect_alike(arrays):
    shapes = {np.shape(array) for array in arrays}
    if len(shapes) != 1:
        raise ValueError(f"arrays: expected one shape on all devices, got {sorted(shapes)}")
