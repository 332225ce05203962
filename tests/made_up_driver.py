"""A card and its driver that are this CPU, for tests of launches: CPU tensors take the way that tensors on a card take.

What is launched comes to a Python function, from the checked way and from prepared calls alike.
"""

import ctypes
import hashlib
import struct
from types import SimpleNamespace

import torch

import lab.prepared
from lab import cuda_driver
from lab.cuda.launch import MAX_SHARED, Kernel
from lab.prepared import native
from lab.prepared.recording import Recording, extent
from lab.tensor_map import TensorMap

CONTEXT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
CAPTURING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
MOVE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
DEVICE = -1  # as torch numbers the CPU


class MadeUpFunction:
    """In the place of cuda_driver.Function."""

    device, max_threads, max_shared, static_shared, pdl, cooperative, maps = (
        DEVICE,
        1024,
        MAX_SHARED,
        0,
        True,
        False,
        (),
    )

    def __init__(self, driver, kernel):
        self.driver, self.name, self.parameters = driver, kernel.name, kernel.entry().parameters
        driver.functions.append(self)
        self.handle = ctypes.c_void_p(len(driver.functions))

    def allow_shared(self, size):
        pass

    def allow_cluster(self, blocks):
        pass

    def launch(self, shape, values, stream, pdl=False, cluster=None):
        values = [struct.unpack(f"={p.code}", struct.pack(f"={p.code}", v))[0] for p, v in zip(self.parameters, values)]
        self.driver.take("checked", self, shape, values, stream, pdl, cluster)


class Driver:
    """launches: [(way, kernel, shape, values, stream, attributes)]; `does(function, values)` is called for each."""

    def __init__(self):
        self.functions, self.launches, self.of_kernel = [], [], {}
        self.own = []  # where scratch memory was
        self.device, self.stream, self.status, self.capturing = DEVICE, 77, 0, 0
        self.does = lambda function, shape, values: None
        self.kept = CONTEXT(self._context), LAUNCH(self._launch), MOVE(self._move), native.STREAM(self._stream)
        self.kept = *self.kept, CAPTURING(self._capturing)

    def take(self, way, function, shape, values, stream, pdl, cluster):
        self.launches.append(SimpleNamespace(
            way=way, kernel=function.name, function=function, shape=shape, values=values, stream=stream, pdl=bool(pdl),
            cluster=cluster,
        ))  # fmt: skip
        self.does(function, shape, values)

    def addresses(self):
        context, launch, move, stream, capturing = map(native.address, self.kept)
        return [stream, context, launch, move, capturing]

    def _stream(self, device, found):
        found[0] = self.stream
        return 0

    def _context(self, found):
        found[0] = self.device
        return 0

    def _capturing(self, stream, found):
        found[0] = self.capturing
        return 0

    def _move(self, at, address):
        ctypes.c_uint64.from_address(at).value = address
        return 0

    def _launch(self, config, handle, parameters, extra):
        if self.status:
            return self.status
        function = self.functions[handle - 1]
        *shape, stream, attributes, count = cuda_driver.CONFIG.unpack(ctypes.string_at(config, cuda_driver.CONFIG.size))
        size = cuda_driver.ATTRIBUTE.size
        found = [cuda_driver.ATTRIBUTE.unpack(ctypes.string_at(attributes + i * size, size)) for i in range(count)]
        found = {which: values for which, *values in found}
        cluster = found.get(cuda_driver.CLUSTER)
        values = []
        for index, parameter in enumerate(function.parameters):
            at = ctypes.c_uint64.from_address(parameters + 8 * index).value
            values += struct.unpack(f"={parameter.code}", ctypes.string_at(at, parameter.size))
        pdl = cuda_driver.PROGRAMMATIC_SERIALIZATION in found
        self.take("prepared", function, tuple(shape), values, stream, pdl, cluster and tuple(cluster))
        return 0


class _Told:
    """What calls.c was told to call: setting it tells it, also when monkeypatch sets it back."""

    @property
    def launching(self):
        return native._launching

    @launching.setter
    def launching(self, addresses):
        if addresses is not None:
            native.begin(addresses)


TOLD = _Told()


def put_in(monkeypatch):
    """Put it in the driver's place; returns the Driver."""
    driver = Driver()
    plan, entry, note = Kernel._plan, Kernel.entry, Recording.plan

    def noted(recording):
        own = [*recording.scratches, *(tensor for *_, tensor in recording.supplies)]
        driver.own += map(extent, own)
        return note(recording)

    def planned(kernel, args):
        tensors, integers, others, function = plan(kernel, args)
        others = [(index, as_bytes if isinstance(args[index], TensorMap) else how) for index, how in others]
        if all(arg.device.type == "cpu" for arg in args if isinstance(arg, (torch.Tensor, TensorMap))):
            if kernel not in driver.of_kernel:
                driver.of_kernel[kernel] = MadeUpFunction(driver, kernel)
            function = driver.of_kernel[kernel]
        return tensors, integers, others, function

    monkeypatch.setattr(Recording, "plan", noted)
    monkeypatch.setattr(Kernel, "_plan", planned)
    monkeypatch.setattr(
        Kernel, "entry", lambda kernel, device=None: entry(kernel, None if device == DEVICE else device)
    )
    # None is found while this lasts. A kernel that is made meanwhile keeps its own for afterwards.
    plans = property(lambda kernel: {}, lambda kernel, plans: vars(kernel).__setitem__("_plans", plans))
    monkeypatch.setattr(Kernel, "_plans", plans, raising=False)
    monkeypatch.setattr(cuda_driver, "current_stream", lambda device: driver.stream)
    monkeypatch.setattr(cuda_driver, "capability", lambda device: (9, 0))
    monkeypatch.setattr(TOLD, "launching", driver.addresses())
    library = native._library()
    monkeypatch.setattr(lab.prepared, "_loaded", [library])
    monkeypatch.setattr(lab.prepared, "_library", lambda: library)
    return driver


def as_bytes(map):
    """A tensor map as if the driver had made it: its address, and what else it was made of."""
    tensor = map.tensor
    rest = repr((tensor.shape, tensor.stride(), tensor.dtype, map.box, map.swizzle)).encode()
    return struct.pack("=Q", tensor.data_ptr()) + hashlib.sha512(rest).digest() + bytes(56)


def expect_the_same(driver, calls, first, second):
    """Fail unless calls, a lab.prepared.Calls, launches `second` alike before and after `first`, a call of its kind
    with other tensors, was made. Both are functions without arguments, `second` with outputs of its own. Only scratch
    memory, and what is supplied, may be elsewhere. Returns the launches."""
    calls.clear()
    driver.launches.clear()
    driver.own.clear()
    second()
    checked = driver.launches[:]
    calls.clear()
    first()
    driver.launches.clear()
    second()
    prepared = driver.launches[:]
    assert [launch.way for launch in checked] == ["checked"] * len(checked)
    assert [launch.way for launch in prepared] == ["prepared"] * len(checked)
    for one, two in zip(checked, prepared):
        names = [parameter.name for parameter in one.function.parameters]
        for name, a, b in zip(names, one.values, two.values):
            own = isinstance(a, int) and any(begin <= a < end for begin, end in driver.own)
            assert a == b or own, f"{one.kernel}: {name}: {a} checked, {b} prepared"
        for fact in ("kernel", "function", "shape", "stream", "pdl", "cluster"):
            assert getattr(one, fact) == getattr(two, fact), fact
    return prepared


def array(address, shape, dtype):
    """The tensor at this address."""
    count = torch.Size(shape).numel()
    raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).view(shape)
