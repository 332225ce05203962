"""What generated functions (simt/translate) may call: registers apart and together, predicates, merging lanes."""

import numpy as np

from simt.arithmetic import lanes, lazy
from simt.ptx.types import broadcast


def join_parts(dtype, *parts):
    """{low, high} -> one register."""
    shape = np.broadcast_shapes(*(p.shape for p in parts))
    out = np.empty((*shape, len(parts)), parts[0].dtype)
    for k, p in enumerate(parts):
        out[..., k] = p
    return out.view(dtype)[..., 0]


def split_parts(array, dtype):
    """One register -> [low, ..., high]."""
    count = array.dtype.itemsize // np.dtype(dtype).itemsize
    parts = np.ascontiguousarray(array).view(dtype).reshape(*array.shape, count)
    return [np.ascontiguousarray(parts[..., k]) for k in range(count)]


def widen_array(array, signed, dtype):
    if signed:
        size = array.dtype.itemsize
        return array.view(f"i{size}").astype(f"i{np.dtype(dtype).itemsize}").view(dtype)
    return array.astype(dtype)


def as_array(p):
    return np.full((1, 1, 1), p) if type(p) is bool else p


def as_predicate(a):
    return bool(a.item()) if a.size == 1 else a


def p_not(p):
    return not p if type(p) is bool else ~p


def p_and(a, b):
    if type(a) is bool:
        return b if a else False
    if type(b) is bool:
        return a if b else False
    return a & b


def p_or(a, b):
    if type(a) is bool:
        return True if a else b
    if type(b) is bool:
        return True if b else a
    return a | b


def p_xor(a, b):
    if type(a) is bool:
        return p_not(b) if a else b
    if type(b) is bool:
        return p_not(a) if b else a
    return a ^ b


def merge_pred(old, new, mask):
    """`new` in the lanes of `mask`, `old` elsewhere."""
    if type(mask) is bool:
        return new if mask else old
    if mask is None or (type(old) is bool and type(new) is bool and old == new):
        return new
    return as_predicate(np.where(mask, new, old))


def merge_float(old, new, mask):
    if type(mask) is bool:
        return new if mask else old
    return new if mask is None else np.where(mask, new, old)


def merge_integer(width):
    def merge(old, new, mask):
        if type(mask) is bool:
            return new if mask else old
        if mask is None or old is new:
            return new
        if type(old) is int:
            if type(new) is int and old == new:
                return new
        elif type(new) is not int and old.known is new.known and old.offset == new.offset:
            return new
        return lazy.pack(np.where(mask, lazy.unpack(new, width), lazy.unpack(old, width)))

    return merge


def shuffle(mode, value, lane, clamp):
    """shfl, after all lanes have been spelled out."""
    if lane.size == clamp.size == 1:
        return lanes.shuffle_alike(mode, value, int(lane.item()), int(clamp.item()))
    value, lane, clamp = (broadcast(a, a.shape[:2] + (32,)) for a in (value, lane, clamp))
    return lanes.shuffle(mode, value, lane, clamp)


def environment():
    """The names that generated code may use."""
    names = {name: getattr(lazy, name) for name in dir(lazy) if not name.startswith("__")}
    names |= {f"merge_b{w}": merge_integer(w) for w in (8, 16, 32, 64)}
    names |= {f"u{n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8)}
    names |= {
        np.dtype(t).char + "_": np.dtype(t) for t in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
    }
    for f in (
        join_parts,
        split_parts,
        widen_array,
        as_array,
        as_predicate,
        p_not,
        p_and,
        p_or,
        p_xor,
        merge_pred,
        merge_float,
    ):
        names[f.__name__] = f
    names["lanes_shuffle"] = shuffle
    return names
