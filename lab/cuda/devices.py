"""A launch over several devices that share memory: cards of one host over NVLink, or as many of the SIMT machine.

    devices = cuda.Devices(["cuda:0", "cuda:1"])        # or cuda.Devices(["cpu", "cpu"]): the same code without a card
    boxes = devices.zeros(1024, torch.float32)          # a tensor on each, which kernels on all of them may touch
    devices.launch([(module.push, grid, block, (x[d], cuda.Peers(boxes), ...)) for d in range(2)], pdl=True)
    graph = devices.graph(step)                         # what `step` launches, one CUDA graph for each card
    graph.replay()

One process has all the devices. On cards each launch goes on its card's current stream, and none waits for another but
by what the kernels themselves do: load and compile everything before a kernel that waits is launched (`launch` does, of
the kernels that it is given). On the CPU the launches of a call take turns (simt.Devices), and have ended when it
returns; `races=True` looks for races over all calls until synchronize().
"""

import contextlib
import sys

import torch

from lab.cuda.launch import Kernel
from lab.cuda.peers import array_of, let_see, on_card, on_machine
from lab.stream import STREAM


class NoPeerAccess(RuntimeError):
    """Two cards that cannot read and write each other's memory."""


class Devices:
    """Devices that share memory.

    where   torch devices: different cards, each of which can reach the others' memory; or "cpu" as often as devices of
            the SIMT machine are wanted
    races   on the CPU: look for races between all launches until synchronize()

    turns, order: on the CPU, how devices and their blocks take turns (simt.Devices.run); to be set at will. reports: of
    the last launches there. parted: whether a launch or a replay was cut off when some devices had theirs, others not.
    """

    def __init__(self, where, races=False):
        self.where = [torch.device(device) for device in where]
        kinds = {device.type for device in self.where}
        if not self.where or kinds not in ({"cpu"}, {"cuda"}):
            raise ValueError(f"Devices: where must be cards, or the CPU for each, got {list(map(str, self.where))}")
        self.on_cards = kinds == {"cuda"}
        self.turns, self.order, self.reports, self.gathered, self.seen = "forward", "forward", None, None, set()
        self.parted = False
        if self.on_cards:
            if races:
                raise ValueError("Devices: races are looked for on the SIMT machine: take the CPU for each device")
            if len(set(self.where)) < len(self.where) or any(device.index is None for device in self.where):
                raise ValueError(f"Devices: where must be different cards by number, got {list(map(str, self.where))}")
            for one in self.where:
                for other in self.where:
                    if one != other and not let_see(one.index, other.index):
                        raise NoPeerAccess(
                            f"{one} cannot read and write the memory of {other} (no peer access between the two cards)"
                        )
        else:
            import simt

            self.machine = simt.Devices(len(self.where), check_races=races)

    def __len__(self):
        return len(self.where)

    def zeros(self, shape, dtype):
        """A tensor of zeros on each device."""
        made = [torch.zeros(shape, dtype=dtype, device=device) for device in self.where]
        if not self.on_cards:
            for n, tensor in enumerate(made):
                self.machine.owns(n, array_of(tensor))
        return made

    def launch(self, launches, *, pdl=False, owned=None):
        """One launch on each device: [(kernel, grid, block, args)] or [(kernel, grid, block, args, shared)], in the
        devices' order; None for a device without one. Arguments are those of lab.cuda's kernels, the first a tensor of
        the device; other devices' tensors come as Peers.

        pdl     each may start before the launch ahead of it on its device has ended
        owned   on the CPU: for each device a list of its tensors that others are given as well, beside those of zeros()

        The tensors are not looked at again in a second launch of one shape. On the CPU: the reports, one a device.
        """
        if len(launches) != len(self):
            raise ValueError(f"launch: takes a launch for each of {len(self)} devices, got {len(launches)}")
        if self.on_cards:
            self._load(launches)
            self.parted = True
            for n, (kernel, grid, block, args, *shared) in enumerate(filter(None, launches)):
                try:
                    on_card(kernel, grid, block, args, shared[0] if shared else 0, pdl, self.seen)
                except (TypeError, ValueError):  # before it was launched
                    self.parted = n > 0
                    raise
            self.parted = False
            return None
        runs = []
        for item in launches:
            if item is None:
                runs.append([])
                continue
            kernel, grid, block, args, *shared = item
            made, grid, block, values, size = on_machine(kernel, grid, block, args, shared[0] if shared else 0)
            options = {"shared": size, "order": self.order, "pdl": pdl, "ahead": STREAM.ahead(pdl)}
            runs.append((made, grid, block, values, options))
        STREAM.clear()
        owned = [[array_of(tensor) for tensor in tensors] for tensors in owned or [[]] * len(self)]
        owned = [[getattr(array, "array", array) for array in arrays] for arrays in owned]
        if self.gathered is not None:
            self.gathered.append((runs, owned))
            return None
        return self._run(runs, owned)

    def _run(self, launches, owned):
        self.parted = True
        self.reports = self.machine.run(launches, self.turns, owned)
        self.parted = False
        return self.reports

    def _load(self, launches):
        """Have every kernel on its card before the first one that waits is launched: a compile takes a second."""
        for device, item in zip(self.where, launches):
            if item is None:
                continue
            kernel = item[0]
            if not isinstance(kernel, Kernel):
                raise TypeError(f"launch: takes kernels of lab.cuda, got {type(kernel).__name__}")
            if (kernel, device) not in self.seen:
                kernel._function(device.index)
                self.seen.add((kernel, device))

    def synchronize(self):
        """Wait until all that was launched has ended."""
        if self.on_cards:
            for device in self.where:
                torch.cuda.synchronize(device)
        else:
            self.machine.synchronize()

    def graph(self, step):
        """What step() launches, to be replayed: a CUDA graph for each card; on the CPU the launches of `launch`, those
        of one device one after the other, while the devices take turns.

        step() is called twice, first to load and compile; on the CPU once. Tensors must stay where they are.
        """
        if not self.on_cards:
            self.gathered = []
            try:
                step()
                return MachineGraph(self, self.gathered)
            finally:
                self.gathered = None
        step()
        self.synchronize()
        graphs, streams = [], [torch.cuda.Stream(device) for device in self.where]
        with contextlib.ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            try:
                for stream in streams:
                    graphs.append(graph := torch.cuda.CUDAGraph())
                    with torch.cuda.stream(stream):  # "relaxed": the next takes memory while this one records
                        graph.capture_begin(capture_error_mode="relaxed")
                step()
            finally:
                for stream, graph in zip(streams, graphs):
                    with torch.cuda.stream(stream), contextlib.suppress(RuntimeError if sys.exc_info()[0] else ()):
                        graph.capture_end()
        return CardGraph(self, graphs, streams)


class CardGraph:
    """A CUDA graph for each card."""

    def __init__(self, devices, graphs, streams):
        self.devices, self.graphs, self.streams = devices, graphs, streams

    def replay(self):
        """On each card's current stream, one card after the other."""
        self.devices.parted = True
        for device, graph in zip(self.devices.where, self.graphs):
            with torch.cuda.device(device):
                graph.replay()
        self.devices.parted = False


class MachineGraph:
    """Launches of the SIMT machine, by device."""

    def __init__(self, devices, gathered):
        self.devices, self.gathered = devices, gathered

    def replay(self):
        """The reports, for each device those of its launches."""
        streams = [[runs[n] for runs, _ in self.gathered if runs[n]] for n in range(len(self.devices))]
        owned = [[a for _, lists in self.gathered for a in lists[n]] for n in range(len(self.devices))]
        return self.devices._run(streams, owned)
