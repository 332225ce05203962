"""Who waits for what, and who has not begun: for the report of a deadlock.

Nobody can go on, so one more look changes nothing: the waiting loops run once more, and what their blocks look at is
noted, the loads and atomics that a wait may depend on (volatile, relaxed, acquire).
"""

import numpy as np

from simt.errors import SimtError

SHOWN = 3  # blocks that a message names
RUNS = 6  # runs of block numbers that a message lists
STRONG = {"volatile", "relaxed", "acquire", "acq_rel"}


def what_blocks_wait_for(parts):
    """What blocks of these parts look at in vain, in words; "" where none is seen to look at global memory."""
    found = [text for part in parts for text in Looks(part).found()]
    more = len(found) - SHOWN
    if more > 0:
        found[SHOWN:] = [f"and {more} more block{'' if more == 1 else 's'} like them"]
    return ", ".join(found)


def not_begun(numbers, grid, places):
    """Which blocks, by their numbers in the grid, have not begun, and why, in words; "" if all have."""
    if not len(numbers):
        return ""
    listed, total = runs(np.sort(numbers)), grid[0] * grid[1] * grid[2]
    who = f"block {listed} of {total} has" if len(numbers) == 1 else f"blocks {listed} of {total} have"
    fit = "1 fits" if places == 1 else f"{places} fit"
    return f"{who} not begun: {fit} at a time, and a block keeps its place until it ends"


def runs(numbers):
    """[4, 5, 6, 9] -> "4 to 6 and 9"."""
    ends = np.flatnonzero(np.diff(numbers) != 1)
    firsts, lasts = numbers[np.r_[0, ends + 1]].tolist(), numbers[np.r_[ends, len(numbers) - 1]].tolist()
    texts = [str(a) if a == b else f"{a} to {b}" for a, b in zip(firsts, lasts)]
    if len(texts) > RUNS:
        rest = int((numbers > lasts[RUNS - 2]).sum())
        texts[RUNS - 1 :] = [f"{rest} more"]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


class Looks:
    """One more round of a part whose threads all wait."""

    def __init__(self, part):
        self.part, self.seen = part, {}  # block -> in words

    def found(self):
        memory = self.part.memory
        load, atomic = memory.load, memory.atomic
        memory.load, memory.atomic = self.noting(load, -1), self.noting(atomic, 2)
        try:
            self.part.run()
        except SimtError:  # a limit of steps: what has been seen is enough
            pass
        finally:
            memory.load, memory.atomic = load, atomic
        return [text for _, text in sorted(self.seen.items())]

    def noting(self, access, mask_at):
        def noted(site, space, address, offset, dtype, *rest):
            if space in ("global", "generic"):
                self.note(site, address, offset, dtype.itemsize, rest[mask_at])
            return access(site, space, address, offset, dtype, *rest)

        return noted

    def note(self, site, address, offset, size, mask):
        """The first place that each block looks at."""
        part = self.part
        site = site[0] if type(site) is tuple else site
        instruction = part.program.flow.function.instructions[site]
        if instruction.parts[0] != "atom" and not STRONG & set(instruction.parts):
            return
        here = part.whole(part.exist if mask is None else mask)
        for block in np.flatnonzero(here.any(axis=(1, 2))).tolist():
            if block not in self.seen:
                thread = part.first_lane(here, block)
                lane = block * part.shape[1] * 32 + thread
                place, _ = part.place_text("global", part.lane_value(address, 64, lane) + offset, size)
                line = part.program.counters[site].line
                who = f"block {part.block_text(block)}, thread {part.thread_text(thread)}"
                self.seen[block] = f"{who} waits at line {line} for {place}"
