"""What a call is looked at for, before anything is written."""

import math

import torch

from lab.card import capability
from lab.tensors import expect, expect_first, output

TYPES = torch.float16, torch.bfloat16
LIMIT = 2**31 - 256  # of m, n and k: coordinates of tiles are of 32 bits
NEWER = {
    "tile": (7, 5),
    "mma": (8, 0),
    "ring": (9, 0),
    "tma": (9, 0),
    "linear": (7, 5),
}  # the compute capability that a rung needs at least
HOPPER = (9, 0)  # what the other rungs need, neither less nor more: wgmma


def expect_linear(where, x, W, out):
    """Raise unless a matmul can be called so. Returns x as (m, k), W (n, k), and the tensor to write to, y (..., n)."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{where}: x must be a torch tensor, got {type(x).__name__}")
    if x.ndim == 0:
        raise ValueError(f"{where}: x must have shape (..., k), got a tensor without axes")
    ahead = tuple(f"m{axis}" for axis in range(x.ndim - 1)) if x.ndim > 2 else ("m",) * (x.ndim - 1)
    expect_first(where, "x", x, (*ahead, "k"), TYPES, empty=True)
    k = x.shape[-1]
    expect(where, "W", W, x, ("n", k), empty=True)
    m, n = math.prod(x.shape[:-1]), len(W)
    for name, size, of in (("x", m, "rows"), ("x", k, "columns"), ("W", n, "rows")):
        if size >= LIMIT:
            raise ValueError(f"{where}: {name} must have less than 2**31 - 256 {of}, got {size}")
    y = output(where, out, x, (*x.shape[:-1], n), empty=True, x=x, W=W)
    return x.view(m, k), W, y


def expect_card(rung, device):
    """Raise where the card lacks a rung's instructions."""
    have, need = capability(device), NEWER.get(rung, HOPPER)
    if have < need or (rung not in NEWER and have != need):
        newer = " or newer" if rung in NEWER else ""
        best = "mma" if have >= NEWER["mma"] else "tile"
        instead = f"; linear runs the rung {best} there" if have >= NEWER["linear"] else ""
        raise RuntimeError(
            f"{rung}: needs a card of compute capability {need[0]}.{need[1]}{newer}, got {have[0]}.{have[1]}{instead}"
        )


def expect_layout(rung, x, W, y):
    """Raise where a rung cannot copy these matrices."""
    if rung != "tile" and (why := why_padded(x, W)):
        raise ValueError(f"{rung}: {why}; rows are copied in words of 16 bytes. tile and linear take any")
    if rung == "persistent" and len(W) % 8:
        raise ValueError(
            f"persistent: W must have a multiple of 8 rows, as TMA stores y, got {len(W)}; planned takes any"
        )
    if rung == "persistent" and (beyond := y.data_ptr() % 16):
        raise ValueError(
            f"persistent: out must be at a multiple of 16 bytes, as TMA stores it, got an address {beyond} bytes past "
            "one; planned takes any"
        )


def why_padded(x, W):
    """Why rows cannot be copied in words of 16 bytes, or ""."""
    if x.shape[1] % 8:
        return f"x and W must have a multiple of 8 columns, got {x.shape[1]}"
    for name, tensor in (("x", x), ("W", W)):
        if beyond := tensor.data_ptr() % 16:
            return f"{name} must be at a multiple of 16 bytes, got an address {beyond} bytes past one"
    return ""


def padded(tensor):
    """A copy with rows of whole words, zeros at their ends."""
    rows, k = tensor.shape
    copy = tensor.new_empty((rows, -(-k // 8) * 8))
    copy[:, :k] = tensor
    copy[:, k:] = 0
    return copy


def why_slower(device):
    """(the rung that linear runs on this card, why it is not `planned`, or "")."""
    have = capability(device)
    if have == HOPPER:
        return "planned", ""
    rung = "mma" if have >= NEWER["mma"] else "tile"
    return (
        rung,
        f"wgmma needs a card of compute capability 9.0, got {have[0]}.{have[1]}: the rung {rung} runs instead",
    )
