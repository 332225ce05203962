"""The same exchanges where every process of torch.distributed has one device, as torchrun starts them.

    group = processes.Group()                           in every process, after init_process_group and set_device
    collective.all_reduce([x], group=group)             in place; and all other calls with lists of one
    torch.ops.matmul_to_mamba.all_reduce(x, group.name) the same as an operator, which torch.compile takes

Mailboxes are memory that all processes map: on cards PyTorch's symmetric memory (torch.distributed._symmetric_memory,
NVLink within one host), on the CPU files that are memory, where each process runs its part on the SIMT machine. All
processes make the same calls in one order. A message for `two_shot` goes through such memory, and is copied twice.
Between hosts there are no such stores: use torch.distributed's own all_reduce, over NCCL, there.
"""

import os
import tempfile
import weakref

import torch
import torch.distributed as dist

from kernels import collective
from kernels.collective.group import APART, CARD_BLOCKS, CARD_LIMIT, MACHINE_BLOCKS, Mail, PeerTimeout
from lab import cuda
from lab.cuda.peers import on_card, on_machine

PATIENT = 200_000  # looks at a flag on the SIMT machine: another process may be slow
GROUPS = weakref.WeakValueDictionary()  # name -> Group, for the operator


class Group:
    """This process's part of a group of devices. process_group: of torch.distributed; None: all processes.

    device   a card by number, or "cpu"; None: the current card, or the CPU where there is none
    name     by which the operator knows it
    """

    def __init__(self, process_group=None, device=None, name="world"):
        self.process_group, self.name_of_group = process_group or dist.group.WORLD, name
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        rank, self.count = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        if not 2 <= self.count <= collective.arguments.MOST:
            wanted = f"2 to {collective.arguments.MOST} processes"
            raise ValueError(f"processes.Group: process_group must have {wanted}, got {self.count}")
        self.ranks, self.devices, self.where = [rank], self, [self.device]
        self.on_cards = self.device.type == "cuda"
        self.blocks = CARD_BLOCKS if self.on_cards else MACHINE_BLOCKS
        self.limit = CARD_LIMIT if self.on_cards else PATIENT
        told = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=self.on_cards)
        self.seen, self.told, self.told_args = told.numpy(), told, {rank: cuda.Peers([told])}
        self.mails, self.kept, self.looked_at = {}, [], set()
        GROUPS[name] = self

    @property
    def name(self):
        return self.name_of_group

    def __len__(self):
        return self.count

    def mail(self, key, numbers, blocks, fill=0):
        """As kernels.collective.Group.mail; all processes ask for the same."""
        found = self.mails.get(key)
        if found is None or found.boxes[self.ranks[0]].numel() < numbers:
            box, peers = self._shared(numbers)
            box.fill_(fill)
            self.synchronize()
            dist.barrier(self.process_group)  # before another writes there
            counts = torch.zeros(blocks * APART, dtype=torch.int32, device=self.device)
            found = self.mails[key] = Mail({self.ranks[0]: box}, peers, {self.ranks[0]: counts})
        return found

    def _shared(self, numbers):
        """(a tensor of so many numbers of 4 bytes, the same of all processes as Peers)."""
        if self.on_cards:
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # nothing here uses it
            import torch.distributed._symmetric_memory as symmetric

            box = symmetric.empty(numbers, dtype=torch.int32, device=self.device)
            handle = symmetric.rendezvous(box, self.process_group)
            self.kept.append(handle)
            return box, cuda.Peers.at(handle.buffer_ptrs)
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.truncate(numbers * 4)
            names = [None] * self.count
            dist.all_gather_object(names, file.name, group=self.process_group)
            boxes = [torch.from_file(name, shared=True, size=numbers, dtype=torch.int32) for name in names]
            dist.barrier(self.process_group)  # all have it: the name may go
        return boxes[self.ranks[0]], cuda.Peers(boxes)

    def reachable(self, tensors):
        """This process's message in memory that peers may read and write."""
        (x,) = tensors
        words = max(1 << 16 if self.on_cards else 4, 1 << (-(-x.nbytes // 4) - 1).bit_length())
        mail = self.mail(("reachable",), words, 1)
        copy = mail.boxes[self.ranks[0]].view(x.dtype)[: x.numel()]
        copy.copy_(x.reshape(-1))
        return [copy], mail.peers

    def check(self, where):
        """Raise if this device has given up waiting."""
        if self.seen[0]:
            raise PeerTimeout(
                f"{where}: rank {self.ranks[0]} waited for rank {int(self.seen[0]) - 1}, which did not come within "
                f"{self.limit} looks; the results of this exchange and of those behind it are not valid"
            )

    def synchronize(self):
        """Wait until this process's exchanges have ended, and raise PeerTimeout if one has failed."""
        if self.on_cards:
            torch.cuda.synchronize(self.device)
        self.check("synchronize")

    def launch(self, where, launches, pdl, owned=None):
        """This device's launch."""
        self.check(where)
        ((kernel, grid, block, args, *shared),) = launches
        shared = shared[0] if shared else 0
        if self.on_cards:
            on_card(kernel, grid, block, args, shared, pdl, self.looked_at)
        else:
            made, grid, block, values, shared = on_machine(kernel, grid, block, args, shared)
            made(grid, block, *values, shared=shared)
            self.check(where)


@torch.library.custom_op("matmul_to_mamba::all_reduce", mutates_args={"x"})
def all_reduce_operator(x: torch.Tensor, group: str) -> None:
    """x becomes the sum over the processes of the Group of this name."""
    found = GROUPS.get(group)
    if found is None:
        known = ", ".join(sorted(GROUPS)) or "none"
        raise ValueError(f"all_reduce: group must be the name of a processes.Group; got {group!r}, there are: {known}")
    collective.all_reduce([x], group=found)


@all_reduce_operator.register_fake
def _(x, group):
    return None
