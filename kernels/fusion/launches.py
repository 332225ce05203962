"""Which kernel, compiled how, on how many blocks: the sizes of stream.cuh, chosen from those of the matrices."""

import functools
from pathlib import Path

from kernels.fusion.arguments import DTYPES
from lab import cuda
from lab.card import multiprocessors, shared_memory

HERE = Path(__file__).resolve().parent
VEC, MAX_THREADS, MAX_TILES, MAX_DEPTH = 8, 512, 8, 8  # columns in a word of 16 bytes; limits of stream.cuh
PITCH = MAX_THREADS // 32 + 1


def launch(name, dtype, read, outputs, cols, args, pdl, per_output=1):
    """Launch a kernel, or its sibling `name`_any where the sizes or addresses do not allow 16-byte words.

    read        the tensors that it reads in words
    per_output  rows of matrices for one output
    """
    words = cols % VEC == 0 and not any(tensor.data_ptr() % 16 for tensor in read)
    found = plan(read[0].device, outputs, cols, per_output) if words else None
    if found is None:
        module(name, dtype, 1, 2, 1)[f"{name}_any"](-(-outputs // 4), 128, *args, pdl=pdl)
        return
    grid, threads, shared, *shape = found
    module(name, dtype, *shape)[name](grid, threads, *args, shared=shared, pdl=pdl)


@functools.cache
def plan(device, outputs, cols, per_output):
    """(blocks, threads, shared bytes, TILES, R, G): see stream.cuh. None if a group is too long for the ring."""
    words = cols // VEC
    tiles = -(-words // MAX_THREADS)
    threads = -(-words // tiles // 32) * 32
    rows = max({1: 4, 2: 2}.get(tiles, 1), per_output)  # so that a thread has about four words of a group
    groups = -(-outputs // (rows // per_output))
    per_processor = MAX_THREADS // threads  # blocks: small ones share a multiprocessor
    room = (shared_memory(device) - 2048) // per_processor - 1024
    group_bytes, sums_bytes = rows * tiles * threads * 16, rows * PITCH * 4
    grid = min(groups, per_processor * multiprocessors(device))
    grid = max(grid, -(-groups * sums_bytes // (room // 4)))  # the sums take a quarter of the room at most
    sums_bytes *= -(-groups // grid)
    depth = min(MAX_DEPTH, (room - sums_bytes) // group_bytes)
    if tiles > MAX_TILES or depth < 1:
        return None
    return grid, threads, depth * group_bytes + sums_bytes, tiles, rows, depth


@functools.cache
def module(name, dtype, tiles=None, rows=None, depth=None):
    options = [f"-DDTYPE={DTYPES[dtype]}"]
    if tiles is not None:
        options += [f"-DTILES={tiles}", f"-DR={rows}", f"-DG={depth}"]
    return cuda.load(HERE / f"{name}.cu", tuple(options))


@functools.cache
def layer_plan(device, hidden, kv_rows, ffn):
    """(blocks, threads, shared bytes, options) of layer.cu."""
    words, wide = hidden // VEC, ffn // VEC
    threads = min(MAX_THREADS, -(-max(words, -(-wide // 4)) // 32) * 32)
    tiles, tiles_f = -(-words // threads), -(-wide // threads)
    rows, rows_f = {1: 4, 2: 2}[tiles], {1: 4, 2: 2}.get(tiles_f, 1)
    slot = max(rows * tiles, rows_f * tiles_f) * threads * 16
    phases = [-(-(hidden + 2 * kv_rows) // rows), -(-hidden // rows), -(-ffn // (rows // 2)), -(-hidden // rows_f)]
    grid = min(max(phases), multiprocessors(device) if device.type == "cuda" else 8)  # 8: the SIMT machine's patience
    sums = max(-(-n // grid) * r for n, r in zip(phases, (rows, rows, rows, rows_f))) * PITCH * 4
    depth = (shared_memory(device) - 1024 - sums) // slot
    if depth < 1:
        room = shared_memory(device) - 1024
        raise ValueError(
            f"one_launch: hidden and ffn must be such that a block needs at most {room} bytes of shared memory, got "
            f"{slot + sums} with {grid} blocks"
        )
    options = (("TILES", tiles), ("R", rows), ("TILES_F", tiles_f), ("R_F", rows_f), ("DEPTH", min(depth, MAX_DEPTH)))
    return grid, threads, min(depth, MAX_DEPTH) * slot + sums, options


@functools.cache
def layer_module(dtype, options):
    return cuda.load(HERE / "layer.cu", (f"-DDTYPE={DTYPES[dtype]}", *(f"-D{name}={value}" for name, value in options)))
