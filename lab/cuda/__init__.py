"""One call for a CUDA C++ kernel, wherever its tensors live.

    module = cuda.compile('extern "C" __global__ void twice(float* x, int n) { ... }')    # or cuda.load("twice.cu")
    module.twice(grid, block, x, n)

CUDA tensors: NVRTC compiles for their card, and the launch goes on PyTorch's current stream; it returns None.
CPU tensors: the same source runs on the SIMT machine, which returns its report of counters.
Nothing compiles before it is needed, and nothing compiles twice.

With pdl=True on the CPU, lab/stream.py knows what the launch ahead may still be at.

    module        compiled source, on a card and on the SIMT machine    signature    a kernel's parameters, from its PTX
    launch        a kernel: what a launch looks at, and the launch      disassembly  machine code as text
    devices       launches over several devices that share memory       peers        their tensors as an argument
    needs         which cards a source is for, and what is said on another
"""

from pathlib import Path

from lab.cuda.devices import Devices, NoPeerAccess
from lab.cuda.launch import MAX_SHARED, Kernel
from lab.cuda.module import Module, options_of
from lab.cuda.peers import Peers

__all__ = ["MAX_SHARED", "Devices", "Kernel", "Module", "NoPeerAccess", "Peers", "compile", "load"]


def compile(source, options=(), name="kernel.cu", arch=None):
    """A module from CUDA C++ source.

    source   device code; kernels are `extern "C" __global__`
    options  strings for NVRTC, such as ("-DPAD=1",)
    name     what errors call the source
    arch     such as "sm_90a"; None: the card's own, and sm_90 on the SIMT machine

    Nothing is compiled until a kernel is launched or the code is asked for. Then: simt.CompileError with the compiler's
    words; simt.CompilerMissing where there is no NVRTC.
    """
    return Module(source, options, name, arch)


def load(path, options=(), arch=None):
    """A module from a .cu file. Errors show the file's name; #include "..." also looks beside the file. On a card
    that it is not for (needs.py), a launch is a RuntimeError that says what runs there."""
    path = Path(path)
    return Module(path.read_text(), (*options_of(options), f"-I{path.resolve().parent}"), path.name, arch, file=path)
