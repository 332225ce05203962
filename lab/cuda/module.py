"""Compiled CUDA C++: nothing is compiled before it is needed, and nothing twice."""

import os

import torch

from lab import card, cuda_driver
from lab.cuda import disassembly, needs, signature
from lab.cuda.launch import Kernel
from lab.tensor_map import BITS

DEFAULT_ARCH = "sm_90"  # what the SIMT machine and the disassembly take where nobody says otherwise
OLDEST = (7, 5)

# Where tests run notebooks, the SIMT machine takes PTX alone of the course's files: other tests assemble them. It is
# made as those tests make it, so that what one has compiled need not be compiled by the other.
HASTE = os.environ.get("LAB_HASTE") == "1"
MINIMAL = "-minimal"  # without textures and the types of CUDA's host functions: the same PTX, in an eighth less time


class Module:
    """Compiled source: `module.name` or `module["name"]` is a kernel; ptx, cubin, sass and resources show its code."""

    def __init__(self, source, options=(), name="kernel.cu", arch=None, file=None):
        if not isinstance(source, str):
            raise TypeError(f"cuda.compile: source must be a str, got {type(source).__name__}; cuda.load takes a path")
        self.source, self.options, self.name, self.arch = source, options_of(options), name, arch
        self._file, self._alone = file, bool(file) and HASTE
        self._kernels, self._arches, self._loaded, self._machine = {}, {}, {}, {}

    def __getitem__(self, name):
        if name not in self._kernels:
            if not signature.is_named(self.source, name) and name not in self.entries():  # compile only in doubt
                raise AttributeError(self._unknown(name))
            self._kernels[name] = Kernel(self, name)
        return self._kernels[name]

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        kernel = self[name]
        setattr(self, name, kernel)  # so that the next look-up is free
        return kernel

    def __repr__(self):
        return f"<CUDA module {self.name}>"

    def ptx(self, arch=None):
        """The PTX text."""
        from simt import nvrtc

        arch = arch or self.arch or DEFAULT_ARCH
        if self._alone:
            return nvrtc.compile_to_ptx(self.source, (*self.options, MINIMAL), arch, self.name, assembled=False)
        return nvrtc.compile_to_ptx(self.source, self.options, arch, self.name)

    def cubin(self, arch=None):
        """The machine code, as bytes."""
        from simt import nvrtc

        return nvrtc.compile_to_cubin(self.source, self.options, arch or self.arch or DEFAULT_ARCH, self.name)

    def sass(self, kernel=None, arch=None):
        """The machine code as text, of one kernel or of all. It needs no GPU; RuntimeError without a disassembler."""
        if kernel is not None and kernel not in self.entries(arch):
            raise AttributeError(self._unknown(kernel))
        return disassembly.sass(self.cubin(arch), kernel)

    def resources(self, arch=None):
        """{kernel: {"registers", "shared", "stack", "spill_stores", "spill_loads"}}, without a GPU.

        Registers of a thread; static shared bytes of a block; bytes a thread keeps on its stack, and spills to it.
        """
        from simt import nvrtc

        options = (*self.options, "--ptxas-options=-v")
        arch = arch or self.arch or DEFAULT_ARCH
        return disassembly.resources(nvrtc.compiler_log(self.source, options, arch, self.name))

    def entries(self, arch=None):
        """{kernel: its parameters and limits}, as the compiler sees them."""
        return signature.entries(self.ptx(arch), self.source)

    def set(self, name, tensor):
        """Fill a __constant__ or __device__ variable with a tensor's bytes, which must be as many.

        On a CUDA tensor's card, on the current stream; of a CPU tensor for later launches on the SIMT machine.
        """
        where = f"{self.name}: set: {name}"
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{where} takes a tensor, got {type(tensor).__name__}")
        if not tensor.is_contiguous():
            raise ValueError(f"{where} takes a contiguous tensor, got strides {tensor.stride()} for {_shown(tensor)}")
        if tensor.device.type != "cuda":
            self._on_machine().set(name, tensor.detach().view(BITS.get(tensor.dtype, tensor.dtype)).numpy())
            return
        device = tensor.device.index
        address, size = cuda_driver.variable(self._on_card(device), device, name, self.name)
        if tensor.nbytes != size:
            raise ValueError(f"{where} has {size} bytes, got {tensor.nbytes}, a tensor of {_shown(tensor)}")
        cuda_driver.copy(address, tensor.data_ptr(), size, device, where)

    def _unknown(self, name):
        from simt.kernel_names import so_named

        entries = self.entries()
        if so_named(name, entries):
            return f'{self.name}: write extern "C" before __global__ void {name}, or its name is mangled by C++'
        hint = "" if entries else '. A kernel begins with  extern "C" __global__ void'
        return f"{self.name} has no kernel {name!r}; it has: {', '.join(entries) or 'none'}{hint}"

    def _arch_on(self, device):
        """The architecture to compile for, on a card by its index, or on the SIMT machine (None)."""
        if device is None:
            stands_for = card.machine()
            if stands_for == card.H200:
                return self.arch or DEFAULT_ARCH
            return self._arch_for(stands_for.capability, stands_for.name)
        if device not in self._arches:
            name, capability = torch.cuda.get_device_name(device), cuda_driver.capability(device)
            self._arches[device] = self._arch_for(capability, name)
        return self._arches[device]

    def _arch_for(self, capability, name):
        """The architecture for a card; RuntimeError where it is too old, or the source not for it."""
        from simt import nvrtc

        major, minor = capability
        if capability < OLDEST:
            raise RuntimeError(
                f"{self.name}: the course's kernels need a card of compute capability {OLDEST[0]}.{OLDEST[1]} or newer "
                f"(T4, RTX 20 and later), got {name}, {major}.{minor}; CPU tensors run on the SIMT machine"
            )
        entry = self._file and needs.of(self._file)
        if entry and not needs.fits(entry["capability"], capability):
            raise RuntimeError(f"{self.name}: {needs.said(entry, f'{name}, {major}.{minor}')}")
        if self.arch and (self.arch[-1] not in "af" or self.arch[:-1] == f"sm_{major}{minor}"):
            return self.arch
        # An architecture like sm_90a is of that card alone: another one gets code of its own.
        known = [int(arch[3:]) for arch in nvrtc.architectures()]
        return f"sm_{max(arch for arch in known if arch <= 10 * major + minor)}"

    def _for_card(self, device, make):
        """make(arch), the code for a card by its index; RuntimeError where the card lacks what the source takes."""
        from simt.errors import CompileError

        try:
            return make(self._arch_on(device))
        except CompileError as error:
            if device is None:
                name, capability = card.machine().name, card.machine().capability
            else:
                name, capability = torch.cuda.get_device_name(device), cuda_driver.capability(device)
            said = needs.refused(error.log, f"{name}, {capability[0]}.{capability[1]}")
            if not said or (device is None and card.machine() == card.H200):
                raise
            raise RuntimeError(f"{self.name}: {said}") from None

    def entries_on(self, device):
        """`entries` on a card by its index, or on the SIMT machine (None)."""
        return self._for_card(device, self.entries)

    def _on_card(self, device):
        """The module on this card."""
        if device not in self._loaded:
            arch, (major, minor) = self._arch_on(device), cuda_driver.capability(device)
            newer = arch not in (self.arch, f"sm_{major}{minor}")  # than the compiler: the driver translates PTX
            image = self.ptx(arch).encode() if newer else self._for_card(device, self.cubin)
            what = f"{self.name} ({arch}, on {torch.cuda.get_device_name(device)})"
            self._loaded[device] = cuda_driver.load(image, device, what)
        return self._loaded[device]

    def _on_machine(self):
        """The module on the SIMT machine."""
        arch = self._arch_on(None)
        if arch not in self._machine:
            import simt

            # a module of its own, as on a card
            self._machine[arch] = simt.load(self._for_card(None, self.ptx), self.source)
        return self._machine[arch]


def _shown(tensor):
    return f"{tensor.dtype} and shape {tuple(tensor.shape)}"


def options_of(options):
    """Options for NVRTC as a tuple of strings, or TypeError."""
    if isinstance(options, str) or not all(isinstance(option, str) for option in options):
        raise TypeError(f'options must be a tuple of strings, such as ("-DPAD=1",), got {options!r}')
    return tuple(options)
