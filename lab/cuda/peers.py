"""Tensors of several devices as arguments of one kernel: a struct of pointers to their memory."""

import functools
import struct

import torch

from lab.tensor_map import BITS


class Peers:
    """One tensor of each of several devices, for a kernel's struct of as many pointers, passed by value.

    The kernel reads and writes another device's memory as its own: lab.cuda.Devices has seen to it that it may. On the
    SIMT machine all are CPU tensors. None: a null pointer.
    """

    def __init__(self, tensors):
        self.tensors = tuple(tensors)
        for n, tensor in enumerate(self.tensors):
            if tensor is not None and not isinstance(tensor, torch.Tensor):
                raise TypeError(f"Peers: tensor {n} must be a torch tensor or None, got {type(tensor).__name__}")
            if tensor is not None and not tensor.is_contiguous():
                raise ValueError(f"Peers: tensor {n} must be contiguous, got strides {tensor.stride()}")

    @functools.cached_property
    def value(self):
        """The struct's bytes, on cards."""
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in self.tensors]
        return struct.pack(f"={len(addresses)}Q", *addresses)

    @classmethod
    def at(cls, addresses):
        """Of memory that other processes have, by its addresses in this one."""
        made = cls([None] * len(addresses))
        made.value = struct.pack(f"={len(addresses)}Q", *addresses)
        return made

    def pointers(self):
        """The same for the SIMT machine."""
        import simt

        return simt.Pointers([None if tensor is None else array_of(tensor) for tensor in self.tensors])


def array_of(tensor):
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
