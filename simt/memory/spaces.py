"""Where an address points: buffers in global memory, one shared memory a block, one local memory a thread.

Global buffers are the arrays that a kernel was given, each at an address of its own, far apart, so that a stray access
is noticed and can be named. What is worked out about the addresses of an access is kept with them (`Pattern`), so that
a pointer that moves through a loop costs one lookup: are they evenly spaced, which element is each.
"""

import numpy as np

REGION = 36  # each buffer owns 2**36 bytes of addresses
SHARED_WINDOW, LOCAL_WINDOW = 1 << 60, 1 << 61  # generic addresses of shared and local memory


class Pattern:
    """How the elements of a Known lie: signed addresses, even spacing along (block, warp, lane) or None."""

    __slots__ = ("known", "array", "strides", "residues", "indexes", "counts", "verified")

    def __init__(self, known):
        self.known = known
        self.array = known.array.view(np.int64 if known.width == 64 else np.int32)
        self.strides = spacing(self.array)
        self.residues, self.indexes, self.counts, self.verified = {}, {}, {}, set()

    def residue(self, size):
        """What all elements leave when divided by `size`, or None if they differ."""
        found = self.residues.get(size, -1)
        if found == -1:
            first = int(self.array[0, 0, 0]) % size
            if self.strides is not None:
                same = not any(s % size for s in self.strides)
            else:
                same = not ((self.array - first) & (size - 1)).any()
            found = self.residues[size] = first if same else None
        return found

    def index(self, size, space):
        """Element numbers, counted from the lowest address, in a memory that has a copy per block or thread."""
        key = (size, space.steps)
        found = self.indexes.get(key)
        if found is None:
            low = self.known.range(True)[0]
            found = (self.array.astype(np.int64) - low) // size
            for axis, (step, length) in enumerate(zip(space.steps, space.shape)):
                if step:
                    along = [1, 1, 1]
                    along[axis] = length
                    found = found + (np.arange(length) * (step // size)).reshape(along)
            self.indexes[key] = found
        return found


def spacing(a):
    """Strides (block, warp, lane) in bytes if a[i, j, k] = a[0, 0, 0] + i s0 + j s1 + k s2, else None."""
    first = a[0, 0, 0]
    steps = [a[1, 0, 0] - first, 0, 0] if a.shape[0] > 1 else [0, 0, 0]
    if a.shape[1] > 1:
        steps[1] = a[0, 1, 0] - first
    if a.shape[2] > 1:
        steps[2] = a[0, 0, 1] - first
    corner = sum(int(s) * (n - 1) for s, n in zip(steps, a.shape))
    if a[-1, -1, -1] - first != corner:
        return None
    i, j, k = (np.arange(n).reshape(shape) for n, shape in zip(a.shape, ((-1, 1, 1), (1, -1, 1), (1, 1, -1))))
    if ((i * steps[0] + j * steps[1] + k * steps[2]) == a - first).all():
        return tuple(int(s) for s in steps)
    return None


def pattern_of(known):
    found = known.patterns.get(0)
    if found is None:
        found = known.patterns[0] = Pattern(known)
    return found


class Space:
    """Some bytes of memory. `steps` are bytes from one block's, warp's, lane's copy to the next (0: the same copy)."""

    owner = None  # the device whose memory it is, where there are several (simt/devices.py)

    def __init__(self, name, data, origin, size, steps=(0, 0, 0), shape=(1, 1, 1), writable=True, dtype=None):
        self.name, self.bytes, self.origin, self.size = name, data, origin, size
        self.steps, self.shape, self.writable, self.dtype = steps, shape, writable, dtype
        self.views = {}
        self.written = None  # per byte, whether something was stored there (shared and local memory)
        self.generation = 0

    def view(self, dtype):
        """The bytes from the first aligned address on as elements of `dtype`; a rest too short for one is left out."""
        found = self.views.get(dtype)
        if found is None:
            item = np.dtype(dtype).itemsize
            aligned = self.bytes[-self.origin % item :]
            found = self.views[dtype] = aligned[: aligned.size // item * item].view(dtype)
        return found

    def watch(self):
        """Start to remember which bytes have been written."""
        self.written = Space(self.name, np.zeros(self.bytes.size, np.uint8), 0, self.size, self.steps, self.shape)
        return self


def full_strides(memory, pattern):
    """Shape and strides of an evenly spaced access, with the copies per block or thread; axes all alike stay 1."""
    shape, strides = [], []
    for n, s, step, length in zip(pattern.array.shape, pattern.strides, memory.steps, memory.shape):
        if step:
            shape.append(length)
            strides.append(s + step)
        elif s == 0:
            shape.append(1)
            strides.append(0)
        else:
            shape.append(n)
            strides.append(s)
    return shape, strides


def gather(memory, pattern, shift, low, dtype, extra):
    """The elements that a pattern points to, `extra` bytes on."""
    if pattern.strides is not None:
        shape, strides = full_strides(memory, pattern)
        first = int(pattern.array[0, 0, 0]) + shift + extra - memory.origin
        return np.ndarray(shape, dtype, memory.bytes, first, strides).copy()
    item = dtype.itemsize
    start = (low + extra - memory.origin) // item
    return memory.view(dtype)[start:].take(pattern.index(item, memory))


def scatter(memory, pattern, shift, low, dtype, extra, value, mask):
    """Write `value` to the elements; where threads share one, the last one's stays, as the hardware may choose."""
    if pattern.strides is not None:
        shape, strides = full_strides(memory, pattern)
        first = int(pattern.array[0, 0, 0]) + shift + extra - memory.origin
        target = np.ndarray(shape, dtype, memory.bytes, first, strides)
        if mask is not None:
            np.copyto(target, value, where=mask)
        else:
            target[...] = last(value, shape)
        return
    item = dtype.itemsize
    index = pattern.index(item, memory)
    view = memory.view(dtype)[(low + extra - memory.origin) // item :]
    view[index] = last(value, index.shape)


def last(value, shape):
    """`value` cut to `shape`: along an axis of length 1 the last element."""
    if any(n == 1 < m for n, m in zip(shape, value.shape)):
        value = value[tuple(slice(-1, None) if n == 1 else slice(None) for n in shape)]
    return value
