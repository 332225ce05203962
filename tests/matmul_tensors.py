"""What the tests of the matmul share, on a CPU and on a card: operands between guards, how near a product must be."""

import torch
from guarded_tensors import FENCE, between


def problem(m, n, k, dtype, skip=0, device="cpu"):
    """x and W between NaNs, out full of NaN between fences; each `skip` elements past an aligned address."""
    rng = torch.Generator(device).manual_seed(1000 * m + n)
    drawn = (torch.randn(shape, generator=rng, device=device) for shape in ((m, k), (n, k)))
    x, W = (between(tensor.to(dtype), skip=skip) for tensor in drawn)
    return x, W, between(torch.full((m, n), torch.nan, dtype=dtype, device=device), FENCE, skip)


def close(out, x, W):
    """Near the product in double: by the norm, one rounding of the dtype and what sums in fp32 lose."""
    wanted = x.double() @ W.double().T
    allowed = torch.finfo(out.dtype).eps * max(float(wanted.norm()), (wanted.numel() * W.shape[1]) ** 0.5)
    error = float((out.double() - wanted).norm())
    assert error <= allowed, (tuple(out.shape), W.shape[1], error, allowed)  # NaN too
