"""Which neighbouring accesses to shared memory become one wide access in machine code.

PTX loads s[0], s[1], s[2], s[3] one by one; ptxas, which turns PTX into machine code, makes one 16-byte load of them.
A matmul's counters cannot be understood without this: of 32 loads of a 16 × 16 tile's step it leaves 20. The rule was
found by comparing PTX with machine code, and holds for sm_80 and sm_90:

  * loads of 4 or 8 bytes and vectors of them: where three or four words of an aligned 16 bytes are wanted, one load of
    16 bytes; else where both words of an aligned 8 are, one of 8. Words that nobody uses are not wanted: a float4
    of which only x and y are used is loaded as 8 bytes.
  * stores, of 2 bytes too: only where all of an aligned 16, 8 or 4 bytes are written.
  * the address must be the same register plus constants, of an alignment that follows from the PTX.
  * nothing joins across the end of a basic block, a barrier, a fence, an atomic on shared memory, a cp.async, or
    a division or root, which becomes a branch or a call. Loads do not join across a store, stores not across a load
    or across a store to another register's address.
  * volatile accesses and those of 1 byte never join; nor does anything in global memory.

Not predicted: ptxas may turn a short `if` into predicated instructions, and then joins across its ends; it may unroll
a loop, and then joins across its rounds. It does not join at all in code for linking (-rdc=true).
"""

from simt.ptx.reader import SIZES, Imm, Mem, Reg, Sym, Vec

MOST = 16  # bytes: the widest access
ROUNDING = {"rn", "rz", "rm", "rp"}  # div.rn.f32 is a branch in machine code, div.approx.f32 is not
ENDS = {"bar", "barrier", "membar", "fence", "call", "cp", "mbarrier", "ret", "exit", "bra", "brx"}


def joined(function, offsets=None):
    """{instruction: (leader, bits)} for the shared accesses of a simt.ptx.reader.Function that change their width.

    Instructions are their indices. The leader makes one access of `bits`, at its address rounded down to that width;
    those that it leads make none. A leader is its own.

    offsets   {name: byte offset} of the variables in shared memory; None: as laid_out gives them
    """
    if not any("shared" in i.opcode for i in function.instructions):
        return {}
    return Joiner(function, laid_out(function) if offsets is None else offsets).run()


def laid_out(function):
    """{name: byte offset}: the function's shared variables one after the other, each at its alignment, as by ptxas."""
    offsets, end = {}, 0
    for variable in function.variables.values():
        if variable.space == "shared" and not variable.external:
            end = -(-end // variable.align) * variable.align
            offsets[variable.name] = end
            end += variable.size
    return offsets


class Joiner:
    def __init__(self, function, offsets):
        self.code, self.offsets = function.instructions, offsets
        self.starts = set(function.labels.values())
        self.definitions, self.used = definitions_and_uses(self.code)
        self.blocks = self.number_blocks()
        self.alignment = {}
        self.found = {}

    def number_blocks(self):
        block, blocks = 0, []
        for at in range(len(self.code)):
            block += at in self.starts or (at > 0 and self.code[at - 1].parts[0] in ("bra", "brx", "ret", "exit"))
            blocks.append(block)
        return blocks

    # Alignment: the power of two, at most 16, that divides every value a register takes.

    def align_of_register(self, name):
        """Assume the best of it and of all that it is computed from, and lower that until all definitions agree."""
        if name not in self.alignment:
            users, assumed, todo = {}, {}, [name]
            for new in todo:
                assumed[new] = MOST if new in self.definitions else 1  # a special one: %tid.x
                for at in self.definitions.get(new, ()):
                    for source in {source for o in self.code[at].operands[1:] for source in registers(o)}:
                        if source in self.alignment:
                            continue
                        users.setdefault(source, []).append((new, at))
                        if source not in assumed:
                            assumed[source] = None
                            todo.append(source)
            self.alignment |= assumed
            left = [(new, at) for new in reversed(todo) for at in self.definitions.get(new, ())]
            for new, at in left:
                result = self.align_of_result(self.code[at])
                if result < self.alignment[new]:
                    self.alignment[new] = result
                    left += users.get(new, ())
        return self.alignment[name]

    def align(self, operand):
        match operand:
            case Imm(bits, "int"):
                return power_of_two(bits)
            case Reg(name):
                return self.alignment.get(name, 1)
            case Sym(name):
                return power_of_two(self.offsets.get(name, 0))  # dynamic shared memory begins at a multiple of 16
        return 1

    def align_of_result(self, instruction):
        operation, operands = instruction.parts[0], instruction.operands[1:]
        a = [self.align(o) for o in operands]
        match operation:
            case "mov" | "cvta" | "add" | "sub" | "or" | "xor" | "min" | "max":
                result = min(a)
            case "cvt":
                result = 1 if {"f32", "f64", "f16"} & set(instruction.parts) else a[0]
            case "selp":
                result = min(a[:2])
            case "and":
                result = max(a)
            case "shl":
                result = a[0] << min(operands[1].bits, 4) if isinstance(operands[1], Imm) else a[0]
            case "mul" | "mad" if "hi" not in instruction.parts:
                result = min([a[0] * a[1], *a[2:]])
            case _:
                result = 1
        return min(result, MOST)

    # Addresses: (root, constant). The root is a register at a point of the code, or None: shared memory's beginning.

    def resolve(self, operand, at):
        match operand:
            case Mem(base, offset):
                root, constant = self.resolve(base, at)
                return root, constant + offset
            case Imm(bits, "int"):
                return None, bits
            case Sym(name) if name in self.offsets:
                return None, self.offsets[name]
            case Reg(name):
                return self.resolve_register(name, at)
        return operand, 0

    def resolve_register(self, name, at):
        places = self.definitions.get(name, ())
        if len(places) != 1:  # which of its values: count the definitions passed in this block
            passed = sum(p < at and self.blocks[p] == self.blocks[at] for p in places)
            return (name, passed), 0
        source = self.code[places[0]]
        if source.guard is None and source.parts[0] in ("mov", "cvta", "add"):
            terms = [o for o in source.operands[1:] if not isinstance(o, Imm)]
            constant = sum(o.bits for o in source.operands[1:] if isinstance(o, Imm))
            one = terms[0] if len(terms) == 1 else None
            loops = isinstance(one, Reg) and len(self.definitions.get(one.name, ())) > 1
            if one is not None and (not loops or self.blocks[places[0]] == self.blocks[at]):
                root, more = self.resolve(one, places[0])
                return root, constant + more
        return (name, 0), 0

    def align_of_root(self, root):
        return self.align_of_register(root[0]) if isinstance(root, tuple) else MOST

    # Runs of accesses that may join.

    def run(self):
        loads, stores, last = {}, {}, None
        for at, instruction in enumerate(self.code):
            if self.blocks[at] != last or ends_all(instruction):
                self.join(loads, stores)
                last = self.blocks[at]
            if not in_shared(instruction):
                continue
            load, key, items = self.access(at)
            if load:
                self.join({}, stores)
                loads.setdefault(key, []).extend(items)
            else:
                self.join(loads, {} if key in stores else stores)
                stores.setdefault(key, []).extend(items)
        self.join(loads, stores)
        return self.found

    def access(self, at):
        """(is it a load, what it must share to join, [(instruction, byte offset, bytes)] of what it wants)."""
        instruction = self.code[at]
        load, size = instruction.parts[0] == "ld", SIZES.get(instruction.parts[-1], 0)
        value, address = instruction.operands if load else instruction.operands[::-1]
        root, constant = self.resolve(address, at)
        parts = value.items if isinstance(value, Vec) else (value,)
        plain = not {"volatile", "relaxed", "acquire", "release", "mmio"} & set(instruction.parts)
        if not plain or size not in ((4, 8) if load else (2, 4, 8)):
            return load, ("alone", at), []
        wanted = [not load or (isinstance(part, Reg) and part.name in self.used) for part in parts]
        items = [(at, constant + size * n, size) for n, want in enumerate(wanted) if want]
        return load, (root, instruction.guard), items

    def join(self, loads, stores):
        """Join what these runs hold, and empty them."""
        for runs, words_enough in (loads, 3), (stores, 4):
            for (root, _), items in runs.items():
                if items and (len(items) > 1 or self.is_vector(items[0][0])):
                    self.join_run(self.align_of_root(root), items, words_enough)
            runs.clear()

    def is_vector(self, at):
        return isinstance(self.code[at].operands[0], Vec) or isinstance(self.code[at].operands[-1], Vec)

    def join_run(self, alignment, items, words_enough):
        covered = {}  # byte -> instruction, in order
        for at, offset, size in items:
            if self.is_vector(at):  # a vector's own alignment is certain
                alignment = max(alignment, vector_bytes(self.code[at]))
            covered |= dict.fromkeys(range(offset, offset + size), at)
        for start in sorted({byte // MOST * MOST for byte in covered}):
            self.join_part(alignment, covered, start, MOST, words_enough)

    def join_part(self, alignment, covered, start, size, words_enough):
        """One aligned part of 16, 8 or 4 bytes: an access of its own if enough of it is wanted, else its halves'."""
        bytes_in = [b for b in range(start, start + size) if b in covered]
        if not bytes_in or size < 4:
            return
        enough = 4 * words_enough if size == MOST else size
        leaders = sorted({covered[b] for b in bytes_in})
        if alignment >= size and len(bytes_in) >= enough:
            if len(leaders) > 1 or access_bytes(self.code[leaders[0]]) != size:
                self.found |= dict.fromkeys(leaders, (leaders[0], 8 * size))
            return
        split = any(covered.get(start + size // 2 - 1) == at == covered.get(start + size // 2) for at in leaders)
        wide = [at for at in leaders if access_bytes(self.code[at]) >= size]
        if wide and (split or len(leaders) > 1 or len({b // (size // 2) for b in bytes_in}) > 1):
            return  # one instruction wants words of both halves, though not all: it stays what it is
        for half in (start, start + size // 2):
            self.join_part(alignment, covered, half, size // 2, words_enough)


def power_of_two(value):
    return min(value & -value, MOST) or MOST


def vector_bytes(instruction):
    return SIZES[instruction.parts[-1]] * (4 if "v4" in instruction.parts else 2)


def access_bytes(instruction):
    return vector_bytes(instruction) if {"v2", "v4"} & set(instruction.parts) else SIZES[instruction.parts[-1]]


def in_shared(instruction):
    """A load or store that names shared memory."""
    return instruction.parts[0] in ("ld", "st") and any(p.startswith("shared") for p in instruction.parts)


def ends_all(instruction):
    """Does ptxas keep shared accesses on their side of this?"""
    parts = instruction.parts
    if parts[0] in ENDS:
        return True
    if parts[0] in ("atom", "red", "st"):  # a generic address may be shared memory's
        return not any(p in ("global", "local", "param") for p in parts) and not in_shared(instruction)
    if parts[0] in ("div", "rem"):
        return bool(ROUNDING & set(parts)) or parts[-1] not in ("f32", "f16")
    return parts[0] in ("sqrt", "rcp") and bool(ROUNDING & set(parts))


def definitions_and_uses(code):
    """{register: the instructions that write it}, and the set of registers that are read."""
    definitions, used = {}, set()
    for at, instruction in enumerate(code):
        stores = instruction.parts[0] in ("st", "red", "bra", "bar", "barrier", "ret", "cp", "membar", "fence")
        writes = () if stores or not instruction.operands else registers(instruction.operands[0])
        if instruction.operands and isinstance(instruction.operands[0], Mem):
            writes = ()
        for name in writes:
            definitions.setdefault(name, []).append(at)
        for operand in instruction.operands[bool(writes) :]:
            used.update(registers(operand))
        if instruction.guard is not None:
            used.add(instruction.guard[0])
    return definitions, used


def registers(operand):
    """The names of the registers in an operand."""
    match operand:
        case Reg(name):
            return [name]
        case Vec(items) | tuple(items):
            return [name for item in items for name in registers(item)]
        case Mem(base, _):
            return registers(base)
    inner = [getattr(operand, name, None) for name in ("reg", "first", "second")]
    return [name for item in inner if item is not None for name in registers(item)]
