"""Rungs of chapter 13 in Triton, compiled for sm_90, with the arguments of one call: in a process of its own, for
Triton's interpreter, which other tests use, changes the language of its process."""

import warnings

import numpy as np
import torch
import triton
from test_ssd_five import off, problem, recurrence
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.ssd import calls, published, segments

POINTERS = {torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
RUNGS = {"published": (published.fused_published, {}), "segments": (segments.fused_segments, {"segments": 3})}


def compiled(rung):
    """(ptx, bytes of shared memory, threads, blocks, arguments, which of them is y, the right y) of a small call."""
    caught = []
    calls.launch, kept = lambda *given, **options: caught.append((given, options)), calls.launch
    call = problem(1, 100, 2, 16, 1, 16, torch.float16, rest=False)
    # Powers of two, so that a sum of products has the same bits in all threads that Triton lets make and store it: else
    # they may differ in the last one, as on a card, and two values for one place are a race.
    call |= {"dt": 2.0 ** -torch.randint(1, 5, call["dt"].shape).to(call["dt"].dtype), "dt_softplus": False}
    call["A"] = torch.tensor([-1.0, -30.0])  # the second so fast that pass 1 stops early ...
    call["x"][0, 5, 1, 5] = torch.nan  # ... and so has to be made good for
    function, chosen = RUNGS[rung]
    try:
        function(**call, chunk_size=16, **chosen)
    finally:
        calls.launch = kept
    ((kernel, grid, tensors, numbers, constants), options) = caught[0]
    types, fixed, given = {}, {}, []
    for n, (name, value) in enumerate(zip(kernel.arg_names, (*tensors, *numbers, *constants), strict=True)):
        if n >= len(tensors) + len(numbers) or value is None:
            types[name], fixed[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[name] = POINTERS[value.dtype]
            given.append(value.numpy())
        else:
            whole = isinstance(value, int)
            types[name] = "i32" if whole else "fp32"
            given.append(np.int32(value) if whole else np.float32(value))
    aligned = {(n,): [["tt.divisibility", 16]] for n, kind in enumerate(types.values()) if kind.startswith("*")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = ASTSource(kernel, types, constexprs=fixed, attrs=aligned)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    wanted, _ = recurrence(**call)
    y = [name for name, kind in types.items() if kind != "constexpr"].index("y")
    return made.asm["ptx"], made.metadata.shared, 32 * options["num_warps"], grid[0], given, y, wanted.numpy()


__all__ = ["compiled", "off"]
