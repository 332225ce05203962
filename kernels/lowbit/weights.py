"""A matrix in 8, 4 or 2 bits: its codes as the best rung reads them, a scale and a zero for each group."""

import torch

from kernels.lowbit import layout
from lab.tensors import DTYPES, expect, expect_first

BITS = (8, 4, 2)
GROUPS = (32, 64, 128)
TAKE = 16  # codes that a lane of the first rungs takes: their rows are padded to a multiple
SLICE = 1 << 24  # weights that are worked on at a time, about


class QuantizedWeight:
    """Weights W ~ (codes - zero) · scale: what `quantize` returns and `gemv` reads. It is not written to again.

    shape        (rows, cols)
    bits         8, 4 or 2
    group        neighbouring columns of a row that share a scale and a zero; None: one of each for a row
    dtype        of the matrix that was quantised, and of what `dequantize` returns
    scale, zero  (rows, groups), float16, bfloat16 or float32; zero holds whole numbers from 0 to 2**bits - 1
    packed       the codes, interleaved for the tensor cores (layout.py), and
    factors      the scales and zeros beside each other, in the order in which the best rung reads them
    nbytes       of packed and factors: what the best rung reads

    Made by hand from codes, uint8 (rows, cols), and the rest, it looks at dtypes and shapes, and not at values, for
    which it would have to wait: `from_codes` does.
    """

    def __init__(self, codes, scale, zero, bits, group, dtype):
        expect_parts("QuantizedWeight", codes, scale, zero, bits, group, dtype)
        self.shape, self.bits, self.group, self.dtype = codes.shape, bits, group, dtype
        self.scale, self.zero = scale, zero
        self.packed = layout.interleave(codes, bits)
        self.factors = layout.interleave_factors(scale, zero)
        self._row_major = None

    @classmethod
    def of_parts(cls, packed, factors, shape, bits, group):
        """What `gemv` and `digits` need of a QuantizedWeight, from what they read. It cannot be dequantised. What does
        not go together is a TypeError or ValueError: `expect_read`."""
        expect_read("QuantizedWeight.of_parts", packed, factors, shape, bits, group)
        self = cls.__new__(cls)
        self.shape, self.bits, self.group, self.dtype = torch.Size(shape), bits, group, factors.dtype
        self.packed, self.factors, self.scale, self.zero = packed, factors, factors, factors
        return self

    def __repr__(self):
        group = "a row" if self.group is None else self.group
        return f"<QuantizedWeight {tuple(self.shape)} bits={self.bits} group={group} on {self.device}>"

    @property
    def device(self):
        return self.packed.device

    @property
    def nbytes(self):
        return self.packed.nbytes + self.factors.nbytes

    def codes(self):
        """The codes, uint8 (rows, cols)."""
        return layout.deinterleave(self.packed, self.bits, self.shape)

    def dequantize(self, dtype=None):
        """(codes - zero) · scale, (rows, cols), rounded to a dtype, one of those or float64; None: that of what was
        quantised. A weight past the dtype's largest number becomes that: a rounded scale may reach a little further
        than the weights did."""
        dtype = self.dtype if dtype is None else dtype
        if dtype not in (*DTYPES, torch.float64):
            wanted = f"{listed(DTYPES)} or torch.float64"
            raise TypeError(f"dequantize: dtype must be None or one of {wanted}, got {dtype!r}")
        codes, values = self.codes(), torch.empty(self.shape, dtype=dtype, device=self.device)
        limit = torch.finfo(dtype).max
        for rows in slices(self.shape):
            scale, zero = (t[rows, :, None].double() for t in (self.scale, self.zero))
            grouped = codes[rows].unflatten(1, (scale.shape[1], -1))
            values[rows] = ((grouped - zero) * scale).clamp_(-limit, limit).flatten(1)
        return values

    def row_major(self):
        """The codes as the first rungs read them, row after row: int32 (rows, words). Made once, when first asked for.

        Code i of a word is its bits from bits · i on, as in ref/lowbit.py; a row is padded to a multiple of 16 codes.
        Making them waits for the card, so that any stream may read them. RuntimeError if that falls into the capture
        of a graph: only a replay would fill them, and other calls would read what was there.
        """
        if self._row_major is None:
            instead = "call the rung once before the capture"
            expect_no_capture("row_major", self.packed, "the first call, which lays out the codes of Wq anew", instead)
            codes = torch.nn.functional.pad(self.codes(), (0, -self.shape[1] % TAKE))
            fields = codes.unflatten(1, (-1, 8 // self.bits))  # the fields of a byte
            packed = fields[..., 0].clone()
            for i in range(1, 8 // self.bits):
                packed |= fields[..., i] << self.bits * i
            if packed.is_cuda:
                torch.cuda.current_stream(packed.device).synchronize()
            self._row_major = packed.view(torch.int32)
        return self._row_major


def expect_parts(where, codes, scale, zero, bits, group, dtype):
    """Raise unless these make a QuantizedWeight, by dtypes and shapes."""
    expect_bits(where, bits)
    expect_first(where, "codes", codes, ("rows", "cols"), (torch.uint8,))
    rows, cols = codes.shape
    expect_group(where, group, cols)
    expect(where, "scale", scale, codes, (rows, 1 if group is None else cols // group), tuple(DTYPES))
    expect(where, "zero", zero, codes, tuple(scale.shape), (scale.dtype,))
    if dtype not in DTYPES:
        raise TypeError(f"{where}: dtype must be one of {listed(DTYPES)}, got {dtype!r}")


def expect_read(where, packed, factors, shape, bits, group):
    """Raise unless a matrix of this shape, so quantised, can be read from these: packed and factors of QuantizedWeight,
    at multiples of 16 bytes."""
    if len(shape) != 2 or any(n < 1 for n in shape):
        raise ValueError(f"{where}: shape must be (rows, cols), none of it 0, got {tuple(shape)}")
    expect_bits(where, bits)
    rows, cols = shape
    expect_group(where, group, cols)
    tiles, groups = -(-rows // layout.TILE), 1 if group is None else cols // group
    wanted = tiles, -(-cols // layout.UNIT), bits // 2, 32, 4
    expect_first(where, "packed", packed, wanted, (torch.int32,))
    wanted = (tiles, layout.TILE, 2) if groups == 1 else (tiles, -(-groups // 4) * 4, 8, 2, 2)
    expect(where, "factors", factors, packed, wanted, tuple(DTYPES))
    for name, tensor in (("packed", packed), ("factors", factors)):
        if tensor.data_ptr() % 16:
            raise ValueError(f"{where}: {name} must lie at a multiple of 16 bytes, got {tensor.data_ptr():#x}")


def expect_bits(where, bits):
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in BITS:
        raise ValueError(f"{where}: bits must be 8, 4 or 2, got {bits!r}")


def expect_group(where, group, cols):
    fits = group is None or (isinstance(group, int) and group in GROUPS)
    if not fits or (group and cols % group):
        raise ValueError(
            f"{where}: group must be None (one scale for a row), or 32, 64 or 128 and a divisor of cols, {cols}, "
            f"got {group!r}"
        )


def expect_no_capture(where, tensor, what, instead):
    """RuntimeError where a graph is captured on the tensor's card."""
    if tensor.is_cuda:
        with torch.cuda.device(tensor.device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{where}: a graph cannot capture {what}; {instead}")


def listed(dtypes):
    return ", ".join(map(str, dtypes))


def slices(shape):
    """Pieces of so many rows that temporaries stay small."""
    rows, cols = shape
    step = max(1, SLICE // max(1, cols))
    return [slice(begin, begin + step) for begin in range(0, rows, step)]
