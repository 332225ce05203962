"""What a run of the benches measures: all ladders, some of them, or of the stored ones the times as called alone.

Benches ask it, so that what is not wanted is neither made nor compiled:

    running.wants(title)            whether this ladder is measured
    running.modes(title, name, modes)   of a peer's {mode: make} those that are measured
    running.only_called()           whether graphs are left out
    running.done(ladder)            a ladder is measured
    with running.set_to(Run(...)):  a run; without it all is measured
"""

import contextlib
from dataclasses import dataclass, field


@dataclass
class Run:
    """only    texts, of which one stands in the title of a ladder that is measured; none: all are
    called  whether it is times as called alone, of the ladders and rows that are stored
    stored  {title: stored Ladder} of this card
    changed whether only those are measured that rest on code that has changed, or are not stored
    """

    only: tuple = ()
    called: bool = False
    stored: dict = field(default_factory=dict)
    changed: bool = False
    current: set = field(default_factory=set)  # titles of stored ladders that need not be measured for `changed`
    store: object = None  # called with each ladder as soon as it is measured: what ends a run early loses no more


_run = Run()


@contextlib.contextmanager
def set_to(run):
    """Let this run's wishes hold."""
    global _run
    before, _run = _run, run
    try:
        yield run
    finally:
        _run = before


def only_called():
    """Whether times as called alone are measured."""
    return _run.called


def narrowed():
    """Whether some ladders are left out, so that what stands beside ladders is not measured either."""
    return bool(_run.only or _run.called or _run.changed)


def wants(title):
    """Whether the ladder of this title is measured."""
    if _run.only and not any(text in title for text in _run.only):
        return False
    if _run.called and title not in _run.stored:
        return False
    return not (_run.changed and title in _run.current)


def done(ladder):
    """A ladder is measured: store it, if the run does so at once. Returns it."""
    if _run.store and ladder.figures:
        _run.store(ladder)
    return ladder


def stored(title):
    """The stored ladder of this title, None where there is none."""
    return _run.stored.get(title)


def modes(title, name, modes):
    """Of a peer's {mode: make} those that are measured: of a run that only calls, the one that the ladder's row has."""
    if not (_run.called and title in _run.stored):
        return modes
    names = {figure.name for figure in _run.stored[title].figures}
    return {mode: make for mode, make in modes.items() if f"{name}: {mode}" in names}
