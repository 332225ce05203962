"""How a model's shares are added up: devices of one process, or processes that have one device each.

    Devices(["cuda:0", "cuda:1"])    this process has all of them: kernels.collective, by loads and stores over the link
    Processes(...)                   torch.distributed's processes, as torchrun starts them, have one each: the same
                                     within one host; by messages (NCCL; gloo on the CPU) between hosts

What models/across.py wants of either:

    where, ranks, count            the devices that this process has, their numbers, and how many there are in all
    product(Ws, xs, residuals, out, pdl)      out = residual + the sum of W x over devices, one token's
    all_reduce(tensors, pdl)       tensors become their sums, one token's
    add_up(tensors)                the same of many tokens: on the CPU by PyTorch, as their products are
    gather(parts, vocab, first)    logits (n, vocab), on the first device, of each device's columns
    pass_on(tensor, others)        what the host has written to the first device's tensor, on the others
    graph(step)                    what step() launches, to be replayed;  synchronize();  meet(): of all processes
    group                          of kernels.collective; None: by messages
"""

import os

import torch
import torch.distributed as dist

from kernels import collective, fusion, gemv
from lab import cuda
from models.config import BadModel
from models.shares import MOST


class Devices:
    """Several devices of this process. where: cards by number, or "cpu" for each device of the SIMT machine."""

    def __init__(self, where):
        try:
            self.group = collective.Group(where)
        except cuda.NoPeerAccess as error:
            said = str(error).split(";")[0]
            raise BadModel(
                f"load: {said}; there a process for each, which exchange messages, can run it: torchrun "
                f"--nproc-per-node {len(where)} -m models.generate FOLDER --distributed --exchange messages"
            ) from None
        self.where, self.count = self.group.devices.where, len(where)
        self.ranks, self.on_cards = list(range(self.count)), self.group.devices.on_cards

    def product(self, Ws, xs, residuals, out, pdl):
        collective.product(Ws, xs, residuals, out=out, group=self.group, pdl=pdl)

    def all_reduce(self, tensors, pdl):
        collective.all_reduce(tensors, group=self.group, pdl=pdl)

    def add_up(self, tensors):
        if self.on_cards:
            self.all_reduce(tensors, False)
        else:
            total = sum(tensors[1:], tensors[0])
            for tensor in tensors:
                tensor.copy_(total)

    def gather(self, parts, vocab, first):
        return torch.cat([part.to(self.where[0]) for part in parts], dim=1)

    def pass_on(self, tensor, others):
        for other in others:
            other.copy_(tensor)

    def meet(self):
        """There is one process."""

    def graph(self, step):
        return self.group.devices.graph(step)

    def synchronize(self):
        self.group.synchronize()


class Processes:
    """This process's device among those of torch.distributed, which has been initialised.

    device         a card by number, or "cpu" for the SIMT machine; None: the card of LOCAL_RANK, or the CPU
    exchange       "memory": kernels.collective, where all processes are on one host; "messages": torch.distributed's
                   own all_reduce; None: memory where it can be
    process_group  None: all processes
    """

    def __init__(self, device=None, exchange=None, process_group=None):
        if not dist.is_available() or not dist.is_initialized():
            raise BadModel("load: torch.distributed must be initialised: start it by torchrun, with --distributed")
        self.process_group = process_group or dist.group.WORLD
        rank, self.count = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        if not 2 <= self.count <= MOST:
            raise BadModel(f"load: there must be 2 to {MOST} processes, one for each device, got {self.count}")
        if device is None:
            local = int(os.environ.get("LOCAL_RANK", rank))
            device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
        self.where, self.ranks = [torch.device(device)], [rank]
        self.on_cards = self.where[0].type == "cuda"
        if self.on_cards:
            if self.where[0].index >= torch.cuda.device_count():
                there = torch.cuda.device_count()
                raise BadModel(f"load: process {rank} is to have {device}, and PyTorch finds {there} cards there")
            torch.cuda.set_device(self.where[0])
        if exchange not in (None, "memory", "messages"):
            raise ValueError(f"load: exchange must be 'memory' or 'messages', got {exchange!r}")
        together = self._on_one_host()
        if exchange == "memory" and not together:
            raise BadModel("load: exchange must be 'messages' where processes are on several hosts, got 'memory'")
        self.exchange = exchange or ("memory" if together else "messages")
        self.group, self.sums = None, {}
        if self.exchange == "memory":
            from kernels.collective import processes

            self.group = processes.Group(self.process_group, self.where[0], name="models")

    def _on_one_host(self):
        """Whether all are on one host, and their cards reach each other."""
        mine = os.uname().nodename, self.where[0].index if self.on_cards else None
        found = [None] * self.count
        dist.all_gather_object(found, mine, group=self.process_group)
        if len({host for host, _ in found}) > 1:
            return False
        others = [card for _, card in found if card != mine[1]]
        reaches = all(torch.cuda.can_device_access_peer(mine[1], other) for other in others) if self.on_cards else True
        dist.all_gather_object(found, reaches, group=self.process_group)
        return all(found)

    def product(self, Ws, xs, residuals, out, pdl):
        if self.group is not None:
            collective.product(Ws, xs, residuals, out=out, group=self.group, pdl=pdl)
            return
        (W,), (x,), (residual,), (result,) = Ws, xs, residuals, out
        if result.shape not in self.sums:
            self.sums[result.shape] = torch.empty_like(result)
        part = gemv.gemv(W, x, out=self.sums[result.shape], pdl=pdl)
        if self.on_cards:
            dist.all_reduce(part, group=self.process_group)
            fusion.add(residual, part, out=result, pdl=pdl)
            return
        total = part.float()  # gloo does not add all types
        dist.all_reduce(total, group=self.process_group)
        torch.add(residual, total, out=result)

    def all_reduce(self, tensors, pdl):
        if self.group is not None:
            collective.all_reduce(tensors, group=self.group, pdl=pdl)
        else:
            self._reduce(tensors[0])

    def _reduce(self, tensor):
        """torch.distributed's sum, in place. gloo does not add all types."""
        if self.on_cards or tensor.dtype == torch.float32:
            dist.all_reduce(tensor, group=self.process_group)
        else:
            total = tensor.float()
            dist.all_reduce(total, group=self.process_group)
            tensor.copy_(total)

    def add_up(self, tensors):
        if self.on_cards and self.group is not None:
            collective.all_reduce(tensors, group=self.group)
        else:
            self._reduce(tensors[0])

    def gather(self, parts, vocab, first):
        (part,) = parts
        whole = part.new_zeros(len(part), vocab)
        whole[:, first : first + part.shape[1]] = part
        dist.all_reduce(whole, group=self.process_group)
        return whole

    def pass_on(self, tensor, others):
        """Each process's host writes the same."""

    def meet(self):
        dist.barrier(self.process_group)

    def graph(self, step):
        """A CUDA graph: all processes make it, and replay it, at the same steps."""
        step()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self.where[0])
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
        return graph

    def synchronize(self):
        if self.group is not None:
            self.group.synchronize()
        elif self.on_cards:
            torch.cuda.synchronize(self.where[0])


def several(gpus, device):
    """The Devices that models.load is asked for by a number."""
    if isinstance(gpus, bool) or not isinstance(gpus, int) or not 1 <= gpus <= MOST:
        raise ValueError(f"load: gpus must be a whole number from 1 to {MOST}, got {gpus!r}")
    if device == "simt":
        return Devices(["cpu"] * gpus)
    if device != "cuda":
        raise ValueError(f"load: device must be 'cuda' or 'simt' for gpus={gpus}, got {device!r}")
    there = torch.cuda.device_count()
    if there < gpus:
        cards = "one card only" if there == 1 else f"{there} cards"
        raise ValueError(f"load: gpus must be at most the cards that PyTorch finds here, {cards}, got {gpus}")
    return Devices([f"cuda:{number}" for number in range(gpus)])
