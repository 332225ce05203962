"""The checks of the exercises, one module per chapter, and what they share.

A check calls the learner's function many times, so it has to bear whatever comes back: None, a string, or
nothing ever, from an endless loop.
"""

import contextlib
import inspect
import math
import numbers
import signal
import threading

import numpy as np

from lab.exercise import Wrong


class _TimeIsUp(BaseException):
    """No Exception: what catches those, such as `except Exception` in a learner's code, lets it through."""


@contextlib.contextmanager
def time_limit(seconds=10):
    """Stop Python code that runs on and on. (Not C code; and on Windows there is no limit.)"""

    def ring(*_):
        raise _TimeIsUp

    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    # After the limit it rings every second, in case the learner's code swallows the first one in an `except:`.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    except _TimeIsUp:
        problem = f"your code was still running after {seconds} seconds. Is there a loop that never ends?"
        raise Wrong(problem) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def call_text(function, *args, **named):
    """The call as the learner would write it: gemv_intensity(2, 3, 0.5)."""
    given = [_argument(a) for a in args] + [f"{name}={value!r}" for name, value in named.items()]
    return f"{getattr(function, '__name__', 'your function')}({', '.join(given)})"


def _argument(value):
    """repr, but 4.6e12 in place of 4600000000000.0."""
    short = f"{value:g}".replace("e+", "e") if isinstance(value, float) and abs(value) >= 1e6 else ""
    return short if short and float(short) == value else repr(value)


def number_from(function, *args, whole=False, **named):
    """Call the learner's function; return the number it gives (an int if `whole`), else raise Wrong."""
    call = call_text(function, *args, **named)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not a function, or one that Python knows nothing of: the call will tell
        signature = None
    if signature:
        try:
            signature.bind(*args, **named)
        except TypeError as e:
            raise Wrong(
                f"the check calls {call}, but your function takes {signature} ({e}). "
                "Keep the arguments and their names as in the stub"
            ) from None
    got = function(*args, **named)
    if got is None:
        raise Wrong(f"{call} gave None. Does the function return its result?")
    if isinstance(got, (np.ndarray, np.generic)) and got.ndim == 0:
        got = got.item()
    if isinstance(got, bool) or not isinstance(got, numbers.Real):
        raise Wrong(f"{call} gave {shown(got)}, expected {'a whole number' if whole else 'a number'}")
    if not math.isfinite(got):
        raise Wrong(f"{call} gave {got}, expected a finite number")
    if whole and not isinstance(got, numbers.Integral):
        raise Wrong(f"{call} gave {got!r}, a {type(got).__name__}; expected a whole number, an int")
    return int(got) if isinstance(got, numbers.Integral) else float(got)


def counted(n, word):
    """1 -> "1 token", 2 -> "2 tokens"."""
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def shown(value, most=60):
    """A value for a message, cut short."""
    text = " ".join(repr(value).split())
    return text if len(text) <= most else text[:most] + " …"


def expect_array(value, name, dtype, shape, at):
    """Raise Wrong unless this is an array of that dtype and shape. at: what was asked, for the message."""
    if not isinstance(value, np.ndarray):
        raise Wrong(f"{at}: {name} is {shown(value)}, expected an array")
    if value.shape != shape:
        raise Wrong(f"{at}: {name} has shape {value.shape}, expected {shape}")
    if value.dtype != dtype:
        raise Wrong(f"{at}: {name} has dtype {value.dtype}, expected {np.dtype(dtype)}")


def array_from(got, shape, at, what="the result"):
    """What a learner's function gave, or a part of it, as an array of float64; else raise Wrong. at: what was asked."""
    if got is None:
        raise Wrong(f"{at} your function gave None. Does it return its result?")
    try:
        array = np.asarray(got, float)
    except (TypeError, ValueError, OverflowError):
        raise Wrong(f"{at} {what} is {shown(got)}, expected an array of shape {shape}") from None
    if array.shape != shape:
        raise Wrong(f"{at} {what} has shape {array.shape}, expected {shape}")
    return array


def close(got, wanted, relative=1e-9):
    """Are two numbers equal but for rounding?"""
    return abs(got - wanted) <= relative * abs(wanted)
