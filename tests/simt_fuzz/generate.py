"""generate(seed) -> Launch: a random kernel without undefined behaviour, the same on every machine.

    cd tests && python -m simt_fuzz.generate 17        prints the kernel of seed 17 and its launch

A kernel loads a few variables of several types, changes them by 10 to 40 statements, and stores the bits of each.
Each has its own choice of types, of families of expressions (expressions.py) and of kinds of statements (the methods
alone_... and block_...). How it stays defined: indexes are masked to their buffer; a thread writes only its own
elements, or a barrier stands between; barriers and shuffles are where all threads of the block come; many threads meet
in one word only by atomics whose order does not matter. An edit that changes a kernel asks for a new measurement.
"""

import random
import re
import sys

import numpy as np
from simt_truth import Launch

from simt_fuzz.buffers import INPUTS, LOADS, OUTPUTS, SCALARS, SIZE, WORDS
from simt_fuzz.expressions import CONTRACTED_PRODUCTS, CTYPES, FAMILIES, PLAIN_PRODUCTS
from simt_fuzz.helpers import BITS, HELPERS

POISON = 0xABABABAB  # what `out` holds where nothing is written
BLOCKS = [
    1,
    5,
    16,
    31,
    32,
    33,
    64,
    64,
    96,
    96,
    100,
    128,
    130,
    192,
    256,
    (16, 8),
    (8, 4),
    (33, 3),
    (32, 4),
    (4, 4, 4),
    (5, 7),
]
GRIDS = [1, 2, 2, 3, (2, 2), (3, 1, 2)]


class Dice:
    """Random choices, by random.Random.random alone: the one method whose numbers Python promises to keep."""

    def __init__(self, seed):
        self.random = random.Random(seed).random

    def below(self, n):
        return int(self.random() * n)

    def chance(self, p):
        return self.random() < p

    def pick(self, items):
        return items[self.below(len(items))]

    def some(self, items, least, most):
        """Between `least` and `most` different items, in their own order."""
        left = list(range(len(items)))
        chosen = [left.pop(self.below(len(left))) for _ in range(min(len(items), least + self.below(most - least + 1)))]
        return [items[i] for i in sorted(chosen)]


MET = ["Add", "Min", "Max", "And", "Or", "Xor", "Exch", "Inc"]  # a region of 32 words of `met` for each


class Kernel:
    """One kernel while it is written."""

    def __init__(self, seed):
        self.dice = dice = Dice(seed)
        self.block = dice.pick(BLOCKS)
        self.threads = int(np.prod(self.block))
        fits = [g for g in GRIDS if np.prod(g) * self.threads <= 512]
        self.grid = dice.pick(fits)
        self.total = int(np.prod(self.grid)) * self.threads
        self.contract = dice.chance(0.2)
        self.types = "ui" + "".join(dice.some("qlfdhpb", 1, 4))
        if dice.chance(0.5) and "f" not in self.types:
            self.types += "f"
        needed = {"half": "h", "half2": "hp", "bfloat16": "b", "double": "d", "wide": "ql"}
        always = ["integer", "logic"] + [f for f, t in needed.items() if set(t) & set(self.types)]
        rest = [f for f in FAMILIES if f not in always and f not in needed]
        families = always + dice.some(rest, 3, 7)
        if "f" in self.types and "float" not in families:
            families.append("float")
        self.table = {t: [] for t in [*self.types, "c"]}
        allowed = set(self.types) | set("ckmn")
        for family in families:
            for kind, templates in FAMILIES[family].items():
                lines = [t for t in templates if set(re.findall(r"\{(\w)\}", t)) <= allowed]
                if kind in self.table and lines:
                    self.table[kind].append(lines)
        for kind, templates in (CONTRACTED_PRODUCTS if self.contract else PLAIN_PRODUCTS).items():
            if kind in self.table:
                self.table[kind].append(templates)
        self.plain = dice.some([s for s in vars(Kernel) if s.startswith("alone_")], 5, 8)
        self.joint = dice.some([s for s in vars(Kernel) if s.startswith("block_")], 3, 7)
        self.variables = {t: [f"{t}{k}" for k in range(3 if t in "uif" else 2)] for t in self.types}
        self.tables, self.shared, self.names = [], 0, 0
        self.full = "0xffffffffu" if self.threads % 32 == 0 else "live"
        self.present = "32u" if self.threads % 32 == 0 else "present"

    # ---- expressions ----

    def leaf(self, kind):
        dice = self.dice
        if kind == "c":
            return f"({self.leaf('u')} < {self.leaf('u')})"
        if kind == "u" and dice.chance(0.25):
            return dice.pick(
                ["tid", "g", "lane", "word", f"{dice.pick(WORDS[1:])}u", f"{dice.below(1 << 32)}u", "(unsigned)n"]
            )
        if kind == "i" and dice.chance(0.2):
            return dice.pick(
                ["n", f"({dice.below(2000) - 1000})", "(-2147483647 - 1)", "0x7fffffff", "(int)threadIdx.x"]
            )
        if kind == "f" and dice.chance(0.25):
            return dice.pick(["real", "1.7f", "(-0.3f)", "1027.1f", "0.003f"])
        if kind == "l" and dice.chance(0.2):
            return "offset"
        if kind == "d" and dice.chance(0.2):
            return dice.pick(["scale", "0.1", "(-3.7)"])
        return dice.pick(self.variables[kind])

    def expression(self, kind, depth=2):
        if depth == 0 or self.dice.chance(0.15):
            return self.leaf(kind)
        families = self.table[kind]
        template = self.dice.pick(self.dice.pick(families)) if families else self.leaf(kind)
        return re.sub(r"\{(\w)\}", lambda hole: self.hole(hole[1], depth - 1), template)

    def hole(self, kind, depth):
        if kind == "k":
            return str(1 + self.dice.below(31))
        if kind == "m":
            return f"{hex((1 << 1 + self.dice.below(16)) - 1)}u"
        if kind == "n":
            return str(3 + 2 * self.dice.below(700))
        return self.expression(kind, depth)

    def name(self, prefix="t"):
        self.names += 1
        return f"{prefix}{self.names}_"

    def kind(self, among=None):
        return self.dice.pick([t for t in self.types if among is None or t in among])

    def target(self, kind):
        return self.dice.pick(self.variables[kind])

    def index(self, size, depth=1):
        return f"({self.expression('u', depth)} & {size - 1}u)"

    def mix(self, value):
        """Lines that bring an unsigned value into a variable."""
        return [f"{self.target('u')} {self.dice.pick(['=', '+=', '^='])} {value};"]

    # ---- statements that a thread can do alone ----

    def alone_assign(self, level):
        kind = self.kind()
        return [f"{self.target(kind)} = {self.expression(kind, 3)};"]

    def alone_assign_more(self, level):
        return self.alone_assign(level) + self.alone_assign(level)

    def alone_update(self, level):
        return [f"{self.target('u')} {self.dice.pick(['+=', '-=', '*=', '^=', '|=', '&='])} {self.expression('u')};"]

    def alone_if(self, level):
        lines = [f"if ({self.expression('c')}) {{", *self.inside(level), "}"]
        if self.dice.chance(0.4):
            lines[-1:] = [f"}} else if ({self.expression('c')}) {{", *self.inside(level), "}"]
        if self.dice.chance(0.6):
            lines[-1:] = ["} else {", *self.inside(level), "}"]
        return lines

    def alone_short_circuit(self, level):
        u, join = self.target("u"), self.dice.pick(["&&", "||"])
        first, second = self.expression("c", 1), self.expression("u", 1)
        return [f"if ({first} {join} ({u} = {second}, {self.expression('c', 1)})) {{", *self.inside(level), "}"]

    def alone_while(self, level):
        t = self.name()
        lines = [f"unsigned {t} = {self.expression('u', 1)} & {self.dice.pick([3, 7])}u;", f"while ({t}) {{", f"{t}--;"]
        if self.dice.chance(0.5):
            lines.append(f"if ({self.expression('c', 1)}) {self.dice.pick(['continue', 'break'])};")
        return [*lines, *self.inside(level), "}"]

    def alone_loop_out_of_the_middle(self, level):
        t = self.name()
        lines = [f"for (unsigned {t} = {self.expression('u', 1)} & 1u;; {t}++) {{", f"if ({t} > 4u) break;"]
        lines += [*self.inside(level), f"if ({self.expression('c', 1)}) break;"]
        return [*lines, *self.mix(t), "}"]

    def alone_do_while(self, level):
        t = self.name()
        head = [f"unsigned {t} = 0;", "do {", *self.inside(level)]
        return [*head, f"}} while (++{t} < 5u && {self.expression('c', 1)});"]

    def alone_for(self, level):
        t, bound = self.name(), self.dice.pick(["n", "4", "3", "n + 1"])
        pragma = (
            [self.dice.pick(["#pragma unroll", "#pragma unroll 1", "#pragma unroll 2"])]
            if self.dice.chance(0.6)
            else []
        )
        return [
            *pragma,
            f"for (int {t} = 0; {t} < {bound}; {t}++) {{",
            *self.mix(f"(unsigned){t}"),
            *self.inside(level),
            "}",
        ]

    def alone_switch(self, level):
        count = self.dice.pick([3, 5, 9])
        lines = [f"switch ({self.expression('u')} & {7 if count < 9 else 15}u) {{"]
        for case in range(count):
            end = [] if self.dice.chance(0.25) else ["break;"]  # or fall through
            lines += [
                f"case {case}:",
                f"{self.target('u')} ^= {1 + self.dice.below(99)}u;",
                *self.alone_assign(level),
                *end,
            ]
        return [*lines, "default:", *self.alone_assign(level), "}"]

    def alone_load(self, level):
        kind = self.kind()
        load = self.dice.pick(LOADS[kind]).replace("[I", f"[{self.index(SIZE)}")
        return [f"{self.target(kind)} = {load};"]

    def alone_load_more(self, level):
        return self.alone_load(level) + self.alone_load(level)

    def alone_own(self, level):
        """Store to an element of one's own and read back another one."""
        dice = self.dice
        which = dice.below(7)
        if which == 0:
            at, four = self.index(2), ", ".join(self.expression("u", 1) for _ in "xyzw")
            lines = [f"((uint4 *)own)[g * 2u + {at}] = make_uint4({four});"]
        elif which == 1:
            lines = [f"((unsigned char *)own)[g * 32u + {self.index(32)}] = (unsigned char){self.expression('u')};"]
        elif which == 2:
            lines = [f"own_shorts[g * 8u + {self.index(8)}] = (unsigned short){self.expression('u')};"]
            if dice.chance(0.5):
                four = ", ".join("(unsigned short)" + self.leaf("u") for _ in "xyzw")
                lines = [f"((ushort4 *)own_shorts)[g * 2u] = make_ushort4({four});"]
            lines += self.mix(f"own_shorts[g * 8u + {self.index(8)}]")
        elif which == 3 and "f" in self.types:
            lines = [f"own_floats[g * 4u + {self.index(4)}] = {self.leaf('f')};"]
            if dice.chance(0.5):
                at, two = self.index(2), f"{self.leaf('f')}, {self.expression('f')}"
                lines = [f"((float2 *)own_floats)[g * 2u + {at}] = make_float2({two});"]
            lines += [f"{self.target('f')} = own_floats[g * 4u + {self.index(4)}];"]
        elif which == 4 and "q" in self.types:
            lines = [f"own_wides[g * 2u + {self.index(2)}] = {self.expression('q')};"]
        elif which == 5:
            lines = [f"((volatile unsigned *)own)[g * 8u + {self.index(8)}] = {self.expression('u')};"]
        else:
            lines = [f"own[g * 8u + {self.index(8)}] {dice.pick(['=', '+=', '^='])} {self.expression('u')};"]
        return lines + self.mix(f"own[g * 8u + {self.index(8)}]")

    def alone_local_array(self, level):
        kind, size = self.kind("uifq"), self.dice.pick([4, 8, 16])
        a, t = self.name("a"), self.name()
        lines = [f"{CTYPES[kind]} {a}[{size}];", f"for (unsigned {t} = 0; {t} < {size}u; {t}++) {{"]
        lines += [f"{self.target('u')} += {t};", f"{a}[{t}] = {self.expression(kind, 1)};", "}"]
        for _ in range(1 + self.dice.below(2)):
            lines += [f"{a}[{self.index(size)}] = {self.expression(kind, 1)};"]
        return [*lines, f"{self.target(kind)} = {a}[{self.index(size)}];"]

    def alone_table(self, level):
        name, constant = self.name("table"), self.dice.chance(0.6)
        where = "__constant__" if constant else "__device__ const"
        values = ", ".join(f"{self.dice.below(1 << 32)}u" for _ in range(16))
        self.tables.append(f"{where} unsigned {name}[16] = {{{values}}};\n")
        return self.mix(f"{name}[{self.index(16)}]")

    def alone_helper(self, level):
        dice, u = self.dice, self.target("u")
        which = dice.below(6)
        if which == 0:
            return [f"{u} = fold<{2 + dice.below(5)}>({self.leaf('u')}, {self.expression('u', 1)});"]
        if which == 1:
            kind = self.kind("uifqld")
            one, two = self.variables[kind][:2]
            return [f"order({one}, {two});"]
        if which == 2:
            return self.mix(f"collatz({self.expression('u', 1)} & 1023u, 12u)")
        if which == 3:
            return self.mix(f"gcd({self.expression('u', 1)} & 255u, {self.leaf('u')} & 255u)")
        if which == 4 and "f" in self.types:
            c = self.name("c")
            values = ", ".join(self.leaf("f") for _ in range(4))
            return [f"const float {c}[4] = {{{values}}};", f"{self.target('f')} = horner({self.leaf('f')}, {c});"]
        f = self.name("f")
        return [
            f"auto {f} = [&](unsigned v) {{ return v * {self.leaf('u')} + {self.expression('u', 1)}; }};",
            *self.mix(f"{f}({f}({self.leaf('u')}))"),
        ]

    def alone_atomic(self, level):
        """Many threads meet in a word; nobody looks at what was there."""
        dice = self.dice
        which = dice.below(10)
        if which < 8:
            t = self.name()
            lines = [f"unsigned {t} = {self.index(32)} + {which * 32}u;"]
            value = self.expression("u")
            if which in (1, 2) and dice.chance(0.5):
                lines = [f"unsigned {t} = {self.index(16)} + {which * 32}u;"]  # signed and unsigned ones do not mix
                lines += [f"atomic{MET[which]}((int *)&met[{t}], {self.expression('i')});"]
            elif which in (1, 2):
                lines = [
                    f"unsigned {t} = {self.index(16)} + {which * 32 + 16}u;",
                    f"atomic{MET[which]}(&met[{t}], {value});",
                ]
            else:
                value = f"{t} * 77u + 5u" if which == 6 else "1000u" if which == 7 else value
                lines += [f"atomic{MET[which]}(&met[{t}], {value});"]
        elif which == 8:
            value = self.expression("q", 1) if "q" in self.types else f"(unsigned long long){self.expression('u')}"
            lines = [f"atomicAdd(&met_wides[{self.index(32)}], {value});"]
            if dice.chance(0.5):
                lines = [f"atomicMax(&met_wides[{self.index(32)} + 32u], {value});"]
        else:
            lines = [f"atomicAdd(&met_floats[{self.index(32)}], (float)({self.expression('u', 1)} & 15u));"]
        return [f"if ({self.expression('c', 1)}) {{", *lines, "}"] if dice.chance(0.4) else ["{", *lines, "}"]

    def alone_atomic_own(self, level):
        """An element of one's own, so what was there is always the same."""
        dice, at, value = self.dice, f"&own[g * 8u + {self.index(8)}]", self.expression("u")
        which = dice.below(11)
        if which == 9 and "q" in self.types:
            call = f"{self.target('q')} = atomic{dice.pick(['Add', 'Exch', 'Min', 'Or'])}"
            return [f"{call}(&own_wides[g * 2u], {self.expression('q')});"]
        if which == 10 and "f" in self.types:
            place = f"{self.target('f')} = atomicAdd(&own_floats[g * 4u + {self.index(4)}]"
            return [f"{place}, (float){self.expression('i', 1)});"]
        if which >= 8:
            return self.mix(f"atomicCAS({at}, {self.leaf('u')}, {value})")
        return self.mix(
            f"atomic{dice.pick(['Add', 'Sub', 'Min', 'Max', 'And', 'Or', 'Xor', 'Exch', 'Inc', 'Dec'])}({at}, {value})"
        )

    # ---- statements that all threads of the block do together ----

    def block_exchange(self, level):
        """Write shared memory, and read what another thread wrote."""
        dice, s, T = self.dice, self.name("s"), self.threads
        kind = self.kind("uiqlfdhb")
        sync, at = "__syncthreads();", f"{self.expression('u')} % {T}u"
        which = dice.below(7)
        if which == 0:
            lines = [
                f"__shared__ uint4 {s}[{T}];",
                f"{s}[tid] = make_uint4({', '.join(self.leaf('u') for _ in 'xyzw')});",
            ]
            return [*lines, sync, *self.mix(f"quad_sum({s}[{at}])"), *self.mix(f"{s}[{T - 1}u - tid].y"), sync]
        if which == 1:
            lines = [f"__shared__ unsigned {s}[{T}];", f"{s}[tid] = {self.expression('u')};", sync]
            return [*lines, *self.mix(f"((const unsigned char *){s})[{self.expression('u')} % {4 * T}u]"), sync]
        if which == 2:
            narrow = dice.pick(["unsigned char", "short", "unsigned short", "signed char"])
            lines = [f"__shared__ {narrow} {s}[{T}];", f"{s}[tid] = ({narrow}){self.expression('u')};", sync]
            return [*lines, *self.mix(f"(unsigned){s}[{at}]"), sync]
        if which == 3:
            rows, t = dice.pick([4, 8, 32]), self.name()
            pitch = -(-T // rows) + dice.below(2)
            lines = [f"__shared__ {CTYPES[kind]} {s}[{rows}][{pitch}];"]
            lines += [f"{s}[tid % {rows}u][tid / {rows}u] = {self.expression(kind)};", sync, f"unsigned {t} = {at};"]
            return [*lines, f"{self.target(kind)} = {s}[{t} % {rows}u][{t} / {rows}u];", sync]
        if which == 4 and not level:
            self.shared = 8 * T
            lines = [f"unsigned *{s} = dynamic + {T};", f"dynamic[tid] = {self.expression('u')};"]
            lines += [f"{s}[{T - 1}u - tid] = {self.leaf('u')};", sync]
            return [*lines, *self.mix(f"dynamic[{at}]"), *self.mix(f"{s}[{at}]"), sync]
        shift = f"(tid + {1 + dice.below(T)}u) % {T}u" if dice.chance(0.5) else at
        if dice.chance(0.3):
            shift = f"{T - 1}u - tid"
        lines = [f"__shared__ {CTYPES[kind]} {s}[{T}];", f"{s}[tid] = {self.expression(kind)};", sync]
        return [*lines, f"{self.target(kind)} = {s}[{shift}];", sync]

    def block_exchange_global(self, level):
        lines = [f"swap[g] = {self.expression('u')};", "__syncthreads();"]
        return [*lines, *self.mix(f"swap[g - tid + {self.expression('u', 1)} % {self.threads}u]"), "__syncthreads();"]

    def block_shared_loop(self, level):
        """Barriers in a loop: a scan, a tree, or tiles of the input."""
        dice, s, t, T = self.dice, self.name("s"), self.name(), self.threads
        kind, sync = self.kind("uf"), "__syncthreads();"
        ctype, v = CTYPES[kind], self.target(kind)
        lines = [f"__shared__ {ctype} {s}[{T}];"]
        which = dice.below(3)
        if which == 0:
            x, zero = self.name("x"), "0.0f" if kind == "f" else "0u"
            lines += [f"{s}[tid] = {self.expression(kind)};", sync, f"for (unsigned {t} = 1; {t} < {T}u; {t} *= 2u) {{"]
            lines += [f"{ctype} {x} = tid >= {t} ? {s}[tid - {t}] : {zero};", sync, f"{s}[tid] += {x};", sync, "}"]
            lines += [f"{v} = {s}[tid];"]
        elif which == 1:
            lines += [f"{s}[tid] = {self.expression(kind)};", sync, f"for (unsigned {t} = 128; {t} > 0; {t} /= 2u) {{"]
            lines += [
                f"if (tid < {t} && tid + {t} < {T}u) {s}[tid] += {s}[tid + {t}];",
                sync,
                "}",
                f"{v} = {s}[0];",
                sync,
            ]
        else:
            source = "tame" if kind == "f" else "in"
            lines += [
                f"for (int {t} = 0; {t} < n; {t}++) {{",
                f"{s}[tid] = {source}[(g + {t} * {T}u) & {SIZE - 1}u];",
                sync,
            ]
            lines += [
                f"{v} = {v} + {s}[(tid * 3u + {t}) % {T}u];",
                f"{self.target(kind)} = {s}[{T - 1}u - tid];",
                sync,
                "}",
            ]
        return lines

    def block_shared_atomic(self, level):
        dice, s, t, T = self.dice, self.name("s"), self.name(), self.threads
        name = dice.pick(["Add", "Min", "Max", "And", "Or", "Xor", "Inc"])
        ctype, value = "unsigned", "999u" if name == "Inc" else self.expression("u")
        if dice.chance(0.2):
            ctype, name, value = "float", "Add", f"(float)({self.expression('u', 1)} & 127u)"
        elif dice.chance(0.2):
            ctype, name, value = (
                "unsigned long long",
                dice.pick(["Add", "Min", "Xor"]),
                f"{self.expression('u')} * 3ull",
            )
        start = dice.pick(["0", "7"])
        lines = [
            f"__shared__ {ctype} {s}[32];",
            f"for (unsigned {t} = tid; {t} < 32u; {t} += {T}u) {s}[{t}] = {start};",
        ]
        lines += ["__syncthreads();", f"atomic{name}(&{s}[{self.index(32)}], {value});", "__syncthreads();"]
        return [*lines, *self.mix(f"(unsigned){s}[{self.index(32)}]"), "__syncthreads();"]

    def block_shuffle(self, level):
        """Also in a warp that is not whole: then the source lane is chosen among those present."""
        dice, kind = self.dice, self.kind("uiqlfdhpb")
        v, value, by = self.target(kind), self.expression(kind, 1), f"({self.expression('u', 1)} & 31u)"
        width = dice.pick([32, 32, 16, 8])
        tail = "" if width == 32 else f", {width}"
        which = dice.pick(["idx", "up", "down", "xor"])
        if self.full != "live":
            by = by if which == "idx" else dice.pick([by, by, str(1 << dice.below(5))])
        elif which == "idx":
            by, tail = f"({by} % present)", ""
        elif which == "down":
            by = f"(lane + {by} < present ? {by} : 0u)"
        elif which == "xor":
            by = f"((lane ^ {by}) < present ? {by} : 0u)"
        call = {"idx": "__shfl_sync", "up": "__shfl_up_sync", "down": "__shfl_down_sync", "xor": "__shfl_xor_sync"}[
            which
        ]
        return [f"{v} = {call}({self.full}, {value}, {by}{tail});"]

    def block_warp_reduction(self, level):
        dice, t, kind = self.dice, self.name(), self.kind("uif")
        v = self.target(kind)
        if self.full == "live":
            return self.block_vote(level)
        shuffle = f"__shfl_{dice.pick(['xor', 'down'])}_sync({self.full}, {v}, {t})"
        join = f"{v} + {shuffle}" if kind != "i" else f"max({v}, {shuffle})"
        loop = f"for (int {t} = {dice.pick([16, 8])}; {t} > 0; {t} >>= 1) {v} = {join};"
        return [*(["#pragma unroll"] if dice.chance(0.5) else []), loop]

    def block_vote(self, level):
        dice, t = self.dice, self.name()
        which = dice.below(8)
        full, c, u = self.full, self.expression("c"), self.expression("u", 1)
        if which < 2:
            return self.mix(f"__ballot_sync({full}, {c})")
        if which == 2:
            return self.mix(f"(unsigned)__{dice.pick(['any', 'all'])}_sync({full}, {c})")
        if which == 3:
            return self.mix(f"__match_any_sync({full}, {u} & 7u)")
        if which == 4:
            return [f"int {t};", *self.mix(f"__match_all_sync({full}, {u} & 1u, &{t})"), *self.mix(f"(unsigned){t}")]
        if which == 5:
            return self.mix(
                f"(unsigned)__reduce_{dice.pick(['add', 'min', 'max'])}_sync({full}, {self.expression('i', 1)})"
            )
        return self.mix(f"__reduce_{dice.pick(['add', 'min', 'max', 'and', 'or', 'xor'])}_sync({full}, {u})")

    def block_some_lanes(self, level):
        """Votes and shuffles among the lanes that take a branch."""
        t, mask, u = self.name(), self.name("mask"), self.target("u")
        choices = [
            f"{u} += __reduce_add_sync({mask}, {self.leaf('u')});",
            f"{u} ^= __shfl_sync({mask}, {self.leaf('u')}, __ffs({mask}) - 1);",
            f"{u} ^= __ballot_sync({mask}, {self.expression('c', 1)});",
            f"{u} = __match_any_sync({mask}, {self.leaf('u')} & 3u);",
            f"{u} |= (unsigned)__any_sync({mask}, {self.expression('c', 1)});",
        ]
        body = self.dice.some(choices, 1, 3)
        lines = [f"bool {t} = {self.expression('c')};", f"unsigned {mask} = __ballot_sync({self.full}, {t});"]
        return [*lines, f"if ({t}) {{", *body, "}", *self.mix(mask)]

    def block_warp_exchange(self, level):
        """Shared memory between the lanes of a warp, with __syncwarp."""
        s, kind = self.name("s"), self.kind("uif")
        lines = [f"__shared__ {CTYPES[kind]} {s}[{self.threads}];", f"{s}[tid] = {self.expression(kind)};"]
        lines += [
            f"__syncwarp({self.full});",
            f"{self.target(kind)} = {s}[tid - lane + {self.expression('u', 1)} % {self.present}];",
        ]
        return [*lines, f"__syncwarp({self.full});"]

    def block_block_vote(self, level):
        return self.mix(f"(unsigned)__syncthreads_{self.dice.pick(['count', 'or', 'and'])}({self.expression('c')})")

    def block_if_block(self, level):
        """A branch that the whole block takes, with barriers inside."""
        c = self.dice.pick(["blockIdx.x & 1u", "n > 2", "blockIdx.x == 0u && n < 4", "word & 4u"])
        lines = [f"if ({c}) {{", *self.together(level), "}"]
        if self.dice.chance(0.5):
            lines[-1:] = ["} else {", *self.together(level), "}"]
        return lines

    def block_for_block(self, level):
        t = self.name()
        bound = self.dice.pick(["n", "2", "3"])
        return [f"for (int {t} = 0; {t} < {bound}; {t}++) {{", *self.mix(f"(unsigned){t}"), *self.together(level), "}"]

    def block_async_copy(self, level):
        """cp.async: global to shared memory, then read by another thread."""
        s, words = self.name("s"), self.dice.pick([1, 2, 4])
        how = self.dice.pick(["ca", "cg"]) if words == 4 else "ca"
        lines = [f"__shared__ __align__(16) unsigned {s}[{self.threads * words}];"]
        lines += [f'asm volatile("cp.async.{how}.shared.global [%0], [%1], {words * 4};" ::']
        lines += [f'"r"((unsigned)__cvta_generic_to_shared(&{s}[tid * {words}u])),']
        lines += [f'"l"(__cvta_generic_to_global(in + {self.index(SIZE // words)} * {words}u)) : "memory");']
        wait = self.dice.pick(['"cp.async.wait_all;"', '"cp.async.commit_group;\\n\\tcp.async.wait_group 0;"'])
        lines += [f'asm volatile({wait} ::: "memory");', "__syncthreads();"]
        return [*lines, *self.mix(f"{s}[{self.expression('u')} % {self.threads * words}u]"), "__syncthreads();"]

    # ---- the whole ----

    def inside(self, level):
        """One or two statements of one thread's own, in a branch or a loop."""
        return [line for _ in range(1 + self.dice.below(2)) for line in self.alone(level + 1)]

    def together(self, level):
        if level >= 1:
            return self.alone(level + 1) + getattr(
                self, self.dice.pick(["block_exchange", "block_shuffle", "block_vote"])
            )(level + 1)
        return [line for _ in range(1 + self.dice.below(2)) for line in self.joined(level + 1)]

    def alone(self, level):
        choices = ["alone_assign", "alone_load"] if level > 1 or self.dice.chance(0.3) else self.plain
        return getattr(self, self.dice.pick(choices))(level)

    def joined(self, level):
        return getattr(self, self.dice.pick(self.joint))(level) if self.dice.chance(0.4) else self.alone(level)

    def variable(self, kind, name):
        load = self.dice.pick(LOADS[kind]).replace(
            "[I", f"[((g * {1 + 2 * self.dice.below(60)}u + {self.dice.below(SIZE)}u) & {SIZE - 1}u)"
        )
        return f"{CTYPES[kind]} {name} = {load};"

    def word_of(self, kind, name):
        if kind in "ui":
            return [f"(unsigned){name}"]
        if kind in "ql":
            return [f"(unsigned){name}", f"(unsigned)({name} >> 32)"]
        return [f"(unsigned)bits({name})", f"(unsigned)(bits({name}) >> 32)"] if kind == "d" else [f"bits({name})"]

    def write(self):
        """The lines of the body."""
        dice = self.dice
        lines = [self.variable(kind, name) for kind, names in self.variables.items() for name in names]
        for _ in range(6 + dice.below(10)):
            lines += scoped(self.joined(0))
        for _ in range(dice.below(4)):  # no barrier from here on, so a thread may leave
            leave = f"if (g % {2 + dice.below(6)}u == 1u && {self.expression('c')}) return;"
            lines += [leave] if dice.chance(0.3) else scoped(self.alone(0))
        words = [w for kind, names in self.variables.items() for name in names for w in self.word_of(kind, name)]
        self.words = len(words)
        across = dice.chance(0.5)
        for k, w in enumerate(words):
            lines.append(f"out[{f'{k * self.total}u + g' if across else f'g * {self.words}u + {k}u'}] = {w};")
        return lines


def scoped(lines):
    """In braces where a name is declared, so that a statement can stand anywhere."""
    return ["{", *lines, "}"] if len(lines) > 1 else lines


def indented(lines):
    depth, done = 1, []
    for line in lines:
        depth -= line.startswith("}")
        done.append(line if line.startswith("#") else "    " * depth + line)
        depth += line.endswith("{")
    return "\n".join(done) + "\n"


def mentions(name, text):
    return name in text and re.search(rf"\b{name}\b", text) is not None  # `in` is quick, and most names are not


def with_helpers(body, types):
    """The helpers that the body names, and the headers that the types need."""
    head = "#include <cuda_fp16.h>\n" if set("hp") & set(types) else ""
    head += "#include <cuda_bf16.h>\n" if "b" in types else ""
    helpers = "".join(code for name, code in HELPERS.items() if mentions(name, body))
    if mentions("bits", body):
        helpers += "".join(BITS[t] for t in "fdhpb" if t in types or t == "h" and "p" in types)
    return head + helpers


def generate(seed):
    """The launch of one seed."""
    kernel = Kernel(seed)
    dice, body = kernel.dice, indented(kernel.write())
    restrict = dice.pick([" __restrict__", " __restrict__", ""])
    parameters, args, outputs = [], [], []
    for name, (ctype, make) in INPUTS.items():
        if mentions(name, body):
            parameters.append(f"const {ctype} *{restrict} {name}")
            args.append(make(100 * seed))
    for name, (ctype, each, fixed, make) in OUTPUTS.items():
        if mentions(name, body):
            parameters.append(f"{ctype} *{name}")
            outputs.append(len(args))
            args.append(make(each * kernel.total + fixed))
    for name, (ctype, make) in SCALARS.items():
        if mentions(name, body):
            parameters.append(f"{ctype} {name}")
            args.append(make(dice))
    parameters.append("unsigned *out")
    outputs.append(len(args))
    args.append(np.full(kernel.total * kernel.words, POISON, np.uint32))

    T = kernel.threads
    bounds = f" __launch_bounds__({T})" if dice.chance(0.2) else ""
    source = with_helpers(body, kernel.types) + "".join(kernel.tables)
    source += f'\nextern "C" __global__ void{bounds} k({", ".join(parameters)}) {{\n'
    if kernel.shared:
        source += "    extern __shared__ unsigned dynamic[];\n"
    source += "    const unsigned tid = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);\n"
    source += f"    const unsigned g = tid + {T}u * (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));\n"
    source += "    const unsigned lane = tid % 32u;\n" if mentions("lane", body) else ""
    if mentions("live", body) or mentions("present", body):
        source += f"    const unsigned present = tid / 32u == {T // 32}u ? {T % 32}u : 32u;  // lanes of this warp\n"
        source += "    const unsigned live = 0xffffffffu >> (32u - present);\n" if mentions("live", body) else ""
    source += body + "}\n"
    options = () if kernel.contract else ("-fmad=false",)
    return Launch(
        f"seed_{seed}", source, "k", kernel.grid, kernel.block, args, tuple(outputs), None, True, kernel.shared, options
    )


if __name__ == "__main__":
    launch = generate(int(sys.argv[1]))
    print(launch.source)
    sizes = ", ".join(str(a.shape[0]) if np.ndim(a) else repr(a) for a in launch.args)
    print(f"// grid {launch.grid}, block {launch.block}, shared {launch.shared}, options {launch.options}")
    print(f"// arguments {sizes}")
