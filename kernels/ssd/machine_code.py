"""What ptxas has made of a kernel, looked at before it is first run.

ptxas 12.8, which Triton 3.6 and 3.7 take for Hopper, writes wrong wgmma at times, the same each time (seen on an H200,
where what Triton had written was right): descriptors of factors in shared memory were computed from a block's number,
and numbers that registers had no room for were brought back into registers that were in use. `checked(kernel)` in place
of a kernel is compiled, and run if neither is to be seen in its machine code; else it raises Unsound.
"""

import functools
import re
import subprocess
import tempfile

import torch
from triton import knobs

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")
REGISTER = re.compile(r"\b(UR|R)(\d+)\b")
SPECIAL = re.compile(r"SR_[A-Za-z_.]+")
SHARED = {"SR_CgaCtaId"}  # of which a block computes where its shared memory begins
SPILLS = "STL", "LDL"
NO_RESULT = "ST", "RED", "BAR", "WARP", "BRA", "EXIT", "LDGSTS"


class Unsound(Exception):
    """The machine code of a kernel is not to be trusted."""


class checked:
    """A Triton kernel with wgmma, for launching.launch, which launches it directly from the second time on."""

    def __init__(self, kernel):
        self.kernel, self.fn = kernel, kernel.fn

    def __getitem__(self, grid):
        return functools.partial(self._first, grid)

    def _first(self, grid, *arguments, **options):
        made = self.kernel.warmup(*arguments, grid=grid, **options)
        if not _trusted(made.asm["cubin"]):
            raise Unsound(f"{self.fn.__name__}: wrong wgmma, or registers that spill")
        return self.kernel[grid](*arguments, **options)


@functools.cache
def _trusted(cubin):
    """Whether machine code was read and is sound; Triton gives the same for kernels whose numbers alone differ."""
    try:
        return sound(text(cubin))
    except (OSError, subprocess.SubprocessError, TypeError):  # no nvdisasm that runs, or what it writes is not known
        return False


@functools.cache
def hopper(index):
    """Whether CUDA device `index` has wgmma, and Triton brings what shows machine code."""
    try:
        return torch.cuda.get_device_capability(index) == (9, 0) and bool(knobs.nvidia.nvdisasm.path)
    except (AttributeError, OSError, RuntimeError):
        return False


def sound(code):
    """Whether nothing spills, and each wgmma's descriptor, of which there are some, is an address in shared memory."""
    spills = any(name.startswith(SPILLS) for _, name, _ in INSTRUCTION.findall(code))
    found = descriptors(code)
    return bool(found) and not spills and all(sources <= SHARED for sources in found)


def descriptors(code):
    """For each wgmma, in order: the special registers, "memory" or "nothing", that its descriptors come from.

    Registers are followed through the instructions as they are listed, thrice for loops; a write that depends on a
    predicate adds to what was there.
    """
    known, seen = {}, {}
    for _ in range(3):
        for n, (guard, name, operands) in enumerate(INSTRUCTION.findall(code)):
            if name.startswith("HGMMA"):
                first = int(re.search(r"gdesc\[UR(\d+)\]", operands)[1])
                # Two descriptors of two registers; of a factor from registers the first is not there, but its place is.
                used = range(4) if re.match(r"R\d+, gdesc", operands) else (2, 3)
                seen[n] = frozenset().union(*(known.get(("UR", first + k), {"nothing"}) for k in used))
            elif not name.startswith(NO_RESULT) and (written := _written(name, operands)):
                came = _sources(name, operands.partition(",")[2], known)
                for register in written:
                    known[register] = came | known.get(register, frozenset()) if guard else came
    return list(seen.values())


def _written(name, operands):
    """The registers that an instruction writes."""
    for operand in operands.split(","):
        if found := REGISTER.fullmatch(operand.strip()):
            several = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
            return [(found[1], int(found[2]) + k) for k in range(several)]
        if not re.fullmatch(r"U?P[T\d]", operand.strip()):
            break
    return []


def _sources(name, operands, known):
    if name.startswith(("LDG", "LDS", "LDL")):
        return frozenset({"memory"})
    came = frozenset(SPECIAL.findall(operands))
    several = 2 if ".64" in operands or "WIDE" in name else 1
    for kind, number in REGISTER.findall(operands):
        for k in range(several):
            came |= known.get((kind, int(number) + k), frozenset())
    return came


def text(cubin):
    """Machine code as nvdisasm writes it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = knobs.nvidia.nvdisasm.path
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
