"""What the 32 lanes of a warp tell each other: shuffles, votes, matches, reductions.

The last axis of every array is the 32 lanes; the axes before it are any number of warps. `active` says, as a bool per
lane, who takes part; results are for those lanes only. A result that all lanes share has a last axis of length 1.
PTX ISA, "Parallel Synchronization and Communication Instructions" and "Data Movement: shfl.sync".
"""

import functools
import math

import numpy as np

from simt.ptx.types import broadcast

U32 = np.uint32
LANES = np.arange(32)
BITS = U32(1) << LANES.astype(U32)


def shuffle(mode, value, lane_operand, clamp_operand):
    """shfl.sync.mode d|p, a, b, c -> (d, p).

    mode           "idx": lane b of the segment; "up", "down": b lanes lower, higher; "bfly": lane ^ b
    lane_operand   b: its lowest 5 bits count
    clamp_operand  c: bits 0-4 the clamp, bits 8-12 the mask that cuts the warp into segments

    Where the wanted lane lies outside (p False), a lane gets its own value.
    """
    source, in_range = sources(mode, lane_operand, clamp_operand)
    shape = np.broadcast_shapes(value.shape, source.shape)
    source, in_range = broadcast(source, shape), broadcast(in_range, shape)
    rows = np.arange(0, math.prod(shape), 32).reshape(*shape[:-1], 1)
    return broadcast(value, shape).reshape(-1).take(rows + source), in_range


def shuffle_alike(mode, value, lane_operand, clamp_operand):
    """The same where lane and clamp are numbers, one for all lanes."""
    source, in_range = known_sources(mode, lane_operand, clamp_operand)
    shape = value.shape[:-1] + (32,)
    return broadcast(value, shape).take(source, axis=-1), broadcast(in_range, shape)


def sources(mode, lane_operand, clamp_operand):
    """(the lane that each lane reads, whether it lies inside)."""
    b = (lane_operand & U32(31)).astype(np.int64)
    clamp = (clamp_operand & U32(31)).astype(np.int64)
    segment = (clamp_operand >> U32(8) & U32(31)).astype(np.int64)
    lowest = LANES & segment
    limit = lowest | (clamp & ~segment)
    source = {
        "idx": lambda: lowest | (b & ~segment),
        "up": lambda: LANES - b,
        "down": lambda: LANES + b,
        "bfly": lambda: LANES ^ b,
    }[mode]()
    in_range = source >= limit if mode == "up" else source <= limit
    return np.where(in_range, source, LANES), in_range


@functools.cache
def known_sources(mode, lane_operand, clamp_operand):
    return sources(mode, U32(lane_operand), U32(clamp_operand))


def activemask(active):
    """The lanes as a word, lane 0 its lowest bit."""
    return _word(active)


def vote(mode, predicate, active):
    """vote.sync: "all", "any", "uni" (all alike) -> bool; "ballot" -> the word of the lanes where it holds."""
    yes, no = active & predicate, active & ~predicate
    if mode == "ballot":
        return _word(yes)
    some, none = yes.any(axis=-1, keepdims=True), ~yes.any(axis=-1, keepdims=True)
    unanimous = ~no.any(axis=-1, keepdims=True)
    return {"all": unanimous, "any": some, "uni": unanimous | none}[mode]


def match_any(value, active):
    """match.any: for each lane, the word of the active lanes that hold the same value."""
    same = (value[..., :, None] == value[..., None, :]) & active[..., None, :]
    return _word(same)[..., 0]


def match_all(value, active):
    """match.all -> (word of the active lanes, True) where all of them hold one value, else (0, False)."""
    first = np.take_along_axis(value, active.argmax(axis=-1)[..., None], axis=-1)
    same = ((value == first) | ~active).all(axis=-1, keepdims=True)
    return np.where(same, _word(active), U32(0)), same


REDUCTIONS = {
    "add": (np.add, 0),
    "min": (np.minimum, "max"),
    "max": (np.maximum, "min"),
    "and": (np.bitwise_and, ~0),
    "or": (np.bitwise_or, 0),
    "xor": (np.bitwise_xor, 0),
}


def redux(operation, value, active):
    """redux.sync: add, min, max, and, or, xor of the active lanes' values; int32 is compared as signed."""
    ufunc, neutral = REDUCTIONS[operation]
    if isinstance(neutral, str):
        neutral = getattr(np.iinfo(value.dtype), neutral)
    neutral = np.array(neutral).astype(value.dtype)
    return ufunc.reduce(np.where(active, value, neutral), axis=-1, keepdims=True, dtype=value.dtype)


def _word(lanes):
    return np.bitwise_or.reduce(np.where(lanes, BITS, U32(0)), axis=-1, keepdims=True)
