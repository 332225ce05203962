"""Tensor maps: what a Hopper kernel's `const __grid_constant__ CUtensorMap` is given, on a card and on the CPU.

    from lab.tensor_map import TensorMap

    module = cuda.load("fused.cu", arch="sm_90a")
    module.kernel(grid, block, TensorMap(x, box=(1, 64, 1, 64), swizzle=128), y, n)

The kernel's source declares the type: struct alignas(64) CUtensorMap { unsigned long long opaque[16]; };
The instruction's coordinates come in the opposite order of the tensor's axes, the last axis first.
"""

import functools

import torch

from lab import cuda_driver
from lab.tensors import expect_resolved

BYTES = 128  # of a CUtensorMap
RANKS, MOST = (1, 5), 256  # axes of a tensor; elements of a box along each
STRIDE_LIMIT = 2**40  # bytes
# Numbers of the driver's interface (cuda.h).
TYPES = {
    torch.uint8: 0,
    torch.int8: 0,
    torch.bool: 0,
    torch.float8_e4m3fn: 0,
    torch.float8_e5m2: 0,
    torch.uint16: 1,
    torch.int16: 1,
    torch.uint32: 2,
    torch.int32: 3,
    torch.uint64: 4,
    torch.int64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
BITS = {  # what NumPy has no name for goes to the SIMT machine as bits
    torch.bfloat16: torch.uint16,
    torch.bool: torch.uint8,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


class TensorMap:
    """A tensor in boxes, for TMA (cp.async.bulk.tensor): tile mode, zeros outside, where nothing is written either.

    tensor        1 to 5 axes, at least one element along each; starts at a multiple of 16 bytes; last axis dense,
                  strides of the others multiples of 16 bytes. Kept alive by the map
    box           the box's shape, in the tensor's order: 1 to 256 along each axis; its last axis a multiple of 16 bytes
    swizzle       0, 32, 64 or 128 bytes, how the 16-byte pieces of a row of the box are exchanged in shared memory; if
                  not 0, the last axis of the box has so many bytes
    l2_promotion  bytes that the L2 cache fetches at a time: 0 (no more than is asked for), 64, 128 or 256

    In the kernel: a box without a swizzle lies at a multiple of 128 bytes of shared memory, one with at a multiple of
    8 * swizzle; the first coordinate, along the last axis, is a multiple of 16 bytes; a store's are not negative.
    A map holds the tensor's address: it is good for as long as the tensor is not moved (set_, resize_).
    TypeError and ValueError name the argument; RuntimeError on a card before compute capability 9.0.
    """

    __slots__ = ("tensor", "box", "swizzle", "device", "index", "value")

    def __init__(self, tensor, box, swizzle=0, *, l2_promotion=256):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"TensorMap: tensor must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
            got = f"layout {tensor.layout} on {tensor.device}"
            raise ValueError(f"TensorMap: tensor must be dense, on the CPU or on a CUDA device, got {got}")
        expect_resolved("TensorMap", "tensor", tensor)
        box = box if type(box) is tuple else tuple(box) if hasattr(box, "__iter__") else (box,)
        self.tensor, self.box, self.swizzle = tensor, box, swizzle
        self.device, self.index = tensor.device, tensor.get_device()  # index -1: the CPU
        # What a launch hands over: the 128 bytes, or a simt.TensorMap.
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        self.value = encoded(self.index, *place, box, swizzle, l2_promotion)
        if self.index < 0:
            import simt

            array = tensor.detach().view(BITS.get(tensor.dtype, tensor.dtype)).numpy()
            self.value = simt.TensorMap(array, box, swizzle=swizzle)

    def get_device(self):
        """The card's index, -1 on the CPU: as of a tensor."""
        return self.index

    def __repr__(self):
        of = f"{str(self.tensor.dtype).removeprefix('torch.')} {tuple(self.tensor.shape)} on {self.device}"
        return f"<TensorMap of {of}, box {self.box}, swizzle {self.swizzle}>"


@functools.lru_cache(maxsize=4096)
def encoded(index, pointer, shape, strides, dtype, box, swizzle, l2_promotion):
    """After all checks, the map's 128 bytes for a card, or None for the CPU (index -1). The same map is made once."""
    strides = check(pointer, shape, strides, dtype, box, swizzle, l2_promotion)
    if index < 0:
        return None
    if cuda_driver.capability(index) < (9, 0):
        raise RuntimeError("TensorMap: tensor maps need a card of compute capability 9.0 or newer")
    numbers = SWIZZLES[swizzle], PROMOTIONS[l2_promotion]
    return cuda_driver.tensor_map(index, pointer, TYPES[dtype], shape[::-1], strides[::-1], box[::-1], *numbers)


def check(pointer, shape, strides, dtype, box, swizzle, l2_promotion):
    """Raise unless the hardware takes such a map. The strides of all axes but the last, in bytes."""
    low, high = RANKS
    if dtype not in TYPES:
        known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in TYPES))
        raise TypeError(f"TensorMap: tensor must have one of the dtypes {known}, got {dtype}")
    if not low <= len(shape) <= high or 0 in shape or max(shape) > 2**32:
        wanted = f"{low} to {high} axes, with 1 to 2**32 elements along each"
        raise ValueError(f"TensorMap: tensor must have {wanted}, got shape {tuple(shape)}")
    if pointer % 16:
        raise ValueError(
            f"TensorMap: tensor must start at a multiple of 16 bytes, got one that starts {pointer % 16} bytes behind"
        )
    item = dtype.itemsize
    if shape[-1] > 1 and strides[-1] != 1:
        raise ValueError(f"TensorMap: tensor must have a dense last axis, stride 1, got strides {strides}")
    found, span = [], shape[-1] * item
    for axis in reversed(range(len(shape) - 1)):
        size = strides[axis] * item
        if shape[axis] == 1:  # its stride moves nothing, but the driver looks at it
            size = -(-span // 16) * 16
        elif size <= 0 or size % 16 or size >= STRIDE_LIMIT:
            wanted = f"strides that are multiples of 16 bytes (16 / {item} = {16 // item} elements), below 2**40"
            raise ValueError(f"TensorMap: tensor must have {wanted}, got {size} bytes along axis {axis}")
        found.append(size)
        span = max(span, size * shape[axis])
    if len(box) != len(shape) or any(type(n) is not int for n in box):
        raise ValueError(f"TensorMap: box must be {len(shape)} ints, one for each axis of the tensor, got {box}")
    if not all(1 <= n <= MOST for n in box):
        raise ValueError(f"TensorMap: box must have 1 to {MOST} elements along each axis, got {box}")
    inner = box[-1] * item
    if inner % 16:
        raise ValueError(f"TensorMap: box must have a last axis of a multiple of 16 bytes, got {box[-1]} * {item}")
    if swizzle not in SWIZZLES:
        raise ValueError(f"TensorMap: swizzle must be 0, 32, 64 or 128 bytes, got {swizzle!r}")
    if swizzle and inner != swizzle:
        # The hardware takes shorter ones, and leaves gaps; longer ones it refuses.
        raise ValueError(
            f"TensorMap: with swizzle={swizzle} the last axis of box must have {swizzle} bytes, got {box[-1]} * {item}"
        )
    if l2_promotion not in PROMOTIONS:
        raise ValueError(f"TensorMap: l2_promotion must be 0, 64, 128 or 256 bytes, got {l2_promotion!r}")
    return tuple(reversed(found))
