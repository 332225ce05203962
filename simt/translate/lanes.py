"""Instructions in which lanes, or all threads of a block, work together -> lines of Python."""

import functools

import numpy as np

from simt.arithmetic import fragments, mma
from simt.errors import Unsupported
from simt.ptx.reader import Imm, Pair, Reg, Sym, Vec


class Lanes:
    """The part of the Translator for shuffles, votes, tensor cores, barriers, and calls of the system."""

    def do_shfl(self, number, i):
        d, a, b, c, members = i.operands
        self.members_now(i, members)
        given = ", ".join(self.array(o, "u4") for o in (a, b, c))
        self.out(f"t, u = lanes_shuffle({i.parts[2]!r}, {given})")
        sources = ", ".join(self.array(o, "u4") for o in (b, c))
        named, mask = self.integer(members, 32), self.mask_text()
        whole = isinstance(members, Imm) and members.bits & 0xFFFFFFFF == 0xFFFFFFFF and not self.masked_form
        condition = "if S.exist is not None: " if whole else ""  # else all 32 lanes are here, and named
        self.out(f"{condition}S.check_read(u, {i.parts[2]!r}, {sources}, {named}, {mask}, {self.guard}, {i.line})")
        first = d.first if isinstance(d, Pair) else d
        self.set_array(first, "t", "u4", self.guard)
        if isinstance(d, Pair):
            self.set_array(d.second, "u", bool, self.guard)

    def members_now(self, i, members):
        """In the full form, or where the mask is computed in this very block."""
        mask = "M" if self.masked_form else "None"
        if isinstance(members, Imm) and members.bits & 0xFFFFFFFF == 0xFFFFFFFF and not self.masked_form:
            return
        self.out(f"S.together({self.integer(members, 32)}, {mask}, {i.line})")

    def do_vote(self, number, i):
        d, p, members = i.operands
        self.members_now(i, members)
        mode = i.parts[2]
        self.out(f"t = S.vote({mode!r}, {self.predicate(p)}, {self.integer(members, 32)}, {self.mask_text()})")
        self.set_array(d, "t", np.uint32 if mode == "ballot" else bool, self.guard)

    def do_activemask(self, number, i):
        self.set_array(i.operands[0], f"S.vote('ballot', True, 0xFFFFFFFF, {self.mask_text()})", "u4", self.guard)

    def do_match(self, number, i):
        d, a, members = i.operands
        self.members_now(i, members)
        kind = "u8" if i.parts[-1] == "b64" else "u4"
        first = d.first if isinstance(d, Pair) else d
        self.out(
            f"t, u = S.match({i.parts[1]!r}, {self.array(a, kind)}, {self.integer(members, 32)}, {self.mask_text()})"
        )
        self.set_array(first, "t", "u4", self.guard)
        if isinstance(d, Pair):
            self.set_array(d.second, "u", bool, self.guard)

    def do_redux(self, number, i):
        d, a, members = i.operands
        self.members_now(i, members)
        kind = "i4" if i.parts[-1] == "s32" else "u4"
        if i.parts[-1] not in ("s32", "u32", "b32"):
            raise Unsupported(str(i), "", i.line)
        call = f"S.redux({i.parts[2]!r}, {self.array(a, kind)}, {self.integer(members, 32)}, {self.mask_text()})"
        self.set_array(d, call, kind, self.guard)

    def do_mma(self, number, i):
        function = mma.mma(i.opcode)
        if function is None:
            raise Unsupported(str(i), "", i.line)
        self.members_now(i, Imm(0xFFFFFFFF))
        self.matrices(self.constant("F_" + i.opcode.replace(".", "_"), function), i.operands)

    def do_wmma(self, number, i):
        how = i.parts[1]
        what = fragments.product(i.opcode) if how == "mma" else fragments.fragment(i.opcode)
        if what is None or i.guard is not None:
            raise Unsupported(str(i), "wmma with a condition" if what else "wmma of this shape or these types", i.line)
        self.members_now(i, Imm(0xFFFFFFFF))
        name = "W_" + "_".join(i.parts)
        if how == "mma":
            return self.matrices(self.constant(name, what), i.operands)
        registers, m, *stride = i.operands if how == "load" else (i.operands[1], i.operands[0], *i.operands[2:])
        if len(registers.items) != what.registers[1]:
            raise Unsupported(str(i), f"with {len(registers.items)} registers", i.line)
        space = self.space(i)
        self.counter(number, i, "ld" if how == "load" else "st", shared=space == "shared")
        base = str(self.address_of(m.base.name)) if isinstance(m.base, Sym) else self.integer(m.base, 64)
        stride = self.integer(stride[0], 64) if stride else str(what.length if what.along else what.lines)
        where = f"S, {number}, {space!r}, add({base}, {m.offset % (1 << 64)}, 64), {stride}"
        if how == "store":
            given = ", ".join(map(self.all_lanes, registers.items))
            function = self.constant(name, functools.partial(fragments.store, what))
            self.out(f"{function}({where}, [{given}], {self.mask_text()})")
            return
        function = self.constant(name, functools.partial(fragments.load, what))
        self.out(f"t = {function}({where}, {self.mask_text()})")
        for k, o in enumerate(registers.items):
            self.set_array(o, f"t[{k}]", "u4")

    def matrices(self, function, operands):
        """d = a * b + c, each in some registers of all lanes."""
        d, *given = operands
        groups = ", ".join(f"[{', '.join(self.all_lanes(o) for o in parts_of(g))}]" for g in given)
        self.out(f"t = {function}({groups})")
        for k, o in enumerate(d.items):
            self.set_array(o, f"t[{k}]", "u4", self.guard)

    def all_lanes(self, o):
        return f"S.lanes32({self.array(o, 'u4')})"

    def do_ldmatrix(self, number, i):
        d, m = i.operands
        self.members_now(i, Imm(0xFFFFFFFF))
        address, offset = self.memory_operand(m)
        items = parts_of(d)
        self.counter(number, i, "ld", shared=True)
        self.out(
            f"t = S.ldmatrix({number}, {self.space(i)!r}, {address}, {offset}, {len(items)}, {'trans' in i.parts}, "
            f"{self.mask_text()})"
        )
        for k, o in enumerate(items):
            self.set_array(o, f"t[{k}]", "u4", self.guard)

    def do_stmatrix(self, number, i):
        m, s = i.operands
        self.members_now(i, Imm(0xFFFFFFFF))
        address, offset = self.memory_operand(m)
        self.counter(number, i, "st", shared=True)
        given = ", ".join(self.all_lanes(o) for o in parts_of(s))
        self.out(
            f"S.stmatrix({number}, {self.space(i)!r}, {address}, {offset}, [{given}], {'trans' in i.parts}, "
            f"{self.mask_text()})"
        )

    def do_movmatrix(self, number, i):
        self.members_now(i, Imm(0xFFFFFFFF))
        given = self.all_lanes(i.operands[1])
        name = self.constant("F_movmatrix", mma.movmatrix)
        self.set_array(i.operands[0], f"{name}({given})", "u4", self.guard)

    # Barriers in the full form: everybody is here.

    def do_bar(self, number, i):
        if i.guard is not None:
            raise Unsupported(str(i), "a barrier with a condition", i.line)
        if "warp" in i.parts:
            self.out(f"S.warp_barrier({self.integer(i.operands[0], 32)}, None, {i.line})")
            return
        if "arrive" in i.parts:
            number, count = (self.integer(o, 32) for o in i.operands)
            self.out(f"S.bar_arrive({number}, {count}, {self.mask_text()}, {i.line})")
            return
        if "red" in i.parts:
            d, p = i.operands[0], i.operands[-1]
            text = f"S.block_vote({i.parts[i.parts.index('red') + 1]!r}, {self.predicate(p)})"
            if i.parts[-1] == "pred":
                self.set(d, f"as_predicate({text})")
            else:
                self.set(d, f"pack({text})")
        self.out(f"S.block_barrier(None, {i.line})")

    def do_griddepcontrol(self, number, i):
        if "wait" in i.parts:
            self.out(f"S.grid_wait({self.mask_text()})")
        else:
            self.out("pass")

    def do_barrier(self, number, i):
        if "cluster" not in i.parts:
            self.do_bar(number, i)
        elif i.guard is not None:
            raise Unsupported(str(i), "a barrier with a condition", i.line)
        elif "arrive" in i.parts:
            self.out(f"S.cluster_arrive({self.mask_text()}, {i.line}, {'relaxed' not in i.parts})")
        else:
            self.out(f"S.cluster_wait({self.mask_text()}, {i.line})")

    def do_call(self, number, i):
        if any(isinstance(o, Reg) for o in i.operands):
            raise Unsupported(
                str(i), "a call through a pointer, as virtual functions and tables of functions make", i.line
            )
        name = next((o.name for o in i.operands if isinstance(o, Sym)), "?")
        given = [o for o in i.operands if isinstance(o, tuple)][-1]
        if name == "vprintf":
            text, values = (f"r{self.slots[s.name + '+0']}" for s in given)
            self.out(f"S.printf({text}, {values}, {self.mask_text()}, {i.line})")
            result = i.operands[0][0].name + "+0"
            if result in self.slots:
                self.set(Reg(result), "0")
        elif name == "__assertfail":
            given = [f"r{self.slots[s.name + '+0']}" for s in given]
            self.out(f"S.assert_failed({given[0]}, {self.mask_text()}, {i.line})")
        else:
            hint = "; there is no heap: pass an array to the kernel" if name in ("malloc", "free") else ""
            raise Unsupported(str(i), f"a call of {name}{hint}", i.line)


def parts_of(o):
    """The registers of {a, b, c}, or the one there is."""
    return o.items if isinstance(o, Vec) else (o,)
