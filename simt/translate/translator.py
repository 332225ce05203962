"""A basic block of PTX -> a Python function on arrays.

Each block becomes a function in two forms. The full form runs when all threads go through the block together: no
masks, no merging. The masked form runs for some of them: what it computes replaces the old value only in its own lanes,
and its loads and stores are made for them only.

    full(S, R)                   S the state of the launch, R the list of registers
    masked(S, R, M, alone)       M the lanes; alone: no other thread is left that could need the old values

Both return what comes next: the number of a block, or one of the tuples of simt/execute/scheduler.py.
Registers hold: integers as simt/arithmetic/lazy.py says, floats as arrays (block, warp, lane), predicates as bool or
arrays.
"""

import numpy as np

from simt import arithmetic
from simt.errors import Unsupported
from simt.memory.races import scope_of_fence
from simt.ptx.blocks import BARRIERS, ENDS, TOGETHER, counted, destinations, member_mask
from simt.ptx.reader import SIZES, Imm, Not, Pair, Reg, Sym
from simt.ptx.special_registers import SPECIALS
from simt.ptx.types import DTYPES
from simt.ptx.unset import MARK
from simt.translate.arithmetic import Arithmetic
from simt.translate.hopper import Hopper, carried_registers
from simt.translate.lanes import Lanes
from simt.translate.memory import MemoryAccess, passed_registers, uniform_registers
from simt.translate.unset import Unset

NOTHING = {"membar", "fence", "nanosleep", "prefetch", "prefetchu", "pragma", "discard",
           "applypriority", "pmevent", "setmaxnreg"}  # fmt: skip
WITHOUT = dict.fromkeys(("tex", "tld4", "txq"), "there are no textures: pass the array, and work out the index")
WITHOUT |= dict.fromkeys(("suld", "sust", "sured", "suq"), "there are no surfaces: pass the array to write to")


def stops(i):
    """Does it wait for other threads of the block or the warp?"""
    return i.parts[0] in BARRIERS and "arrive" not in i.parts


class Translator(Arithmetic, MemoryAccess, Lanes, Hopper, Unset):
    """Translates the blocks of one kernel. `symbols` gives the address of each variable."""

    def __init__(self, flow, symbols, joins):
        self.flow, self.symbols, self.joins = flow, symbols, joins
        self.kinds = flow.kinds
        self.slots = {name: n for n, name in enumerate(self.kinds)}
        self.line, self.current = 0, None  # the instruction being translated
        self.constants = {}  # objects that the generated code names
        self.parameters = {}  # (parameter, byte, type) -> position in S.parameters
        self.parameter_reads = []  # ... and back
        self.uniform = uniform_registers(flow.function.instructions)
        self.passed = passed_registers(flow.function.instructions)
        self.carried = carried_registers(flow.function.instructions, self.kinds)
        self.counters = {}

    # A block, or several that follow each other without a jump.

    def full(self, number):
        """Source and line histogram of the full form, from block `number` to the next jump."""
        blocks = [self.flow.blocks[number]]
        while blocks[-1].joint:
            blocks.append(self.flow.blocks[blocks[-1].number + 1])
        return self.function(blocks, masked=False)

    def masked(self, number):
        return self.function([self.flow.blocks[number]], masked=True)

    def function(self, blocks, masked):
        self.lines_out, self.masked_form, self.mask = [], masked, "M"
        written, read, histogram = set(), set(), {}
        first = blocks[0]
        if masked:
            self.check_members(first)
        watched = self.flow.unset is not None
        for block in blocks:
            read |= block.reads - written
            written |= block.writes
            for n, i in enumerate(block.instructions, block.start):
                histogram[i.line] = histogram.get(i.line, 0) + 1
                last = block is blocks[-1] and i is block.instructions[-1]
                if watched:
                    self.watch(n, i)
                if last and (i.parts[0] in ENDS or (masked and stops(i)) or counted(i)):
                    written -= destinations(i)  # __syncthreads_count: set when all have come
                    break
                self.instruction(n, i)
        body, self.lines_out = self.lines_out, []
        load = [f"{self.local(r)} = R[{self.slots[r]}]" for r in sorted(read)]
        for r in sorted(written & blocks[-1].live_out):
            self.write_back(r)
        self.finish(blocks[-1], masked)
        name = f"{'masked' if masked else 'full'}_{first.number}"
        head = f"def {name}(S, R{', M, alone' if masked else ''}):"
        lines = load + body + self.lines_out
        return name, "\n    ".join([head] + (lines if lines else ["pass"])), histogram

    def check_members(self, block):
        """The masked form starts with lanes that work together: are all there that must be?"""
        for i in block.instructions:
            if i.parts[:2] == ("wgmma", "mma_async"):
                self.out("absent = S.warpgroups.missing(M)")
                self.out("if absent is not None: return ('lanes', absent)")
                return
            if i.parts[0] in TOGETHER and i.parts[0] != "wgmma":
                if i.operands and any(o for o in [member_mask(i)] if isinstance(o, Reg) and o.name in block.writes):
                    return  # the mask is computed in this block; it is checked at the instruction
                self.out(f"absent = S.missing({self.integer(member_mask(i), 32)}, M)")
                self.out("if absent is not None: return ('lanes', absent)")
                return

    def write_back(self, r):
        slot, name = self.slots[r], self.local(r)
        if self.masked_form:
            merge = "S.warpgroups.merge" if r in self.carried else f"merge_{self.family(r)}"
            self.out(f"R[{slot}] = {name} if alone else {merge}(R[{slot}], {name}, M)")
        else:
            self.out(f"R[{slot}] = {name}")

    def finish(self, block, masked):
        """The return statement."""
        i = block.instructions[-1]
        op, after, mask = i.parts[0], block.number + 1, "M" if masked else "None"
        if op == "bra":
            target = block.targets[0]
            if i.guard is None:
                self.out(f"return {target}")
                return
            p, wanted = self.local(i.guard[0]), i.guard[1]
            self.out(f"if {p} is {wanted}: return {target}")
            self.out(f"if {p} is {not wanted}: return {after}")
            self.out(f"return S.branch({p}, {wanted}, {mask}, {target}, {after})")
        elif op == "brx":
            self.out(f"return S.switch({self.integer(i.operands[0], 32)}, {mask}, {block.targets!r})")
        elif op in ("ret", "exit", "trap"):
            if op == "trap" and i.guard is not None:
                self.out(f"G = S.within({self.local(i.guard[0])}, {i.guard[1]}, {mask})")
                self.out(f"if G is not False: S.trap(G, {i.line})")
                self.out(f"return {after}")
            elif op == "trap":
                self.out(f"S.trap({mask}, {i.line})")
            elif i.guard is None:
                self.out("return -1")
            else:
                p, wanted = self.local(i.guard[0]), i.guard[1]
                self.out(f"if {p} is {wanted}: return -1")
                self.out(f"if {p} is {not wanted}: return {after}")
                self.out(f"return S.branch({p}, {wanted}, {mask}, -1, {after})")
        elif stops(i) and (masked or counted(i)):
            if i.guard is not None:
                raise Unsupported(str(i), "a barrier with a condition", i.line)
            self.barrier(i, block, mask)
        else:
            self.out(f"return {after}")

    def barrier(self, i, block, mask):
        """The end of a masked block, or of one with a named barrier: these lanes wait."""
        parts, after = i.parts, block.number + 1
        if parts[:2] == ("barrier", "cluster"):
            self.out(f"return ('cluster', {after}, {mask}, 0, {i.line})")
            return
        if parts[:2] == ("bar", "warp"):
            self.out(f"return ('warp', {after}, M, {self.integer(i.operands[0], 32)}, {i.line})")
            return
        count, red = "None", "None"
        operands = list(i.operands)
        if "red" in parts:
            d, operands = operands[0], operands[1:]
            p = operands.pop()
            want = not isinstance(p, Not)
            p = p.reg if isinstance(p, Not) else p
            red = f"({parts[parts.index('red') + 1]!r}, {self.local(p.name)}, {want}, {self.slots[d.name]})"
        if len(operands) > 1:
            count = self.integer(operands[1], 32)
        self.out(f"return ('block', {after}, {mask}, {self.integer(operands[0], 32)}, {count}, {red}, {i.line})")

    # Names.

    def out(self, text):
        self.lines_out.append(text)

    def local(self, name):
        return f"r{self.slots[name]}"

    def family(self, name):
        kind = self.kinds[name]
        if kind == MARK:
            return kind
        return "pred" if kind == "pred" else "float" if kind in ("f32", "f64") else f"b{8 * SIZES[kind]}"

    def constant(self, key, value):
        self.constants.setdefault(key, value)
        return key

    # Operands as expressions.

    def integer(self, o, width):
        """An int or Lazy of `width` bits; wider registers are cut."""
        if isinstance(o, Imm):
            return str(o.bits & ((1 << width) - 1))
        if isinstance(o, Sym):
            return "32" if o.name == "WARP_SZ" else str(self.address_of(o.name))
        if isinstance(o, Reg):
            if o.name not in self.kinds:
                if o.name[1:].partition(".")[0] not in SPECIALS:
                    raise Unsupported(o.name, "this special register")
                special = f"S.special({o.name!r})"
                return special if width == 32 else f"convert({special}, 32, {width}, False)"
            kind, name = self.kinds[o.name], self.local(o.name)
            if kind in ("f32", "f64"):
                return f"pack({name}.view(u{SIZES[kind]}))"
            own = 8 * SIZES[kind]
            return name if own == width else f"convert({name}, {own}, {width}, False)"
        raise Unsupported(str(o), "an operand of this kind")

    def address_of(self, name):
        if name not in self.symbols:
            raise Unsupported(name, "the address of this name")
        return self.symbols[name]

    def array(self, o, dtype):
        """An array of `dtype`."""
        dtype = np.dtype(dtype)
        if dtype == np.bool_:
            return f"as_array({self.predicate(o)})"
        if isinstance(o, Imm):
            bits = o.bits
            if o.kind == "f64" and dtype.itemsize == 4:  # never written by NVRTC
                raise Unsupported(str(o), "a double where a float is expected")
            unsigned = np.dtype(f"u{dtype.itemsize}")
            value = np.full((1, 1, 1), bits & ((1 << 8 * dtype.itemsize) - 1), unsigned).view(dtype)
            return self.constant(f"C{bits & ((1 << 64) - 1):x}_{dtype.char}", value)
        if isinstance(o, Reg) and o.name in self.kinds and self.kinds[o.name] in ("f32", "f64"):
            kind = self.kinds[o.name]
            name = self.local(o.name)
            return name if DTYPES[kind] == dtype else f"{name}.view({dtype.char}_)"
        width = 8 * dtype.itemsize
        text = f"unpack({self.integer(o, width)}, {width})"
        return text if dtype.kind == "u" else f"{text}.view({dtype.char}_)"

    def predicate(self, o):
        if isinstance(o, Imm):
            return str(bool(o.bits))
        if isinstance(o, Not):
            return f"p_not({self.local(o.reg.name)})"
        return self.local(o.name)

    # Results.

    def set(self, o, text, guard=None):
        """Assign an expression, already in the register's own form."""
        if o.name == "_":
            self.out(text)
            return
        name = self.local(o.name)
        if guard is not None:
            merge = "S.warpgroups.merge" if o.name in self.carried else f"merge_{self.family(o.name)}"
            text = f"{merge}({name}, {text}, {guard})"
        self.out(f"{name} = {text}")

    def set_array(self, o, text, dtype, guard=None):
        """Assign an array of `dtype`, as the register holds it."""
        dtype = np.dtype(dtype)
        if o.name == "_":
            self.out(text)
            return
        kind = self.kinds[o.name]
        if kind == "pred":
            text = f"as_predicate({text})"
        elif kind in ("f32", "f64"):
            if DTYPES[kind] != dtype:
                text = f"({text}).view({DTYPES[kind].char}_)"
        else:
            size = SIZES[kind]
            if dtype.kind != "u":
                text = f"({text}).view(u{dtype.itemsize})"
            if size > dtype.itemsize:  # u8 into a 16-bit register; s8 is extended
                text = f"widen_array({text}, {dtype.kind == 'i'}, u{size})"
            elif size < dtype.itemsize:
                text = f"({text}).astype(u{size})"
            text = f"pack({text})"
        self.set(o, text, guard)

    # Instructions.

    def instruction(self, number, i):
        op = i.parts[0]
        self.line, self.current = i.line, i
        self.out(f"# {i.line}: {i}")
        if self.carried:
            self.check_landed(i)
        guard = None
        if i.guard is not None:
            p, wanted = self.local(i.guard[0]), i.guard[1]
            if op in ("ld", "st", "atom", "red", "cp", "call", "mbarrier", "griddepcontrol"):
                self.guard = None
                self.out(f"G = S.within({p}, {wanted}, {'M' if self.masked_form else 'None'})")
                self.out("if G is not False:")
                self.mask = "G"
                start = len(self.lines_out)
                getattr(self, "do_" + op)(number, i)
                self.mask = "M"
                for k in range(start, len(self.lines_out)):
                    self.lines_out[k] = "    " + self.lines_out[k]
                # lanes whose guard is false keep what they had
                for name in sorted(destinations(i)):
                    if name in self.slots:
                        local = self.local(name)
                        self.lines_out.insert(start, f"    old_{local} = {local}")
                        self.out(f"    {local} = merge_{self.family(name)}(old_{local}, {local}, G)")
                return
            guard = p if wanted else f"p_not({p})"
        self.guard = guard
        method = getattr(self, "do_" + op, None)
        if op in NOTHING:
            if op in ("membar", "fence"):
                proxy = "proxy" in i.parts and any(p.startswith("async") for p in i.parts)
                if proxy:
                    self.out(f"S.proxy_fence({self.mask_text()})")
                elif not {"mbarrier_init", "proxy"} & set(i.parts):
                    self.out(f"S.fence({self.mask_text()}, {scope_of_fence(i.parts)})")
        elif method is not None and method(number, i) is not False:
            pass
        else:
            self.general(i)

    def mask_text(self):
        return self.mask if self.masked_form or self.mask == "G" else "None"

    def general(self, i):
        """Whatever arithmetic knows."""
        pair = bool(i.operands) and isinstance(i.operands[0], Pair)
        found = arithmetic.find(i.opcode, destinations=2 if pair else 1)
        if found is None:
            raise Unsupported(str(i), WITHOUT.get(i.parts[0], ""), i.line)
        name = self.constant(
            f"F{2 if pair else 1}_" + "".join(c if c.isalnum() else "_" for c in i.opcode), found.function
        )
        first, rest = i.operands[0], i.operands[1:]
        if len(rest) != len(found.sources):
            raise Unsupported(str(i), f"with {len(rest)} operands", i.line)
        given = ", ".join(self.array(o, d) for o, d in zip(rest, found.sources))
        if isinstance(first, Pair) or len(found.destinations) == 2:
            a, b = (first.first, first.second) if isinstance(first, Pair) else (first, Reg("_"))
            self.out(f"t, u = {name}({given})")
            self.set_array(a, "t", found.destinations[0], self.guard)
            self.set_array(b, "u", found.destinations[1], self.guard)
        else:
            self.set_array(first, f"{name}({given})", found.destinations[0], self.guard)
