"""The SIMT machine as another card: for tests of plans, whose sizes follow multiprocessors and shared memory."""

import contextlib
import sys

from lab import card
from lab.cuda.launch import Kernel


@contextlib.contextmanager
def standing_in(as_card):
    """Within: CPU tensors run as on this card. Gives the launches, (kernel, grid, shared bytes) each, as they come."""
    launched, simulate = [], Kernel._simulate

    def noted(kernel, grid, block, values, tensors, shared, cluster, options):
        launched.append((kernel.name, grid, shared))
        return simulate(kernel, grid, block, values, tensors, shared, cluster, options)

    Kernel._simulate = noted
    forget()
    try:
        with card.as_if(as_card):
            yield launched
    finally:
        forget()
        Kernel._simulate = simulate


def forget():
    """Empty what kernels keep of earlier calls: plans of another card are among it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("kernels."):
            for kept in [value for value in vars(module).values() if hasattr(value, "cache_clear")]:
                kept.cache_clear()
