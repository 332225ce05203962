"""How rows that begin at any element are read: when unaligned.cu runs, when unaligned_ring.cu, and of what sizes.

Measured on an H200; elsewhere the figures may ask for other sizes, but all of these are right.
"""

import functools
import math

SHORT = (
    288  # words of a row, up to which a thread has one of them at a time; of longer rows it has two, in several goes
)
LONG_THREADS = 288  # of a block, then, at most
ROWS_SHORT, ROWS_LONG = 4, 4  # that a block has; twice as many short ones under PDL, and where there are
MANY_ROWS = 16384
THREADS_HELD = {4: 1152, 8: 864}  # threads of a multiprocessor whose registers shall fit, by words they have
LEAST_BYTES, LEAST_BYTES_OF_EIGHTS = 512, 8192  # of a row: shorter ones are rung 5's; the second: in words of 8 bytes
MOST_COLS = 1 << 30
RING_THREADS, RING_WORDS, RING_GROUPS = 544, (512, 2048), 16  # of a block, of a row; groups of a block, at most


def is_unaligned(cols, itemsize, alignment):
    """Whether `gemv` reads such a matrix in words cut by address: its rows, or x, do not begin at multiples of 16
    bytes, and rows are long enough. Where they begin at multiples of 8, gemv.cu is faster for longer.

    alignment   bytes that the addresses of W and x are multiples of, 16 at most
    """
    row = cols * itemsize
    word = min(alignment, row & -row, 16)
    return word < 16 and row >= (LEAST_BYTES if word < 8 else LEAST_BYTES_OF_EIGHTS) and cols < MOST_COLS


@functools.lru_cache(maxsize=1024)
def unaligned_plan(rows, cols, itemsize, pdl):
    """(grid, block, Sizes, GOES, BLOCKS, Product) of unaligned.cu. Sizes: PERIOD, THREADS, WORDS, ROWS."""
    words = _words(cols, itemsize)
    if words <= SHORT:
        goes, held, each = 1, 1, ROWS_SHORT * (1 + (pdl or rows >= MANY_ROWS))
    else:
        goes, held, each = -(-words // (2 * LONG_THREADS)), 2, ROWS_LONG
    threads = _threads(words, goes * held)
    sizes = (_period(cols, itemsize), threads, held, each)
    blocks = max(1, min(16, THREADS_HELD[held * each] // threads))  # whose registers shall fit on a multiprocessor
    return _groups(rows, *sizes), threads, sizes, goes, blocks, _product(itemsize, each)


@functools.lru_cache(maxsize=1024)
def unaligned_ring_plan(rows, cols, itemsize, multiprocessors, room):
    """(grid, block, shared bytes, Sizes, STAGES, STAGES_BEFORE_X, Product) of unaligned_ring.cu, or None where
    unaligned.cu runs.

    It is worth it under PDL, for rows of 512 to 2048 words, and where a block has no more than 16 groups of them.

    multiprocessors  of the card, 2 or more
    room             bytes of shared memory that a block may have
    """
    words, period = _words(cols, itemsize), _period(cols, itemsize)
    held = 1 if words <= RING_THREADS else 2 if words <= 2 * RING_THREADS else 4  # words of a row that a thread has
    if not RING_WORDS[0] <= words <= RING_WORDS[1]:
        return None
    threads = _threads(words, held)
    each = 8 // held
    sizes = (period, threads, held, each)
    if _groups(rows, *sizes) < multiprocessors or rows < period * each or multiprocessors < period:
        return None
    owned = max(_owned(phase, rows, period, each, multiprocessors) for phase in range(period))  # groups of a block
    stages = (room - owned * each * (threads // 32 | 1) * 4) // (each * held * threads * 16)
    if stages < 2 or owned > RING_GROUPS:
        return None
    before_x = stages - (owned <= stages + 1)
    return multiprocessors, threads, room, sizes, stages, before_x, _product(itemsize, each)


def _owned(phase, rows, period, each, blocks):
    """Groups that a block has at most, of those that a phase's blocks share."""
    groups = -(-len(range(phase, rows, period)) // each)
    return -(-groups // len(range(phase, blocks, period)))


def _product(itemsize, each):
    """What multiplies: tensor cores take two rows of 16-bit numbers at a time; see ring_plan.product."""
    return "TensorCores" if itemsize == 2 and each > 2 else "MultiplyAdds"


def _words(cols, itemsize):
    """That a row may reach over, wherever it begins in a word."""
    return -(-(16 - itemsize + cols * itemsize) // 16)


def _threads(words, each):
    """Whole warps, of which each thread has so many words of a row."""
    return -(-words // (each * 32)) * 32


def _period(cols, itemsize):
    """Every so many rows begin at the same place in a word."""
    return 16 // math.gcd(16, cols * itemsize)


def _groups(rows, period, threads, words, each):
    """Groups of `each` rows that are `period` rows apart."""
    return rows // (period * each) * period + min(period, rows % (period * each))
