"""A matrix in 8, 4 or 2 bits: its codes as the best rung reads them, a scale and a zero for each group."""

import torch

from kernels.lowbit import layout

WORD = 4  # bytes
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
    """

    def __init__(self, codes, scale, zero, bits, group, dtype):
        self.shape, self.bits, self.group, self.dtype = codes.shape, bits, group, dtype
        self.scale, self.zero = scale, zero
        self.packed = layout.interleave(codes, bits)
        self.factors = layout.interleave_factors(scale, zero)
        self._row_major = None

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
        """(codes - zero) · scale, (rows, cols), rounded to a dtype; None: that of what was quantised. A weight past the
        dtype's largest number becomes that: a rounded scale may reach a little further than the weights did."""
        dtype = self.dtype if dtype is None else dtype
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
        """
        if self._row_major is None:
            codes = torch.nn.functional.pad(self.codes(), (0, -self.shape[1] % TAKE))
            fields = codes.unflatten(1, (-1, 8 // self.bits))  # the fields of a byte
            packed = fields[..., 0].clone()
            for i in range(1, 8 // self.bits):
                packed |= fields[..., i] << self.bits * i
            self._row_major = packed.view(torch.int32)
        return self._row_major


def slices(shape):
    """Pieces of so many rows that temporaries stay small."""
    rows, cols = shape
    step = max(1, SLICE // max(1, cols))
    return [slice(begin, begin + step) for begin in range(0, rows, step)]
