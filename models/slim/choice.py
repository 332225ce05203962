"""Which entries of a fat binary a card needs: what the driver would take, and nothing else.

Of each container the driver takes one image: a cubin of the card's own major version with the highest minor one up
to the card's; where there is none, the latest PTX up to the card's, which it compiles. Cubins of the same number (sm_90
and sm_90a) are kept together.
"""

import re
from collections import defaultdict

from models.slim.problems import Problem


def capability(text):
    """(9, 0) of "9.0" or "sm_90". Problem for something else."""
    match = re.fullmatch(r"(?:sm_)?(\d{1,2})\.?(\d)[af]?", text)
    if not match:
        raise Problem(f'--keep-arch: expected a capability such as 9.0 and found "{text}"')
    return int(match[1]), int(match[2])


def by_container(entries):
    """{(container, name): [Entry, ...]}: those among which the driver chooses."""
    groups = defaultdict(list)
    for entry in entries:
        groups[entry.container, entry.name].append(entry)
    return groups


def taken(group, card):
    """Those of a group that the driver may take on a card of this capability; none if it can run none."""
    for kind in ("elf", "ptx"):
        fitting = [entry for entry in group if entry.kind == kind and entry.runs_on(card)]
        if fitting:
            best = max(entry.number for entry in fitting)
            return [entry for entry in fitting if entry.number == best]
    return []


def latest_ptx(group):
    """The latest PTX of a group: for cards that are yet to come."""
    found = [entry for entry in group if entry.kind == "ptx"]
    return [entry for entry in found if entry.number == max(e.number for e in found)]


def kept(entries, cards, used=None, keep_ptx=False):
    """{entry.at, ...}: the entries that stay.

    cards     capabilities
    used      {entry.at, ...} that workloads have loaded: of cubins no others stay; None: all that a card takes
    keep_ptx  the latest PTX of each container stays, too
    """
    stay = {entry.at for entry in entries if entry.kind not in ("elf", "ptx")}  # what is not known is not touched
    stay |= used or set()
    for group in by_container(entries).values():
        for card in cards:
            for entry in taken(group, card):
                if used is None or entry.kind == "ptx":
                    stay.add(entry.at)
        if keep_ptx:
            stay.update(entry.at for entry in latest_ptx(group))
    return stay
