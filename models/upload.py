"""From a file to a card, as fast as both sides allow: several threads read pieces into pinned memory, from where the
card fetches them while the next ones come.

A copy from mapped memory goes through one thread of the driver: some gigabytes a second, for a card that takes fifty.
And a page of a mapped file is a fault for whoever touches it first; a read of a whole piece has none.
"""

import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

PIECE = 16 << 20  # bytes
THREADS = min(16, os.cpu_count() or 1)


class Upload:
    """A context manager. copy(where, place) begins to copy; wait() is over when all has arrived.

    device    a card
    progress  called with the bytes of each piece, by whichever thread has brought it
    """

    def __init__(self, device, progress=lambda count: None):
        self.device, self.progress, self.piece = device, progress, PIECE
        self.stream = torch.cuda.Stream(device)
        self.buffers, self.pool = queue.Queue(), ThreadPoolExecutor(THREADS)
        for _ in range(2 * THREADS):
            self.buffers.put((None, None))
        self.jobs, self.lock, self.files = [], threading.Lock(), {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pool.shutdown(cancel_futures=True)
        self.stream.synchronize()
        for file in self.files.values():
            os.close(file)

    def copy(self, where, place):
        """where: (path, first byte, bytes) of a file; place: as many bytes, contiguous, on the card."""
        path, first, count = where
        target = place.reshape(-1).view(torch.uint8)
        if count != target.numel():
            raise ValueError(f"{path}: expected {target.numel()} bytes for a tensor, got {count}")
        if path not in self.files:
            self.files[path] = os.open(path, os.O_RDONLY)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # what is in the place may still be read
        for begin in range(0, count, self.piece):
            piece = target[begin : begin + self.piece]
            self.jobs.append(self.pool.submit(self._bring, path, first + begin, piece))

    def _bring(self, path, first, target):
        buffer, free = self.buffers.get()
        try:
            if buffer is None:
                buffer, free = torch.empty(self.piece, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()
            free.synchronize()  # the card has fetched what was in it before
            count = target.numel()
            read_whole(self.files[path], buffer[:count].numpy(), first, path)
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


def read_whole(file, buffer, first, path):
    """Fill a buffer from a place in an open file. OSError where the file ends before."""
    view, done = memoryview(buffer), 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], first + done)
        if count == 0:
            raise OSError(f"{path}: ends at byte {first + done}, expected {len(view) - done} more")
        done += count
