"""Counters and flags of launches whose programs wait for each other.

A kernel finds them as the launch before has left them: zero at first, then a ticket of zero and an epoch one higher.
So nothing is zeroed between launches. But two launches at the same time must not share them. On one stream launches
follow each other; so each stream has its own, for each size. Where a CUDA graph is being captured, the launch gets
counters of its own for good, as the graph may be replayed on any stream, next to any other.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from lab import cuda_driver

STORE = 1 << 19  # words kept for launches in graphs
_streams, _stores = {}, {}
_taking = threading.Lock()


def claim(device, words):
    """`words` 64-bit words for one launch, on the current stream of this device."""
    if device.type != "cuda":
        return torch.zeros(words, dtype=torch.int64)
    with _taking:  # two threads must not make, or be given, the same
        if torch.cuda.is_current_stream_capturing():
            return _from_store(device, words)
        key = device.index, cuda_driver.own_stream(device.index), words
        if key not in _streams:
            if device.index not in _stores:
                _stores[device.index] = lasting_zeros(STORE, device)
            _streams[key] = lasting_zeros(words, device)
        return _streams[key]


def lasting_zeros(words, device):
    """64-bit words of zeros that stay for good; they are there when this returns.

    Made by a thread of their own: while torch.compile(mode="reduce-overhead") warms a graph up, all that its thread
    makes lies in the graph's pool, and what is not among the graph's results is written over later.
    """

    def make():
        found = torch.zeros(words, dtype=torch.int64, device=device)
        torch.cuda.current_stream(device).synchronize()
        return found

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def _from_store(device, words):
    """A piece of the store, which was zeroed before the capture. If there is none left, zeros that the graph makes."""
    store = _stores.get(device.index)
    if store is None or store.numel() < words:
        return torch.zeros(words, dtype=torch.int64, device=device)
    _stores[device.index] = store[words:]
    return store[:words]
