"""One token of a language model on the processor, in one call: token.c. step.py is the same, an operation at a time."""

import functools
import operator
from types import SimpleNamespace

import numpy as np

from kernels import cpu_llm
from kernels.rotary import rope_frequencies
from lab import machine
from lab.arguments import expect_array
from lab.compiler import compile_c

NUMBERS = {  # how token.c reads weights of a type
    np.dtype(np.float16): ("half", "load_half", "half_to_float"),
    np.dtype(np.uint16): ("bfloat", "load_bfloat", "bfloat_to_float"),
    np.dtype(np.float32): ("float", "load", "(float)"),
}
HEADERS = [*cpu_llm.HEADERS, *(cpu_llm.HERE / f"{name}.h" for name in ("team", "product", "phases"))]
MATRICES = "Wqkv", "Wo", "W_glu", "W_down"
VECTORS = "attention_norm", "bqkv", "q_norm", "k_norm", "ffn_norm"
MAY_LACK = {"bqkv", "q_norm", "k_norm"}  # vectors that may be None


def takes(weights):
    """Whether all matrices are of one type that token.c reads."""
    return len(_types(weights)) == 1 and _types(weights) <= set(NUMBERS)


def token_logits(config, weights, x, keys, values, position, *, threads=None, isa=None):
    """As kernels.cpu_llm.step.token_logits: the same arguments, the same logits but for rounding. All matrices are of
    one type (`takes`), and each, or each of a list of them, is contiguous.

    ValueError or TypeError names what is wrong, before anything is written.
    """
    where, c = "token_logits", config
    threads, isa = machine.expect_threads_and_isa(where, threads, isa)
    room = keys.shape[2] if getattr(keys, "ndim", 0) == 4 else "room"
    for name, cache in (("keys", keys), ("values", values)):
        shape = (c.n_layers, c.n_kv_heads, room, c.head_dim)
        expect_array(where, name, cache, dtype=np.float16, shape=shape, writeable=True)
    expect_array(where, "x", x, dtype=np.float32, shape=(c.hidden,))
    if not 0 <= position < room:
        raise ValueError(f"{where}: position must be from 0 to {room - 1}, as the cache has room, got {position}")
    plan = _plan(config, weights)
    first = max(0, position + 1 - c.window) if c.window else 0
    parts = max(1, min(-(-threads // c.n_kv_heads), -(-(position + 1 - first) // 64)))
    addresses = plan.addresses.copy()  # another thread may have the same weights and another cache
    addresses[: c.n_layers, -2] = keys.ctypes.data + keys.strides[0] * np.arange(c.n_layers)
    addresses[: c.n_layers, -1] = values.ctypes.data + values.strides[0] * np.arange(c.n_layers)
    angles = position * plan.frequencies
    turn = np.concatenate((np.cos(angles), np.sin(angles))).astype(np.float32)
    sizes = (c.n_layers, c.hidden, c.n_heads, c.n_kv_heads, c.head_dim, c.ffn, c.vocab, room, position, first, parts)
    heads = c.n_heads + 2 * c.n_kv_heads
    own = threads * lines(max(c.hidden, c.n_heads * c.head_dim))
    scratch = aligned(own + lines(heads * c.head_dim) + lines(c.ffn) + parts * c.n_heads * (c.head_dim + 2))
    logits, x = np.empty(c.vocab, np.float32), x.copy()
    _library(plan.dtype, isa).token(
        addresses.reshape(-1), np.array(sizes, np.int64), turn, x, scratch, logits, float(c.eps), threads
    )
    return logits


LINE = 16  # floats in a cache line: a vector that lies across two of them is loaded from both


def lines(count):
    """So many floats, and what is left of the last one's cache line."""
    return -(-count // LINE) * LINE


def aligned(count):
    """So many floats, not set, from the beginning of a cache line on."""
    found = np.empty(count + LINE - 1, np.float32)
    first = -found.ctypes.data // 4 % LINE
    return found[first : first + count]


def _types(weights):
    matrices = [getattr(layer, name) for layer in weights.layers for name in MATRICES] + [weights.head]
    return {part.dtype for matrix in matrices for part in _parts(matrix)}


def _parts(matrix):
    return matrix if isinstance(matrix, list) else [matrix]


def _plan(config, weights):
    """Where a model's weights lie, looked at anew when one of them is another array: .addresses (n_layers + 1, 14), of
    which the last two columns are the caches'; .dtype; .frequencies; .held, the arrays."""
    return kept_plan(config, weights, _held(weights), _planned)


def kept_plan(config, weights, held, planned):
    """planned(config, weights), made once and kept with the weights, until one of the arrays `held` is another."""
    plan = getattr(weights, "plan", None)
    same = plan is not None and plan.config is config and len(held) == len(plan.held)
    if not same or not all(map(operator.is_, held, plan.held)):
        plan = planned(config, weights)
        plan.held = held
        weights.plan = plan
    return plan


def _held(weights):
    """Every array of a model."""
    found = [weights.norm, *_parts(weights.head)]
    for layer in weights.layers:
        found += [getattr(layer, name) for name in VECTORS]
        for name in MATRICES:
            found += _parts(getattr(layer, name))
    return found


def _planned(config, weights):
    where, c = "token_logits", config
    types = _types(weights)
    if len(types) != 1 or not types <= set(NUMBERS):
        raise TypeError(f"{where}: matrices must be of one type, {_names(NUMBERS)}, got {_names(types)}")
    (dtype,) = types
    if len(weights.layers) != c.n_layers:
        raise ValueError(f"{where}: weights.layers must have {c.n_layers} layers, got {len(weights.layers)}")
    q_rows, kv_rows = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim

    def rows_of(name, matrix, rows, cols):
        """Addresses of so many rows each, of a matrix or a list of matrices."""
        parts, found = _parts(matrix), []
        for part in parts:
            expect_array(where, name, part, dtype=dtype.type, shape=("rows", cols))
        if [len(part) for part in parts] not in (list(rows), [sum(rows)]):
            raise ValueError(f"{where}: {name} must have {sum(rows)} rows, got {sum(map(len, parts))}")
        for count in rows:
            part = parts[0]
            found.append(part.ctypes.data)
            parts = [part[count:], *parts[1:]] if len(part) > count else parts[1:]
        return found

    def vector(name, array, size):
        if array is None and name in MAY_LACK:
            return [0]
        expect_array(where, name, array, dtype=np.float32, shape=(size,))
        return [array.ctypes.data]

    addresses = np.zeros((c.n_layers + 1, 14), np.uint64)
    for row, layer in zip(addresses[:-1], weights.layers, strict=True):
        row[:12] = [
            *vector("attention_norm", layer.attention_norm, c.hidden),
            *rows_of("Wqkv", layer.Wqkv, (q_rows, kv_rows, kv_rows), c.hidden),
            *vector("bqkv", layer.bqkv, q_rows + 2 * kv_rows),
            *vector("q_norm", layer.q_norm, c.head_dim), *vector("k_norm", layer.k_norm, c.head_dim),
            *rows_of("Wo", layer.Wo, (c.hidden,), q_rows), *vector("ffn_norm", layer.ffn_norm, c.hidden),
            *rows_of("W_glu", layer.W_glu, (c.ffn, c.ffn), c.hidden),
            *rows_of("W_down", layer.W_down, (c.hidden,), c.ffn),
        ]  # fmt: skip
    addresses[-1, :2] = [*vector("norm", weights.norm, c.hidden), *rows_of("head", weights.head, (c.vocab,), c.hidden)]
    frequencies = rope_frequencies(c.head_dim, c.theta, c.scaling)
    return SimpleNamespace(config=config, addresses=addresses, dtype=dtype, frequencies=frequencies)


def _names(types):
    return ", ".join(
        sorted({"uint16": "uint16 (bfloat16)"}.get(str(np.dtype(one)), str(np.dtype(one))) for one in types)
    )


@functools.cache
def _library(dtype, isa):
    number, load, widen = NUMBERS[dtype]
    flags = [*machine.ISA_FLAGS[isa], f"-DNUMBER={number}", f"-DLOAD={load}", f"-DWIDEN={widen}"]
    return compile_c(cpu_llm.HERE / "token.c", flags=flags, headers=HEADERS)
