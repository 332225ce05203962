"""Which code a number gets, and which scale its group: as ref/kv_cache.py writes it out, bit for bit, in torch."""

import math

import torch

BITS = {8: 127, 4: 8, "fp8": 448}  # and the magnitude of a code that the largest number of a group is given


def default_group(bits, axis, head_dim):
    """One scale for a token and head in 8 bits, for 32 channels in 4 (16 if 32 does not divide head_dim); along the
    tokens for 128 of them, or 32."""
    if bits == 4:
        return math.gcd(32, head_dim) if axis == "token" else 32
    return head_dim if axis == "token" else 128


def codes_of(x, bits, axis, group):
    """(codes, scale) of x (1, length, n_kv_heads, head_dim), float32. Every operation rounds as NumPy's does."""
    length = x.shape[1]
    if axis == "token":
        grouped, over = x.unflatten(3, (-1, group)), 4
    else:
        grouped, over = padded(x, -(-length // group) * group).unflatten(1, (-1, group)), 2  # zeros change no maximum
    low, high = grouped.amin(over, keepdim=True), grouped.amax(over, keepdim=True)
    m = torch.where(-low >= high, low, high)
    largest = torch.full((), BITS[bits], dtype=torch.float32, device=x.device)  # a tensor: a number would become 1 / it
    scale = _round_up_to_half(m.abs() / largest)
    if bits == 4:
        scale = torch.where(m > 0, -scale, scale)
    y = torch.where(scale != 0, grouped / scale.float(), 0.0)
    if bits == "fp8":
        codes = y.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = y.round_().clamp_(-8 if bits == 4 else -127, 7 if bits == 4 else 127).to(torch.int8)
    codes = codes.flatten(3) if axis == "token" else codes.flatten(1, 2)[:, :length]
    return codes, scale.squeeze(over)


def _round_up_to_half(x):
    """The smallest float16 that is not below x, 0 or more."""
    half = x.half()
    return (half.view(torch.int16) + (half.float() < x)).view(torch.float16)


def padded(x, length):
    """x with zeros behind its tokens, so that there are `length` of them."""
    missing = length - x.shape[1]
    return torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1) if missing else x
