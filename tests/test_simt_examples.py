"""Thirty textbook kernels on the SIMT machine: those that compile fast, and that a mistake in any would be seen.

`python -m simt.examples` runs all of them.
"""

import re

import numpy as np
import pytest

import simt
from simt import examples
from simt.examples import __main__ as command
from simt.examples import launching

SLOW = {"compaction", "layer_norm", "radix_sort", "stencil"}  # their headers (CUB, cooperative groups) are long
MISTAKES = [  # one for each way in which a check could be blind: (example, text, instead)
    ("saxpy", "if (i < n)", "if (i < n - 1)"),
    ("gelu", "0.044715f", "0.0447f * 1.01f"),
    ("grey", "29 * p.z", "29 * p.y"),
    ("mandelbrot", "<= 4.0", "<= 3.5"),
    ("dot", "sum += u.x * v.x + u.y", "sum += u.x * v.x - u.y"),
    ("scan_hillis_steele", "lane >= step", "lane > step"),
    ("scan_blelloch", "out[i + BLOCK] += ", "out[i + BLOCK] = "),
    ("histogram", "atomicAdd(&mine[data[i]], 1u)", "mine[data[i]] += 1u"),
    ("softmax", "expf(small.largest - big.largest)", "1.0f"),
    ("top_k", "there < where[threadIdx.x])", "there > where[threadIdx.x])"),
    ("bitonic_sort", "(i & k) == 0", "(i & j) == 0"),
    ("merge", "A[i] <= B[j] ? A[i++] : B[j++]", "A[i] >= B[j] ? A[i++] : B[j++]"),
    ("transpose", "tile[threadIdx.x][threadIdx.y + j]", "tile[threadIdx.y + j][threadIdx.x]"),
    ("convolution", "c < out && r >= 0", "c <= out && r >= 0"),
    ("life", "alive == 3 || (alive == 2 && tile", "alive == 3 || (alive == 4 && tile"),
    ("nbody", "inverse * inverse * inverse", "inverse * inverse"),
    ("kmeans", "distance < nearest", "distance > nearest"),
    ("spmv", "starts[row] + lane", "starts[row] + lane + 1"),
    ("bfs", "next[base + at] = queue[at]", "next[base + at] = queue[0]"),
    ("matmul_naive", "beta * C", "C"),
    ("matmul_tiled", "        __syncthreads();\n    }\n    if (row < m", "    }\n    if (row < m"),
    ("matmul_registers", "a[r] * b[c]", "a[r] * b[0]"),
    ("matmul_wmma", "beta * old.x[i]", "beta"),
    ("attention", "start + j > token", "start + j >= token + 2"),
]


@pytest.mark.parametrize("name", [name for name in examples.NAMES if name not in SLOW])
def test_an_example_is_right(name):
    assert examples.run(name) > 0


def test_there_are_thirty_and_each_file_has_a_check():
    files = {path.stem for path in launching.Path(launching.__file__).parent.glob("*.cu")}
    assert set(examples.NAMES) == files and len(files) == 30
    assert {name for name, *_ in MISTAKES} >= files - SLOW - {"reduction", "matmul_double_buffered"}


@pytest.mark.parametrize(("name", "text", "instead"), MISTAKES)
def test_a_mistake_in_an_example_is_seen(name, text, instead, monkeypatch):
    whole = launching.source(name)
    assert text in whole
    monkeypatch.setattr(launching, "source", lambda name: whole.replace(text, instead))
    with pytest.raises((AssertionError, simt.SimtError)):
        examples.run(name)


def test_the_textbooks_level_of_a_search_has_a_race_to_the_letter():
    module = simt.compile(examples.source("bfs"))
    starts, ends = np.array([0, 1, 2], np.int32), np.array([1, 0], np.int32)
    levels, changed = np.array([0, -1], np.int32), np.zeros(1, np.int32)
    with pytest.raises(simt.RaceError, match="race on levels"):
        module["bfs_level"](2, 1, starts, ends, levels, np.int32(0), changed, np.int32(2), check_races=True)


def test_the_command_says_what_is_right_and_what_is_not(monkeypatch, capsys):
    whole = launching.source("saxpy")
    assert command.main(["saxpy", "grey"]) == 0
    assert re.search(r"^saxpy +\d+\.\d s  right, 8 launches\n.*\n2 of 2 right\n$", capsys.readouterr().out, re.M)
    monkeypatch.setattr(launching, "source", lambda name: whole.replace("a * x[i]", "x[i]"))
    assert command.main(["saxpy"]) == 1
    assert re.search(r"WRONG: saxpy: expected \S+ at \[0\]; got \S+\n0 of 1 right\n", capsys.readouterr().out)
    monkeypatch.setattr(launching, "source", lambda name: whole.replace("if (i < n) y", "if (i < n) free(y), y"))
    assert command.main(["saxpy"]) == 0
    assert re.search(r"refused: .*there is no heap.*\n0 of 1 right, 1 refused\n", capsys.readouterr().out)
    with pytest.raises(SystemExit, match="no example saxpi; there are attention, bfs,"):
        command.main(["saxpi"])


@pytest.mark.parametrize(
    ("got", "wanted", "message"),
    [
        ([1.0, np.nan], [1, 2], r"k: expected 2 at \[1\]; got nan"),
        ([[1.0, 2.1]], [[1, 2]], r"expected 2 at \[0, 1\]; got 2.1"),
        ([1e6, 1.0], [1e6, 20], r"expected 20 at \[1\]; got 1"),
    ],
)
def test_what_is_not_close_is_named(got, wanted, message):
    with pytest.raises(AssertionError, match=message):
        launching.close("k", got, wanted)
    with pytest.raises(
        AssertionError, match=message.replace(r"expected 20 at \[1\]; got 1", r"expected 20.* at \[1\]")
    ):
        launching.same("k", got, wanted)
    launching.close("k", wanted, wanted)


def test_shapes_are_compared_too():
    with pytest.raises(AssertionError, match=r"expected shape \(2,\); got \(1, 2\)"):
        launching.same("k", [[1, 2]], [1, 2])
