"""Rungs of chapter 13 in Triton, compiled for sm_90, with the arguments of one call: in a process of its own, for
Triton's interpreter, which other tests use, changes the language of its process."""

import numpy as np
import torch
from test_ssd_five import problem, recurrence

from kernels.ssd import calls, published, segments
from lab import triton_on_simt

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
    given = dict(zip(kernel.arg_names, (*tensors, *numbers, *constants), strict=True))
    for name, value in list(given.items())[: len(tensors) + len(numbers)]:
        if isinstance(value, torch.Tensor):
            given[name] = value.numpy()
        elif value is not None:
            given[name] = np.int32(value) if isinstance(value, int) else np.float32(value)
    ptx, shared, left = triton_on_simt.compiled(kernel, given, **options)
    wanted, _ = recurrence(**call)
    y = next(n for n, value in enumerate(left) if value is given["y"])
    threads = 32 * options["num_warps"]
    return ptx, shared, threads, grid[0], left, y, wanted.numpy(), allowed(**call).numpy()


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
