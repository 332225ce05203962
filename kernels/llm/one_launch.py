"""A whole token in one launch (one_launch.cu): how it is compiled and launched."""

import functools
from pathlib import Path

import torch

from lab import cuda
from lab.card import multiprocessors, shared_memory
from lab.tensors import DTYPES

HERE = Path(__file__).resolve().parent
THREADS, SLOT = 512, 32768
HEAD = 16


def sizes_of(dtype, config, slot, stages):
    numbers = config.hidden, config.n_heads, config.n_kv_heads, config.head_dim, config.ffn
    flags = ("true" if flag else "false" for flag in (config.biases, config.head_norms))
    return f"Sizes<{', '.join((DTYPES[dtype], *map(str, numbers), *flags, str(slot), str(stages)))}>"


@functools.cache
def kernel(dtype, sizes, head_dim, extra=()):
    options = (f"-DSIZES={sizes}", f"-DDTYPE={DTYPES[dtype]}", f"-DHEAD_DIM={head_dim}")
    return cuda.load(HERE / "one_launch.cu", (*options, *extra), arch="sm_90a").one_launch
