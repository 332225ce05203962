"""Rungs of chapter 13 in Triton, compiled for sm_90, with the arguments of one call: in a process of its own, for
Triton's interpreter, which other tests use, changes the language of its process."""

import warnings

import numpy as np
import torch
import triton
from test_ssd_five import problem, recurrence
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.ssd import calls, published, segments

POINTERS = {torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
RUNGS = {"published": (published.fused_published, {}), "segments": (segments.fused_segments, {"segments": 3})}


def compiled(rung):
    """Of a small call: (ptx, bytes of shared memory, threads, blocks, arguments, which of them is y, the right y, how
    far each element of it may be off)."""
    caught = []
    calls.launch, kept = lambda *given, **options: caught.append((given, options)), calls.launch
    call = problem(1, 100, 2, 16, 1, 16, torch.float16, rest=False)
    # Powers of two, so that a sum of products has the same bits in all threads that Triton lets make and store it: else
    # they may differ in the last one, as on a card, and two values for one place are a race.
    halvings = torch.randint(1, 5, call["dt"].shape, generator=torch.Generator().manual_seed(0))
    call |= {"dt": (2.0**-halvings).to(call["dt"].dtype), "dt_softplus": False}
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
    threads = 32 * options["num_warps"]
    return made.asm["ptx"], made.metadata.shared, threads, grid[0], given, y, wanted.numpy(), allowed(**call).numpy()


def allowed(x, dt, A, B, C, dt_softplus):
    """How far each element of y may be off, in float16.

    y is a sum, and on its way each term is rounded to float16 three times at most: with what a chunk adds to the state,
    with the state, with y; or with the triangle, and with y. Once is at most 2^-11 of the term, or of the smallest
    normal number, which then goes on times what the factor of its product is. Terms may cancel, so it is their
    magnitudes that count. What float32 rounds is far less than a quarter of one such rounding.
    """
    x, B, C = x.abs(), B.abs(), C.abs()
    terms, _ = recurrence(x, dt, A, B, C)
    through_state, _ = recurrence(torch.ones_like(x), torch.ones_like(dt), torch.zeros_like(A), B, C)
    smallest = through_state + C.double().sum(3).amax() + x.double().cumsum(1) + 1
    return 2.0**-11 * (3.25 * terms + torch.finfo(x.dtype).tiny * smallest)
