"""What every peer's process does, in turns with the bench that started it: it makes itself ready, says so, waits for
its turn, times tokens one after another, and says what they took, in seconds. It imports nothing of the course.
"""

import json
import sys
import time

LINE = "peer: "  # begins a line that is meant for the bench; all others are the peer's own


def say(**facts):
    print(f"\n{LINE}{json.dumps(facts)}", flush=True)


def take_turn_on(device, name, token, seconds):
    """take_turn of a PyTorch program of this name on a device, "cuda" or "cpu", after the tokens that compile it."""
    import torch  # the others have none

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(4):
        token()
    wait()
    take_turn({"name": name}, token, wait=wait, seconds=seconds)


def take_turn(ready, token, *, seconds=1.5, tokens=16, wait=lambda: None):
    """ready: what to say of the peer, {}; token(): one token more; wait(): until the card is done.

    Times groups of so many tokens, for so many seconds.
    """
    say(ready=ready)
    sys.stdin.readline()
    say(seconds=timed(token, seconds=seconds, calls=tokens, wait=wait))


def timed(call, *, seconds=1.5, calls=1, wait=lambda: None):
    """Seconds of a call, of each group of so many, for so many seconds; the first group warms up."""
    for _ in range(calls):
        call()
    wait()
    taken, stop = [], time.perf_counter() + seconds
    while len(taken) < 5 or time.perf_counter() < stop:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        taken.append((time.perf_counter() - begin) / calls)
    return taken
