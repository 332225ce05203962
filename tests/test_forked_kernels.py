"""The kernels that notebooks are tested in: copies of one process, and yet each as if it were started alone."""

import os
import select
import signal
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("nbval")
if sys.platform == "darwin" or not hasattr(os, "fork"):
    pytest.skip("kernels are not forked here", allow_module_level=True)

from forked_kernels import Fork, Forks  # noqa: E402
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, RunningKernel  # noqa: E402

LIGHT = "import numpy.random, ipykernel.kernelapp"
LIMIT = 120  # seconds for an answer, of a tenth of one on a machine that has nothing else to do


@pytest.fixture(scope="module")
def forks():
    made = Forks(LIGHT)
    yield made
    made.pytest_unconfigure()
    assert made.server.returncode == 0


@pytest.fixture
def start(forks, tmp_path):
    kernels = []

    def start_one():
        kernels.append(RunningKernel(CURRENT_ENV_KERNEL_NAME, cwd=tmp_path))
        return kernels[-1]

    yield start_one
    for kernel in kernels:
        if kernel.is_alive():
            kernel.stop()


def process(kernel):
    return kernel.km.provisioner.process


def said(kernel, code):
    """What a cell prints, or the name of its error."""
    sent, text = kernel.execute_cell_input(code), ""
    while True:
        message = kernel.get_message("iopub", timeout=LIMIT)
        if message["parent_header"].get("msg_id") != sent:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "status" and content["execution_state"] == "idle":
            kernel.await_reply(sent, timeout=LIMIT)
            return text.strip()
        text += content["text"] if kind == "stream" else content["ename"] if kind == "error" else ""


def test_a_fork_is_like_a_process_of_its_own(start, tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THIS_TEST", "set")
    one = start()
    two = start()
    assert isinstance(process(one), Fork) and process(one).pid != process(two).pid
    facts = "import os, sys; print(os.getcwd(), os.environ['OF_THIS_TEST'], '' in sys.path, 'lab' in sys.modules)"
    assert said(one, facts) == f"{tmp_path} set True False"
    assert "tests" not in said(one, "import sys; print(*sys.path)").split("/")
    drawn = [said(k, "import random, numpy; print(random.random(), numpy.random.rand())").split() for k in (one, two)]
    assert drawn[0][0] != drawn[1][0] and drawn[0][1] != drawn[1][1]
    assert said(two, "one = 1; import os; os.system('echo from the shell'); print('written')").endswith("written")
    assert said(one, "print(one)") == "NameError"


def test_it_is_interrupted_stopped_and_found_dead(start, forks):
    kernel = start()
    sent = kernel.execute_cell_input("import time\nprint('begun')\ntime.sleep(60)")
    while kernel.get_message("iopub", timeout=LIMIT)["msg_type"] != "stream":
        pass
    kernel.interrupt()
    kernel.await_reply(sent, timeout=LIMIT)
    assert said(kernel, "print('alive')") == "alive" and kernel.is_alive()
    pid = process(kernel).pid
    kernel.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)

    kernel = start()
    dead = process(kernel)
    os.kill(dead.pid, signal.SIGKILL)
    assert dead.wait() == -signal.SIGKILL and not kernel.is_alive()


def test_without_the_process_that_forked_it_a_kernel_ends(tmp_path):
    forks = Forks(LIGHT)
    kernel = RunningKernel(CURRENT_ENV_KERNEL_NAME, cwd=tmp_path)
    watched = os.pidfd_open(process(kernel).pid) if hasattr(os, "pidfd_open") else None
    forks.server.kill()
    forks.pytest_unconfigure()
    with pytest.raises(RuntimeError, match="the process that forks kernels has ended, with -9"):
        process(kernel).poll()
    if watched is not None:
        assert select.select([watched], [], [], 20)[0]  # readable when the process has ended
        os.close(watched)
    kernel.kc.stop_channels()


def test_a_notebook_that_sets_its_environment_gets_a_process_of_its_own(start, forks, tmp_path):
    for source, forked in (('"import os\\n", "os.environ[\\"A\\"] = \\"1\\""', False), ('"import numpy"', True)):
        (tmp_path / "a.ipynb").write_text(source)
        forks.pytest_runtest_setup(SimpleNamespace(path=tmp_path / "a.ipynb"))
        assert isinstance(process(start()), Fork) == forked


def test_it_ends_with_who_asked(tmp_path):
    forks = Forks(LIGHT)
    fork = forks.start([sys.executable, "-m", "ipykernel_launcher", "-f", str(tmp_path / "none.json")], cwd=tmp_path)
    forks.pytest_unconfigure()
    with pytest.raises(ProcessLookupError):
        os.kill(fork.pid, 0)
    with pytest.raises(RuntimeError, match="has ended, with 0"):
        fork.poll()
