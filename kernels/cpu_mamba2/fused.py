"""One token of a Mamba-2 on the processor, in one call: token.c. step.py is the same, an operation at a time, and it
runs hybrids, too."""

import functools
from types import SimpleNamespace

import numpy as np

from kernels import cpu_mamba2
from kernels.cpu_llm.fused import HEADERS, NUMBERS, aligned, kept_plan, lines
from lab import machine
from lab.arguments import expect_array
from lab.compiler import compile_c

PER_LAYER = 13  # arrays of a layer in token.c
ARRAYS = (
    "norm", "W_in", "b_in", "conv_weight", "conv_bias", "dt_bias", "A", "D", "gated_norm", "W_out", "b_out",
)  # fmt: skip
MAY_LACK = {"b_in", "conv_bias", "b_out"}  # of ARRAYS: those that may be None


def takes(config, weights):
    """Whether every layer is a Mamba-2 block, none with a feed-forward block, and all matrices are of one type that
    token.c reads."""
    types = _types(weights) if all(layer.kind == "mamba" for layer in weights.layers) else set()
    return not config.ffn and len(types) == 1 and types <= set(NUMBERS)


def token_logits(config, weights, x, conv, ssm, *, threads=None, isa=None):
    """As kernels.cpu_mamba2.step.token_logits: the same arguments, the same logits but for rounding, where `takes` says
    so.

    ValueError or TypeError names what is wrong, before anything is written.
    """
    where, c = "token_logits", config
    threads, isa = machine.expect_threads_and_isa(where, threads, isa)
    layers = len(weights.layers)
    states = {
        "conv": (conv, (layers, c.width - 1, c.channels)),
        "ssm": (ssm, (layers, c.nheads, c.headdim, c.dstate)),
    }
    for name, (state, shape) in states.items():
        expect_array(where, name, state, dtype=np.float32, shape=shape, writeable=True)
    expect_array(where, "x", x, dtype=np.float32, shape=(c.hidden,))
    plan = _plan(config, weights)
    addresses = plan.addresses.copy()  # another thread may have the same weights and another state
    for place, state in ((-2, conv), (-1, ssm)):
        addresses[:layers, place] = state.ctypes.data + state.strides[0] * np.arange(layers)
    own = lines(max(c.hidden, c.d_inner) + 2 * c.ngroups * c.dstate + c.headdim)
    scratch = aligned(threads * own + lines(c.in_rows) + c.d_inner)
    logits, x = np.empty(c.vocab, np.float32), x.copy()
    _library(plan.dtype, isa).token(
        addresses.reshape(-1), plan.sizes, plan.limits, x, scratch, logits, float(c.eps), threads
    )
    return logits


def _types(weights):
    return {matrix.dtype for layer in weights.layers for matrix in (layer.W_in, layer.W_out)} | {weights.head.dtype}


def _plan(config, weights):
    """Where a model's weights lie, looked at anew when one of them is another array: .addresses (layers + 1,
    PER_LAYER), of which the last two columns are the states'; .sizes, .limits, .dtype; .held, the arrays."""
    held = [weights.norm, weights.head, *(getattr(layer, name) for layer in weights.layers for name in ARRAYS)]
    return kept_plan(config, weights, held, _planned)


def _planned(config, weights):
    where, c = "token_logits", config
    if not takes(config, weights):
        raise TypeError(f"{where}: layers must be Mamba-2 blocks alone, and matrices of one type, got others")
    (dtype,) = _types(weights)

    def at(name, array, shape, dtype=np.float32):
        if array is None and name in MAY_LACK:
            return 0
        expect_array(where, name, array, dtype=dtype, shape=shape)
        return array.ctypes.data

    addresses = np.zeros((len(weights.layers) + 1, PER_LAYER), np.uint64)
    shapes = {
        "norm": (c.hidden,), "W_in": (c.in_rows, c.hidden), "b_in": (c.in_rows,), "conv_weight": (c.channels, c.width),
        "conv_bias": (c.channels,), "dt_bias": (c.nheads,), "A": (c.nheads,), "D": (c.nheads,),
        "gated_norm": (c.d_inner,), "W_out": (c.hidden, c.d_inner), "b_out": (c.hidden,),
    }  # fmt: skip
    for found, layer in zip(addresses[:-1], weights.layers, strict=True):
        found[: len(shapes)] = [
            at(name, getattr(layer, name), shape, dtype.type if name.startswith("W_") else np.float32)
            for name, shape in shapes.items()
        ]
    addresses[-1, 0] = at("norm", weights.norm, (c.hidden,))
    addresses[-1, 1] = at("head", weights.head, (c.vocab, c.hidden), dtype.type)
    sizes = (len(weights.layers), c.hidden, c.nheads, c.headdim, c.dstate, c.ngroups, c.width, c.vocab)
    return SimpleNamespace(
        config=config, addresses=addresses, dtype=dtype, sizes=np.array(sizes, np.int64),
        limits=np.array(c.dt_limit, np.float32),
    )  # fmt: skip


@functools.cache
def _library(dtype, isa):
    number, load, widen = NUMBERS[dtype]
    flags = [*machine.ISA_FLAGS[isa], f"-DNUMBER={number}", f"-DLOAD={load}", f"-DWIDEN={widen}"]
    headers = [*HEADERS, cpu_mamba2.HERE / "state.h"]
    return compile_c(cpu_mamba2.HERE / "token.c", flags=flags, headers=headers)
