"""Counters and flags of launches whose programs wait for each other.

A kernel finds them as the launch before has left them: zero at first, then a ticket of zero and an epoch one higher.
So nothing is zeroed between launches. But two launches at the same time must not share them. On one stream launches
follow each other; so each stream has its own, for each size. Where a CUDA graph is being captured, the launch gets
counters of its own for good, as the graph may be replayed on any stream, next to any other.
"""

import torch

STORE = 1 << 19  # words kept for launches in graphs
_streams, _stores = {}, {}


def claim(device, words):
    """`words` 64-bit words for one launch, on the current stream of this device."""
    if device.type != "cuda":
        return torch.zeros(words, dtype=torch.int64)
    stream = torch.cuda.current_stream(device)
    if torch.cuda.is_current_stream_capturing():
        return _from_store(device, words)
    key = device.index, stream.cuda_stream, words
    if key not in _streams:
        if device.index not in _stores:
            _stores[device.index] = torch.zeros(STORE, dtype=torch.int64, device=device)
        _streams[key] = torch.zeros(words, dtype=torch.int64, device=device)
        stream.synchronize()  # the zeros must be there for other streams' graphs
    return _streams[key]


def _from_store(device, words):
    """A piece of the store, which was zeroed before the capture. If there is none left, zeros that the graph makes."""
    store = _stores.get(device.index)
    if store is None or store.numel() < words:
        return torch.zeros(words, dtype=torch.int64, device=device)
    _stores[device.index] = store[words:]
    return store[:words]
