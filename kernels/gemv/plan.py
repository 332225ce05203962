"""How the rungs are launched: blocks, threads, the size of a word, and how many words and rows a thread of gemv.cu has.

It decides speed as the .cu files do, so the figures of the rungs that it shapes, vector and gemv, rest on it too.
"""

import functools

THREADS, WORDS = 256, 8  # of gemv.cu, at most: threads of a block, and words of a row that a thread has
IN_FLIGHT = 128  # bytes of W that a thread of gemv.cu asks for at once


@functools.lru_cache(maxsize=1024)
def plan(rung, rows, cols, itemsize, alignment=16, pdl=False):
    """How a rung is launched: (grid, block, VEC, WORDS, ROWS, X_FIRST). 0: the rung has no such constant.

    For "gemv" this is how gemv.cu is launched. Where rows begin at any element, unaligned_plan.py chooses instead; with
    pdl, ring_plan.py where it can.

    alignment   bytes that the addresses of W and x are multiples of, 16 at most
    """
    if rung == "naive":
        return -(-rows // 256), 256, 0, 0, 0, 0
    if rung == "warp":
        return -(-rows // 8), 256, 0, 0, 0, 0
    if rung == "wide":
        return -(-rows // 32), 1024, 0, 0, 0, 0
    word = min(alignment, (cols * itemsize) & -(cols * itemsize), 16)  # bytes: each row starts at a multiple of it
    words = cols * itemsize // word
    if rung == "vector":
        return -(-rows // 8), 256, word // itemsize, 0, 0, 0
    goes = -(-words // (THREADS * WORDS))  # a row is read in so many goes, alike but for the last
    held = -(-words // (goes * THREADS))  # words of a row that a thread has
    threads = -(-words // (goes * held * 32)) * 32
    x_first = word == 16 and held == 2 and goes == 1 and not pdl  # measured on an H200: elsewhere it costs time
    each = 1
    while each < 8 and 2 * each * held * word <= IN_FLIGHT // (1 + x_first) and 2 * each * held <= 32:
        each *= 2  # rows of a block; a thread holds each * held words, at most 32
    while not pdl and rows >= 1024 and each > rows // 512:
        each //= 2  # 512 blocks or more, for some 132 multiprocessors: 6 % less time at 2048 × 2048; a loss under PDL
    return -(-rows // each), threads, word // itemsize, held, each, int(x_first)
