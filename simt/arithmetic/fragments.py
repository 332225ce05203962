"""wmma: matrices of 16 x 16 x 16 and flatter shapes, which the lanes of a warp hold together as *fragments*.

The ISA leaves open which lane holds what. Here it is as on an H200, whose machine code shows it: a matrix is cut into
pieces of 8 lines, and lane 4 g + q holds the q-th word (of a sum: the q-th pair) of line g of each. Lines are rows of A
and of the sum, and columns of B. The sums themselves are those of mma.sync (simt/arithmetic/mma.py).

Memory may have a matrix the other way round. Then elements of 16 bits are loaded as pieces of the transposed matrix and
turned across the warp (movmatrix), others one by one.
"""

import functools
from dataclasses import dataclass

import numpy as np

from simt.arithmetic import mma
from simt.arithmetic.lazy import Known, Lazy, add, multiply
from simt.arithmetic.rounding import encode

SHAPES = {"m16n16k16": (16, 16, 16), "m32n8k16": (32, 8, 16), "m8n32k16": (8, 32, 16), "m16n16k8": (16, 16, 8)}
KINDS = {"f16": 2, "bf16": 2, "tf32": 4, "s8": 1, "u8": 1, "f32": 4, "s32": 4}  # bytes of an element
WORD = np.dtype(np.uint32)
LANE = np.arange(32, dtype=np.uint64).reshape(1, 1, 32)
LINE, PART = Lazy(Known(LANE // np.uint64(4))), Lazy(Known(LANE % np.uint64(4)))  # g and q


@dataclass(frozen=True)
class Fragment:
    """One operand: `lines` x `length` elements of `kind`; matrix: a, b, c or d; along: memory runs along the lines."""

    matrix: str
    kind: str
    lines: int
    length: int
    along: bool = True

    @property
    def size(self):
        return KINDS[self.kind]

    @property
    def sums(self):
        return self.matrix in "cd"

    @property
    def width(self):
        """Elements of a line that a lane holds side by side."""
        return 2 if self.sums else 4 // self.size

    @property
    def turned(self):
        return not self.along and self.size == 2

    @property
    def pieces(self):
        """(first line, first element) of each piece, in the order of the registers."""
        return [(line, at) for at in range(0, self.length, 4 * self.width) for line in range(0, self.lines, 8)]

    @property
    def registers(self):
        """Those that differ, and all that a lane has: f16 has the same again, as one shape needs so many."""
        own = len(self.pieces) * self.width * self.size // 4
        return own, 8 if self.kind == "f16" and not self.sums else own

    def place(self, base, stride, line, at):
        """Where each lane's part of what stands at (line, at) begins in memory, as a register."""
        part = multiply(PART, self.width, 64)
        if self.along:
            far, near = add(LINE, line, 64), add(part, at, 64)
        elif self.turned:
            far, near = add(LINE, at, 64), add(part, line, 64)
        else:
            far, near = add(part, at, 64), add(LINE, line, 64)
        element = add(multiply(far, stride, 64), near, 64)
        return add(base, multiply(element, self.size, 64), 64)


@functools.cache
def fragment(opcode):
    """The Fragment of a "wmma.load.a.sync.aligned.row.m16n16k16.global.f16", or of a store; None if not covered."""
    parts = opcode.split(".")
    if parts[3:5] != ["sync", "aligned"] or len(parts) < 8 or parts[2] not in "abcd" or parts[5] not in ("row", "col"):
        return None
    matrix, layout, shape, kind = parts[2], parts[5], parts[6], parts[-1]
    allowed = ("f16", "f32", "s32") if matrix in "cd" else ("f16", "bf16", "tf32", "s8", "u8")
    if shape not in SHAPES or kind not in allowed or (kind == "tf32") > (shape == "m16n16k8"):
        return None
    m, n, k = SHAPES[shape]
    lines, length = {"a": (m, k), "b": (n, k)}.get(matrix, (m, n))
    return Fragment(matrix, kind, lines, length, along=(layout == "row") != (matrix == "b"))


def load(fragment, part, site, space, base, stride, mask):
    """A lane's registers: a list of arrays."""
    found, before = [], part.program.counters[site].requests
    for line, at in fragment.pieces:
        if not fragment.along and not fragment.turned:
            found += load_singly(fragment, part, site, space, base, stride, line, at, mask)
            continue
        count = fragment.width * fragment.size // 4
        where = fragment.place(base, stride, line, at)
        words = part.memory.load(site, space, where, 0, WORD, count, mask)
        words = [part.lanes32(w) for w in (words if count > 1 else [words])]
        found += [mma.movmatrix(w) for w in words] if fragment.turned else words
    if space == "shared" and fragment.size < 4:  # as ldmatrix, four pieces at a time
        counter, pieces = part.program.counters[site], len(fragment.pieces)
        counter.requests = before + (counter.requests - before) * -(-pieces // 4) // pieces
    own, all_ = fragment.registers
    return found * (all_ // own)


def load_singly(fragment, part, site, space, base, stride, line, at, mask):
    dtype = np.dtype(f"u{fragment.size}")
    found = []
    for k in range(fragment.width):
        where = fragment.place(base, stride, line, at + k)
        found.append(part.lanes32(part.memory.load(site, space, where, 0, dtype, 1, mask)))
    if fragment.size == 4:
        return found
    return [np.ascontiguousarray(np.stack(found, axis=-1)).view(WORD)[..., 0]]


def store(fragment, part, site, space, base, stride, registers, mask):
    registers = list(registers)
    count = fragment.width * fragment.size // 4
    for line, at in fragment.pieces:
        words, registers = registers[:count], registers[count:]
        if fragment.along or fragment.turned:
            words = [mma.movmatrix(w) for w in words] if fragment.turned else words
            part.memory.store(site, space, fragment.place(base, stride, line, at), 0, words, WORD, mask)
        else:
            for k, word in enumerate(words):
                part.memory.store(site, space, fragment.place(base, stride, line, at + k), 0, [word], WORD, mask)


@functools.cache
def product(opcode):
    """ "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f16..." -> function(a, b, c) of lists of registers, or None.

    f16 names the types of d and c alone; the others those of d, a, b and c.
    """
    parts = opcode.removesuffix(".satfinite").split(".")
    saturate = opcode.endswith(".satfinite")
    if parts[:4] != ["wmma", "mma", "sync", "aligned"] or len(parts) < 9 or parts[6] not in SHAPES:
        return None
    kinds = parts[7:]
    d, a, b, c = (kinds[0], "f16", "f16", kinds[1]) if len(kinds) == 2 else kinds if len(kinds) == 4 else [None] * 4
    sums = {"f16": ("f16", "f32"), "bf16": ("f32",), "tf32": ("f32",), "s8": ("s32",), "u8": ("s32",)}.get(a, ())
    if a != b or d != c or d not in sums or saturate > (d == "s32") or (a == "tf32") != (parts[6] == "m16n16k8"):
        return None
    multiply = mma.product(a, d, saturate)
    m, n, k = SHAPES[parts[6]]
    left, right, sum_ = Fragment("a", a, m, k), Fragment("b", b, n, k), Fragment("d", d, m, n)

    def apply(a, b, c):
        return apart(sum_, multiply(together(left, a), together(right, b), together(sum_, c)))

    return apply


def together(fragment, registers):
    """Registers -> (..., lines, length) as float64."""
    own, _ = fragment.registers
    count = fragment.width * fragment.size // 4
    words = np.stack(np.broadcast_arrays(*registers[:own]), axis=-1)
    columns = fragment.length // (4 * fragment.width)
    # (..., column of pieces, piece in it, g, q, word) -> (..., line, word)
    words = words.reshape(*words.shape[:-2], 8, 4, columns, fragment.lines // 8, count)
    words = np.ascontiguousarray(np.moveaxis(words, (-2, -5, -3, -4, -1), (-5, -4, -3, -2, -1)))
    words = words.reshape(*words.shape[:-5], fragment.lines, columns * 4 * count)
    return mma._numbers(fragment.kind, words)


def apart(fragment, matrix):
    """What `together` undoes, for sums."""
    if fragment.kind == "f16":
        words = np.ascontiguousarray(encode("f16", matrix)).view(WORD)
    else:
        words = matrix.astype(np.int64).astype(WORD) if fragment.kind == "s32" else matrix.astype(np.float32).view(WORD)
    count = fragment.width * fragment.size // 4
    columns = fragment.length // (4 * fragment.width)
    words = words.reshape(*words.shape[:-2], fragment.lines // 8, 8, columns, 4, count)
    words = np.moveaxis(words, (-4, -2, -3, -5, -1), (-5, -4, -3, -2, -1))
    words = words.reshape(*words.shape[:-5], 32, fragment.registers[0])
    return [np.ascontiguousarray(words[..., k]) for k in range(fragment.registers[0])]
