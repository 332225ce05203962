"""Moves, integers and predicates -> lines of Python. What is not here is arithmetic's, on whole arrays."""

from simt import arithmetic
from simt.memory.spaces import LOCAL_WINDOW, SHARED_WINDOW
from simt.ptx.reader import SIZES, Pair, Reg, Vec
from simt.ptx.types import DTYPES, INTEGER_TYPES

UNSIGNED_COMPARE = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


class Arithmetic:
    """The part of the Translator that needs no memory and no other lane."""

    def integer_operation(self, i, function, width, extra="", count=None):
        operands = i.operands[1:] if count is None else i.operands[1 : 1 + count]
        given = ", ".join(self.integer(o, width) for o in operands)
        self.set(i.operands[0], f"{function}({given}, {width}{extra})", self.guard)

    def do_mov(self, number, i):
        d, s = i.operands
        if isinstance(d, Vec) or isinstance(s, Vec):
            return self.move_parts(d, s)
        kind = self.kinds[d.name]
        if kind == "pred":
            self.set(d, self.predicate(s), self.guard)
        elif kind in ("f32", "f64"):
            self.set(d, self.array(s, DTYPES[kind]), self.guard)
        else:
            self.set(d, self.integer(s, 8 * SIZES[kind]), self.guard)

    def move_parts(self, d, s):
        """mov.b32 %r, {%rs1, %rs2} and back; b64 likewise."""
        if isinstance(s, Vec):
            size = SIZES[self.kinds[d.name]]
            part = size // len(s.items)
            given = ", ".join(self.array(o, f"u{part}") for o in s.items)
            self.set_array(d, f"join_parts(u{size}, {given})", f"u{size}", self.guard)
            return
        size = SIZES[self.kinds[s.name]] if isinstance(s, Reg) else 4
        part = size // len(d.items)
        self.out(f"t = split_parts({self.array(s, f'u{size}')}, u{part})")
        for k, o in enumerate(d.items):
            if o.name != "_":
                self.set_array(o, f"t[{k}]", f"u{part}", self.guard)

    def do_cvta(self, number, i):
        d, s = i.operands
        to, space = "to" in i.parts, i.parts[-2]
        base = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space, 0)
        text = self.integer(s, 64)
        if base:
            text = f"{'subtract' if to else 'add'}({text}, {base}, 64)"
        self.set(d, text, self.guard)

    def do_cvt(self, number, i):
        a, b = i.parts[-2], i.parts[-1]
        if len(i.parts) != 3 or a not in INTEGER_TYPES or b not in INTEGER_TYPES:
            return False
        to, own = int(a[1:]), int(b[1:])
        register = 8 * SIZES[self.kinds[i.operands[0].name]]
        text = f"convert({self.integer(i.operands[1], own)}, {own}, {to}, {b[0] == 's'})"
        if register != to:
            text = f"convert({text}, {to}, {register}, {a[0] == 's'})"
        self.set(i.operands[0], text, self.guard)

    def plain_integer(self, i, parts):
        """The width of a plain integer instruction like add.s32, or None."""
        return int(i.parts[-1][1:]) if i.parts[-1] in INTEGER_TYPES and len(i.parts) == parts else None

    def do_add(self, number, i):
        width = self.plain_integer(i, 2)
        return self.integer_operation(i, "add", width) if width else False

    def do_sub(self, number, i):
        width = self.plain_integer(i, 2)
        return self.integer_operation(i, "subtract", width) if width else False

    def do_mul(self, number, i):
        width = self.plain_integer(i, 3)
        if width and i.parts[1] == "lo":
            return self.integer_operation(i, "multiply", width)
        if width and i.parts[1] == "wide":
            return self.integer_operation(i, "multiply_wide", width, f", {i.parts[2][0] == 's'}")
        return False

    def do_mad(self, number, i):
        width = self.plain_integer(i, 3)
        if width and i.parts[1] == "lo":
            return self.integer_operation(i, "multiply_add", width)
        if width and i.parts[1] == "wide":
            a, b, c = i.operands[1:]
            product = (
                f"multiply_wide({self.integer(a, width)}, {self.integer(b, width)}, {width}, {i.parts[2][0] == 's'})"
            )
            self.set(i.operands[0], f"add({product}, {self.integer(c, 2 * width)}, {2 * width})", self.guard)
            return None
        return False

    def do_shl(self, number, i):
        width = self.plain_integer(i, 2)
        d, a, n = i.operands
        self.set(d, f"shift_left({self.integer(a, width)}, {self.integer(n, 32)}, {width})", self.guard)

    def do_shr(self, number, i):
        width = self.plain_integer(i, 2)
        d, a, n = i.operands
        signed = i.parts[-1][0] == "s"
        text = f"shift_right({self.integer(a, width)}, {self.integer(n, 32)}, {width}, {signed})"
        self.set(d, text, self.guard)

    def logic(self, i, function, predicates):
        if i.parts[-1] == "pred":
            self.set(i.operands[0], f"{predicates}({', '.join(map(self.predicate, i.operands[1:]))})", self.guard)
            return None
        width = self.plain_integer(i, 2)
        return self.integer_operation(i, function, width)

    def do_and(self, number, i):
        return self.logic(i, "bit_and", "p_and")

    def do_or(self, number, i):
        return self.logic(i, "bit_or", "p_or")

    def do_xor(self, number, i):
        return self.logic(i, "bit_xor", "p_xor")

    def do_not(self, number, i):
        return self.logic(i, "bit_not", "p_not")

    def quotient(self, i, function):
        width = self.plain_integer(i, 2)
        if not width:
            return False
        general = arithmetic.find(i.opcode)
        signed = i.parts[-1][0] == "s"
        kind = general.sources[0].char
        name = self.constant(f"Q_{'_'.join(i.parts)}", general.function)
        how = f"lambda x, y: {name}(x.view({kind}_), y.view({kind}_)).view(u{width // 8})"
        return self.integer_operation(i, function, width, f", {signed}, {how}")

    def do_div(self, number, i):
        return self.quotient(i, "divide")

    def do_rem(self, number, i):
        return self.quotient(i, "remainder")

    def do_setp(self, number, i):
        kind = i.parts[-1]
        if kind not in INTEGER_TYPES:
            return False
        operation, combine = i.parts[1], i.parts[2] if len(i.parts) == 4 else None
        signed = kind[0] == "s" and operation not in UNSIGNED_COMPARE
        operation = UNSIGNED_COMPARE.get(operation, operation)
        width = int(kind[1:])
        a, b = (self.integer(o, width) for o in i.operands[1:3])
        text = f"compare({operation!r}, {a}, {b}, {width}, {signed})"
        d = i.operands[0]
        if combine:
            c = self.predicate(i.operands[3])
            if isinstance(d, Pair):
                self.out(f"t = {text}")
                self.set(d.first, f"p_{combine}(t, {c})", self.guard)
                self.set(d.second, f"p_{combine}(p_not(t), {c})", self.guard)
                return None
            text = f"p_{combine}({text}, {c})"
        if isinstance(d, Pair):
            self.out(f"t = {text}")
            self.set(d.first, "t", self.guard)
            self.set(d.second, "p_not(t)", self.guard)
        else:
            self.set(d, text, self.guard)
        return None

    def do_selp(self, number, i):
        d, a, b, p = i.operands
        kind = self.kinds[d.name]
        if kind in ("f32", "f64"):
            a, b = self.array(a, DTYPES[kind]), self.array(b, DTYPES[kind])
        else:
            a, b = self.integer(a, 8 * SIZES[kind]), self.integer(b, 8 * SIZES[kind])
        self.set(d, f"merge_{self.family(d.name)}({b}, {a}, {self.predicate(p)})", self.guard)
