"""The checks of chapter 15: shares of a line, what counts of a segment, pass 1, launches that clear nothing, roles.

The learner's CUDA C++ runs on the SIMT machine.
"""

import functools
import math
import warnings

import numpy as np

import simt
from exercises.checks import array_from, call_text, counted, number_from, shown, time_limit
from exercises.checks.launches import compare, compiled, launched, unchanged
from exercises.checks.matmul import COURSE, HOPPER, in_words, needs
from lab.exercise import Exercise, Wrong

# Exercise 1: shares of a line


def _cut_line(pairs, chunks, limit, again):
    lengths, total = [], pairs * chunks
    while (begin := sum(lengths)) < total:
        longest = 0
        for length in range(1, total - begin + 1):
            twice = min(length, (begin + length) % chunks)  # 0 at the end of a pair
            if length + again * twice <= limit:
                longest = length
        lengths.append(longest)
    return lengths


def exercise_1(cut_line):
    """cut_line(pairs, chunks, limit, again) -> list of chunks a share"""
    exercise = Exercise("Exercise 1: shares of a line")
    rng = np.random.default_rng()
    cases = [(1, 1, 1.5, 0.5), (1, 4, 4.0, 0.5), (1, 7, 3.0, 0.0), (1, 7, 3.0, 0.5), (2, 10, 9.0, 0.5)]
    cases += [(2, 10, 10.0, 0.5), (3, 4, 100.0, 0.5), (2, 5, 1.5, 0.5), (5, 1, 3.0, 0.5), (4, 12, 16.0, 0.375)]
    for _ in range(30):
        pairs, chunks, eighths, more = (
            int(rng.integers(low, high)) for low, high in ((1, 7), (1, 13), (0, 9), (0, 160))
        )
        cases.append((pairs, chunks, 1 + (eighths + more) / 8, eighths / 8))  # exact in binary
    with exercise, time_limit():
        for case in cases:
            call, wanted = call_text(cut_line, *case), _cut_line(*case)
            got = cut_line(*case)
            if got is None:
                raise Wrong(f"{call} gave None. Does the function return its result?")
            if not isinstance(got, (list, tuple)) and not (isinstance(got, np.ndarray) and got.ndim):
                raise Wrong(f"{call} gave {shown(got)}, expected a list")
            same = len(got) == len(wanted) and all(np.ndim(a) == 0 and a == b for a, b in zip(got, wanted))
            exercise.require(same, f"{call} gave {shown(got)}, expected {wanted}")
    return exercise.report(f"right in {len(cases)} cases")


# Exercise 2: what counts


def _counting(dt, A, Q, bits):
    n = len(dt) // Q
    logs = (A * dt).reshape(n, Q).sum(1) / math.log(2)
    count, after = 0, 0.0
    for log in logs[::-1]:
        if after < -bits:
            break
        count, after = count + 1, after + log
    return count


def exercise_2(chunks_that_count):
    """chunks_that_count(dt, A, Q, bits) -> how many"""
    exercise = Exercise("Exercise 2: what counts")
    rng = np.random.default_rng()
    ln2 = math.log(2)
    cases = [([1.0] * 4, -0.1, 4, 64), ([1.0] * 8, -17 * ln2, 4, 64), ([1.0] * 12, -15 * ln2, 4, 64)]
    cases += [([9.0] * 8 + [0.001] * 8, -8.0, 4, 64), ([0.001] * 8 + [9.0] * 8, -8.0, 4, 64)]
    cases += [([1.0] * 8 + [0.0] * 8, -100.0, 4, 64), ([1.0, math.nan] + [0.01] * 14, -1.0, 4, 64)]
    cases += [([0.01] * 9 + [math.nan] + [0.01] * 6, -1.0, 4, 64)]
    cases += [([9.0] * 8 + [0.01, math.nan] + [0.01] * 6, -8.0, 4, 64)]
    cases += [([5.0] * 6 + [math.nan] + [5.0] * 9, -8.0, 4, 64), ([1.0] * 64, -0.25 * ln2, 8, 7)]
    cases += [([1.0] * 4 + [0.0] * 4, -1.0, 2, 0)]  # a decay of 1 is not below 2^0
    for _ in range(30):
        Q, n = int(rng.integers(1, 9)), int(rng.integers(1, 20))
        cases.append((rng.uniform(0, 1, n * Q).tolist(), -float(rng.uniform(0.1, 20)), Q, int(rng.integers(0, 100))))
    with exercise, time_limit(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dt, A, Q, bits in cases:
            dt = np.array(dt)
            got, wanted = number_from(chunks_that_count, dt.copy(), A, Q, bits, whole=True), _counting(dt, A, Q, bits)
            name = getattr(chunks_that_count, "__name__", "your function")
            call = f"{name}(dt, {A:.4g}, {Q}, {bits}) with dt = {shown(dt.round(3).tolist())}"
            exercise.require(got == wanted, f"{call} gave {got}, expected {wanted}")
    return exercise.report(f"right in {len(cases)} cases")


# Exercise 3: pass 1


def _recurrent_state(x, dt, A, B):
    """The state behind the last token, (P, N), and log2 of the decay over all of them."""
    state = np.zeros((x.shape[1], B.shape[1]))
    for t in range(len(dt)):
        state = math.exp(A * dt[t]) * state + dt[t] * np.outer(x[t], B[t])
    return state, A * dt.sum() / math.log(2)


def _mistaken(x, dt, A, B, Q):
    """States that come of mistakes, by what would be said of them."""
    after = A * (dt.sum() - dt.cumsum())  # from each token to the end
    in_chunk = after.reshape(-1, Q) - after[Q - 1 :: Q, None]
    weights = {
        "a token's own decay is part of its weight": dt * np.exp(after + A * dt),
        "dt is not part of the weight": np.exp(after),
        "each weight ends where its chunk does": dt * np.exp(in_chunk.ravel()),
        "weights go from the front to the token": dt * np.exp(A * dt.cumsum()),
    }
    return {what: (x * weight[:, None]).T @ B for what, weight in weights.items()}


def exercise_3(pass_1):
    """pass_1(x, dt, A, B, Q, bits) -> (state, log)"""
    exercise = Exercise("Exercise 3: pass 1")
    rng = np.random.default_rng()
    ln2 = math.log(2)
    # chunks, Q, P, N, A, bits: all count, then a few; tokens that are forgotten within a chunk
    cases = [(1, 2, 1, 1, -1.0, 64), (1, 4, 2, 3, -0.5, 64), (3, 4, 2, 3, -0.1, 64), (3, 4, 2, 3, -20 * ln2, 64)]
    cases += [
        (1, 8, 3, 2, -400.0, 127),
        (4, 8, 3, 2, -400.0, 127),
        (2, 1, 2, 2, -1e-3, 0),
        (5, 16, 4, 3, -0.01, math.inf),
    ]
    for _ in range(12):
        sizes = (int(n) for n in rng.integers((1, 1, 1, 1), (9, 9, 5, 5)))
        cases.append((*sizes, -float(rng.uniform(0.1, 30)), int(rng.integers(0, 128))))
    with exercise, time_limit(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for chunks, Q, P, N, A, bits in cases:
            x, B = (rng.standard_normal((chunks * Q, columns)) for columns in (P, N))
            dt = rng.uniform(0.5, 1.5, chunks * Q)
            _walked(pass_1, x, dt, A, B, Q, bits)
    return exercise.report(f"right in {len(cases)} cases, and chunks that do not count are not looked at")


def _walked(pass_1, x, dt, A, B, Q, bits):
    chunks = len(dt) // Q
    count = _counting(dt, A, Q, bits)
    front = (chunks - count) * Q
    state, log = _recurrent_state(x[front:], dt[front:], A, B[front:])
    at = f"with {counted(chunks, 'chunk')} of {counted(Q, 'token')}, A = {A:.4g}, bits = {bits}"
    at += f", of which the last {counted(count, 'chunk')} count{'s' * (count == 1)}" if count < chunks else ""
    for given in (x, dt, B):
        given[:front] = np.nan
    got = pass_1(*(a.copy() for a in (x, dt)), A, B.copy(), Q, bits)
    if not isinstance(got, tuple) or len(got) != 2:
        raise Wrong(f"{at}: your function gave {shown(got)}, expected two things: the state and the log")
    found, said = array_from(got[0], state.shape, f"{at}:", "the state, (P, N),"), np.asarray(got[1])
    if np.isnan(found).any():
        why = "a chunk that does not count was looked at: it holds NaN" if front else "did a factor overflow?"
        raise Wrong(f"{at}: the state is NaN: {why}")
    if not np.abs(found - state).max() <= 1e-9 * np.abs(state).max():
        mistaken = _mistaken(x[front:], dt[front:], A, B[front:], Q).items()
        why = next((what for what, other in mistaken if np.allclose(found, other, rtol=1e-6)), "")
        place = tuple(map(int, np.argwhere(np.abs(found - state) > 1e-9 * np.abs(state).max())[0]))
        text = f"{at}: state[{place[0]}, {place[1]}] is {found[place]:.6g}, expected {state[place]:.6g}"
        raise Wrong(text + (f". It is so if {why}" if why else ""))
    said = float(said) if said.shape == () and said.dtype.kind in "fi" else math.nan
    if not abs(said - log) <= 1e-9 * abs(log):
        why = ": that is the natural logarithm" if math.isclose(said, log * math.log(2), rel_tol=1e-6) else ""
        raise Wrong(f"{at}: the log is {shown(got[1])}, expected {log:.6g}, of base 2, over what was walked{why}")


# Exercise 4: launches that clear nothing

CHAIN = r"__global__[^;{]*\schain\s*\("
# blocks, shares, and how many launches there have been
LAUNCHES = [(1, 1, 0), (1, 4, 0), (3, 2, 0), (3, 7, 0), (5, 12, 0), (4, 9, 10**9)]


def exercise_4(source):
    """CUDA source of chain."""
    exercise = Exercise("Exercise 4: nothing is cleared")
    with exercise, time_limit(60):
        needs(
            source,
            CHAIN,
            'extern "C" __global__ void chain(const int *x, int *sums, unsigned long long *counter, unsigned *flags, '
            "int shares)",
        )
        kernel = compiled(source, "chain", options=(COURSE,))
        rng = np.random.default_rng()
        for blocks, shares, before in LAUNCHES:
            for how in ({"order": "reverse", "places": 1}, {"check_races": True}):
                _launches(kernel, rng, blocks, shares, before, how)
    return exercise.report(f"right for {len(LAUNCHES)} sizes, three launches each, with nothing cleared in between")


def _launches(kernel, rng, blocks, shares, before, how):
    each = shares + blocks
    counter, flags = np.array([before * each], np.uint64), np.full(shares, before, np.uint32)
    sums = np.full(shares, -1, np.int32)
    for launch in range(before + 1, before + 4):
        at = f"{counted(blocks, 'block')}, {counted(shares, 'share')}, launch {launch:,}"
        at += ", one block at a time, the last one first" if "places" in how else ""
        x = rng.integers(1, 100, (shares, 32)).astype(np.int32)
        given = x.copy()
        args = x.reshape(-1), sums, counter, flags, np.int32(shares)
        launched(kernel, blocks, 32, *args, at=at, tell=functools.partial(_of_chain, at), **how)
        compare("sums", sums, given.sum(1).cumsum().astype(np.int32), at)
        unchanged({"x": x}, {"x": given}, at)
        if (grown := int(counter[0]) - (launch - 1) * each) != each:
            why = f"expected {each}: one for each share, and for each block one that is none"
            raise Wrong(f"right, but not by its tickets: at {at} the counter has grown by {grown}, {why}")
        if not (flags == launch).all():
            raise Wrong(
                f"behind {at} flags hold {shown(flags.tolist())}, expected {launch:,}, the number of the launch"
            )


def _of_chain(at, error):
    if isinstance(error, simt.Deadlock):
        return f"deadlock at {at}: {error}"
    return in_words(error, at)


# Exercise 5: roles that count apart

# A score is a product of the tile, and multiply's output one of both, so that a wrong place shows. mode 1: multiply
# holds a step of pass 2 back until scores are made of the next one.
ROLES = """
constexpr int MOST = 64;
__constant__ int kinds[MOST], next_scored[MOST], mode;
__device__ volatile int brought[MOST], scored_steps[MOST], multiplied[MOST];
__device__ bool is_local(int step) { return kinds[step]; }
__device__ __forceinline__ void bring(int *tile, const int *x, int step) {
    const int lane = threadIdx.x % 32;
    tile[lane] = x[32 * step + lane];
    if (lane == 0) brought[step] = 1;
}
__device__ __forceinline__ void score(int *scores, const int *tile, int step) {
    const int lane = threadIdx.x % 32;
    scores[lane] = tile[31 - lane] * (step + 2);
    if (lane == 0) scored_steps[step]++;
}
__device__ __forceinline__ void multiply(const int *tile, const int *scores, int *y, int step) {
    const int lane = threadIdx.x % 32;
    y[32 * step + lane] = scores ? tile[lane] + 1000 * scores[lane ^ 1] : -tile[lane];
    if (mode && scores && next_scored[step] >= 0)
        while (!scored_steps[next_scored[step]]) {}
    if (lane == 0) multiplied[step]++;
}
extern "C" __global__ void keep(int *to) { // or the compiler leaves out what a kernel that calls nothing does not use
    to[0] = mode + kinds[0] + next_scored[0] + brought[0] + scored_steps[0] + multiplied[0];
}
"""
# kinds of steps: L of pass 1, P of pass 2
STEPS = ["P", "L", "PP", "PPP", "LLPPP", "PLPLLPP", "LPPPLPPLPPPPLP", ""]


def exercise_5(source):
    """CUDA source of roles."""
    exercise = Exercise("Exercise 5: roles that count apart")
    with exercise, time_limit(60):
        wanted = 'extern "C" __global__ void roles(const int *x, int *y, int steps)'
        needs(source, r"__global__[^;{]*\sroles\s*\(", wanted)
        kernel = compiled(source, "roles", behind=ROLES, options=(COURSE,), arch=HOPPER)
        rng = np.random.default_rng()
        for kinds in STEPS:
            _hand_to_hand(kernel, rng, kinds)
    return exercise.report(f"right for {len(STEPS)} runs of steps, and scores are made ahead")


def _hand_to_hand(kernel, rng, kinds):
    at = f"steps {kinds}" if kinds else "no steps"
    steps, local = len(kinds), np.array([kind == "L" for kind in kinds], bool)
    x = rng.integers(1, 9, (max(steps, 1), 32)).astype(np.int32)
    later = [kinds.find("P", step + 1) for step in range(steps)]  # -1: none
    later = [n if n - step <= 2 else -1 for step, n in enumerate(later)]  # three places: what may be there meanwhile
    for mode in (0, 1):
        y = np.full_like(x, -(10**6))
        for name, values in {"kinds": local, "next_scored": later, "mode": [mode]}.items():
            full = np.zeros(1 if name == "mode" else 64, np.int32)
            full[: len(values)] = values
            kernel.module.set(name, full)
        for name in ("brought", "scored_steps", "multiplied"):
            kernel.module.set(name, np.zeros(64, np.int32))
        args = x.reshape(-1), y.reshape(-1), np.int32(steps)
        how = {"tell": functools.partial(_of_roles, at, mode, kernel), "check_races": mode == 0}
        launched(kernel, 1, 96, *args, at=at, **how)
        number = np.arange(steps)[:, None]
        wanted = x[:steps] + 1000 * x[:steps, ::-1][:, np.arange(32) ^ 1] * (number + 2)
        wanted = np.where(local[:, None], -x[:steps], wanted).astype(np.int32)
        done = {name: kernel.module.get(name, np.int32)[:steps] for name in ("scored_steps", "multiplied")}
        if (done["scored_steps"][local] > 0).any():
            step = int(np.argmax(done["scored_steps"] * local))
            raise Wrong(f"at {at} step {step} is of pass 1, and scores are made of it: nobody needs them")
        compare("y", y[:steps], wanted, at)
        if (done["multiplied"] != 1).any():
            raise Wrong(
                f"at {at} `multiply` was called {done['multiplied'].tolist()} times, expected once for each step"
            )


def _of_roles(at, mode, kernel, error):
    if not isinstance(error, simt.Deadlock):
        return in_words(error, at)
    done = [int((kernel.module.get(name, np.int32) > 0).sum()) for name in ("brought", "scored_steps", "multiplied")]
    if mode:
        return (
            f"right, but nobody works ahead: at {at} `multiply` is at a step of pass 2, and the next one's scores are "
            "never begun, though there is a place for them"
        )
    says = f"with {counted(done[0], 'step')} brought, {done[1]} scored and {done[2]} multiplied"
    return f"deadlock at {at}, {says}: {error}"
