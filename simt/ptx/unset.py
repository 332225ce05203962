"""Registers that are read though nothing has set them: which may be, and what a running kernel keeps of them.

`float sum;` without `= 0` leaves a register that no instruction has set when it is first read. Copying such a value is
no mistake yet, nor is computing with it: the compiler does both ahead of a branch that then drops the result. It is
one where the value comes to matter: when it is stored, taken as an address, decides a branch or which lane is read, or
goes to another lane by anything but a shuffle.

So registers that may be unset carry a *mark*, a register of the machine's own beside them: 0 where the value was set,
COPIED where nothing has set it, and n + 1 where instruction n was the first to compute with such a value. Most kernels
have no such register, which the kernel's liveness tells: none is live at its beginning. They pay nothing.

Where the optimiser sees that a float must be unset, it takes the result of arithmetic with it for a NaN. A constant NaN
in the PTX of a source that speaks neither of NaN nor of infinity is therefore taken for an unset value, too.
"""

import re
from dataclasses import dataclass

from simt.ptx.reader import Imm, Mem, Not, Pair, Reg, Vec

COPIED = -1
MARK = "mark"  # the kind of such a register, as flow.Flow.kinds has it
NAN = {("f32", 0x7FC00000), ("f64", 0x7FF8 << 48)}
NAN_AS_INTEGER = 0x7FC00000
SPEAKS_OF_NAN = re.compile(
    r"(?i)nan(?!o)|infinity|_inf(_f)?\b|as_float|as_double|huge_val|0x[7f]f[8c]0+|0x7fffffff|2143289344|/\s*0(?:\.0*)?f?(?![\w.])"
)
COPIES = {"mov", "cvta", "ld", "st"}  # ld and st of a call's parameters
# Instructions whose every operand matters. Of the others, those with a result pass the mark on.
FINAL = {
    "atom", "red", "bra", "brx", "bar", "barrier", "call", "cp", "vote", "match", "redux", "elect", "mma", "wmma",
    "ldmatrix", "stmatrix", "movmatrix", "wgmma", "mbarrier", "mapa", "ld", "ldu", "st", "setmaxnreg", "trap", "ret",
    "exit",
}  # fmt: skip


@dataclass(slots=True)
class Unset:
    """`marked`: the registers that carry a mark; `before`: {instruction: those that it reads and that may be unset}."""

    marked: set
    before: dict


def mark_of(name):
    """The name of the register's mark."""
    return f"{name} mark"


def analyse(function, blocks, entry, sources, destinations, source=""):
    """Which registers may be read unset? An Unset, or None if none is.

    entry      the registers that are live at the beginning
    sources, destinations   what an instruction reads and writes
    source     the CUDA C++; without it, a NaN is a NaN
    """
    nan = bool(source) and not SPEAKS_OF_NAN.search(re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.S))
    found = {n for n, i in enumerate(function.instructions) if nan and names_nan(i)}
    if not entry and not found:
        return None
    known = {0: set(entry)}  # may be unset where a block begins
    result, todo = Unset(set(entry), {}), {0}
    while todo:  # the first in the code: what leads to it mostly stands ahead of it, and has been walked through
        block = blocks[min(todo)]
        todo.remove(block.number)
        may = set(known[block.number])
        for n, i in enumerate(block.instructions, block.start):
            reads = sources(i) & may
            if reads or n in found:
                result.before[n] = result.before.get(n, set()) | reads
            passed = (n in found or reads & passing(i, sources)) and not is_final(i)
            if passed:
                may |= destinations(i)
                result.marked |= destinations(i)
            elif i.guard is None:
                may -= destinations(i)
        for after in [*block.targets, *([block.number + 1] if block.falls else [])]:
            if after < len(blocks) and (after not in known or may - known[after]):
                known[after] = known.get(after, set()) | may
                todo.add(after)
    result.marked.discard("_")
    return result


def is_final(i):
    """Does a value that this instruction reads come to matter? Copies to and from a call's parameters do not."""
    return i.parts[0] in FINAL and i.parts[:2] not in (("ld", "param"), ("st", "param"))


def must_be_set(i, sources):
    """The registers that this instruction must not find unset."""
    guard = {i.guard[0]} if i.guard else set()
    if i.parts[0] == "shfl":
        return guard.union(*(plain(o) for o in i.operands[2:]))
    if i.parts[:2] == ("wgmma", "mma_async"):  # its sums are read only where a predicate says so
        return sources(i) - (plain(i.operands[0]) - set().union(*map(plain, i.operands[1:])))
    return sources(i) if is_final(i) else guard


def passing(i, sources):
    """The registers whose mark passes on to the result."""
    return (
        set() if is_final(i) else plain(i.operands[1]) if i.parts[0] == "shfl" else sources(i) - must_be_set(i, sources)
    )


def plain(o):
    """The names of the registers in an operand."""
    match o:
        case Reg(name):
            return {name}
        case Not(reg):
            return {reg.name}
        case Vec(items):
            return set().union(*map(plain, items))
        case Pair(first, second):
            return plain(first) | plain(second)
        case Mem(base, _, coordinates):
            return plain(base).union(*map(plain, coordinates))
    return set()


def names_nan(i):
    """Does an operand spell the NaN that the optimiser writes for an unset value?"""
    if any(isinstance(o, Imm) and (o.kind, o.bits) in NAN for o in i.operands):
        return True
    return i.parts[0] == "mov" and isinstance(i.operands[-1], Imm) and i.operands[-1] == Imm(NAN_AS_INTEGER)
