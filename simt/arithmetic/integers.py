"""Integer instructions of PTX on NumPy arrays.

PTX ISA, "Integer Arithmetic Instructions", "Logic and Shift Instructions". Registers are unsigned arrays; an
operation that reads its operands as signed says so by its sources. Results wrap around, as in the hardware. NumPy's
shifts by the width or more give 0 (or the sign), which is what PTX asks for.
"""

import numpy as np

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I8, I16, I32, I64 = np.int8, np.int16, np.int32, np.int64
UNSIGNED = {8: U8, 16: U16, 32: U32, 64: U64}
SIGNED = {8: I8, 16: I16, 32: I32, 64: I64}


def integer_type(kind):
    """ "s32" -> (32, signed True); "u16" -> (16, False); "b64" -> (64, False); anything else -> None."""
    if kind[:1] in ("s", "u", "b") and kind[1:] in ("8", "16", "32", "64"):
        return int(kind[1:]), kind[0] == "s"
    return None


def find(name, modifiers, kind):
    """-> (function, sources, destinations) or None."""
    pair = kind in ("s16x2", "u16x2")
    of = (16, kind[0] == "s") if pair else integer_type(kind)
    maker = FAMILIES.get(name)
    if of is None or maker is None:
        return None
    found = maker(name, tuple(modifiers), *of)
    if found is None:
        return None
    function, sources, destination = found
    if pair:
        if name not in ("add", "sub", "min", "max", "neg", "abs"):
            return None
        return _paired(function, sources), (U32,) * len(sources), (U32,)
    return unsigned(function), sources, (UNSIGNED[np.dtype(destination).itemsize * 8],)


def unsigned(function):
    """Make the result unsigned, without touching its bits."""

    def apply(*x):
        result = function(*x)
        return result if result.dtype.kind == "u" else result.view(UNSIGNED[result.dtype.itemsize * 8])

    return apply


def _paired(function, sources):
    def apply(*words):
        shape = np.broadcast_shapes(*(w.shape for w in words))
        halves = [np.ascontiguousarray(np.broadcast_to(w, shape)).view(s) for w, s in zip(words, sources)]
        return function(*halves).view(U32)

    return apply


def _plain(width, signed):
    return (SIGNED if signed else UNSIGNED)[width]


# ---- add, subtract, multiply ----

WRAPPING = {"add": np.add, "sub": np.subtract}


def _add(name, modifiers, width, signed):
    if modifiers == ("sat",) and (width, signed) == (32, True):
        operation = WRAPPING[name]
        return lambda a, b: _clip(operation(a.astype(I64), b.astype(I64)), I32), (I32, I32), I32
    return (WRAPPING[name], (UNSIGNED[width],) * 2, UNSIGNED[width]) if not modifiers else None


def _clip(x, dtype):
    limits = np.iinfo(dtype)
    return np.clip(x, limits.min, limits.max).astype(dtype)


def _multiply(name, modifiers, width, signed):
    """mul and mad: .lo the lower half of the product, .hi the upper half, .wide all of it."""
    saturate = modifiers[-1:] == ("sat",)
    part = modifiers[0] if modifiers else None
    addend = name == "mad"
    if part not in ("lo", "hi", "wide") or len(modifiers) > 1 + saturate:
        return None
    if saturate and (part, addend, width, signed) != ("hi", True, 32, True):
        return None
    if part == "lo":
        own = UNSIGNED[width]
        return (_multiply_add, (own,) * 3, own) if addend else (np.multiply, (own,) * 2, own)
    own = _plain(width, signed)
    if part == "hi":
        upper = _upper_64 if width == 64 else _upper(width, signed)
        if saturate:
            return lambda a, b, c: _clip(upper(a, b).astype(I64) + c, I32), (own,) * 3, own
        return (lambda a, b, c: upper(a, b) + c, (own,) * 3, own) if addend else (upper, (own,) * 2, own)
    if width == 64:
        return None
    wide = _plain(width * 2, signed)
    product = lambda a, b: a.astype(wide) * b.astype(wide)  # noqa: E731
    if addend:
        return lambda a, b, c: product(a, b) + c, (own, own, wide), wide
    return product, (own, own), wide


def _multiply_add(a, b, c):
    return a * b + c


def _upper(width, signed):
    own, wide = _plain(width, signed), _plain(width * 2, signed)
    return lambda a, b: (a.astype(wide) * b.astype(wide) >> wide(width)).astype(own)


def _upper_64(a, b):
    """By halves of 32 bits; the signed product is the unsigned one less what the signs added."""
    x, y = a.view(U64), b.view(U64)
    half, low = U64(32), U64(0xFFFFFFFF)
    x1, x0, y1, y0 = x >> half, x & low, y >> half, y & low
    middle = x1 * y0 + (x0 * y0 >> half)
    upper = x1 * y1 + (middle >> half) + ((middle & low) + x0 * y1 >> half)
    if a.dtype == I64:
        upper = upper - np.where(a < 0, y, U64(0)) - np.where(b < 0, x, U64(0))
    return upper.view(a.dtype)


def _multiply_24(name, modifiers, width, signed):
    """mul24, mad24: the product of the lower 24 bits; .lo its bits 0 to 31, .hi its bits 16 to 47."""
    if width != 32 or modifiers[:1] not in (("lo",), ("hi",)) or modifiers[1:] not in ((), ("sat",)):
        return None
    saturate = modifiers[1:] == ("sat",)
    if saturate and (name, modifiers[0], signed) != ("mad24", "hi", True):
        return None
    own, shift = _plain(32, signed), 0 if modifiers[0] == "lo" else 16

    def product(a, b):
        a, b = (((x << own(8)) >> own(8)).astype(_plain(64, signed)) for x in (a, b))
        return (a * b >> a.dtype.type(shift)).astype(own)

    if name == "mul24":
        return product, (own,) * 2, own
    if saturate:
        return lambda a, b, c: _clip(product(a, b).astype(I64) + c, I32), (own,) * 3, own
    return lambda a, b, c: product(a, b) + c, (own,) * 3, own


def _divide(name, modifiers, width, signed):
    """Towards zero. x / 0 and x % 0 are all ones, as on the hardware (the ISA leaves it open)."""
    if modifiers:
        return None
    own, plain = _plain(width, signed), UNSIGNED[width]

    def magnitude(x):
        return np.abs(x).view(plain) if signed else x  # |INT_MIN| is right as an unsigned number

    def quotient(a, b):
        q = magnitude(a) // magnitude(b)
        if signed:
            q = np.where((a < 0) != (b < 0), plain(0) - q, q)
        return np.where(b == 0, ~plain(0), q)

    def remainder(a, b):
        r = magnitude(a) % np.where(b == 0, plain(1), magnitude(b))
        if signed:
            r = np.where(a < 0, plain(0) - r, r)
        return np.where(b == 0, ~plain(0), r)

    return (quotient if name == "div" else remainder), (own, own), own


# ---- one operand, minimum, maximum ----


def _unary(name, modifiers, width, signed):
    if modifiers or not signed:
        return None
    own = SIGNED[width]
    return (np.negative if name == "neg" else np.abs), (own,), own


def _extreme(name, modifiers, width, signed):
    own, operation = _plain(width, signed), np.minimum if name == "min" else np.maximum
    if modifiers == ("relu",) and signed:
        return lambda a, b: np.maximum(operation(a, b), own(0)), (own, own), own
    return (operation, (own, own), own) if not modifiers else None


def _sad(name, modifiers, width, signed):
    own = _plain(width, signed)
    return (lambda a, b, c: c + (np.maximum(a, b) - np.minimum(a, b)), (own,) * 3, own) if not modifiers else None


# ---- bits ----

LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def _logic(name, modifiers, width, signed):
    return (LOGIC[name], (UNSIGNED[width],) * 2, UNSIGNED[width]) if not modifiers else None


def _not(name, modifiers, width, signed):
    own = UNSIGNED[width]
    if modifiers:
        return None
    return (np.invert if name == "not" else lambda a: (a == 0).astype(own)), (own,), own


def _shift(name, modifiers, width, signed):
    """The amount is 32 bits wide whatever is shifted; an amount beyond the width counts as the width."""
    own = _plain(width, signed and name == "shr")
    operation = np.left_shift if name == "shl" else np.right_shift

    def shift(a, amount):
        if width == 64:
            amount = amount.astype(own)
        elif width < 32:
            amount = np.minimum(amount, U32(width)).astype(own)
        else:
            amount = amount.view(own)
        return operation(a, amount)

    return (shift, (own, U32), own) if not modifiers else None


def _funnel(name, modifiers, width, signed):
    """shf.l / shf.r: shift the 64 bits b:a; keep the upper half (l) or the lower half (r)."""
    if width != 32 or len(modifiers) != 2 or modifiers[0] not in "lr" or modifiers[1] not in ("wrap", "clamp"):
        return None
    left, wrap = modifiers[0] == "l", modifiers[1] == "wrap"

    def shift(a, b, amount):
        both = (b.astype(U64) << U64(32)) | a
        amount = (amount & U32(31) if wrap else np.minimum(amount, U32(32))).astype(U64)
        return (both << amount >> U64(32) if left else both >> amount).astype(U32)

    return shift, (U32,) * 3, U32


# Of position and length the lowest 8 bits count, the ISA says; the hardware's 64-bit forms look at all 32.
_FIELD = {32: U32(0xFF), 64: U32(0xFFFFFFFF)}


def _extract(name, modifiers, width, signed):
    """bfe: `length` bits from `position`; .s extends the sign. Beyond the top there is 0, or the sign."""
    own, field = _plain(width, signed), _FIELD.get(width)

    def extract(a, position, length):
        position, length = (np.minimum(x & field, U32(width)).astype(own) for x in (position, length))
        if not signed:
            return (a >> position) & ((own(1) << length) - own(1))
        unused = own(width) - length
        return ((a >> position) << unused) >> np.minimum(unused, own(width - 1))

    return (extract, (own, U32, U32), own) if width >= 32 and not modifiers else None


def _insert(name, modifiers, width, signed):
    """bfi: the lowest `length` bits of a into b at `position`."""
    own, field = UNSIGNED[width], _FIELD.get(width)

    def insert(a, b, position, length):
        position, length = ((x & field).astype(own) for x in (position, length))
        mask = ((own(1) << length) - own(1)) << position
        return (b & ~mask) | ((a << position) & mask)

    return (insert, (own, own, U32, U32), own) if width >= 32 and not modifiers else None


def highest_bit(x):
    """Position of the highest 1, -1 where there is none: the exponent of a float64."""
    x = x & ~(x >> x.dtype.type(1))  # so that the conversion cannot round up to the next power of two
    exponent = (x.astype(np.float64).view(I64) >> I64(52)).astype(I32) - I32(1023)
    return np.maximum(exponent, I32(-1))


def _find_bit(name, modifiers, width, signed):
    """bfind: the highest bit that differs from the sign; .shiftamt: how far to shift it to the top; none: all ones."""
    own = _plain(width, signed)
    if width < 32 or modifiers not in ((), ("shiftamt",)):
        return None

    def bit(a):
        if signed:
            a = (a ^ (a >> own(width - 1))).view(UNSIGNED[width])
        found = highest_bit(a)
        return np.where(found < 0, found, I32(width - 1) - found) if modifiers else found

    return bit, (own,), I32


def _count(name, modifiers, width, signed):
    own = UNSIGNED[width]
    if width < 32 or modifiers:
        return None
    if name == "clz":
        return lambda a: I32(width - 1) - highest_bit(a), (own,), I32
    return lambda a: np.bitwise_count(a).astype(U32), (own,), U32


def _reverse(name, modifiers, width, signed):
    own = UNSIGNED[width]

    def reverse(a):
        for shift, mask in (1, 0x55), (2, 0x33), (4, 0x0F):
            mask, shift = own(int.from_bytes(bytes([mask]) * (width // 8))), own(shift)
            a = ((a >> shift) & mask) | ((a & mask) << shift)
        return a.byteswap()

    return (reverse, (own,), own) if width >= 32 and not modifiers else None


def _find_nth(name, modifiers, width, signed):
    """fns: from bit `base`, the `offset`-th 1 upwards (downwards if negative); offset 0: bit base itself."""
    if width != 32 or modifiers:
        return None

    def one(mask, base, offset):
        if base > 31:
            return 0xFFFFFFFF
        if offset == 0:
            return base if mask >> base & 1 else 0xFFFFFFFF
        for i in range(base, 32) if offset > 0 else range(base, -1, -1):
            if mask >> i & 1:
                offset -= 1 if offset > 0 else -1
                if offset == 0:
                    return i
        return 0xFFFFFFFF

    each = np.frompyfunc(lambda m, b, o: one(int(m), int(b), int(o)), 3, 1)
    return lambda mask, base, offset: each(mask, base, offset).astype(U32), (U32, U32, I32), U32


# Four selectors a mode, by the lowest two bits of the third operand (PTX ISA, prmt).
SELECTORS = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


def _permute(name, modifiers, width, signed):
    """prmt: each byte of the result is one of the eight of b:a, or its sign eight times."""
    if width != 32 or len(modifiers) > 1 or (modifiers and modifiers[0] not in SELECTORS):
        return None
    table = np.array(SELECTORS[modifiers[0]], U32) if modifiers else None

    def permute(a, b, selector):
        if table is not None:
            selector = table[selector & U32(3)]
        both = (b.astype(U64) << U64(32)) | a
        if selector.size == 1:
            return _permuted(both, int(selector.item()))
        result = None
        for i in range(4):
            nibble = selector >> U32(4 * i)
            byte = (both >> ((nibble & U32(7)) << U32(3)).astype(U64)).astype(U32) & U32(0xFF)
            sign = (nibble & U32(8)) != 0
            if sign.any():
                byte = np.where(sign, (byte >> U32(7)) * U32(0xFF), byte)
            byte = byte << U32(8 * i)
            result = byte if result is None else result | byte
        return result

    return permute, (U32,) * 3, U32


def _permuted(both, selector):
    """prmt where all lanes select the same: bytes that stay together move together."""
    result, at = None, 0
    while at < 4:
        byte, length = selector >> 4 * at & 15, 1
        while byte < 8 and at + length < 4 and selector >> 4 * (at + length) & 15 == byte + length < 8:
            length += 1
        part = (both >> U64(8 * (byte & 7))).astype(U32) & U32((1 << 8 * length) - 1)
        if byte >= 8:  # its sign, in all of its bits
            part = (part >> U32(7)) * U32(0xFF)
        part = part << U32(8 * at)
        result = part if result is None else result | part
        at += length
    return result


def _bit_table(table, b, c):
    """A function of two bits, told by its four results (b c = 00, 01, 10, 11 in bits 0 to 3), on whole words."""
    terms = {0b1010: lambda: c, 0b1100: lambda: b, 0b1000: lambda: b & c, 0b1110: lambda: b | c, 0b0110: lambda: b ^ c}
    if table in terms:
        return terms[table]()
    if table ^ 0b1111 in terms:
        return ~terms[table ^ 0b1111]()
    if table in (0, 0b1111):
        return np.full((1,) * b.ndim, 0 if table == 0 else 0xFFFFFFFF, U32)
    return b & ~c if table == 0b0100 else c & ~b if table == 0b0010 else b | ~c if table == 0b1101 else c | ~b


def _lop3(name, modifiers, width, signed):
    """Any function of three bits, by its table: f = f0 ^ (a & (f0 ^ f1)), with f0 and f1 what it is for a = 0 and 1."""
    if width != 32 or modifiers:
        return None

    def logic(a, b, c, table):
        table = int(table.reshape(-1)[0])
        zero, change = table & 15, (table & 15) ^ (table >> 4 & 15)
        if change == 0:
            result = _bit_table(zero, b, c)
        else:
            result = a if change == 15 else a & _bit_table(change, b, c)
            result = result ^ _bit_table(zero, b, c) if zero else result
        shape = np.broadcast_shapes(a.shape, b.shape, c.shape)
        return result if result.shape == shape else np.broadcast_to(result, shape)

    return logic, (U32,) * 4, U32


def _mask(name, modifiers, width, signed):
    """bmsk: `length` ones from `position`; .clamp beyond 31 gives nothing, .wrap takes both modulo 32."""
    if width != 32 or modifiers not in (("clamp",), ("wrap",)):
        return None
    limit = (lambda x: x & U32(31)) if modifiers == ("wrap",) else (lambda x: np.minimum(x, U32(32)))

    def mask(position, length):
        return ((U32(1) << limit(length)) - U32(1)) << limit(position)

    return mask, (U32, U32), U32


def _extend(name, modifiers, width, signed):
    """szext: the lowest `length` bits, sign- or zero-extended."""
    own = _plain(32, signed)
    if width != 32 or modifiers not in (("clamp",), ("wrap",)):
        return None

    def extend(a, length):
        length = length & U32(31) if modifiers == ("wrap",) else np.minimum(length, U32(32))
        unused = (U32(32) - length).view(own)
        return (a << unused) >> np.minimum(unused, own(31)) if signed else (a << unused) >> unused

    return extend, (own, U32), own


# ---- dot products ----


def dot_product(name, modifiers):
    """dp4a.atype.btype: c + the sum of four products of bytes; dp2a.lo/.hi: of two halves of a with two bytes of b."""
    kinds = modifiers[-2:]
    if len(kinds) != 2 or not set(kinds) <= {"s32", "u32"}:
        return None
    if (name, modifiers[:-2]) not in (("dp4a", ()), ("dp2a", ("lo",)), ("dp2a", ("hi",))):
        return None
    types = [I32 if kind == "s32" else U32 for kind in kinds]
    first = 2 if modifiers[0] == "hi" else 0

    def part(x, dtype, bits, i):
        x = x.view(dtype) << dtype(32 - bits * (i + 1))
        return (x >> dtype(32 - bits)).view(U32)

    def dot(a, b, c):
        total = c
        for i in range(4 if name == "dp4a" else 2):
            x = part(a, types[0], 8, i) if name == "dp4a" else part(a, types[0], 16, i)
            total = total + x * part(b, types[1], 8, i + first)
        return total

    return dot, (U32, U32, U32), (U32,)


def differences(name, modifiers):
    """vabsdiff2, vabsdiff4: |a - b| of two halves, of four bytes; .sat clamps; .add: c + the sum of them all."""
    *kinds, last = modifiers if modifiers[3:] else (*modifiers, "")
    if len(kinds) != 3 or not set(kinds) <= {"s32", "u32"} or last not in ("", "sat", "add"):
        return None
    bits = 8 if name.endswith("4") else 16
    to, *of = ((SIGNED if kind == "s32" else UNSIGNED)[bits] for kind in kinds)

    def apply(a, b, c):
        shape = np.broadcast_shapes(a.shape, b.shape, c.shape)
        a, b = (np.ascontiguousarray(np.broadcast_to(x, shape)).view(t).astype(I32) for x, t in zip((a, b), of))
        each = np.abs(a - b)
        if last == "add":
            return c + each.reshape(*shape, 32 // bits).sum(axis=-1).astype(U32)
        return np.ascontiguousarray(_clip(each, to) if last == "sat" else each.astype(to)).view(U32)

    return apply, (U32, U32, U32), (U32,)


FAMILIES = {
    **dict.fromkeys(("add", "sub"), _add),
    **dict.fromkeys(("mul", "mad"), _multiply),
    **dict.fromkeys(("mul24", "mad24"), _multiply_24),
    **dict.fromkeys(("div", "rem"), _divide),
    **dict.fromkeys(("neg", "abs"), _unary),
    **dict.fromkeys(("min", "max"), _extreme),
    **dict.fromkeys(("and", "or", "xor"), _logic),
    **dict.fromkeys(("not", "cnot"), _not),
    **dict.fromkeys(("shl", "shr"), _shift),
    **dict.fromkeys(("popc", "clz"), _count),
    "sad": _sad,
    "shf": _funnel,
    "bfe": _extract,
    "bfi": _insert,
    "bfind": _find_bit,
    "brev": _reverse,
    "fns": _find_nth,
    "prmt": _permute,
    "lop3": _lop3,
    "bmsk": _mask,
    "szext": _extend,
}
