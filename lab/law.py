"""The law of a step: its bytes take their time at one rate, and each launch, or call, costs the same besides.

seconds = bytes / rate + launches · price
"""

import numpy as np


def fit(steps):
    """(rate, price), bytes a second and seconds a launch, that fit best, by least squares.

    steps   two or more (bytes, launches, seconds), whose bytes do not all go with their launches

    ValueError if they say less than that.
    """
    read, launches, took = np.array(steps, float).reshape(-1, 3).T
    scales = np.array([read.max(initial=1), launches.max(initial=1)])
    (per_byte, price), _, rank, _ = np.linalg.lstsq(np.stack([read, launches], 1) / scales, took, rcond=1e-9)
    if rank < 2:
        raise ValueError(f"fit: steps must differ in bytes and in launches, got {len(took)} that do not")
    return scales[0] / per_byte, price / scales[1]
