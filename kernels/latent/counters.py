"""Words that launches find as the last one has left them: all 0, so that nothing is zeroed between launches.

A stream's launches follow each other, and share them. One in a graph, which may be replayed beside others, has its own
for good: from a store, as zeros that the graph makes would be a node of it.
"""

import threading

import torch

from kernels.ssd.workspace import lasting_zeros
from lab import cuda_driver

STORE = 1 << 21  # words of 8 bytes, for graphs
_streams, _stores = {}, {}
_taking = threading.Lock()


def claim(device, words):
    """`words` words of 64 bits for one launch on the current stream of this device."""
    if device.type != "cuda":
        return torch.zeros(words, dtype=torch.int64)
    with _taking:  # no two threads are given the same
        if torch.cuda.is_current_stream_capturing():
            store = _stores.get(device.index)
            if store is None or store.numel() < words:
                return torch.zeros(words, dtype=torch.int64, device=device)
            _stores[device.index] = store[words:]
            return store[:words]
        key = device.index, cuda_driver.own_stream(device.index), words
        if key not in _streams:
            if device.index not in _stores:
                _stores[device.index] = lasting_zeros(STORE, device)
            _streams[key] = lasting_zeros(words, device)
        return _streams[key]
