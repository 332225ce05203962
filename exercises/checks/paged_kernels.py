"""Checks of chapter 10, exercises 6 and 7: kernels that go through page tables, on the SIMT machine."""

import mmap
import sys

import numpy as np

from exercises.checks import call_text, shown, time_limit
from exercises.checks.launches import compiled, launched, near, requests, unchanged
from lab.check import unset
from lab.exercise import Exercise, Wrong

TOLERANCE = 1e-4
DIM = 64
PAGES = (1, 16, 64)


def sectors(report):
    return report.counters["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"]


# Exercise 6: split through a table


def exercise_6(table_cost, source):
    """table_cost(first, last, page) -> (requests, sectors); CUDA source of split"""
    exercise = Exercise("Exercise 6: split through a table")
    rng, made = np.random.default_rng(), []
    with exercise, time_limit(90):
        _costs(exercise, table_cost, rng)
        for page in PAGES:
            kernel = compiled(source, "split", options=(f"-DPAGE={page}",))
            for heads, splits, tokens in ((1, 1, 1), (1, 1, 40), (2, 5, 3), (2, 3, 100)):
                _split(kernel, rng, page, heads, splits, tokens, races=tokens < 9)
            made.append(_split_counted(exercise, kernel, rng, page, 2, 3, 300))
    said = ", ".join(map(str, made))
    return exercise.report(f"right for pages of 1, 16 and 64, with {said} requests to the table")


def _cost(first, last, page):
    """What a warp asks of a table for tokens first to last - 1, through windows of 32 numbers."""
    if first == last:
        return 0, 0
    begin, end = first // page, (last - 1) // page + 1
    windows = [(at, min(at + 32, end)) for at in range(begin, end, 32)]
    return len(windows), sum((stop - 1) // 8 - at // 8 + 1 for at, stop in windows)


def _costs(exercise, table_cost, rng):
    cases = [
        (0, 1, 16),
        (0, 512, 16),
        (0, 513, 16),
        (0, 1000, 1),
        (0, 1000, 64),
        (5, 5, 4),
        (40, 300, 1),
        (250, 500, 1),
    ]
    cases += [(0, 264, 1), (7, 9, 1), (7, 9, 64), (100, 4000, 16)]
    cases += [(int(a), int(a + n), page) for page in PAGES for a, n in rng.integers(1, 3000, (4, 2))]
    for case in cases:
        call, got = call_text(table_cost, *case), table_cost(*case)
        if not isinstance(got, (tuple, list)) or len(got) != 2:
            raise Wrong(f"{call} gave {shown(got)}, expected a pair (requests, sectors)")
        for name, mine, wanted in zip(("requests", "sectors"), got, _cost(*case)):
            exercise.require(mine == wanted, f"{call}: {name} are {shown(mine)}, expected {wanted}")


def _split(kernel, rng, page, heads, splits, tokens, races=False):
    """Run it on a request whose pages lie in any order, in a pool that is NaN elsewhere. Returns the report."""
    at = f"heads = {heads}, splits = {splits}, tokens = {tokens}, pages of {page}"
    count = -(-tokens // page)
    table = rng.permutation(count + 2)[:count].astype(np.int32)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((heads, DIM), *2 * [(tokens, DIM)]))
    q *= 0.5
    pools = []
    for rows in (k, v):
        pool = np.full((count + 2, page, DIM), np.nan, np.float32)
        for t in range(tokens):
            pool[table[t // page], t % page] = rows[t]
        pools.append(pool.reshape(-1))
    wanted, lse = np.zeros((heads, splits, DIM)), np.full((heads, splits), -np.inf)
    s = q.astype(float) @ k.T.astype(float)
    for i in range(splits):
        first, last = tokens * i // splits, tokens * (i + 1) // splits
        if first < last:
            p = np.exp(s[:, first:last] - s[:, first:last].max(1, keepdims=True))
            wanted[:, i] = p @ v[first:last] / p.sum(1, keepdims=True)
            lse[:, i] = s[:, first:last].max(1) + np.log(p.sum(1))
    out, sums = unset((heads, splits, DIM)), unset((heads, splits))
    arrays = {"q": q.reshape(-1), "k_pages": pools[0], "v_pages": pools[1], "table": table}
    before = {name: a.copy() for name, a in arrays.items()}
    report = launched(
        kernel, (heads, splits), 32, *arrays.values(), out.reshape(-1), sums.reshape(-1), np.int32(tokens), at=at,
        check_races=races,
    )  # fmt: skip
    near("out", out, wanted, TOLERANCE, at)
    empty = lse == -np.inf
    if not (sums[empty] == -np.inf).all():
        raise Wrong(f"wrong at {at}: the lse of a split without a token is {sums[empty].flat[0]}, expected -inf")
    near("lse", np.where(empty, 0, sums), np.where(empty, 0, lse), TOLERANCE, at)
    for name, a in arrays.items():
        if not np.array_equal(a, before[name], equal_nan=True):
            raise Wrong(f"at {at} the kernel changed {name}, which it should only read")
    return report


def _split_counted(exercise, kernel, rng, page, heads, splits, tokens):
    """The requests and sectors beyond those of keys, values and queries must be what windows cost."""
    report = _split(kernel, rng, page, heads, splits, tokens)
    at = f"heads = {heads}, splits = {splits}, tokens = {tokens}, pages of {page}"
    bounds = [tokens * i // splits for i in range(splits + 1)]
    costs = np.array([_cost(first, last, page) for first, last in zip(bounds, bounds[1:])]).sum(0) * heads
    rest = 2 * tokens * heads + heads * splits
    made, most = requests(report, "ld"), rest + int(costs[0])
    exercise.require(
        made <= most,
        f"right, but at {at} the warps make {made:,} load requests; wanted: at most {most:,}, 2 for each token and "
        f"head, 1 for each query, and {costs[0]} for the table",
    )
    moved, most = sectors(report), 8 * rest + int(costs[1])
    exercise.require(
        moved <= most,
        f"right, but at {at} the warps read {moved:,} sectors; wanted: at most {most:,}, 8 for each key, value and "
        f"query, and {costs[1]} of the table",
    )
    return max(0, made - rest)


# Exercise 7: find the bug

PAGE = 16
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # memory that nobody writes to takes no room
HUGE = (1 << 31) // (2 * PAGE * DIM) + 3  # pages of a pool of more than 2**31 numbers


def exercise_7(source):
    """CUDA source of served."""
    exercise = Exercise("Exercise 7: find the bug")
    rng, first = np.random.default_rng(), np.random.default_rng(10)  # the stub's verdict is the same on every run
    batches = [
        [5],
        [40],
        [1],
        [17, 31],
        [100, 5, 48, 23],
        [16],
        [32],
        [100, 0, 16, 3],
        rng.integers(0, 200, 6).tolist(),
    ]
    with exercise, time_limit(60):
        kernel = compiled(source, "served")
        for n, lens in enumerate(batches):
            pool = np.full((sum(-(-t // PAGE) for t in lens) + 4, 2, PAGE, DIM), np.nan, np.float16)
            free = rng.permutation(len(pool)).tolist()
            report = _served(kernel, first if n < 8 else rng, pool, free, lens, f"lens = {lens}", sum(lens) < 20)
        most = 4 * sum(lens) + sum(3 * (-(-t // PAGE)) + 8 for t in lens)
        made = requests(report, "ld")
        exercise.require(
            made <= most,
            f"right, but at lens = {lens} the warps make {made:,} load requests; wanted: at most {most:,}",
        )
        pool, free = _huge(), [HUGE - 2, 1, HUGE - 1, 0, 2]
        at = f"lens = [20, 9], a pool of {HUGE:,} pages, the request's pages near its end"
        _served(kernel, first, pool, free, [20, 9], at)
    return exercise.report(f"right in {len(batches) + 1} batches, whatever their lengths and the pool's size")


def _huge():
    """A pool of more numbers than 31 bits count, of which nearly none is ever touched."""
    memory = mmap.mmap(-1, 2 * HUGE * 2 * PAGE * DIM, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    return np.frombuffer(memory, np.float16).reshape(HUGE, 2, PAGE, DIM)


def _served(kernel, rng, pool, free, lens, at, races=False):
    q = rng.standard_normal((len(lens), DIM)).astype(np.float32) * 0.5
    counts = [-(-t // PAGE) for t in lens]
    indices = np.array([free[i] for i in range(sum(counts))] or [0], np.int32)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    wanted = np.zeros((len(lens), DIM))
    for row, tokens in enumerate(lens):
        mine = indices[indptr[row] : indptr[row + 1]]
        k, v = (rng.standard_normal((tokens, DIM)).astype(np.float16) for _ in range(2))
        v += np.sign(v)
        for t in range(tokens):
            pool[mine[t // PAGE], 0, t % PAGE], pool[mine[t // PAGE], 1, t % PAGE] = k[t], v[t]
        if tokens % PAGE:
            pool[mine[-1], :, tokens % PAGE :] = np.nan
        if tokens:
            s = k.astype(float) @ q[row].astype(float) * np.log(2)
            p = np.exp(s - s.max())
            wanted[row] = p @ v.astype(float) / p.sum()
    out = unset((len(lens), DIM))
    arrays = {"q": q.reshape(-1), "indptr": indptr, "indices": indices, "lens": np.array(lens, np.int32)}
    before = {name: a.copy() for name, a in arrays.items()}
    given = arrays["q"], pool.reshape(-1), indptr, indices, arrays["lens"]
    tell = (lambda error: f"at {at}: {str(error).splitlines()[0]}") if len(pool) == HUGE else None
    report = launched(kernel, len(lens), 32, *given, out.reshape(-1), at=at, check_races=races, tell=tell)
    near("out", out, wanted, 1e-3, at)
    unchanged(arrays, before, at)
    return report
