"""printf on the device: the format is the module's, the values lie in the thread's local memory."""

import re

import numpy as np

CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+))?(hh|h|ll|l|z|j|t)?([diouxXeEfFgGcsp%])")


def formatted(form, value, string):
    """C's printf. value(offset, dtype) is the argument at that byte, string(address) the text at an address."""
    offset = 0

    def take(dtype):
        nonlocal offset
        size = np.dtype(dtype).itemsize
        offset = -(-offset // size) * size
        found = value(offset, dtype)
        offset += size
        return found

    def replace(match):
        flags, width, precision, length, kind = match.groups()
        if kind == "%":
            return "%"
        width = str(int(take(np.int32))) if width == "*" else width or ""
        precision = str(int(take(np.int32))) if precision == "*" else precision
        dot = "" if precision is None else f".{precision}"
        wide = length in ("l", "ll", "z", "j", "t")
        if kind in "di":
            return f"%{flags}{width}{dot}d" % int(take(np.int64 if wide else np.int32))
        if kind in "ouxX":
            return f"%{flags}{width}{dot}{'d' if kind == 'u' else kind}" % int(take(np.uint64 if wide else np.uint32))
        if kind == "c":
            return f"%{flags}{width}c" % chr(int(take(np.int32)) & 255)
        if kind == "p":
            return f"%{flags}{width}s" % hex(int(take(np.uint64)))
        if kind == "s":
            return f"%{flags}{width}{dot}s" % string(int(take(np.uint64)))
        return f"%{flags}{width}{dot}{kind}" % float(take(np.float64))

    return CONVERSION.sub(replace, form)
