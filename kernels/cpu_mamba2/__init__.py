"""What a Mamba-2 needs on the CPU beside chapter 02's products: the step of its states.

    state_step(state, x, dt, A, B, C, D)     one token: the state is written in place, y comes back

NumPy arrays in float32. `threads` and `isa` as in kernels/cpu_gemv. TypeError or ValueError names the argument, what
was expected and what came, before anything is written.
"""

from pathlib import Path

import numpy as np

from lab import machine
from lab.arguments import expect_array
from lab.compiler import compile_c

HERE = Path(__file__).resolve().parent
_libraries = {}


def state_step(state, x, dt, A, B, C, D, *, threads=None, isa=None):
    """h = exp(A dt) h + dt x Bᵀ, y = h C + D x for each head; the state becomes h. → y (nheads, headdim)

    state  (nheads, headdim, dstate): read and written
    x      (nheads, headdim)
    dt     (nheads,): the step as it is used, behind bias and softplus
    A, D   (nheads,)
    B, C   (ngroups, dstate); nheads is a multiple of ngroups

    Moves 8 · nheads · headdim · dstate bytes; 5 flops for each number of the state.
    """
    arguments = {"state": state, "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D}
    expect_array("state_step", "state", state, dtype=np.float32, shape=("nheads", "headdim", "dstate"), writeable=True)
    nheads, headdim, dstate = state.shape
    shapes = {"x": (nheads, headdim), "B": ("ngroups", dstate), "C": np.shape(B)}
    for name in list(arguments)[1:]:
        shape = shapes.get(name, (nheads,))
        expect_array("state_step", name, arguments[name], dtype=np.float32, shape=shape)
    if not len(B) or nheads % len(B):
        raise ValueError(f"state_step: nheads must be a multiple of ngroups, got {nheads} and {len(B)}")
    for name in list(arguments)[1:]:
        if np.may_share_memory(state, arguments[name]):
            raise ValueError(f"state_step: state must not share memory with {name}, as it is written")
    threads, isa = machine.expect_threads_and_isa("state_step", threads, isa)
    y = np.empty_like(x)
    sizes = (nheads, headdim, dstate, len(B), threads)
    with np.errstate(over="ignore", under="ignore"):
        decay = np.exp(A * dt)
    _library(isa).state_step(state, x, dt, decay, B, C, D, y, *sizes)
    return y


def _library(isa):
    if isa not in _libraries:
        flags, headers = machine.ISA_FLAGS[isa], [HERE.parent / "vec.h", HERE / "state.h"]
        _libraries[isa] = compile_c(HERE / "state.c", flags=flags, headers=headers)
    return _libraries[isa]
