"""Kernels for notebooks, forked from one process that has imported what takes long: PyTorch, Matplotlib, IPython.

A kernel takes up to three seconds of a processor until a notebook's imports are done, and a chapter has three
notebooks. Here one process has imported such packages (`serve`), and each kernel is a copy of it, which takes a tenth
of a second. Nothing of the course is imported before, and each kernel has its own folder, environment and random
numbers, as ever. A notebook that sets its environment, which counts only before the imports, gets a process of its own.

conftest.py registers Forks as a plugin. It stands in for the function by which Jupyter starts a process.
"""

import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

# Not pyplot and not ipywidgets, which look for a notebook's kernel when they are imported.
IMPORTS = """
import numpy.random, torch, triton.language
import ipykernel.debugger, ipykernel.ipkernel, ipykernel.kernelapp, ipykernel.zmqshell, matplotlib_inline.config
import IPython.core.completerlib, IPython.core.debugger, IPython.extensions.storemagic, tornado.platform.asyncio
import matplotlib.axes, matplotlib.backends.backend_agg, matplotlib.figure
"""
OWN_PROCESS = "os.environ["


class Forks:
    """The plugin: `Jupyter's launch_kernel(cmd, cwd=, env=, ...)` -> a Fork, where the notebook allows it."""

    def __init__(self, imports=IMPORTS):
        from jupyter_client.launcher import launch_kernel
        from jupyter_client.provisioning import local_provisioner

        self.launch, self.jupyter, self.before = launch_kernel, local_provisioner, local_provisioner.launch_kernel
        local_provisioner.launch_kernel = self.start
        self.imports, self.server, self.forks = imports, None, True

    def pytest_runtest_setup(self, item):
        if item.path.suffix == ".ipynb":
            self.forks = OWN_PROCESS not in item.path.read_text(encoding="utf-8")

    def start(self, cmd, *, cwd=None, env=None, **others):
        module = cmd.index("-m") + 1 if "-m" in cmd else None
        if not self.forks or module is None or cmd[module] != "ipykernel_launcher":
            return self.launch(cmd, cwd=cwd, env=env, **others)
        if self.server is None:
            command = [sys.executable, "-Xfrozen_modules=off", str(Path(__file__)), self.imports]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.server = subprocess.Popen(command, text=True, **pipes)
        return Fork(self, cmd[module:], os.fspath(cwd or os.getcwd()), dict(os.environ if env is None else env))

    def ask(self, **question):
        """One line to the server, one line back."""
        try:
            print(json.dumps(question), file=self.server.stdin, flush=True)
            return json.loads(self.server.stdout.readline())
        except (OSError, ValueError):  # nothing was answered, or all has been closed
            raise RuntimeError(f"the process that forks kernels has ended, with {self.server.wait()}") from None

    def pytest_unconfigure(self):
        self.jupyter.launch_kernel = self.before
        if self.server is not None:
            self.server.stdin.close()  # then it ends
            self.server.wait()
            self.server.stdout.close()


class Fork:
    """A kernel's process, with as much of subprocess.Popen as Jupyter uses."""

    stdin = stdout = stderr = None

    def __init__(self, forks, argv, cwd, env):
        self.forks, self.args, self.returncode = forks, argv, None
        self.pid = forks.ask(argv=argv, cwd=cwd, env=env)

    def poll(self):
        if self.returncode is None:
            self.returncode = self.forks.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            self.returncode = self.forks.ask(wait=self.pid)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def serve(imports):
    """Fork kernels, and say how they fared, until there is nobody left who asks."""
    del sys.path[0]  # the folder of tests, which a kernel does not look into
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks gets it, too, and ends
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # as a kernel sets it, before Matplotlib
    os.environ["JPY_PARENT_PID"] = str(os.getpid())  # a kernel whose parent is gone ends, too
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    exec(imports, {})
    gc.freeze()  # a copy that never walks through what is there shares its memory
    running = set()
    for line in sys.stdin:
        question = json.loads(line)
        if "argv" in question:
            ready, done = os.pipe()
            pid = answer = os.fork()
            if not pid:
                become_kernel(**question)
            os.close(done)
            os.read(ready, 1)  # until it has a group of its own, by which it is interrupted
            os.close(ready)
            running.add(pid)
        else:
            ((how, pid),) = question.items()
            ended, status = os.waitpid(pid, os.WNOHANG if how == "poll" else 0)
            answer = os.waitstatus_to_exitcode(status) if ended else None
            if ended:
                running.remove(pid)
        print(json.dumps(answer), file=answers, flush=True)
    for pid in running:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def become_kernel(argv, cwd, env):
    """In the copy: what a new process would have, then what `python -m ipykernel_launcher` does."""
    import random
    import runpy

    import numpy

    status = 1
    try:
        os.setsid()
        os.closerange(3, 256)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        sys.stdin = open(0, closefd=False)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        random.seed()
        numpy.random.seed()
        sys.argv = argv
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1])
