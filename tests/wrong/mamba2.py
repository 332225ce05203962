"""Wrong answers to the exercises of chapter 18: a state's rounding; and those of the modules beside this one.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer, and words that
the check's verdict must hold. RIGHT has the answers that they were made from.
"""

import numpy as np

from wrong import mamba2_bytes, mamba2_kernels, mamba2_states

# Exercise 4: a state that does not stand still


def _half(up=lambda below, u, apart: below > u * apart, wide=np.float32):
    """Right, but for what is said."""

    def to_half(h, u):
        near = h.astype(np.float16)
        low = np.where(near.astype(np.float32) > h, np.nextafter(near, np.float16(-np.inf)), near)
        high = np.where(near.astype(np.float32) < h, np.nextafter(near, np.float16(np.inf)), near)
        below, apart = h.astype(wide) - low.astype(wide), high.astype(wide) - low.astype(wide)
        return np.where(up(below, u, apart), high, low)

    return to_half


def _toward_zero(h, u):
    near = h.astype(np.float16)
    return np.where(np.abs(near.astype(np.float32)) > np.abs(h), np.nextafter(near, np.float16(0)), near)


def _by_bits(h, u):
    """13 random bits added and cut off: right, but not for fp16's numbers below 2^-14."""
    bits = h.view(np.uint32) + (np.float32(8192) * (1 - u)).astype(np.uint32).clip(0, 8191)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float16)


def _codes(
    most=127,
    largest=lambda h: np.abs(h).max(axis=1),
    snapped=True,
    round=lambda q, u: np.floor(q) + (q - np.floor(q) > u),
    type=np.int8,
):
    """Right, but for what is said."""

    def to_codes(h, u):
        scales = (largest(h) / np.float32(most)).astype(np.float32)
        q = h / np.where(scales > 0, scales, 1)[:, None].astype(np.float64)
        q = np.where(np.abs(q - np.rint(q)) < 1e-5, np.rint(q), q) if snapped else q
        return round(q, u).astype(type), scales

    return to_codes


def _divides_zeros(h, u):
    scales = np.abs(h).max(axis=1) / np.float32(127)
    q = h / scales[:, None]
    q = np.where(np.abs(q - np.rint(q)) < 1e-5, np.rint(q), q)
    with np.errstate(invalid="ignore"):
        codes = (np.floor(q) + (q - np.floor(q) > u)).astype(np.int8)
    return codes, np.where(scales > 0, scales, np.nan)


def _overflows(h, u):
    """As it comes in float32, and always up where there is anything behind the point."""
    scales = (np.abs(h).max(axis=1) / np.float32(127)).astype(np.float32)
    q = h / np.where(scales > 0, np.nextafter(scales, np.float32(0)), 1)[:, None]
    return (np.floor(q) + (q - np.floor(q) > u)).astype(int).astype(np.int8), scales


def _draws(h, u):
    return CODES(h, np.random.default_rng().random(h.shape).astype(np.float32))


HALF, CODES = _half(), _codes()
EX4 = {
    "fp16 to the nearest": ((lambda h, u: h.astype(np.float16), CODES), "to_half: with 1 + 2^-11"),
    "fp16 toward zero": ((_toward_zero, CODES), "to_half: with 1 + 2^-11"),
    "fp16 down always": ((_half(lambda below, u, apart: below < 0), CODES), "to_half: with"),
    "fp16 the other way": ((_half(lambda below, u, apart: below < u * apart), CODES), "to_half: with"),
    "fp16 with one u for all": ((lambda h, u: HALF(h, np.full_like(u, u[0, 0])), CODES), "to_half: with"),
    "float32": ((lambda h, u: HALF(h, u).astype(np.float32), CODES), "has dtype float32, expected float16"),
    "fp16 by bits": ((_by_bits, CODES), "to_half: with"),
    "8 bits to the nearest": ((HALF, _codes(round=lambda q, u: np.rint(q))), "to_codes: with"),
    "8 bits cut off": ((HALF, _codes(round=lambda q, u: np.trunc(q))), "to_codes: with"),
    "8 bits by trunc(q + u)": ((HALF, _codes(round=lambda q, u: np.trunc(q + u))), "to_codes: with"),
    "a scale for 128": ((HALF, _codes(most=128)), "the largest of its row over 127"),
    "a scale for all rows": ((HALF, _codes(largest=lambda h: np.full(len(h), np.abs(h).max()))), "scales["),
    "the largest, not the largest magnitude": ((HALF, _codes(largest=lambda h: h.max(axis=1))), "a negative number"),
    "zeros over zero": ((HALF, _divides_zeros), "with zeros"),
    "a quotient above 127, as it comes": ((HALF, _overflows), "expected −127 to 127"),
    "codes of 16 bits": ((HALF, _codes(type=np.int16)), "has dtype int16, expected int8"),
    "draws numbers of its own": ((HALF, _draws), "to_codes: with"),
    "no scales": ((HALF, lambda h, u: CODES(h, u)[0]), "expected (codes, scales)"),
}

RIGHT = {**mamba2_bytes.RIGHT, **mamba2_states.RIGHT, 4: (HALF, CODES), **mamba2_kernels.RIGHT}
WRONG = {**mamba2_bytes.WRONG, **mamba2_states.WRONG, 4: EX4, **mamba2_kernels.WRONG}
