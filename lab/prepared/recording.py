"""What a checked call launches, noted while it runs, so that it can be launched again for other tensors of its kind."""

import struct
import threading

import torch

from lab.tensor_map import TensorMap

MOST_BYTES, MOST_PARAMETERS = 4096, 128  # of a kernel, in calls.c


class _Now(threading.local):
    """The recordings under way in this thread, the innermost last."""

    all = ()


NOW = _Now()


def scratch(like, count, dtype):
    """New memory for one call, which its launches share: a tensor of `count` numbers, on the device of `like`.

    Under `Calls.preparing`, a prepared call finds such memory anew each time.
    """
    found = like.new_empty(count, dtype=dtype)
    for recording in NOW.all:
        recording.scratches.append(found)
    return found


def supply(function):
    """function(), a contiguous tensor, such as counters that differ from stream to stream.

    Under `Calls.preparing`, a prepared call calls it anew each time, so it must give the kind of tensor that fits.
    """
    found = function()
    for recording in NOW.all:
        recording.supplies.append((function, found))
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
        values; offset of each parameter; patches (offset, whose address, bytes behind it, in a tensor map); values
        """
        extra = [*self.scratches, *(tensor for _, tensor in self.supplies)]
        known = [*self.tensors, *extra]
        type_, index = self._device(known)
        numbers = [self.device, len(self.scratches), len(self.launches), type_, index]
        numbers += [tensor.nbytes for tensor in self.scratches]
        plan = struct.pack(f"={len(numbers)}q", *numbers)
        for launch in self.launches:
            if (part := self._launch(known, *launch)) is None:
                return None
            plan += part
        return plan

    @staticmethod
    def _device(known):
        device = next(tensor.device for tensor in known if tensor is not None)
        return (1, device.index) if device.type == "cuda" else (0, -1)

    def _launch(self, known, function, shape, args, values, pdl, cluster):
        offsets, patches, end, pieces = [], [], 0, b""
        for parameter, arg, value in zip(function.parameters, args, values):
            is_map = isinstance(arg, TensorMap)
            end = -(-end // 64) * 64 if is_map else -(-end // 16) * 16
            offsets.append(end)
            piece = struct.pack(f"={parameter.code}", value)
            if arg is None:
                pass
            elif is_map or isinstance(arg, torch.Tensor):
                found = self._source(known, parameter, arg.tensor if is_map else arg)
                if found is None:
                    return None
                patches += (end, *found, int(is_map))
            elif any(self._is_address(known, piece[at : at + 8]) for at in range(0, len(piece) - 7, 8)):
                self.why = f"the number {parameter.name} is an address"
                return None
            pieces = pieces.ljust(end, b"\0") + piece
            end += len(piece)
        pieces = pieces.ljust(-(-len(pieces) // 8) * 8, b"\0")
        if len(pieces) > MOST_BYTES or len(offsets) > MOST_PARAMETERS:
            self.why = f"a launch of {len(offsets)} arguments, {len(pieces)} bytes"
            return None
        numbers = [function.handle.value, *shape, int(bool(pdl and function.pdl)), int(function.cooperative)]
        numbers += [*(cluster or (0, 0, 0)), len(offsets), len(patches) // 4, len(pieces) // 8, *offsets, *patches]
        return struct.pack(f"={len(numbers)}q", *numbers) + pieces

    def _source(self, known, parameter, tensor):
        """(index, bytes behind) of the tensor of the call that this one is, or lies in; None if that is not clear."""
        found = [index for index, one in enumerate(known) if one is tensor]
        begin, end = extent(tensor)
        if not found:  # a view, which begins where its tensor begins
            found = [index for index, one in enumerate(known) if one is not None and one.data_ptr() == begin]
        if not found:
            spans = [(index, extent(one)) for index, one in enumerate(known) if one is not None]
            found = [index for index, (first, last) in spans if first <= begin and end <= last]
        if not found:
            self.why = f"{parameter.name} is no tensor of the call, nor scratch, nor supplied"
        if len(found) != 1:
            self.shared = True  # two arguments that are one: in another call of the kind they may be two
            return None
        return found[0], begin - known[found[0]].data_ptr()

    @staticmethod
    def _is_address(known, piece):
        (number,) = struct.unpack("=Q", piece)
        return any(begin <= number < end for begin, end in (extent(one) for one in known if one is not None))


def extent(tensor):
    """The addresses of a tensor: (its first byte, one past its last)."""
    elements = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    begin = tensor.data_ptr()
    return begin, begin + elements * tensor.element_size() * (tensor.numel() > 0)
