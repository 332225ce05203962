"""Which kernel of this folder, compiled how."""

import functools
from pathlib import Path

import torch

from kernels.fusion.launches import MAX_THREADS, plan, shape_of
from lab import cuda
from lab.card import multiprocessors, shared_memory, starts_early
from lab.tensors import DTYPES

HERE = Path(__file__).resolve().parent
HALVES = (torch.float16, torch.bfloat16)
CODES = torch.int8
TYPES = DTYPES | {CODES: "signed char"}  # of states, in C++
STAGES = 6  # of a ring: of 4, 5, 6, 8 and 10 a token of the 2.7B model is fastest so, by 1 to 7 %
# Bytes of a multiprocessor, of rows_ring.cuh: of its ring, on their way to it at a time, and asked for into L2. Of
# rings from 100 to 180 KB, 40 to 80 KB on their way and 0 to 240 KB ahead a token of the 2.7B model is fastest so.
RING, FLYING, NEAR, TEAMS, MOST_STAGES = 7 * 20480, 2 * 20480, 6 * 20480, 1, 24
MOST_ROWS = 2**31 - 8  # of a matrix: kernels count rows, in whole groups, in 32 bits


@functools.cache
def kernel(name, entry=None, **options):
    """A kernel of a source here, compiled with so many -DNAME=value; entry: its name where it is not the source's."""
    module = cuda.load(HERE / f"{name}.cu", [f"-D{key}={value}" for key, value in options.items()])
    return module[entry or name]


def product(name, read, rows, cols, args, pdl, **options):
    """Launch a product on the ring of kernels/fusion, or its sibling `name`_any where sizes or addresses do not allow
    words of 16 bytes. read: the tensors that it reads in words, weights first."""
    dtype = read[0].dtype
    in_words = cols % 8 == 0 and not any(tensor.data_ptr() % 16 for tensor in read)
    found = plan(read[0].device, rows, cols, 1) if in_words else None
    if found is None:
        kernel(name, f"{name}_any", SHAPE=shape_of(dtype, 1, 2, 1), **options)(-(-rows // 4), 128, *args, pdl=pdl)
        return
    grid, threads, shared, words, per_group, stages = found
    fewer = max(0, stages - STAGES)
    shape, shared = shape_of(dtype, words, per_group, stages - fewer), shared - fewer * 16 * threads * words * per_group
    kernel(name, SHAPE=shape, **options)(grid, threads, *args, shared=shared, pdl=pdl)


def ring_product(name, read, args, sizes, ahead, pdl, **options):
    """Launch a product on a ring that TMA fills. Returns whether it did: the card, sizes and addresses must allow it.
    read: as in `product`; args: the kernel's tensors, and `sizes` what follows the number of rows."""
    W = read[0]
    rows, cols = W.shape
    if any(tensor.data_ptr() % 16 for tensor in read) or not starts_early(W.device):
        return False
    found = ring_plan(rows, cols, multiprocessors(W.device), shared_memory(W.device))
    if found is None:
        return False
    grid, threads, teams, per_group, stages, flying, shared = found
    shape = shape_of(W.dtype, cols, threads, teams, per_group, stages, flying)
    if ahead is not None and (ahead.data_ptr() % 16 or ahead.shape[1] % 8):
        ahead = None
    behind = (0, 0, 0) if ahead is None else (len(ahead), 2 * ahead.shape[1], NEAR // (2 * cols * per_group))
    kernel(name, SHAPE=shape, **options)(
        grid, threads * teams + 32, *args, rows, *sizes, ahead, *behind, shared=shared, pdl=pdl
    )  # fmt: skip
    return True


@functools.lru_cache(maxsize=256)
def ring_plan(rows, cols, processors, room):
    """(blocks, threads of a team, teams, rows of a group, groups in the ring, of them on their way, bytes of shared
    memory) of rows_ring.cuh; None where there is no room for two groups of rows.

    processors: multiprocessors; room: bytes of shared memory that a block may have
    """
    if cols % 8:
        return None
    words = -(-cols // 8 // MAX_THREADS)
    threads = -(-cols // 8 // words // 32) * 32
    per_group = {1: 4, 2: 2}.get(words, 1)
    grid = min(processors, -(-rows // per_group))
    of_block = -(-rows // grid)
    sums = -(-of_block // per_group) * per_group * (threads // 32 | 1) * 4
    slot = per_group * cols * 2
    teams = min(TEAMS, 1024 // threads - 1) or 1
    stages = min(max(2, RING // slot), MOST_STAGES, (room - 2048 - sums) // slot) // teams * teams
    flying = min(stages, max(2, FLYING // slot))
    return (grid, threads, teams, per_group, stages, flying, stages * slot + sums) if stages >= 2 else None


def flat(tensor):
    """The memory of a tensor with gaps, as a kernel with strides is given it: from its first number to the end of the
    storage, so that of several views of one projection each lies inside of another, which the SIMT machine asks for."""
    if tensor is None or tensor.is_contiguous():
        return tensor
    reach = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((reach,), (1,))
