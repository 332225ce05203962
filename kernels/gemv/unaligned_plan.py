"""How rows that begin at any element are read: when unaligned.cu runs, or unaligned_ring.cu, and of what sizes."""

import functools
import math

LINE = 128  # bytes: words are counted from the start of the line that a row begins in
THREADS, WORDS, MOST_COLS = 288, 8, 1 << 30
LEAST_BYTES = 512  # of a row, for which it pays
RING_THREADS, RING_WORDS = 704, (512, 2048)  # of a block, at most; of a row, at least and at most


def is_unaligned(cols, itemsize, alignment):
    """Whether `gemv` reads such a matrix in words cut by address: its rows, or x, are not at multiples of 16 bytes, and
    the rows are long enough.

    alignment   bytes that the addresses of W and x are multiples of, 16 at most
    """
    row = cols * itemsize
    return (alignment < 16 or row % 16 != 0) and row >= LEAST_BYTES and cols < MOST_COLS


@functools.lru_cache(maxsize=1024)
def unaligned_plan(rows, cols, itemsize, pdl):
    """(grid, block, Sizes, GOES, X_FIRST, BLOCKS) of unaligned.cu. Sizes: PERIOD, THREADS, WORDS, ROWS, LINE."""
    words = _words(cols, itemsize)
    goes = -(-words // (THREADS * WORDS))  # a row is read in so many
    held = -(-words // (goes * THREADS))  # words of a row that a thread has at a time
    threads = max(32, -(-words // (goes * held * 32)) * 32)
    each = max(1, min(8, 8 // held))
    sizes = (_period(cols, itemsize), threads, held, each, LINE)
    return _groups(rows, *sizes), threads, sizes, goes, int(not pdl), 1


@functools.lru_cache(maxsize=1024)
def unaligned_ring_plan(rows, cols, itemsize, multiprocessors, room):
    """(grid, block, shared bytes, Sizes, STAGES, STAGES_BEFORE_X) of unaligned_ring.cu, or None where unaligned.cu is to
    run. It is worth it under PDL, for 16 bits.

    multiprocessors  of the card, 2 or more
    room             bytes of shared memory that a block may have
    """
    words = _words(cols, itemsize)
    if itemsize != 2 or not RING_WORDS[0] <= words <= RING_WORDS[1]:
        return None
    held = -(-words // RING_THREADS)
    threads = -(-words // (held * 32)) * 32
    sizes = (_period(cols, itemsize), threads, held, {1: 8, 2: 4}.get(held, 2), LINE)
    groups = _groups(rows, *sizes)
    owned = -(-groups // multiprocessors)  # groups of a block
    x_bytes = (LINE // 16 + threads * held + 1 + 2) * 16  # and the fringe
    sums = owned * sizes[3] * (threads // 32 | 1) * 4
    stages = (room - x_bytes - sums) // (sizes[3] * held * threads * 16)
    if groups < multiprocessors or stages < 2:
        return None
    return multiprocessors, threads, room, sizes, stages, stages - (owned <= stages + 1)


def _words(cols, itemsize):
    """That a row may need, wherever it begins in a line."""
    return -(-(LINE - itemsize + cols * itemsize) // 16)


def _period(cols, itemsize):
    """Every so many rows begin at the same place in a word."""
    return 16 // math.gcd(16, cols * itemsize)


def _groups(rows, period, threads, words, each, line):
    """Groups of `each` rows, `period` rows apart."""
    return rows // (period * each) * period + min(period, rows % (period * each))
