"""Checks of chapter 07: the attention mix.

The learner's CUDA C++ runs on the SIMT machine, which also looks for races. Inputs are small whole numbers, so sums are
exact in any order and a lost token always shows. Quality is counted: requests, sectors, atomics, bank conflicts, and
whose they are: work that one block or warp does alone is not shared.
"""

import numbers
import re

import numpy as np

from exercises.checks import call_text, counted, shown, time_limit
from exercises.checks.launches import (
    blocks_for,
    by_warp,
    coalesced,
    compare,
    compiled,
    launched,
    near,
    requests,
    shared_out,
    unchanged,
    whole_numbers,
)
from lab import cuda
from lab.check import unset
from lab.exercise import Exercise, Wrong

BLOCK = 128  # threads of a block where it has one dimension
RACES = 10  # races are looked for with fewer tokens than this: where they are does not depend on their number
SHARED_LOADS = "smsp__inst_executed_op_shared_ld.sum"
SHARED_ATOMICS = "smsp__inst_executed_op_shared_atom.sum"


def truth(att, v):
    """The definition, in float64."""
    n_kv_heads = v.shape[1]
    att, v = att.astype(np.float64), v.astype(np.float64)
    grouped = att.reshape(n_kv_heads, -1, att.shape[1])
    return np.einsum("gat,tgd->gad", grouped, v).reshape(len(att), -1)


def inputs(rng, n_heads, n_kv_heads, kv_len, head_dim):
    return whole_numbers(rng, n_heads, kv_len), whole_numbers(rng, kv_len, n_kv_heads, head_dim)


def at_most(made, most, what, at, why):
    """Raise Wrong if there are more of these than that."""
    if made > most:
        raise Wrong(f"right, but at {at} the warps make {made:,} {what}; {most:,} are enough: {why}")


def atomics(report):
    return requests(report, "red") + requests(report, "atom")


# Exercise 1: before you run it


def loads(n_heads, kv_len, head_dim, itemsize, along):
    """(load requests, sectors) of the chapter's kernels; kv_len and head_dim are multiples of 32."""
    each = n_heads * head_dim * kv_len // 32
    return 2 * each, each * (itemsize + (32 if along == "time" else 1))


def exercise_1(function):
    """Requests and sectors of the loads, along time and along channels."""
    exercise = Exercise("Exercise 1: before you run it")
    rng = np.random.default_rng()
    sizes = [(1, 32, 32), (4, 64, 32), (1, 32, 128), (32, 4096, 128)]
    sizes += [tuple(int(n) for n in rng.integers(1, [65, 129, 9]) * [1, 32, 32]) for _ in range(20)]
    cases = [(*size, itemsize, along) for size in sizes for itemsize in (4, 2) for along in ("time", "channels")]
    with exercise, time_limit():
        for case in cases:
            call, got, wanted = call_text(function, *case), function(*case), loads(*case)
            if got is None:
                raise Wrong(f"{call} gave None. Does the function return its result?")
            if not isinstance(got, (tuple, list)) or len(got) != 2:
                raise Wrong(f"{call} gave {shown(got)}, expected a pair (requests, sectors)")
            if not all(isinstance(n, numbers.Integral) and not isinstance(n, bool) for n in got):
                raise Wrong(f"{call} gave {shown(got)}, expected two whole numbers (// divides without a remainder)")
            for what, mine, right in zip(("requests", "sectors"), got, wanted):
                exercise.require(mine == right, f"{call} gives {mine:,} {what}; the machine counts {right:,}")
    return exercise.report(f"right for {len(cases)} launches")


# Exercise 2: split, and lose nothing

SPLITS = (1, 2, 7, 40)
LENGTHS = (1, 2, 5, 17, 33)
SHAPES = ((1, 1, 1), (4, 2, 33), (6, 2, 64))  # n_heads, n_kv_heads, head_dim


def split_cases(rng):
    """(shape, kv_len, splits): smallest first, then a few lengths to 97, each with some number of splits."""
    for number, kv_len in enumerate(LENGTHS):
        for splits in SPLITS:
            yield SHAPES[(number + splits) % 3], kv_len, splits
    for kv_len in sorted(rng.choice(97, 8, replace=False) + 1):
        yield SHAPES[1], int(kv_len), int(rng.integers(1, 17))


def split_text(shape, kv_len, splits):
    n_heads, n_kv_heads, head_dim = shape
    heads = f"{counted(n_heads, 'head')} on {n_kv_heads}, head_dim = {head_dim}"
    return f"{counted(kv_len, 'token')}, {counted(splits, 'split')} ({heads})"


def exercise_2(source):
    """CUDA source of mix, split over blocks with atomics."""
    exercise = Exercise("Exercise 2: split, and lose nothing")
    rng, done = np.random.default_rng(), 0
    with exercise, time_limit(60):
        kernel = compiled(source, "mix")
        for shape, kv_len, splits in split_cases(rng):
            _split(kernel, rng, shape, kv_len, splits)
            done += 1
        shape, kv_len, splits = (8, 2, 64), 100, 6
        at, report = split_text(shape, kv_len, splits), _split(kernel, rng, shape, kv_len, splits, by_warp=True)
        warps = shape[0] * shape[2] // 32
        coalesced(report, at)
        at_most(requests(report, "ld"), 2 * warps * kv_len, "load requests", at, "for each token one of att, one of v")
        at_most(atomics(report), warps * splits, "atomic requests", at, "one for each warp")
        shared_out(_by_split(report, splits), "split", at)
    return exercise.report(f"right on {done + 1} cases, coalesced, with one atomic for each result and split")


def _by_split(report, splits):
    """Load requests (warps along x, splits)."""
    return by_warp(report).reshape(splits, -1).T


def _split(kernel, rng, shape, kv_len, splits, **how):
    n_heads, n_kv_heads, head_dim = shape
    at, (att, v) = split_text(shape, kv_len, splits), inputs(rng, n_heads, n_kv_heads, kv_len, head_dim)
    out, before = np.zeros((n_heads, head_dim), np.float32), {"att": att.copy(), "v": v.copy()}
    sizes = (np.int32(n_heads), np.int32(n_kv_heads), np.int32(kv_len), np.int32(head_dim))
    grid = (blocks_for(n_heads * head_dim, BLOCK), splits)
    report = launched(kernel, grid, BLOCK, att, v, out, *sizes, at=at, check_races=kv_len < RACES, **how)
    compare("out", out, truth(before["att"], before["v"]), at)
    unchanged({"att": att, "v": v}, before, at)
    return report


# Exercise 3: find the bug


def exercise_3(source):
    """CUDA source of mix, a block for each head."""
    exercise = Exercise("Exercise 3: find the bug")
    rng = np.random.default_rng()
    cases = [(kv_len, warps, 32) for kv_len, warps in ((64, 1), (64, 2), (128, 4), (128, 8))]  # the author's
    sizes = [(kv_len, warps) for kv_len in (1, 7, 33) for warps in (1, 2, 3, 8)]
    cases += [(*size, head_dim) for head_dim in (32, 64, 100) for size in sizes] + [(9, 3, 1)]
    with exercise, time_limit(60):
        kernel = compiled(source, "mix")
        for kv_len, warps, head_dim in cases:
            if kv_len == 1:
                _bug(kernel, np.ones((4, kv_len), np.float32), np.ones((kv_len, 2, head_dim), np.float32), warps)
            _bug(kernel, *inputs(rng, 4, 2, kv_len, head_dim), warps)
        kv_len, warps, head_dim = 100, 4, 64
        at = bug_text(kv_len, warps, head_dim)
        report = _bug(kernel, *inputs(rng, 4, 2, kv_len, head_dim), warps, by_warp=True)
        coalesced(report, at)
        tiles = 4 * head_dim // 32  # of 32 channels, for four heads
        at_most(requests(report, "ld"), 2 * tiles * kv_len, "load requests", at, "for each token one of att, one of v")
        made = requests(report, "st") + atomics(report)
        at_most(made, tiles, "requests that write to out", at, "one for every 32 channels")
        shared_out(by_warp(report), "warp", at)
    return exercise.report(f"right on {len(cases) + 1} cases, without a race")


def bug_text(kv_len, warps, head_dim):
    return f"{counted(kv_len, 'token')}, {counted(warps, 'warp')}, head_dim = {head_dim}"


def _bug(kernel, att, v, warps, **how):
    n_heads, (kv_len, n_kv_heads, head_dim) = len(att), v.shape
    at = bug_text(kv_len, warps, head_dim) + (
        ", with att and v all ones" if (att == 1).all() and (v == 1).all() else ""
    )
    out, before = unset((n_heads, head_dim)), {"att": att.copy(), "v": v.copy()}
    sizes = (np.int32(n_heads), np.int32(n_kv_heads), np.int32(kv_len), np.int32(head_dim))
    report = launched(kernel, n_heads, (32, warps), att, v, out, *sizes, at=at, check_races=kv_len < RACES, **how)
    compare("out", out, truth(before["att"], before["v"]), at)
    unchanged({"att": att, "v": v}, before, at)
    return report


# Exercise 4: the same bits in every run


def exercise_4(source):
    """CUDA source of mix_partial and add_partials."""
    exercise = Exercise("Exercise 4: the same bits in every run")
    rng, done = np.random.default_rng(), 0
    with exercise, time_limit(60):
        partial, add = compiled(source, "mix_partial"), compiled(source, "add_partials")
        for shape, kv_len, splits in split_cases(rng):
            _partial(partial, rng, shape, kv_len, splits)
            done += 1
        for outputs in (1, 33, 129, 256):
            for splits in (1, 2, 66):
                _add(add, rng, outputs, splits)
        shape, kv_len, splits = (8, 2, 64), 100, 6
        at, report = split_text(shape, kv_len, splits), _partial(partial, rng, shape, kv_len, splits, by_warp=True)
        warps = shape[0] * shape[2] // 32
        at_most(requests(report, "ld"), 2 * warps * kv_len, "load requests", at, "for each token one of att, one of v")
        at_most(requests(report, "st"), warps * splits, "store requests", at, "one for each warp")
        coalesced(report, at)
        shared_out(_by_split(report, splits), "split", at)
        at, report = _add(add, rng, 512, 16)
        at_most(requests(report, "ld"), 16 * 512 // 32, "load requests", at, "each partial sum once")
        coalesced(report, at)
    return exercise.report(f"right on {done + 1} cases, in the order of the splits, without an atomic")


def _no_atomics(report, at):
    if atomics(report):
        raise Wrong(f"right, but at {at} the warps make {atomics(report):,} atomic requests; wanted: none")


def _partial(kernel, rng, shape, kv_len, splits, **how):
    n_heads, n_kv_heads, head_dim = shape
    at, (att, v) = split_text(shape, kv_len, splits), inputs(rng, n_heads, n_kv_heads, kv_len, head_dim)
    partials = unset((splits, n_heads, head_dim))
    before = {"att": att.copy(), "v": v.copy()}
    sizes = (np.int32(n_heads), np.int32(n_kv_heads), np.int32(kv_len), np.int32(head_dim))
    grid = (blocks_for(n_heads * head_dim, BLOCK), splits)
    report = launched(kernel, grid, BLOCK, att, v, partials, *sizes, at=at, check_races=kv_len < RACES, **how)
    missing = np.argwhere(np.isnan(partials))
    if len(missing):
        place = ", ".join(map(str, missing[0]))
        raise Wrong(f"wrong at {at}: partials[{place}] was never set, or only added to: it is NaN, as before the call")
    compare("partials.sum(0)", partials.sum(axis=0, dtype=np.float64), truth(before["att"], before["v"]), at)
    unchanged({"att": att, "v": v}, before, at)
    _no_atomics(report, at)
    return report


def _add(kernel, rng, outputs, splits):
    """Random fractions, so that another order of additions gives other bits. Returns (what it was, report)."""
    at = f"{counted(outputs, 'output')}, {counted(splits, 'split')}"
    partials = rng.standard_normal((splits, outputs), np.float32)
    out, before = unset(outputs), partials.copy()
    args = (partials, out, np.int32(outputs), np.int32(splits))
    report = launched(kernel, blocks_for(outputs, BLOCK), BLOCK, *args, at=at, check_races=splits < 10)
    wanted = before[0].copy()
    for row in before[1:]:
        wanted += row
    if not np.array_equal(out, wanted) and np.allclose(out, wanted, rtol=1e-4, atol=1e-4):
        raise Wrong(
            f"at {at} out is right to within rounding, but was not added up from the first split to the last, in float"
        )
    compare("out", out, wanted, at)
    unchanged({"partials": partials}, {"partials": before}, at)
    _no_atomics(report, at)
    return at, report


# Exercise 5: each value once

GROUP, WARPS = 4, 8


def exercise_5(source):
    """CUDA source of mix for groups of four heads."""
    exercise = Exercise("Exercise 5: each value once")
    rng = np.random.default_rng()
    shapes = [(n, d) for d in (1, 32, 33, 100) for n in (1, 3)]
    cases = [(n, kv_len, d) for kv_len in (1, 8, 9, 33) for n, d in shapes]
    with exercise, time_limit(60):
        kernel = compiled(source, "mix")
        for case in cases:
            _group(kernel, rng, *case)
        case = n_kv_heads, kv_len, head_dim = 2, 100, 64
        at, report = group_text(*case), _group(kernel, rng, *case, by_warp=True)
        blocks = n_kv_heads * head_dim // 32
        if atomics(report):
            raise Wrong(f"right, but at {at} the warps make {atomics(report):,} atomic requests; wanted: none")
        if made := by_warp(report, SHARED_ATOMICS).sum():
            raise Wrong(
                f"right, but at {at} the warps make {made:,} atomic requests to shared memory; wanted: none, a place "
                "of its own for each sum of a warp"
            )
        most, why = blocks * kv_len * (1 + GROUP), "for each token and 32 channels one of v and four of att"
        at_most(requests(report, "ld"), most, "load requests", at, why)
        at_most(requests(report, "st"), blocks * GROUP, "store requests", at, "one for each head and 32 channels")
        coalesced(report, at)
        exercise.require(
            report.bank_conflicts == 0,
            f"right, but at {at} there are {report.bank_conflicts:,} bank conflicts: a store of a warp takes "
            f"{report.wavefronts_per_request('st'):.3g} wavefronts, a load "
            f"{report.wavefronts_per_request('ld'):.3g}; wanted: 1 each",
        )
        made, most = report.counters[SHARED_LOADS], blocks * GROUP * WARPS
        at_most(made, most, "loads from shared memory", at, "each sum of a warp once")
        shared_out(by_warp(report), "warp", at)
        busiest = int(by_warp(report, SHARED_LOADS).max())
        exercise.require(
            busiest <= WARPS,
            f"right, but at {at} one warp makes {busiest} loads from shared memory; wanted: at most {WARPS}, with "
            f"{GROUP} warps that add up one head each",
        )
    return exercise.report(f"right on {len(cases) + 1} cases: each value once, no atomic, no conflict, no race")


def group_text(n_kv_heads, kv_len, head_dim):
    return f"{counted(n_kv_heads, 'KV head')}, {counted(kv_len, 'token')}, head_dim = {head_dim}"


def _group(kernel, rng, n_kv_heads, kv_len, head_dim, **how):
    at = group_text(n_kv_heads, kv_len, head_dim)
    att, v = inputs(rng, GROUP * n_kv_heads, n_kv_heads, kv_len, head_dim)
    out, before = unset((len(att), head_dim)), {"att": att.copy(), "v": v.copy()}
    args = (att, v, out, np.int32(n_kv_heads), np.int32(kv_len), np.int32(head_dim))
    grid = (n_kv_heads, blocks_for(head_dim, 32))
    report = launched(kernel, grid, (32, WARPS), *args, at=at, check_races=kv_len < RACES, **how)
    compare("out", out, truth(before["att"], before["v"]), at)
    unchanged({"att": att, "v": v}, before, at)
    return report


# Exercise 6: a bug in flight

TOGETHER = 8  # loads of values that must stand ahead of the arithmetic


def exercise_6(source):
    """CUDA source of mix."""
    exercise = Exercise("Exercise 6: a bug in flight")
    lengths = [1, 2, 7, 8, 9, 63, 64, 65, 100, 127, 128, 129, 192, 300]
    cases = [(n, room) for n in lengths for room in (n, n + 1, n + 70, n + 300)] + [(31, 31), (257, 258)]
    with exercise, time_limit(60):
        kernel, rng = compiled(source, "mix"), np.random.default_rng()
        for kv_len, capacity in cases:
            report = _flight(kernel, rng, kv_len, capacity)
        kv_len = capacity = 512
        report = _flight(kernel, rng, kv_len, capacity)
        made, most = requests(report, "ld"), 2 * kv_len  # a token has one load of values and one of its weight
        exercise.require(
            made <= most,
            f"right, but at kv_len = {kv_len} the warps make {made:,} load requests; wanted: at most {most:,}, one of "
            "its values and one of its weight for each token",
        )
        together = _together(source)
        exercise.require(
            together >= TOGETHER,
            f"right, but in the compiled code no more than {together} load{'s' * (together != 1)} of values stand "
            f"together ahead of the arithmetic; wanted: {TOGETHER}, as before",
        )
    return exercise.report(f"right on {len(cases) + 1} cases, nothing is read past the end, and loads stay in flight")


def _flight(kernel, rng, kv_len, capacity, beyond=np.nan):
    at = f"kv_len = {kv_len}, capacity = {capacity}"
    att, v = np.full(capacity, beyond, np.float32), np.full((capacity, 64), beyond, np.float16)
    att[:kv_len], v[:kv_len] = rng.random(kv_len), rng.standard_normal((kv_len, 64))
    out, before = unset(64), {"att": att[:kv_len].copy(), "v": v[:kv_len].copy()}
    report = launched(kernel, 1, (32, 8), att, v, out, np.int32(kv_len), at=at, check_races=kv_len < 70)
    wanted = before["att"].astype(np.float64) @ before["v"].astype(np.float64)
    if np.isnan(out).any() and np.isnan(beyond):
        raise Wrong(f"wrong at {at}: results are NaN, and only what lies beyond kv_len is NaN")
    near("out", out, wanted, 1e-4, at)
    unchanged({"att": att[:kv_len], "v": v[:kv_len]}, before, at)
    return report


def _together(source):
    """The most loads of values (not float32) in the PTX between two pieces of arithmetic."""
    ptx = cuda.compile(source).ptx()
    order = re.findall(r"ld\.global(?:\.nc)?[.\w]*|fma\.rn\.f32|mul(?:\.ftz)?\.f32", ptx)
    marks = "".join("." if not op.startswith("ld") else "" if op.endswith("f32") else "v" for op in order)
    return max(map(len, marks.split(".")))
