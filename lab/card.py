"""What a card has that a kernel's sizes are chosen by. The SIMT machine, asked for the CPU, answers as an H200 does, or
within `as_if(card)` as another card.

    with card.as_if(card.T4):
        ...        CPU tensors: plans for a T4, code compiled for a T4, and refused as a T4 would refuse it
"""

import contextlib
from typing import NamedTuple

import torch

# KB of shared memory that a block may have, by compute capability; on the others 99
LARGE = {(7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}


class Card(NamedTuple):
    """A kind of card, as its data sheet has it."""

    name: str
    capability: tuple
    multiprocessors: int

    @property
    def arch(self):
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def shared(self):
        """Bytes of shared memory that a block may have."""
        return 1024 * LARGE.get(self.capability, 99)


T4 = Card("Tesla T4", (7, 5), 40)
A100 = Card("NVIDIA A100-SXM4-80GB", (8, 0), 108)
RTX_3060 = Card("NVIDIA GeForce RTX 3060", (8, 6), 28)
RTX_4090 = Card("NVIDIA GeForce RTX 4090", (8, 9), 128)
H200 = Card("NVIDIA H200", (9, 0), 132)
B200 = Card("NVIDIA B200", (10, 0), 148)
RTX_5090 = Card("NVIDIA GeForce RTX 5090", (12, 0), 170)
CARDS = (T4, A100, RTX_3060, RTX_4090, H200, B200, RTX_5090)

_machine = H200  # what the SIMT machine answers as


def machine():
    """The Card that the SIMT machine stands for."""
    return _machine


@contextlib.contextmanager
def as_if(card):
    """Have the SIMT machine stand for a card. What functions keep of earlier calls on the CPU, such as a plan, stays:
    each card wants a process of its own, or caches that are emptied."""
    global _machine
    before, _machine = _machine, card
    try:
        yield card
    finally:
        _machine = before


def capability(device):
    """A torch device's compute capability, such as (9, 0)."""
    return torch.cuda.get_device_capability(device) if _is_card(device) else _machine.capability


def multiprocessors(device):
    """How many multiprocessors (SMs) a torch device has."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count if _is_card(device) else _machine.multiprocessors
    )


def shared_memory(device):
    """Bytes of shared memory that one block may have, by the card's compute capability."""
    return 1024 * LARGE.get(capability(device), 99)


def starts_early(device):
    """Whether a launch may overlap the one before it (programmatic dependent launch): compute capability 9.0 and up."""
    return capability(device) >= (9, 0)


def _is_card(device):
    return device.type == "cuda"
