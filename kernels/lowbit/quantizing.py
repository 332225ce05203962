"""How weights become codes. Which code a weight gets is written out in ref/lowbit.py; here it is the same, bit for bit,
in torch, on the device of the tensor: in float64, whatever its dtype."""

import math

import torch

from kernels.lowbit.weights import (
    GROUPS,
    QuantizedWeight,
    expect_bits,
    expect_group,
    expect_no_capture,
    listed,
    slices,
)
from lab.tensors import DTYPES, expect, expect_first

LARGEST = 2.0**80  # of the scales: gemv's sums over 128 columns, up to 2**36, of many units, stay in float32's range
WHOLE = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}  # as long as the dtype


def quantize(W, bits, group=None, *, scale_dtype=None):
    """Quantise W (rows, cols) of float16, bfloat16 or float32. Returns a QuantizedWeight on W's device.

    bits         8, 4 or 2
    group        32, 64 or 128 neighbouring columns share a scale and a zero, and it divides cols; None: one of each for
                 a row, and cols is any number
    scale_dtype  of scales and zeros; None: W's. One in bfloat16 is rounded up by as much as 0.8 %, float32 takes
                 twice the bytes

    The range of a group and 0 are divided into 2**bits - 1 steps: the error of a weight is at most half a step. Groups
    of equal weights are exact where scale_dtype holds the weight, and a weight of 0 stays 0.

    Takes bits / 8 bytes a weight, and two numbers of scale_dtype a group. Waits for the device, to look for what cannot
    be stored: NaN and infinity, and a scale beyond its dtype or 2**80, are named in a ValueError. TypeError or
    ValueError names any other argument; nothing has been made by then. RuntimeError while a graph is captured.
    """
    expect_bits("quantize", bits)
    expect_first("quantize", "W", W, ("rows", "cols"))
    expect_group("quantize", group, W.shape[1])
    scale_dtype = _scale_dtype("quantize", scale_dtype, W)
    W, dtype = W.detach(), W.dtype
    _expect_finite("quantize", W)
    rows, cols = W.shape
    groups, L = 1 if group is None else cols // group, (1 << bits) - 1
    codes = torch.empty(rows, cols, dtype=torch.uint8, device=W.device)
    scale, zero = (torch.empty(rows, groups, dtype=scale_dtype, device=W.device) for _ in range(2))
    for some in slices(W.shape):
        x = W[some].double().unflatten(1, (groups, -1))
        least, largest = x.amin(2), x.amax(2)
        low, high = least.clamp(max=0), largest.clamp(min=0)
        size = _round_up((high - low) / torch.where(least == largest, 1.0, float(L)), scale_dtype)
        s = size.double()
        z = _divide(0 - low, s).round_()
        codes[some] = (_divide(x, s[..., None]).round_() + z[..., None]).clamp_(0, L).flatten(1)
        scale[some], zero[some] = size, z
    _expect_scales("quantize", "W", scale)
    return QuantizedWeight(codes, scale, zero, bits, group, dtype)


def ternary(W, scale=None, *, scale_dtype=None):
    """Round W (rows, cols) to -1, 0 and 1 times one scale, as BitNet b1.58 does: 2 bits a weight, one scale for a row.

    scale   None: the mean magnitude of W; or a number, such as the one that came with weights that are ternary already.
            It is rounded to scale_dtype (None: W's) before the weights are divided by it. One that is not 0 and would
            be rounded to 0, and the weights with it, is refused

    Errors as for quantize.
    """
    expect_first("ternary", "W", W, ("rows", "cols"))
    scale_dtype = _scale_dtype("ternary", scale_dtype, W)
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float)) or not scale >= 0):
        raise ValueError(f"ternary: scale must be None or a number of 0 or more, got {scale!r}")
    W = W.detach()
    _expect_finite("ternary", W)
    name, what = ("W", "a mean magnitude") if scale is None else ("scale", "a number")
    if scale is None:
        scale = sum(float(W[some].double().abs().sum()) for some in slices(W.shape)) / W.numel()
    scales = torch.full((len(W), 1), scale, dtype=torch.float64, device=W.device).to(scale_dtype)
    _expect_scales("ternary", name, scales)
    if scale > 0 and not scales[0].item():
        raise ValueError(
            f"ternary: {name} must have {what} that {scale_dtype} does not round to 0, got {scale:.3g}; "
            "a wider scale_dtype holds it"
        )
    codes = torch.empty(W.shape, dtype=torch.uint8, device=W.device)
    for some in slices(W.shape):
        codes[some] = _divide(W[some].double(), scales[some].double()).round_().clamp_(-1, 1) + 1
    return QuantizedWeight(codes, scales, torch.ones_like(scales), 2, None, W.dtype)


def from_codes(codes, scale, zero, bits, dtype=None):
    """Weights that were quantised elsewhere: (codes - zero) · scale.

    codes        uint8 (rows, cols), from 0 to 2**bits - 1
    scale, zero  (rows, groups) of one dtype, float16, bfloat16 or float32, on the device of codes; groups of 32, 64 or
                 128 columns, or one for a row. scale: none beyond 2**80 in magnitude. zero: whole numbers from 0 to
                 2**bits - 1
    dtype        that `dequantize` returns; None: that of scale

    Waits for the device, to look at the numbers. Errors as for quantize.
    """
    expect_bits("from_codes", bits)
    expect_first("from_codes", "codes", codes, ("rows", "cols"), (torch.uint8,))
    rows, cols = codes.shape
    expect("from_codes", "scale", scale, codes, (rows, "groups"), tuple(DTYPES))
    expect("from_codes", "zero", zero, codes, tuple(scale.shape), (scale.dtype,))
    if dtype not in (None, *DTYPES):
        raise TypeError(f"from_codes: dtype must be None or one of {listed(DTYPES)}, got {dtype!r}")
    groups = scale.shape[1]
    if groups > 1 and cols not in [groups * group for group in GROUPS]:
        raise ValueError(
            f"from_codes: scale must have one column, or one for each 32, 64 or 128 columns of codes, got {groups} for "
            f"{cols}"
        )
    what = "the look at codes, scale and zero, which waits for the card"
    expect_no_capture("from_codes", codes, what, "call it before the capture")
    L = (1 << bits) - 1
    if int(codes.max()) > L:
        raise ValueError(f"from_codes: codes must be from 0 to {L} with bits={bits}, got {int(codes.max())}")
    _expect_scales("from_codes", "scale", scale)
    wrong = ~((zero >= 0) & (zero <= L) & (zero == zero.round()))
    if wrong.any():
        index = tuple(torch.nonzero(wrong)[0].tolist())
        wanted = f"hold whole numbers from 0 to {L}"
        raise ValueError(f"from_codes: zero must {wanted}, got {zero[index].item()} at {index}")
    group = None if groups == 1 else cols // groups
    return QuantizedWeight(
        codes.detach(), scale.detach().clone(), zero.detach().clone(), bits, group, dtype or scale.dtype
    )


def _round_up(x, dtype):
    """The smallest number of a dtype that is not below x (float64, 0 or more); infinity past the largest."""
    near = x.to(dtype)
    return (near.view(WHOLE[dtype]) + (near.double() < x)).view(dtype)


def _divide(x, scale):
    """x / scale, and 0 where the scale is 0."""
    return torch.where(scale != 0, x / scale, 0.0)


def _scale_dtype(where, dtype, W):
    if dtype not in (None, *DTYPES):
        raise TypeError(f"{where}: scale_dtype must be None or one of {listed(DTYPES)}, got {dtype!r}")
    return W.dtype if dtype is None else dtype


def _expect_finite(where, W):
    expect_no_capture(where, W, "the look at the numbers of W, which waits for the card", "call it before the capture")
    for some in slices(W.shape):
        bad = ~torch.isfinite(W[some])
        if bad.any():
            row, col = torch.nonzero(bad)[0].tolist()
            index = (row + some.start, col)
            raise ValueError(f"{where}: W must be finite, got {W[index].item()} at {index}")


def _expect_scales(where, name, scale):
    """Scales that are finite, and not beyond LARGEST."""
    bad = ~(scale.double().abs() <= LARGEST)  # NaN too; in float16 LARGEST would be infinite
    if bad.any():
        row, column = torch.nonzero(bad)[0].tolist()
        value = scale[row, column].item()
        if not math.isfinite(value):
            raise ValueError(f"{where}: {name} must have scales within {scale.dtype}, got one beyond it in row {row}")
        raise ValueError(
            f"{where}: {name} must have scales of at most 2**80 ({LARGEST:.3g}), got {value:.3g} in row {row}"
        )
