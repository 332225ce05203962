"""What is said of a file that is not what it should be."""

import os


class Damaged(ValueError):
    """A file that is foreign, cut short or inconsistent; the message names it, what was expected and what was found."""


def expect(condition, path, expected, found):
    """Raise Damaged unless the condition holds."""
    if not condition:
        raise Damaged(f"{os.path.basename(path)}: expected {expected} and found {found}")
