"""Tensor maps: how cp.async.bulk.tensor finds a box of an array, and how the box lies in shared memory.

    map = simt.TensorMap(array, box=(128, 64), swizzle=128)
    kernel(grid, block, map, ...)       for a parameter `const __grid_constant__ CUtensorMap map`

The kernel's source declares the type itself: struct alignas(64) CUtensorMap { unsigned long long opaque[16]; };
On a card, cuTensorMapEncodeTiled makes the same map: tile mode, element strides 1, no interleave, zeros outside.
"""

import numpy as np

SWIZZLES = (0, 32, 64, 128)  # bytes; 0: none
BYTES = 128  # of a CUtensorMap


class TensorMap:
    """A view of `array` in boxes.

    array     1 to 5 axes of numbers of 1, 2, 4 or 8 bytes; the last axis dense, the strides of the others multiples of
              16 bytes. bfloat16 goes as uint16
    box       the box's shape, in the array's order: up to 256 each; its last axis a multiple of 16 bytes
    swizzle   0, 32, 64 or 128 bytes: the last axis of the box is then as long, and the 16-byte pieces of each row of
              shared memory are exchanged (`swizzled`)

    The instruction's coordinates come in the opposite order, the last axis first; that one must be a multiple of 16
    bytes, and none of a store's may be negative: on a card, both are illegal instructions. What lies outside of the
    array is read as zeros and not written. ValueError and TypeError name the argument.
    """

    def __init__(self, array, box, *, swizzle=0):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"array: expected a NumPy array; got {type(array).__name__}")
        if not 1 <= array.ndim <= 5:
            raise ValueError(f"array: expected 1 to 5 axes; got {array.ndim}")
        item = array.dtype.itemsize
        if array.dtype.kind not in "iuf" or item not in (1, 2, 4, 8):
            raise ValueError(f"array: expected numbers of 1, 2, 4 or 8 bytes; got dtype {array.dtype}")
        if 0 in array.shape:
            raise ValueError(f"array: expected at least one element along each axis; got shape {array.shape}")
        if array.shape[-1] > 1 and array.strides[-1] != item:
            raise ValueError(f"array: expected a dense last axis, stride {item}; got strides {array.strides}")
        for axis, (length, stride) in enumerate(zip(array.shape[:-1], array.strides)):
            if length > 1 and (stride <= 0 or stride % 16):
                raise ValueError(f"array: expected strides that are multiples of 16 bytes; axis {axis} has {stride}")
        box = tuple(int(n) for n in box)
        if len(box) != array.ndim:
            raise ValueError(f"box: expected {array.ndim} numbers, as many as the array has axes; got {box}")
        if not all(1 <= n <= 256 for n in box):
            raise ValueError(f"box: expected 1 to 256 along each axis; got {box}")
        inner = box[-1] * item
        if inner % 16:
            raise ValueError(f"box: expected a last axis of a multiple of 16 bytes; got {inner}")
        if swizzle not in SWIZZLES:
            raise ValueError(f"swizzle: expected one of {SWIZZLES} bytes; got {swizzle!r}")
        if swizzle and inner != swizzle:
            raise ValueError(
                f"swizzle: with {swizzle} bytes a box has a last axis of {swizzle} bytes; this one has {inner} "
                "(shorter ones, which the hardware takes, are not covered)"
            )
        self.array, self.box, self.swizzle = array, box, swizzle
        self.size = int(np.prod(box)) * item  # bytes of a box
        self.align = 8 * swizzle or 128  # of a box in shared memory: the swizzle's pattern repeats after so many bytes
        self.order = None if not swizzle else swizzled(np.arange(0, self.size, 16), swizzle) // 16

    def place(self, coordinates):
        """(slices of the array, slices of the box) that lie inside; coordinates in the instruction's order."""
        inside, within = [], []
        for start, length, size in zip(reversed(coordinates), self.box, self.array.shape):
            low, high = max(start, 0), min(start + length, size)
            inside.append(slice(low, max(low, high)))
            within.append(slice(low - start, max(low, high) - start))
        return tuple(inside), tuple(within)

    def read(self, coordinates):
        """The bytes of a box, as shared memory holds them."""
        inside, within = self.place(coordinates)
        box = np.zeros(self.box, self.array.dtype)
        box[within] = self.array[inside]
        data = box.reshape(-1).view(np.uint8)
        return data if self.order is None else data.reshape(-1, 16)[self.order].reshape(-1)

    def write(self, coordinates, data):
        """Put a box's bytes, as shared memory held them, into the array."""
        if self.order is not None:
            data = data.reshape(-1, 16)[self.order].reshape(-1)
        inside, within = self.place(coordinates)
        self.array[inside] = data.view(self.array.dtype).reshape(self.box)[within]


def swizzled(addresses, swizzle):
    """Where a byte really lies: bits 4-6 of its shared address (4-5 for 64, 4 for 32) XOR bits 7-9 (7-8, 7).

    The exchange undoes itself. It is one of absolute addresses: it does not matter where a matrix begins.
    """
    if not swizzle:
        return addresses
    return addresses ^ ((addresses >> 3) & (swizzle - 16))
