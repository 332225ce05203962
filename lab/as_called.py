"""Time calls from Python, without a graph, as most users make them: several in turns, in one process.

    calls = {"ours": [...], "peer": [...]}    # lists of functions, as lab/cuda_timing.py takes them
    together(calls)                           # {name: Timing} by the wall clock, until the card is done
    host(calls)                               # {name: Timing} of the processor alone, which never waits for the card
    passed_through(calls["ours"][0])          # the course's files that a call runs on the processor

What a short kernel takes as called depends on the processor, and its clock drifts. So calls are timed in many short
rounds, one row after another: a drift hits ours and the peers' alike. Medians over rounds, each of which gives the mean
of its calls. Python's garbage collector rests meanwhile: how long it takes depends on what else a process holds.
"""

import itertools
import math
import sys
import time
from pathlib import Path

import torch

from lab import cuda_timing
from lab.timing import Timing

ROOT = Path(__file__).resolve().parent.parent
ROUND = 0.005  # seconds of calls in a round: of short calls some hundreds
ROUNDS = 15  # of each, at the least
BATCH = 64  # calls that the processor makes on end, at most: the card's queue, of a thousand launches, never fills
BACKLOG = 0.01  # seconds of the card's work that such a batch may leave behind
ROOMS = ("kernels", "lab", "models", "simt", "ref")
BENCHES = ("bench.py", "trials.py", "benching.py")  # through whose functions a row may call a kernel; no user does
PREPARED = f"{__package__}.prepared"  # makes calls in C, which no profiler sees


def together(calls, *, seconds=0.1, least_rounds=ROUNDS):
    """Time calls from Python in turns, one call after another until the card is done. Returns {name: Timing}.

    The larger of Python's time and the card's, for each call.
    calls  {name: call, or list of calls that are made by turns};  seconds  how long to go on, for each
    """
    cuda_timing.expect_gpu("timing calls as they are called")
    calls = {name: cuda_timing.listed(call) for name, call in calls.items()}

    def round_of(name):
        return _queue(calls[name], rounds[name]) / (rounds[name] * len(calls[name]))

    with cuda_timing.no_garbage_collected():
        rounds = {name: _rounds(each) for name, each in calls.items()}
        return _in_turns(round_of, list(calls), seconds, least_rounds)


def host(calls, *, seconds=0.03, least_rounds=ROUNDS, card=True):
    """Time what the processor does for a call, once all is prepared: a batch of calls on an empty queue, while the card
    is awaited outside of the time. Returns {name: Timing}. Arguments: as for `together`.

    It is this thread's own time: not what others have of the processor meanwhile. card=False: for calls that launch
    nothing, where there may be no card.
    """
    if card:
        cuda_timing.expect_gpu("timing the processor's part of a call")
    wait = torch.cuda.synchronize if card else _nothing
    calls = {name: cuda_timing.listed(call) for name, call in calls.items()}

    def round_of(name):
        wait()
        begin = time.thread_time()
        for call in batches[name]:
            call()
        taken = time.thread_time() - begin
        wait()
        return taken / len(batches[name])

    with cuda_timing.no_garbage_collected():
        batches = {name: _batch(each, wait) for name, each in calls.items()}
        return _in_turns(round_of, list(calls), seconds, least_rounds)


def passed_through(call, root=ROOT):
    """The files of the course that a call runs on the processor, as paths from the course's folder: code that decides
    what it takes as called, and that no kernel's source shows."""
    found = set()

    def note(frame, event, _):
        if event == "call":
            found.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    if prepared := sys.modules.get(PREPARED):
        found |= {str(path) for path in Path(prepared.__file__).parent.iterdir() if path.suffix in (".py", ".c", ".h")}
    inside = (Path(name).relative_to(root).as_posix() for name in found if root in Path(name).parents)
    return sorted(path for path in inside if path.split("/")[0] in ROOMS and path.split("/")[-1] not in BENCHES)


def _in_turns(round_of, names, seconds, least_rounds):
    """{name: Timing} of round_of(name), there and back again, so that none always follows the same one."""
    taken, stop = {name: [] for name in names}, time.perf_counter() + seconds * len(names)
    for order in itertools.cycle([names, names[::-1]]):
        if min(map(len, taken.values()), default=least_rounds) >= least_rounds and time.perf_counter() >= stop:
            return {name: Timing.of(found) for name, found in taken.items()}
        for name in order:
            taken[name].append(round_of(name))


def _rounds(calls):
    """How often a round goes through all of these calls."""
    _queue(calls, 1)  # what compiles, tunes or loads does so now
    return math.ceil(ROUND / _queue(calls, 1))


def _batch(calls, wait):
    """The calls of a batch: few where the card takes long for one."""
    _queue(calls, 1, wait)
    some = calls[:BATCH]
    count = max(1, min(BATCH, int(BACKLOG * len(some) / _queue(some, 1, wait))))
    return list(itertools.islice(itertools.cycle(calls), count))


def _nothing():
    pass


def _queue(calls, rounds, wait=None):
    wait = wait or torch.cuda.synchronize
    wait()
    begin = time.perf_counter()
    for _ in range(rounds):
        for call in calls:
            call()
    wait()
    return time.perf_counter() - begin
