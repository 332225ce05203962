"""mul and add, or mul and sub, as one fused multiply-add, where the last compiler step fuses them.

NVRTC fuses most products with the sum that follows (fma.rn.f32) unless it is told -fmad=false, and then marks every
product with .rn. What it leaves as a plain mul.f32 and sub.f32, the step from PTX to machine code fuses: one rounding
instead of two. So does this pass, for a product that nothing but sums in its own basic block use.
"""

from collections import Counter
from dataclasses import replace

from simt.ptx.reader import Instruction, Reg

PRODUCTS = {"mul.f32", "mul.ftz.f32", "mul.f64"}
SUMS = {"add", "sub"}


def contract(function, sources, destinations, ends):
    """The function with such pairs replaced. `ends` are the opcodes that end a basic block."""
    code = function.instructions
    if not any(i.opcode in PRODUCTS for i in code):
        return function
    uses = Counter(name for i in code for name in sources(i))
    defined = Counter(name for i in code for name in destinations(i))
    starts, products, pairs = set(function.labels.values()), {}, []  # pairs: (sum, which operand, product)
    for n, i in enumerate(code):
        if n in starts:
            products.clear()
        if i.parts[0] in SUMS and i.guard is None:
            for place in (1, 2):
                at = products.get(getattr(i.operands[place], "name", None))
                if at is not None and code[at].opcode.split(".", 1)[1] == i.opcode.split(".", 1)[1]:
                    pairs.append((n, place, at))
        changed = destinations(i)
        products = {d: at for d, at in products.items() if not changed & ({d} | sources(code[at]))}
        if i.opcode in PRODUCTS and i.guard is None and defined[i.operands[0].name] == 1:
            products[i.operands[0].name] = n
        if i.parts[0] in ends:
            products.clear()
    met = Counter(at for _, _, at in pairs)
    replaced = {}
    for n, place, at in pairs:
        if met[at] == uses[code[at].operands[0].name]:
            replaced.setdefault(n, (at, place))
    kept = {at for n, _, at in pairs if n in replaced and replaced[n][0] != at}  # the other product of a sum of two
    replaced = {n: (at, place) for n, (at, place) in replaced.items() if at not in kept}
    if not replaced:
        return function
    gone = {at for at, _ in replaced.values()}
    moved, out, registers = {}, [], dict(function.registers)
    for n, i in enumerate(code):
        moved[n] = len(out)
        if n in gone:
            continue
        if n not in replaced:
            out.append(i)
            continue
        at, place = replaced[n]
        a, b = code[at].operands[1:]
        other = i.operands[3 - place]
        kind = i.opcode.split(".", 1)[1]
        if i.parts[0] == "sub":  # a*b - c = fma(a, b, -c);   c - a*b = fma(-a, b, c)
            negative = Reg(f"{i.operands[0].name}.neg{n}")
            registers[negative.name] = i.parts[-1]
            out.append(Instruction(f"neg.{kind}", (negative, other if place == 1 else a), None, i.line))
            a, other = (a, negative) if place == 1 else (negative, other)
        out.append(Instruction(f"fma.rn.{kind}", (i.operands[0], a, b, other), None, i.line))
    moved[len(code)] = len(out)
    labels = {name: moved[n] for name, n in function.labels.items()}
    return replace(function, instructions=out, labels=labels, registers=registers)
