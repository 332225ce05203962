"""Which kernel of this folder, compiled how."""

import functools
from pathlib import Path

import torch

from kernels.fusion.launches import plan, shape_of
from lab import cuda
from lab.tensors import DTYPES

HERE = Path(__file__).resolve().parent
HALVES = (torch.float16, torch.bfloat16)
CODES = torch.int8
TYPES = DTYPES | {CODES: "signed char"}  # of states, in C++
STAGES = 6  # of a ring: of 4, 5, 6, 8 and 10 a token of the 2.7B model is fastest so, by 1 to 7 %
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


def flat(tensor):
    """The memory of a tensor with gaps, as a kernel with strides is given it: from its first number to the end of the
    storage, so that of several views of one projection each lies inside of another, which the SIMT machine asks for."""
    if tensor is None or tensor.is_contiguous():
        return tensor
    reach = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((reach,), (1,))
