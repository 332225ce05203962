"""How an exercise's check speaks: "not done yet", what is wrong, or what was right.

    exercise = Exercise("Exercise 1: row split")
    with exercise:
        split = rows_of(0, 4, 10)             # raises NotImplementedError in a stub
        exercise.require(split == (0, 3), f"thread 0 of 4 with 10 rows: expected (0, 3), got {split}")
    exercise.report("right for 40 combinations")

A check never raises on a learner's mistake: it prints what it saw. `exercise.passed` is for the tests.
"""

import traceback

from lab.compiler import CompileError

NOT_DONE = "not done yet"


class Wrong(Exception):
    """What a check found wrong, in a sentence."""


class Exercise:
    """One exercise's check. `passed` is True once all requirements held; `message` is what was printed."""

    def __init__(self, title):
        self.title, self.passed, self.message = title, False, None

    def require(self, condition, problem):
        """Go on if the condition holds; else stop the check and show `problem`."""
        if not condition:
            raise Wrong(str(problem))

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.passed = error is None and self.message is None  # of several blocks, every one must hold
        if error is None:
            return True
        if isinstance(error, Wrong):
            self.message = f"not yet: {error}"
        elif NOT_DONE in str(error) and isinstance(error, (NotImplementedError, CompileError)):
            self.message = NOT_DONE
        elif isinstance(error, CompileError):
            self.message = f"not yet: {error}"
        elif isinstance(error, Exception):
            where = traceback.extract_tb(trace)[-1]
            line = f", at `{where.line}`" if where.line else ""
            self.message = f"not yet: your code raised {kind.__name__}: {error}{line}"
        elif isinstance(error, SystemExit):
            self.message = "not yet: your code ended the program (sys.exit, exit or quit): let it return instead"
        else:
            return False  # an interrupt stays an interrupt
        return True

    def report(self, praise):
        """Print the verdict: `praise` if everything held. Returns the exercise."""
        if self.passed:
            self.message = f"passed: {praise}"
        print(f"{self.title}: {self.message}")
        return self
