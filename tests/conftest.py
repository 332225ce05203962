"""What the tests of every chapter's exercises share, and how the whole suite shares two cores.

exercise_tools is imported where it is used: it needs nbformat, and the GPU tests must run where there is no Jupyter.
"""

import gc
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The files that take longest, longest first, by processor time. pytest-xdist hands out whole files in the order in
# which they were collected: one of these begun last would leave the other core without work.
LONGEST = """
tests/test_simt_fuzz.py tests/test_ssd_fused.py tests/test_kv_cache.py tests/test_attention_decode.py
tests/test_ssd_rungs.py tests/test_lowbit.py tests/test_exercises_cpu_matmul.py tests/test_ssd_five.py
tests/test_lowbit_rungs.py notebooks/06_lowbit_weights.ipynb tests/test_lowbit_bench.py tests/test_gemv.py
tests/test_exercises_first_cuda_kernel.py tests/test_exercises_flash_decoding.py tests/test_attention_rungs.py
tests/test_fusion.py tests/test_simt_hopper.py notebooks/05_fusion.ipynb notebooks/04_warp_gemv.ipynb
notebooks/02_cpu_matmul.ipynb notebooks/09_kv_quantization.ipynb notebooks/11_ssd_math.ipynb
notebooks/08_flash_decoding.ipynb tests/test_exercises_attention_mix.py tests/test_exercises_warp_gemv.py
notebooks/07_attention_mix.ipynb notebooks/01_roofline.ipynb notebooks/13_fused_ssd.ipynb tests/test_lab_interpreter.py
tests/test_house.py tests/test_exercises_kv_quantization.py tests/test_exercises_fusion.py tests/test_attention_bench.py
""".split()

# What PyTorch and NumPy read as they are imported: how many threads they may use.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_before = {}


def pytest_configure(config):
    """One thread for PyTorch and NumPy where tests run: their tensors are small, and threads that wait for each other
    only burn the cores. pytest_collection_finish gives what is started later, such as notebooks' kernels, the machine
    as it is."""
    os.environ.setdefault("SIMT_KEEP_IN", str(ROOT / ".build" / "simt"))  # as lab says, for tests of simt alone
    if getattr(config.option, "numprocesses", None):  # the process that hands out files, and starts the others
        config.option.loadscopereorder = False  # its own order is by the number of tests
    else:
        _before.update({name: os.environ.get(name) for name in THREADS})
        os.environ.update(dict.fromkeys(THREADS, "1"))
        gc.set_threshold(50_000, 20, 20)  # most of what is imported and compiled stays: seldom walk through it
        if config.pluginmanager.has_plugin("nbval") and hasattr(os, "fork") and sys.platform != "darwin":
            from forked_kernels import Forks

            config.pluginmanager.register(Forks())


def pytest_collection_modifyitems(items):
    rank = {name: n for n, name in enumerate(LONGEST)}
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
