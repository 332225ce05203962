"""What is kept in files: found again by other processes, never believed when damaged, and never too much."""

import os
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest

from simt import kept, nvrtc

ROOT = Path(__file__).resolve().parent.parent
KERNEL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }\n'
compiles = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(kept.FOLDER, str(tmp_path / "made when needed"))
    monkeypatch.setattr(kept, "_room", {})
    return tmp_path / "made when needed"


def test_what_was_kept_is_found(folder):
    key = kept.digest("a", "b")
    assert kept.find(key) is None and not folder.exists()
    for data in (b"", b"one\0two" * 1000, bytes(range(256))):
        kept.keep(key, data)
        assert kept.find(key) == data
    assert [path.name for path in folder.iterdir()] == [key]


def test_keys_tell_texts_apart():
    texts = [("ab", "c"), ("a", "bc"), ("abc",), ("a", "b", "c"), ("a\0b", "c"), ("a", "b\0c"), ("ab", "c", "")]
    assert len({kept.digest(*each) for each in texts}) == len(texts)


DAMAGES = {
    "empty": lambda stored: b"",
    "cut": lambda stored: stored[:-5],
    "cut in the checksum": lambda stored: stored[:20],
    "another checksum": lambda stored: bytes(32) + stored[32:],
    "a bit": lambda stored: stored[:45] + bytes([stored[45] ^ 1]) + stored[46:],
    "another's": lambda stored: stored[:32] + zlib.compress(b"another's"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_counts_as_not_there(folder, damage):
    kept.keep("key", b"some words of a text")
    stored = (folder / "key").read_bytes()
    (folder / "key").write_bytes(DAMAGES[damage](stored))
    assert kept.find("key") is None
    kept.keep("key", b"again")
    assert kept.find("key") == b"again"


def test_without_a_folder_nothing_is_kept(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    for change in (lambda: monkeypatch.setenv(kept.FOLDER, ""), lambda: monkeypatch.delenv(kept.FOLDER)):
        change()
        kept.keep("key", b"data")
        assert kept.find("key") is None and not list(folder.parent.iterdir())


def test_where_nothing_can_be_written_nothing_is_said(folder):
    folder.write_text("a file where the folder should be")
    kept.keep("key", b"data")
    assert kept.find("key") is None


def test_a_full_disk_leaves_no_half_file(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    kept.keep("first", b"data")
    monkeypatch.setattr(kept.os, "replace", full)
    kept.keep("second", b"data")
    assert kept.find("second") is None and [path.name for path in folder.iterdir()] == ["first"]


def test_what_was_used_longest_ago_goes_first(folder, monkeypatch):
    monkeypatch.setattr(kept, "MOST", 4000)
    data = os.urandom(900)
    for n in range(3):
        kept.keep(str(n), data)
        os.utime(folder / str(n), (time.time() - 9000 + n,) * 2)
    assert kept.find("0") == data  # and so it was used just now
    kept._room.clear()  # as in the next process
    kept.keep("3", data)
    kept._room.clear()
    kept.keep("4", data)
    assert kept.find("1") is None and kept.find("0") == kept.find("4") == data
    for n in range(100):
        kept.keep(f"more {n}", data)
        assert sum(path.stat().st_size for path in folder.iterdir()) <= kept.MOST


def test_many_writers_at_once(folder):
    """A reader sees nothing, or one writer's data whole."""
    texts, seen, done = [bytes([n]) * 100_000 for n in range(4)], set(), threading.Event()

    def write(data):
        for _ in range(25):
            kept.keep("key", data)

    def read():
        while not done.is_set():
            seen.add(kept.find("key"))

    writers, reader = [threading.Thread(target=write, args=(text,)) for text in texts], threading.Thread(target=read)
    reader.start()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    done.set()
    reader.join()
    assert seen <= {None, *texts} and kept.find("key") in texts
    assert [path.name for path in folder.iterdir()] == ["key"]


# The compiler's results


@pytest.fixture
def asked(folder, monkeypatch):
    """The sources that NVRTC was asked to compile, by a process that has compiled nothing yet."""
    sources, ask = [], nvrtc._ask
    monkeypatch.setattr(nvrtc, "_compiled", {})
    monkeypatch.setattr(nvrtc, "_ask", lambda source, *rest: sources.append(source) or ask(source, *rest))
    return sources


@compiles
def test_another_process_need_not_compile(folder, asked):
    program = "import sys; from simt import nvrtc; print(nvrtc.compile_to_ptx(sys.argv[1], ('-DN=1',)), end='')"
    done = subprocess.run(
        [sys.executable, "-c", program, KERNEL], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert nvrtc.compile_to_ptx(KERNEL, ("-DN=1",)) == done.stdout and asked == []
    assert nvrtc.compile_to_cubin(KERNEL, ("-DN=1",))[:4] == b"\x7fELF" and asked == []


@compiles
def test_results_are_the_same_from_the_file(asked):
    def all_three():
        nvrtc._compiled.clear()
        arguments = (KERNEL.replace("x[", "int unused; x[", 1), ("--ptxas-options=-v",))
        return [f(*arguments) for f in (nvrtc.compile_to_ptx, nvrtc.compile_to_cubin, nvrtc.compiler_log)]

    assert all_three() == all_three() and len(asked) == 1


@compiles
def test_whatever_shapes_a_result_is_in_its_key(asked, monkeypatch, tmp_path):
    def compile(source=KERNEL, *options, **how):
        nvrtc._compiled.clear()
        return nvrtc.compile_to_ptx(source, options, **how)

    def times(*args, **how):
        before = len(asked)
        compile(*args, **how)
        return len(asked) - before

    assert (times(), times()) == (1, 0)
    for other in [(KERNEL + " ",), (KERNEL, "-DN=1"), (KERNEL, "-DN=2")]:
        assert (times(*other), times(*other)) == (1, 0)
    for how in ({"arch": "sm_80"}, {"name": "other.cu"}):
        assert (times(**how), times(**how)) == (1, 0)
    (tmp_path / "twice.h").write_text(KERNEL)
    with_header = '#include "twice.h"\n', f"-I{tmp_path}"
    assert (times(*with_header), times(*with_header)) == (1, 0)
    (tmp_path / "twice.h").write_text(KERNEL.replace("2", "3"))
    assert (times(*with_header), times(*with_header)) == (1, 0)
    monkeypatch.setattr(nvrtc, "_installed", lambda: ["another compiler"])
    assert (times(), times()) == (1, 0)


@compiles
def test_in_another_folder_only_what_does_not_depend_on_it_is_shared(asked, monkeypatch, tmp_path):
    (tmp_path / "twice.h").write_text(KERNEL)
    beside, computed = '#include "twice.h"\n', "#define FILE <cuda_fp16.h>\n#include FILE\n" + KERNEL
    nvrtc.compile_to_ptx(KERNEL)
    nvrtc.compile_to_ptx(computed)
    monkeypatch.chdir(tmp_path)
    nvrtc.compile_to_ptx(KERNEL)
    nvrtc.compile_to_ptx(computed)
    nvrtc.compile_to_ptx(beside)
    nvrtc._compiled.clear()
    nvrtc.compile_to_ptx(beside)
    assert asked == [KERNEL, computed, computed, beside, beside]


@compiles
def test_headers_below_the_folder_do_not_tie_a_result_to_it(asked, monkeypatch, tmp_path):
    """As where tests run in the course's folder, and its notebooks in another: the options name its headers in full."""
    for name in ("parts", "notebooks"):
        (tmp_path / name).mkdir()
    (tmp_path / "parts" / "twice.h").write_text("__device__ __noinline__ float twice(float x) { return 2 * x; }\n")
    source = '#include "twice.h"\n' + KERNEL.replace("2", "twice(x[1])")
    for folder in (tmp_path, tmp_path / "notebooks", tmp_path.parent):
        monkeypatch.chdir(folder)
        nvrtc._compiled.clear()
        ptx = nvrtc.compile_to_ptx(source, (f"-I{tmp_path / 'parts'}",))
        assert f'"{tmp_path / "parts" / "twice.h"}"' in ptx
    assert asked == [source]


@compiles
def test_a_source_that_does_not_compile_is_asked_for_again(asked):
    for _ in range(2):
        with pytest.raises(nvrtc.CompileError, match="kernel.cu:1: error"):
            nvrtc.compile_to_ptx(KERNEL.replace("2;", "two;"))
    assert len(asked) == 2
