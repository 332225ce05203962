"""From a parsed kernel to basic blocks: calls inlined, what each block reads and leaves behind, which loops wait.

A basic block is a run of instructions that is entered only at its top and left only at its end. Blocks also end where
threads may have to wait for each other: after a barrier, and before an instruction in which lanes work together.
"""

from dataclasses import dataclass, field, replace

from simt.errors import Unsupported
from simt.ptx import reader, unset
from simt.ptx.fused_multiply_add import contract
from simt.ptx.reader import SIZES, Imm, Mem, Not, Pair, Reg, Sym, Vec

NO_DESTINATION = {
    "st", "red", "bra", "brx", "bar", "barrier", "ret", "exit", "call", "cp", "membar", "fence", "prefetch",
    "prefetchu", "trap", "brkpt", "nanosleep", "griddepcontrol", "pragma", "discard", "applypriority", "stmatrix",
    "pmevent", "setmaxnreg",
}  # fmt: skip
TOGETHER = {"shfl", "vote", "match", "redux", "mma", "ldmatrix", "stmatrix", "movmatrix", "elect", "wmma", "wgmma"}
ALONE = [("wgmma", "fence"), ("wgmma", "commit_group"), ("wgmma", "wait_group")]  # by each warp
WARPGROUP = Imm(0xFFFFFFFF, "warpgroup")
ENDS = {"bra", "brx", "ret", "exit", "trap"}
BARRIERS = {"bar", "barrier"}


@dataclass(slots=True)
class Block:
    """instructions[start:end] of the kernel; `next` is the block behind it, `targets` those that it may jump to."""

    number: int
    start: int
    end: int
    instructions: list
    targets: list = field(default_factory=list)  # numbers of blocks, in the order of the branch's labels
    falls: bool = True  # may go on into the next block
    reads: set = field(default_factory=set)  # registers needed from before
    writes: set = field(default_factory=set)
    live_out: set = field(default_factory=set)  # registers that some later block may read
    spins: bool = False  # ends in a jump back whose loop waits for another thread's store
    joint: bool = True  # the split after it is no jump: with all threads together, run on


@dataclass(slots=True)
class Flow:
    function: reader.Function
    blocks: list
    kinds: dict  # register -> "pred", "b16", "b32", "b64", "f32", "f64"
    used: set  # registers that are read somewhere
    unset: unset.Unset | None  # registers that may be read though nothing has set them


def analyse(function, module, source=""):
    """ptx.Function -> Flow. `source` is the CUDA C++ that it was made of, where it is known."""
    function = by_address(inline_calls(function, module))
    function = contract(function, sources, destinations, ENDS | BARRIERS)
    code = function.instructions
    blocks = split_blocks(function)
    kinds = dict(function.registers)
    for i in code:
        for name, kind in parameter_registers(i):
            kinds[name] = kind
    used = set()
    for b in blocks:
        for i in b.instructions:
            reads = sources(i) & kinds.keys()  # special registers are no registers
            b.reads |= reads - b.writes
            used |= reads
            if i.guard is not None:  # may leave the old value in place
                b.reads |= destinations(i) - b.writes
            b.writes |= destinations(i)
    entry = live_ranges(blocks)
    if entry:  # the kernel's own parameters are set from the start
        given = {name for i in code if i.parts[:2] == ("ld", "param") for name in sources(i)}
        entry -= given - set().union(*map(destinations, code))
    found = unset.analyse(function, blocks, entry & kinds.keys(), sources, destinations, source)
    if found is not None:
        kinds |= {unset.mark_of(name): unset.MARK for name in sorted(found.marked)}
        for b in blocks:
            add_marks(b, found)
        live_ranges(blocks)
    for b in blocks:
        b.spins = any(n <= b.number and waits(code[blocks[n].start : b.end]) for n in b.targets)
    return Flow(function, blocks, kinds, used, found)


def live_ranges(blocks):
    """Find each block's live_out; return the registers that are live at the kernel's beginning."""
    live = {b.number: set(b.reads) for b in blocks}
    changed = True
    while changed:
        changed = False
        for b in reversed(blocks):
            after = set(b.targets) | ({b.number + 1} if b.falls else set())
            out = set().union(*(live[n] for n in after if n < len(blocks)))
            into = b.reads | (out - b.writes)
            if out != b.live_out or into != live[b.number]:
                b.live_out, live[b.number], changed = out, into, True
    return set(live[0]) if blocks else set()


def add_marks(block, found):
    """Let the marks of registers that may be unset (simt/ptx/unset.py) live from block to block as registers do."""
    written = set()
    for n, i in enumerate(block.instructions, block.start):
        results = {unset.mark_of(name) for name in destinations(i) & found.marked}
        reads = {unset.mark_of(name) for name in found.before.get(n, ())}
        block.reads |= (reads | (results if i.guard is not None else set())) - written
        written |= results
    block.writes |= written


def split_blocks(function):
    code, labels = function.instructions, function.labels
    labelled = set(labels.values())
    starts = {0} | labelled
    joints = set()
    together = None  # the member mask that the current run of instructions has already been checked for
    for n, i in enumerate(code):
        op = i.parts[0]
        if n in labelled:
            together = None
        if op in ENDS or op in BARRIERS:
            starts.add(n + 1)
            together = None
            if op in BARRIERS and not counted(i):
                joints.add(n + 1)
        if op in TOGETHER and i.parts[:2] not in ALONE:
            members = member_mask(i)
            if op == "wgmma":
                members = WARPGROUP
            if n not in starts and (together != members or not isinstance(members, Imm)):
                joints.add(n)
                starts.add(n)
            together = members
    starts = sorted(s for s in starts if s < len(code))
    number = {s: k for k, s in enumerate(starts)}
    blocks = []
    for k, start in enumerate(starts):
        end = starts[k + 1] if k + 1 < len(starts) else len(code)
        block = Block(k, start, end, code[start:end])
        last = code[end - 1]
        op = last.parts[0]
        if op == "bra":
            block.targets = [number_of(last.operands[0].name, labels, number)]
        elif op == "brx":
            table = function.targets[last.operands[1].name]
            block.targets = [number_of(name, labels, number) for name in table]
        block.falls = op not in ENDS or last.guard is not None
        label_there = end in labelled
        block.joint = op not in ENDS and not counted(last) and (end in joints or label_there) and end < len(code)
        blocks.append(block)
    return blocks


def counted(i):
    """A barrier for some threads of the block: it may stop them though all have come (bar.sync 1, 128)."""
    return i.parts[0] in BARRIERS and "sync" in i.parts and "warp" not in i.parts and len(i.operands) > 1


def number_of(label, labels, number):
    """The block that a label stands before; one past the last for a label at the very end."""
    if label not in labels:
        raise ValueError(f"a branch to {label}, which the function does not have")
    return number.get(labels[label], len(number))


def member_mask(i):
    """The operand that names the lanes taking part; all 32 where the instruction has none."""
    op = i.parts[0]
    if op in ("shfl", "vote", "match", "redux", "elect"):
        return i.operands[-1]
    return Imm(0xFFFFFFFF)


# What an instruction reads and writes.


def registers(operand):
    match operand:
        case Reg(name):
            return {name} if name != "_" else set()
        case Not(reg):
            return {reg.name}
        case Mem(base, _, coordinates):
            return registers(base).union(*map(registers, coordinates))
        case Vec(items):
            return set().union(*map(registers, items))
        case Pair(first, second):
            return registers(first) | registers(second)
        case tuple():
            return set().union(*map(registers, operand)) if operand else set()
    return set()


def by_address(function):
    """Parameters that are read by an address in a register, elements of a __grid_constant__ struct: constant memory."""

    def is_one(i):
        return i.parts[:2] == ("ld", "param") and parameter_name(i) is None

    if not any(map(is_one, function.instructions)):
        return function
    code = [replace(i, opcode=i.opcode.replace(".param", ".const")) if is_one(i) else i for i in function.instructions]
    return replace(function, instructions=code)


def parameter_name(i):
    """st.param [x+4] and ld.param [x+4] of a call: the name under which the value travels."""
    for o in i.operands:
        if isinstance(o, Mem) and isinstance(o.base, Sym):
            return o.base.name, o.offset
    return None


def parameter_registers(i):
    """[(name, kind)] of the values that an instruction passes to or from an inlined function."""
    if i.parts[:2] not in (("st", "param"), ("ld", "param")):
        return []
    name, offset = parameter_name(i)
    kind = i.parts[-1]
    size = SIZES[kind]
    kind = kind if kind in ("f32", "f64") else f"b{8 * size}"
    count = {"v2": 2, "v4": 4}.get(i.parts[-2], 1)
    return [(f"{name}+{offset + k * size}", kind) for k in range(count)]


def destinations(i):
    """The registers that an instruction writes."""
    if i.writes is None:
        i.writes = frozenset(find_destinations(i))
    return i.writes


def sources(i):
    """The registers that it reads."""
    if i.reads is None:
        i.reads = frozenset(find_sources(i))
    return i.reads


def find_destinations(i):
    op = i.parts[0]
    if i.parts[:2] == ("st", "param"):
        return {name for name, _ in parameter_registers(i)}
    if op == "call":
        return {f"{s.name}+0" for s in i.operands[0]} if isinstance(i.operands[0], tuple) else set()
    if op in BARRIERS and "red" in i.parts:
        return registers(i.operands[0])
    if op in NO_DESTINATION or not i.operands or isinstance(i.operands[0], Mem):
        return set()
    return registers(i.operands[0])


def find_sources(i):
    found = {i.guard[0]} if i.guard else set()
    op = i.parts[0]
    if i.parts[:2] == ("ld", "param"):
        return found | {name for name, _ in parameter_registers(i)}
    if op == "call":
        for group in i.operands:
            if isinstance(group, tuple) and group is not i.operands[0]:
                found |= {f"{s.name}+0" for s in group if isinstance(s, Sym)}
        return found
    operands = i.operands if op in NO_DESTINATION and "red" not in i.parts[1:] else i.operands[1:]
    if op == "wgmma" or (i.operands and isinstance(i.operands[0], Mem)):
        operands = i.operands
    for o in operands:
        found |= registers(o)
    return found


# Loops that wait.


def waits(body):
    """Does a branch in this loop depend on a load that another thread's store may change?"""
    tainted, told = set(), False  # told: one thread passes what it has seen on, through shared memory
    for _ in range(4):
        before = len(tainted), told
        for i in body:
            volatile = i.parts[0] == "ld" and {"volatile", "acquire", "relaxed"} & set(i.parts)
            heard = told and i.parts[:2] == ("ld", "shared")
            seen = i.parts[:2] in (("mbarrier", "test_wait"), ("mbarrier", "try_wait"))
            if i.parts[0] == "atom" or seen or volatile or heard or sources(i) & tainted:
                tainted |= destinations(i)
                told = told or i.parts[:2] == ("st", "shared")
        if (len(tainted), told) == before:
            break
    return any(i.parts[0] == "bra" and i.guard and i.guard[0] in tainted for i in body)


# Calls.


DEEPEST = 16  # calls within calls; more are taken for recursion


def inline_calls(function, module, depth=0):
    """The function with the bodies of the device functions it calls put in their place (vprintf stays a call)."""
    if not any(i.parts[0] == "call" and callee(i, module) for i in function.instructions):
        return function
    if depth > DEEPEST:
        raise Unsupported(f"a call of {function.name}", "it is recursive: write it as a loop", function.line)
    out = replace(
        function,
        registers=dict(function.registers),
        variables=dict(function.variables),
        instructions=[],
        labels={},
        targets=dict(function.targets),
    )
    names = {index: [n for n, at in function.labels.items() if at == index] for index in function.labels.values()}
    for n, i in enumerate(function.instructions):
        for name in names.get(n, ()):
            out.labels[name] = len(out.instructions)
        called = callee(i, module) if i.parts[0] == "call" else None
        if called is None:
            out.instructions.append(i)
            continue
        insert(out, inline_calls(called, module, depth + 1), i, f"{called.name}.{n}.")
    for name in names.get(len(function.instructions), ()):
        out.labels[name] = len(out.instructions)
    return out


def callee(i, module):
    for o in i.operands:
        if isinstance(o, Sym) and o.name in module.functions:
            found = module.functions[o.name]
            return found if found.instructions else None
    return None


def insert(out, called, call, prefix):
    """Append the body of `called` to `out`, its names prefixed, its parameters those of the call."""
    groups = [o for o in call.operands if isinstance(o, tuple)]
    returned = groups.pop(0) if called.returns else ()
    given = groups[0] if groups else ()
    symbols = {p.name: a for p, a in zip(called.returns, returned)}
    symbols |= {p.name: a for p, a in zip(called.parameters, given)}
    for name, variable in called.variables.items():
        symbols[name] = Sym(prefix + name)
        out.variables[prefix + name] = replace(variable, name=prefix + name)
    for name, kind in called.registers.items():
        out.registers[prefix + name] = kind
    for name in called.labels:
        symbols[name] = Sym(prefix + name)
    for name, table in called.targets.items():
        symbols[name] = Sym(prefix + name)
        out.targets[prefix + name] = [prefix + label for label in table]

    def moved(o):
        match o:
            case Reg(name):
                return Reg(prefix + name) if name in called.registers else o
            case Sym(name):
                return symbols.get(name, o)
            case Mem(base, offset, coordinates):
                return Mem(moved(base), offset, tuple(map(moved, coordinates)))
            case Not(reg):
                return Not(moved(reg))
            case Vec(items):
                return Vec(tuple(map(moved, items)))
            case Pair(first, second):
                return Pair(moved(first), moved(second))
            case tuple():
                return tuple(map(moved, o))
        return o

    at = {index: [n for n, k in called.labels.items() if k == index] for index in called.labels.values()}
    end = prefix + "end"
    for n, i in enumerate(called.instructions):
        for name in at.get(n, ()):
            out.labels[prefix + name] = len(out.instructions)
        guard = (prefix + i.guard[0], i.guard[1]) if i.guard else None
        if i.parts[0] == "ret":
            out.instructions.append(reader.Instruction("bra", (Sym(end),), guard, i.line))
        else:
            out.instructions.append(reader.Instruction(i.opcode, moved(i.operands), guard, i.line, i.looks_ahead))
    for name in at.get(len(called.instructions), ()):
        out.labels[prefix + name] = len(out.instructions)
    out.labels[end] = len(out.instructions)
