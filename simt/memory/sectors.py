"""Sectors: what a warp's access to global memory costs.

A load or store of a warp is one request. The L1 cache serves it in sectors of 32 bytes: 32 neighbouring floats lie in
4 sectors, 32 floats that are far apart in 32. A warp with no active lane makes no request.

    addresses   integers (..., L): L = 32, a lane each, or 1, the same address in all lanes
    active      truth values, broadcastable to (..., 32); None: all lanes
    result      integers (...): the leading axes of both, broadcast
"""

import numpy as np

LANES = 32
SECTOR_SHIFT = 5
BYTES = 1 << SECTOR_SHIFT
FAR = np.iinfo(np.int64).max  # stands for no address; sorts last
WIDTHS = (1, 2, 4, 8, 16)


def sectors_per_warp(addresses, size, active=None):
    """Distinct 32-byte sectors that a load, store or cp.async.ca of `size` bytes a lane touches.

    Accesses are aligned to their size, so each lane's bytes lie in one sector. Wide accesses cost no more than the
    sectors they cover: 16 for 32 neighbouring float4, though the hardware serves them a quarter warp at a time.
    """
    addresses, active, uniform = arguments(addresses, size, active)
    counts = distinct(addresses >> SECTOR_SHIFT, active)
    return counts if uniform is None else counts * uniform


def atomic_sectors_per_warp(addresses, size, active=None):
    """Sectors of an atomic operation. Lanes that meet on an address take turns.

    The first lane on each address goes in pass 1, the second in pass 2, and so on; every pass costs its distinct
    sectors. 32 lanes on one counter cost 32, unless the compiler has seen that the address is the same in all lanes
    and joins them, as it does for atomicAdd(counter, 1): that costs 1, and is the caller's to know.
    """
    addresses, active, uniform = arguments(addresses, size, active)
    if addresses.shape[-1] == 1:  # all active lanes on one address
        if active is None:
            counts = np.full(addresses.shape[:-1], LANES)
        else:
            counts = active.sum(-1) + np.zeros(addresses.shape[:-1], np.int64)
    else:
        step = np.diff(addresses, axis=-1)
        if active is None and ((step > 0).all() or (step < 0).all()):  # all addresses differ
            counts = distinct(addresses >> SECTOR_SHIFT)
            return counts if uniform is None else counts * uniform
        if active is not None:
            addresses = np.where(active, addresses, FAR)
        order = np.argsort(addresses, axis=-1, kind="stable")
        addresses = np.take_along_axis(addresses, order, -1)
        lane = np.arange(LANES)
        first = np.where(starts(addresses), lane, 0)
        turn = lane - np.maximum.accumulate(first, axis=-1)
        used = addresses != FAR
        passes = np.where(used, (addresses >> SECTOR_SHIFT) * LANES + turn, FAR)
        counts = distinct(passes, used)
    return counts if uniform is None else counts * uniform


def arguments(addresses, size, active):
    """The arguments, checked: addresses, active (None: all lanes), and a truth value per warp where lanes agree."""
    addresses = np.asarray(addresses)
    if size not in WIDTHS:
        raise ValueError(f"size: expected 1, 2, 4, 8 or 16 bytes a lane; got {size!r}")
    if addresses.ndim == 0 or addresses.shape[-1] not in (1, LANES):
        raise ValueError(f"addresses: expected a last axis of 32 lanes, or of 1; got shape {addresses.shape}")
    if addresses.dtype.kind not in "iu":
        raise ValueError(f"addresses: expected integers; got {addresses.dtype}")
    addresses = addresses.astype(np.int64, copy=False)
    if active is None:
        return addresses, None, None
    active = np.asarray(active, bool)
    if active.ndim and active.shape[-1] == LANES:
        return addresses, None if active.ndim == 1 and active.all() else active, None
    if active.ndim and active.shape[-1] != 1:
        raise ValueError(f"active: expected a last axis of 32 lanes, or of 1; got shape {active.shape}")
    return addresses, None, active[..., 0] if active.ndim else active


def starts(items):
    """True where a lane's item is not that of the lane before."""
    found = np.empty(items.shape, bool)
    found[..., 0] = True
    np.not_equal(items[..., 1:], items[..., :-1], out=found[..., 1:])
    return found


def distinct(items, active=None):
    """How many different items the active lanes of each warp hold."""
    if items.shape[-1] == 1:
        if active is None:
            return np.ones(items.shape[:-1], np.int64)
        return active.any(-1) * np.ones(items.shape[:-1], np.int64)
    if active is None:
        return distinct_in_full(items)
    items, active = np.broadcast_arrays(items, active)
    full = active.all(-1)
    part = active.any(-1) & ~full
    counts = np.zeros(full.shape, np.int64)
    if full.any():
        counts[full] = distinct_in_full(items[full])
    if part.any():
        kept = np.sort(np.where(active[part], items[part], FAR), axis=-1)
        counts[part] = (starts(kept) & (kept != FAR)).sum(-1)
    return counts


def distinct_in_full(items):
    """The same where all 32 lanes are active. Only what neither rises nor falls from lane to lane needs sorting."""
    counts = starts(items).sum(-1)
    before, after = items[..., :-1], items[..., 1:]
    if not (after >= before).all() and not (after <= before).all():
        mixed = (after > before).any(-1) & (after < before).any(-1)
        counts[mixed] = starts(np.sort(items[mixed], axis=-1)).sum(-1)
    return counts
