"""What a kernel's parameters are: sizes from the PTX, which is exact, and names from the source, which people read."""

import math
import re
from dataclasses import dataclass

import numpy as np
import torch

from lab.tensor_map import BYTES, TensorMap

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
INTEGERS = {1: "b", 2: "h", 4: "i", 8: "q"}  # codes of Python's struct
# Integer types that say whether they have a sign; of others, a typedef's, whatever fits into the bits is taken.
SIGNED = re.compile(r"(?:signed )?(?:short|int|long|long long|long int|long long int)|int\d+_t|signed char|ptrdiff_t")
UNSIGNED = re.compile(r"unsigned\b.*|uint\d*(?:_t)?|ushort|ulong|size_t|bool")
TENSOR_MAP = "CUtensorMap"
QUALIFIERS = r"\b(?:const|volatile|restrict|__restrict__|__restrict|__grid_constant__|struct)\b"
DTYPES = {  # pointers whose type leaves no doubt; through uint4* or unsigned* a kernel may read anything
    "float": (torch.float32,),
    "double": (torch.float64,),
    "half": (torch.float16,),
    "__half": (torch.float16,),
    "__nv_bfloat16": (torch.bfloat16,),
    "nv_bfloat16": (torch.bfloat16,),
    "int": (torch.int32, torch.uint32),
    "int32_t": (torch.int32, torch.uint32),
    "long long": (torch.int64, torch.uint64),
    "int64_t": (torch.int64, torch.uint64),
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    kind   "pointer", "integer", "float", "struct", or "pointer or integer" where the source could not be read
    size   in bytes
    ctype  its type in the source, of what a pointer points to; "" where the source could not be read
    """

    name: str
    kind: str
    size: int
    ctype: str = ""

    def __str__(self):
        star = "*" if self.kind == "pointer" else ""
        return f"{self.ctype}{star} {self.name}" if self.ctype else self.name

    @property
    def code(self):
        """How Python's struct writes it."""
        if self.kind == "float":
            return "f" if self.size == 4 else "d"
        integer = INTEGERS.get(self.size, "")
        integer = integer.upper() if self.limits[0] == 0 else integer
        return {"struct": f"{self.size}s", "integer": integer}.get(self.kind, "Q")

    @property
    def limits(self):
        """(least, one beyond the largest) that an integer may be here."""
        bits = 8 * self.size
        least = 0 if self.kind == "integer" and UNSIGNED.fullmatch(self.ctype) else -(1 << bits - 1)
        return least, 1 << bits - (self.kind == "integer" and bool(SIGNED.fullmatch(self.ctype)))

    @property
    def is_map(self):
        """Whether a tensor map may stand here."""
        return self.kind == "struct" and self.size == BYTES and self.ctype.rpartition("::")[2] in ("", TENSOR_MAP)

    @property
    def dtypes(self):
        """The dtypes that a tensor may have here; () if any."""
        return DTYPES.get(self.ctype, ()) if self.kind == "pointer" else ()

    @property
    def wanted(self):
        """What may stand here, in words."""
        bits, ctype = 8 * self.size, self.ctype or "value"
        if self.is_map and self.ctype:
            return f"a lab.tensor_map.TensorMap ({ctype})"
        return {
            "pointer": f"a tensor ({ctype}*)",
            "integer": f"an int or a NumPy integer of {bits} bits ({ctype})",
            "float": f"a float or np.float{bits} ({ctype})",
            "struct": f"a NumPy scalar of {self.size} bytes ({ctype})",
            "pointer or integer": "a tensor or an integer of 64 bits",
        }[self.kind]

    def expect_scalar(self, where, value):
        """Raise unless this value, which is no tensor, can stand here."""
        if isinstance(value, np.ndarray):
            hint = f"; torch.from_numpy({self.name}) shares its memory" if "pointer" in self.kind else ""
            raise TypeError(f"{where}: {self.name} must be {self.wanted}, got a NumPy array{hint}")
        if isinstance(value, TensorMap) or (self.is_map and self.ctype):  # nothing else is one
            if not (isinstance(value, TensorMap) and self.is_map):
                raise TypeError(f"{where}: {self.name} must be {self.wanted}, got {type(value).__name__}")
            return
        number = isinstance(value, (int, float, np.generic))
        fits = isinstance(value, np.generic) and value.dtype.itemsize == self.size
        whole = isinstance(value, np.generic) and value.dtype.kind in "iub"
        good = {
            "pointer": value is None,
            "integer": isinstance(value, int) or (fits and whole),
            "float": type(value) in (int, float) or (fits and value.dtype.kind == "f"),
            "struct": fits,
            "pointer or integer": value is None or isinstance(value, int) or (fits and whole),
        }[self.kind]
        if not good:
            got = f"{type(value).__name__} {value}" if number else f"{type(value).__name__}"
            raise TypeError(f"{where}: {self.name} must be {self.wanted}, got {got}")


def converter(where, parameter, on_card):
    """A function from a value that expect_scalar takes: to what `struct` writes (on a card), or to a NumPy scalar."""
    bits = 8 * parameter.size

    def integer(value):
        if value is None:  # a null pointer
            return null
        value = int(value)
        if not low <= value < high:
            ctype = f" ({parameter.ctype})" if parameter.kind == "integer" and parameter.ctype else ""
            wanted = f"{bits} bits{ctype}: it must be {low} to {high - 1}"
            raise ValueError(f"{where}: {parameter.name} = {value} does not fit in {wanted}")
        if not on_card:
            return (signed if value < top else unsigned)(value)
        if parameter.kind == "integer" and low:
            return value if value < top else value - (mask + 1)  # the same bits, as `struct` wants them
        return value & mask

    if "integer" in parameter.kind or parameter.kind == "pointer":
        (low, high), top, mask = parameter.limits, 1 << bits - 1, (1 << bits) - 1
        signed, unsigned = getattr(np, f"int{bits}"), getattr(np, f"uint{bits}")
        null = 0 if on_card else signed(0)
        return integer
    if parameter.kind == "float":
        kind = getattr(np, f"float{bits}")
        largest = float(np.finfo(kind).max)

        def real(value):
            value = float(value)
            if abs(value) > largest and math.isfinite(value):
                raise ValueError(f"{where}: {parameter.name} = {value} does not fit in {bits} bits")
            return value if on_card else kind(value)

        return real

    def struct(value):
        return value.value if isinstance(value, TensorMap) else value.tobytes() if on_card else value

    return struct


@dataclass(frozen=True)
class Entry:
    """A kernel's parameters, and the threads per block it was compiled for (0: no bound).

    cooperative   its blocks wait for each other in grid.sync() of cooperative groups
    """

    parameters: tuple
    max_threads: int
    cooperative: bool = False


def entries(ptx, source):
    """{kernel: Entry} of a PTX text; `source` gives the parameters their names."""
    found = {}
    # The directives after the parameters end at the body; a kernel that is only declared has none.
    heads = list(re.finditer(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?([^{;]*)\{", ptx))
    for head, after in zip(heads, [*heads[1:], None]):
        name, inside, directives = head[1], head[2] or "", head[3]
        params = re.findall(r"\.param\s+([^,]*?)\s*([\w$]+)(?:\[(\d+)\])?\s*(?:,|$)", inside.strip())
        raw = [_from_ptx(index, kind, length) for index, (kind, _, length) in enumerate(params)]
        bound = re.search(r"\.maxntid\s+([\d, ]+)", directives)
        threads = int(np.prod([int(n) for n in bound[1].split(",")])) if bound else 0
        cooperative = "%envreg" in ptx[head.end() : after and after.start()]  # where the grid's barrier lies
        found[name] = Entry(_with_names(raw, name, source), threads, cooperative)
    return found


def is_named(source, kernel):
    """Whether the source itself declares this kernel with C linkage, seen without compiling."""
    text = _plain(source)
    return bool(re.search(r'extern\s+"C"', source)) and any(name == kernel for name, _ in _declared(text))


def _from_ptx(index, kind, length):
    name = f"argument {index}"
    if length:  # an array of bytes: a struct, a half, a tensor map
        return Parameter(name, "struct", int(length))
    letter, bits = re.search(r"\.([bsuf])(\d+)", kind).groups()
    if letter == "f":
        return Parameter(name, "float", SIZES[bits])
    pointer = ".ptr" in kind
    return Parameter(name, "pointer" if pointer else "pointer or integer" if bits == "64" else "integer", SIZES[bits])


def _with_names(raw, kernel, source):
    """The parameters with names and types from the source, if it was understood: number and sizes must agree."""
    for name, inside in _declared(_plain(source)):
        items = [item.strip() for item in inside.split(",") if item.strip() not in ("", "void")]
        if name != kernel or len(items) != len(raw):
            continue
        named = [_from_source(parameter, item) for parameter, item in zip(raw, items)]
        if all(named):
            return tuple(named)
    return tuple(raw)


def _from_source(parameter, item):
    """The parameter with the name and type of its declaration; None if the two do not agree."""
    item = re.sub(QUALIFIERS, " ", item.partition("=")[0])
    found = re.fullmatch(r"(.*?)(\w+)\s*(\[[^\]]*\])?\s*", item, flags=re.S)
    if not found or not found[1].strip():
        return None
    pointer = "*" in found[1] or bool(found[3])
    ctype = " ".join(found[1].replace("*", " ", 1).split())
    if not pointer:
        kind = "integer" if parameter.kind == "pointer or integer" else parameter.kind
        return None if kind == "pointer" else Parameter(found[2], kind, parameter.size, ctype)
    return Parameter(found[2], "pointer", 8, ctype) if "pointer" in parameter.kind else None


def _declared(text):
    """[(name, text between the parentheses)] of the kernels in a source without comments."""
    before = r"(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)|[\w:]+)"
    return re.findall(rf"__global__\s+(?:{before}\s+|{before}(?<=\)))*?(\w+)\s*\(([^()]*)\)\s*\{{", text)


def _plain(source):
    """The source without comments and strings."""
    return re.sub(r'"(?:\\.|[^"\\\n])*"|/\*.*?\*/|//[^\n]*', " ", source, flags=re.S)
