"""The counting cache against a plain model of itself, and against counts done by hand."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.cache import Cache, count_misses, loops, matmul_addresses, matmul_misses


def plain_model(addresses, lines, line_bytes):
    """A list, the line used last at its end."""
    held, misses = [], 0
    for address in addresses:
        line = address // line_bytes
        misses += line not in held
        held = ([kept for kept in held if kept != line] + [line])[-lines:]
    return misses


@settings(deadline=None)
@given(st.lists(st.integers(0, 900)), st.integers(1, 9), st.sampled_from([1, 16, 64]))
def test_counts_as_the_plain_model(addresses, lines, line_bytes):
    assert count_misses(addresses, lines * line_bytes, line_bytes) == (
        len(addresses),
        plain_model(addresses, lines, line_bytes),
    )


def test_by_hand():
    cache = Cache(128)  # two lines of 64 bytes
    assert [cache.read(a) for a in (0, 63, 64, 0, 128, 0, 64)] == [
        False,
        True,
        False,
        True,
        False,
        True,
        False,
    ]
    assert (cache.accesses, cache.misses) == (7, 4)
    assert cache.holds(0) and cache.holds(127) and not cache.holds(128)
    assert cache.touch(64) and (cache.accesses, cache.misses) == (8, 4)


def test_accepts_lists_iterators_and_arrays():
    addresses = [0, 4, 64, 1000, 0]
    forms = [addresses, iter(addresses), np.array(addresses), np.array(addresses, np.uint16), range(0)]
    assert [count_misses(a, 4096) for a in forms] == [(5, 3)] * 4 + [(0, 0)]


def test_one_pass_misses_once_a_line():
    assert count_misses(4 * np.arange(1000), 4096) == (1000, 63)


def test_a_cache_that_holds_everything_misses_each_line_once():
    n = 20  # 3 · 400 floats are 75 lines
    for order in ("ijk", "jki", "kij"):
        assert matmul_misses(loops(order, n), n, Cache(1 << 20)) == 75


def test_loops_take_every_step_once_in_order():
    assert loops("ikj", 2).tolist() == [
        [0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1],
        [1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 1, 1],
    ]  # fmt: skip
    assert loops("jpi", 3).tolist() == [[i, j, p] for j in range(3) for p in range(3) for i in range(3)]
    for order in ("ijk", "jki"):
        assert len({tuple(s) for s in loops(order, 5).tolist()}) == 125


def test_addresses_of_one_step():
    assert matmul_addresses([(1, 2, 3)], 4).tolist() == [4 * 7, 4 * (16 + 14), 4 * (32 + 6)]
    assert matmul_addresses(iter([(1, 2, 3)]), 4, element_bytes=2).tolist() == [14, 60, 76]
    assert matmul_addresses([], 4).tolist() == []


def test_tiles_beat_plain_loops():
    def tiled(n, tile=16):
        starts = range(0, n, tile)
        for i0 in starts:
            for j0 in starts:
                for p0 in starts:
                    for i in range(i0, i0 + tile):
                        for j in range(j0, j0 + tile):
                            for p in range(p0, p0 + tile):
                                yield i, j, p

    assert matmul_misses(tiled(48), 48, Cache(4096)) == 1008
    # by hand: C's tiles once, 9 · 16 lines; for each of the 27 pairs, a tile of A and a tile of B
    assert 1008 == 9 * 16 + 27 * 2 * 16
    assert matmul_misses(loops("ijk", 48), 48, Cache(4096)) == 7200  # B anew for each i: 48 · 144, and A and C once


def test_it_is_quick():
    started = time.process_time()
    matmul_misses(loops("jki", 48), 48, Cache(4096))
    assert time.process_time() - started < 3  # about 0.1 s


@pytest.mark.parametrize("size, line", [(63, 64), (0, 64), (64, 0)])
def test_refuses_a_cache_without_a_line(size, line):
    with pytest.raises(ValueError, match="holds no line"):
        Cache(size, line)
