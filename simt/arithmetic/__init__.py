"""The arithmetic of PTX on NumPy arrays: `find("fma.rn.f32")` says how an instruction computes.

Nothing in here knows of threads, memory or counters: the functions take arrays that broadcast, and return arrays.

    find                 in this file, with predicates and selection
    integers             s, u and b types of 8 to 64 bits
    floats, comparisons  f32, f64, f16, bf16 and pairs: what rounds, and what does not
    conversions          cvt
    rounding             exact sums, rounding once, the formats' bits
    mma, fragments       tensor cores; which elements of a tile a lane holds
    lanes                shuffles, votes, matches
    lazy                 registers that are one array and a number added to it
    merging, marks       what generated code calls: parts, masks, registers that nothing has set

Results are those of an NVIDIA GPU (sm_90), bit for bit, except the functions in APPROXIMATE: those are computed in
float64 and rounded once, and the hardware's are a little off.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from simt.arithmetic import comparisons, conversions, floats, integers
from simt.arithmetic.comparisons import REGISTER
from simt.arithmetic.floats import APPROXIMATE
from simt.arithmetic.integers import SIGNED, UNSIGNED, integer_type
from simt.arithmetic.rounding import flush

__all__ = ["APPROXIMATE", "Operation", "find"]


@dataclass(frozen=True)
class Operation:
    """How one instruction computes.

    function      takes arrays of exactly `sources`, of shapes that broadcast; returns one array, or one for each
                  destination. Run it under np.errstate(all="ignore").
    sources       NumPy dtypes of the operands; the bits of a register are to be viewed so. f16 and bf16 are uint16,
                  pairs of them uint32, predicates bool.
    destinations  NumPy dtypes of the results: unsigned integers (but int8 and int16 from cvt to s8 and s16, which
                  the caller extends to the register), float32, float64, bool
    """

    function: Callable
    sources: tuple
    destinations: tuple


@functools.cache
def find(opcode, destinations=1):
    """The Operation of an opcode such as "setp.ltu.f32", or None if it is not arithmetic or not covered.

    destinations   2 for a setp that writes p|q; setp of f16x2 and bf16x2 always has two
    """
    name, *parts = opcode.split(".")
    if not parts:
        return None
    if name in ("setp", "set"):
        found = _compare(name, parts, destinations)
    elif name == "cvt":
        found = conversions.find(parts)
    elif name in ("dp4a", "dp2a"):
        found = integers.dot_product(name, tuple(parts))
    elif name in ("vabsdiff2", "vabsdiff4"):
        found = integers.differences(name, tuple(parts))
    elif name in SPECIAL:
        found = SPECIAL[name](name, parts)
    elif name in ("and", "or", "xor", "not") and parts == ["pred"]:
        found = PREDICATE[name], (np.bool_,) * (1 if name == "not" else 2), (np.bool_,)
    else:
        *modifiers, kind = parts
        if name == "prmt" and kind in integers.SELECTORS:
            modifiers, kind = [kind], "b32"
        if kind == "relu" and modifiers:  # max.s32.relu: the one option that stands behind the type
            *modifiers, kind = [kind, *modifiers]
        family = floats if kind in REGISTER else integers
        found = family.find(name, modifiers, kind)
    return _operation(found)


def _operation(found):
    if found is None:
        return None
    function, sources, destinations = found
    return Operation(function, tuple(map(np.dtype, sources)), tuple(map(np.dtype, destinations)))


# ---- predicates ----

PREDICATE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}
WHOLE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}
WHOLE |= {"ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}


def _compare(name, parts, destinations):
    """setp.CmpOp{.BoolOp}{.ftz}.type p{|q}, a, b{, c}: p = BoolOp(a ? b, c), q = BoolOp(not a ? b, c).

    set.CmpOp{.BoolOp}{.ftz}.dtype.stype writes all ones (1.0 for floats) instead of a predicate.
    PTX ISA, "Comparison and Selection Instructions", "Half Precision Comparison Instructions".
    """
    relation, *rest = parts
    target = rest.pop(-2) if name == "set" and len(rest) > 1 else None
    if not rest or (name == "set" and target is None):
        return None
    kind = rest.pop()
    join = PREDICATE[rest.pop(0)] if rest and rest[0] in ("and", "or", "xor") else None
    ftz = rest == ["ftz"]
    if rest and not ftz:
        return None
    whole = integer_type(kind)
    if whole:
        width, signed = whole
        if relation in ("lo", "ls", "hi", "hs") and signed:
            return None
        compare = WHOLE.get(relation) if kind[0] != "b" or relation in ("eq", "ne") else None
        source = (SIGNED if signed else UNSIGNED)[width]
    else:
        compare, source = comparisons.comparison(relation, kind, ftz), REGISTER.get(kind)
    if compare is None:
        return None
    pair = kind.endswith("x2")
    sources = (source, source) + ((np.bool_,) if join else ())
    if name == "set":
        return _set(compare, join, sources, target, pair)

    def halves(a, b, *c):
        both = compare(a, b)
        return tuple(join(both[..., i], c[0]) if c else both[..., i] for i in (0, 1))

    def two(a, b, *c):
        p = compare(a, b)
        return (join(p, c[0]), join(~p, c[0])) if c else (p, ~p)

    if pair:
        return halves, sources, (np.bool_, np.bool_)
    if destinations == 2:
        return two, sources, (np.bool_, np.bool_)
    return ((lambda a, b, c: join(compare(a, b), c)) if join else compare), sources, (np.bool_,)


# what `set` writes where the comparison holds
TRUE = {
    "u32": (np.uint32, 0xFFFFFFFF),
    "s32": (np.uint32, 0xFFFFFFFF),
    "u16": (np.uint16, 0xFFFF),
    "s16": (np.uint16, 0xFFFF),
    "f32": (np.float32, 1.0),
    "f16": (np.uint16, 0x3C00),
    "bf16": (np.uint16, 0x3F80),
}


def _set(compare, join, sources, target, pair):
    if pair:  # f16x2 and bf16x2 write a pair of numbers, or of all ones
        single = target.removesuffix("x2") if target.endswith("x2") else "u16"
    else:
        single = target
    if single not in TRUE or pair != (target.endswith("x2") or (pair and target in ("u32", "s32"))):
        return None
    dtype, true = TRUE[single]

    def apply(a, b, *c):
        holds = compare(a, b)
        if c:
            holds = join(holds, c[0][..., None] if pair else c[0])
        if not pair:
            return np.where(holds, dtype(true), dtype(0))
        return np.where(holds[..., 0], np.uint32(true), np.uint32(0)) | np.where(
            holds[..., 1], np.uint32(true << 16), np.uint32(0)
        )

    return apply, sources, (np.uint32 if pair else dtype,)


# ---- selection ----


def _register(kind):
    if kind in REGISTER:
        return REGISTER[kind]
    whole = integer_type(kind)
    return UNSIGNED[whole[0]] if whole else None


def _select(name, parts):
    """selp d, a, b, p: p ? a : b."""
    dtype = _register(parts[-1]) if len(parts) == 1 else None
    return ((lambda a, b, p: np.where(p, a, b)), (dtype, dtype, np.bool_), (dtype,)) if dtype else None


def _select_by_sign(name, parts):
    """slct.dtype.ctype d, a, b, c: c >= 0 ? a : b."""
    ftz, parts = "ftz" in parts, [part for part in parts if part != "ftz"]  # flushed, a tiny negative c is -0
    if len(parts) != 2 or _register(parts[0]) is None or parts[1] not in ("s32", "f32"):
        return None
    dtype, by = _register(parts[0]), np.int32 if parts[1] == "s32" else np.float32
    prepare = flush if ftz else lambda c: c
    return (lambda a, b, c: np.where(prepare(c) >= by(0), a, b)), (dtype, dtype, by), (dtype,)


def _test(name, parts):
    """testp.number.f32 and the like."""
    function = comparisons.classify(parts[0], parts[1]) if len(parts) == 2 else None
    return (function, (REGISTER[parts[1]],), (np.bool_,)) if function else None


def _copy_sign(name, parts):
    """copysign d, a, b: the sign of a, the magnitude of b."""
    if parts not in (["f32"], ["f64"]):
        return None
    dtype = REGISTER[parts[0]]
    return (lambda a, b: np.copysign(b, a)), (dtype, dtype), (dtype,)


SPECIAL = {"selp": _select, "slct": _select_by_sign, "testp": _test, "copysign": _copy_sign}
