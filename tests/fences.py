"""Call every rung of a topic with arrays that end (or begin) at a page that nobody may touch.

    python tests/fences.py cpu_gemv

Reading one element too far ends this process at once, even where the result does not show it. The last line on
stderr says which call it was. Run by the tests of each topic.
"""

import ctypes
import importlib
import mmap
import sys

import numpy as np

from lab import hostile_shapes, machine

PAGE, NOBODY = mmap.PAGESIZE, 0  # PROT_NONE
libc = ctypes.CDLL(None, use_errno=True)
_kept = []  # the memory must outlive its arrays


def fenced(array, at_end):
    """A copy of `array` right before a forbidden page, or right after one."""
    size = -(-max(array.nbytes, 1) // PAGE) * PAGE
    memory = mmap.mmap(-1, size + 2 * PAGE)
    _kept.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (start, start + PAGE + size):
        if libc.mprotect(ctypes.c_void_p(page), PAGE, NOBODY):
            raise OSError(ctypes.get_errno(), "mprotect")
    at = PAGE + (size - array.nbytes if at_end else 0)
    copy = np.frombuffer(memory, array.dtype, array.size, at).reshape(array.shape)
    copy[...] = array
    return copy


def gemv_arrays(rung, rows, cols):
    dtype = np.float16 if rung.name == "half" else np.float32
    return np.ones((rows, cols), dtype), np.ones(cols, np.float32), np.empty(rows, np.float32)


def matmul_arrays(rung, m, n, k):
    return np.ones((m, k), np.float32), np.ones((k, n), np.float32), np.empty((m, n), np.float32)


def main(topic):
    arrays = {"cpu_gemv": gemv_arrays, "cpu_matmul": matmul_arrays}[topic]
    shapes = hostile_shapes(2 if topic == "cpu_gemv" else 3, long=389)
    for rung in importlib.import_module(f"kernels.{topic}").RUNGS:
        slow = rung.name == "python_loops"
        for isa in machine.isas()[:1] if slow else machine.isas():
            for shape in shapes[1:4] if slow else shapes:
                for at_end in (True, False):
                    print(
                        f"{rung.name}, {isa}, shape {shape}, fence {'after' if at_end else 'before'}", file=sys.stderr
                    )
                    one, two, out = (fenced(a, at_end) for a in arrays(rung, *shape))
                    rung.function(one, two, out=out, threads=2, isa=isa)
                    assert (out == shape[-1]).all()
                    _kept.clear()
    print("no fence was touched")


if __name__ == "__main__":
    main(sys.argv[1])
