"""What a learner calls: modules, kernels, launches; arguments are checked before anything runs."""

import functools
import operator
import threading

import numpy as np

from simt import kernel_names, nvrtc
from simt.counting import counting
from simt.errors import LaunchError, SimtError, Unsupported
from simt.execute.scheduler import Launch
from simt.hopper.tensor_map import BYTES, TensorMap
from simt.memory.ahead import Ahead, after
from simt.memory.races import Races
from simt.memory.spaces import REGION, Space
from simt.ptx import reader
from simt.report import Report
from simt.translate.program import Program, not_understood

GRID_LIMITS = (2**31 - 1, 65535, 65535)
BLOCK_LIMITS = (1024, 1024, 64)
THREADS_LIMIT = 1024
SHARED_LIMIT = 227 * 1024  # bytes a block of an sm_90 card may have
CLUSTER_LIMIT = 16  # blocks


class Buffer:
    """An array that starts `misalignment` bytes behind a multiple of 256, as a view into a larger tensor may."""

    def __init__(self, array, misalignment=0):
        self.array, self.misalignment = array, misalignment


def compile(source, options=(), arch="sm_90", name="kernel.cu", instances=()):
    """CUDA C++ (device code only) -> Module, by NVRTC. What has been compiled before is not compiled again.

    instances   kernels that are templates, with their arguments, such as ["sum<256>"]: module["sum<256>"] is then one.
                The other arguments are those of simt.nvrtc.compile_to_ptx
    """
    wanted = {"instances": instances} if len(instances) else {}
    return translated(nvrtc.compile_to_ptx(source, options, arch, name, **wanted), source)


@functools.lru_cache(maxsize=256)
def translated(text, source):
    return Module(text, source)


def load(text, source=""):
    """PTX text -> Module, where there is no NVRTC. `source`, if given, is quoted in errors and reports."""
    if not isinstance(text, str):
        raise TypeError(f"text: expected PTX as a str; got {type(text).__name__}")
    return Module(text, source)


class Pointers:
    """Addresses of arrays, for a struct of as many pointers that a kernel takes by value. None: a null pointer."""

    def __init__(self, arrays):
        self.arrays = tuple(arrays)


class Module:
    """Compiled code; module["name"] is a kernel. Its __device__ variables keep their values from launch to launch.

    A kernel's name is that of the source, with extern "C" or without; where two have one name, how C++ spells it.

    module.set("name", array) fills a __constant__ or __device__ variable, module.get("name", dtype) reads one.
    """

    def __init__(self, text, source=""):
        self.ptx, self.source = text, source
        self.parsed = reader.parse(text)
        self.instances = kernel_names.instances(text)
        self.entries = [f.name for f in self.parsed.functions.values() if f.entry]
        self.kernels = {}
        self.kept = {}
        self.lock = threading.Lock()

    @property
    def names(self):
        """The kernels there are."""
        return [kernel_names.plain(entry, self.entries, self.instances) for entry in self.entries]

    def __getitem__(self, name):
        if name not in self.kernels:
            entry = kernel_names.find(name, self.entries, self.instances)
            if entry is None:
                raise LaunchError(kernel_names.unknown(name, self.entries, self.instances, self.source))
            if entry not in self.kernels:
                self.kernels[entry] = Kernel(self, entry)
            self.kernels[name] = self.kernels[entry]
        return self.kernels[name]

    def program(self, entry):
        """A new program of the kernel that is spelt so."""
        name = kernel_names.plain(entry, self.entries, self.instances)
        try:
            return Program(self.parsed.functions[entry], self.parsed, self.source, name)
        except SimtError:
            raise
        except Exception as e:
            raise ValueError(f"text: expected complete PTX; kernel {name} is {not_understood(e)}") from e

    def set(self, name, array):
        """Fill a __constant__ or __device__ variable with the bytes of an array, which must be as many."""
        variable = self.variable(name)
        if not isinstance(array, (np.ndarray, np.generic)):
            raise LaunchError(f"set: {name} takes a NumPy array or scalar; got {type(array).__name__} {short(array)}")
        array = np.ascontiguousarray(array)
        if array.dtype.hasobject or not array.dtype.isnative:
            raise LaunchError(f"set: {name} takes numbers in the machine's own byte order; got dtype {array.dtype}")
        if array.nbytes != variable.size:
            raise LaunchError(
                f"set: {name} has {variable.size} bytes; got {array.nbytes}, an array of {array.dtype} and shape "
                f"{array.shape}"
            )
        with self.lock:
            data = self.kept.setdefault(name, np.zeros(variable.size, np.uint8))
            data[:] = array.reshape(-1).view(np.uint8)

    def get(self, name, dtype):
        """What a __constant__ or __device__ variable holds, as a new array of `dtype`."""
        variable, dtype = self.variable(name), np.dtype(dtype)
        if dtype.hasobject or not dtype.itemsize or variable.size % dtype.itemsize:
            raise LaunchError(f"get: {name} has {variable.size} bytes, which are no whole number of {dtype}")
        with self.lock:
            data = self.kept.get(name)
            if data is None:
                data = np.frombuffer(variable.data.ljust(variable.size, b"\0"), np.uint8)
            return data.copy().view(dtype)

    def variable(self, name):
        found = {n: v for n, v in self.parsed.variables.items() if v.space in ("global", "const")}
        if name in found:
            if found[name].pointers:
                raise LaunchError(f"{name} holds addresses, which only the compiler knows")
            return found[name]
        plain = [n for n in found if not n.startswith(("_Z", "$"))]
        raise LaunchError(
            f"module has no variable {name!r}; it has {', '.join(plain) if plain else 'none'}. A variable stands "
            f"outside of all functions and namespaces, and the compiler leaves out one that no kernel uses"
        )


class Kernel:
    """kernel(grid, block, *args, shared=0, check_races=False, places=None, order="forward") runs it: a Report.

    grid, block   how many blocks, and threads in a block: an int, or a tuple of up to 3
    args          NumPy arrays (written in place) for pointers, NumPy scalars (np.int32(n)) for values, a TensorMap for
                  a __grid_constant__ CUtensorMap
    shared        bytes of dynamic shared memory
    check_races   report two threads that touch the same memory with no order between them (slower)
    places        how many blocks fit at a time: another starts when one has ended. None: all of them
    order         the order in which blocks start: "forward", "reverse", or a whole number, the seed of a shuffle
    only          numbers of blocks, in the order in which they start: no others run, as a grid too large to run needs
    by_warp       count requests of each block and warp as well: see Report
    ahead         an Ahead (simt/memory/ahead.py): what the launch ahead may still be at, where this one is a
                  programmatic dependent of it. Touching that before griddepcontrol.wait is an error. None: it has ended
    cluster       blocks in a cluster, along x: they start together, and know each other's mbarriers
    step_limit    how long an endless loop may run: in basic blocks executed by a part of the grid (32,768 threads), of
                  40,000 instructions of single threads each. None: 100,000, and on until a part has taken 10 seconds
                  of processor time, so that a long loop is not taken for an endless one (15, where steps take long)
    """

    def __init__(self, module, entry):
        self.module, self.entry, self.program = module, entry, module.program(entry)
        self.name = self.program.name
        self.programs = {}  # device -> Program, where several devices run it: each counts by itself

    def __repr__(self):
        parameters = ", ".join(f"{n}: {p.type}" for n, p in zip(self.program.argument_names, self.program.parameters))
        return f"{self.name}({parameters})"

    def __call__(
        self, grid, block, *args, shared=0, check_races=False, places=None, order="forward", only=None,
        by_warp=False, ahead=None, step_limit=None, cluster=1,
    ):  # fmt: skip
        program = self.program
        grid, block, shared = self.check_shape(grid, block, shared)
        if step_limit is not None:
            step_limit = whole("step_limit", step_limit)
        places, order = room(places), sequence(order) if only is None else some_blocks(only, order, grid)
        cluster = blocks_of_cluster(cluster, grid, places, only)
        if not isinstance(ahead, (Ahead, type(None))):
            raise LaunchError(f"ahead: expected a simt.Ahead, or None; got {type(ahead).__name__} {short(ahead)}")
        values, spaces, maps = self.bind(args)
        races = None
        if check_races:
            races = Races()
        with self.module.lock:
            program.start()
            buffers = program.global_spaces(self.module.kept) | spaces
            parameters = Parameters(program, values)
            mapped = [m.array for m in maps.values()]
            near = ahead and ahead.touches([b.bytes for b in buffers.values()] + mapped)
            launch = Launch(
                program, grid, block, parameters, buffers, shared, races, step_limit, maps, places, order,
                {} if by_warp else None, near, cluster, counting() or by_warp,
            )  # fmt: skip
            try:
                launch.run()
            except MemoryError as error:
                local = f" ({program.local_size:,} bytes of local memory a thread)" if program.local_size else ""
                raise LaunchError(f"{self.name}: this launch needs more memory than there is{local}") from error
            except SimtError as error:
                if isinstance(error, Unsupported) and error.line and not error.where:
                    where = f"kernel {self.name}, line {error.line}{program.quote(error.line)}"
                    error = Unsupported(error.instruction, error.why, error.line, where)
                if launch.printed:
                    error.add_note("printed until then:\n" + "".join(launch.printed))
                raise error from None
            counts = program.counts() if launch.counted else None
            report = Report(self.name, self.module.source, counts, "".join(launch.printed), grid, block, launch.by_warp)
            report.waited, report.waits_first = launch.waited, program.waits_first
            report.ahead = (
                None if launch.written is None else after(launch.written, [s.bytes for s in spaces.values()] + mapped)
            )
            return report

    def on(self, device):
        """The program for one of several devices, made once."""
        if device not in self.programs:
            self.programs[device] = self.module.program(self.entry)
        return self.programs[device]

    def check_shape(self, grid, block, shared):
        """(grid, block, bytes of dynamic shared memory), the first two as three ints each, or an error."""
        grid = dimensions("grid", grid, GRID_LIMITS)
        block = dimensions("block", block, BLOCK_LIMITS)
        self.check_block(block)
        shared, declared = whole("shared", shared), self.program.shared_size
        if declared + shared > SHARED_LIMIT:
            raise LaunchError(
                f"shared: expected at most {SHARED_LIMIT - declared} bytes ({SHARED_LIMIT} less the "
                f"{declared} that {self.name} declares); got {shared}"
            )
        return grid, block, shared

    def check_block(self, block):
        threads = block[0] * block[1] * block[2]
        if threads > THREADS_LIMIT:
            raise LaunchError(f"block: expected at most {THREADS_LIMIT} threads; got {threads} ({block})")
        bound = self.program.flow.function.directives.get("maxntid")
        if bound:
            most = int(np.prod(bound))
            if threads > most:
                raise LaunchError(
                    f"block: expected at most {most} threads, as {self.name}'s __launch_bounds__ says; got {threads}"
                )

    def bind(self, args, program=None, put=None):
        """The arguments as bytes of parameters, and the buffers they point to. put: finds them a place; see place."""
        program = program or self.program
        parameters, names = program.parameters, program.argument_names
        if len(args) != len(parameters):
            wanted = ", ".join(f"{n} ({describe(p)})" for n, p in zip(names, parameters))
            raise LaunchError(f"args: {self.name} expects {len(parameters)}: {wanted}; got {len(args)}")
        values, arrays, maps = {}, [], {}
        for n, (p, name, a) in enumerate(zip(parameters, names, args)):
            misalignment = 0
            if isinstance(a, Buffer):
                misalignment, a = whole(f"{name}: misalignment", a.misalignment), a.array
                if not isinstance(a, np.ndarray):
                    raise LaunchError(f"{name}: expected a Buffer of an array; got one of {type(a).__name__}")
            if isinstance(a, np.ndarray):
                check_array(p, name, a)
                arrays.append((n, name, a, misalignment))
            elif isinstance(a, Pointers):
                arrays += check_pointers(p, n, name, a)
                values[p.name] = a
            elif isinstance(a, TensorMap):
                if p.size != BYTES:
                    raise LaunchError(f"{name}: expected {describe(p)}; got a TensorMap, a struct of {BYTES} bytes")
                values[p.name] = bytes(BYTES)
                if p.name in program.structs:
                    maps[program.symbols[p.name]] = a
            elif isinstance(a, (np.generic, bytes)):
                values[p.name] = scalar_bytes(p, name, a)
            else:
                raise LaunchError(f"{name}: expected {describe(p)}; got {type(a).__name__} {short(a)}{hint(a)}")
        spaces, addresses = (put or place)(arrays, len(program.globals) + len(program.structs) + 1)
        addresses = {key: int(address).to_bytes(8, "little") for key, address in addresses.items()}
        for n, p in enumerate(parameters):
            if n in addresses:
                values[p.name] = addresses[n]
            elif isinstance(values[p.name], Pointers):
                many = range(len(values[p.name].arrays))
                values[p.name] = b"".join(addresses.get((n, k), bytes(8)) for k in many)
        for p, name in zip(parameters, names):
            if p.name in program.structs:
                region, data = program.structs[p.name], np.frombuffer(values[p.name], np.uint8).copy()
                spaces[region] = Space(name, data, region << REGION, data.size, writable=False)
        return values, spaces, maps


def place(arrays, region):
    """Give each array an address. Arrays that share memory share their addresses too."""
    spaces, addresses, owners = {}, {}, []
    order = sorted(arrays, key=lambda item: (start_of(item[2]), -item[2].nbytes))
    for n, name, a, misalignment in order:
        start = start_of(a)
        if a.nbytes == 0:
            addresses[n] = region << REGION
            spaces[region] = Space(name, np.zeros(0, np.uint8), region << REGION, 0, dtype=a.dtype)
            region += 1
            continue
        owner = next((o for o in owners if o[0] <= start and start + a.nbytes <= o[1]), None)
        if owner is not None:
            addresses[n] = owner[2] + start - owner[0]
            continue
        if any(o[0] < start + a.nbytes and start < o[1] for o in owners):
            raise LaunchError(f"{name}: expected memory of its own, or all inside another argument's; it overlaps one")
        address = (region << REGION) + misalignment
        data = a.reshape(-1).view(np.uint8)
        spaces[region] = Space(name, data, address, a.nbytes, writable=a.flags.writeable, dtype=a.dtype)
        owners.append((start, start + a.nbytes, address))
        addresses[n] = address
        region += 1
    return spaces, addresses


def start_of(a):
    return a.__array_interface__["data"][0]


class Parameters(dict):
    """The kernel's parameters as its code reads them, by position: ints, and arrays (1, 1, 1) of floats."""

    def __init__(self, program, values):
        super().__init__()
        self.program, self.values = program, values

    def __missing__(self, at):
        name, offset, kind = self.program.translator.parameter_reads[at]
        dtype = np.dtype(kind)
        value = np.frombuffer(self.values[name], dtype, 1, offset)
        self[at] = value.reshape(1, 1, 1) if dtype.kind == "f" else int(value.view(f"u{dtype.itemsize}")[0])
        return self[at]


# Checks.


def dimensions(name, value, limits):
    """An int or tuple -> three ints, within CUDA's limits."""
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(given) <= 3:
        raise LaunchError(f"{name}: expected 1 to 3 numbers; got {len(given)}")
    out = []
    for axis, n, limit in zip("xyz", given, limits):
        n = whole(f"{name}.{axis}", n)
        if not 1 <= n <= limit:
            raise LaunchError(f"{name}.{axis}: expected 1 to {limit}; got {n}")
        out.append(n)
    return (*out, 1, 1)[:3]


def whole(name, n):
    try:
        n = operator.index(n)
    except TypeError:
        raise LaunchError(f"{name}: expected a whole number; got {type(n).__name__} {short(n)}") from None
    if n < 0:
        raise LaunchError(f"{name}: expected 0 or more; got {n}")
    return n


def room(places):
    """How many blocks fit at a time: None, or a whole number from 1 on."""
    if places is None:
        return None
    n = index(places)
    if n is None or n < 1:
        got = n if n is not None else f"{type(places).__name__} {short(places)}"
        raise LaunchError(f"places: expected a whole number of blocks from 1 on, or None for all of them; got {got}")
    return n


def sequence(order):
    """The order in which blocks start: "forward", "reverse", or a seed."""
    wanted = 'order: expected "forward", "reverse" or a whole number, the seed of a shuffle'
    if isinstance(order, str):
        if order not in ("forward", "reverse"):
            raise LaunchError(f"{wanted}; got {short(order)}")
        return order
    seed = index(order)
    if seed is None:
        raise LaunchError(f"{wanted}; got {type(order).__name__} {short(order)}")
    if seed < 0:
        raise LaunchError(f"{wanted}, 0 or more; got {seed}")
    return seed


def blocks_of_cluster(cluster, grid, places, only):
    """How many blocks a cluster has."""
    n = index(
        cluster[0] if isinstance(cluster, (tuple, list)) and tuple(cluster[1:]) in ((), (1,), (1, 1)) else cluster
    )
    if n is None or not 1 <= n <= CLUSTER_LIMIT or grid[0] % n:
        wanted = f"1 to {CLUSTER_LIMIT} blocks along x, as many as divide the grid's {grid[0]}"
        raise LaunchError(f"cluster: expected {wanted}; got {short(cluster)}")
    if n > 1 and (only is not None or (places is not None and places < n)):
        what = "only: expected None" if only is not None else f"places: expected {n} or more"
        raise LaunchError(f"{what} beside clusters of {n} blocks; got {short(only if only is not None else places)}")
    return n


def some_blocks(only, order, grid):
    """The numbers of the only blocks that run."""
    blocks = grid[0] * grid[1] * grid[2]
    wanted = f"only: expected different numbers of blocks from 0 to {blocks - 1}, one or more"
    if order != "forward":
        raise LaunchError(
            f'only: expected order="forward" beside it, as the numbers give the order; got {short(order)}'
        )
    found = list(only) if isinstance(only, (list, tuple, range, np.ndarray)) else [None]
    numbers = [index(n) for n in found]
    if not numbers or not all(n is not None and 0 <= n < blocks for n in numbers) or len({*numbers}) < len(numbers):
        raise LaunchError(f"{wanted}; got {short(only)}")
    return np.array(numbers)


def index(n):
    """A whole number as an int; None for anything else, truth values too."""
    try:
        return None if isinstance(n, (bool, np.bool_)) else operator.index(n)
    except TypeError:
        return None


def check_array(p, name, a):
    if p.type not in ("u64", "b64", "s64") or p.size != 8:
        raise LaunchError(f"{name}: expected {describe(p)}; got an array of {a.dtype}")
    if not a.flags.c_contiguous:
        raise LaunchError(f"{name}: expected a C-contiguous array; got strides {a.strides} for shape {a.shape}")
    if a.dtype.kind not in "biufcV" or a.dtype.hasobject:
        raise LaunchError(f"{name}: expected an array of numbers; got dtype {a.dtype}")
    if not a.dtype.isnative:
        raise LaunchError(f"{name}: expected the machine's own byte order; got dtype {a.dtype}")


def check_pointers(p, n, name, pointers):
    """Pointers for a struct, as arrays to place."""
    found = []
    if p.type != "b8" or p.size != 8 * len(pointers.arrays):
        raise LaunchError(f"{name}: expected {describe(p)}; got {len(pointers.arrays)} pointers of 8 bytes each")
    for k, a in enumerate(pointers.arrays):
        misalignment = 0
        if isinstance(a, Buffer):
            misalignment, a = a.misalignment, a.array
        if a is None:
            continue
        if not isinstance(a, np.ndarray) or not a.flags.c_contiguous or not a.dtype.isnative or a.dtype.hasobject:
            raise LaunchError(f"{name}: pointer {k}: expected a C-contiguous array or None; got {short(a)}")
        found.append(((n, k), f"{name}[{k}]", a, misalignment))
    return found


def scalar_bytes(p, name, a):
    """A NumPy scalar as the bytes of a parameter: the size must fit, and a float is no int."""
    data = bytes(a) if isinstance(a, (bytes, np.void)) else a.tobytes()
    if isinstance(a, (bytes, np.void)):
        kinds = a.dtype.kind if isinstance(a, np.void) else ""
    elif p.type == "b8" and p.size > 1:  # a struct; those of 2 bytes are halves, float2 is like a complex number
        kinds = {2: "fu", 8: "c", 16: "c"}.get(p.size, "")
    else:
        kinds = "f" if p.type in ("f32", "f64", "f16") else "iub" if p.size == 1 else "iu"
    if len(data) != p.size or (isinstance(a, np.generic) and a.dtype.kind not in kinds):
        kind = f"np.{a.dtype.name}" if isinstance(a, np.generic) else "bytes"
        raise LaunchError(f"{name}: expected {describe(p)}; got {kind} ({len(data)} bytes)")
    return data


def describe(p):
    """What to pass for a parameter."""
    if p.type == "b8" and p.size == 2:
        return "2 bytes, such as np.float16"
    if p.type == "b8" and p.size > 1:
        return f"a struct of {p.size} bytes" + (", such as a simt.TensorMap" if p.size == BYTES else "")
    if p.size == 8 and p.type != "f64":
        return "an array, or a 64-bit integer such as np.int64"
    kind = {"f": "float"}.get(p.type[0], "int")
    return f"np.{kind}{8 * p.size}"


def hint(a):
    if isinstance(a, bool):
        return ": write np.bool_(...)"
    if isinstance(a, int):
        if not -(2**31) <= a < 2**31:
            return ", which no np.int32 can hold"
        return f": write np.int32({a}), or whatever type the kernel declares"
    if isinstance(a, float):
        return f": write np.float32({a})"
    return ""


def short(value):
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
