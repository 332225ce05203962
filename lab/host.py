"""What a call costs the processor, apart from the card."""

import statistics
import time

import torch

TURN = 100  # calls between two waits: fewer launches than the driver's queue holds, 1024, so that no call waits


def cost(call, *, turns=50):
    """Microseconds of this thread's processor time for one call: the median over turns of 100 calls.

    Between turns the card is waited for, outside of the time. A call is to make at most ten launches.
    """
    on_card = torch.cuda.is_available()
    taken = []
    for _ in range(turns + 5):
        if on_card:
            torch.cuda.synchronize()
        begin = time.thread_time_ns()
        for _ in range(TURN):
            call()
        taken.append((time.thread_time_ns() - begin) / TURN / 1000)
    if on_card:
        torch.cuda.synchronize()
    return statistics.median(taken[5:])
