"""Run a learner's C in a process of its own: a crash or an endless loop is a sentence, and not a dead kernel.

    with OwnProcess(source, {"dot": "float dot(const float *a, const float *b, int64_t n)"}) as c:
        c.call("dot", a, b, 5)

The source is compiled here (so compile errors show as usual) and called there. Arrays travel there and back
together with what lies around them: guards that lab.check puts around an array stand around it there too.
"""

import contextlib
import ctypes
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
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
        try:
            self._process = Copy(_copies(os.getpid()), theirs_in, theirs_out)
        except OSError:  # whoever makes copies is gone: another one
            _copies.cache_clear()
            self._process = Copy(_copies(os.getpid()), theirs_in, theirs_out)
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


class Copies:
    """A process in which all is ready for a learner's C. Copies of it start at once; a new Python takes a while."""

    def __init__(self):
        self.lock = threading.Lock()
        self.ours, theirs = socket.socketpair()
        program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from exercises.checks import own_process; "
        command = [sys.executable, "-c", program + f"own_process.make_copies({theirs.fileno()})"]
        self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        theirs.close()

    def ask(self, what, number, files=()):
        with self.lock:
            try:
                socket.send_fds(self.ours, [f"{what} {number}".encode()], files)
                answer = self.ours.recv(64)
            except KeyboardInterrupt:  # the answer may still come, and would be taken for that of the next question
                self.ours.close()
                raise
        if not answer:
            self.process.wait()
            raise OSError("the process that makes copies has ended")
        return int(answer)


@functools.cache
def _copies(process):
    """Those of this process, by its number: one that was forked from another has none yet."""
    return Copies()


class Copy:
    """One of them."""

    def __init__(self, copies, *files):
        self.copies = copies
        self.number, self.returncode = copies.ask("start", MEMORY, (*files, 1, 2)), None  # with the output of now

    def kill(self):
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.number, signal.SIGKILL)

    def wait(self):
        """How it ended: its exit status, or less than 0 for a signal."""
        if self.returncode is None:
            try:
                self.returncode = self.copies.ask("wait", self.number)
            except OSError:  # nobody knows
                self.returncode = -signal.SIGKILL
        return self.returncode


def make_copies(socket_number):
    """The process that is copied: do as it is told until nobody is left who tells."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for who waits for the answer
    asked = socket.socket(fileno=socket_number)
    while True:
        told, files, _, _ = socket.recv_fds(asked, 64, 4)
        if not told:
            return
        what, number = told.split()
        if what == b"wait":
            answer = os.waitstatus_to_exitcode(os.waitpid(int(number), 0)[1])
        else:
            answer = os.fork()
            if not answer:
                try:
                    asked.close()
                    inbox, outbox, *output = files
                    for stream, file in enumerate(output, 1):
                        os.dup2(file, stream)
                        os.close(file)
                    serve(inbox, outbox, int(number))
                finally:
                    os._exit(0)
            for file in files:
                os.close(file)
        asked.send(str(answer).encode())


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
