"""From a mapped file to a card, as fast as both sides allow: several threads bring pieces to pinned memory, from where
the card fetches them while the next ones come.

A copy from mapped memory alone goes through one thread of the driver: some gigabytes a second, for a card that takes
fifty.
"""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

PIECE = 16 << 20  # bytes
THREADS = 8


class Upload:
    """A context manager. copy(tensor, place) begins to copy; wait() is over when all has arrived.

    device    a card
    progress  called with the bytes of each piece, by whichever thread has brought it
    """

    def __init__(self, device, progress=lambda count: None):
        self.device, self.progress, self.piece = device, progress, PIECE
        self.stream = torch.cuda.Stream(device)
        self.buffers, self.pool = queue.Queue(), ThreadPoolExecutor(THREADS)
        for _ in range(2 * THREADS):
            self.buffers.put((None, None))
        self.jobs, self.lock = [], threading.Lock()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pool.shutdown(cancel_futures=True)
        self.stream.synchronize()

    def copy(self, tensor, place):
        """tensor: contiguous, on the CPU; place: as large, of the same dtype, contiguous, on the card."""
        source, target = (t.reshape(-1).view(torch.uint8) for t in (tensor, place))
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # what is in the place may still be read
        for begin in range(0, source.numel(), self.piece):
            end = min(begin + self.piece, source.numel())
            self.jobs.append(self.pool.submit(self._bring, source[begin:end], target[begin:end]))

    def _bring(self, source, target):
        buffer, free = self.buffers.get()
        try:
            if buffer is None:
                buffer, free = torch.empty(self.piece, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()
            free.synchronize()  # the card has fetched what was in it before
            count = source.numel()
            buffer[:count].copy_(source)
            with torch.cuda.stream(self.stream):
                target.copy_(buffer[:count], non_blocking=True)
                free.record()
        finally:
            self.buffers.put((buffer, free))
        with self.lock:
            self.progress(count)

    def wait(self):
        """Until all has arrived; what a thread raised is raised here. Work that is launched later sees it."""
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job.result()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
