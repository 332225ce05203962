"""Interpreting a Triton kernel leaves Triton as it was: what is compiled later in the same process is the same code."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import interpreter as of_triton
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import JITFunction

from lab.interpreter import interpreter

ROOT = Path(__file__).resolve().parent.parent


@triton.jit
def twice(x):
    return (x + x).to(tl.float32)


@triton.jit
def much(x, y, count, n, N: tl.constexpr):
    """Of all that the interpreter changes: casts, atomics, loops, reductions, scans, sorts and a call."""
    at = tl.arange(0, N)
    taken = tl.atomic_add(count, 1)
    total = tl.zeros((N,), tl.float32)
    for start in range(0, n, N):
        total += tl.load(x + start + at, start + at < n, other=0).to(tl.float32)
    for i in tl.static_range(2):
        total = twice(total) + i
    total = tl.cumsum(tl.sort(total) - tl.max(total, 0), 0) + taken.to(tl.float32)
    tl.store(y + at, total / tl.sum(tl.exp(total), 0))


@triton.jit
def wrong(x, y, count, n, N: tl.constexpr):
    tl.static_assert(tl.sum(tl.load(x + tl.arange(0, N)), 0) != 7, "seven")
    twice(tl.undefined)


def arguments(n=50):
    return torch.randn(n), torch.empty(16), torch.zeros(1, dtype=torch.int32), n, 16


def state():
    """All that Triton's language and interpreter, and this module, hold, by name."""
    spaces = [space for name, space in sys.modules.items() if name.startswith("triton.language")]
    spaces += [v for space in spaces for v in vars(space).values() if isinstance(v, type) and "triton" in v.__module__]
    found = {(id(space), name): value for space in spaces for name, value in vars(space).items()}
    found |= {("interpreter", name): value for name, value in vars(of_triton).items()}
    return found | {("here", name): value for name, value in globals().items()}


def changed(before):
    """What is not as it was, and names that are new; a function that was interpreted has new ones in its module."""
    now = state()
    gone = [name for key, name in before if now.get((key, name)) is not before[key, name]]
    classes = {id(v) for v in vars(tl.core).values() if isinstance(v, type)}
    return gone + [name for key, name in now.keys() - before.keys() if key in classes or name == "range"]


def run(kernel, *args):
    with interpreter(kernel) as interpreted:
        interpreted[(1, 1, 1)](*args)


def test_what_it_computes():
    x, y, count, n, size = arguments()
    run(much, x, y, count, n, size)
    parts = np.zeros(64)
    parts[:n] = x.double().numpy()
    total = np.sort(4 * parts.reshape(4, 16).sum(0) + 1)
    total = np.cumsum(total - total.max())
    np.testing.assert_allclose(y.double().numpy(), total / np.exp(total).sum(), rtol=1e-4)
    assert count.item() == 1


def test_all_is_as_it_was():
    before = state()
    run(much, *arguments())
    assert changed(before) == []


def test_the_language_is_changed_once_for_a_launch(monkeypatch):
    changes, change = [], of_triton._patch_lang_core
    monkeypatch.setattr(of_triton, "_patch_lang_core", lambda *args: changes.append(args) or change(*args))
    with interpreter(much) as interpreted:
        for most in (3, 1):  # the first time also where Triton's own functions look, which the interpreter leaves so
            changes.clear()
            args = arguments()
            interpreted[(1, 1, 1)](*args)
            assert 1 <= len(changes) <= most and args[1].isfinite().all()


def test_after_exceptions():
    before = state()
    with pytest.raises(InterpreterError):
        run(wrong, *arguments())
    with pytest.raises(KeyError), interpreter(much):
        raise KeyError
    assert changed(before) == []


def test_nested():
    """The inner one takes away nothing that the outer one needs."""
    before = state()
    with interpreter(much) as outer:
        changed_by_outer = state()
        with pytest.raises(InterpreterError):
            run(wrong, *arguments())
        assert changed(changed_by_outer) == []
        args = arguments()
        outer[(1, 1, 1)](*args)
        assert args[1].isfinite().all()
    assert changed(before) == []


def test_threads_take_turns():
    before = state()
    args = [arguments() for _ in range(6)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda each: run(much, *each), args))
    assert changed(before) == [] and all(y.isfinite().all() for _, y, *_ in args)


def compiled():
    """PTX for sm_90. Triton keeps what it has compiled: a new function is compiled anew."""
    made = {}
    for name, types in (("much", {"x": "*fp16", "y": "*fp32", "count": "*i32", "n": "i32", "N": "constexpr"}),):
        source = ASTSource(JITFunction(globals()[name].fn), types, constexprs={"N": 16})
        made[name] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]
    return made


FORKS = """
import os, sys
sys.path[:0] = ["tests", "."]
from NAME import *
for number, code in enumerate(sys.argv[2:]):
    child = os.fork()
    if not child:
        os.environ["TRITON_CACHE_DIR"] = f"{sys.argv[1]}/cache {number}"
        sys.stdout = open(f"{sys.argv[1]}/said {number}", "w")
        exec(code)
        sys.stdout.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def in_processes(folder, *codes):
    """What each of these prints in a process of its own: a copy of one that has imported this file."""
    command = [sys.executable, "-c", FORKS.replace("NAME", Path(__file__).stem), str(folder), *codes]
    environment = {"TRITON_INTERPRET": "0", "PATH": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [(folder / f"said {number}").read_text() for number in range(len(codes))]


def test_compiled_after_it_was_interpreted(tmp_path):
    """As a caller of the SSD kernels would, too: on CPU tensors first."""
    interpreted, ssd = "run(much, *arguments()); ", "five(**problem(1, 20, 2, 16, 1, 16)); "
    alone, after, again, after_ssd = in_processes(
        tmp_path,
        "print(compiled())",
        interpreted + "print(compiled())",
        f"compiled(); {interpreted * 2} print(compiled())",
        "from test_ssd_five import problem; from kernels.ssd.five import five; " + ssd + "print(compiled())",
    )
    assert "atom" in alone and after == alone and again == alone and after_ssd == alone
