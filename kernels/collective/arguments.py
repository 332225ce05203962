"""What the exchanges take: a list with a tensor for each device, looked at before anything runs."""

import torch

from lab.tensors import DTYPES, expect, expect_apart, expect_first, expect_no_gradient, memory

MOST = 8  # devices


def expect_tensors(where, name, tensors, *, count=None, like=None, shape=None, dtypes=tuple(DTYPES), written=False):
    """Raise unless these are contiguous tensors of one shape and dtype, on different cards or all on the CPU.

    count    how many there must be; None: 2 to MOST, one for each device of the call
    like     tensors of the call that were looked at already: the same devices in the same order, and the same dtype
    shape    what each must have, as lab.tensors.expect takes it; None: any, all the same one
    written  they are written to: each has memory of its own
    """
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{where}: {name} must be a list of tensors, one for each device, got {type(tensors).__name__}")
    if like is not None:
        count = len(like)
    if count is None and len(tensors) < 2:
        got = "one device only" if tensors else "none"
        raise ValueError(f"{where}: {name} must be one tensor for each of 2 to {MOST} devices, got {got}")
    if count is None and len(tensors) > MOST:
        raise ValueError(f"{where}: {name} must be tensors of at most {MOST} devices, got {len(tensors)}")
    if count is not None and len(tensors) != count:
        raise ValueError(f"{where}: {name} must have a tensor for each of {count} devices, got {len(tensors)}")
    for n, tensor in enumerate(tensors):
        label = f"{name}[{n}]"
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{where}: {label} must be a torch tensor, got {type(tensor).__name__}")
        wanted = tuple(tensors[0].shape) if shape is None else shape
        if n and tensor.dtype != tensors[0].dtype:
            raise TypeError(f"{where}: {label} must be of {tensors[0].dtype}, like {name}[0], got {tensor.dtype}")
        if n and shape is None and tensor.shape != tensors[0].shape:
            got = f"{tuple(tensors[0].shape)}, like {name}[0], got {tuple(tensor.shape)}"
            raise ValueError(f"{where}: {label} must have shape {got}")
        if like is not None:
            expect(where, label, tensor, like[n], wanted, empty=shape is None)
        else:
            expect_first(where, label, tensor, wanted, dtypes, empty=shape is None)
        if written:
            expect_no_gradient(where, tensor, label)
    if like is None:
        expect_different(where, name, tensors)
    if written:
        for n, tensor in enumerate(tensors):
            before = {f"{name}[{m}]": tensors[m] for m in range(n) if tensors[m].device == tensor.device}
            expect_apart(where, f"{name}[{n}]", tensor, **before)


def expect_group(where, name, tensors, group):
    """The tensors are on the devices of the group, in their order. None: the one that is kept for these."""
    if group is None:
        return
    places = getattr(getattr(group, "devices", None), "where", None)
    if places is None:
        wanted = "a kernels.collective.Group, a processes.Group or None"
        raise TypeError(f"{where}: group must be {wanted}, got {type(group).__name__}")
    expect_count(where, name, tensors, len(places))
    for n, (tensor, place) in enumerate(zip(tensors, places)):
        if isinstance(tensor, torch.Tensor) and tensor.device != place:
            raise ValueError(
                f"{where}: {name}[{n}] must be on {place}, as the group's device there, got a tensor on {tensor.device}"
            )


def expect_count(where, name, tensors, count):
    """A list of so many, one for each device."""
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{where}: {name} must be a list of tensors, one for each device, got {type(tensors).__name__}")
    if len(tensors) != count:
        raise ValueError(f"{where}: {name} must have a tensor for each of {count} devices, got {len(tensors)}")


def expect_different(where, name, tensors):
    """On different cards, or all on the CPU."""
    kinds = {tensor.device.type for tensor in tensors}
    if len(kinds) > 1:
        got = ", ".join(str(tensor.device) for tensor in tensors)
        raise ValueError(f"{where}: {name} must be on cards, or all on the CPU, got tensors on {got}")
    if kinds == {"cuda"}:
        for n, tensor in enumerate(tensors):
            for m in range(n):
                if tensors[m].device == tensor.device:
                    raise ValueError(
                        f"{where}: {name} must be on different devices, got {name}[{m}] and {name}[{n}] both on "
                        f"{tensor.device}"
                    )


def expect_no_overlap(where, name, written, **read):
    """What is written on a device must lie apart from what is read there."""
    for n, tensor in enumerate(written):
        others = {key: values[n] for key, values in read.items() if values is not None}
        expect_apart(where, f"{name}[{n}]", tensor, **others)


def in_words(*lists):
    """Whether all lie at multiples of 16 bytes."""
    return not any(memory(tensor)[0] % 16 for tensors in lists for tensor in tensors)
