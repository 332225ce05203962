"""The suite itself: in which order and in how many processes it runs, and which tests belong to a chapter."""

import os
import subprocess
import sys
from types import SimpleNamespace

import assembled
import chapters
import conftest
import processes
import pytest
from chapters import HOUSE, ROOT, TESTS, belongs, files_of

TEST_FILES = sorted((ROOT / "tests").glob("test_*.py"))
GB = 2**30


# Chapters


@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: path.stem)
def test_every_file_belongs_to_a_chapter_or_to_the_house(path):
    owners = [number for number, patterns in TESTS.items() if belongs(path, patterns)]
    assert bool(owners) != belongs(path, HOUSE), f"enter {path.name} in tests/chapters.py, once: chapters {owners}"


def test_every_name_stands_for_a_file():
    for name in " ".join([HOUSE, *TESTS.values()]).split():
        assert any(belongs(path, name) for path in TEST_FILES), f"tests/chapters.py: no file is test_{name}.py"


def test_every_chapter_has_its_notebooks_and_the_tests_of_its_exercises():
    notebooks = {path.stem.partition("_")[::2] for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")}
    assert {number for number, _ in notebooks} == set(TESTS)
    for number, topic in notebooks:
        files = files_of(number)
        assert {f"{folder}/{number}_{topic}.ipynb" for folder in chapters.FOLDERS} <= set(files)
        assert f"tests/test_exercises_{topic}.py" in files
        assert all((ROOT / file).is_file() for file in files) and len(set(files)) == len(files)


def make_test(chapter, target="test"):
    """`make test CHAPTER=...` as far as pytest: Python only says what it is called with."""
    folder = {"cwd": ROOT, "capture_output": True, "text": True}
    command = ["make", "-n", target, f"CHAPTER={chapter}", "ARGS="]  # whatever these tests themselves were called with
    script = subprocess.run(command, **folder, env={**os.environ, "MAKEFLAGS": ""}, check=True).stdout
    (line,) = [line for line in script.splitlines() if "tests/chapters.py" in line]
    python = ".venv/bin/python" if target == "test" else ".venv-latest/bin/python"
    before, between, after = line.split(python)
    line = f"{before}'{sys.executable}'{between}echo{after}"
    return subprocess.run(["sh", "-c", line], **folder, env={**os.environ, "CHAPTER": chapter})


@pytest.mark.parametrize("chapter", ["07", "7"])
def test_make_test_of_a_chapter(chapter):
    said = make_test(chapter)
    assert said.returncode == 0 and said.stderr == ""
    assert said.stdout.split("--nbval-cell-timeout=300 ")[1].split() == files_of("07")
    assert "notebooks/07_attention_mix.ipynb" in said.stdout and "test_simt" not in said.stdout


@pytest.mark.parametrize("target", ["test", "test-latest"])
def test_make_test_of_all_names_no_file(target):
    said = make_test("", target)
    assert said.returncode == 0 and said.stdout.strip().endswith("--nbval-cell-timeout=300")


@pytest.mark.parametrize(
    "chapter", ["22", "0", "99", "seven", "07 08", "-7", "7.0", "'", '"', "`echo 07`", "*", "$(pwd)"]
)
def test_what_is_no_chapter_gets_a_sentence(chapter):
    said = make_test(chapter)
    assert said.returncode == 1 and said.stdout == ""
    assert said.stderr.startswith("make test expected CHAPTER to be one of 01, 02, 03, ")
    assert f"and found {chapter!r}: name one of them" in said.stderr and said.stderr.count("\n") == 1


# The order


def test_files_that_begin_first_are_there():
    order = conftest.in_order()
    files = [file for _, file in order]
    assert files and [file for file in files if not (ROOT / file).is_file()] == []
    assert len(set(files)) == len(files) and order == sorted(order, key=lambda entry: -entry[0])


def test_the_order_is_stored_only_of_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.setattr(conftest, "ORDER", tmp_path / "order.txt")
    order = conftest.Order()
    for nodeid, seconds in [
        ("tests/a.py::one", 2.0),
        ("b.ipynb::Cell 1", 9.0),
        ("tests/a.py::two", 8.4),
        ("c.py::x", 1),
    ]:
        order.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, duration=seconds))
    order.pytest_sessionfinish(exitstatus=1)
    assert not conftest.ORDER.exists()
    order.pytest_sessionfinish(exitstatus=0)
    assert conftest.in_order() == [(10, "tests/a.py"), (9, "b.ipynb")]

    items = [SimpleNamespace(nodeid=f"{file}::x") for file in ("c.py", "b.ipynb", "d.py", "tests/a.py")]
    conftest.pytest_collection_modifyitems(items)
    assert [item.nodeid[:4] for item in items] == ["test", "b.ip", "c.py", "d.py"]


# The processes


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A system of 64 cores with as much memory as a test says, and control groups that allow less."""
    monkeypatch.setattr(processes.machine, "core_count", lambda: 64)
    monkeypatch.setattr(processes, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(processes, "CGROUPS", tmp_path)

    def has(available=None):
        if available is not None:
            (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {int(available * 2**20)} kB\nX: 1\n")
        return processes.count()

    return has


def test_no_more_processes_than_cores_memory_and_sense_allow(system, monkeypatch):
    assert system(available=500) == processes.MOST
    assert system(available=10) == 10 * GB // processes.NEEDED
    assert system(available=0.5) == 1
    monkeypatch.setattr(processes.machine, "core_count", lambda: 3)
    assert system(available=10) == 3


def test_a_container_is_allowed_less(tmp_path, system):
    def group(folder, names, limit, used, cached, word):
        (tmp_path / folder).mkdir(exist_ok=True)
        for name, text in zip(names, (limit, used, f"anon 7\n{word} {int(cached)}\nactive_file 1\n")):
            (tmp_path / folder / name).write_text(f"{text}\n")

    two = ("memory.max", "memory.current", "memory.stat")
    one = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    for folder, names, word in ((".", two, "inactive_file"), ("memory", one, "total_inactive_file")):
        group(folder, names, "max", 5 * GB, 0, word)
        assert system(available=500) == processes.MOST
        group(folder, names, 12 * GB, 7 * GB, 1 * GB, word)  # files that were read may be dropped
        assert system(available=500) == 6 * GB // processes.NEEDED
        assert system(available=3) == 1
        group(folder, names, 12 * GB, 12 * GB, 0, word)
        assert system(available=500) == 1
        group(folder, names, 2**63 - 4096, 7 * GB, 0, word)  # version 1 says so where there is no limit
        assert system(available=500) == processes.MOST
        (tmp_path / folder / names[2]).write_text("nothing that is known")
        assert system(available=500) == processes.MOST


def test_where_there_is_no_proc_half_of_the_memory_counts(system, monkeypatch):
    monkeypatch.setattr(processes.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 * GB // 4096}.get)
    assert system() == 8 * GB // processes.NEEDED


def test_pytest_asks_for_it(monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 5)
    assert conftest.pytest_xdist_auto_num_workers() == 5
    assert "-n auto" in (ROOT / "Makefile").read_text()


# What the assembler has taken

TAKEN = 'extern "C" __global__ void k(int* x) { *x = 1; }'
REFUSED = TAKEN.replace("*x = 1;", 'asm volatile("wgmma.fence.sync.aligned;");')  # which asks for sm_90a


@pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")
def test_what_the_assembler_is_not_known_to_take_is_assembled(tmp_path, monkeypatch):
    from simt import CompileError, nvrtc

    monkeypatch.setattr(assembled, "STORED", tmp_path / "assembled.txt")
    assembled.STORED.write_text("NVRTC 0.0\ntest_simt_hopper 0123\n")
    assert assembled.read() == {}  # another compiler's
    keys = set()
    compiled = assembled.compile_with(nvrtc.compile_to_ptx, set(), keys)
    with pytest.raises(CompileError, match="ptxas"):
        compiled(REFUSED)
    assert ".entry k(" in compiled(TAKEN) and len(keys) == 1
    for file in assembled.FILES[:2]:
        assembled.write({file: keys})
    assembled.write({assembled.FILES[0]: set()})
    assert assembled.read() == {assembled.FILES[1]: keys}

    asked = []
    compiled = assembled.compile_with(lambda *given: asked.append(given), keys, set())
    for given in [(TAKEN,), (TAKEN + " ",), (TAKEN, ("-DN=1",)), (TAKEN, (), "sm_80")]:
        compiled(*given)
    assert [given[-1] for given in asked] == [False, True, True, True]
