"""Whether launches count what they do. They do, unless nobody will look."""

from contextlib import contextmanager
from contextvars import ContextVar

from simt.errors import LaunchError

_counting = ContextVar("counting", default=True)


@contextmanager
def uncounted():
    """Within it, in this thread, launches count nothing: `with simt.uncounted(): kernel(...)`.

    What they compute and refuse is the same. Counting takes up to a sixth of a launch's time, most of it where threads
    diverge. Asking such a report for counters or lines is a LaunchError. by_warp=True counts all the same.
    """
    before = _counting.set(False)
    try:
        yield
    finally:
        _counting.reset(before)


def counting():
    """Whether a launch that begins now counts."""
    return _counting.get()


def nothing_counted(kernel, what):
    """The error of who asks a report that counted nothing."""
    return LaunchError(f"{kernel}: this launch ran within simt.uncounted(), so its report has no {what}")
