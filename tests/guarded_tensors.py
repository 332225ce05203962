"""Tensors between guards, for tests of kernels: what is read too far turns a result into NaN, and what is written too
far is seen. On the tensor's own device.

    x = between(x)                                     # between NaNs
    out = between(torch.full(shape, nan), FENCE)       # between fences, each element to be written
    assert fences_stand(out)
"""

import torch

GUARD, FENCE = 64, 1234.0  # elements around a tensor: a multiple of 16 bytes, so that they do not spoil its alignment


def between(tensor, fence=torch.nan, skip=0):
    """A copy that lies between guards, `skip` elements further on than an aligned address."""
    home = torch.full((tensor.numel() + 2 * GUARD + skip,), fence, dtype=tensor.dtype, device=tensor.device)
    return home[GUARD + skip : GUARD + skip + tensor.numel()].view(tensor.shape).copy_(tensor)


def fences_stand(out):
    """Whether all of the memory around a tensor that `between` made with FENCE still holds it."""
    home = torch.empty(0, dtype=out.dtype, device=out.device).set_(out.untyped_storage())
    first, last = out.storage_offset(), out.storage_offset() + out.numel()
    return bool((home[:first] == FENCE).all() and (home[last:] == FENCE).all())
