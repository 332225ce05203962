"""A small model of a processor's cache that counts: how often must a line be fetched from memory?

    matmul_misses(loops("ijk", 48), 48, Cache(4096))      # 7200
    count_misses(4 * np.arange(1000), size_bytes=4096)    # (1000, 63): a line of 64 bytes holds 16 floats

A real processor has several levels of cache, each in sets, and a prefetcher. Here is one level, any line may
stand anywhere in it (fully associative), and the line that was used longest ago makes room (least recently
used). It counts the same on every machine, so it can grade an order of loops; a clock could not.
"""

import numpy as np


class Cache:
    """size_bytes of memory in lines of line_bytes. Counts .accesses and .misses."""

    def __init__(self, size_bytes, line_bytes=64):
        if line_bytes < 1 or size_bytes < line_bytes:
            raise ValueError(f"a cache of {size_bytes} bytes holds no line of {line_bytes} bytes")
        self.line_bytes, self.capacity = line_bytes, size_bytes // line_bytes
        self.accesses = self.misses = 0
        self._lines = {}  # a dict keeps the order in which keys came: the line used longest ago is the first

    def read(self, address):
        """Touch one byte address. True if its line was there (a hit)."""
        line, lines = address // self.line_bytes, self._lines
        self.accesses += 1
        if hit := line in lines:
            del lines[line]  # and put back below, as the last one
        else:
            self.misses += 1
            if len(lines) == self.capacity:
                del lines[next(iter(lines))]
        lines[line] = None
        return hit

    touch = read  # a write fetches the line just as a read does

    def holds(self, address):
        """Is the line of this byte address there? Counts nothing."""
        return address // self.line_bytes in self._lines

    def read_all(self, addresses):
        """Touch byte addresses, in order (a list, an iterator or a NumPy array). Returns how many missed."""
        before = self.misses
        # Python's own numbers are several times faster here than NumPy's.
        for address in addresses.ravel().tolist() if isinstance(addresses, np.ndarray) else addresses:
            self.read(address)
        return self.misses - before


def count_misses(addresses, size_bytes, line_bytes=64):
    """(accesses, misses) of an empty cache that is asked for these byte addresses, in order."""
    cache = Cache(size_bytes, line_bytes)
    cache.read_all(addresses)
    return cache.accesses, cache.misses


def loops(order, n):
    """The steps (i, j, p) of three plain loops, an array (n³, 3). order "ikj" or "ipj": i is outermost."""
    axes = ["ijp".index(letter) for letter in order.replace("k", "p")]
    steps = np.empty((n**3, 3), np.int64)
    steps[:, axes] = np.indices((n, n, n)).reshape(3, -1).T
    return steps


def matmul_addresses(steps, n, element_bytes=4):
    """Byte addresses (3 · steps,) that an n×n×n matmul touches at steps (i, j, p): A[i, p], B[p, j], C[i, j].

    The matrices are row-major and stand one after another from address 0: A, B, C.
    """
    i, j, p = np.asarray(steps if isinstance(steps, np.ndarray) else list(steps), np.int64).reshape(-1, 3).T
    elements = np.stack([i * n + p, n * n + p * n + j, 2 * n * n + i * n + j], axis=1)
    return elements.ravel() * element_bytes


def matmul_misses(steps, n, cache, element_bytes=4):
    """How often `cache` misses while an n×n×n matmul takes these (i, j, p) steps."""
    return cache.read_all(matmul_addresses(steps, n, element_bytes))
