"""How rows that begin at any element are read: when unaligned.cu runs, when unaligned_ring.cu, and of what sizes.

Measured on an H200; elsewhere the figures may ask for other sizes, but all of these are right.
"""

import functools
import math

SHORT, MIDDLE, LONG = 288, 768, 2048  # words of a row: with one, three and four of them a thread; longer: several goes
MANY_ROWS = 16384  # of which a block has twice as many: 4 % at 32001 × 4097, a loss at 4097 × 4099
WORD = 8  # bytes: with words as wide as this gemv.cu is faster, and with wider ones
LEAST_BYTES, MOST_COLS = 512, 1 << 30  # of a row: shorter ones are rung 5's
RING_THREADS, RING_WORDS, RING_GROUPS = 704, (512, 2048), 16  # of a block, of a row; groups of a block, at most


def is_unaligned(cols, itemsize, alignment):
    """Whether `gemv` reads such a matrix in words cut by address: its rows, or x, do not begin at multiples of 8 bytes,
    and rows are long enough.

    alignment   bytes that the addresses of W and x are multiples of, 16 at most
    """
    row = cols * itemsize
    return (alignment < WORD or row % WORD != 0) and row >= LEAST_BYTES and cols < MOST_COLS


@functools.lru_cache(maxsize=1024)
def unaligned_plan(rows, cols, itemsize, pdl):
    """(grid, block, Sizes, GOES, BLOCKS, Product) of unaligned.cu. Sizes: PERIOD, THREADS, WORDS, ROWS."""
    words = _words(cols, itemsize)
    goes = -(-words // LONG)  # a row is read in so many
    held = 1 if words <= SHORT else 3 if words <= MIDDLE else 4  # words of a row that a thread has at a time
    threads = _threads(words, goes * held)
    each = {1: 4, 3: 2, 4: 1}[held] * (1 + (held == 4 or rows >= MANY_ROWS or (pdl and held == 1)))
    sizes = (_period(cols, itemsize), threads, held, each)
    return _groups(rows, *sizes), threads, sizes, goes, _blocks(threads, held * each), _product(itemsize, each)


@functools.lru_cache(maxsize=1024)
def unaligned_ring_plan(rows, cols, itemsize, multiprocessors, room):
    """(grid, block, shared bytes, Sizes, STAGES, STAGES_BEFORE_X, Product) of unaligned_ring.cu, or None where
    unaligned.cu runs.

    It is worth it under PDL, for rows of 512 to 2048 words, and where a block has no more than 16 groups of them.

    multiprocessors  of the card, 2 or more
    room             bytes of shared memory that a block may have
    """
    words, period = _words(cols, itemsize), _period(cols, itemsize)
    held = -(-words // RING_THREADS)
    if not RING_WORDS[0] <= words <= RING_WORDS[1]:
        return None
    threads = _threads(words, held)
    each = {1: 8, 2: 4}.get(held, 2)
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
    """What multiplies: tensor cores take two rows of 16-bit numbers at a time."""
    return "TensorCores" if itemsize == 2 and each > 1 else "MultiplyAdds"


def _words(cols, itemsize):
    """That a row may reach over, wherever it begins in a word."""
    return -(-(16 - itemsize + cols * itemsize) // 16)


def _threads(words, each):
    """Whole warps, of which each thread has so many words of a row."""
    return -(-words // (each * 32)) * 32


def _blocks(threads, words):
    """That shall fit on a multiprocessor, where a thread has so many words under way."""
    return max(1, min(16, (1152 if words <= 6 else 1024) // threads))


def _period(cols, itemsize):
    """Every so many rows begin at the same place in a word."""
    return 16 // math.gcd(16, cols * itemsize)


def _groups(rows, period, threads, words, each):
    """Groups of `each` rows that are `period` rows apart."""
    return rows // (period * each) * period + min(period, rows % (period * each))
