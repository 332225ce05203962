"""The house: its files agree with each other, and setting up fails in one clear sentence."""

import ast
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import yaml

from lab import bootstrap

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DIRECT = PROJECT["dependencies"] + EXTRAS["course"] + EXTRAS["models"] + EXTRAS["test"]


def name_of(requirement):
    """pytest_xdist>=3 -> pytest-xdist: names are compared without case, and with - for _ and ."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def pins():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


# Files that must agree


def test_no_dependency_is_named_twice():
    names = [name_of(r) for r in DIRECT]
    assert len(names) == len(set(names))


def test_environment_defers_to_pyproject():
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = [d for d in listed if isinstance(d, str)]
    (by_pip,) = [d["pip"] for d in listed if isinstance(d, dict)]
    (python,) = [d for d in conda if name_of(d) == "python"]
    assert python.removeprefix("python").split(",")[0] == PROJECT["requires-python"]
    assert by_pip == ["-c constraints.txt", "-e .[course,models,test]"]
    assert not {name_of(d) for d in conda} & {name_of(r) for r in DIRECT}


def test_every_direct_dependency_is_pinned_exactly_and_nothing_of_cuda_is():
    names = [name_of(p) for p in pins()]
    assert len(names) == len(set(names))
    of_cuda = ("nvidia-", "cuda-")
    assert {name_of(r) for r in DIRECT if not name_of(r).startswith(of_cuda)} <= set(names)
    assert not [n for n in names if n.startswith(of_cuda)]
    assert [v for v in pins().values() if not re.fullmatch(r"[0-9][\w.]*", v)] == []  # nor a local +cpu


def test_pins_allow_what_pyproject_asks_for():
    from packaging.requirements import Requirement

    pinned = {name_of(p): v for p, v in pins().items()}
    for requirement in map(Requirement, DIRECT):
        if requirement.name.startswith(("nvidia-", "cuda-")):
            continue  # torch decides
        assert requirement.specifier.contains(pinned[name_of(requirement.name)]), requirement


def test_python_versions_agree():
    assert PROJECT["requires-python"] == ">={}.{}".format(*bootstrap.NEEDED)
    assert f"sys.version_info < {bootstrap.NEEDED}" in (ROOT / "Makefile").read_text()


def test_help_lists_every_target():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {"lab", "test", "bench"} <= set(targets)
    assert set(re.findall(r"^make ([\w-]+)", said, re.MULTILINE)) == set(targets) - {"help"}
    assert subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True).stdout == said


def test_ci_does_nothing_but_make_test():
    run = ROOT / ".ci" / "run"
    lines = [line for line in run.read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ['cd "$(dirname "$0")/.." && exec make test']
    assert run.stat().st_mode & stat.S_IXUSR


def test_ruff_finds_nothing():
    for command in (["check", "--output-format=concise"], ["format", "--check"]):
        run = subprocess.run([sys.executable, "-m", "ruff", *command], cwd=ROOT, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr


def test_gpu_tests_and_benchmarks_need_no_jupyter():
    """A machine with a GPU often has torch, Triton and pytest, and nothing of Jupyter and no matplotlib."""
    files = sorted(map(str, (ROOT / "tests").glob("*_gpu.py")))
    assert files
    script = """
import importlib, sys
class Missing:  # these packages are as if they were not installed
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("IPython", "ipywidgets", "jupyterlab", "matplotlib", "nbclient", "nbformat", "nbval"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import pytest
from kernels import bench
for topic in bench.GPU_TOPICS:
    importlib.import_module(f"kernels.{topic}.bench")
sys.exit(pytest.main(["-q", "--collect-only", "-p", "no:nbval", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
    done = subprocess.run([sys.executable, "-c", script, *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


# Setting up: whatever is wrong ends in one sentence


def assert_one_sentence(run, *parts):
    """The last line on stderr says what was expected and found; there is no traceback."""
    assert run.returncode not in (0, 2), run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    last = run.stderr.strip().splitlines()[-1]
    assert re.match(r"make test:? expected .* found .*: ", last), run.stderr
    for part in parts:
        assert part in last


@pytest.fixture
def copy(tmp_path):
    """A course with nothing but what setting up needs, where no test can harm the real .venv."""
    folder = tmp_path / "with space é"
    (folder / "lab").mkdir(parents=True)
    shutil.copy(ROOT / "lab" / "bootstrap.py", folder / "lab")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def cc(copy):
    """A C compiler that does as the test tells it."""

    def write(script):
        path = copy / "my cc"
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)
        return f"'{path}'"

    return write


def set_up(copy, python=sys.executable, **env):
    command = [python, "lab/bootstrap.py", "--for", "test"]
    return subprocess.run(command, cwd=copy, env={**os.environ, **env}, capture_output=True, text=True)


# Kernels that a reader can hold in mind

TOPICS = ("gemv", "fusion", "lowbit", "attention", "kv_cache", "ssd", "ssd_backward", "llm", "mamba2", "paged")
TOPICS += ("latent",)
CUDA = {topic: sorted((ROOT / "kernels" / topic).glob("*.cu*")) for topic in (*TOPICS, "device")}


def code_of(path):
    """Its text, comments aside, line by line as it was."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", lambda comment: "\n" * comment[0].count("\n"), path.read_text(), flags=re.S)


def functions_of(code):
    """(name, lines) of each function on the device that has a body, from its head to its last bracket."""
    code = re.sub(r"__launch_bounds__\(.*?\)", "", code)
    initialised = r"(?:[^;{}]|\{\s*[^;{}\s][^;{}]*\})*"  # arguments, and members by their brackets
    for head in re.finditer(rf"__(?:global|device)__[^;{{}}]*?(\w+)(?:<[^<>]*>)?\({initialised}\{{", code):
        depth, at = 1, head.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(code[at], 0)
            at += 1
        yield head[1], code[head.start() : at].count("\n") + 1


def bodies(code):
    """Where functions on the device begin: not variables, nor what is only declared."""
    return re.findall(r"__(?:global|device)__(?![^{}]*;|[^{}()]*=)", code)


@pytest.mark.parametrize("topic", CUDA)
def test_sources_and_functions_are_short(topic):
    for path in CUDA[topic]:
        lines = path.read_text().splitlines()
        assert len(lines) <= 300, path
        assert max(map(len, lines)) <= 120, path
        assert all(length <= 90 for _, length in functions_of(code_of(path))), path


def test_functions_are_counted_whole():
    found = dict(functions_of(code_of(ROOT / "kernels" / "gemv" / "ring.cu")))
    assert found["gemv"] > 40 and {"prefetch", "take", "row_sums"} <= set(found)
    heads = "__device__ int n, m[] = {1};\n__device__ int f(int);\n__device__ int f<1>(int) {\n}\n__global__ void g(){}"
    assert list(functions_of(heads)) == [("f", 2), ("g", 1)] and len(bodies(heads)) == 2


@pytest.mark.parametrize("topic", CUDA)
def test_no_function_is_left_out(topic):
    for path in CUDA[topic]:
        assert len(list(functions_of(code_of(path)))) == len(bodies(code_of(path))), path


@pytest.mark.parametrize("topic", TOPICS)
def test_device_headers_are_shared_and_switches_few(topic):
    assert any('#include "../device/' in path.read_text() for path in CUDA[topic])
    for path in CUDA[topic]:
        defaults = re.findall(r"#ifndef \w+\n(.*?)#endif", path.read_text(), flags=re.S)
        assert len(re.findall(r"#define", "".join(defaults))) <= 8, path


def test_no_two_topics_have_six_lines_alike():
    where = {}
    for topic in TOPICS:
        for path in CUDA[topic]:
            lines = [" ".join(line.split()) for line in code_of(path).splitlines()]
            lines = [line for line in lines if line and not line.startswith("#")]
            for i in range(len(lines) - 5):
                where.setdefault(tuple(lines[i : i + 6]), set()).add(topic)
    assert [six for six, topics in where.items() if len(topics) > 1] == []


def test_sources_that_a_measurement_names_are_there():
    """What it rests on is looked up when it is stored, after minutes on a card."""
    wanted = re.compile(r'"((?:kernels|lab|models|ref)/[\w./]+\.(?:cu|cuh|py|c|h))"')
    files = [path for room in ("kernels", "models") for path in (ROOT / room).rglob("*.py")]
    named = {(path.name, name) for path in files for name in wanted.findall(path.read_text())}
    assert len(named) > 100
    assert [pair for pair in sorted(named) if not (ROOT / pair[1]).exists()] == []


def test_bootstrap_can_be_read_by_old_pythons():
    ast.parse((ROOT / "lab" / "bootstrap.py").read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("version, bits", [((3, 10, 13), 64), ((3, 6, 0), 64), ((2, 7, 18), 64), ((3, 12, 1), 32)])
def test_wrong_python(version, bits):
    with pytest.raises(bootstrap.Stop, match=r"expected a 64-bit Python 3\.11 or newer and found a .*PYTHON="):
        bootstrap.check_python(version, bits)
    bootstrap.check_python((3, 11, 0), 64)


def make_test(copy, **env):
    env = {**os.environ, "MAKEFLAGS": "", "CHAPTER": "", **env}  # not those of a `make test` that runs these tests
    return subprocess.run(["make", "test"], cwd=copy, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def test_make_finds_no_python(copy):
    old = copy / "old python"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.8.18\n')
    old.chmod(0o755)
    run = make_test(copy, PYTHON=str(old))
    assert run.returncode == 2
    assert f"make test expected Python 3.11 or newer and found {old} (Python 3.8.18): install one" in run.stderr


def test_make_passes_over_a_python_that_does_not_run(copy):
    """As a pyenv shim: it is there, and yet there is no such Python."""
    shims = copy / "shims"
    shims.mkdir()
    (shims / "python3").write_text("#!/bin/sh\nexit 127\n")
    (shims / "python3.13").write_text('#!/bin/sh\necho used python3.13 "$@"\n')
    for shim in shims.iterdir():
        shim.chmod(0o755)
    run = make_test(copy, PATH=f"{shims}:{os.environ['PATH']}", PYTHON="")
    assert "used python3.13 lab/bootstrap.py --for test" in run.stdout


def test_no_compiler(copy, tmp_path):
    (tmp_path / "empty").mkdir()
    assert_one_sentence(set_up(copy, PATH=str(tmp_path / "empty"), CC=""), "looked for cc, gcc and clang", "install")
    assert_one_sentence(set_up(copy, CC="nonexistent-cc"), "CC=nonexistent-cc is not there")
    assert_one_sentence(set_up(copy, CC="'unclosed"), "unset CC")
    assert not (copy / ".venv").exists()


def test_a_compiler_that_does_not_work_shows_its_message(copy, cc):
    run = set_up(copy, CC=cc("echo 'stdlib.h: No such file' >&2; exit 1"))
    assert "stdlib.h: No such file" in run.stderr
    assert_one_sentence(run, "cannot build a small library", "build-essential")
    assert_one_sentence(set_up(copy, CC=cc("exit 0")), "cannot build a small library")  # and built nothing
    (copy / "my cc").write_text("neither a script nor a program")
    assert_one_sentence(set_up(copy, CC=f"'{copy}/my cc'"), "cannot build a small library")
    assert not (copy / ".venv").exists()


def test_a_broken_compiler_is_passed_over_where_another_works(tmp_path):
    for name, script in [("cc", "exit 1"), ("gcc", 'while [ "$1" != -o ]; do shift; done; echo >"$2"')]:
        (tmp_path / name).write_text("#!/bin/sh\n" + script)
        (tmp_path / name).chmod(0o755)
    assert bootstrap.check_compiler({"PATH": str(tmp_path)}) == ["gcc"]


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(bootstrap.Stop, match="expected a folder that can be written and found"):
        bootstrap.check_writable(str(tmp_path / "not there"))
    bootstrap.check_writable(str(tmp_path))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(copy):
    copy.chmod(0o555)
    try:
        assert_one_sentence(set_up(copy), "can be written")
    finally:
        copy.chmod(0o755)


def test_no_disk_space():
    with pytest.raises(bootstrap.Stop, match=r"expected 3 GB .* found 2\.9 GB at /x: make room"):
        bootstrap.check_disk("/x", bootstrap.SPACE["other"], free=lambda folder: 2_900_000_000)
    bootstrap.check_disk("/x", bootstrap.SPACE["other"], free=lambda folder: 3 * bootstrap.GB)
    assert bootstrap.SPACE["linux"] > 8 * bootstrap.GB


def test_no_venv_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(bootstrap.Stop, match=r"ensurepip modules and found .*apt install python3\.\d+-venv"):
        bootstrap.check_venv_module()


def test_a_project_file_that_is_gone(copy):
    (copy / "constraints.txt").unlink()
    with pytest.raises(bootstrap.Stop, match="expected the file constraints.txt"):
        bootstrap.wanted(str(copy))


# Setting up: what stands already


@pytest.fixture
def pipless(copy, monkeypatch):
    """bootstrap.complete() on a copy, where pip only counts how often it was asked (and is not there itself,
    which saves three seconds for each .venv)."""
    asked = []

    def make_venv(root):
        venv.create(Path(root, bootstrap.VENV), clear=True, symlinks=True)
        bootstrap.write_stamp(root, None)

    monkeypatch.setattr(bootstrap, "make_venv", make_venv)
    monkeypatch.setattr(bootstrap, "pip", lambda root, *args: asked.append(args))
    monkeypatch.setattr(bootstrap, "check_disk", lambda root, needed: None)

    def complete():
        asked.clear()
        bootstrap.complete(str(copy))
        return len(asked)

    return complete


def test_the_second_time_there_is_nothing_to_do_until_something_changes(pipless, copy, capsys):
    assert pipless() == 1
    assert pipless() == 0

    with open(copy / "constraints.txt", "a") as f:
        f.write("# another\n")
    assert pipless() == 1 and pipless() == 0

    (copy / ".venv" / "mark").touch()
    capsys.readouterr()
    for damage, reason in [
        (lambda: (copy / ".venv" / "course.json").write_text("{"), "not made by this command"),
        (lambda: (copy / ".venv" / "course.json").unlink(), "not made by this command"),
        (lambda: (copy / ".venv" / "bin" / "python").unlink(), "its Python is gone"),
    ]:
        damage()
        assert pipless() == 1 and pipless() == 0
        assert reason in capsys.readouterr().out
    assert not (copy / ".venv" / "mark").exists()  # made anew, not patched

    moved = copy.with_name("moved")
    copy.rename(moved)
    assert "in another place" in bootstrap.why_anew(str(moved))


def test_the_site_gets_its_own_packages_and_no_torch(pipless, copy, monkeypatch):
    asked = []
    (copy / "book").mkdir()
    shutil.copy(ROOT / bootstrap.SITE_PINS, copy / "book")
    monkeypatch.setattr(bootstrap, "VENV", ".venv-site")
    monkeypatch.setattr(bootstrap, "pip", lambda root, *args: asked.append(args))
    for groups, times in [(["site"], 1), (["site"], 1), (["site", "site-test"], 2), (["site"], 2)]:
        bootstrap.complete_site(str(copy), groups)
        assert len(asked) == times
    first, both = asked
    assert {"sphinx", "myst-parser", bootstrap.SITE_PINS, "constraints.txt"} <= set(first) and "playwright" in both
    assert not [a for a in (*first, *both) if "torch" in a or a == "-e"]
    with open(copy / bootstrap.SITE_PINS, "a") as f:
        f.write("# another\n")
    bootstrap.complete_site(str(copy), ["site"])
    assert len(asked) == 3 and not (copy / ".venv").exists()


def test_a_venv_that_something_else_made_is_left_alone(pipless, copy):
    venv.create(copy / ".venv", symlinks=True)
    (site,) = (copy / ".venv" / "lib").glob("python*/site-packages")
    (site / "numpy").mkdir()
    with pytest.raises(bootstrap.Stop, match="found one that something else made .*: move it away or remove it"):
        pipless()
    assert (site / "numpy").exists()
    (site / "matmul_to_mamba-0.1.0.dist-info").mkdir()  # ours, though its stamp is gone
    assert pipless() == 1
    shutil.rmtree(copy / ".venv")
    (copy / ".venv").write_text("a file")
    with pytest.raises(bootstrap.Stop, match="something else made"):
        pipless()
    (copy / ".venv").unlink()
    (copy / ".venv").mkdir()  # empty
    assert pipless() == 1


def test_a_venv_of_another_python_is_made_anew(pipless, copy, monkeypatch):
    pipless()
    stamp = bootstrap.read_stamp(str(copy))
    monkeypatch.setattr(bootstrap, "read_stamp", lambda root: dict(stamp, python=[3, 9]))
    assert "another Python" in bootstrap.why_anew(str(copy))


def test_latest_has_a_venv_of_its_own_and_asks_for_the_newest_each_time(pipless, copy, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(bootstrap, "pip", lambda root, *args: asked.append(args))
    monkeypatch.setattr(bootstrap, "installed", lambda root: dict(pins(), torch="99.1"))
    monkeypatch.setattr(bootstrap, "ROOT", str(copy))
    monkeypatch.setattr(bootstrap, "VENV", ".venv")  # put back after the test
    for _ in range(2):
        assert bootstrap.main(["--for", "test-latest", "--latest"]) == 0
    assert len(asked) == 2 and all(set(bootstrap.NEWEST) < set(args) and "-c" not in args for args in asked)
    assert f"other than in constraints.txt: torch 99.1 (pinned: {pins()['torch']})" in capsys.readouterr().out
    assert (copy / ".venv-latest").exists() and not (copy / ".venv").exists()


def test_a_killed_install_is_taken_up_again(copy, pipless, monkeypatch):
    pipless()
    before = (copy / "constraints.txt").read_text()
    (copy / "constraints.txt").write_text("")
    (site,) = (copy / ".venv" / "lib").glob("python*/site-packages")
    for name, files in (("half-1.dist-info", ["METADATA"]), ("whole-1.dist-info", ["METADATA", "RECORD"])):
        (site / name).mkdir()
        for file in files:
            (site / name / file).touch()

    def killed(root, *args):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(bootstrap, "pip", killed)
        m.setattr(bootstrap, "ROOT", str(copy))
        assert bootstrap.main(["--for", "test"]) == 130
    assert (site / "whole-1.dist-info").exists()  # .venv itself was kept
    assert not (site / "half-1.dist-info").exists()  # pip would have taken this for installed
    (copy / "constraints.txt").write_text(before)  # as it was at the last whole install, which .venv is no more
    assert pipless() == 1 and pipless() == 0


def test_pip_that_fails_is_told_in_one_sentence_after_its_own(copy):
    with open(copy / "constraints.txt", "a") as f:
        f.write("this is not a constraint\n")
    run = set_up(copy, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert "ERROR" in run.stderr
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("make test: expected pip to install") and "the same command again" in last
    assert run.returncode == 1 and "Traceback" not in run.stderr


@pytest.mark.skipif(os.name == "nt", reason="no file locks")
def test_two_at_once_wait_for_each_other(copy):
    child = (
        "import sys, time; from lab import bootstrap\n"
        "with bootstrap.only_one(sys.argv[1]):\n"
        "    open(sys.argv[2], 'a').write('in '); time.sleep(0.3); open(sys.argv[2], 'a').write('out ')\n"
    )
    log = copy / "log"
    command = [sys.executable, "-c", child, str(copy), str(log)]
    runs = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [run.wait(60) for run in runs] == [0, 0, 0]
    assert log.read_text() == "in out " * 3
