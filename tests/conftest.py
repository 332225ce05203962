"""What the tests of every chapter's exercises share, and how the whole suite shares the cores.

exercise_tools is imported where it is used: it needs nbformat, and the GPU tests must run where there is no Jupyter.
"""

import gc
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# How long files take, the longest first: `make test ARGS=--store-order` writes it. pytest-xdist hands out whole files
# in the order in which they were collected: one of these begun last would leave the other cores without work.
ORDER = ROOT / "tests" / "order.txt"
LISTED = 3  # seconds that a file takes at least to be listed

# The tests of kernels; those of exercises, whose solutions are assembled where their notebooks run; and of the SIMT
# machine those whose sources have run on a card or are PTX in all but name.
PTX_ALONE = ("test_gemv", "test_attention_", "test_kv_cache", "test_lowbit", "test_fusion", "test_ssd_", "test_matmul")
PTX_ALONE += ("test_trials", "test_exercises_", "test_simt_fuzz", "test_simt_truth", "test_simt_arithmetic")
PTX_ALONE += ("test_simt_math", "test_operators", "test_llm_", "test_mamba2_", "test_models_")
PTX_ALONE += ("test_paged", "test_latent", "test_collective")

# Tests that look at what kernels compute, and not at what the SIMT machine counts: a tenth of their time.
UNCOUNTED = ("test_ssd_", "test_llm_", "test_mamba2_", "test_models_", "test_simt_fuzz")

LOG = "--ptxas-options=-v"  # registers, spills: what lab.cuda asks the compiler for

# What PyTorch and NumPy read as they are imported: how many threads they may use.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_before = {}

# For what runs in this process, and for notebooks' kernels: a thread that waits for others sleeps. By default it goes
# on asking, on a core that another process would use: a third of the processor time of kernels with OpenMP.
PATIENCE = {"OMP_WAIT_POLICY": "passive", "OPENBLAS_THREAD_TIMEOUT": "4"}

# What glibc's malloc reads as a process starts: what is freed is kept for the next array, not given back to the system,
# which would have to clear it again. Launches on the SIMT machine make arrays of some hundred KB all the time. Pages of
# 2 MB, where the system gives them: NVRTC goes through its memory in a tenth less time.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
MALLOC["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"


def pytest_addoption(parser):
    said = "measure how long each file takes: from now on, `make test` begins with the longest"
    parser.addoption("--store-order", action="store_true", help=said)
    said = "note which kernels of the SIMT machine's tests the assembler takes: it is not asked again"
    parser.addoption("--store-assembled", action="store_true", help=said)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    import processes

    return processes.count()


def pytest_configure(config):
    """One thread for PyTorch and NumPy where tests run: their tensors are small, and threads that wait for each other
    only burn the cores. pytest_collection_finish gives what is started later, such as notebooks' kernels, the machine
    as it is."""
    os.environ.setdefault("SIMT_KEEP_IN", str(ROOT / ".build" / "simt"))  # as lab says, for tests of simt alone
    if not hasattr(config, "workerinput") and config.option.store_order:
        config.pluginmanager.register(Order())
    if getattr(config.option, "numprocesses", None):  # the process that hands out files, and starts the others
        config.option.loadscopereorder = False  # its own order is by the number of tests
        for name, value in MALLOC.items():
            os.environ.setdefault(name, value)
    else:
        _before.update({name: os.environ.get(name) for name in THREADS})
        os.environ.update(dict.fromkeys(THREADS, "1"))
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        gc.set_threshold(50_000, 20, 20)  # most of what is imported and compiled stays: seldom walk through it
        if config.pluginmanager.has_plugin("nbval") and hasattr(os, "fork") and sys.platform != "darwin":
            from forked_kernels import Forks

            config.pluginmanager.register(Forks())


class Order:
    """Sums up how long the tests of each file take, and stores it if all of them pass."""

    def __init__(self):
        self.seconds = {}

    def pytest_runtest_logreport(self, report):
        file = report.nodeid.partition("::")[0]
        self.seconds[file] = self.seconds.get(file, 0) + report.duration

    def pytest_sessionfinish(self, exitstatus):
        if exitstatus == 0:
            longest = sorted(((seconds, file) for file, seconds in self.seconds.items()), reverse=True)
            lines = [f"{seconds:.0f} {file}\n" for seconds, file in longest if seconds >= LISTED]
            ORDER.write_text("".join(lines), encoding="utf-8")


def in_order():
    """[(seconds, file)], the longest first."""
    lines = [line.split(" ", 1) for line in ORDER.read_text(encoding="utf-8").splitlines()]
    return [(int(seconds), file) for seconds, file in lines]


def pytest_collection_modifyitems(items):
    rank = {file: n for n, (_, file) in enumerate(in_order())}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank)))


def pytest_collection_finish(session):
    os.environ["LAB_HASTE"] = "1"  # for notebooks' kernels: nobody looks at the times
    for name, value in _before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value
    gc.collect()
    gc.freeze()  # what is loaded now stays: never walk through it again


def pytest_unconfigure(config):
    os.environ.pop("LAB_HASTE", None)
    gc.unfreeze()  # or Triton's bindings take what they find at the end for lost


@pytest.fixture(scope="module", autouse=True)
def ptx_alone(request):
    """Tests of kernels run hundreds of variants on the SIMT machine: NVRTC makes their PTX, and need not assemble it.

    The first variant of each source of the course is assembled, lest it be a kernel that no card would take.
    """
    if not request.path.name.startswith(PTX_ALONE):
        yield
        return
    from lab.cuda.module import MINIMAL
    from simt import nvrtc

    left = {path.read_text() for path in (ROOT / "kernels").glob("*/*.cu")} - _assembled
    whole = set()  # what was assembled: its PTX need not be made again

    def assembling(compile):
        """With the compiler's log, whatever is asked for: what its test wants and machine code are made at once."""

        def compiled(source, options=(), arch="sm_90", name="kernel.cu", **how):
            plain = tuple(option for option in options if option != LOG)
            result = compile(source, (*plain, LOG, MINIMAL), arch, name, **how)
            whole.add((source, plain, arch, name))
            left.discard(source)
            _assembled.add(source)
            return result

        return compiled

    compile_to_ptx, assembled_ptx = nvrtc.compile_to_ptx, assembling(nvrtc.compile_to_ptx)

    def alone(source, options=(), arch="sm_90", name="kernel.cu", assembled=False, **more):
        if source in left or (source, tuple(options), arch, name) in whole:
            return assembled_ptx(source, options, arch, name, **more)
        return compile_to_ptx(source, (*options, MINIMAL), arch, name, assembled=False, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "compile_to_ptx", alone)
        for name in ("compile_to_cubin", "compiler_log"):
            patch.setattr(nvrtc, name, assembling(getattr(nvrtc, name)))
        yield


_assembled = set()


@pytest.fixture(autouse=True)
def uncounted(request):
    """Launches of UNCOUNTED's tests count nothing, but for those of a test that asks for `counted`."""
    if not request.path.name.startswith(UNCOUNTED) or "counted" in request.fixturenames:
        yield
        return
    import simt

    with simt.uncounted():
        yield


@pytest.fixture
def counted():
    """For a test that looks at counters in a file of UNCOUNTED."""


@pytest.fixture(scope="module", autouse=True)
def assembled_once(request):
    """The SIMT machine's own tests take PTX alone of kernels that the assembler is known to take (see assembled.py)."""
    import assembled

    file = request.path.stem
    if file not in assembled.FILES or sys.platform == "darwin":
        yield
        return
    from simt import nvrtc

    store, taken = request.config.option.store_assembled, set()
    known = set() if store else assembled.read().get(file, set())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "compile_to_ptx", assembled.compile_with(nvrtc.compile_to_ptx, known, taken))
        yield
    if store:
        assembled.write({file: taken})


@pytest.fixture(scope="module")
def solutions(request):
    """What the solved notebook defines. The test module's NAME, or its TestExercises' name, says which one."""
    from exercise_tools import load

    return load("solutions", _name(request.module))


@pytest.fixture(scope="module")
def stubs(request):
    """What the unsolved notebook defines."""
    from exercise_tools import load

    return load("exercises", _name(request.module))


def _name(module):
    return module.TestExercises.name if hasattr(module, "TestExercises") else module.NAME


def pytest_generate_tests(metafunc):
    """Spread the tests of an ExerciseContract over its exercises, and over their wrong answers."""
    contract = metafunc.cls
    if not hasattr(contract, "wrong"):
        return
    if "mistake" in metafunc.fixturenames:
        pairs = [(number, mistake) for number, mistakes in contract.wrong.items() for mistake in mistakes]
        metafunc.parametrize("number, mistake", pairs)
    elif "number" in metafunc.fixturenames:
        metafunc.parametrize("number", list(contract.answers))
    elif "made_from" in metafunc.fixturenames:
        metafunc.parametrize("made_from", list(contract.right))
