"""CUDA C++ -> PTX or machine code, by NVIDIA's runtime compiler (NVRTC). It needs neither a GPU nor a driver.

    ptx = compile_to_ptx('extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }')

NVRTC compiles device code only: it has no operating system's headers. Those that kernels include by habit
(stdint.h, math.h, ...) come from simt/headers.py; CUDA's own from NVIDIA's wheels, else from an installed toolkit.
Both outputs carry line numbers. Every result is kept, by the content of all that shaped it: in memory, and for later
processes in files (see kept.py).
"""

import functools
import importlib.metadata
import os
import re
import sys
from pathlib import Path

from simt import kept
from simt.errors import CompileError, CompilerMissing
from simt.headers import HEADERS, hints, nvcc_includes
from simt.kernel_names import noted

FLAGS = ("-lineinfo", "-default-device")  # -default-device: a function without __device__ is device code too
SHOWN = 3  # errors in a message
LANDMARKS = ("cuda_fp16.h", "crt/mma.h", "cuda/std/cstdint")  # a header of each wheel that brings CUDA's

DIAGNOSTIC = re.compile(
    r"(?:(?P<file>[^\n]+?)\((?P<line>\d+)\)|At end of source): (?:catastrophic )?error(?: #[\w-]+)?: (?P<text>.*)"
)
# A warning that a variable is used before its value is set, with the line that is quoted below it.
UNSET = re.compile(r"^(?P<file>[^\n]+?)\(\d+\): warning #549-D(?=: [^\n]*\n(?P<code>[^\n]*))", re.M)
IN_AND_OUT = re.compile(r'"\+\w+"\s*\(')  # an operand of inline assembly, which may not read it (wgmma's accumulators)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.M)
NOT_ERROR = re.compile(r"(?i)\b(warning|remark|note)( #[\w-]+)?:|errors? detected in the|^Compilation terminated")


def compile_to_ptx(source, options=(), arch="sm_90", name="kernel.cu", assembled=True, instances=()):
    """PTX text of a CUDA C++ source.

    source   the text of the file, device code
    options  strings for NVRTC, such as "-DPAD=1", "-I<folder>" or "--use_fast_math"; C++17 unless they say otherwise
    arch     the card's architecture, such as "sm_90" or "sm_90a"
    name     what errors and PTX line numbers call the file
    assembled  False: make no machine code of it, which takes nearly half of the time. What only the assembler
               refuses, such as an instruction that is none, is then not noticed
    instances  kernel templates with their arguments, such as ["sum<256>"], to be made kernels of; how they are spelt
               stands at the end of the PTX (simt/kernel_names.py)

    CompileError with the first errors in the source's own lines; CompilerMissing where there is no NVRTC;
    TypeError or ValueError for an argument of the wrong kind. Warnings are dropped (see `compiler_log`), but for one: a
    variable that is read where nothing can have set it is an error.
    """
    return _compile(source, options, arch, name, assembled, instances)[0]


def compile_to_cubin(source, options=(), arch="sm_90", name="kernel.cu"):
    """Machine code for one architecture, as bytes (an ELF file). Arguments and errors as in compile_to_ptx."""
    return _compile(source, options, arch, name)[1]


def compiler_log(source, options=(), arch="sm_90", name="kernel.cu"):
    """What the compiler said of a source that it took: warnings, and what --ptxas-options=-v asks for."""
    return _compile(source, options, arch, name)[2]


def version():
    """NVRTC's version, such as (13, 0). CompilerMissing where there is none."""
    return _load()[1]


@functools.cache
def architectures():
    """The architectures that this NVRTC compiles for: ("sm_75", "sm_80", ...). CompilerMissing where there is none."""
    nvrtc, _ = _load()
    return tuple(f"sm_{arch}" for arch in _take(nvrtc.nvrtcGetSupportedArchs()))


def _compile(source, options, arch, name, assembled=True, instances=()):
    """(PTX text, machine code, log) from the memory or a file, or else from NVRTC, which makes both at once.

    Not assembled: the machine code may be empty."""
    options, instances = _expect(source, options, arch, name), _names(instances)
    included = _included(source, options, name)
    given = [source, arch, name, *options, *(f"{path}\0{text}" for path, text in included.items())]
    given += [f"instance {instance}" for instance in instances]
    here = os.getcwd()
    digest = kept.digest(*given, here)
    if not assembled and digest not in _compiled:
        given.append("not assembled")
        digest = kept.digest(*given, here)
    if digest not in _compiled:
        shared = None  # what a process in any folder may use
        if all(path.is_absolute() for path in included) and not any(map(UNSEEN.search, (source, *included.values()))):
            shared = kept.digest("nvrtc", *given, *_installed())
        found = kept.find(shared) if shared else None
        if found is None:
            target = arch if assembled else arch.replace("sm_", "compute_")
            _compiled[digest] = ptx, code, log = _ask(source, options, target, name, instances)
            if shared and here not in _without_folders(ptx + log, options, here):
                kept.keep(shared, b"\0".join((ptx.encode(), log.encode(), code)))
        else:
            ptx, log, code = found.split(b"\0", 2)
            _compiled[digest] = ptx.decode(), code, log.decode()
    return _compiled[digest]


_compiled = {}  # {digest: (PTX text, machine code, log)}
UNSEEN = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[^"<\s]|\b__has_include\b', re.M)  # _included does not follow these


@functools.cache
def _installed():
    """What of this machine shapes a result, as texts: the compiler, CUDA's headers, this file and headers.py."""
    found = [str(version()), *(path.read_text() for path in (Path(__file__), Path(__file__).with_name("headers.py")))]
    for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "cuda-bindings"):
        try:
            found.append(f"{wheel} {importlib.metadata.version(wheel)}")
        except importlib.metadata.PackageNotFoundError:
            pass
    for folder in include_folders():
        for header in LANDMARKS:
            path = Path(folder, header)
            if path.is_file():
                found.append(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}")  # another wheel's are others
    return found


def _without_folders(text, options, here):
    """The text without the folders of headers that are named in full: they are the same wherever a process is."""
    for folder in (*_folders(options), *include_folders()):  # CUDA's may be those of a .venv in this very folder
        if folder.startswith(here + os.sep):
            text = text.replace(folder + os.sep, "")
    return text


def _expect(source, options, arch, name):
    """Raise unless the arguments are of the right kind; return the options as a tuple."""
    for what, value in (("source", source), ("arch", arch), ("name", name)):
        if not isinstance(value, str):
            raise TypeError(f"compile: {what} must be a str, got {type(value).__name__}")
        if "\0" in value:
            raise ValueError(f"compile: {what} holds a null character, at position {value.index(chr(0))}")
    if isinstance(options, (str, bytes)) or not hasattr(options, "__iter__"):
        raise TypeError(f'compile: options must be a tuple of strings, such as ("-DPAD=1",), got {options!r}')
    options = tuple(options)
    for option in options:
        if not isinstance(option, str):
            raise TypeError(f"compile: options must be strings, got {option!r}")
        if "\0" in option:
            raise ValueError(f"compile: option {option!r} holds a null character")
    if not source.strip():
        raise CompileError(f"{name} does not compile: the source is empty")
    if re.sub(r"(?<=\d)[af]$", "", arch) not in architectures():
        known = ", ".join(architectures())
        raise ValueError(f"compile: arch must be an architecture that this NVRTC knows ({known}), got {arch!r}")
    return options


def _names(instances):
    """The names of instances of kernel templates as a tuple, or an error."""
    if isinstance(instances, (str, bytes)) or not all(isinstance(instance, str) for instance in instances):
        raise TypeError(f'compile: instances must be a list of strings, such as ["sum<256>"], got {instances!r}')
    instances = tuple(" ".join(instance.split()) for instance in instances)
    for instance in instances:
        if not re.match(r"[A-Za-z_]\w*(::\w+)*\s*<[^;{}\0]*>$", instance):
            raise ValueError(
                f'compile: an instance is a template\'s name and arguments, as "sum<256>", got {instance!r}'
            )
    return instances


def _included(source, options, name):
    """{path: text} of the files that the source includes, but for CUDA's own, as part of a result's key."""
    folders = [Path(), *map(Path, _folders(options))]
    todo, seen = [(Path(name).parent, source)], {}
    while todo:
        beside, text = todo.pop()  # what a header includes is first looked for beside it
        for header in INCLUDE.findall(text):
            for path in (Path(os.path.normpath(folder / header)) for folder in (beside, *folders)):
                if path not in seen and path.is_file():
                    seen[path] = path.read_text(errors="replace")
                    todo.append((path.parent, seen[path]))
    return seen


def _folders(options):
    """The folders in which options have headers looked for."""
    flags = zip(options, (*options[1:], ""))
    folders = [option[2:] or after for option, after in flags if option.startswith("-I")]
    return folders + [option.partition("=")[2] for option in options if option.startswith("--include-path=")]


def _ask(source, options, arch, name, instances):
    """Compile with NVRTC: (PTX text, machine code, log), or CompileError.

    A source that fails for a name which nvcc knows without a header is compiled again with that header.
    """
    try:
        return _ask_once(source, options, arch, name, instances)
    except CompileError as error:
        brought = nvcc_includes(error.log)
        if not brought:
            raise
    return _ask_once(source, options, arch, name, instances, tuple(f"--pre-include={header}" for header in brought))


def _ask_once(source, options, arch, name, instances, brought=()):
    nvrtc, _ = _load()
    standard = () if any(re.match(r"--?std\b", option) for option in options) else ("--std=c++17",)
    folders = include_folders()
    flags = (f"--gpu-architecture={arch}", *FLAGS, *standard, *options, *brought)
    flags += tuple(f"-I{folder}" for folder in folders)
    texts, names = [t.encode() for t in HEADERS.values()], [n.encode() for n in HEADERS]
    program = _take(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(names), texts, names))
    try:
        for instance in instances:
            _take(nvrtc.nvrtcAddNameExpression(program, instance.encode()))
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        log = _content(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0 \n")
        log = log.decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(_explain(log or str(status), name, options, folders), log)
        refused = UNSET.sub(lambda found: _as_error(found, name), log)
        if refused != log:
            raise CompileError(_explain(refused, name, options, folders), log)
        ptx = _content(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0").decode()
        ptx = re.sub(r"^\s*\.file\s.*$", lambda line: _as_text(line[0]), ptx, flags=re.MULTILINE)
        here = os.getcwd().replace("\\", "/").rstrip("/")
        ptx = ptx.replace(f'"{here}/{name}"', f'"{name}"')  # no folder of this machine before the learner's file
        spelt = {instance: _take(nvrtc.nvrtcGetLoweredName(program, instance.encode())) for instance in instances}
        ptx += noted({instance: spelling.decode() for instance, spelling in spelt.items()})
        assembled = arch.startswith("sm_")
        code = _content(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program) if assembled else b""
        return ptx, code, log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _as_error(found, name):
    """A warning of an unset variable, as an error if it is about the learner's own code."""
    mine = found["file"] == name and not IN_AND_OUT.search(found["code"])
    return found[0].replace("warning", "error") if mine else found[0]


def _as_text(line):
    """NVRTC writes each byte of a file's name that is not ASCII as an octal number: ü is \\303\\274."""

    def decoded(octals):
        return bytes(int(number, 8) for number in octals[0].split("\\")[1:]).decode(errors="replace")

    return re.sub(r"(?:\\[0-7]{3})+", decoded, line)


def _explain(log, name, options, folders):
    """The compiler's log as a message: its first errors, those in the learner's own file before those in headers."""
    for folder in folders:
        log = log.replace(folder + "/", "")
    refused = re.findall(r"^nvrtc: error: (.*)", log, flags=re.M)
    if refused:
        return f"{name} does not compile: NVRTC refused its options: {refused[0]} (they were {list(options)})"
    errors, current = [], None  # current: the error whose lines are being read
    for line in log.split("\n"):
        found = DIAGNOSTIC.match(line)
        if found:
            where = f"{found['file']}:{found['line']}" if found["line"] else "at the end of the source"
            current = [f"{where}: error: {found['text']}"]
            errors.append((found["file"] not in (name, None), current))
        elif not line.strip() or NOT_ERROR.search(line):
            current = None
        elif current is not None:
            current.append(line)
    if not errors:  # such as those of ptxas on inline assembly, which counts the lines of the PTX
        said = re.sub(r"^ptxas application ptx input, line \d+; error\s*: ", "ptxas: ", log, flags=re.M)
        errors = [(False, [line]) for line in said.split("\n") if line.strip() and "aborted due to" not in line]
    errors.sort(key=lambda error: error[0])  # stable: the compiler's order within each part
    blocks = ["\n".join(block) for _, block in errors]
    message = [f"{name} does not compile:", *blocks[:SHOWN]]
    if len(blocks) > SHOWN:
        message.append(f"... and {len(blocks) - SHOWN} more")
    message += hints(blocks)
    return "\n".join(message)


@functools.cache
def _load():
    """(the NVRTC binding, its version), or CompilerMissing."""
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(str(status))
    except Exception as error:  # no binding, no library, a library that does not load: each has its own type
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        bring = (
            "there is none for macOS"
            if sys.platform == "darwin"
            else "pip install cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl"
        )
        raise CompilerMissing(
            f"CUDA C++ needs NVIDIA's runtime compiler, NVRTC, and it was not found ({first}): {bring}. "
            "What works without it: simt.load(ptx) runs a kernel from its PTX text."
        ) from None
    return nvrtc, (major, minor)


@functools.cache
def include_folders():
    """The folders with CUDA's headers, as strings: those of NVIDIA's wheels, then those of an installed toolkit for
    what the wheels lack. Where a wheel is missing, only sources that include its headers fail."""
    try:
        import nvidia

        wheels = [Path(folder) for folder in nvidia.__path__]
    except ImportError:
        wheels = []
    parts = ("cu13", "cuda_runtime", "cuda_nvcc", "cuda_crt", "cuda_cccl", "cu12")
    roots = [wheel / part for wheel in wheels for part in parts]
    roots += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    roots += [Path(sys.prefix, "targets", "x86_64-linux"), Path("/usr/local/cuda")]
    folders = []
    for header in LANDMARKS:
        places = (root / "include" / part for root in roots for part in ("", "cccl"))
        found = next((str(place) for place in places if (place / header).is_file()), None)
        if found and found not in folders:
            folders.append(found)
    return folders


def _content(size, get, program):
    """What a pair of NVRTC's functions, the size and the content, has to say of a program."""
    content = bytes(_take(size(program)))  # written by NVRTC: nobody else has seen it yet
    _take(get(program, content))
    return content


def _take(result):
    """The value of one NVRTC call; what fails here is a fault of this file or of the installation."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"NVRTC: {status}")
    return values[0] if values else None
