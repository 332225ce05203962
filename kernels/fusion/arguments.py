"""Look at tensors before anything is launched, and say what is wrong in one sentence."""

import math
import numbers

import torch

from lab import tensors

DTYPES = {dtype: tensors.DTYPES[dtype] for dtype in (torch.float16, torch.bfloat16)}


def expect_vector(where, name, value):
    """The first tensor of a call: its dtype and device are what the others must have."""
    tensors.expect_first(where, name, value, ("n",), tuple(DTYPES))


def expect_eps(where, eps):
    """Raise unless this can be added to a mean square. A tensor cannot: to look into one on a card breaks a capture."""
    if isinstance(eps, bool) or not isinstance(eps, numbers.Real):
        raise TypeError(f"{where}: eps must be a number, got {type(eps).__name__}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"{where}: eps must be 0 or more, and finite, got {eps}")
