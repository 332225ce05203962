"""What several devices share: tensors of all of them as one argument of a kernel, and cards that see each other.

A struct of pointers is a NumPy scalar of its bytes for lab.cuda's launch on a card; on the SIMT machine the arrays have
addresses only while a launch runs, so there `on_machine` puts them in.
"""

import ctypes
import functools
import struct

import numpy as np
import torch

from lab import cuda_driver
from lab.cuda.launch import _array as array_of

ALREADY_SEES = 704  # of the driver's interface


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

    @classmethod
    def at(cls, addresses):
        """Of memory that other processes have, by its addresses in this one."""
        made = cls([None] * len(addresses))
        made.value = struct.pack(f"={len(addresses)}Q", *addresses)
        return made

    @functools.cached_property
    def value(self):
        """The struct's bytes, on cards."""
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in self.tensors]
        return struct.pack(f"={len(addresses)}Q", *addresses)

    def pointers(self):
        """The same for the SIMT machine."""
        import simt

        return simt.Pointers([None if tensor is None else array_of(tensor) for tensor in self.tensors])


def on_card(kernel, grid, block, args, shared, pdl, seen):
    """A launch on the card of the first argument, a tensor. seen: a set of the launches that were looked at in full;
    further ones pass at half the host time."""
    shape = kernel, args[0].device, grid, block, shared
    if shape in seen:
        args = [arg.value if isinstance(arg, Peers) else arg for arg in args]
        kernel.unchecked(grid, block, *args, shared=shared, pdl=pdl)
        return
    kernel(grid, block, *(np.void(a.value) if isinstance(a, Peers) else a for a in args), shared=shared, pdl=pdl)
    seen.add(shape)


def on_machine(kernel, grid, block, args, shared):
    """(kernel of the SIMT machine, grid, block, arguments, bytes of shared memory) of a launch on CPU tensors."""
    values = [np.void(bytes(8 * len(arg.tensors))) if isinstance(arg, Peers) else arg for arg in args]
    tensors, integers, others, function = kernel._plan(values)
    if function is not None:
        raise ValueError(f"{kernel.name}: the SIMT machine takes CPU tensors, got CUDA tensors")
    for index, convert in (*integers, *others):
        values[index] = convert(values[index])
    for index in tensors:
        values[index] = array_of(values[index])
    for index, arg in enumerate(args):
        if isinstance(arg, Peers):
            values[index] = arg.pointers()
    shape = kernel._shape(grid, block, shared, None)
    return kernel.module._on_machine()[kernel.name], shape[:3], shape[3:6], tuple(values), shape[6]


def let_see(device, other):
    """Let kernels on one card, by its index, read and write the other's memory. False where the two cards cannot.

    What PyTorch has allocated there, and will, all of it: also in segments that grow (expandable_segments), which
    PyTorch itself opens to a card that a tensor was copied to."""
    torch.cuda.init()  # and with it the driver
    cuda, can = cuda_driver.driver(), ctypes.c_int()
    handles = [ctypes.c_int(), ctypes.c_int()]
    for index, handle in zip((device, other), handles):
        cuda_driver.check(cuda.cuDeviceGet(ctypes.byref(handle), index), f"card {index}")
    status = cuda.cuDeviceCanAccessPeer(ctypes.byref(can), *handles)
    cuda_driver.check(status, f"cards {device} and {other}")
    if not can.value:
        return False
    context = ctypes.c_void_p()
    cuda_driver.check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handles[1]), f"card {other}")
    with torch.cuda.device(device):
        cuda_driver.bind(device)
        status = cuda.cuCtxEnablePeerAccess(context, 0)
    if status != ALREADY_SEES:
        cuda_driver.check(status, f"card {device} is to see the memory of card {other}")
    torch.zeros(1, device=f"cuda:{other}").to(f"cuda:{device}")
    return True
