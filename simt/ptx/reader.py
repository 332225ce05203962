"""PTX text -> Module: variables, and functions as flat lists of instructions with labels and source lines.

PTX is the assembly language that NVIDIA's compilers write before the card's own machine code. It is close to the
source, documented (PTX ISA), and every line of it knows which line of CUDA C++ it came from (`.loc`).
This parser reads what NVRTC writes; it does not check what NVRTC has checked.
"""

import re
from dataclasses import dataclass, field

# Operands.


@dataclass(frozen=True, slots=True)
class Reg:
    """A register, by its name in the text ("%r12"); special registers ("%tid.x") too."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """A constant. `bits` is a Python int; `kind` is "int" (any width), "f32" or "f64" (bits of the float)."""

    bits: int
    kind: str = "int"


@dataclass(frozen=True, slots=True)
class Sym:
    """A name: a variable, a label, a function."""

    name: str


@dataclass(frozen=True, slots=True)
class Mem:
    """[base + offset]; base is a Reg, a Sym or None, offset in bytes. Of a tensor map: [base, {a, b}]."""

    base: object
    offset: int
    coordinates: tuple = ()


@dataclass(frozen=True, slots=True)
class Vec:
    """{a, b, c, d}"""

    items: tuple


@dataclass(frozen=True, slots=True)
class Not:
    """!%p"""

    reg: Reg


@dataclass(frozen=True, slots=True)
class Pair:
    """%p|%q: two destinations"""

    first: object
    second: object


@dataclass(slots=True)
class Instruction:
    """One instruction. `guard` is None, or (register name, wanted value) of an @%p in front of it.

    `operands` stand in the order of the text, destinations first. `line` is the line of the source, 0 if unknown.
    """

    opcode: str
    operands: tuple
    guard: tuple | None
    line: int
    looks_ahead: bool = False  # may read shared memory that nothing has written, and drops what it reads
    parts: tuple = field(init=False)
    reads: frozenset | None = field(init=False, default=None, compare=False, repr=False)  # kept by flow.sources
    writes: frozenset | None = field(init=False, default=None, compare=False, repr=False)  # kept by flow.destinations

    def __post_init__(self):
        self.parts = tuple(self.opcode.replace("::", "__").split("."))

    def __str__(self):
        guard = "" if self.guard is None else f"@{'' if self.guard[1] else '!'}{self.guard[0]} "
        return f"{guard}{self.opcode} {', '.join(map(show, self.operands))}".rstrip()


def show(operand):
    """An operand as PTX spells it."""
    match operand:
        case Reg(name) | Sym(name):
            return name
        case Imm(bits, "int"):
            return str(bits)
        case Imm(bits, kind):
            return f"0f{bits:08X}" if kind == "f32" else f"0d{bits:016X}"
        case Mem(base, offset, coordinates):
            at = f", {show(Vec(coordinates))}" if coordinates else ""
            return f"[{'' if base is None else show(base)}{offset:+d}{at}]" if offset else f"[{show(base)}{at}]"
        case Vec(items):
            return "{" + ", ".join(map(show, items)) + "}"
        case Not(reg):
            return "!" + reg.name
        case Pair(first, second):
            return f"{show(first)}|{show(second)}"
        case tuple():
            return "(" + ", ".join(map(show, operand)) + ")"
    return str(operand)


@dataclass(slots=True)
class Variable:
    """A variable of `space` "global", "const", "shared" or "local": size and alignment in bytes, initial bytes."""

    name: str
    space: str
    size: int
    align: int
    data: bytes = b""
    pointers: tuple = ()  # (byte, name, offset): the address of another variable that stands there
    external: bool = False  # extern __shared__: its size is the launch's


@dataclass(slots=True)
class Parameter:
    """A parameter of a kernel or function: `type` as in PTX ("u64", "f32"; "b8" with size > 1 is a struct)."""

    name: str
    type: str
    size: int
    align: int


@dataclass(slots=True)
class Function:
    """A kernel (`entry`) or a device function. `labels` maps a name to the index of the instruction it stands before.

    `registers` maps a register's name to its type ("pred", "b32", "f32", ...).
    """

    name: str
    entry: bool
    parameters: list
    returns: list
    registers: dict = field(default_factory=dict)
    variables: dict = field(default_factory=dict)
    instructions: list = field(default_factory=list)
    labels: dict = field(default_factory=dict)
    targets: dict = field(default_factory=dict)  # tables of labels, for brx.idx
    directives: dict = field(default_factory=dict)  # maxntid, minnctapersm, reqntid
    line: int = 0


@dataclass(slots=True)
class Module:
    """What one PTX text defines."""

    text: str
    target: str
    variables: dict
    functions: dict
    files: dict  # number -> name, as .loc counts them


SIZES = {"pred": 1, "b8": 1, "b16": 2, "b32": 4, "b64": 8, "b128": 16}
SIZES |= {k + str(8 * n): n for k in "us" for n in (1, 2, 4, 8)} | {"f16": 2, "f16x2": 4, "f32": 4, "f64": 8}

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
SPACE = re.compile(r"\s*")
LOCATION = re.compile(r"\.loc\s")
# Headers whose code reads the element behind the last one, and then does not use it.
LOOKING_AHEAD = re.compile(r"\bcub/block/block_merge_sort\.cuh$")
LABEL = re.compile(r"([\w$%.]+)\s*:(?!:)")
LABELS = re.compile(r"(?:^|[;{}:])\s*([\w$]+)\s*:(?!:)", re.M)
VARIABLE = re.compile(
    r"(?P<linkage>(?:\.(?:extern|visible|weak|common)\s+)*)\.(?P<space>global|const|shared|local|param)\s+"
    r"(?:\.align\s+(?P<align>\d+)\s+)?(?:\.ptr\S*\s+)?\.(?P<type>\w+)\s+(?P<name>[\w$]+)"
    r"(?P<shape>(?:\[\d*\])*)\s*(?:=\s*(?P<init>.*))?$",
    re.S,
)
PARAMETER = re.compile(
    r"\.(?:param|reg)\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+(?:\.ptr\s+(?:\.(?!align)\w+\s+)*(?:\.align\s+\d+\s+)?)?"
    r"(?P<name>[\w$]+)(?:\[(?P<count>\d+)\])?"
)


def parse(text):
    """Read PTX `text` into a Module."""
    files = {int(n): name for n, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)}
    target = re.search(r"\.target\s+(\w+)", text)
    if target is None:
        raise ValueError("text: expected PTX, with a .target line; found none")
    module = Module(text, target[1], {}, {}, files)
    clean = COMMENT.sub("", text)
    clean = re.sub(r"^\s*\.(version|target|address_size|file|section)\b[^\n]*$", "", clean, flags=re.M)
    try:
        Reader(clean, module).read_module()
    except (IndexError, KeyError, TypeError, AttributeError, ValueError) as e:
        raise ValueError(f"text: expected complete PTX; reading it failed ({type(e).__name__}: {e})") from e
    return module


class Reader:
    """Reads the text from left to right; `at` is the next character."""

    def __init__(self, text, module):
        self.text, self.module, self.at = text, module, 0
        self.main_file = min(module.files, default=1)  # the learner's own source
        self.ahead = {number for number, name in module.files.items() if LOOKING_AHEAD.search(name)}

    def read_module(self):
        while self.skip_space():
            if self.text.startswith("{", self.at):  # a debug section: not needed
                self.at = self.text.index("}", self.at) + 1
                continue
            statement = re.compile(r"[^;{(]*").match(self.text, self.at)[0]
            if re.search(r"\.(entry|func)\b", statement):
                self.read_function()
            else:
                self.define(self.take_statement(), self.module.variables)

    def skip_space(self):
        self.at = SPACE.match(self.text, self.at).end()
        return self.at < len(self.text)

    def take_statement(self):
        """The text up to the next semicolon."""
        end = self.text.index(";", self.at)
        statement, self.at = self.text[self.at : end].strip(), end + 1
        return statement

    def define(self, statement, variables):
        """A variable's declaration, entered into `variables`."""
        found = VARIABLE.match(statement)
        if found is None:
            return None  # .alias, .pragma and the like carry nothing the machine needs
        item = SIZES[found["type"]]
        shape = [int(n) if n else 0 for n in re.findall(r"\[(\d*)\]", found["shape"])]
        size = item
        for n in shape:
            size *= n
        data, pointers = b"", ()
        if found["init"]:
            data, pointers = initial_bytes(found["init"], item, found["type"])
            size = max(size, len(data))
        variable = Variable(
            found["name"],
            found["space"],
            size,
            int(found["align"] or item),
            data,
            pointers,
            external="extern" in found["linkage"],
        )
        variables[variable.name] = variable
        return variable

    # Functions.

    def read_function(self):
        head_end = min(i for i in (self.text.find("{", self.at), self.text.find(";", self.at)) if i >= 0)
        head = self.text[self.at : head_end]
        self.at = head_end + 1
        entry = ".entry" in head
        before, _, after = head.partition(".entry" if entry else ".func")
        groups = re.findall(r"\(([^()]*)\)", after)
        name = re.search(r"(?:^|\))\s*([\w$]+)", after)[1]
        returns = parameters(groups.pop(0)) if after.lstrip().startswith("(") else []
        function = Function(name, entry, parameters(groups[0]) if groups else [], returns)
        for directive, values in re.findall(r"\.(maxntid|reqntid|minnctapersm|maxnreg)\s+([\d,\s]+)", after):
            function.directives[directive] = tuple(int(v) for v in values.split(",") if v.strip())
        if self.text[head_end] == ";":  # a declaration
            self.module.functions.setdefault(name, function)
            return
        self.read_body(function)
        self.module.functions[name] = function

    def read_body(self, function):
        """The statements up to the closing brace. Names declared in an inner { } are made unique."""
        scopes, line, ahead = Scopes(function.registers), 0, False
        while True:
            self.skip_space()
            char = self.text[self.at]
            if char == "{":
                self.at += 1
                scopes.open()
                for name in LABELS.findall(self.text[self.at : self.closing()]):
                    scopes.add(name, f"{name}.{len(function.instructions)}")
            elif char == "}":
                self.at += 1
                if scopes.close():
                    return
            elif LOCATION.match(self.text, self.at):
                end = self.text.index("\n", self.at)
                directive = self.text[self.at : end]
                line = self.source_line(directive) or line
                ahead = bool(self.ahead) and int(directive.split()[1]) in self.ahead
                function.line = function.line or line
                self.at = end
            elif label := LABEL.match(self.text, self.at):
                self.at = label.end()
                self.skip_space()
                if self.text.startswith((".branchtargets", ".calltargets", ".callprototype"), self.at):
                    names = self.take_statement().split(None, 1)[1]
                    function.targets[scopes.rename(label[1])] = [scopes.rename(n.strip()) for n in names.split(",")]
                else:
                    function.labels[scopes.rename(label[1])] = len(function.instructions)
            elif self.text.startswith(".", self.at):
                self.declare(self.take_statement(), function, scopes)
            else:
                statement = self.take_statement()
                if statement:
                    function.instructions.append(instruction(statement, scopes, line, ahead))

    def closing(self):
        """Where the { } block ends whose inside begins here."""
        depth = 1
        for brace in re.compile(r"[{}]").finditer(self.text, self.at):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return brace.start()
        raise ValueError("expected PTX whose braces close; found one that does not")

    def declare(self, statement, function, scopes):
        """.reg .f32 %f<4>;   .shared .align 4 .b8 tile[1024];   .param .b32 param0;"""
        scopes.known.clear()
        if statement.startswith(".reg"):
            kind, names = re.match(r"\.reg\s*\.(\w+)\s+(.*)", statement, re.S).groups()
            for name in names.split(","):
                many = re.match(r"([\w$%]+)<(\d+)>", name.strip())
                for one in [many[1] + str(i) for i in range(int(many[2]))] if many else [name.strip()]:
                    unique = one
                    if unique in function.registers:
                        unique = f"{one}.{len(function.registers)}"
                    if unique != one:
                        scopes.add(one, unique)
                    function.registers[unique] = kind
        elif statement.startswith(".param"):
            name = re.search(r"([\w$]+)(\[\d+\])?$", statement)[1]
            scopes.add(name, f"{name}.{len(function.instructions)}")
        else:
            self.define(statement, function.variables)

    def source_line(self, directive):
        """The learner's line of a .loc; for code inlined from a header, the line that it was inlined at."""
        found = re.match(r"\.loc\s+(\d+)\s+(\d+)", directive)
        file, line = int(found[1]), int(found[2])
        inlined = re.search(r"inlined_at\s+(\d+)\s+(\d+)", directive)
        if file == self.main_file:
            return line
        return int(inlined[2]) if inlined and int(inlined[1]) == self.main_file else 0


def parameters(text):
    found = []
    for p in PARAMETER.finditer(text):
        size = SIZES[p["type"]]
        found.append(Parameter(p["name"], p["type"], size * int(p["count"] or 1), int(p["align"] or size)))
    return found


class Scopes:
    """What the names of inner { } blocks, as inline assembly and calls write them, stand for."""

    def __init__(self, registers):
        self.registers, self.inner = registers, [{}]
        self.known = {}  # text -> operand, while names stand for what they do

    def open(self):
        self.known.clear()
        self.inner.append({})

    def close(self):
        """Leave a block; True if it was the function's own."""
        self.known.clear()
        self.inner.pop()
        return not self.inner

    def add(self, name, unique):
        self.known.clear()
        self.inner[-1][name] = unique

    def rename(self, name):
        for names in reversed(self.inner):
            if name in names:
                return names[name]
        return name

    def named(self, name):
        """A register, or a symbol."""
        name = self.rename(name)
        return Reg(name) if name in self.registers or name.startswith("%") or name == "_" else Sym(name)


STATEMENT = re.compile(r"(?:@(?P<no>!?)\s*(?P<guard>[\w$%.]+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<rest>.*)$", re.S)


def instruction(statement, scopes, line, looks_ahead):
    found = STATEMENT.match(statement)
    if found is None:
        raise ValueError(f"expected a PTX instruction; found {statement!r}")
    guard = None
    if found["guard"]:
        guard = (scopes.rename(found["guard"]), not found["no"])
    operands, known = [], scopes.known
    for part in split(found["rest"]):
        if part not in known:
            known[part] = operand(part, scopes)
        operands.append(known[part])
    return Instruction(found["opcode"], tuple(operands), guard, line, looks_ahead)


def split(text):
    """Split at the commas that stand outside of all brackets."""
    if "{" not in text and "(" not in text:  # [ ] alone hold no commas
        parts = [part.strip() for part in text.split(",")]
        return parts if parts[-1] else parts[:-1]
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    if text[start:].strip():
        parts.append(text[start:].strip())
    return parts


NUMBER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$")


def operand(text, scopes):
    if text.startswith("{"):
        return Vec(tuple(operand(t, scopes) for t in split(text[1:-1])))
    if text.startswith("("):
        return tuple(operand(t, scopes) for t in split(text[1:-1]))
    if text.startswith("["):
        return memory(text[1:-1], scopes)
    if text.startswith("!"):
        return Not(scopes.named(text[1:].strip()))
    if "|" in text:
        first, second = (operand(t.strip(), scopes) for t in text.split("|"))
        return Pair(first, second)
    if NUMBER.match(text):
        return Imm(int(text.rstrip("U"), 0) if "x" in text.lower() else int(text.rstrip("U")))
    if text[:2] in ("0f", "0F") and len(text) == 10:
        return Imm(int(text[2:], 16), "f32")
    if text[:2] in ("0d", "0D") and len(text) == 18:
        return Imm(int(text[2:], 16), "f64")
    return scopes.named(text)


def memory(text, scopes):
    """[%rd1+4], [tile+8], [param0], [%rd1, {%r1, %r2}]"""
    address, *coordinates = split(text)
    if coordinates:
        found = memory(address, scopes)
        return Mem(found.base, found.offset, operand(coordinates[0], scopes).items)
    found = re.match(r"\s*([\w$%.]+)\s*(?:([+-])\s*(-?(?:0[xX][0-9a-fA-F]+|\d+)))?\s*$", address)
    if found is None:
        raise ValueError(f"expected an address like [%rd1+4]; found [{text}]")
    base, sign, number = found.groups()
    offset = (int(number, 0) if number else 0) * (-1 if sign == "-" else 1)
    if NUMBER.match(base):
        return Mem(None, int(base, 0) + offset)
    return Mem(scopes.named(base), offset)


def initial_bytes(text, item, kind):
    """{1, 0f3F800000, generic(name)} -> bytes, item by item, and the addresses still to be put in."""
    out, pointers = b"", []
    for word in re.findall(r"[^\s{},]+", text):
        if word[:2] in ("0f", "0F", "0d", "0D") and kind.startswith("f"):
            out += int(word[2:], 16).to_bytes(item, "little")
        elif NUMBER.match(word):
            out += (int(word.rstrip("U"), 0) % (1 << 8 * item)).to_bytes(item, "little")
        elif name := re.match(r"(?:generic\(([\w$]+)\)|([A-Za-z_$][\w$]*))(?:\+(\d+))?$", word):
            pointers.append((len(out), name[1] or name[2], int(name[3] or 0)))
            out += bytes(item)
        else:
            raise ValueError(f"a variable's initial value: expected numbers or names; found {word!r}")
    return out, tuple(pointers)
