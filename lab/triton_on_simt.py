"""Triton's compiler beside the SIMT machine: a kernel as Triton compiles it for a Hopper card, run without one.

    report = run(kernel, blocks, {"x": x, "y": y, "n": np.int32(n), "BLOCK": 64}, check_races=True)

Triton's interpreter takes one program after another. Here programs run side by side, as on a card, and the machine says
what nothing puts in order.
"""

import inspect
import warnings

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import simt
from lab.interpreter import LANGUAGE

POINTERS = {np.dtype(name): kind for name, kind in {"f2": "*fp16", "f4": "*fp32", "i4": "*i32", "i8": "*i64"}.items()}
HOPPER = GPUTarget("cuda", 90, 32)


def compiled(kernel, given, **options):
    """What Triton makes of the kernel: (PTX, bytes of shared memory, the arguments that are left for a launch).

    given    {name: value}: a NumPy array stands for a tensor, np.int32 and np.float32 for a number, and anything else
             is compiled in, as tl.constexpr is; a name with a default may be left out
    options  of Triton: num_warps and others
    """
    defaults = {name: p.default for name, p in inspect.signature(kernel.fn).parameters.items()}
    if strange := [name for name in given if name not in defaults]:
        raise TypeError(f"{kernel.fn.__name__}: it has no arguments named {', '.join(strange)}")
    types, fixed, left = {}, {}, []
    for name in kernel.arg_names:
        value = given.get(name, defaults[name])
        if value is inspect.Parameter.empty:
            raise TypeError(f"{kernel.fn.__name__}: {name} is missing, got {', '.join(given)}")
        if isinstance(value, np.ndarray):
            if value.dtype not in POINTERS:
                raise TypeError(f"{kernel.fn.__name__}: {name} must be of float16, float32, int32 or int64, "
                                f"got {value.dtype}")  # fmt: skip
            types[name] = POINTERS[value.dtype]
        elif isinstance(value, (np.int32, np.float32)):
            types[name] = "i32" if isinstance(value, np.int32) else "fp32"
        else:
            types[name], fixed[name] = "constexpr", value
            continue
        left.append(value)
    aligned = {(n,): [["tt.divisibility", 16]] for n, kind in enumerate(types.values()) if kind.startswith("*")}
    with LANGUAGE, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = ASTSource(kernel, types, constexprs=fixed, attrs=aligned)
        made = triton.compile(source, target=HOPPER, options=options)
    return made.asm["ptx"], made.metadata.shared, left


def run(kernel, blocks, given, *, num_warps=4, **how):
    """kernel[(blocks,)] on the SIMT machine; arrays are written in place. Returns the machine's report.

    given  as of `compiled`;  how  check_races, places, order and others: see simt.Kernel
    """
    ptx, shared, left = compiled(kernel, given, num_warps=num_warps)
    return launch(ptx, blocks, 32 * num_warps, left, shared, **how)


def launch(ptx, blocks, threads, arguments, shared, **how):
    """Launch Triton's PTX on the SIMT machine."""
    module = simt.load(ptx)
    kernel = module[module.names[0]]
    scratch = [np.uint64(0)] * (len(kernel.program.parameters) - len(arguments))  # Triton's own, which is not used
    return kernel(blocks, threads, *arguments, *scratch, shared=shared, **how)
