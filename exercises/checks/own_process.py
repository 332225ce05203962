"""Run a learner's C in a process of its own: a crash or an endless loop is a sentence, and not a dead kernel.

    with OwnProcess(source, {"dot": "float dot(const float *a, const float *b, int64_t n)"}) as c:
        c.call("dot", a, b, 5)

The source is compiled here (so compile errors show as usual) and called there. Arrays travel there and back
together with what lies around them: guards that lab.check puts around an array stand around it there too.
"""

import ctypes
import os
import re
import subprocess
import sys
from multiprocessing.connection import Connection

import numpy as np

from lab.compiler import ROOT, CLibrary, _prototypes, compile_c
from lab.exercise import Wrong

MEMORY = 2 << 30  # bytes that the learner's code may take beside what the process has when it starts


class OwnProcess:
    """C source, compiled, in a process of its own. Close it, or use it in a `with` statement.

    expected  {name: prototype} of the functions that the learner has to define
    extra     C text that is put after the learner's: what the check needs beside it
    flags     for the compiler; OpenMP is off
    """

    def __init__(self, source, expected, *, extra="", flags=(), name="answer.c"):
        if not isinstance(source, str):
            raise Wrong(f"expected C source as a string, got {type(source).__name__}")
        whole = f'{source}\n#line 1 "the check"\n{extra}' if extra else source
        defined = dict(_prototypes(source))
        for function, prototype in expected.items():
            if function not in defined:
                raise Wrong(f"the C source has no function `{prototype}`")
            if _types(defined[function]) != _types(dict(_prototypes(prototype + " {"))[function]):
                raise Wrong(f"the first line of {function} was changed; expected `{prototype}`")
        library = compile_c(whole, flags=tuple(flags), name=name, openmp=False)
        self._allocates = bool(re.search(r"\b(?:m|c|re|aligned_)alloc\b", source))
        self._start()
        self._send.send((str(library.path), name, whole))

    def _start(self):
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from exercises.checks import own_process; "
        program += f"own_process.serve({theirs_in}, {theirs_out}, {MEMORY})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._send, self._receive = Connection(ours_out, readable=False), Connection(ours_in, writable=False)

    def call(self, function, *args, doing=None, limit=10):
        """Call the C function and return its result; arrays are changed in place, as C would.

        doing  what a message calls this call, for example "n = 5"
        limit  seconds until it counts as an endless loop
        """
        homes = [_home(a) if isinstance(a, np.ndarray) else None for a in args]
        packed = [
            a if home is None else (home, a.__array_interface__["data"][0] - home.ctypes.data, a.shape)
            for a, home in zip(args, homes)
        ]
        doing = f" at {doing}" if doing else ""
        try:
            self._send.send((function, packed))
            if not self._receive.poll(limit):
                raise Wrong(f"still running after {limit} seconds{doing}: is there a loop that never ends?")
            error, result, back = self._receive.recv()
        except (EOFError, OSError):  # the process is gone
            code = self._process.wait()
            if code >= 0:
                raise Wrong(f"the program ended itself{doing}, with exit status {code}") from None
            limit = f"; of more than {MEMORY / 2**30:g} GB of memory malloc gives NULL here" if self._allocates else ""
            raise Wrong(f"the program crashed{doing} ({_why(code)}{limit})") from None
        if error:
            raise error
        for home, now in zip(homes, back):
            if home is not None:
                home[...] = now
        return result

    def close(self):
        self._send.close()
        self._receive.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _types(prototype):
    returns, parameters = prototype
    return returns, [(kind, pointer) for kind, pointer, _, _ in parameters]


def _home(array):
    """The array that owns the memory: with the guards, if there are any."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _why(code):
    names = {-11: "segmentation fault: it touched memory that is not its own", -8: "division by zero"}
    names |= {-10: "bus error: it touched memory that is not its own", -6: "abort: it damaged the heap"}
    return names.get(code, f"signal {-code}")


def _limit_memory(more):
    """This process may take so many bytes more, where the system can see to that (Linux)."""
    try:
        import resource

        with open("/proc/self/statm") as f:
            now = int(f.read().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = now + more if most == resource.RLIM_INFINITY else min(now + more, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    except (ImportError, OSError, ValueError):
        pass


def serve(inbox, outbox, memory):
    """The other process: load the library, then answer calls until the first process closes the pipe."""
    _limit_memory(memory)
    inbox, outbox = Connection(inbox, writable=False), Connection(outbox, readable=False)
    library, c = CLibrary(*inbox.recv()), ctypes.CDLL(None)  # the learner's, and C's own
    while True:
        try:
            function, packed = inbox.recv()
        except EOFError:
            return
        homes = [p[0] if isinstance(p, tuple) else None for p in packed]
        args = [np.ndarray(p[2], p[0].dtype, buffer=p[0], offset=p[1]) if isinstance(p, tuple) else p for p in packed]
        try:
            answer = (None, getattr(library, function)(*args), homes)
        except Exception as e:
            answer = (e, None, homes)
        c.fflush(None)  # what printf wrote, before this process may be killed
        outbox.send(answer)
