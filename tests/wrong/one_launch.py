"""Wrong answers to the exercises of chapter 13. Each says the mistake that it makes.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer, and words that
the check's verdict must hold. RIGHT has the answers that they were made from.
"""

import numpy as np

from wrong.warp_gemv import changed

# Exercise 1: how many places


def _places(least=lambda waiting: len(waiting), ready=lambda wanted, ended: ended.issuperset(wanted), once=False):
    def places_needed(order, waits):
        waiting, ended, most = [], set(), 0
        for p in order:
            waiting.append(p)
            most = max(most, least(waiting))
            while done := [q for q in waiting if ready(waits[q], ended)]:
                ended.update(done)
                waiting = [q for q in waiting if q not in done]
                if once:
                    break
        return None if waiting else most

    return places_needed


def _stuck(order, waits, room=1):
    """The chapter's: who never ends."""
    left, running, ended = list(order), [], set()
    while True:
        while left and len(running) < room:
            running.append(left.pop(0))
        done = [p for p in running if ended.issuperset(waits[p])]
        if not done:
            return running
        running, ended = [p for p in running if p not in done], ended.union(done)


def _never_none(order, waits):
    return _places()(order, waits) or len(order)


def _later_in_the_order(order, waits):
    """One place for each that stands before one that it waits for, and one more."""
    return 1 + sum(any(q in order[n:] for q in waits[p]) for n, p in enumerate(order))


def _search_without_end(order, waits):
    room = 1
    while _stuck(order, waits, room):
        room += 1
        if room > 1000:
            break
    return room


# Exercise 2: look back


def _back(
    ends=lambda cut: cut, last=True, first=True, towards=reversed, in_place=False, together=False, multiplied=False
):
    """ends(cut): the heads that go no further; last: their state is taken; together: the first cut ends all heads."""

    def look_back(published, initial):
        total, weight, on = np.zeros_like(initial), np.ones(len(initial)), np.ones(len(initial), bool)
        for state, decay, cut in towards(published):
            if in_place:
                state *= weight[:, None]
                taken = state
            else:
                taken = weight[:, None] * state
            here = on if last else on & ~cut
            if multiplied:
                total += here[:, None] * taken
            else:
                total[here] += taken[here]
            weight, on = weight * decay, on & ~ends(cut)
            if together and cut.any():
                return total
        if first:
            total[on] += (weight[:, None] * initial)[on]
        return total

    return look_back


def _forward(published, initial):
    states = initial
    for state, decay, cut in published:
        states = np.where(cut, 0, decay)[:, None] * states + state
    return states


def _only_one(published, initial):
    if not published:
        return initial
    state, decay, cut = published[-1]
    return np.where(cut[:, None], state, state + decay[:, None] * initial)


def _without_nan(published, initial):
    total, weight = np.zeros_like(initial), np.ones((len(initial), 1))
    for state, decay, cut in reversed(published):
        total += weight * np.nan_to_num(state)
        weight = weight * np.where(cut, 0, np.nan_to_num(decay))[:, None]
    return total + weight * np.nan_to_num(initial)


def _added_to_initial(published, initial):
    for state, decay, cut in published:
        initial *= decay[:, None]
        initial += state
        initial[cut] = state[cut]
    return initial


# Exercise 3: find the bugs

CHAIN = """constexpr int TOKENS = 4;
extern "C" __global__ void look_back(const float *x, const float *decay, float *starts, float *published,
                                     unsigned *flags, unsigned *tickets) {
    __shared__ unsigned ticket;
    const int i = threadIdx.x, numbers = blockDim.x;
    if (i == 0) ticket = atomicAdd(tickets, 1);
    __syncthreads(); // 0
    const unsigned chunk = ticket;
    float sum = 0;
    for (int t = 0; t < TOKENS; t++) sum += x[(chunk * TOKENS + t) * numbers + i];
    published[chunk * numbers + i] = sum;
    __syncthreads(); // 1
    if (i == 0) {
        __threadfence(); // release
        atomicExch(flags + chunk, 1);
        for (unsigned p = 0; p < chunk; p++)
            while (!atomicAdd(flags + p, 0)) {}
        __threadfence(); // acquire
    }
    __syncthreads(); // 2
    float before = 0;
    for (unsigned p = 0; p < chunk; p++) before = decay[p] * before + published[p * numbers + i];
    starts[chunk * numbers + i] = before;
}
"""
RELEASE, ACQUIRE = "        __threadfence(); // release\n", "        __threadfence(); // acquire\n"
RAISE, WAIT = (
    "        atomicExch(flags + chunk, 1);\n",
    "        for (unsigned p = 0; p < chunk; p++)\n            while",
)
ONE, TWO = "    __syncthreads(); // 1\n", "    __syncthreads(); // 2\n"
NO_RELEASE, NO_ACQUIRE, NO_ONE, NO_TWO = ((line, "") for line in (RELEASE, ACQUIRE, ONE, TWO))
NARROW = RELEASE, RELEASE.replace("fence", "fence_block")
EARLY = (ACQUIRE, ""), (RAISE, RAISE + ACQUIRE)
TICKET = "chunk = ticket", "chunk = blockIdx.x"
NARROW_ACQUIRE = ACQUIRE, ACQUIRE.replace("fence", "fence_block")

AGAIN = "for (int t = 0; t < TOKENS; t++) again += x[(p * TOKENS + t) * numbers + i];"

# Exercise 4: two waits

PATH = """extern "C" __global__ void best_path(const float *x, float *best, unsigned *flags, unsigned *tickets,
                                     int rows, int cols) {
    __shared__ unsigned ticket;
    const int i = threadIdx.x, numbers = blockDim.x;
    if (i == 0) ticket = atomicAdd(tickets, 1);
    __syncthreads();
    const unsigned cell = ticket, r = cell / cols, c = cell % cols;
    if (i == 0) {
        if (r > 0)
            while (!atomicAdd(flags + cell - cols, 0)) {} // above
        if (c > 0)
            while (!atomicAdd(flags + cell - 1, 0)) {} // left
        __threadfence(); // acquire
    }
    __syncthreads(); // after
    float above = r > 0 ? best[(cell - cols) * numbers + i] : -INFINITY;
    float left = c > 0 ? best[(cell - 1) * numbers + i] : -INFINITY;
    best[cell * numbers + i] = x[cell * numbers + i] + (cell ? fmaxf(above, left) : 0);
    __syncthreads(); // before
    if (i == 0) {
        __threadfence(); // release
        atomicExch(flags + cell, 1);
    }
}
"""


def _path_without(piece):
    """Without the line that has this comment."""
    (line,) = (line for line in PATH.splitlines(keepends=True) if line.endswith(f"// {piece}\n"))
    return changed(PATH, (line, ""))


RIGHT = {1: _places(), 2: _back(), 3: CHAIN, 4: PATH}

WRONG = {
    1: {
        "the chapter's list of who is stuck": (_stuck, "expected a whole number or None"),
        "a place for each": (lambda order, waits: len(order), "gave 3, expected 1"),
        "never says None": (_never_none, "expected None"),
        "counts after some have ended": (_places(least=lambda waiting: len(waiting) - 1), "gave 0, expected 1"),
        "one of those waited for is enough": (_places(ready=lambda w, ended: not w or ended & set(w)), "expected"),
        "the last of those waited for is enough": (_places(ready=lambda w, ended: not w or w[-1] in ended), "expected"),
        "one end does not let another end": (_places(once=True), "expected"),
        "one place for each that comes too early": (_later_in_the_order, "expected"),
        "looks for more and more places": (_search_without_end, "expected None"),
    },
    2: {
        "goes on behind a cut": (_back(ends=np.zeros_like), "with a cut in the segment before"),
        "a cut ends all heads": (_back(together=True), "with two heads, of which one is cut"),
        "goes on until all heads are cut": (
            _back(ends=lambda cut: np.full(len(cut), cut.all())),
            "with two heads, of which one is cut",
        ),
        "chooses by a product": (_back(multiplied=True), "with a cut in the segment before: states[0, 0] is nan"),
        "not the state that was cut": (_back(last=False), "with a cut in the segment before"),
        "forgets the initial state": (_back(first=False), "with no segment before"),
        "starts at the first segment": (_back(towards=list), "with three segments before"),
        "forward, through the cut": (_forward, "with a cut in the segment before"),
        "makes each NaN 0": (_without_nan, "a NaN that counts in the other: states[1, 0] is"),
        "a state like a view of the first": (_added_to_initial, "changed what was published, or the initial"),
        "one segment only": (_only_one, "with three segments before"),
        "changes what was published": (_back(in_place=True), "changed what was published"),
    },
    3: {
        "as it was": (changed(CHAIN, TICKET, NARROW, *EARLY), "race on published"),
        "the block's number as its ticket": (changed(CHAIN, TICKET), "1 fits at a time, and a block keeps its place"),
        "the block's number from the end": (
            changed(CHAIN, ("chunk = ticket", "chunk = gridDim.x - 1 - blockIdx.x")),
            "1 fits at a time, and a block keeps its place",
        ),
        "the fence of the release is too narrow": (changed(CHAIN, NARROW), "race on published"),
        "the fence of the acquire is too narrow": (changed(CHAIN, NARROW_ACQUIRE), "race on published"),
        "the fence of the acquire stands before the wait": (changed(CHAIN, *EARLY), "race on published"),
        "the fence of the release stands behind the flag": (
            changed(CHAIN, NO_RELEASE, (RAISE, RAISE + RELEASE)),
            "race on published",
        ),
        "two fences in the release, none in the acquire": (
            changed(CHAIN, NO_ACQUIRE, (RELEASE, 2 * RELEASE)),
            "race on published",
        ),
        "two fences in the acquire, none in the release": (
            changed(CHAIN, NO_RELEASE, (ACQUIRE, 2 * ACQUIRE)),
            "race on published",
        ),
        "nobody waits for thread 0": (changed(CHAIN, NO_TWO), "race on published"),
        "thread 0 waits for nobody": (changed(CHAIN, NO_ONE), "race on published"),
        "a barrier that one thread of a warp takes": (
            changed(CHAIN, (ONE, ""), (RELEASE, "        __syncthreads();\n" + RELEASE)),
            "barrier",
        ),
        "one barrier in each branch": (
            changed(CHAIN, (TWO, ""), (ACQUIRE + "    }\n", ACQUIRE + TWO + "    } else\n    " + TWO)),
            "barrier",
        ),
        "a ticket for each thread": (changed(CHAIN, ("if (i == 0) ticket", "ticket")), "race on"),
        "sets the flag behind the wait": (
            changed(CHAIN, (RAISE, ""), (ACQUIRE, ACQUIRE + RAISE)),
            "raises its flag only behind its wait",
        ),
        "sets the flag by a store like any other": (
            changed(CHAIN, (RAISE, "        flags[chunk] = 1;\n")),
            "a flag is set and read by atomics",
        ),
        "reads the flag by a load like any other": (
            changed(CHAIN, ("!atomicAdd(flags + p, 0)", "!flags[p]")),
            "a flag is set and read by atomics",
        ),
        "a ticket too high": (changed(CHAIN, ("atomicAdd(tickets, 1)", "atomicAdd(tickets, 1) + 1")), "but x has"),
        "one flag too many": (changed(CHAIN, (WAIT, WAIT.replace("p < chunk", "p <= chunk + 1"))), "at "),
        "adds up again what others have published": (
            changed(
                CHAIN,
                ("published[p * numbers + i];\n    starts", "again;\n    }\n    starts"),
                ("p++) before =", "p++) {\n        float again = 0;\n        " + AGAIN + "\n        before ="),
            ),
            "load requests",
        ),
    },
    4: {
        "the block's number as its ticket": (
            changed(PATH, ("cell = ticket", "cell = blockIdx.x")),
            "1 fits at a time, and a block keeps its place",
        ),
        "tickets from the end": (
            changed(PATH, ("cell = ticket", "cell = rows * cols - 1 - ticket")),
            "keeps its place",
        ),
        "no barrier before the flag": (_path_without("before"), "race on best"),
        "a barrier that only thread 0 takes": (
            changed(
                PATH,
                ("    __syncthreads(); // before\n", ""),
                ("        __threadfence(); // release", "        __syncthreads();\n        __threadfence();"),
            ),
            "no release covers it",
        ),
        "no fence before the flag": (_path_without("release"), "race on best"),
        "no fence after the wait": (_path_without("acquire"), "race on best"),
        "no barrier after the wait": (_path_without("after"), "race on best"),
        "fences for the block only": (PATH.replace("__threadfence()", "__threadfence_block()"), "race on best"),
        "a fence by each thread, in front of the barrier": (
            changed(
                PATH,
                ("        __threadfence(); // release\n", ""),
                ("    __syncthreads(); // before", "    __threadfence();\n    __syncthreads();"),
            ),
            "race on best",
        ),
        "waits for one neighbour": (
            changed(PATH, ("        if (c > 0)\n            while (!atomicAdd(flags + cell - 1, 0)) {} // left\n", "")),
            "race on best",
        ),
        "looks at the other neighbour behind the fence": (
            changed(
                PATH,
                ("        __threadfence(); // acquire\n", ""),
                (
                    "        if (c > 0)\n            while",
                    "        __threadfence();\n        if (c > 0)\n            while",
                ),
            ),
            "race on best",
        ),
        "sets the flag by a store like any other": (
            changed(PATH, ("atomicExch(flags + cell, 1)", "flags[cell] = 1")),
            "race on",
        ),
        "reads the flags by loads like any other": (
            PATH.replace("!atomicAdd(flags + cell - cols, 0)", "!flags[cell - cols]").replace(
                "!atomicAdd(flags + cell - 1, 0)", "!flags[cell - 1]"
            ),
            "a flag is set and read by atomics",
        ),
        "reads the flags by loads like any other, and never sets one": (
            changed(
                PATH.replace("!atomicAdd(flags + cell - cols, 0)", "!flags[cell - cols]"),
                ("!atomicAdd(flags + cell - 1, 0)", "!flags[cell - 1]"),
                ("        atomicExch(flags + cell, 1);\n", ""),
            ),
            "must read the flag by an atomic",
        ),
        "waits for the ticket before": (
            changed(
                PATH,
                ("        if (r > 0)\n            while (!atomicAdd(flags + cell - cols, 0)) {} // above\n", ""),
                ("        if (c > 0)\n            while", "        if (cell > 0)\n            while"),
            ),
            "waits for more than its neighbours",
        ),
        "waits outside the table": (
            changed(PATH, ("        if (r > 0)\n            while", "        while")),
            "accesses flags[-1]",
        ),
        "lowers the flag that it has seen": (
            changed(
                PATH,
                (
                    "    __syncthreads(); // after",
                    "    if (i == 0 && c > 0) atomicExch(flags + cell - 1, 0);\n    __syncthreads();",
                ),
            ),
            "keeps its place",
        ),
        "outside is 0": (PATH.replace("-INFINITY", "0.0f"), "wrong at"),
        "the worst way": (changed(PATH, ("fmaxf(above", "fminf(above")), "wrong at"),
        "one row": (changed(PATH, ("r = cell / cols", "r = 0")), "wrong at"),
    },
}
