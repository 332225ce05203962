"""Which kernel, compiled how, on how many blocks: the sizes of stream.cuh, chosen from those of the matrices."""

import functools
from pathlib import Path

from kernels.fusion.arguments import DTYPES
from lab import cuda
from lab.card import multiprocessors, shared_memory

HERE = Path(__file__).resolve().parent
VEC, MAX_THREADS, MAX_WORDS, MAX_STAGES = 8, 512, 8, 8  # columns in a word of 16 bytes; limits of stream.cuh
PITCH = MAX_THREADS // 32 + 1


def launch(name, dtype, read, outputs, cols, args, pdl, per_output=1):
    """Launch a kernel, or its sibling `name`_any where the sizes or addresses do not allow 16-byte words.

    read        the tensors that it reads in words
    per_output  rows of matrices for one output
    """
    in_words = cols % VEC == 0 and not any(tensor.data_ptr() % 16 for tensor in read)
    found = plan(read[0].device, outputs, cols, per_output) if in_words else None
    if found is None:
        module(name, dtype, 1, 2, 1)[f"{name}_any"](-(-outputs // 4), 128, *args, pdl=pdl)
        return
    grid, threads, shared, *sizes = found
    module(name, dtype, *sizes)[name](grid, threads, *args, shared=shared, pdl=pdl)


@functools.cache
def plan(device, outputs, cols, per_output):
    """(blocks, threads, shared bytes, *sizes), the sizes being WORDS, ROWS and STAGES of stream.cuh's Shape.

    None if a group is too long for the ring.
    """
    row = cols // VEC  # words
    words = -(-row // MAX_THREADS)
    threads = -(-row // words // 32) * 32
    rows = max({1: 4, 2: 2}.get(words, 1), per_output)  # so that a thread has about four words of a group
    groups = -(-outputs // (rows // per_output))
    per_processor = MAX_THREADS // threads  # blocks: small ones share a multiprocessor
    room = (shared_memory(device) - 2048) // per_processor - 1024
    group_bytes, sums_bytes = rows * words * threads * 16, rows * PITCH * 4
    grid = min(groups, per_processor * multiprocessors(device))
    grid = max(grid, -(-groups * sums_bytes // (room // 4)))  # the sums take a quarter of the room at most
    sums_bytes *= -(-groups // grid)
    stages = min(MAX_STAGES, (room - sums_bytes) // group_bytes)
    if words > MAX_WORDS or stages < 1:
        return None
    return grid, threads, stages * group_bytes + sums_bytes, words, rows, stages


@functools.cache
def module(name, dtype, *sizes):
    """A source of this folder, compiled for a Shape of such sizes; without any if it has none."""
    shape = [f"-DSHAPE={shape_of(dtype, *sizes)}"] if sizes else [f"-DDTYPE={DTYPES[dtype]}"]
    return cuda.load(HERE / f"{name}.cu", tuple(shape))


def shape_of(dtype, *sizes):
    """stream.cuh's Shape, as C++ writes it."""
    return f"Shape<{', '.join((DTYPES[dtype], *map(str, sizes)))}>"


@functools.cache
def layer_plan(device, hidden, kv_rows, ffn):
    """(blocks, threads, shared bytes, *sizes) of layer.cu: WORDS, ROWS, STAGES, FFN_WORDS and FFN_ROWS."""
    row, ffn_row = hidden // VEC, ffn // VEC  # words
    threads = min(MAX_THREADS, -(-max(row, -(-ffn_row // 4)) // 32) * 32)
    words, ffn_words = -(-row // threads), -(-ffn_row // threads)
    rows, ffn_rows = {1: 4, 2: 2}[words], {1: 4, 2: 2}.get(ffn_words, 1)
    slot = max(rows * words, ffn_rows * ffn_words) * threads * 16
    phases = [-(-(hidden + 2 * kv_rows) // rows), -(-hidden // rows), -(-ffn // (rows // 2)), -(-hidden // ffn_rows)]
    grid = min(max(phases), multiprocessors(device) if device.type == "cuda" else 8)  # 8: the SIMT machine's patience
    sums = max(-(-n // grid) * r for n, r in zip(phases, (rows, rows, rows, ffn_rows))) * PITCH * 4
    stages = min(MAX_STAGES, (shared_memory(device) - 1024 - sums) // slot)
    if stages < 1:
        room = shared_memory(device) - 1024
        raise ValueError(
            f"one_launch: hidden and ffn must be such that a block needs at most {room} bytes of shared memory, got "
            f"{slot + sums} with {grid} blocks"
        )
    return grid, threads, stages * slot + sums, words, rows, stages, ffn_words, ffn_rows
