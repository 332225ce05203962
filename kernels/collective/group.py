"""Devices that exchange: their mailboxes, flags and counts, kept from call to call; a peer that does not come."""

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.collective.arguments import MOST
from lab import cuda
from lab.tensors import DTYPES

HERE = Path(__file__).resolve().parent
CARD_BLOCKS, MACHINE_BLOCKS = 512, 6  # boxes of a mailbox (mail.cuh)
CARD_LIMIT, MACHINE_LIMIT = 4_000_000, 20_000  # looks at a flag: on a card at least two seconds
APART = 4 * 2  # numbers of 4 bytes from one block's count to the next (number.cuh)


class PeerTimeout(RuntimeError):
    """A device has waited for another that did not come."""


class Mail(NamedTuple):
    """Memory for one kind of exchange: on each device a tensor that all write to, and its blocks' counts."""

    boxes: list
    peers: cuda.Peers
    numbers: list


class Group:
    """Devices that exchange messages. A call without a group uses one that is kept for its devices.

    where   a torch device for each; "cpu" as often as devices of the SIMT machine are wanted
    races   on the CPU: look for races between all exchanges until devices.synchronize()

    limit: how often a flag is looked at before a peer is given up. After a PeerTimeout the group is of no more use; nor
    is it when a launch was cut off (by an interrupt, say) before all devices had theirs: RuntimeError says so.
    """

    def __init__(self, where, races=False):
        if not 2 <= len(where) <= MOST:
            got = "one device only" if len(where) == 1 else len(where)
            raise ValueError(f"Group: where must be 2 to {MOST} devices, got {got}")
        try:
            self.devices = cuda.Devices(where, races)
        except cuda.NoPeerAccess as error:
            raise cuda.NoPeerAccess(f"{error}; kernels.collective.copies works there, through the host") from None
        self.ranks = range(len(self.devices))
        on_cards = self.devices.on_cards
        self.blocks = CARD_BLOCKS if on_cards else MACHINE_BLOCKS
        self.limit = CARD_LIMIT if on_cards else MACHINE_LIMIT
        self.told = [torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=on_cards) for _ in self.devices.where]
        self.told_args = [cuda.Peers([told]) for told in self.told]
        self.seen = [told.numpy() for told in self.told]
        self.mails, self.replaced = {}, []

    def __len__(self):
        return len(self.devices)

    def mail(self, key, numbers, blocks, fill=0):
        """The Mail of this key: `numbers` of 4 bytes on each device, all `fill` at first; a count for each block."""
        found = self.mails.get(key)
        if found is None or found.boxes[0].numel() < numbers:
            boxes, counts = (self.devices.zeros(n, torch.int32) for n in (numbers, blocks * APART))
            for box in boxes if fill else ():
                box.fill_(fill)
            if self.devices.on_cards:  # before a peer writes there
                self.devices.synchronize()
            if found is not None:
                self.replaced.append(found)  # graphs have its addresses
            found = self.mails[key] = Mail(boxes, cuda.Peers(boxes), counts)
        return found

    def reachable(self, tensors):
        """(tensors that peers may read and write, the same as Peers): within one process, the very ones."""
        return tensors, cuda.Peers(tensors)

    def check(self, where):
        """Raise if a device has given up waiting, or a launch has reached some devices only."""
        for rank, seen in enumerate(self.seen):
            if seen[0]:
                forget(self)
                waiting, late = self.name(rank), self.name(int(seen[0]) - 1)
                raise PeerTimeout(
                    f"{where}: {waiting} waited for {late}, which did not come within {self.limit} looks; the results "
                    f"of this exchange and of those behind it are not valid"
                )
        if self.devices.parted:
            forget(self)
            raise RuntimeError(
                f"{where}: a launch was cut off before all devices had theirs, so they no longer agree which exchange "
                f"is the next one; this group is of no more use"
            )

    def name(self, rank):
        device = self.devices.where[rank]
        return str(device) if device.type == "cuda" else f"device {rank}"

    def synchronize(self):
        """Wait until all exchanges have ended, and raise PeerTimeout if one has failed."""
        self.devices.synchronize()
        self.check("synchronize")

    def launch(self, where, launches, pdl, owned=None):
        """One launch on each device; what went wrong before is said first, and on the CPU what has gone wrong now."""
        self.check(where)
        try:
            self.devices.launch(launches, pdl=pdl, owned=owned)
        except BaseException:
            if self.devices.parted:
                forget(self)
            raise
        if not self.devices.on_cards:
            self.check(where)


GROUPS, FAILED = {}, []


def group_of(tensors):
    """The group of these tensors' devices, kept for the next call."""
    key = tuple(tensor.device for tensor in tensors)
    found = GROUPS.get(key)
    if found is None:
        found = GROUPS[key] = Group(key)
    return found


def forget(group):
    """The next call without a group gets another. Its memory stays: a peer that comes late writes there."""
    for key in [key for key, found in GROUPS.items() if found is group]:
        del GROUPS[key]
    if group not in FAILED:
        FAILED.append(group)


@functools.cache
def module(name, dtype, devices, blocks, *more):
    """A source of this folder, for a type and so many devices."""
    options = f"-DDTYPE={DTYPES[dtype]}", f"-DDEVICES={devices}", f"-DBLOCKS={blocks}", *more
    return cuda.load(HERE / f"{name}.cu", options)
