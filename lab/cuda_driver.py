"""The CUDA driver, as far as one launch needs it: load machine code, find a function, launch it.

It is called through ctypes: a launch then costs about as little host time as Python can do it in. All that one call
needs lies in buffers that are made once (per function and thread) and only filled in by the call.
"""

import ctypes
import functools
import struct
import sys
import threading

import torch

SUCCESS, INVALID_CONTEXT, NOT_FOUND = 0, 201, 500
# Numbers of the driver's interface (cuda.h).
MAX_SHARED_OPTIN, MAJOR, MINOR = 97, 75, 76  # device attributes
MAX_THREADS, STATIC_SHARED, MAX_DYNAMIC_SHARED, NON_PORTABLE_CLUSTER = 0, 1, 8, 14  # function attributes
COOPERATIVE, CLUSTER, PROGRAMMATIC_SERIALIZATION = 2, 4, 6  # launch attributes
TENSOR_MAP = 128  # bytes of a CUtensorMap
RELAXED = 2  # capture mode: this thread may load code while a CUDA graph is being captured

PER_THREAD = 2  # the handle of the default stream that each thread has of its own: one handle, many streams

CONFIG = struct.Struct("=7I4xQQI4x")  # CUlaunchConfig: grid, block, shared bytes, stream, attributes, their number
ATTRIBUTE = struct.Struct("=I4x3I52x")  # CUlaunchAttribute: which, and a value of 64 bytes

# PyTorch's own short ways, which Triton uses too; absent from a build without CUDA.
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device = getattr(torch._C, "_cuda_getDevice", None)


class CudaError(RuntimeError):
    """The driver refused; the message has its own name for why."""


@functools.cache
def driver():
    """The driver's library, or CudaError."""
    if torch.version.cuda is None:
        raise CudaError(f"CUDA kernels need an NVIDIA GPU and PyTorch built for CUDA, got PyTorch {torch.__version__}")
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise CudaError(f"the NVIDIA driver's library {name} does not load: {error}") from None


def check(status, doing):
    """Raise CudaError unless `status` is success."""
    if status == SUCCESS:
        return
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    driver().cuGetErrorName(status, ctypes.byref(name))
    driver().cuGetErrorString(status, ctypes.byref(text))
    said = f"{(name.value or b'error %d' % status).decode()}: {(text.value or b'').decode()}"
    raise CudaError(f"{doing}: the CUDA driver says {said}")


def capability(device):
    """(major, minor) of the card with this index."""
    return torch.cuda.get_device_capability(device)


def own_stream(device):
    """A key that launches have in common which follow each other: the handle of PyTorch's current stream of this card;
    where that means a stream of each thread's own, an object of this thread."""
    stream = current_stream(device)
    return _OWN.stream if stream == PER_THREAD else stream


class _Own(threading.local):
    def __init__(self):
        self.stream = object()  # which a key keeps: no later thread has the same


_OWN = _Own()


def bind(device):
    """Make the context that PyTorch uses on this card current in this thread, where none is."""
    cuda, handle, context = driver(), ctypes.c_int(), ctypes.c_void_p()
    check(cuda.cuDeviceGet(ctypes.byref(handle), device), f"card {device}")
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"card {device}")
    check(cuda.cuCtxSetCurrent(context), f"card {device}")


def load(image, device, name):
    """Load machine code (or PTX text) on a card; return the module's handle, never unloaded.

    Safe while a graph is captured: loading is no work of the stream, and the thread says so."""
    cuda, module, mode = driver(), ctypes.c_void_p(), ctypes.c_int(RELAXED)
    with torch.cuda.device(device):
        bind(device)
        check(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), name)
        try:
            check(cuda.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(image)), f"{name} does not load")
        finally:
            cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return module


def variable(module, device, name, source):
    """(address, bytes) of a variable of a loaded module; ValueError if it has none of this name."""
    address, size = ctypes.c_uint64(), ctypes.c_size_t()
    with torch.cuda.device(device):
        bind(device)
        status = driver().cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), module, name.encode())
    if status == NOT_FOUND:
        raise ValueError(f"{source} has no variable {name!r} outside of all functions and namespaces")
    check(status, f"{source}: {name}")
    return address.value, size.value


def copy(target, source, size, device, doing):
    """Copy bytes on a card, on the stream that is current there."""
    stream = ctypes.c_void_p(current_stream(device))
    with torch.cuda.device(device):
        bind(device)
        args = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), stream
        check(driver().cuMemcpyDtoDAsync_v2(*args), doing)


def tensor_map(device, pointer, type_, shape, strides, box, swizzle, promotion):
    """The 128 bytes of a CUtensorMap in tile mode, zeros outside. lab/tensor_map.py has checked all.

    Axes innermost first; strides in bytes, of all but the innermost; type_, swizzle, promotion: the driver's numbers.
    """
    rank, encode = len(shape), getattr(driver(), "cuTensorMapEncodeTiled", None)
    if encode is None:
        raise CudaError("tensor maps need a driver of CUDA 12.0 or newer")
    room = ctypes.create_string_buffer(2 * TENSOR_MAP)
    at = -(-ctypes.addressof(room) // 64) * 64  # the driver wants it aligned
    longs, ints = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    args = (
        ctypes.c_void_p(at),
        ctypes.c_int(type_),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(pointer),
        longs(*shape),
        longs(*strides),  # none for a rank of 1, but their address may not be null
        ints(*box),
        ints(*[1] * rank),  # every element along each axis
        ctypes.c_int(0),  # not interleaved
        ctypes.c_int(swizzle),
        ctypes.c_int(promotion),
        ctypes.c_int(0),  # zeros outside
    )
    status = encode(*args)
    if status == INVALID_CONTEXT:  # a thread that has not touched the card yet
        bind(device)
        status = encode(*args)
    check(status, f"a tensor map of shape {tuple(shape[::-1])}, box {tuple(box[::-1])}")
    return ctypes.string_at(at, TENSOR_MAP)


class _Slots(threading.local):
    """One slot for each thread: ctypes lets other threads run during the call."""

    def __init__(self, parameters, cooperative):
        self.slot = _Slot(parameters, cooperative)


class _Slot:
    """The buffers of one launch."""

    def __init__(self, parameters, cooperative):
        self.cooperative = cooperative
        self.config = ctypes.create_string_buffer(CONFIG.size)
        self.attributes = ctypes.create_string_buffer(3 * ATTRIBUTE.size)
        self.attributes_at = ctypes.addressof(self.attributes)
        offsets, end = [], 0
        for parameter in parameters:
            offsets.append(-(-end // 16) * 16)  # each in a place of its own, aligned for anything
            end = offsets[-1] + parameter.size
        self.values = ctypes.create_string_buffer(max(end, 1))
        start = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * max(len(offsets), 1))(*(start + offset for offset in offsets))
        codes = (f"{p.code}{-p.size % 16}x" for p in parameters[:-1])
        self.pack = struct.Struct("=" + "".join(codes) + (parameters[-1].code if parameters else "")).pack_into
        self.config_at = ctypes.c_void_p(ctypes.addressof(self.config))
        self.pointers_at = ctypes.c_void_p(ctypes.addressof(self.pointers))
        self.filled = None  # with what

    def fill(self, shape, stream, pdl, cluster):
        count = 0
        if pdl:
            ATTRIBUTE.pack_into(self.attributes, 0, PROGRAMMATIC_SERIALIZATION, 1, 0, 0)
            count = 1
        if cluster:
            ATTRIBUTE.pack_into(self.attributes, count * ATTRIBUTE.size, CLUSTER, *cluster)
            count += 1
        if self.cooperative:
            ATTRIBUTE.pack_into(self.attributes, count * ATTRIBUTE.size, COOPERATIVE, 1, 0, 0)
            count += 1
        CONFIG.pack_into(self.config, 0, *shape, stream, self.attributes_at if count else 0, count)


class Function:
    """One kernel on one card. `cooperative`: all blocks of a launch must find room at a time (grid.sync())."""

    def __init__(self, module, name, device, parameters, cooperative=False):
        cuda = driver()
        self.name, self.device, self.handle = name, device, ctypes.c_void_p()
        self.parameters, self.cooperative = parameters, cooperative
        mode = ctypes.c_int(RELAXED)
        with torch.cuda.device(device):
            check(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), name)
            try:
                check(cuda.cuModuleGetFunction(ctypes.byref(self.handle), module, name.encode()), name)
                self.max_threads = self._attribute(MAX_THREADS)  # asking also loads code that is loaded lazily
                self.static_shared = self._attribute(STATIC_SHARED)
                value, handle = ctypes.c_int(), ctypes.c_int()
                check(cuda.cuDeviceGet(ctypes.byref(handle), device), name)
                check(cuda.cuDeviceGetAttribute(ctypes.byref(value), MAX_SHARED_OPTIN, handle), name)
            finally:
                cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        self.max_shared = value.value - self.static_shared  # bytes that a launch may ask for
        self._allowed = 48 * 1024 - self.static_shared  # ... without saying so first
        self.pdl = capability(device) >= (9, 0)
        self.maps = tuple(i for i, parameter in enumerate(parameters) if parameter.is_map and parameter.ctype)
        self._slots = _Slots(parameters, cooperative)
        self._call = cuda.cuLaunchKernelEx

    def _attribute(self, which):
        value = ctypes.c_int()
        check(driver().cuFuncGetAttribute(ctypes.byref(value), which, self.handle), self.name)
        return value.value

    def allow_shared(self, size):
        """Let launches ask for more than 48 KiB of shared memory, once."""
        if size > self._allowed:
            check(driver().cuFuncSetAttribute(self.handle, MAX_DYNAMIC_SHARED, self.max_shared), self.name)
            self._allowed = self.max_shared

    def allow_cluster(self, blocks):
        """Let launches ask for clusters of more than the 8 blocks that every card with clusters takes."""
        if blocks > 8:
            check(driver().cuFuncSetAttribute(self.handle, NON_PORTABLE_CLUSTER, 1), self.name)

    def launch(self, shape, values, stream, pdl=False, cluster=None):
        """Put one launch on a stream.

        shape   seven ints: grid x, y, z, block x, y, z, bytes of dynamic shared memory
        values  one number for each parameter (bytes for a struct), as the parameters' codes in `struct` want them
        stream  the raw handle
        """
        slot = self._slots.slot
        if values:
            slot.pack(slot.values, 0, *values)
        config = (shape, stream, pdl and self.pdl, cluster)
        if config != slot.filled:
            slot.fill(*config)
            slot.filled = config
        if current_device() != self.device:
            with torch.cuda.device(self.device):
                status = self._call(slot.config_at, self.handle, slot.pointers_at, None)
        else:
            status = self._call(slot.config_at, self.handle, slot.pointers_at, None)
        if status == INVALID_CONTEXT:  # a thread that has not touched the card yet
            bind(self.device)
            status = self._call(slot.config_at, self.handle, slot.pointers_at, None)
        if status:
            check(status, f"{self.name}: launch with grid {shape[:3]}, block {shape[3:6]}, shared {shape[6]}")
