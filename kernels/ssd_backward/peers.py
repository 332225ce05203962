"""The public kernels that the backward pass is measured beside: mamba_ssm's, as its layers call them.

    forward_and_backward(call, chunk_size)   a function that runs both, and returns the gradients; None without it
    backward(call, chunk_size)               the same of the backward pass alone, after a forward that is run here
    tune_quickly(anew)                       let calls that tune take little time for it; anew: the next one tunes
    compile_part(call, chunk_size, part)     compile what it may choose between for one of its kernels

These are the functions that its autograd calls, so that a CUDA graph takes them. They tune at the first call, by shape
but not by length: tuned anew at each length, they are measured at their best.
"""

import functools
import sys
import types

import triton.testing

from kernels.ssd import peers
from kernels.ssd_backward.arguments import Gradients

MODULES = (*peers.MODULES, "ssd_combined")
PARTS = (  # all of its kernels that tune, on both ways
    "_bmm_chunk_fwd_kernel", "_bmm_chunk_bwd_kernel", "_chunk_cumsum_fwd_kernel", "_chunk_cumsum_bwd_kernel",
    "_chunk_state_fwd_kernel", "_chunk_state_bwd_db_kernel", "_state_passing_fwd_kernel", "_state_passing_bwd_kernel",
    "_chunk_scan_fwd_kernel", "_chunk_scan_bwd_dstates_kernel", "_chunk_scan_bwd_dc_kernel",
    "_chunk_scan_bwd_dcb_kernel", "_chunk_scan_bwd_ddAcs_stable_kernel", "_chunk_scan_chunk_state_bwd_dx_kernel",
)  # fmt: skip
OPTIONS = "D", "z", "dt_bias", "initial_states", "seq_idx", "dt_softplus"


def forward_and_backward(call, chunk_size):
    """call: the arguments by name, dy among them."""
    return functools.partial(_both, peers._module(), dict(call), chunk_size) if peers._module() else None


def backward(call, chunk_size):
    """As forward_and_backward, but of the backward pass alone."""
    module = peers._module()
    if module is None:
        return None
    return functools.partial(_backward, module, dict(call), chunk_size, _forward(module, call, chunk_size))


def _forward(module, call, chunk_size):
    tensors = (call[name] for name in ("x", "dt", "A", "B", "C"))
    return module._mamba_chunk_scan_combined_fwd(*tensors, chunk_size, **_options(call))[0]


def _both(module, call, chunk_size):
    return _backward(module, call, chunk_size, _forward(module, call, chunk_size))


def _backward(module, call, chunk_size, out):
    tensors = (call[name] for name in ("dy", "x", "dt", "A", "B", "C"))
    dx, ddt, dA, dB, dC, dD, dz, dbias, dinitial = module._mamba_chunk_scan_combined_bwd(
        *tensors, out, chunk_size, **_options(call)
    )[:9]
    return Gradients(dx, ddt, dA, dB, dC, dD, dz, dbias, dinitial)


def _options(call):
    return {name: call[name] for name in OPTIONS if name in call}


def tune_quickly(anew=False, warmup=1, rep=4):
    """Where these kernels tune, they are timed for so many milliseconds each. anew: forget what they were tuned to."""
    for _, kernel in _tuned():
        if anew:
            kernel.cache.clear()
        vars(kernel)["do_bench"] = functools.partial(triton.testing.do_bench, warmup=warmup, rep=rep)


def _tuned():
    """(name, kernel) of the kernels that are tuned, each once."""
    seen = set()
    for module in MODULES:
        for name, value in vars(sys.modules.get(f"mamba_ssm.ops.triton.{module}", types)).items():
            if hasattr(value, "configs") and hasattr(value, "cache") and id(value) not in seen:
                seen.add(id(value))
                yield name, value


def compile_part(call, chunk_size, part):
    """Compile what mamba_ssm may choose between for this call, of one kernel: number `part` of PARTS. It does so one
    after another, which takes minutes for all. What was compiled is found in Triton's cache on disk. In a process of
    its own: the other kernels do nothing from here on."""
    peers._module()
    for name, kernel in _tuned():
        if name != PARTS[part]:
            vars(kernel).update(run=_nothing, best_config=kernel.configs[-1])  # by which results are cut to size
    tune_quickly(True, 0, 1)
    forward_and_backward(call, chunk_size)()


def _nothing(*_, **__):
    pass
