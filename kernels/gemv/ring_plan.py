"""How ring.cu is launched, and when: what ring does, and gemv with pdl=True."""

import functools

RING_THREADS = 512  # of a block, at most


@functools.lru_cache(maxsize=1024)
def ring_plan(rows, cols, itemsize, alignment, multiprocessors, room):
    """(grid, block, shared bytes, WORDS, ROWS, STAGES, STAGES_BEFORE_X) of ring.cu, or None where gemv.cu is to run.

    It is worth it under PDL, for 16-bit weights in whole words, rows of 512 to 2048 words, and a group of rows for each
    multiprocessor. Without PDL many small blocks are faster.

    alignment        bytes that the addresses of W and x are multiples of, 16 at most
    multiprocessors  of the card, 2 or more
    room             bytes of shared memory that a block may have
    """
    words = cols // 8
    if itemsize != 2 or alignment < 16 or cols % 8 or not RING_THREADS <= words <= 4 * RING_THREADS:
        return None
    held = -(-words // RING_THREADS)  # words of a row that a thread has
    threads = -(-words // (held * 32)) * 32
    each = {1: 8, 2: 4}.get(held, 2)  # rows of a group: a thread has up to eight words of it
    groups = -(-rows // each)
    sums = -(-groups // multiprocessors) * each * (threads // 32 | 1) * 4
    slot = each * held * threads * 16
    stages = (room - sums) // slot
    if groups < multiprocessors or stages < 2:
        return None
    last_behind_x = -(-groups // multiprocessors) <= stages + 1  # 4 % at 4096 × 4096, a loss elsewhere
    # all the room: where the driver may leave more to L1, 4096 × 4096 takes 3 % longer
    return multiprocessors, threads, room, held, each, stages, stages - last_behind_x


def product(rows):
    """What ring.cu multiplies with where a group has so many rows: the fastest.

    Tensor cores take two rows at a time, and add each product to the one before, for which it waits. Four or eight rows
    are two or four such chains, of at most four products; two rows are one chain, of up to eight, and with nothing
    beside it multiply-adds are done earlier.
    """
    return "TensorCores" if rows > 2 else "MultiplyAdds"
