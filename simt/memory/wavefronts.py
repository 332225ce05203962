"""Wavefronts: what a warp's access to shared memory costs.

Shared memory has 32 banks of 4 bytes; a wavefront serves one word from each. Lanes that want the same word share it,
lanes that want different words of one bank wait: the wavefronts are the words in the fullest bank.

A warp's wide access is served in parts: 8 bytes a lane by half warps, 16 bytes by quarter warps. If in the whole warp
lanes n and n ^ 1, or lanes n and n ^ 2, ask for the same address (a lane that is off agrees with any), a load is
served in parts twice as large. A part with no active lane costs nothing. Every other part costs one wavefront at
least; what is beyond that is a bank conflict.

    addresses   byte offsets, integers (..., L): L = 32, a lane each, or 1, the same in all lanes
    active      truth values, broadcastable to (..., 32); None: all lanes
    result      integers (...): the leading axes of both, broadcast

What an H200 counts agrees. That stores are served in the small parts always is known from one measurement only
(16 bytes, odd lanes).

Atomics on shared memory are in neither the load nor the store counters, if they are done by the shared memory itself
(integers). Those on floats are a loop around a compare-and-swap: it loads the word once for each turn, so a warp
alone counts turns_per_warp loads of one wavefront or more. Warps of a block that meet on a word make each other
repeat, which depends on time and cannot be counted here: 8 warps that needed 8 loads counted 12, and 128 threads of
a block on one word counted about 500.
"""

import numpy as np

from simt.memory.sectors import FAR, LANES, arguments, starts

LINE = 128  # bytes of one wavefront: 32 banks of 4


def wavefronts_per_warp(addresses, size, active=None, store=False):
    """Wavefronts of a load or store of `size` bytes a lane (1, 2, 4, 8 or 16)."""
    return wavefronts_and_ideal(addresses, size, active, store)[0]


def ideal_wavefronts(addresses, size, active=None, store=False):
    """The wavefronts without bank conflicts: those of the parts that have work."""
    return wavefronts_and_ideal(addresses, size, active, store)[1]


def wavefronts_and_ideal(addresses, size, active=None, store=False):
    """Both counts at once; their difference is the bank conflicts."""
    addresses, active, uniform = arguments(addresses, size, active)
    unit = max(size, 4)
    units = addresses // unit
    if units.shape[-1] == 1:
        counts = served_alike(units, unit, active, store)
    else:
        counts = served(units, unit, active, store)
    return counts if uniform is None else tuple(count * uniform for count in counts)


def served_alike(units, unit, active, store):
    """All lanes want the same: one wavefront for each part that has an active lane."""
    parts = max(unit // 4 // (1 if store else 2), 1)
    on = np.ones(LANES, bool) if active is None else active
    on = on.reshape(*on.shape[:-1], parts, LANES // parts).any(-1).sum(-1)
    count = on + np.zeros(units.shape[:-1], np.int64)
    return count, count


def served(units, unit, active, store):
    """(wavefronts, parts with work) of each warp, whatever its lanes want."""
    if active is None:
        counts = served_warps(units.reshape(-1, LANES), None, unit, store)
        return tuple(counts.reshape(2, *units.shape[:-1]))
    units, active = np.broadcast_arrays(units, active)
    works = active.any(-1)  # often few warps
    counts = np.zeros((2, *works.shape), np.int64)
    if works.any():
        counts[:, works] = served_warps(units[works], active[works], unit, store)
    return tuple(counts)


def served_warps(units, active, unit, store):
    """The same for units (warps, 32), as one array (2, warps)."""
    banks, parts = LINE // unit, unit // 4
    if parts == 1 or store:
        return np.stack(in_parts(units, active, banks, parts))
    twins = agree(units, active, 1) | agree(units, active, 2)
    counts = np.empty((2, len(units)), np.int64)
    for which, number in (twins, parts // 2), (~twins, parts):
        if which.any():
            counts[:, which] = in_parts(units[which], None if active is None else active[which], banks, number)
    return counts


def agree(units, active, distance):
    """Per warp: do lanes n and n ^ distance want the same, wherever both are active?"""
    shape = (len(units), -1, 2, distance)
    units = units.reshape(shape)
    same = units[:, :, 0] == units[:, :, 1]
    if active is not None:
        active = active.reshape(shape)
        same |= ~(active[:, :, 0] & active[:, :, 1])
    return same.all((1, 2))


def in_parts(units, active, banks, parts):
    """(warps, 32) units -> (wavefronts, parts with work) of each warp, served in so many parts."""
    units = units.reshape(-1, LANES // parts)
    on = None if active is None else active.reshape(units.shape)
    wavefronts = fullest_bank(units, on, banks).reshape(-1, parts)
    return wavefronts.sum(-1), (wavefronts > 0).sum(-1)


def fullest_bank(units, active, banks):
    """(parts, lanes) units -> the number of different units in the fullest bank of each part."""
    asked = starts(units)  # not again for what the lane before asks for
    if active is not None:
        asked[:, 1:] |= ~active[:, :-1]
        asked &= active
    bit = np.where(asked, np.left_shift(np.uint32(1), (units % banks).astype(np.uint32)), np.uint32(0))
    used = np.bitwise_count(np.bitwise_or.reduce(bit, axis=-1)).astype(np.int64)
    worst = (used > 0).astype(np.int64)
    several = asked.sum(-1) > used  # else no two lanes meet in a bank
    if several.any():
        units = units[several]
        words = units % banks << 40 | units // banks
        if active is not None:
            words[~active[several]] = FAR
        words.sort(axis=-1)
        part, lane = np.nonzero(starts(words) & (words != FAR))
        filled = np.bincount(part * banks + (words[part, lane] >> 40), minlength=len(words) * banks)
        worst[several] = filled.reshape(-1, banks).max(-1)
    return worst


def ldmatrix_wavefronts(addresses, count, active=None):
    """Wavefronts of ldmatrix .x`count`: each matrix is 8 rows of 16 bytes, the rows that 8 lanes point at.

    Lanes 8 i to 8 i + 7 point at the rows of matrix i; lanes beyond the last matrix are not looked at. Each matrix is
    a part of its own, so without conflicts they are `count`.
    """
    if count not in (1, 2, 4):
        raise ValueError(f"count: expected 1, 2 or 4 matrices; got {count!r}")
    addresses, active, uniform = arguments(addresses, 16, active)
    rows = np.broadcast_to(addresses // 16, (*addresses.shape[:-1], LANES))
    if active is not None:
        rows, active = np.broadcast_arrays(rows, active)
    lead = rows.shape[:-1]
    on = None if active is None else active[..., : 8 * count].reshape(-1, 8)
    worst = fullest_bank(rows[..., : 8 * count].reshape(-1, 8), on, LINE // 16)
    counts = worst.reshape(*lead, count).sum(-1)
    return counts if uniform is None else counts * uniform


def turns_per_warp(addresses, active=None):
    """How many lanes of a warp meet on one address at most: the turns of an atomic operation."""
    addresses, active, uniform = arguments(addresses, 4, active)
    addresses = np.broadcast_to(addresses, (*addresses.shape[:-1], LANES))
    if active is not None:
        addresses = np.where(active, addresses, FAR)
    addresses = np.sort(addresses, axis=-1)
    lane = np.arange(LANES)
    turn = lane - np.maximum.accumulate(np.where(starts(addresses), lane, 0), axis=-1) + 1
    turns = np.where(addresses == FAR, 0, turn).max(-1)
    return turns if uniform is None else turns * uniform
