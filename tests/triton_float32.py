"""float32's own SSD kernels, compiled as on a Hopper card and run by the SIMT machine: in a process of its own, for
Triton's interpreter, which other tests use, changes the language of its process."""

import re
import subprocess
import tempfile

import numpy as np
import torch
import triton
from test_ssd_five import off, problem, recurrence
from triton import knobs
from triton.compiler import ASTSource

import simt
from kernels.ssd import (
    chunk_cumsum,
    float32,
    float32_passing,
    float32_scan,
    float32_scores,
    float32_state,
    machine_code,
)
from lab.triton_on_simt import HOPPER

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32"}
MODULES = chunk_cumsum, float32_passing, float32_scan, float32_scores, float32_state


def compiled(kernel, tensors, numbers, constants, options):
    """(what Triton makes of a launch on a card whose tensors begin at multiples of 16 bytes, the arguments left)."""
    types, fixed, known, left = {}, {}, {}, []
    for n, (param, value) in enumerate(zip(kernel.params, (*tensors, *numbers, *constants), strict=True)):
        if isinstance(value, torch.Tensor):
            types[param.name], known[(n,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
            left.append((value.view(torch.int16) if value.dtype is torch.bfloat16 else value).numpy())
        elif value is None or param.is_constexpr or (value == 1 and not param.do_not_specialize):
            types[param.name], fixed[(n,)] = "constexpr", value
        elif isinstance(value, float):
            types[param.name] = "fp32"
            left.append(np.float32(value))
        else:
            types[param.name] = "i32"
            left.append(np.int32(value))
            if value % 16 == 0 and not param.do_not_specialize:
                known[(n,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, types, constexprs=fixed, attrs=known)
    return triton.compile(source, target=HOPPER, options=options), left


def on_the_machine(seen, run):
    """A launch that goes to the SIMT machine, if `run`; seen: gets {kernel: (PTX, bytes of a thread's stack,
    what descriptors of wgmma come from)}."""

    def launch(kernel, grid, tensors, numbers, constants=(), **options):
        made, left = compiled(kernel, tensors, numbers, constants, options)
        from_where = frozenset()
        if "wgmma" in made.asm["ptx"]:
            from_where = from_where.union(*machine_code.descriptors(machine_code.text(made.asm["cubin"])))
        seen[kernel.fn.__name__] = made.asm["ptx"], stack(made.asm["cubin"]), from_where
        if run:
            module = simt.load(made.asm["ptx"])
            function = module[module.names[0]]
            left += [np.uint64(0)] * (len(function.program.parameters) - len(left))  # Triton's own, not used
            threads = 32 * options.get("num_warps", 4)
            function(grid, threads, *left, shared=made.metadata.shared, check_races=True)

    return launch


def stack(cubin):
    """Bytes of local memory of a thread: what registers have no room for."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", text.stdout + text.stderr)[1])


def layer(shape, rest=True, run=True, wgmma=False):
    """(how far y is off, how far the final state is, {kernel: what `on_the_machine` saw}) of a layer of
    problem(*shape[:-1]) with chunks of shape[-1]; the first two None where nothing is run. wgmma: whether kernels
    may take it."""
    seen, kept = {}, [module.launch for module in MODULES]
    call = problem(*shape[:-1], rest=rest)
    x, B, C, dt, A = (call[name] for name in ("x", "B", "C", "dt", "A"))
    D, z, bias, initial = (call.get(name) for name in ("D", "z", "dt_bias", "initial_states"))
    if not rest:
        D = torch.randn(shape[2])
    y = torch.full_like(x, torch.nan)
    assert float32.takes(y, x, B, C, D, z)
    part_type, checked = float32_scores.part_type, machine_code.checked
    try:
        machine_code.checked = lambda kernel: kernel
        for module in (float32_state, float32_scan):
            module.either = lambda run, kind, x, W, tile, one, other, most: run(one if wgmma else other)
        for module in MODULES:
            module.launch = on_the_machine(seen, run)
        for module in (float32_scores, float32_passing):
            module.part_type = lambda x: torch.bfloat16
        limit = call.get("dt_limit", (0.0, np.inf))
        final = float32.run(y, x, B, C, D, z, dt, bias, initial, A, shape[-1], True, limit)
    finally:
        for module, launch in zip(MODULES, kept):
            module.launch = launch
        for module in (float32_scores, float32_passing):
            module.part_type = part_type
        machine_code.checked = checked
        for module in (float32_state, float32_scan):
            module.either = float32_scores.either
    if not run:
        return None, None, seen
    wanted, states = recurrence(**call | {"D": D})
    return off(y, wanted), off(final, states[:, -1]), seen
