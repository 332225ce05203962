"""Checks of chapter 02, matmul and GEMV on the CPU.

Quality is counted, never timed: the additions that wait for one another (exercise 2), the cache lines that
must be fetched (exercise 4). The learner's C runs in a process of its own.
"""

import contextlib
import functools
import io
import itertools
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from exercises.checks import counted, shown, time_limit
from exercises.checks.own_process import OwnProcess
from lab.cache import Cache, loops, matmul_addresses, matmul_misses
from lab.check import between_guards, differs, guards_intact, poisoned, unset
from lab.compiler import compile_c
from lab.exercise import Exercise, Wrong
from lab.timing import side_by_side

# Exercise 1: share out rows

GEMV_ROWS = r"""
void gemv_rows(const float *W, const float *x, float *y, int64_t cols, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
        float acc = 0;
        for (int64_t c = 0; c < cols; c++) acc += W[r * cols + c] * x[c];
        y[r] = acc;
    }
}
"""


def exercise_1(row_range):
    """row_range(thread, n_threads, rows) -> (begin, end)."""
    exercise = Exercise("Exercise 1: share out rows")
    cases = sorted(itertools.product(range(1, 18), range(41)), key=sum)
    cases += [(64, 1_000_003), (7, 2**31 + 5), (96, 128256)]
    with exercise, time_limit():
        for n_threads, rows in cases:
            ranges = [_pair(row_range, t, n_threads, rows) for t in range(n_threads)]
            _shared_out(exercise, ranges, n_threads, rows)
            if rows in (0, 5, 40):
                _threaded_gemv(exercise, ranges, rows)
    return exercise.report(f"right for {len(cases)} ways to share, and so is the threaded C GEMV that uses it")


def _pair(row_range, thread, n_threads, rows):
    call = f"row_range({thread}, {n_threads}, {rows})"
    got = row_range(thread, n_threads, rows)
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        raise Wrong(f"{call} gave {shown(got)}, expected a pair (begin, end)")
    if not all(isinstance(v, (int, np.integer)) and not isinstance(v, bool) for v in got):
        raise Wrong(f"{call} gave {shown(got)}, expected two whole numbers (// divides without a remainder)")
    return int(got[0]), int(got[1])


def _shared_out(exercise, ranges, n_threads, rows):
    """Every row once, in order, sizes that differ by at most one."""
    given = f"with {counted(rows, 'row')} and {counted(n_threads, 'thread')}"
    row = 0  # the first that no thread has taken
    for thread, (begin, end) in enumerate(ranges):
        took = f"thread {thread} took ({begin}, {end})"
        exercise.require(0 <= begin <= end <= rows, f"{given}, {took}: expected 0 <= begin <= end <= {rows}")
        if begin < end:
            exercise.require(begin >= row, f"{given}, {took}, but row {begin} already had a thread")
            exercise.require(begin == row, f"{given}, {took}, so nobody took row {row}")
            row = end
    exercise.require(row == rows, f"{given}, nobody took row {row}: the ranges are {shown(ranges)}")
    sizes = [end - begin for begin, end in ranges]
    exercise.require(
        max(sizes) - min(sizes) <= 1,
        f"{given}, every row is taken once, but the threads got {shown(sizes)} rows: "
        f"sizes may differ by one at most, or the others wait for thread {sizes.index(max(sizes))}",
    )


def _threaded_gemv(exercise, ranges, rows, cols=33):
    """The same ranges in use: one thread for each, all of them writing to one y."""
    gemv_rows, rng = _gemv_rows(), np.random.default_rng()
    W, x = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((rows, cols), (cols,)))
    y = unset(rows)
    with ThreadPoolExecutor(len(ranges)) as pool:
        list(pool.map(lambda r: gemv_rows(W, x, y, cols, *r), ranges))
    exercise.require(np.array_equal(y, W @ x), f"the GEMV with {rows} rows and the ranges {shown(ranges)} is wrong")


@functools.cache
def _gemv_rows():
    return compile_c(GEMV_ROWS, name="gemv_rows.c", openmp=False).gemv_rows


# Exercise 2: several accumulators

DOT = "float dot(const float *a, const float *b, int64_t n)"
DOT_FLAGS = ("-ffp-contract=off",)
N_PROBED, LONGEST = 256, 80  # 63 in each of four chains, and 17 more to put them together and for a tail

# How to see the order of additions from outside. All products are 1, but for +M at i and -M at j, where M is
# so large that M + 1 is M. What was added to +M before it met -M is lost, and so is what was added to -M: the
# result counts the products that joined after the two had met. So 256 minus the result is the number of
# products under the addition where i and j meet.
PROBE = r"""
void course_probe(float *a, float *b, float *result, int64_t n) {
    const float big = 1125899906842624.0f; /* 2^50; its square is 2^100 */
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = i + 1; j < n; j++) {
            a[i] = b[i] = a[j] = big;
            b[j] = -big;
            result[i * n + j] = dot(a, b, n);
            a[i] = b[i] = a[j] = b[j] = 1;
        }
}
"""
REPEAT = r"""
float course_repeat(const float *a, const float *b, int64_t n, int64_t times) {
    volatile int64_t length = n; /* read anew each time, so that no call can be left out */
    float total = 0;
    for (int64_t t = 0; t < times; t++) total += dot(a, b, length);
    return total;
}
"""


def exercise_2(source):
    """C source of `float dot(const float *a, const float *b, int64_t n)`."""
    exercise = Exercise("Exercise 2: a dot product that does not wait")
    longest = None
    lengths = [*range(70), 97, 127, 251, 509, 1021, 4099, 10007]
    with exercise, OwnProcess(source, {"dot": DOT}, extra=PROBE, flags=DOT_FLAGS, name="dot.c") as c:
        rng = np.random.default_rng()
        for n in lengths:
            a, b = (between_guards(_eighths(rng, n)) for _ in range(2))
            before = a.copy(), b.copy()
            got, wanted = c.call("dot", a, b, n, doing=f"n = {n}"), float(a.astype(float) @ b.astype(float))
            if got != wanted:
                raise Wrong(f"wrong at n = {n}: {_what_is_wrong(c, got, wanted, n)}")
            unchanged = np.array_equal(a, before[0]) and np.array_equal(b, before[1])
            exercise.require(unchanged, f"at n = {n} the numbers in a or b were changed")
        longest = _longest_chain(c)
        right = f"right on {len(lengths)} lengths, but "
        exercise.require(
            longest < N_PROBED - 1,
            f"{right}the additions for {N_PROBED} products form one chain of {longest}: "
            "each waits for the one before it. Let several accumulators take turns",
        )
        exercise.require(
            longest <= LONGEST,
            f"{right}for {N_PROBED} products the longest chain is {longest} additions, "
            f"each waiting for the one before it; wanted: at most {LONGEST}",
        )
    return exercise.report(
        f"right on {len(lengths)} lengths; the longest chain for {N_PROBED} products is {longest} additions"
    )


def _eighths(rng, n):
    """n random multiples of 1/8 between -2 and 2, none 0. Any order of additions gives their exact sum."""
    return (rng.integers(1, 17, n) * rng.choice([-1, 1], n) / 8).astype(np.float32)


def _what_is_wrong(c, got, wanted, n):
    """In words: which product is missing, or counted twice? A one at a single place tells."""
    if np.isnan(got):
        return (
            "the result is NaN. The check puts NaNs before and after the numbers, so something outside of "
            "a[0] to a[n-1] was read, or a variable was never set"
        )
    for i in range(n):
        a, b = between_guards(np.zeros(n, np.float32)), between_guards(np.ones(n, np.float32))
        a[i] = 1
        if (times := c.call("dot", a, b, n, doing=f"n = {n}")) != 1:
            if times in (0, 2):
                return f"a[{i}]·b[{i}] is {'counted twice' if times else 'left out'}"
            return f"with b all ones and a zero but for a[{i}] = 1 the result is {times:g}, expected 1"
    return differs("the result", got, wanted)


def _longest_chain(c):
    """The most additions that any product goes through on its way to the result."""
    n = N_PROBED
    a, b, result = np.ones(n, np.float32), np.ones(n, np.float32), np.zeros((n, n), np.float32)
    c.call("course_probe", a, b, result, n, doing=f"n = {n}", limit=30)
    together = np.triu(n - result, 1)
    together += together.T  # [i, j]: how many products stand under the addition where i and j meet; 0 if i is j
    rows = together[~np.eye(n, dtype=bool)].reshape(n, n - 1)
    tree = np.isin(rows, np.arange(2, n + 1)).all() and (rows.max(axis=1) == n).all()  # all meet at the root
    for k in range(n if tree else 0):  # i and j meet no higher up than where both have met k
        tree &= (together <= np.maximum(together[:, [k]], together[[k], :])).all()
    if not tree:
        raise Wrong("right, but it is not a plain sum of products: the order of its additions cannot be read")
    # The additions above one product differ in how many products stand under them, so count the numbers.
    return max(len(np.unique(row)) for row in rows)


def race(source, n=2048):
    """Print how long one product takes with 1 to 16 accumulators and with the learner's dot, on this machine."""
    with contextlib.redirect_stdout(io.StringIO()):
        passed = exercise_2(source)
    if not passed.passed:
        print("the race starts when exercise 2 passes")
        return
    a, b = np.random.default_rng().random((2, n), np.float32)
    runs = {}
    counts = (1, 2, 4, 8, 16)
    for name, text in {**{count: _accumulators(count) for count in counts}, "yours": source}.items():
        repeat = compile_c(text + "\n" + REPEAT, flags=DOT_FLAGS, name="dot.c", openmp=False).course_repeat
        runs[name] = lambda repeat=repeat: repeat(a, b, n, 50)
    times = {k: t.median / (50 * n) * 1e9 for k, t in side_by_side(runs, seconds=0.2).items()}
    print("accumulators " + "".join(f"{name:>7}" for name in times))
    print("ns a product " + "".join(f"{t:7.2f}" for t in times.values()))
    print(f"Yours is {times[1] / times['yours']:.1f} times as fast as one accumulator. ", end="")
    enough = next((c for c in counts[:-1] if times[c] < 1.2 * times[2 * c]), None)
    if enough:
        as_long = 100 * times[2 * enough] / times[enough]
        print(f"More than {enough} hardly pay: with {2 * enough} it still takes {as_long:.0f} % as long.")
    else:
        print(f"Here more of them pay up to {counts[-1]} at least.")


def _accumulators(count):
    """C source of a dot with so many accumulators, written out."""
    names = [f"acc{k}" for k in range(count)]
    return f"""
float dot(const float *a, const float *b, int64_t n) {{
    float {", ".join(f"{name} = 0" for name in names)};
    int64_t i = 0;
    for (; i + {count} <= n; i += {count}) {{
        {" ".join(f"{name} += a[i + {k}] * b[i + {k}];" for k, name in enumerate(names))}
    }}
    for (; i < n; i++) acc0 += a[i] * b[i];
    return {" + ".join(names)};
}}
"""


# Exercise 3: find the bug

MATMUL = "void matmul(const float *A, const float *B, float *C, int64_t m, int64_t n, int64_t k)"


def exercise_3(source):
    """C source of the tiled matmul."""
    exercise = Exercise("Exercise 3: find the bug")
    edges = (1, 2, 3, 15, 16, 17, 33)
    shapes = [(16, 16, 16), (32, 32, 32), (48, 48, 48)]
    shapes += sorted(itertools.product(edges, repeat=3), key=lambda s: (sum(s), s))
    shapes += [(61, 37, 53), (20, 130, 70), (70, 20, 130)]
    shapes += [(1, 1, 0), (3, 2, 0), (17, 33, 0), (0, 5, 3), (5, 0, 3), (0, 0, 0)]
    with exercise, OwnProcess(source, {"matmul": MATMUL}, name="matmul.c") as c:
        rng = np.random.default_rng()
        for m, n, k in shapes:
            A, B = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((m, k), (k, n)))
            # Ones first: what they show makes a plainer message.
            problem = _matmul_problem(c, np.ones_like(A), np.ones_like(B)) or _matmul_problem(c, A, B)
            exercise.require(not problem, f"wrong at m = {m}, n = {n}, k = {k}: {problem}")
    return exercise.report(f"right on {len(shapes)} shapes, edges and k = 0 included")


def _matmul_problem(c, A, B):
    (m, k), n = A.shape, B.shape[1]
    wanted = A @ B
    before, (A, B) = (A, B), (between_guards(A), between_guards(B))
    C = poisoned((m, n), np.float32)
    c.call("matmul", A, B, C, m, n, k, doing=f"m = {m}, n = {n}, k = {k}")
    if not guards_intact(C):
        return "memory outside C was written"
    if not all(map(np.array_equal, (A, B), before)):
        return "A or B was changed"
    bad = np.argwhere(~(C == wanted))
    if not len(bad):
        return None
    i, j = map(int, bad[0])
    ones = " with A and B all ones" if k and (A == 1).all() and (B == 1).all() else ""
    text = f"{len(bad)} of {counted(C.size, 'element')} of C wrong{ones}. "
    if not np.isnan(C[i, j]):
        text += differs(f"C[{i}, {j}]", C[i, j], wanted[i, j])
    else:
        text += f"C[{i}, {j}] is nan, expected {wanted[i, j]:g}"
        C[...] = 0
        c.call("matmul", A, B, C, m, n, k, doing=f"m = {m}, n = {n}, k = {k}")
        text += (
            ": a number outside A or B was read (the check puts NaNs there)"
            if np.isnan(C).any()
            else ": what was in C before the call is still there (the check fills C with NaN)"
        )
    return text


# Exercise 4: an order of steps with few misses

N_GRADED, CACHE_BYTES, MOST_MISSES = 48, 4096, 900
PLAIN_ORDERS = ("ijp", "ipj", "jip", "jpi", "pij", "pji")


def plain_orders():
    """Print the misses of the six plain orders of the three loops."""
    for order in PLAIN_ORDERS:
        misses = matmul_misses(loops(order, N_GRADED), N_GRADED, Cache(CACHE_BYTES))
        print(f"{order}  {misses:7,} misses")


def exercise_4(visit):
    """visit(n) yields (i, j, p), each triple once, in any order."""
    exercise = Exercise("Exercise 4: few misses")
    misses = [0, 0, 0]
    with exercise, time_limit(60):
        for n in (1, 2, 3, 5, 16, 17, 50, 0, N_GRADED):
            steps = _steps(visit, n)
        misses, _ = _misses(steps)
        exercise.require(
            sum(misses) <= MOST_MISSES,
            f"every step once, but {_misses_text(misses)}; wanted: at most {MOST_MISSES:,}",
        )
    return exercise.report(f"every step once, and {_misses_text(misses)}")


def _misses(steps, after=0):
    """The misses of A, B and C over all steps; and which of the lines of all three are held after so many steps."""
    n, cache = N_GRADED, Cache(CACHE_BYTES)
    misses, held = [0, 0, 0], None
    for number, address in enumerate(matmul_addresses(steps, n).tolist()):
        misses[number % 3] += not cache.read(address)
        if number == 3 * after + 2:
            held = [cache.holds(first) for first in range(0, 3 * n * n * 4, cache.line_bytes)]
    return misses, held


def _misses_text(misses):
    parts = ", ".join(f"{name} {count:,}" for name, count in zip("ABC", misses))
    return f"{sum(misses):,} misses at n = {N_GRADED} ({parts})"


def _plain_triples(steps, n):
    """Is each step a tuple of three ints from 0 to n - 1? One look at all of them takes a tenth of the time."""
    if {*map(type, steps)} != {tuple} or {*map(len, steps)} != {3}:
        return False
    numbers = list(itertools.chain.from_iterable(steps))
    return {*map(type, numbers)} == {int} and min(numbers) >= 0 and max(numbers) < n


def _steps(visit, n):
    """The learner's steps as an array (n³, 3), or Wrong."""
    got = visit(n)
    if got is None or not hasattr(got, "__iter__"):
        raise Wrong(f"visit({n}) gave {shown(got)}, expected (i, j, p) triples: yield them one by one")
    steps = list(itertools.islice(got, n**3 + 1))  # one too many, and no more, is enough to know
    if not _plain_triples(steps, n):  # then say which is none, or allow for NumPy's numbers
        for number, step in enumerate(steps):
            if not isinstance(step, (tuple, list, np.ndarray)) or len(step) != 3:
                raise Wrong(f"visit({n}): step {number} is {shown(step)}, expected a triple (i, j, p)")
            if not all(isinstance(v, (int, np.integer)) and 0 <= v < n for v in step):
                found = shown(tuple(step))
                raise Wrong(f"visit({n}): step {number} is {found}, expected whole numbers from 0 to {n - 1}")
    steps = np.array(steps, np.int64).reshape(-1, 3)
    code = (steps[:, 0] * n + steps[:, 1]) * n + steps[:, 2]
    values, first, times = np.unique(code, return_index=True, return_counts=True)
    if (times > 1).any():
        twice = steps[first[times > 1].min()].tolist()
        raise Wrong(f"visit({n}): {tuple(twice)} comes more than once, so its product would be added twice")
    if len(values) < n**3:
        missing = np.setdiff1d(np.arange(n**3), values)
        i, j, p = (int(v) for v in np.unravel_index(missing[0], (n, n, n)))
        raise Wrong(f"visit({n}): {len(missing)} of {n**3} steps never come, the first is {(i, j, p)}")
    return steps


def draw_cache(orders, after=60_020):
    """What the cache holds after so many steps, and the misses of all: three matrices for each {title: steps}."""
    from lab.plots import RED, figure, finish

    n = N_GRADED
    picture, axes = figure(8, 3.1 * len(orders), columns=3, rows=len(orders))
    for row, (title, steps) in zip(np.atleast_2d(axes), orders.items()):
        misses, held = _misses(steps, after)
        maps = np.repeat(held, 3 * n * n // len(held)).reshape(3, n, n)
        i, j, p = (int(v) for v in steps[after])
        places = [("i", i, "p", p), ("p", p, "j", j), ("i", i, "j", j)]  # rows and columns of A, B and C
        for axis, name, part, (rows, down, columns, across), missed in zip(row, "ABC", maps, places, misses):
            axis.imshow(part, cmap="Blues", vmin=0, vmax=1.6, interpolation="nearest")
            axis.plot(across, down, "o", color=RED, markersize=6)
            axis.set_xticks([16, 32], ["16", "32"])
            axis.set_yticks([16, 32], ["16", "32"])
            axis.set_xlabel(f"column {columns}", labelpad=1)
            axis.set_ylabel(f"row {rows}", labelpad=1)
            axis.set_title(f"{name}: {missed:,} misses in all", loc="left", fontsize=11)
            for side in axis.spines.values():
                side.set_visible(True)
        row[0].annotate(
            title, (-0.3, 0.5), xycoords="axes fraction", rotation=90, va="center", ha="right", weight="bold"
        )
    return finish(picture)


def draw_yours(visit):
    """The picture for the learner's order beside the plain one; a sentence while exercise 4 is not right."""
    try:
        with time_limit(60):
            steps = _steps(visit, N_GRADED)
    except Exception as e:
        print(f"the picture comes when visit({N_GRADED}) gives every step once", end="")
        print("" if isinstance(e, NotImplementedError) else f" ({e})")
        return None
    return draw_cache({"order ijp": loops("ijp", N_GRADED), "yours": steps})


# Exercise 5: half to float by bits

HALF = "float half_bits_to_float(uint16_t h)"
ALL_HALVES = r"""
void course_all_halves(const uint16_t *h, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = half_bits_to_float(h[i]);
}
"""
HARDWARE = r"\b(_Float16|__fp16|\w+intrin\b|arm_neon|_mm\d*_\w+|_cvt\w+|__builtin_ia32\w+|vcvt\w*|(__)?asm(__)?\b)"


def exercise_5(source):
    """C source of `float half_bits_to_float(uint16_t h)`."""
    exercise = Exercise("Exercise 5: half to float by bits")
    with exercise:
        plain = re.sub(r"/\*.*?\*/|//[^\n]*", " ", str(source), flags=re.S)
        if found := re.search(HARDWARE, plain):
            raise Wrong(f"`{found[0]}` lets the hardware convert: use shifts and masks instead")
        with OwnProcess(source, {"half_bits_to_float": HALF}, extra=ALL_HALVES, name="half.c") as c:
            bits = np.arange(1 << 16, dtype=np.uint16)
            got = unset(bits.size)
            c.call("course_all_halves", bits, got, bits.size)
            _every_class(exercise, bits, got)
    return exercise.report("all 65,536 patterns are right, bit for bit")


def _every_class(exercise, bits, got):
    wanted = bits.view(np.float16).astype(np.float32)
    exponent, fraction = bits >> 10 & 31, bits & 1023
    classes = {
        "zero": (exponent == 0) & (fraction == 0),
        "normal": (exponent > 0) & (exponent < 31),
        "subnormal": (exponent == 0) & (fraction > 0),
        "infinity": (exponent == 31) & (fraction == 0),
        "NaN": (exponent == 31) & (fraction > 0),
    }
    right = np.where(np.isnan(wanted), np.isnan(got), got.view(np.uint32) == wanted.view(np.uint32))
    wrong = {name: np.flatnonzero(member & ~right) for name, member in classes.items()}
    wrong = {name: at for name, at in wrong.items() if len(at)}
    if not wrong:
        return
    name, at = next(iter(wrong.items()))
    fine = [c for c in classes if c not in wrong]
    first, total = at[0], int(classes[name].sum())
    ours, theirs = (f"{v:.9g} (0x{v.view(np.uint32):08x})" for v in (got[first], wanted[first]))
    exercise.require(
        False,
        f"{len(at)} of {total} {name} patterns are wrong. The first is 0x{first:04x}: expected "
        f"{'any NaN' if name == 'NaN' else theirs}, got {ours}. "
        f"Wrong: {', '.join(wrong)}; right: {', '.join(fine) or 'none'}",
    )
