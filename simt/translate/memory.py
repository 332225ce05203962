"""Loads, stores, atomics and asynchronous copies -> lines of Python that call simt/memory/accesses.py."""

import numpy as np

from simt import arithmetic
from simt.errors import Unsupported
from simt.memory.spaces import LOCAL_WINDOW, SHARED_WINDOW
from simt.ptx.blocks import destinations, parameter_registers, registers
from simt.ptx.reader import SIZES, Reg, Sym, Vec
from simt.ptx.types import DTYPES


class Counter:
    """What a memory instruction has cost so far."""

    __slots__ = ("line", "kind", "uniform", "joined", "requests", "sectors", "ideal", "shared", "copy", "number")

    def __init__(self, number, line, kind, uniform=False, joined=0, shared=False, copy=False):
        self.number, self.line, self.kind, self.uniform, self.joined = number, line, kind, uniform, joined
        self.shared, self.copy = shared, copy
        self.requests = self.sectors = self.ideal = 0


class MemoryAccess:
    """The part of the Translator for instructions with an address."""

    def counter(self, number, i, kind, **facts):
        self.counters.setdefault(number, Counter(number, i.line, kind, **facts))
        return number

    def memory_operand(self, m):
        """(address expression, constant offset)"""
        if m.base is None:
            return "0", m.offset
        if isinstance(m.base, Sym):
            return str(self.address_of(m.base.name)), m.offset
        kind = self.kinds[m.base.name]
        return self.integer(m.base, 8 * SIZES[kind]), m.offset

    def space(self, i):
        for name in ("global", "shared", "local", "const"):
            if any(p == name or p.startswith(name + "__") for p in i.parts):
                return "global" if name == "const" else name
        return "generic"

    def do_ld(self, number, i):
        if "param" in i.parts:
            return self.load_parameter(i)
        d, m = i.operands[:2]
        kind = i.parts[-1]
        dtype = DTYPES.get(kind)
        if dtype is None:
            raise Unsupported(str(i), "", i.line)
        items = d.items if isinstance(d, Vec) else (d,)
        space = self.space(i)
        address, offset = self.memory_operand(m)
        leader = self.joins.get(number)
        counted = None if space == "local" or "const" in i.parts else "ld"
        joined = 0
        if leader is not None:
            joined = leader[1]
            counted = counted if leader[0] == number else None
        self.counter(number, i, counted, joined=joined, shared=space == "shared")
        name = self.constant("D_" + dtype.char, dtype)
        target = f"S.memory.load({number}, {space!r}, {address}, {offset}, {name}, {len(items)}, {self.mask_text()})"
        if len(items) == 1:
            self.set_array(items[0], target, dtype)
        else:
            self.out(f"t = {target}")
            for k, o in enumerate(items):
                if o.name != "_":
                    self.set_array(o, f"t[{k}]", dtype)
        return None

    def load_parameter(self, i):
        d, m = i.operands
        kind = i.parts[-1]
        passed = parameter_registers(i)
        items = d.items if isinstance(d, Vec) else (d,)
        dtype = DTYPES[kind]
        for k, o in enumerate(items):
            if passed[k][0] in self.passed:
                source, own = self.local(passed[k][0]), self.kinds[passed[k][0]]
                if own in ("f32", "f64"):
                    self.set_array(o, source, DTYPES[own])
                else:
                    self.set_array(o, f"unpack({source}, {8 * SIZES[own]})", f"u{SIZES[own]}")
                continue
            if not isinstance(m.base, Sym):
                raise Unsupported(str(i), "a parameter addressed by a register", i.line)
            key = (m.base.name, m.offset + k * dtype.itemsize, dtype.str)
            if key not in self.parameters:
                self.parameters[key] = len(self.parameter_reads)
                self.parameter_reads.append(key)
            at = self.parameters[key]
            if dtype.kind == "f":
                self.set_array(o, f"S.parameters[{at}]", dtype)
            elif dtype.kind == "u" and SIZES[self.kinds[o.name]] == dtype.itemsize:
                self.set(o, f"S.parameters[{at}]")
            else:
                text = f"unpack(S.parameters[{at}], {8 * dtype.itemsize}).view({dtype.char}_)"
                self.set_array(o, text, dtype)
        return None

    def do_st(self, number, i):
        if "param" in i.parts:
            m, s = i.operands
            items = s.items if isinstance(s, Vec) else (s,)
            for (name, kind), o in zip(parameter_registers(i), items):
                if kind in ("f32", "f64"):
                    self.set(Reg(name), self.array(o, DTYPES[kind]))
                else:
                    self.set(Reg(name), self.integer(o, 8 * SIZES[kind]))
            return None
        m, s = i.operands[:2]
        dtype = DTYPES.get(i.parts[-1])
        if dtype is None:
            raise Unsupported(str(i), "", i.line)
        dtype = np.dtype(f"u{dtype.itemsize}") if dtype.kind == "i" else dtype
        items = s.items if isinstance(s, Vec) else (s,)
        space = self.space(i)
        address, offset = self.memory_operand(m)
        name = self.constant("D_" + dtype.char, dtype)
        values = ", ".join(self.array(o, dtype) for o in items)
        if "shared__cluster" in i.parts:
            where = f"({space!r}, {address}, {offset})"
            self.out(f"S.store_in_cluster({where}, [{values}], {name}, {self.mask_text()}, {i.line})")
            return None
        leader = self.joins.get(number)
        counted, joined = (None if space == "local" else "st"), 0
        if leader is not None:
            joined = leader[1]
            counted = counted if leader[0] == number else None
        self.counter(number, i, counted, joined=joined, shared=space == "shared")
        self.out(f"S.memory.store({number}, {space!r}, {address}, {offset}, [{values}], {name}, {self.mask_text()})")
        return None

    def do_atom(self, number, i):
        d, m, *values = i.operands
        wanted = any(o.name != "_" and o.name in self.flow.used for o in (d.items if isinstance(d, Vec) else (d,)))
        self.atomic(number, i, d if wanted else None, m, values)

    def do_red(self, number, i):
        m, *values = i.operands
        self.atomic(number, i, None, m, values)

    def atomic(self, number, i, d, m, values):
        space = self.space(i)
        names = [p for p in i.parts if p in ATOMICS]
        kind = i.parts[-1]
        if not names or kind == "b128" or (len(values) > 1 and names[0] != "cas"):
            raise Unsupported(str(i), "", i.line)
        dtype = DTYPES["f16x2" if kind in ("f16x2", "bf16x2") else kind]
        packed = kind in ("f16", "bf16", "f16x2", "bf16x2")
        if packed:
            found = arithmetic.find(f"{names[0]}.{kind}")
            if found is None:
                raise Unsupported(str(i), "", i.line)
            update = as_bits(found)
        else:
            update = ATOMICS[names[0]]
        address, offset = self.memory_operand(m)
        uniform = isinstance(m.base, Sym) or m.base.name in self.uniform
        combined = uniform and kind in ("u32", "s32", "b32") and names[0] not in ("cas", "exch", "inc", "dec")
        red = d is None and kind not in ("f16x2", "bf16x2", "f16", "bf16") or i.parts[0] == "red"
        self.counter(number, i, "red" if red else "atom", uniform=combined, shared=space == "shared")
        name = self.constant("D_" + dtype.char, dtype)
        function = self.constant(f"A_{names[0]}_{kind}", update)
        vector = isinstance(values[0], Vec)
        given = ", ".join(self.array(v, dtype) for v in (values[0].items if vector else values))
        call = (
            f"S.memory.atomic{'s' if vector else ''}({number}, {space!r}, {address}, {offset}, {name}, {function}, "
            f"[{given}], {self.mask_text()}, {d is not None})"
        )
        if vector and d is not None:
            self.out(f"t = {call}")
            for k, o in enumerate(d.items):
                self.set_array(o, f"t[{k}]", dtype)
            return
        if d is None:
            self.out(call)
        else:
            self.set_array(d, call, dtype)

    def do_cp(self, number, i):
        if "bulk" in i.parts:
            return self.bulk(number, i)
        if i.parts[1] != "async":
            raise Unsupported(str(i), "", i.line)
        mask = self.mask_text()
        if "mbarrier" in i.parts:
            where = self.where(i.operands[0], self.space(i))
            self.out(f"S.barriers.promise({where}, {'noinc' in i.parts}, {mask}, {i.line})")
            return
        if "commit_group" in i.parts:
            self.out(f"S.memory.commit({mask})")
        elif "wait_group" in i.parts:
            self.out(f"S.memory.wait({self.integer(i.operands[0], 32)}, {mask})")
        elif "wait_all" in i.parts:
            self.out(f"S.memory.commit({mask})")
            self.out(f"S.memory.wait(0, {mask})")
        else:
            target, source, size, *rest = i.operands
            given = "None"
            if len(rest) > any("cache_hint" in p for p in i.parts):  # a policy stands last
                given = self.integer(rest[0], 32)
            a, x = self.memory_operand(target)
            b, y = self.memory_operand(source)
            self.counter(number, i, "ld", copy=True)
            self.out(f"S.memory.copy({number}, {a}, {x}, {b}, {y}, {size.bits}, {given}, {mask})")
        return None

    def do_createpolicy(self, number, i):
        self.set(i.operands[0], "0", self.guard)

    def do_isspacep(self, number, i):
        space = i.parts[-1]
        low = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space, 0)
        high = {"shared": LOCAL_WINDOW, "local": 1 << 62}.get(space, SHARED_WINDOW)
        a = self.integer(i.operands[1], 64)
        self.out(f"t = {a}")
        text = f"p_and(compare('ge', t, {low}, 64, False), compare('lt', t, {high}, 64, False))"
        self.set(i.operands[0], text, self.guard)


def passed_registers(code):
    """Under which names values travel to and from functions that have been inlined."""
    writers = [i for i in code if i.parts[:2] == ("st", "param") or i.parts[0] == "call"]
    return set().union(*map(destinations, writers))


def uniform_registers(code):
    """Registers whose value the compiler can see to be the same in all threads of a block."""
    every, varying, users = set(), set(), {}  # users: register -> what is computed from it
    for i in code:
        found = destinations(i)
        every |= found
        if not found or i.parts[:2] == ("ld", "param"):
            continue
        reads = set().union(*map(registers, i.operands[1:]))
        special = any(r.startswith(("%tid", "%laneid", "%warpid", "%lanemask", "%clock")) for r in reads)
        if special or i.guard or i.parts[0] in ("ld", "atom", "shfl", "cp"):
            varying |= found
        for name in reads:
            users.setdefault(name, []).append(found)
    new = list(varying)
    while new:
        for found in users.pop(new.pop(), ()):
            new += found - varying
            varying |= found
    return every - varying


# Atomic operations: old value and operand -> new value.


def increment(old, limit):
    return np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1))


def decrement(old, limit):
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


ATOMICS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, new: new,
    "cas": lambda old, expected, new: np.where(old == expected, new, old),
    "inc": increment,
    "dec": decrement,
}


def as_bits(operation):
    """An operation on halves, on their bits."""

    def update(old, value):
        a, b = operation.sources[:2]
        out = operation.function(old.view(a), value.view(b))
        return np.asarray(out).view(old.dtype)

    return update
