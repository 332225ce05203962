"""Thirty kernels as textbooks have them, unchanged on the SIMT machine, each compared with NumPy on small sizes.

    python -m simt.examples                 all of them; SystemExit with 1 if one is wrong
    python -m simt.examples scan_blelloch   some
    simt.examples.source("dot")             the text of one file
    simt.examples.run("dot")                the number of its launches; AssertionError if one is wrong

A file NAME.cu holds one task, mostly in several forms. The function NAME in checks.py launches them: on a single
element, on sizes that do not divide, with outputs that hold NaN before. Launches are checked for races, but for those
of one form (see bfs.cu).
"""

from simt.examples.checks import CHECKS
from simt.examples.launching import Launcher, source

__all__ = ["NAMES", "run", "source"]
NAMES = tuple(sorted(CHECKS))


def run(name, seed=0):
    """Launch the kernels of one file, and compare what they write. Returns how many launches that took.

    AssertionError for a wrong result; what simt raises for a kernel that it refuses. KeyError for a name that is none.
    """
    check, instances = CHECKS[name]
    launcher = Launcher(name, instances, seed)
    check(launcher)
    left = set(launcher.module.names) - launcher.launched
    assert not left, f"{name}: nothing has launched {', '.join(sorted(left))}"
    return launcher.launches
