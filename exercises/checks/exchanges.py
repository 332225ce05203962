"""What the checks of exchanges share: launches on two devices of the SIMT machine, in several series of turns."""

import numpy as np

import simt
from exercises.checks.launches import STEPS
from lab.exercise import Wrong

TURNS = "forward", "reverse", 1, 2
HELPERS = r"""
extern "C" __global__ void check_fill(float *x, const float *from, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = from[i];
}
extern "C" __global__ void check_count(unsigned *number) { *number += 1; }
"""
WRITTEN = [f"simt__link_bytes_op_{op}.sum" for op in ("st", "red", "atom")]
LOADED = "simt__link_bytes_op_ld.sum"
STUCK = ". Each of the two waits, or the other has ended: who has told whom which number by then?"


def run_together(launches, owned, turns, at, races=True):
    """Reports of launches on two devices, [[(kernel, grid, block, args), ...], [...]]. owned: each device's arrays."""
    devices = simt.Devices(2, check_races=races)
    for device, arrays in enumerate(owned):
        devices.owns(device, *arrays)
    streams = [[(*launch, {"step_limit": STEPS}) for launch in stream] for stream in launches]
    try:
        return devices.run(streams, turns)
    except simt.LaunchError as error:
        raise Wrong(f"{error}. Keep the kernel's name and parameters as in the stub") from None
    except simt.StepLimit:
        raise Wrong(f"at {at} a kernel was still running after {STEPS:,} steps: is there an endless loop?") from None
    except simt.Deadlock as error:
        raise Wrong(f"at {at}: {error}{STUCK}") from None
    except simt.SimtError as error:
        raise Wrong(f"at {at}: {error}") from None


def by_turns(small, *shapes):
    """(turns, *shape): the smallest one with each device ahead, the others by all turns."""
    return [(turns, *small) for turns in TURNS[:2]] + [(turns, *shape) for shape in shapes for turns in TURNS]


def over_link(report):
    """(bytes written to the other device's memory, bytes loaded from it)"""
    return sum(report.counters[name] for name in WRITTEN), report.counters[LOADED]


def turn_text(turns):
    """How devices take turns, in words, for a message."""
    said = {"forward": "device 0 goes first", "reverse": "device 1 goes first"}
    return said.get(turns, f"devices take turns at random ({turns})")


def sectors(nbytes):
    """Bytes of the sectors of 32 that so many, from a multiple of 32 on, take."""
    return 32 * -(-nbytes // 32)


def numbers():
    """A count on each device, 0."""
    return [np.zeros(1, np.uint32) for _ in (0, 1)]
