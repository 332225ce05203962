"""Marks of registers that may be unset -> lines of Python (see simt/ptx/unset.py)."""

from simt.ptx.blocks import destinations, parameter_registers, sources
from simt.ptx.reader import Not, Pair, Reg, Vec
from simt.ptx.unset import COPIED, is_final, mark_of, must_be_set, names_nan, passing, plain

PAIRS = ("f16x2", "bf16x2")


class Unset:
    """The part of the Translator that watches registers that may be unset."""

    def watch(self, number, i):
        """Before an instruction: what it must not find unset, and the marks of its results."""
        may = self.flow.unset.before.get(number, set())
        mask = "M" if self.masked_form else "None"
        guard = "None" if i.guard is None else self.local(i.guard[0])
        if i.guard is not None and not i.guard[1]:
            guard = f"p_not({guard})"
        decides = set() if i.guard is None else {i.guard[0]}
        self.need(number, decides & may, mask, "None")
        self.need(number, must_be_set(i, sources) & may - decides, mask, guard)
        if i.parts[:2] == ("wgmma", "mma_async"):
            self.need(number, plain(i.operands[0]) & may, mask, self.predicate(i.operands[3]))
        for name, text in self.new_marks(number, i, may):
            if name in self.flow.unset.marked:
                local = self.mark(name)
                self.out(f"{local} = {text if i.guard is None else f'merge_mark({local}, {text}, {guard})'}")

    def need(self, number, names, mask, guard):
        if names:
            marks = ", ".join(self.mark(name) for name in sorted(names))
            self.out(f"S.check_set({number}, {mask}, {guard}, {marks})")

    def mark(self, name):
        return self.local(mark_of(name))

    def mark_if(self, name, may):
        return self.mark(name) if name in may else "0"

    def new_marks(self, number, i, may):
        """[(register, its mark as an expression)] of all that an instruction sets."""
        op = i.parts[0]
        results = sorted(destinations(i))
        passes = sorted(passing(i, sources) & may)
        nan = number in self.flow.unset.before and names_nan(i)
        if not (passes or nan) or is_final(i):
            return [(name, "0") for name in results]
        if i.parts[:2] == ("st", "param"):
            return self.parts_of_call(i, i.operands[1], may, to_call=True)
        if i.parts[:2] == ("ld", "param"):
            return self.parts_of_call(i, i.operands[0], may, to_call=False)
        marks = [self.mark(name) for name in passes] + [str(COPIED)] * nan
        if op == "mov" and isinstance(i.operands[1], Vec):
            parts = [self.mark_if(o.name, may) if isinstance(o, Reg) else "0" for o in i.operands[1].items]
            text = f"packed({', '.join(parts)})"
        elif op == "mov" and isinstance(i.operands[0], Vec):
            items = i.operands[0].items
            return [(o.name, f"part({marks[0]}, {n}, {len(items)})") for n, o in enumerate(items)]
        elif op in ("mov", "cvta") and len(marks) == 1:
            text = marks[0]
        elif op == "cvt" and i.parts[-2] in PAIRS and len(i.operands) == 3:  # the second is the lower half
            a, b = (f"computed({number}, {self.mark_if(getattr(o, 'name', ''), may)})" for o in i.operands[1:])
            text = f"packed({b}, {a})"
        elif i.parts[-1] in PAIRS and op not in ("setp", "cvt"):
            text = f"computed_in_parts({number}, {', '.join(marks)})"
        elif op == "selp" and not nan:
            a, b = (self.mark_if(o.name, may) if isinstance(o, Reg) else "0" for o in i.operands[1:3])
            text = f"merge_mark({b}, {a}, {self.predicate(i.operands[3])})"
            if plain(i.operands[3]) & may:
                text = f"computed({number}, {text}, {self.mark(i.operands[3].name)})"
        elif op == "shfl":
            b, c = (self.array(o, "u4") for o in i.operands[2:4])
            text = f"computed({number}, shuffled({i.parts[2]!r}, {marks[0]}, {b}, {c}))"
            first = i.operands[0].first if isinstance(i.operands[0], Pair) else i.operands[0]
            return [(name, text if name == first.name else "0") for name in results]
        elif op in ("and", "or") and i.parts[-1] == "pred":
            given = i.operands[1:]
            values = ", ".join(self.predicate(o) for o in given)
            names = [o.reg.name if isinstance(o, Not) else getattr(o, "name", "") for o in given]
            text = f"decided({number}, {op == 'or'}, {values}, {', '.join(self.mark_if(n, may) for n in names)})"
        else:
            text = f"computed({number}, {', '.join(marks)})"
        return [(name, text) for name in results]

    def parts_of_call(self, i, operand, may, to_call):
        """Values that travel to or from a function that has been inlined."""
        items = operand.items if isinstance(operand, Vec) else (operand,)
        found = []
        for (name, _), o in zip(parameter_registers(i), items):
            own = o.name if isinstance(o, Reg) else ""
            to, of = (name, own) if to_call else (own, name)
            found.append((to, self.mark_if(of, may)))
        return found
