"""Compile C with the machine's own compiler and call it with NumPy arrays.

    library = compile_c("void scale(float *x, int64_t n, float by) { for (int64_t i = 0; i < n; i++) x[i] *= by; }")
    library.scale(x, x.size, 2.0)

The prototype in the source is read, so every call is checked against it: a wrong dtype is a sentence, not a crash.
Libraries are kept in .build/, by a hash of everything that shaped them, so a cell runs fast the second time; where the
course is installed as a package (lab/wheel.py), in the user's cache.
"""

import atexit
import ctypes
import functools
import hashlib
import numbers
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from lab import bootstrap
from lab.arguments import expect_array
from lab.processor import features

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = __name__.rpartition("lab.")[0]  # "matmul_to_mamba." where the course is installed, "" in its own folder
PRELUDE = "#include <stdint.h>\n#include <stddef.h>\ntypedef uint16_t half; /* 16 bits that hold an IEEE half */\n"
TYPES = {  # C name: (ctypes scalar, NumPy dtype behind a pointer)
    "float": (ctypes.c_float, np.float32),
    "double": (ctypes.c_double, np.float64),
    "half": (ctypes.c_uint16, np.float16),
    "uint8_t": (ctypes.c_uint8, np.uint8),
    "int8_t": (ctypes.c_int8, np.int8),
    "uint16_t": (ctypes.c_uint16, np.uint16),
    "int": (ctypes.c_int, np.int32),
    "int32_t": (ctypes.c_int32, np.int32),
    "uint32_t": (ctypes.c_uint32, np.uint32),
    "int64_t": (ctypes.c_int64, np.int64),
    "uint64_t": (ctypes.c_uint64, np.uint64),
}
BASE_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-Werror=implicit-function-declaration")


class NoCompiler(RuntimeError):
    """There is no C compiler on this machine."""


class CompileError(RuntimeError):
    """The compiler refused the source; the message is the compiler's own."""


@functools.cache
def find_compiler():
    """The C compiler as a list, the command and its first arguments: $CC, else cc, gcc or clang, tried on a small
    program. NoCompiler, with what it said, if none works."""
    try:
        return bootstrap.check_compiler()
    except bootstrap.Stop as error:
        raise NoCompiler(str(error)) from None


@functools.cache
def openmp_flags():
    """The flags that switch OpenMP threads on, or () where the compiler has none (Apple's clang)."""
    try:
        _build("#include <omp.h>\nint probe(void) { return omp_get_max_threads(); }", ("-fopenmp",), "openmp.c", ())
    except CompileError:
        print("note: this C compiler has no OpenMP, so every C rung runs on one thread")
        return ()
    return ("-fopenmp",)


def compile_c(source, *, flags=(), headers=(), name=None, openmp=True):
    """Compile C source and return the library.

    source   C text, or the Path of a .c file
    flags    extra compiler flags, for example machine.ISA_FLAGS["avx2"]
    headers  Paths of header files that the source includes by their bare names
    name     what compile errors call the file (default: the file's own name, or "source.c")

    Raises NoCompiler, or CompileError with the compiler's own message.
    """
    if isinstance(source, Path):
        name = name or source.name
        source = source.read_text()
    name = name or "source.c"
    if "/" in name or not name.endswith(".c"):
        raise ValueError(f'compile_c: name must be a bare file name that ends in ".c", got {name!r}')
    path = _build(source, tuple(flags) + (openmp_flags() if openmp else ()), name, tuple(headers))
    return CLibrary(path, name, source)


class CLibrary:
    """A compiled library; each function whose prototype was found in the source is an attribute."""

    def __init__(self, path, name, source):
        try:
            self._library, self._name, self.path = ctypes.CDLL(str(path)), name, path
        except OSError as error:  # such as a function that is declared but nowhere defined
            raise CompileError(f"{name} does not load: {_bare(str(error))}") from None
        self._prototypes = dict(_prototypes(source))

    def __getattr__(self, function):
        if function.startswith("_") or function not in self._prototypes or not hasattr(self._library, function):
            known = ", ".join(self._prototypes) or "none"
            raise AttributeError(f"{self._name} has no public function {function!r}; it has: {known}")
        call = CFunction(self._library, function, *self._prototypes[function])
        setattr(self, function, call)  # so the next look-up is free
        return call


class CFunction:
    """A C function whose arguments are checked against its prototype, then passed without a copy."""

    def __init__(self, library, name, returns, parameters):
        self.name, self.parameters = name, parameters
        self.call = getattr(library, name)
        self.call.restype = None if returns == "void" else TYPES[returns][0]
        self.call.argtypes = [ctypes.c_void_p if pointer else TYPES[kind][0] for kind, pointer, _, _ in parameters]

    def __call__(self, *args):
        if len(args) != len(self.parameters):
            names = ", ".join(p[3] for p in self.parameters)
            raise TypeError(f"{self.name}: takes {len(self.parameters)} arguments ({names}), got {len(args)}")
        return self.call(*(self._convert(a, *p) for a, p in zip(args, self.parameters)))

    def _convert(self, value, kind, pointer, const, name):
        ctype, dtype = TYPES[kind]
        if pointer:
            shape = getattr(value, "shape", ("n",))  # any shape: the sizes travel as arguments of their own
            expect_array(self.name, name, value, dtype=dtype, shape=shape, writeable=not const)
            return value.ctypes.data
        if kind in ("float", "double"):
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
                raise TypeError(f"{self.name}: {name} must be a number, got {value!r}")
            return float(value)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{self.name}: {name} must be a whole number, got {value!r}")
        if ctype(int(value)).value != value:
            raise ValueError(f"{self.name}: {name} = {value} does not fit in {kind}")
        return int(value)


def _prototypes(source):
    """Yield (name, (return type, [(type, is pointer, is const, name), ...])) for each public function defined."""
    literal = r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''  # may hold what looks like a comment or a brace
    text = re.sub(rf"{literal}|/\*.*?\*/|//[^\n]*", " ", source.replace("\\\n", " "), flags=re.S)
    text = re.sub(r"^\s*#[^\n]*", " ", text, flags=re.M)
    kinds = "|".join(sorted(TYPES, key=len, reverse=True))
    function = rf"([\w\s]*)\b(void|{kinds})\s+(\w+)\s*\(([^(){{}};]*)\)\s*\{{"
    parameter = (
        rf"(const\s+)?({kinds})\b\s*(const\b\s*)?(\*?)\s*(?:(?:restrict|const|__restrict|__restrict__)\b\s*)*"
        r"(\w+)\s*(\[[^\]]*\])?"
    )
    for before, returns, name, inside in re.findall(function, text):
        # "static" is not public, and "unsigned int" is not int
        plain = not {"static", "unsigned", "signed", "long", "short", "_Complex"} & set(before.split())
        found = [re.fullmatch(parameter, p.strip()) for p in inside.split(",") if p.strip() not in ("", "void")]
        if plain and all(found):
            yield name, (returns, [(m[2], bool(m[4] or m[6]), bool(m[1] or m[3]), m[5]) for m in found])


def _build(source, flags, name, headers):
    """Compile to a shared library in the cache and return its path."""
    flags = (*BASE_FLAGS, *flags)
    parts = [PRELUDE, source, *flags, compiler_version(), features(), *(h.read_text() for h in headers)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    target = build_folder() / f"{Path(name).stem}-{digest}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory() as scratch:
        # The compiler runs beside the file, so that its messages name "dot.c:7:5" and no machine path.
        (Path(scratch) / name).write_text(source + "\n")
        (Path(scratch) / "prelude.h").write_text(PRELUDE)
        for header in headers:
            shutil.copy(header, scratch)
        command = [*find_compiler(), *flags, "-include", "prelude.h", name, "-o", "out.so", "-lm"]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, errors="replace")
        if done.returncode:
            said = _bare(done.stderr.strip() or done.stdout.strip()) or f"the compiler ended with {done.returncode}"
            raise CompileError(f"{name} does not compile:\n{said}")
        handle, part = tempfile.mkstemp(suffix=".part", dir=target.parent)
        os.close(handle)
        try:
            shutil.copyfile(Path(scratch) / "out.so", part)
            os.chmod(part, 0o755)
            os.replace(part, target)  # in one step: nobody ever loads half a library
        finally:
            Path(part).unlink(missing_ok=True)
    return target


def _bare(message):
    """A message without the folders of this machine, which system headers and the loader put before a file's name."""
    return re.sub(r"^(In file included from |\s+from )?/\S*/", lambda m: m[1] or "", message, flags=re.M)


@functools.cache
def compiler_version():
    """The first line of what the compiler says of its version."""
    done = subprocess.run([*find_compiler(), "--version"], capture_output=True, text=True, errors="replace")
    return done.stdout.split("\n")[0]


def kept_in():
    """The folder for what is slow to make: .build/ in the course's folder; of the package, one in the user's cache."""
    if not PACKAGE:
        return ROOT / ".build"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache, PACKAGE.rstrip("."))


@functools.cache
def build_folder():
    """Where compiled libraries are kept: kept_in(), else a temporary folder, said aloud."""
    folder = kept_in()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        whose = "the user's cache" if PACKAGE else "the course's folder"
        print(f"note: {whose} is read-only, so compiled code is kept in a temporary folder")
        folder = Path(tempfile.mkdtemp(prefix="matmul-to-mamba-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder
