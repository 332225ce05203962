"""One kernel, and its launch: a look at each argument the first time, then what was found, again and again."""

import math
import numbers
import operator
import struct

import numpy as np
import torch

from lab import card, cuda_driver
from lab.cuda import signature
from lab.prepared.recording import NOW
from lab.stream import STREAM
from lab.tensor_map import BITS, TensorMap
from lab.tensors import expect_resolved

MAX_THREADS, MAX_BLOCK, MAX_GRID = 1024, (1024, 1024, 64), (2**31 - 1, 65535, 65535)
MAX_SHARED = 227 * 1024  # bytes of shared memory a block can ask for on compute capability 9.0
TENSOR, STRIDED = torch.Tensor, torch.strided  # looked up at every launch
NUMBERS = {int, float, bool, type(None)}  # the usual types of what is no tensor
PLAIN = {torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8}
PLAIN |= {torch.uint64, torch.uint32, torch.uint16, torch.uint8}


class Kernel:
    """One kernel; call it to launch it."""

    def __init__(self, module, name):
        self.module, self.name = module, name
        self._plans, self._shapes, self._entries, self._functions = {}, {}, {}, {}
        self._clusters = set()  # (shape, cluster) of launches that were looked at

    def __repr__(self):
        return f"<CUDA kernel {self.name} of {self.module.name}>"

    def entry(self, device=None):
        """Its parameters and limits (a lab.cuda.signature.Entry) on a card by its index, or on the SIMT machine."""
        if device not in self._entries:
            entries = self.module.entries_on(device)
            if self.name not in entries:
                raise AttributeError(self.module._unknown(self.name))
            self._entries[device] = entries[self.name]
        return self._entries[device]

    def __call__(
        self, grid, block, *args, shared=0, stream=None, pdl=False, cluster=None, check_races=False, places=None,
        order="forward", only=None, step_limit=None,
    ):  # fmt: skip
        """Launch. None on a card, the machine's report on the CPU.

        grid, block  an int or a tuple of up to three: blocks in the grid, threads in a block
        args         one for each parameter of the kernel: contiguous tensors for pointers, all on one device (None is
                     a null pointer); ints, floats or NumPy scalars for the rest, checked against the parameter's type;
                     a lab.tensor_map.TensorMap, of a tensor on the same device, for a CUtensorMap
        shared       bytes of dynamic shared memory
        stream       a torch.cuda.Stream; None: the current one. As ever with side streams, keep the tensors alive.
        pdl          True: may start before the kernel ahead of it in the stream ends (programmatic dependent launch);
                     griddepcontrol.wait in the kernel waits for that. The SIMT machine runs one launch after another;
                     there, touching what the launch ahead wrote, or writing what it was given, before the wait is an
                     error (see lab/stream.py). Of no effect on cards before compute capability 9.0
        cluster      a tuple of three: blocks in a cluster, on compute capability 9.0 and later, and on the SIMT machine
                     along x
        check_races  on the CPU: also look for races
        places       on the CPU: how many blocks fit at a time; None: all of them
        order        on the CPU: the order in which blocks start: "forward", "reverse" or a seed
        only         on the CPU: numbers of blocks, no others run
        step_limit   on the CPU: how long an endless loop may run (see simt/kernel.py)

        TypeError or ValueError names the argument, what was expected and what came, before anything has run.
        Gradients are not tracked. On a card, errors inside the kernel show up at a later synchronisation.
        """
        kinds = []  # all that the checks look at, apart from the values of numbers; most of what a launch costs
        for arg in args:
            kind = type(arg)
            if kind is TENSOR or (kind not in NUMBERS and isinstance(arg, TENSOR)):
                plain = arg.layout is STRIDED and arg.is_contiguous() and not arg.is_neg()
                kinds += (arg.dtype, arg.device, plain)
            elif kind is TensorMap:
                kinds += (kind, arg.index)
            else:
                kinds.append(arg.dtype if isinstance(arg, np.void) else kind)
        kinds = tuple(kinds)
        plan = self._plans.get(kinds)
        if plan is None:
            plan = self._plans[kinds] = self._plan(args)
        tensors, integers, others, function = plan
        values = list(args)
        for index, convert in others:
            values[index] = convert(values[index])
        if function is None:
            for index, convert in integers:
                values[index] = convert(values[index])
            options = {"check_races": check_races, "places": places, "order": order, "ahead": STREAM.ahead(pdl)}
            further = {"only": only, "step_limit": step_limit}
            options |= {name: option for name, option in further.items() if option is not None}
            try:
                report = self._simulate(grid, block, values, tensors, shared, cluster, options)
            except Exception:
                STREAM.clear()  # nothing is known of what it has done
                raise
            mapped = [arg.tensor for arg in args if isinstance(arg, TensorMap)]
            STREAM.launched([args[index] for index in tensors] + mapped, pdl, report)
            return report

        if check_races:
            raise ValueError(f"{self.name}: check_races looks on the SIMT machine: pass CPU tensors, got CUDA tensors")
        if places is not None or order != "forward" or only is not None:
            what = "places" if places is not None else "only" if only is not None else "order"
            raise ValueError(f"{self.name}: {what} is for the SIMT machine: pass CPU tensors, got CUDA tensors")
        for index in tensors:
            values[index] = values[index].data_ptr()
        try:
            shape = self._shapes[function, grid, block, shared]
        except (KeyError, TypeError):  # not seen before, or a list
            shape = self._shape(grid, block, shared, function)
            if len(self._shapes) > 1000:
                self._shapes.clear()
            if isinstance(grid, (int, tuple)) and isinstance(block, (int, tuple)):
                self._shapes[function, grid, block, shared] = shape
        if cluster is not None:
            cluster = self._cluster(cluster, shape, function)
        if stream is None:
            raw = cuda_driver.current_stream(function.device)
        elif isinstance(stream, torch.cuda.Stream) and stream.device.index == function.device:
            raw = stream.cuda_stream
        else:
            wanted = f"a torch.cuda.Stream of cuda:{function.device}, where the tensors are"
            raise TypeError(f"{self.name}: stream must be {wanted}, got {stream!r}")
        try:
            function.launch(shape, values, raw, pdl, cluster)
        except struct.error:  # before the launch: an integer is too large, or not written as most are
            for index, convert in integers:
                values[index] = convert(values[index])
            function.launch(shape, values, raw, pdl, cluster)
        for recording in NOW.all:
            recording.launched(function, shape, args, values, pdl, cluster, stream is not None)

    def unchecked(self, grid, block, *args, shared=0, pdl=False, cluster=None, **options):
        """The same launch in half the host time, for a caller who has looked at the tensors: the first argument is one
        (or a TensorMap), and all lie contiguously on one device, with the dtypes that the kernel takes.

        On a card that is believed, from the second launch of one grid on; whether numbers fit is looked at as ever. On
        the SIMT machine, and with further options, it is the checked launch.
        """
        device = args[0].get_device()  # -1: the CPU
        function = self._functions.get(device)
        if function and not options:
            try:
                shape = self._shapes[function, grid, block, shared]
                # None: a null pointer
                values = [arg.data_ptr() if isinstance(arg, TENSOR) else arg or 0 for arg in args]
                for index in function.maps:
                    values[index] = args[index].value if args[index].index == device else None  # None: struct.error
                if cluster is not None and (shape, cluster) not in self._clusters:
                    self._clusters.add((shape, self._cluster(cluster, shape, function)))
                function.launch(shape, values, cuda_driver.current_stream(device), pdl, cluster)
            except (LookupError, TypeError, AttributeError, OverflowError, struct.error):
                pass  # before the launch: the checked one does it, or says what is wrong
            else:
                for recording in NOW.all:
                    recording.launched(function, shape, args, values, pdl, cluster)
                return None
        return self(grid, block, *args, shared=shared, pdl=pdl, cluster=cluster, **options)

    # Before the launch: look at everything once, and remember what was found.

    def _plan(self, args):
        """What a launch with such arguments does, or an error.

        (indices of the tensors, [(index, how to convert an integer)], [(index, how to convert what else is no tensor)],
        Function or None for the CPU). On a card `struct` looks at integers, so they need no conversion as a rule.
        """
        device = next((arg.device for arg in args if isinstance(arg, (torch.Tensor, TensorMap))), None)
        on_card = device is not None and device.type == "cuda"
        parameters = self.entry(device.index if on_card else None).parameters
        if len(args) != len(parameters):
            listed = ", ".join(map(str, parameters)) or "none"
            many = f"{len(parameters)} arguments after grid and block"
            raise TypeError(f"{self.name}: takes {many} ({listed}), got {len(args)}")
        tensors, integers, others, first = [], [], [], None
        for index, (arg, parameter) in enumerate(zip(args, parameters)):
            if isinstance(arg, torch.Tensor):
                self._expect_tensor(arg, parameter)
                tensors.append(index)
            else:
                parameter.expect_scalar(self.name, arg)
                group = others if arg is None or parameter.kind in ("float", "struct") else integers
                group.append((index, signature.converter(self.name, parameter, on_card)))
            if isinstance(arg, (torch.Tensor, TensorMap)):
                first = first or parameter.name
                if arg.device != device:
                    what = "a tensor map of a tensor" if isinstance(arg, TensorMap) else "a tensor"
                    raise ValueError(
                        f"{self.name}: {parameter.name} must be on {device}, like {first}, got {what} on {arg.device}"
                    )
        if device is None:
            raise TypeError(
                f"{self.name}: at least one argument must be a tensor, whose device says where to run, got none"
            )
        return tensors, integers, others, self._function(device.index) if on_card else None

    def _expect_tensor(self, tensor, parameter):
        """Raise unless this tensor can stand for this parameter."""
        where, name = f"{self.name}: {parameter.name}", parameter.name
        if parameter.kind not in ("pointer", "pointer or integer"):
            raise TypeError(f"{where} must be {parameter.wanted}, got a tensor")
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{where} must be on the CPU or on a CUDA device, got a tensor on {tensor.device}")
        if tensor.dtype not in PLAIN and tensor.dtype not in BITS:
            known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in PLAIN | set(BITS)))
            raise TypeError(f"{where} must have one of the dtypes {known}, got {tensor.dtype}")
        if parameter.dtypes and tensor.dtype not in parameter.dtypes:
            wanted = " or ".join(map(str, parameter.dtypes))
            raise TypeError(
                f"{where} is a {parameter.ctype}* and must be a tensor of {wanted}, got {tensor.dtype} "
                f"({name}.to({parameter.dtypes[0]}) converts; {name}.view(...) reads the same bytes as another type)"
            )
        if tensor.layout is not torch.strided:
            raise ValueError(f"{where} must be a dense tensor, got layout {tensor.layout}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{where} must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}; "
                f"{name}.contiguous() makes a contiguous copy"
            )
        expect_resolved(self.name, name, tensor)

    def _function(self, device):
        if device not in self._functions:
            module, entry = self.module._on_card(device), self.entry(device)
            made = cuda_driver.Function(module, self.name, device, entry.parameters, entry.cooperative)
            self._functions[device] = made
        return self._functions[device]

    def _shape(self, grid, block, shared, function):
        """Seven ints: grid, block, shared bytes, checked against CUDA's limits and the card's."""
        grid = self._three("grid", grid, MAX_GRID, "blocks")
        block = self._three("block", block, MAX_BLOCK, "threads")
        threads, bound = math.prod(block), self.entry(function.device if function else None).max_threads
        if threads > MAX_THREADS:
            raise ValueError(f"{self.name}: a block has at most {MAX_THREADS} threads, got block {block}: {threads}")
        if bound and threads > bound:
            raise ValueError(
                f"{self.name}: compiled for at most {bound} threads per block (__launch_bounds__), "
                f"got block {block}: {threads}"
            )
        if function and threads > function.max_threads:
            raise ValueError(
                f"{self.name}: its registers leave room for {function.max_threads} threads per block on this card, "
                f"got block {block}: {threads}; __launch_bounds__({threads}) makes the compiler use fewer"
            )
        if isinstance(shared, bool) or not isinstance(shared, numbers.Integral) or shared < 0:
            raise ValueError(f"{self.name}: shared must be a number of bytes, 0 or more, got {shared!r}")
        limit = function.max_shared if function else card.machine().shared
        if shared > limit:
            static = f" beside its {function.static_shared} static bytes" if function and function.static_shared else ""
            raise ValueError(
                f"{self.name}: shared must be at most {limit} bytes{static}, what this card lets a block have, "
                f"got {shared}"
            )
        if function:
            function.allow_shared(shared)
        return (*grid, *block, int(shared))

    def _three(self, name, value, limits, unit):
        value = value if isinstance(value, (tuple, list, torch.Size)) else (value,)
        if not 1 <= len(value) <= 3 or any(isinstance(v, bool) for v in value):
            raise ValueError(f"{self.name}: {name} must be an int or a tuple of up to three, got {value!r}")
        try:
            value = tuple(operator.index(v) for v in value)
        except TypeError:
            raise TypeError(f"{self.name}: {name} must be an int or a tuple of up to three, got {value!r}") from None
        for axis, v, limit in zip("xyz", value, limits):
            if not 1 <= v <= limit:
                raise ValueError(
                    f"{self.name}: {name} must have between 1 and {limit} {unit} along {axis}, got {name} {value}"
                )
        return (*value, 1, 1)[:3]

    def _cluster(self, cluster, shape, function):
        cluster = self._three("cluster", cluster, MAX_GRID, "blocks")
        if function and cuda_driver.capability(function.device) < (9, 0):
            raise RuntimeError(f"{self.name}: clusters need a card of compute capability 9.0 or newer")
        if math.prod(cluster) > 16 or any(g % c for g, c in zip(shape[:3], cluster)):
            raise ValueError(
                f"{self.name}: a cluster has at most 16 blocks and divides the grid {shape[:3]}, got cluster {cluster}"
            )
        if function:
            function.allow_cluster(math.prod(cluster))
        return cluster

    def _simulate(self, grid, block, values, tensors, shared, cluster, options):
        """Run on the SIMT machine, on the tensors' own memory."""
        shape = self._shape(grid, block, shared, None)
        if cluster is not None:
            cluster = self._cluster(cluster, shape, None)
            if cluster[1:] != (1, 1):
                raise NotImplementedError(f"{self.name}: the SIMT machine has clusters along x alone, got {cluster}")
            options["cluster"] = cluster[0]
        for index in tensors:
            values[index] = _array(values[index])
        kernel = self.module._on_machine()[self.name]
        return kernel(shape[:3], shape[3:6], *values, shared=shape[6], **options)


def _array(tensor):
    """A tensor's memory as a NumPy array, or as a simt.Buffer where it starts off a card's 256-byte alignment.

    It counts from the start of its storage, as it would on a card, whose storages are so aligned. Wide words need the
    address itself to fit, so the storage's own last bits count too: not 0 where it lies inside a NumPy array."""
    tensor = tensor.detach()
    array = tensor.view(BITS.get(tensor.dtype, tensor.dtype)).numpy()
    start = tensor.untyped_storage().data_ptr() % 16 + tensor.storage_offset() * tensor.element_size()
    if start % 256 and tensor.numel():
        import simt

        return simt.Buffer(array, misalignment=start % 256)
    return array
