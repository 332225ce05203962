"""Integer registers, lazily: one Python int for all threads, or an array plus one int.

Most integers in a kernel are indexes, and most of what happens to an index in a loop happens to all threads alike:
i += 32, p += 128. So a register holds either

    int           one value, the same in every thread (loop counters, sizes, base addresses)
    Lazy          array + offset: the array (block, warp, lane), axes of length 1 where the value does not change along
                  them, and an offset that all threads share

Adding a constant to a Lazy touches no array. The array itself (`Known`) never changes, and remembers what has been
found out about it: its range, what it becomes times 4, which memory elements it points to. A loop that moves a pointer
pays for that once.

All values are unsigned, modulo 2**width, as in the hardware; `signed` says how an operation reads them.
"""

import functools

import numpy as np

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
REMEMBERED = 64  # results kept per array; more are a sign that they are not used again


class Known:
    """An array of unsigned integers that never changes, with what is known of it."""

    __slots__ = ("array", "width", "ranges", "results", "patterns")

    def __init__(self, array):
        self.array = array
        self.width = array.dtype.itemsize * 8
        self.ranges = [None, None]
        self.results = {}
        self.patterns = {}  # for simt/memory/accesses.py: how it lies in memory

    def range(self, signed):
        """(least, greatest) element."""
        found = self.ranges[signed]
        if found is None:
            a = self.array.view(SIGNED[self.width]) if signed else self.array
            found = self.ranges[signed] = (int(a.min()), int(a.max()))
        return found

    def once(self, key, make, other=None):
        """The Known that `make()` gives, made once. `other` is kept alive with it, since the key holds its id."""
        found = self.results.get(key)
        if found is None:
            if len(self.results) >= REMEMBERED:
                self.results.clear()
            found = self.results[key] = (Known(make()), other)
        return found[0]


class Lazy:
    """known.array + offset, modulo 2**width."""

    __slots__ = ("known", "offset", "value")

    def __init__(self, known, offset=0):
        self.known, self.offset = known, offset
        self.value = None if offset else known.array

    def array(self):
        """The values themselves."""
        if self.value is None:
            a = self.known.array
            self.value = a + a.dtype.type(self.offset & ((1 << self.known.width) - 1))
        return self.value

    def settled(self):
        """The same with offset 0."""
        return Lazy(Known(self.array())) if self.offset else self

    def range(self, signed):
        """(least, greatest, offset as it must be counted so that nothing wraps), or None if some element wraps."""
        low, high = self.known.range(signed)
        width = self.known.width
        least, beyond = (-(1 << (width - 1)), 1 << (width - 1)) if signed else (0, 1 << width)
        for offset in (self.offset, self.offset - (1 << width)):
            if least <= low + offset and high + offset < beyond:
                return low + offset, high + offset, offset
        return None


def pack(array):
    """An array of unsigned integers as a register: an int if it is one value."""
    return int(array.item()) if array.size == 1 else Lazy(Known(array))


def unpack(x, width):
    """A register as an array of unsigned integers; an int becomes shape (1, 1, 1)."""
    return one_value(x, width) if type(x) is int else x.array()


@functools.lru_cache(maxsize=4096)
def one_value(x, width):
    """An int as an array (1, 1, 1) that nobody may write to: most come again."""
    array = np.full((1, 1, 1), x, UNSIGNED[width])
    array.flags.writeable = False
    return array


def as_signed(x, width):
    return x - (1 << width) if x >> (width - 1) else x


# Arithmetic modulo 2**width: offsets go through it as they are.


def add(a, b, width):
    mask = (1 << width) - 1
    if type(a) is int:
        if type(b) is int:
            return (a + b) & mask
        return Lazy(b.known, (a + b.offset) & mask)
    if type(b) is int:
        return Lazy(a.known, (a.offset + b) & mask)
    k, o = a.known, b.known
    return Lazy(k.once(("+", id(o)), lambda: k.array + o.array, o), (a.offset + b.offset) & mask)


def subtract(a, b, width):
    mask = (1 << width) - 1
    if type(b) is int:
        return (a - b) & mask if type(a) is int else Lazy(a.known, (a.offset - b) & mask)
    o = b.known
    if type(a) is int:
        return Lazy(o.once("neg", lambda: np.negative(o.array)), (a - b.offset) & mask)
    k = a.known
    if k is o:
        return (a.offset - b.offset) & mask
    return Lazy(k.once(("-", id(o)), lambda: k.array - o.array, o), (a.offset - b.offset) & mask)


def multiply(a, b, width):
    mask = (1 << width) - 1
    if type(a) is int:
        a, b = b, a
    if type(a) is int:
        return (a * b) & mask
    if type(b) is int:
        if b == 0:
            return 0
        if b == 1:
            return a
        k = a.known
        return Lazy(k.once(("*", b), lambda: k.array * k.array.dtype.type(b)), (a.offset * b) & mask)
    k, o = a.known, b.known
    if a.offset or b.offset:
        return Lazy(Known(a.array() * b.array()))
    return Lazy(k.once(("*", id(o)), lambda: k.array * o.array, o))


def multiply_add(a, b, c, width):
    return add(multiply(a, b, width), c, width)


def shift_left(a, count, width):
    """shl: a count of width or more gives 0."""
    if type(count) is int:
        return multiply(a, 1 << count, width) if count < width else 0
    n = count.array()
    value = np.left_shift(unpack(a, width), np.minimum(n, width - 1).astype(UNSIGNED[width]))
    return pack(np.where(n < width, value, UNSIGNED[width](0)))


# Widening and narrowing.


def widen(a, width, to, signed):
    """Sign or zero extension; no array is touched twice."""
    if type(a) is int:
        return as_signed(a, width) & ((1 << to) - 1) if signed else a
    found = a.range(signed)
    if found is None:
        a = a.settled()
        found = (0, 0, 0)
    k = a.known
    if signed:
        wide = k.once(("s", to), lambda: k.array.view(SIGNED[width]).astype(SIGNED[to]).view(UNSIGNED[to]))
    else:
        wide = k.once(("u", to), lambda: k.array.astype(UNSIGNED[to]))
    return Lazy(wide, found[2] & ((1 << to) - 1))


def narrow(a, to):
    if type(a) is int:
        return a & ((1 << to) - 1)
    k = a.known
    return Lazy(k.once(("n", to), lambda: k.array.astype(UNSIGNED[to])), a.offset & ((1 << to) - 1))


def convert(a, width, to, signed):
    """cvt between integers: from `width` bits, read as signed or not, to `to` bits."""
    if to > width:
        return widen(a, width, to, signed)
    return narrow(a, to) if to < width else a


def multiply_wide(a, b, width, signed):
    """mul.wide: the product in twice the bits."""
    return multiply(widen(a, width, 2 * width, signed), widen(b, width, 2 * width, signed), 2 * width)


# Bits and quotients: an offset that is a multiple of the power of two or of the divisor passes through.


def bit_and(a, b, width):
    if type(a) is int:
        a, b = b, a
    if type(a) is int:
        return a & b
    if type(b) is int:
        k = a.known
        low = b & (b + 1) == 0  # 2**n - 1
        if a.offset == 0 or (low and a.offset & b == 0):
            return Lazy(k.once(("&", b), lambda: k.array & k.array.dtype.type(b)))
        return pack(a.array() & k.array.dtype.type(b))
    return pack(a.array() & b.array())


def bit_or(a, b, width):
    if type(a) is int and type(b) is int:
        return a | b
    return pack(unpack(a, width) | unpack(b, width))


def bit_xor(a, b, width):
    if type(a) is int and type(b) is int:
        return a ^ b
    return pack(unpack(a, width) ^ unpack(b, width))


def bit_not(a, width):
    return a ^ ((1 << width) - 1) if type(a) is int else pack(~a.array())


def shift_right(a, count, width, signed):
    """shr: a count of width or more gives 0, or the sign."""
    mask = (1 << width) - 1
    if type(count) is int:
        if type(a) is int:
            return (as_signed(a, width) if signed else a) >> min(count, width) & mask
        count = min(count, width)
        found = a.range(signed)
        if found is None or found[2] % (1 << count):
            a = a.settled()
            found = (0, 0, 0)
        k = a.known

        def make():
            if signed:
                return (k.array.view(SIGNED[width]) >> SIGNED[width](min(count, width - 1))).view(UNSIGNED[width])
            return k.array >> UNSIGNED[width](count) if count < width else np.zeros_like(k.array)

        return Lazy(k.once((">>", count, signed), make), (found[2] >> count) & mask)
    n = count.array()
    if signed:
        value = unpack(a, width).view(SIGNED[width]) >> np.minimum(n, width - 1).astype(SIGNED[width])
        return pack(value.view(UNSIGNED[width]))
    value = unpack(a, width) >> np.minimum(n, width - 1).astype(UNSIGNED[width])
    return pack(np.where(n < width, value, UNSIGNED[width](0)))


def divide(a, b, width, signed, general):
    """C's quotient. `general(a, b)` does what is not the common case, an index by a positive size."""
    return quotient("/", a, b, width, signed, general)


def remainder(a, b, width, signed, general):
    return quotient("%", a, b, width, signed, general)


def quotient(operation, a, b, width, signed, general):
    if type(b) is int and 0 < b < 1 << (width - 1):
        if type(a) is int:
            if not (signed and a >> (width - 1)):
                return a // b if operation == "/" else a % b
        else:
            found = a.range(signed)
            if found is not None and found[0] >= 0 and found[2] % b == 0 and a.known.range(signed)[0] >= 0:
                k, size = a.known, UNSIGNED[width](b)
                if operation == "/":
                    return Lazy(k.once(("/", b), lambda: k.array // size), found[2] // b & ((1 << width) - 1))
                return Lazy(k.once(("%", b), lambda: k.array % size))
    return pack(general(unpack(a, width), unpack(b, width)))


# Comparisons: ranges first, arrays only when the threads may disagree.

COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
SWAP = {"gt": "lt", "ge": "le"}


def compare(operation, a, b, width, signed):
    """A Python bool if all threads agree and that is cheap to know, else an array of bool."""
    low_a, high_a = value_range(a, width, signed)
    low_b, high_b = value_range(b, width, signed)
    decided = decide(operation, low_a, high_a, low_b, high_b)
    if decided is not None:
        return decided
    x, y = unpack(a, width), unpack(b, width)
    if signed:
        x, y = x.view(SIGNED[width]), y.view(SIGNED[width])
    return COMPARE[operation](x, y)


def value_range(x, width, signed):
    if type(x) is int:
        x = as_signed(x, width) if signed else x
        return x, x
    found = x.range(signed)
    if found is None:
        return Known(x.array()).range(signed)
    return found[0], found[1]


def decide(operation, low_a, high_a, low_b, high_b):
    """True or False where the ranges settle the comparison, else None."""
    if operation in SWAP:
        return decide(SWAP[operation], low_b, high_b, low_a, high_a)
    if operation == "lt":
        return True if high_a < low_b else False if low_a >= high_b else None
    if operation == "le":
        return True if high_a <= low_b else False if low_a > high_b else None
    if high_a < low_b or low_a > high_b:
        return operation == "ne"
    if low_a == high_a == low_b == high_b:
        return operation == "eq"
    return None
