"""The public kernels that ours are measured beside, in Triton: mamba_ssm's five, called as a Mamba-2 layer calls them,
and one that fuses the five, published with PyTorch's article "Accelerating Mamba2 with Kernel Fusion".

    mamba()                         mamba_ssm's mamba_chunk_scan_combined, or None with a printed sentence, said once
    calls(inputs, chunk_size)       of it, one for each dict of inputs
    published()                     the published fused kernel's function, or None with a sentence, said once
    published_calls(inputs, precision, chunk_size)
    within_32_bits(sizes)           whether their kernels can address the states of all chunks
    compile_part(call, chunk, part) compile a part of what mamba_ssm may choose between
    tune_anew()                     make the next call of either tune again
    layer()                         the modules of mamba_ssm's layer, which calls mamba_chunk_scan_combined by name

The published kernel is one file of a fork of mamba_ssm (WHERE) that needs nothing else of the fork: copied to its place
in the mamba_ssm that is installed, it is found. It waits in a loop for blocks before it, and lacks barriers that would
order what they wrote: so it is tried in a process of its own first (bench.py), and its results are looked at again
after it was timed. Its PRECISIONS are the fork's own; "medium" adds up in 16 bits.

Both tune their kernels at their first call, by shape but not by length: tuned anew at each length, each is measured at
its best. mamba_ssm's package imports a compiled extension, which only the scan of Mamba-1 needs: where that
is not built, the module with these kernels is imported without it.
"""

import functools
import importlib
import importlib.util
import sys
import types

import triton.testing

MODULES = ("ssd_bmm", "ssd_chunk_state", "ssd_state_passing", "ssd_chunk_scan", "ssd_fused5")
PARTS = ("_bmm_chunk_fwd_kernel", "_chunk_state_fwd_kernel", "_chunk_scan_fwd_kernel")  # most to choose between
WHERE = "https://github.com/RishiAstra/mamba", "mamba_ssm/ops/triton/ssd_fused5.py"
WIDE = ("states_in_fp32", "cb_store_fp32", "cb_scale_fp32", "cs_acc_fp32", "cb_comp_fp32")  # what it may keep in fp32
PRECISIONS = {"medium": dict.fromkeys(WIDE, False) | {"cb_comp_fp32": True}, "high": dict.fromkeys(WIDE, True)}


def mamba():
    """mamba_ssm's mamba_chunk_scan_combined, or None."""
    return None if _module() is None else _module().mamba_chunk_scan_combined


def within_32_bits(seqlen, nheads, headdim, dstate, chunk_size):
    """Whether all states of a sequence have offsets within 32 bits: these kernels compute them so. Beyond, they read
    where nothing is, and the whole process loses the card: it is said, and not tried."""
    fits = -(-seqlen // chunk_size) * nheads * headdim * dstate < 1 << 31
    if not fits:
        print(f"peers: {seqlen} tokens in chunks of {chunk_size} are left out: their offsets have 32 bits")
    return fits


@functools.cache
def _module():
    """mamba_ssm.ops.triton.ssd_combined, or None with a sentence, said once."""
    try:
        try:
            importlib.import_module("mamba_ssm")
        except ImportError:
            if (spec := importlib.util.find_spec("mamba_ssm")) is None:
                raise
            package = types.ModuleType("mamba_ssm")
            package.__path__ = list(spec.submodule_search_locations)
            sys.modules["mamba_ssm"] = package  # its __init__ is not run
        return importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    except ImportError as error:
        print(f"mamba_ssm cannot be imported ({error}): its rows are left out; pip install mamba-ssm einops")
        return None


@functools.cache
def published():
    """The published fused kernel's function, or None with a sentence, said once."""
    if _module() is None:
        return None
    try:
        return importlib.import_module("mamba_ssm.ops.triton.ssd_fused5")._fused5_ssd
    except (ImportError, AttributeError) as error:
        home, path = WHERE
        print(
            f"the published fused kernel cannot be imported ({error}): its rows are left out; copy {path} of {home} to "
            f"the same place in the mamba_ssm that is installed"
        )
        return None


@functools.cache
def layer():
    """mamba_ssm's modules `block`, `mamba2` and `layer_norm`; None, with a sentence, where there is no mamba_ssm.

    They want huggingface_hub for the loading of models alone: where it is not installed, a class without methods stands
    in its place while they are imported.
    """
    if _module() is None:
        return None
    missing = importlib.util.find_spec("huggingface_hub") is None
    if missing:
        sys.modules["huggingface_hub"] = types.ModuleType("huggingface_hub")
        sys.modules["huggingface_hub"].PyTorchModelHubMixin = type("PyTorchModelHubMixin", (), {})
    try:
        names = "modules.block", "modules.mamba2", "ops.triton.layer_norm"
        return types.SimpleNamespace(**{n.split(".")[-1]: importlib.import_module(f"mamba_ssm.{n}") for n in names})
    except ImportError as error:
        print(f"mamba_ssm's layer cannot be imported ({error}): the stack of layers is left out")
        return None
    finally:
        if missing:
            del sys.modules["huggingface_hub"]


def tune_anew():
    """Forget what these kernels were tuned to. They are then timed for a fifth of Triton's usual time."""
    for _, kernel in _tuned():
        kernel.cache.clear()
        vars(kernel)["do_bench"] = functools.partial(triton.testing.do_bench, warmup=5, rep=20)


def _tuned():
    """(name, kernel) of the kernels that are tuned."""
    for module in MODULES:
        for name, value in vars(sys.modules.get(f"mamba_ssm.ops.triton.{module}", types)).items():
            if hasattr(value, "configs") and hasattr(value, "cache"):
                yield name, value


def calls(inputs, chunk_size):
    """A call for each dict of inputs: mamba_ssm's five kernels with this chunk size."""
    return [functools.partial(mamba(), **each, chunk_size=chunk_size) for each in inputs]


def published_calls(inputs, precision, chunk_size):
    """A call for each dict of inputs: the published fused kernel with this chunk size."""
    run, options = published(), PRECISIONS[precision] | {"chunk_size": chunk_size}
    return [functools.partial(_first, run, each | options) for each in inputs]


def _first(run, arguments):
    return run(**arguments)[0]  # behind y come the states


def compile_part(call, chunk_size, part):
    """Compile what mamba_ssm may choose between for this call, of one kernel: number `part` of PARTS, or all others.

    It does so one after another, which takes minutes. What was compiled is found in Triton's cache on disk.
    """
    run = mamba()
    for name, kernel in _tuned():
        if (PARTS.index(name) if name in PARTS else len(PARTS)) != part:
            kernel.configs = kernel.configs[-1:]  # the smallest tiles
    run(**call, chunk_size=chunk_size)
