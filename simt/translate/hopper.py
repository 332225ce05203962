"""Hopper's own instructions -> lines of Python: mbarriers, bulk copies (TMA), wgmma, named barriers, elect.

They call the files of simt/hopper, and simt/execute/clusters.py. Of clusters, arrivals at another block's mbarriers,
stores to its shared memory, multicast loads and barriers are covered, not loads from there.
"""

from simt.errors import Unsupported
from simt.hopper import wgmma
from simt.ptx.blocks import sources
from simt.ptx.reader import Imm, Mem, Pair, Reg, Vec


class Hopper:
    """The part of the Translator for what runs beside the threads."""

    # mbarriers.

    def where(self, m, space):
        """(space, address, offset), as simt/hopper/mbarrier.py takes it."""
        address, offset = self.memory_operand(m)
        return f"({space!r}, {address}, {offset})"

    def do_mbarrier(self, number, i):
        how = i.parts[1]
        operands = list(i.operands)
        d = None if isinstance(operands[0], Mem) else operands.pop(0)
        where, given = self.where(operands[0], self.space(i)), operands[1:]
        tail = f"{self.mask_text()}, {i.line}"
        first = self.integer(given[0], 32) if given else "1"
        if how == "init":
            self.out(f"S.barriers.init({where}, {first}, {tail})")
        elif how == "inval":
            self.out(f"S.barriers.inval({where}, {tail})")
        elif how == "expect_tx":
            self.out(f"S.barriers.expect({where}, {first}, {tail})")
        elif how in ("arrive", "arrive_drop"):
            expected, count = (first, "1") if "expect_tx" in i.parts else ("None", first)
            text = f"S.barriers.arrive({where}, {count}, {expected}, {tail}, {how == 'arrive_drop'})"
            self.set(d or Reg("_"), text, self.guard)
        elif how in ("test_wait", "try_wait"):
            parity = "parity" in i.parts
            phase = first if parity else self.integer(given[0], 64)
            self.set(d, f"S.barriers.wait({where}, {phase}, {parity}, {tail})", self.guard)
        else:
            raise Unsupported(str(i), "", i.line)

    # Bulk copies.

    def bulk(self, number, i):
        parts, mask = i.parts, self.mask_text()
        if "commit_group" in parts:
            self.out(f"S.bulk.commit({mask})")
            return
        if "wait_group" in parts:
            self.out(f"S.bulk.wait({self.integer(i.operands[0], 32)}, {mask})")
            return
        if "prefetch" in parts:
            return
        where = [p.partition("__")[0] for p in parts]
        multicast = any(p.startswith("multicast") for p in parts)
        if where.count("shared") > 1:
            raise Unsupported(str(i), "clusters of blocks", i.line)
        tensor = "tensor" in parts
        known = parts[1] == "async" and where.count("shared") == where.count("global") == 1
        if not known or any(p.startswith(("im2col", "tile__")) or p == "cp_mask" for p in parts):
            raise Unsupported(str(i), "", i.line)
        load = where.index("shared") < where.index("global")
        shared, other = i.operands[:2] if load else i.operands[1::-1]
        coordinates, size = "None", "None"
        if tensor:
            coordinates = "(" + "".join(f"{self.integer(c, 32)}, " for c in other.coordinates) + ")"
        else:
            size = self.integer(i.operands[2], 32)
        address, offset = self.memory_operand(other)
        text = f"{self.where(shared, 'shared')}, ({address}, {offset}), {coordinates}, {size}"
        if load:
            text += f", {self.where(i.operands[2 if tensor else 3], 'shared')}"
        to = f", {self.integer(i.operands[3 if tensor else 4], 16)}" if multicast else ""
        self.out(f"S.bulk.{'load' if load else 'store'}({text}, {mask}, {i.line}{to})")

    # wgmma.

    def do_wgmma(self, number, i):
        tail = f"{self.mask_text()}"
        if i.guard is not None:
            raise Unsupported(str(i), "a wgmma with a condition", i.line)
        if i.parts[1] == "wait_group":
            self.out(f"S.warpgroups.wait({self.integer(i.operands[0], 32)}, {tail}, {i.line})")
            return
        if i.parts[1] in ("fence", "commit_group"):
            self.out(f"S.warpgroups.{'fence' if i.parts[1] == 'fence' else 'commit'}({tail}, {i.line})")
            return
        what = wgmma.form(i.opcode)
        if what is None:
            raise Unsupported(str(i), "", i.line)
        d, a, b, accumulates, *more = i.operands
        from_registers = isinstance(a, Vec)
        if len(d.items) != what[0] // (2 if what[1] == "f32" else 4):
            raise Unsupported(str(i), f"with {len(d.items)} registers of D", i.line)
        if not all(isinstance(m, Imm) for m in more):
            raise Unsupported(str(i), "signs and transposition that are not constants", i.line)
        numbers = [m.bits for m in more]
        signs, trans = tuple(-1 if n & 2 else 1 for n in numbers[:2]), numbers[2:] or [0, 0]
        trans = (0, trans[0]) if len(trans) == 1 else tuple(trans)
        if from_registers:
            a = "[" + ", ".join(self.array(o, "u4") for o in a.items) + "]"
        else:
            a = self.integer(a, 64)
        dtype = "f4" if what[1] == "f32" else "u4"
        deferred = all(o.name in self.carried for o in d.items)  # others, of integer type, show their result at once
        given = ", ".join(self.array(o, dtype) for o in d.items)
        name = self.constant("W_" + "_".join(map(str, what)), what)
        self.out(
            f"t = S.warpgroups.multiply({name}, [{given}], {a}, {self.integer(b, 64)}, "
            f"{self.predicate(accumulates)}, {signs}, {trans}, {deferred}, {tail}, {i.line})"
        )
        for k, o in enumerate(d.items):
            self.set_array(o, f"t[{k}]", dtype)

    def check_landed(self, i):
        """Before an ordinary instruction: no register that it reads may be one that a wgmma still writes."""
        if i.parts[0] == "wgmma" or (i.parts[0] == "mov" and carries(i, self.kinds)):
            return
        for name in sorted(sources(i) & self.carried):
            self.out(f"S.warpgroups.landed({self.local(name)}, {self.mask_text()}, {i.line})")

    # The rest.

    def do_elect(self, number, i):
        d, members = i.operands
        self.members_now(i, members)
        self.out(f"t, u = S.elect({self.integer(members, 32)}, {self.mask_text()})")
        if isinstance(d, Pair):
            if d.first.name != "_":
                self.set_array(d.first, "t", "u4", self.guard)
            d = d.second
        self.set_array(d, "u", bool, self.guard)

    def do_mapa(self, number, i):
        """The address of a place in the shared memory of a block of the cluster."""
        d, a, rank = i.operands
        width = int(i.parts[-1][1:])
        given = f"{self.integer(a, width)}, {self.integer(rank, 32)}, {width}"
        self.set(d, f"S.mapa({given}, {self.mask_text()}, {i.line})", self.guard)


def carries(i, kinds):
    """Is it a plain move of a float from register to register?"""
    d, s = i.operands
    return isinstance(d, Reg) and isinstance(s, Reg) and kinds.get(d.name) == kinds.get(s.name) == "f32"


def carried_registers(code, kinds):
    """The float registers that a wgmma writes, and those that moves take its results to."""
    found = {
        o.name for i in code if i.parts[:2] == ("wgmma", "mma_async") and isinstance(i.operands[0], Vec)
        for o in i.operands[0].items if kinds.get(o.name) == "f32"
    }  # fmt: skip
    moves = [i for i in code if i.parts[0] == "mov" and carries(i, kinds)] if found else []
    before = -1
    while before != len(found):
        before = len(found)
        found |= {i.operands[0].name for i in moves if i.operands[1].name in found}
    return found
