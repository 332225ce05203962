"""calls.c, compiled on first use and told where the functions of PyTorch and of the driver are."""

import contextlib
import ctypes
import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from lab import cuda_driver
from lab.compiler import CompileError, NoCompiler, compile_c
from lab.prepared.recording import under_way

HERE = Path(__file__).resolve().parent
HEADERS = ("python.h", "look.h", "memory.h", "launch.h")
LOOKS = ("dtype", "device_type", "device_index", "layout", "dim", "sizes", "strides", "data_ptr", "storage_size")
LOOKS = (*(f"get_{name}" for name in LOOKS), "get_storage_offset", "empty_strided", "delete_tensor_object")
LOOKS = (*LOOKS, "layout_strided", "dtype_uint8", "grad_mode_is_enabled", "dtype_element_size")
LOOKS = (*LOOKS, "create_device_guard", "delete_device_guard")
NEGATIVE = "_ZN2at6native6is_negERKNS_6TensorE"  # bool at::native::is_neg(const at::Tensor &)
WRAP = "_Z16THPVariable_WrapRKN2at10TensorBaseE"  # PyObject *THPVariable_Wrap(const at::TensorBase &)
MODES = "_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb"  # bool any_modes_set(bool skip_infra_modes)
INCLUDED = "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE"  # bool tls_is_dispatch_key_included(key)
STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))

IDLE = """
int stream(int32_t device, void **found) { *found = 0; return 0; }
int context(int *device) { *device = DEVICE; return 0; }
int launch(const void *config, void *function, void **parameters, void **extra) { return 0; }
int move(void *map, void *address) { return 0; }
int capturing(void *stream, int *status) { *status = 0; return 0; }
"""  # in the place of the driver


class Unprepared(RuntimeError):
    """Calls cannot be prepared here; the message says why."""


def address(function):
    """Where a C function is."""
    return ctypes.cast(function, ctypes.c_void_p).value


def of_torch():
    """The addresses of what `api` in look.h has of PyTorch."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        cpu, python = (ctypes.CDLL(str(folder / f"lib{name}.so")) for name in ("torch_cpu", "torch_python"))
        looks = [getattr(cpu, f"aoti_torch_{name}") for name in LOOKS]
        return [*map(address, (*looks, getattr(cpu, NEGATIVE), getattr(python, WRAP)))]
    except (OSError, AttributeError) as error:
        raise Unprepared(f"this build of PyTorch, {torch.__version__}, lacks a function: {error}") from None


@functools.cache
def of_modes():
    """What says whether somebody wants to be asked before a tensor is made, at the end of `api`; zeros: nothing does,
    and so all tensors are made by PyTorch's dispatcher."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        layer = int(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode)
        return address(getattr(library, MODES)), address(getattr(library, INCLUDED)), layer
    except (OSError, AttributeError, TypeError):
        return 0, 0, 0


def maker(tensor):
    """(function, arguments) that make such a tensor on the current device at the least cost; True: none known."""
    name = f"_empty_strided_{tensor.device.type}"
    function = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), name, None)
    return (
        True
        if function is None or not of_modes()[0]
        else (function, (tuple(tensor.shape), tensor.stride(), tensor.dtype))
    )


def lasting(card, stream, size):
    """Memory of so many bytes, for a stream of a card, or (-1) on the CPU. Made by a thread of its own, in which no
    mode is on: while torch.compile(mode="reduce-overhead") warms a graph up, all that its thread makes lies in the
    graph's pool. And on that stream: memory that it has freed and still works on is good for what follows there, no
    other's. That of a thread's own is none of that thread's: there another stream is waited for."""

    def make():
        if card < 0:
            return torch.empty(size, dtype=torch.uint8)
        with torch.cuda.device(card):
            if stream == cuda_driver.PER_THREAD:
                on = torch.cuda.Stream()
            else:
                on = torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()
            with torch.cuda.stream(on):
                found = torch.empty(size, dtype=torch.uint8, device="cuda")
            if stream == cuda_driver.PER_THREAD:
                on.synchronize()
            return found

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def of_driver():
    """The addresses of the five functions that launch."""
    driver = cuda_driver.driver()
    move = getattr(driver, "cuTensorMapReplaceAddress", None)
    try:
        here, launch, capturing = driver.cuCtxGetDevice, driver.cuLaunchKernelEx, driver.cuStreamIsCapturing
    except AttributeError as error:
        raise Unprepared(f"this driver lacks a function: {error}") from None
    return [_stream(), address(here), address(launch), move and address(move), address(capturing)]


@functools.cache
def _stream():
    """The function that gives PyTorch's current stream: its own, or one made of what Python has."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
        return address(library.aoti_torch_get_current_cuda_stream)
    except (OSError, AttributeError):

        def current(device, found):
            found[0] = cuda_driver.current_stream(device)
            return 0

        _KEPT.append(STREAM(current))
        return address(_KEPT[-1])


_KEPT = []  # what C has the addresses of
_launching = None  # as `begin` was last told


@functools.cache
def _library():
    if sys.platform != "linux" or sys.implementation.name != "cpython":
        raise Unprepared(f"it is written for CPython on Linux, got {sys.implementation.name} on {sys.platform}")
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise Unprepared("it needs Python's global lock, which this build does without")
    try:
        headers = [HERE / name for name in HEADERS]
        compiled = compile_c(HERE / "calls.c", headers=headers, openmp=False)
        library = ctypes.PyDLL(str(compiled.path))  # Python's lock is held
    except (NoCompiler, CompileError, OSError) as error:  # no room on the disk, say
        raise Unprepared(str(error)) from None
    library.prepared_table.restype = ctypes.py_object
    library.prepared_begin.restype = library.prepared_pause.restype = None
    library.prepared_probe.argtypes = ctypes.py_object, ctypes.c_void_p
    library.prepared_settle.argtypes = (ctypes.py_object,)
    return library


def begin(launching):
    """Tell calls.c what it calls; `launching`: as of_driver gives it. Raises Unprepared if it sees tensors wrongly."""
    global _launching
    library, _launching = _library(), launching
    objects = [
        id(one) for one in (torch.Tensor, torch.nn.Parameter, tuple, cuda_driver.CudaError, int, under_way, lasting)
    ]
    addresses = [*of_torch(), *launching, *objects, *of_modes()]
    some = (torch.empty(3), torch.nn.Parameter(torch.empty(2, 2)), torch.empty(5)[2:], torch.ones(4).double())
    library.prepared_begin((ctypes.c_void_p * len(addresses))(*addresses))
    library.prepared_settle(some)
    base = torch.zeros(7, 6, 5, dtype=torch.int16)
    seen = base[1:6:2, 2:4]
    found = (ctypes.c_int64 * 12)()
    good = library.prepared_probe(seen, found)
    first = seen.data_ptr()
    wanted = [first, first + 2 * (1 + 2 * 60 + 5 + 4), *seen.shape, *seen.stride()]
    if not good or found[0] != 3 or list(found)[4:] != wanted:
        raise Unprepared(f"PyTorch {torch.__version__} lays tensors out in an unknown way")
    return library


@contextlib.contextmanager
def without_driver(device):
    """Prepared calls on this card (-1: the CPU) end where they would ask the driver. Not while other threads launch."""
    before = _launching
    idle = compile_c(IDLE.replace("DEVICE", str(device)), name="idle.c", openmp=False)
    library = ctypes.CDLL(str(idle.path))
    begin([address(getattr(library, name)) for name in ("stream", "context", "launch", "move", "capturing")])
    try:
        yield
    finally:
        begin(before)


@functools.cache
def on_cards():
    """The library, for calls on cards."""
    return begin(of_driver())
