"""Wrong answers to the exercises of chapter 13. Each says the mistake that it makes.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer, and words that
the check's verdict must hold. RIGHT has the answers that they were made from.
"""

import math

import numpy as np

from wrong.warp_gemv import changed

# Exercise 1: shares of a line


def _line(twice=lambda length, before: min(length, before), fits=lambda cost, limit: cost <= limit, stops=False):
    """twice(length of the share, chunks of its last pair in front of its end) -> chunks walked twice."""

    def cut_line(pairs, chunks, limit, again):
        lengths, begin = [], 0
        while begin < pairs * chunks:
            longest = 1
            for length in range(1, pairs * chunks - begin + 1):
                if fits(length + again * twice(length, (begin + length) % chunks), limit):
                    longest = length
                elif stops:
                    break
            lengths.append(longest)
            begin += longest
        return lengths

    return cut_line


def _at_the_ends_too(pairs, chunks, limit, again):
    """Walks the last piece twice, even where its pair ends there."""
    lengths, begin = [], 0
    while begin < pairs * chunks:
        ends = range(begin + 1, pairs * chunks + 1)
        dear = {end: min(end - begin, (end - 1) % chunks + 1) for end in ends}
        fitting = [end for end in ends if end - begin + again * dear[end] <= limit]
        lengths.append(max(fitting) - begin)
        begin = max(fitting)
    return lengths


def _equal(pairs, chunks, limit, again):
    shares = len(_line()(pairs, chunks, limit, again))
    cuts = [n * pairs * chunks // shares for n in range(shares + 1)]
    return [b - a for a, b in zip(cuts, cuts[1:])]


# Exercise 2: who waits forever


def _never_end(order, waits, room):
    left, running, ended = list(order), [], set()
    while True:
        while left and len(running) < room:
            running.append(left.pop(0))
        done = [p for p in running if ended.issuperset(waits[p])]
        if not done:
            return running + left
        running = [p for p in running if p not in done]
        ended.update(done)


def _only_those_that_run(order, waits, room):
    return [p for p in _never_end(order, waits, room) if p in list(order)[:room]]


def _as_if_all_had_room(order, waits, room):
    return _never_end(order, waits, len(order))


def _earlier_in_the_order(order, waits, room):
    return [p for n, p in enumerate(order) if not set(waits[p]) <= set(order[:n])]


def _one_is_enough(order, waits, room):
    left, running, ended = list(order), [], set()
    while True:
        while left and len(running) < room:
            running.append(left.pop(0))
        done = [p for p in running if not waits[p] or ended & set(waits[p])]
        if not done:
            return running + left
        running, ended = [p for p in running if p not in done], ended | set(done)


def _yes_or_no(order, waits, room):
    return bool(_never_end(order, waits, room))


# Exercise 3: look back


def _back(cut=lambda decay: decay is None, first=True, towards=reversed, weigh_first=False, keep=0.0, in_place=False):
    def look_back(published, initial):
        total, weight = np.zeros_like(initial), 1.0
        for state, decay in towards(published):
            if in_place:
                state *= weight
                total = total + state
            else:
                total = total + weight * state
            if cut(decay):
                return total
            weight *= keep if decay is None else decay
        return total + weight * initial if first else total

    return look_back


def _forward(published, initial):
    state = initial
    for added, decay in published:
        state = (0 if decay is None else decay) * state + added
    return state


def _without_the_cut(published, initial):
    total, weight = np.zeros_like(initial), 1.0
    for state, decay in reversed(published):
        if decay is None:
            return total
        total, weight = total + weight * state, weight * decay
    return total + weight * initial


def _only_one(published, initial):
    if not published:
        return initial
    state, decay = published[-1]
    return state if decay is None else state + decay * initial


# Exercise 4: what counts

LN2 = math.log(2)


def _counts(go_on=lambda after, bits: not after < -bits, own=False, clean=lambda log: log, base=LN2, least=0):
    def chunks_that_count(dt, A, Q, bits):
        logs = (A * dt / base).reshape(-1, Q).sum(axis=1)
        count, after = 0, 0.0
        for log in logs[::-1]:
            log = clean(log)
            if not go_on(after + log if own else after, bits):
                break
            count, after = count + 1, after + log
        return max(count, least)

    return chunks_that_count


def _from_the_front(dt, A, Q, bits):
    return _counts()(dt[::-1], A, Q, bits)


def _each_alone(dt, A, Q, bits):
    logs = (A * dt / math.log(2)).reshape(-1, Q).sum(axis=1)
    return 1 + int((~(logs[1:] < -bits)).cumprod().sum())


# Exercise 5: find the bugs

CHAIN = """extern "C" __global__ void
hand_on(const float *added, const float *decay, float *starts, float *state, unsigned *counters) {
    __shared__ unsigned ticket;
    const int i = threadIdx.x, numbers = blockDim.x;
    if (i == 0) ticket = atomicAdd(counters, 1);
    __syncthreads();
    const unsigned chunk = ticket;
    if (i == 0) {
        while (atomicAdd(counters + 1, 0) < chunk) {}
        __threadfence();
    }
    __syncthreads(); // 1
    const float before = chunk ? state[i] : 0;
    starts[chunk * numbers + i] = before;
    state[i] = decay[chunk] * before + added[chunk * numbers + i];
    __syncthreads(); // 2
    if (i == 0) {
        __threadfence(); // 3
        atomicExch(counters + 1, chunk + 1);
    }
}
"""
ONE, TWO = ("    __syncthreads(); // 1\n", ""), ("    __syncthreads(); // 2\n", "")
UNFENCED = "< chunk) {}\n        __threadfence();\n", "< chunk) {}\n"
BEHIND = (
    "        __threadfence(); // 3\n        atomicExch(counters + 1, chunk + 1);\n",
    "        atomicExch(counters + 1, chunk + 1);\n        __threadfence();\n",
)

RIGHT = {1: _line(), 2: _never_end, 3: _back(), 4: _counts(), 5: CHAIN}

WRONG = {
    1: {
        "stops at the first that is too dear": (_line(stops=True), "expected [4]"),
        "nothing is walked twice": (_line(twice=lambda length, before: 0), "expected ["),
        "the whole share twice": (_line(twice=lambda length, before: length if before else 0), "expected ["),
        "more of the pair than it has": (_line(twice=lambda length, before: before), "expected ["),
        "twice at the end of a pair as well": (_at_the_ends_too, "expected [4]"),
        "below the limit": (_line(fits=lambda cost, limit: cost < limit), "expected ["),
        "equal shares": (_equal, "expected ["),
        "where shares end": (lambda *a: np.cumsum(_line()(*a)).tolist(), "expected ["),
        "how many": (lambda *a: len(_line()(*a)), "expected a list"),
    },
    2: {
        "not those that never start": (_only_those_that_run, "expected [0, 1, 2]"),
        "as if all had room": (_as_if_all_had_room, "gave [], expected [0, 1, 2]"),
        "who stands before whom": (_earlier_in_the_order, "expected"),
        "one of those waited for is enough": (_one_is_enough, "expected"),
        "yes or no": (_yes_or_no, "expected a list"),
    },
    3: {
        "goes on behind a cut": (_back(cut=lambda decay: False), "with a cut in the segment before"),
        "not the state that was cut": (_without_the_cut, "with a cut in the segment before"),
        "forgets the initial state": (_back(first=False), "with no segment before"),
        "starts at the first segment": (_back(towards=list), "with three segments before"),
        "forward, through the cut": (_forward, "with a cut in the segment before"),
        "one segment only": (_only_one, "with three segments before"),
        "changes what was published": (_back(in_place=True), "changed what was published"),
    },
    4: {
        "a NaN ends it": (_counts(go_on=lambda after, bits: after >= -bits), "with dt = "),
        "a NaN is nothing": (_counts(clean=lambda log: 0.0 if math.isnan(log) else log), "with dt = "),
        "its own decay as well": (_counts(own=True, least=1), "with dt = "),
        "in powers of e": (_counts(base=1.0), "with dt = "),
        "from the front": (_from_the_front, "with dt = "),
        "each chunk alone": (_each_alone, "with dt = "),
    },
    5: {
        "as it was": (changed(CHAIN, ONE, TWO, BEHIND), "race on"),
        "nobody waits for thread 0": (changed(CHAIN, ONE), "race on"),
        "thread 0 waits for nobody": (changed(CHAIN, TWO), "race on"),
        "the fence behind the flag": (changed(CHAIN, BEHIND), "race on"),
        "no fence behind the wait": (changed(CHAIN, UNFENCED), "found 1"),
        "the block's number": (changed(CHAIN, ("counters + 1, 0) < chunk", "counters + 1, 0) < 0")), "race on"),
        "one chunk too many": (changed(CHAIN, ("0) < chunk)", "0) <= chunk)")), "waits in a loop"),
    },
}
