"""A kernel made ready to run: its blocks, the addresses of its variables, and its functions as they are needed."""

import functools
import re

import numpy as np

from simt.arithmetic import marks, merging
from simt.errors import Unsupported
from simt.execute import divergence
from simt.memory.spaces import REGION, Space
from simt.ptx import blocks, unset, wide_accesses
from simt.ptx.reader import Mem, Reg, Sym, Variable, Vec
from simt.ptx.types import DTYPES
from simt.translate import translator

FIRST = {"pred": False, unset.MARK: unset.COPIED}  # what registers hold before anything has set them, where it is not 0
GRID_BARRIER = "grid_barrier"  # what the blocks of a launch wait at in grid.sync() of cooperative groups
QUOTED = 120  # characters of a source line in a message


class Program:
    """One kernel of a module. `source` is the learner's text, quoted in errors and reports (may be empty); `name`, what
    they call the kernel, if not by its name in PTX."""

    def __init__(self, function, module, source="", name=None):
        self.name, self.parameters, self.source = name or function.name, function.parameters, source.splitlines()
        try:
            self.flow = blocks.analyse(function, module, source)
        except Unsupported as e:
            raise self.placed(e) from None
        self.blocks = self.flow.blocks
        self.tells = divergence.tells(self.blocks)  # barrier -> blocks of code that tell who has left it out
        self.telling = set().union(*self.tells.values())
        self.module = module
        self.place_variables()
        self.translator = translator.Translator(self.flow, self.symbols, wide_accesses.joined(self.flow.function))
        self.counters = self.translator.counters
        code = self.flow.function.instructions
        self.asynchronous = any(i.parts[0] == "wgmma" or "bulk" in i.parts for i in code)  # may read shared memory
        self.only_threads_share = not any(i.parts[0] in ("wgmma", "mbarrier", "cp") or "bulk" in i.parts for i in code)
        self.race_facts = {}  # memory instruction -> (line, how strong), for simt/memory/races.py
        dependent = [i.parts[1] for i in code if i.parts[0] == "griddepcontrol"]  # "wait", "launch_dependents"
        self.lets_next_start = "launch_dependents" in dependent
        self.waits_first = dependent[:1] == ["wait"]  # before it lets the next launch start
        self.environment = merging.environment()
        if self.flow.unset is not None:
            self.environment |= marks.environment()
        self.initial_registers = [
            FIRST[kind] if kind in FIRST else np.zeros((1, 1, 1), DTYPES[kind]) if kind in ("f32", "f64") else 0
            for kind in self.flow.kinds.values()
        ]
        count = len(self.blocks)
        self.full, self.masked = [None] * count, [None] * count
        self.histograms = {True: [{}] * count, False: [{}] * count}
        self.start()
        self.argument_names = argument_names(source, self.name, len(self.parameters))

    def start(self):
        """Set what a launch counts to zero."""
        count = len(self.blocks)
        self.full_visits, self.full_threads = [0] * count, [0] * count
        self.masked_visits, self.masked_threads = [0] * count, [0] * count
        self.tallies = {}
        for c in self.counters.values():
            c.requests = c.sectors = c.ideal = 0

    def tally(self, line, name, count):
        """Count what has a counter of the machine's own."""
        here = self.tallies.setdefault(line, {})
        here[name] = here.get(name, 0) + int(count)

    def place_variables(self):
        """Addresses: shared and local variables from 0 up; the module's own global and constant ones in regions."""
        self.symbols, self.shared_names = {}, []
        ends = {"shared": 0, "local": 0}
        external = []
        self.globals, self.structs = {}, {}
        named = [(i, set(symbols_in(i.operands))) for i in self.flow.function.instructions]
        used = set().union(*(names for _, names in named))
        for name, v in (self.module.variables | self.flow.function.variables).items():
            if v.space in ends:
                if name not in used:
                    continue
                if v.external:
                    external.append(v)
                    continue
                at = -(-ends[v.space] // v.align) * v.align
                self.symbols[name] = at
                ends[v.space] = at + v.size
                if v.space == "shared":
                    self.shared_names.append((at, v.size, name))
            elif v.space in ("global", "const"):
                region = len(self.globals) + 1
                self.symbols[name] = region << REGION
                self.globals[region] = v
        operands = [o for i in self.flow.function.instructions for o in i.operands]
        if any(isinstance(o, Reg) and o.name.startswith("%envreg") for o in operands):
            region = len(self.globals) + 1
            self.symbols[GRID_BARRIER] = region << REGION
            self.globals[region] = Variable(GRID_BARRIER, "global", 8, 8)
        passed = (("ld", "param"), ("st", "param"))
        used = set().union(*(names for i, names in named if i.parts[:2] not in passed))
        for p in self.parameters:  # those whose address is taken
            if p.name in used:
                region = len(self.globals) + len(self.structs) + 1
                self.symbols[p.name] = region << REGION
                self.structs[p.name] = region
        start = ends["shared"]
        for v in external:
            start = -(-start // max(v.align, 16)) * max(v.align, 16)
        for v in external:
            self.symbols[v.name] = start
            self.shared_names.append((start, None, v.name))
        self.shared_size, self.local_size = start, ends["local"]

    def global_spaces(self, kept):
        """{region: Space} of the module's variables; `kept` holds their bytes from launch to launch.

        One that is called like an argument gets a name of its own, ::name.
        """
        spaces = {}
        for region, v in self.globals.items():
            if v.name not in kept or v.name == GRID_BARRIER:  # a launch that failed may have left it in any state
                data = np.zeros(max(v.size, 1), np.uint8)
                data[: len(v.data)] = np.frombuffer(v.data, np.uint8)
                for at, name, offset in v.pointers:
                    if name not in self.module.functions:  # else a table of functions; calls through it are refused
                        address = self.address_of(name) + offset
                        data[at : at + 8] = np.frombuffer(address.to_bytes(8, "little"), np.uint8)
                kept[v.name] = data
            name = f"::{v.name}" if v.name in self.argument_names else v.name
            spaces[region] = Space(name, kept[v.name], region << REGION, v.size, writable=v.space == "global")
        return spaces

    def address_of(self, name):
        if name not in self.symbols:
            raise Unsupported(name, "its address in a variable")
        return self.symbols[name]

    def make_full(self, number):
        """(function, instructions, last block) of the full form."""
        last = number
        while self.blocks[last].joint:
            last += 1
        made = self.build(self.translated(self.translator.full, number), last, True, number)
        self.full[number] = made
        return made

    def make_masked(self, number):
        made = self.build(self.translated(self.translator.masked, number), number, False, number)
        self.masked[number] = made
        return made

    def translated(self, form, number):
        try:
            return form(number)
        except Unsupported as e:
            raise self.placed(e, self.translator.line) from None
        except Exception as e:  # an instruction of a form that nobody has thought of, or a damaged one
            line, instruction = self.translator.line, str(self.translator.current)
            raise self.placed(Unsupported(instruction, not_understood(e)), line) from e

    def placed(self, error, line=0):
        """The same Unsupported with kernel and line."""
        line = error.line or line
        where = f"kernel {self.name}" + (f", line {line}{self.quote(line)}" if line else "")
        return Unsupported(error.instruction, error.why, line, where)

    def build(self, translated, last, full, number):
        name, text, histogram = translated
        names = self.environment
        names.update(self.translator.constants)
        exec(code_of(text, f"<{self.name} {name}>"), names)  # the text is simt/translate/translator.py's own
        self.histograms[full][number] = histogram
        return names[name], max(1, sum(histogram.values())), last

    # For reports and errors.

    def quote(self, line):
        if 0 < line <= len(self.source):
            text = self.source[line - 1].strip()
            return f" `{text if len(text) <= QUOTED else text[: QUOTED - 3] + '...'}`"
        return ""

    def variable_at(self, space, address):
        if space != "shared":
            return ""
        for start, size, name in self.shared_names:
            if start <= address and (size is None or address < start + size):
                return f" ({plain_name(name)})"
        return ""

    def counts(self):
        """{line: {metric: count}} of the launch."""
        lines = {}

        def add(line, key, value):
            if value:
                here = lines.setdefault(line, {})
                here[key] = here.get(key, 0) + value

        for full, visits, threads in (
            (True, self.full_visits, self.full_threads),
            (False, self.masked_visits, self.masked_threads),
        ):
            for histogram, warps, active in zip(self.histograms[full], visits, threads):
                for line, count in histogram.items():
                    add(line, "instructions", count * warps)
                    add(line, "thread_instructions", count * active)
        for line, counts in self.tallies.items():
            for key, value in counts.items():
                add(line, key, value)
        for c in self.counters.values():
            op = "ld" if c.kind == "ldmatrix" else c.kind
            if op is None or not c.requests:
                continue
            if not c.shared:
                add(c.line, f"l1tex__t_requests_pipe_lsu_mem_global_op_{op}.sum", c.requests)
                add(c.line, f"l1tex__t_sectors_pipe_lsu_mem_global_op_{op}.sum", c.sectors)
                if c.copy:
                    add(c.line, "smsp__inst_executed_op_ldgsts.sum", c.requests)
            elif op in ("ld", "st"):
                add(c.line, f"smsp__inst_executed_op_shared_{op}.sum", c.requests)
                add(c.line, f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{op}.sum", c.sectors)
                add(c.line, f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{op}.sum", c.sectors - c.ideal)
        return lines


def not_understood(error):
    return f"not understood ({type(error).__name__}: {error})"


def symbols_in(operands):
    for o in operands:
        if isinstance(o, Sym):
            yield o.name
        elif isinstance(o, Mem):
            yield from symbols_in((o.base, *o.coordinates))
        elif isinstance(o, Vec):
            yield from symbols_in(o.items)
        elif isinstance(o, tuple):
            yield from symbols_in(o)


def plain_name(name):
    """_ZZ6kernelE4tile, as the compiler spells a kernel's own shared array -> tile."""
    found = re.match(r"_ZZ.*E(\d+)(\w+)", name)
    return found[2][: int(found[1])] if found else name


def argument_names(source, kernel, count):
    """The names of the kernel's parameters in its source; param 0, param 1, ... where they cannot be read."""
    kernel = kernel.partition("<")[0]  # of a template
    for found in re.finditer(rf"\b{re.escape(kernel)}\s*\(([^()]*)\)\s*\{{", without_comments(source)):
        names = [re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)*$", p.strip()) for p in found[1].split(",")]
        names = [n[1] for n in names if n]
        if len(names) == count:
            return names
    return [f"param {n}" for n in range(count)]


@functools.lru_cache(maxsize=8)
def without_comments(source):
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.S)


@functools.lru_cache(maxsize=4096)
def code_of(text, name):
    """Python's code of a block. Variants of a kernel, as its options make them, have many a block in common."""
    return compile(text, name, "exec")
