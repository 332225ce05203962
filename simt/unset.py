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

import numpy as np

from simt.generated import shuffle
from simt.ptx import Imm, Mem, Not, Pair, Reg, Vec

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
    result, todo = Unset(set(entry), {}), [0]
    while todo:
        block = blocks[todo.pop()]
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
                todo.append(after)
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


# What generated code calls. A mark is an int, an array (block, warp, lane), or a tuple of such: those of the register's
# parts, the lowest first, where several values have been packed into one register.


def computed(number, *marks):
    """The mark of what instruction `number` makes of values with these marks: the first reason there is."""
    out = 0
    for mark in map(unpacked, reversed(marks)):
        if type(mark) is int:
            if mark:
                out = mark if mark > 0 else number + 1
        else:
            out = settled(np.where(mark < 0, np.int32(number + 1), np.where(mark == 0, out, mark)))
    return out


def computed_in_parts(number, *marks):
    """The same for an instruction that computes with two halves of a register, each for itself."""
    return packed(*(computed(number, *(part(mark, n, 2) for mark in marks)) for n in range(2)))


def packed(*marks):
    """The mark of a register made of equal parts."""
    finest = max((len(mark) for mark in marks if type(mark) is tuple), default=1)
    marks = tuple(part(mark, n, finest) for mark in marks for n in range(finest))
    plain = all(type(mark) is int for mark in marks)
    return marks[0] if plain and len(set(marks)) == 1 else marks


def part(mark, n, count):
    """The mark of part n, of `count` equal ones, of a register."""
    if type(mark) is not tuple:
        return mark
    if count >= len(mark):
        return mark[n * len(mark) // count]
    each = len(mark) // count
    return packed(*mark[n * each : (n + 1) * each])


def unpacked(mark):
    """The mark of a register as a whole: unset where all of its parts are, since it may be used for one part alone."""
    if type(mark) is not tuple:
        return mark
    out = mark[0]
    for other in mark[1:]:
        out = merge_mark(0, out, bool(other) if type(other) is int else other != 0)
    return out


def decided(number, neutral, a, b, mark_a, mark_b):
    """The mark of `a and b`, or `a or b`: where one is set and decides alone (by False, by True), that is enough."""
    alone = False
    for p, mark in ((a, mark_a), (b, mark_b)):
        alone = alone | ((np.asarray(p) == neutral) & (np.asarray(mark) == 0))
    return merge_mark(computed(number, mark_a, mark_b), 0, np.reshape(alone, alone.shape or (1, 1, 1)))


def shuffled(mode, mark, lane, clamp):
    """The marks that a shuffle brings with the values."""
    if type(mark) is tuple:
        return packed(*(shuffled(mode, one, lane, clamp) for one in mark))
    return mark if type(mark) is int else settled(shuffle(mode, mark, lane, clamp)[0])


def merge_mark(old, new, mask):
    """`new` in the lanes of `mask`, `old` elsewhere."""
    if mask is None or (type(old) is int and type(new) is int and old == new):
        return new
    if type(mask) is bool:
        return new if mask else old
    if type(old) is tuple or type(new) is tuple:
        count = max(len(mark) for mark in (old, new) if type(mark) is tuple)
        return packed(*(merge_mark(part(old, n, count), part(new, n, count), mask) for n in range(count)))
    return settled(np.where(mask, new, old).astype(np.int32))


def settled(marks):
    """0 where no lane has a mark: nothing needs to be looked at any more."""
    return marks if marks.any() else 0


def environment():
    """The names that generated code may use, beside those of generated.py."""
    functions = (computed, computed_in_parts, packed, part, decided, shuffled, merge_mark)
    return {f.__name__: f for f in functions}


# The variable's name, for the message.

QUALIFIERS = {"const", "volatile", "unsigned", "signed", "long", "short", "struct", "alignas", "register"}
NO_TYPES = {
    "if", "for", "while", "switch", "return", "goto", "else", "using", "typedef", "extern", "static", "case", "delete",
    "new", "throw", "do",
}  # fmt: skip
DECLARATION = re.compile(r"\s*((?:[A-Za-z_][\w:]*(?:\s*<[^;=]*?>)?[\s*&]+)+)([A-Za-z_].*)", re.S)
DECLARATOR = re.compile(r"[\s*&]*([A-Za-z_]\w*)\s*((?:\[[^\]]*\]\s*)*)(=.*)?", re.S)


def variables(source, line):
    """The variables of a function that its `line` (from 1) reads and that were declared without a value."""
    lines = re.sub(r"//[^\n]*|/\*.*?\*/", blank, source, flags=re.S).split("\n")
    if not 0 < line <= len(lines):
        return []
    text = function_until("\n".join(lines[:line]))
    found = [name for statement in re.split(r"[;{}]", without_brackets(text)) for name in declared(statement)]
    before = text[: text.rfind("\n") + 1]
    open_ones = [n for n in found if not re.search(rf"\b{n}\s*(?:\[[^\]]*\]\s*)*=[^=]", before)]
    here = [n for n in open_ones or found if re.search(rf"\b{n}\b", lines[line - 1])]
    return here or (open_ones if len(open_ones) == 1 else [])


def blank(comment):
    return re.sub(r"[^\n]", " ", comment[0])


def function_until(text):
    """What of a text belongs to the function, not yet closed or just so, in which it ends."""
    depth, start = 0, 0
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 1 and brace[0] == "{":
            start = brace.start()
    return text[start:]


def without_brackets(text):
    """Casts, conditions and arguments declare nothing; nor do the heads of loops, but for what has a value."""
    shorter = re.sub(r"\([^()]*\)", " ", text)
    return shorter if shorter == text else without_brackets(shorter)


def declared(statement):
    """The names that a statement declares without a value."""
    found = DECLARATION.fullmatch(statement)
    if found is None or NO_TYPES & set(re.findall(r"\w+", found[1])) or "__shared__" in found[1]:
        return []
    parts = [DECLARATOR.fullmatch(part) for part in found[2].split(",")]
    return [p[1] for p in parts if p is not None and p[3] is None and p[1] not in QUALIFIERS]
