"""Shuffles, votes, matches, reductions: against loops over lanes, written from the PTX ISA's pseudocode."""

import numpy as np
import pytest

from simt.arithmetic import lanes

RNG = np.random.default_rng(3)
WARPS = 6


def words(low=0, high=1 << 32, shape=(WARPS, 32)):
    return RNG.integers(low, high, shape, dtype=np.uint64).astype(np.uint32)


def shuffled(mode, lane, b, c):
    """-> (source lane, in range), as the ISA's pseudocode has it."""
    segment, limit, b = c >> 8 & 31, c & 31, b & 31
    highest = (lane & segment) | (limit & ~segment)
    lowest = lane & segment
    if mode == "up":
        j, inside = lane - b, lane - b >= highest
    elif mode == "down":
        j, inside = lane + b, lane + b <= highest
    elif mode == "bfly":
        j, inside = lane ^ b, (lane ^ b) <= highest
    else:
        j = lowest | (b & ~segment)
        inside = j <= highest
    return (j if inside else lane), inside


@pytest.mark.parametrize("mode", ["idx", "up", "down", "bfly"])
@pytest.mark.parametrize("clamp", [0x1F, 0, 0x181F, 0x1C1F, 0x1800, 0x101F, None])
def test_shuffle(mode, clamp):
    value, b = words(), words(0, 70)
    b[0], b[1] = 1, 16
    c = words() if clamp is None else np.full((1, 32), clamp, np.uint32)
    result, inside = lanes.shuffle(mode, value, b, c)
    whole_c = np.broadcast_to(c, value.shape)
    for w in range(WARPS):
        for lane in range(32):
            source, good = shuffled(mode, lane, int(b[w, lane]), int(whole_c[w, lane]))
            assert result[w, lane] == value[w, source] and inside[w, lane] == good


def active_lanes():
    active = RNG.random((WARPS, 32)) < 0.6
    active[0], active[1] = True, False
    active[1, 31] = True
    return active


def word(flags):
    return sum(1 << i for i, flag in enumerate(flags) if flag)


def test_votes():
    active, p = active_lanes(), RNG.random((WARPS, 32)) < 0.5
    p[0], p[2], p[3] = True, False, ~active[3]
    for w in range(WARPS):
        seen = [bool(x) for x, on in zip(p[w], active[w]) if on]
        wanted = {"all": all(seen), "any": any(seen), "uni": len(set(seen)) == 1, "ballot": word(p[w] & active[w])}
        for mode, value in wanted.items():
            result = lanes.vote(mode, p[w][None], active[w][None])
            assert result.shape[-1] in (1, 32) and (result == value).all(), mode
    assert lanes.activemask(active)[4, 0] == word(active[4])
    assert lanes.vote("ballot", p, active).dtype == np.uint32


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_match(dtype):
    active, value = active_lanes(), words(0, 4).astype(dtype)
    value[2, active[2]] = 7
    found = lanes.match_any(value, active)
    everyone, same = lanes.match_all(value, active)
    for w in range(WARPS):
        for lane in np.flatnonzero(active[w]):
            assert found[w, lane] == word((value[w] == value[w, lane]) & active[w])
        alike = len(set(value[w, active[w]].tolist())) == 1
        assert same[w, 0] == alike and everyone[w, 0] == (word(active[w]) if alike else 0)


@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
@pytest.mark.parametrize("operation", ["add", "min", "max", "and", "or", "xor"])
def test_redux(operation, dtype):
    active, value = active_lanes(), words().view(dtype)
    result = lanes.redux(operation, value, active)
    assert result.dtype == dtype and result.shape[-1] in (1, 32)
    folds = {
        "add": lambda x, y: x + y,
        "min": min,
        "max": max,
        "and": lambda x, y: x & y,
        "or": lambda x, y: x | y,
        "xor": lambda x, y: x ^ y,
    }
    for w in range(WARPS):
        first, *rest = [int(x) for x in value[w, active[w]]]
        for x in rest:
            first = folds[operation](first, x)
        assert int(result[w, 0]) % 2**32 == first % 2**32
