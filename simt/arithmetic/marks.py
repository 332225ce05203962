"""Marks of registers that may be unset (simt/ptx/unset.py), in a running kernel: what generated code calls for them.

A mark is an int, an array (block, warp, lane), or a tuple of such: those of the register's parts, the lowest first,
where several values have been packed into one register.
"""

import numpy as np

from simt.arithmetic.merging import shuffle


def computed(number, *marks):
    """The mark of what instruction `number` makes of values with these marks: the first reason there is."""
    out = 0
    for mark in map(unpacked, reversed(marks)):
        if type(mark) is int:
            if mark:
                out = mark if mark > 0 else number + 1
        else:
            out = settled(np.where(mark < 0, np.int32(number + 1), np.where(mark == 0, out, mark)))
    return out


def computed_in_parts(number, *marks):
    """The same for an instruction that computes with two halves of a register, each for itself."""
    return packed(*(computed(number, *(part(mark, n, 2) for mark in marks)) for n in range(2)))


def packed(*marks):
    """The mark of a register made of equal parts."""
    finest = max((len(mark) for mark in marks if type(mark) is tuple), default=1)
    marks = tuple(part(mark, n, finest) for mark in marks for n in range(finest))
    plain = all(type(mark) is int for mark in marks)
    return marks[0] if plain and len(set(marks)) == 1 else marks


def part(mark, n, count):
    """The mark of part n, of `count` equal ones, of a register."""
    if type(mark) is not tuple:
        return mark
    if count >= len(mark):
        return mark[n * len(mark) // count]
    each = len(mark) // count
    return packed(*mark[n * each : (n + 1) * each])


def unpacked(mark):
    """The mark of a register as a whole: unset where all of its parts are, since it may be used for one part alone."""
    if type(mark) is not tuple:
        return mark
    out = mark[0]
    for other in mark[1:]:
        out = merge_mark(0, out, bool(other) if type(other) is int else other != 0)
    return out


def decided(number, neutral, a, b, mark_a, mark_b):
    """The mark of `a and b`, or `a or b`: where one is set and decides alone (by False, by True), that is enough."""
    alone = False
    for p, mark in ((a, mark_a), (b, mark_b)):
        alone = alone | ((np.asarray(p) == neutral) & (np.asarray(mark) == 0))
    return merge_mark(computed(number, mark_a, mark_b), 0, np.reshape(alone, alone.shape or (1, 1, 1)))


def shuffled(mode, mark, lane, clamp):
    """The marks that a shuffle brings with the values."""
    if type(mark) is tuple:
        return packed(*(shuffled(mode, one, lane, clamp) for one in mark))
    return mark if type(mark) is int else settled(shuffle(mode, mark, lane, clamp)[0])


def merge_mark(old, new, mask):
    """`new` in the lanes of `mask`, `old` elsewhere."""
    if mask is None or (type(old) is int and type(new) is int and old == new):
        return new
    if type(mask) is bool:
        return new if mask else old
    if type(old) is tuple or type(new) is tuple:
        count = max(len(mark) for mark in (old, new) if type(mark) is tuple)
        return packed(*(merge_mark(part(old, n, count), part(new, n, count), mask) for n in range(count)))
    return settled(np.where(mask, new, old).astype(np.int32))


def settled(marks):
    """0 where no lane has a mark: nothing needs to be looked at any more."""
    return marks if np.count_nonzero(marks) else 0


def environment():
    """The names that generated code may use, beside those of simt/arithmetic/merging.py."""
    functions = (computed, computed_in_parts, packed, part, decided, shuffled, merge_mark)
    return {f.__name__: f for f in functions}
