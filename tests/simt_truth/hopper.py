"""Run the tests of Hopper's instructions on a card, and store checksums of what each launch wrote in h200_hopper.json.

    PYTHONPATH=tests python -m simt_truth.hopper tests/simt_truth/h200_hopper.json [-k NAMES]        (needs such a card)

The tests of tests/test_simt_hopper.py that are marked @truth run here as they do without a GPU, but the card's outputs
take the place of the machine's: they must pass the tests, and are compared with the machine's. What is stored for other
tests stays; nothing is stored where a test fails.
"""

import datetime
import json
import sys
from pathlib import Path

import numpy as np


class Card:
    """Runs launches on the machine with copies, then on the card in place. `found`: {test: [checksum of a launch]}."""

    def __init__(self):
        self.found, self.unequal = {}, []

    def pytest_collection_modifyitems(self, items):
        from test_simt_hopper import TRUTH

        items[:] = [item for item in items if item.function.__name__ in TRUTH]

    def __call__(self, test, source, name, grid, block, args, options, exact):
        import torch
        from test_simt_hopper import checksum

        import simt
        from lab import cuda

        machine = copies(args)
        report = simt.compile(source, arch="sm_90a")[name](grid, block, *machine, **options)
        twins = {}  # of each array's memory, on the card
        given = [argument(a, twins) for a in args]
        cuda.compile(source, arch="sm_90a")[name](grid, block, *given, shared=options.get("shared", 0))
        torch.cuda.synchronize()
        for base, tensor in twins.values():
            base.reshape(-1).view(np.uint8)[:] = tensor.cpu().numpy()
        found = self.found.setdefault(test, [])
        if exact:
            found.append(checksum(args))
            if found[-1] != checksum(machine):
                self.unequal.append((test, len(found) - 1))
        return report


def owner(array):
    """The array whose memory this is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def place(array, base):
    """Where it begins, in bytes of its owner's memory."""
    return array.__array_interface__["data"][0] - base.__array_interface__["data"][0]


def copies(args):
    """The arguments over memory of their own; views of one array stay views of one."""
    import simt

    twins = {}

    def copy(array):
        base = owner(array)
        twin = twins.setdefault(id(base), base.copy())
        return np.ndarray(array.shape, array.dtype, twin.data, place(array, base), array.strides)

    def one(a):
        if isinstance(a, simt.TensorMap):
            return simt.TensorMap(copy(a.array), a.box, swizzle=a.swizzle)
        return copy(a) if isinstance(a, np.ndarray) else a

    return [one(a) for a in args]


def argument(a, twins):
    """What lab.cuda takes for it."""
    import torch

    import simt
    from lab.tensor_map import TensorMap

    if isinstance(a, np.generic):
        return a
    array = a.array if isinstance(a, simt.TensorMap) else a
    base = owner(array)
    if id(base) not in twins:
        twins[id(base)] = base, torch.from_numpy(base.reshape(-1).view(np.uint8).copy()).cuda()
    dtype = torch.from_numpy(np.zeros(1, array.dtype)).dtype
    flat, item = twins[id(base)][1].view(dtype), array.itemsize
    view = flat.as_strided(array.shape, [s // item for s in array.strides], place(array, base) // item)
    return view if a is array else TensorMap(view, a.box, a.swizzle)


def main():
    import pytest
    import test_simt_hopper as tests
    import torch

    path = Path(sys.argv[1])
    tests.card = card = Card()
    status = pytest.main(["-q", "-p", "no:cacheprovider", tests.__file__, *sys.argv[2:]], plugins=[card])
    for test, launch in card.unequal:
        print(f"the machine gave something else: {test}, launch {launch}")
    outputs = (json.loads(path.read_text())["outputs"] if path.exists() else {}) | card.found
    print(f"{sum(map(len, card.found.values()))} launches of {len(card.found)} tests, pytest's status {int(status)}")
    if status == 0:
        about = {"card": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat()}
        path.write_text(json.dumps(about | {"outputs": dict(sorted(outputs.items()))}, indent=1) + "\n")


if __name__ == "__main__":
    main()
