"""What a checked call launches, noted while it runs, so that it can be launched again for other tensors of its kind."""

import functools
import struct
import threading

import torch

from lab.tensor_map import TensorMap

MOST_BYTES, MOST_PARAMETERS = 4096, 128  # of a kernel, in calls.c
ADDRESS, MAP, NUMBER = range(3)  # what is filled in: see launch.h


class _Now(threading.local):
    """The recordings under way in this thread, the innermost last."""

    all = ()


NOW = _Now()


def under_way():
    """How many recordings are under way in this thread."""
    return len(NOW.all)


class Changing(int):
    """A number of a call that may be another one in a later call of its kind: the `place`-th."""

    def __new__(cls, number, place):
        made = super().__new__(cls, number)
        made.place = place
        return made


def changing(*numbers):
    """The numbers that stand last in `run`, to be handed to launches as they are: for other calls they change there.

    What else depends on them (a grid, another argument) must be an option.
    """
    return [Changing(number, place) for place, number in enumerate(numbers)]


def scratch(like, count, dtype):
    """New memory for one call, which its launches share: a tensor of `count` numbers, on the device of `like`.

    Under `Calls.preparing`, a prepared call finds such memory anew each time.
    """
    found = like.new_empty(count, dtype=dtype)
    for recording in NOW.all:
        recording.scratches.append(found)
    return found


def supply(function, *, of_stream=False):
    """function(), a contiguous tensor, such as counters that differ from stream to stream.

    Under `Calls.preparing`, a prepared call calls it anew each time, so it must give the kind of tensor that fits.
    of_stream: it is called once for a stream, which gets the same tensor ever after; but anew where a CUDA graph is
    being captured.
    """
    found = function()
    for recording in NOW.all:
        recording.supplies.append((function, bool(of_stream), found))
    return found


class Recording:
    """The launches of one call with these tensors; `why` says why they cannot be prepared, if they cannot."""

    def __init__(self, name, tensors):
        self.name, self.tensors, self.scratches, self.supplies = name, tensors, [], []
        self.launches, self.device, self.why, self.shared = [], None, None, False

    def launched(self, function, shape, args, values, pdl, cluster, own_stream=False):
        """Note a launch that the driver has taken (see cuda_driver.Function.launch)."""
        if own_stream:
            self.why = "a launch on a stream of its own"
        elif self.device not in (None, function.device):
            self.why = "launches on two cards"
        self.device = function.device
        self.launches.append((function, shape, args, values, pdl, cluster))

    def plan(self):
        """The launches as bytes, whole numbers of 64 bits that calls.c reads; None if `why` or `shared` is set.

        device, scratches, launches, type and index of the tensors' device, bytes of each scratch; then of each launch:
        function, grid, block, dynamic shared bytes, pdl, cooperative, cluster (3), parameters, patches, words of
        values; offset of each parameter; patches (offset; whose address, bytes behind it, ADDRESS or MAP; or which
        number, how wide, NUMBER: see launch.h); values
        """
        known = [*self.tensors, *self.scratches, *(tensor for *_, tensor in self.supplies)]
        known = [(index, tensor, *extent(tensor)) for index, tensor in enumerate(known) if tensor is not None]
        device = known[0][1].device
        numbers = [self.device, len(self.scratches), len(self.launches)]
        numbers += [1, device.index] if device.type == "cuda" else [0, -1]
        numbers += [tensor.nbytes for tensor in self.scratches]
        plan = struct.pack(f"={len(numbers)}q", *numbers)
        for launch in self.launches:
            if (part := self._launch(known, *launch)) is None:
                return None
            plan += part
        return plan

    def _launch(self, known, function, shape, args, values, pdl, cluster):
        offsets, pack = places(function)
        pieces, patches = pack(*values), []
        if len(pieces) > MOST_BYTES or len(offsets) > MOST_PARAMETERS:
            self.why = f"a launch of {len(offsets)} arguments, {len(pieces)} bytes"
            return None
        for parameter, arg, value, offset in zip(function.parameters, args, values, offsets):
            is_map = isinstance(arg, TensorMap)
            if is_map or isinstance(arg, torch.Tensor):
                found = self._source(known, parameter, arg.tensor if is_map else arg)
                if found is None:
                    return None
                patches += (offset, *found, MAP if is_map else ADDRESS)
            elif type(arg) is Changing:
                if parameter.kind != "integer" or parameter.size not in (4, 8):
                    self.why = f"{parameter.name}, which changes, is no whole number of 32 or 64 bits"
                    return None
                patches += (offset, arg.place, parameter.size, NUMBER)
            elif _has_address(known, value):
                self.why = f"the number {parameter.name} is an address"
                return None
        numbers = [function.handle.value, *shape, int(bool(pdl and function.pdl)), int(function.cooperative)]
        numbers += [*(cluster or (0, 0, 0)), len(offsets), len(patches) // 4, len(pieces) // 8, *offsets, *patches]
        return struct.pack(f"={len(numbers)}q", *numbers) + pieces

    def _source(self, known, parameter, tensor):
        """(index, bytes behind) of the tensor of the call that this one is, or lies in; None if that is not clear."""
        if tensor is None:
            self.why = f"{parameter.name} is a tensor map that has let go of its tensor"
            return None
        found = [one for one in known if one[1] is tensor]
        if not found:  # a view, which begins where its tensor begins
            start, stop = extent(tensor)
            found = [one for one in known if one[2] == start] or [
                one for one in known if one[2] <= start and stop <= one[3]
            ]
        if not found:
            self.why = f"{parameter.name} is no tensor of the call, nor scratch, nor supplied"
        if len(found) != 1:
            self.shared = True  # two arguments that are one: in another call of the kind they may be two
            return None
        ((index, one, begin, _),) = found
        return index, 0 if one is tensor else start - begin


@functools.lru_cache(maxsize=1024)
def places(function):
    """How the values of a launch lie in memory: (offset of each parameter, what packs them, to whole words)."""
    offsets, end, code = [], 0, "="
    for parameter in function.parameters:
        alignment = 64 if parameter.is_map else 16  # for anything
        offsets.append(-(-end // alignment) * alignment)
        code += f"{offsets[-1] - end}x{parameter.code}"
        end = offsets[-1] + parameter.size
    return tuple(offsets), struct.Struct(f"{code}{-end % 8}x").pack


def _has_address(known, value):
    """Whether a number, or a word of a struct, may be an address in a tensor of the call."""
    if isinstance(value, bytes):
        words = struct.unpack_from(f"={len(value) // 8}Q", value)
    else:
        words = (value,)
    return any(begin <= word < end for word in words for _, _, begin, end in known)


def extent(tensor):
    """The addresses of a tensor: (its first byte, one past its last)."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    elements = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return begin, begin + elements * tensor.element_size()
