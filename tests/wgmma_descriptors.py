"""Where wgmma of machine code finds its factors: what the descriptors' registers were computed from.

A descriptor holds an address in shared memory, which is the same in all blocks and threads; ptxas 12.8 has built some
on a block's number. Registers are followed through the instructions as they are listed, thrice for loops; a write that
depends on a predicate adds to what was there.
"""

import re
import subprocess
import tempfile

from triton import knobs

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")
GUARDED = re.compile(r"/\*[0-9a-f]{4,}\*/\s+@")
REGISTER = re.compile(r"\b(UR|R)(\d+)\b")
SPECIAL = re.compile(r"SR_[A-Za-z_.]+")
LOADS = "LDG", "LDS", "LDL"
NO_RESULT = "ST", "RED", "BAR", "WARP", "BRA", "EXIT", "LDGSTS"


def descriptors(text):
    """For each wgmma, in order: the special registers, "memory" or "nothing", that its descriptors come from."""
    code = [(found[1], found[2], bool(GUARDED.search(line))) for line in text.splitlines()
            if (found := INSTRUCTION.search(line))]  # fmt: skip
    known, seen = {}, {}
    for _ in range(3):
        for n, (name, operands, guarded) in enumerate(code):
            if name.startswith("HGMMA"):
                first = int(re.search(r"gdesc\[UR(\d+)\]", operands)[1])
                # Two descriptors of two registers; of a factor from registers the first is not there, but its place is.
                used = range(4) if re.match(r"R\d+, gdesc", operands) else (2, 3)
                sources = [known.get(("UR", first + k), frozenset({"nothing"})) for k in used]
                seen[n] = frozenset().union(*sources)
            elif (to := _written(name, operands)) and not name.startswith(NO_RESULT):
                came = _sources(name, operands.partition(",")[2] if to else operands, known)
                for register in to:
                    known[register] = came | known.get(register, frozenset()) if guarded else came
    return list(seen.values())


def _written(name, operands):
    """The registers that an instruction writes."""
    for operand in operands.split(","):
        if found := REGISTER.fullmatch(operand.strip()):
            several = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
            return [(found[1], int(found[2]) + k) for k in range(several)]
        if not re.fullmatch(r"U?P[T\d]", operand.strip()):
            return []
    return []


def _sources(name, operands, known):
    if name.startswith(LOADS):
        return frozenset({"memory"})
    came = frozenset(SPECIAL.findall(operands))
    several = 2 if ".64" in operands or "WIDE" in name else 1
    for kind, number in REGISTER.findall(operands):
        for k in range(several):
            came |= known.get((kind, int(number) + k), frozenset())
    return came


def machine_code(cubin):
    """The text of it, as nvdisasm writes it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = knobs.nvidia.nvdisasm.path
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
