"""The SIMT machine as a package of its own: what it needs, what is in it, and what its README shows."""

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import simt
from lab import wheel

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "simt"
PROJECT = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
COURSE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
packing = wheel.by_path("simt/packing.py")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which pip has installed the package, without what it needs."""
    pytest.importorskip("pip")
    site = tmp_path_factory.mktemp("site")
    before = sorted(FOLDER.rglob("*"))
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "-q", "--target"]
    done = subprocess.run([*command, site, "./simt"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    left = {path for path in FOLDER.rglob("*") if "__pycache__" not in path.parts} - {*before}
    assert left == set()  # building leaves nothing in the course's folder
    return site


def run(script, site, *arguments):
    """What a script prints where there is the installed package, and torch and the rest of the course are not."""
    blocked = ("torch", "triton", "pytest", *(room for room in wheel.ROOMS if room != "simt"))
    script = f"import sys\nsys.modules.update(dict.fromkeys({blocked}))\nsys.path.insert(0, {str(site)!r})\n{script}"
    done = subprocess.run([sys.executable, "-I", "-c", script, *arguments], cwd=site, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_every_module_and_every_kernel_and_no_other_name(site):
    names = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert {name.split("/")[0] for name in names} == {"simt", f"simt-{PROJECT['version']}.dist-info"}
    here = [path for path in FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    wanted = {path.relative_to(ROOT).as_posix() for path in here if path.suffix in packing.KINDS}
    assert {name for name in names if name.startswith("simt/")} == wanted - {"simt/packing.py"}
    beside = {path.name for path in here if path.suffix not in packing.KINDS}
    assert beside == {"README.md", "LICENSE", "pyproject.toml"}  # which the wheel holds as metadata


def test_it_needs_numpy_and_the_compiler_alone(site):
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in PROJECT["dependencies"]}
    wheels = {f"nvidia-cuda-{part}" for part in ("nvrtc", "runtime", "crt", "cccl")}
    assert names == {"numpy", "cuda-bindings", *wheels}
    assert set(PROJECT["dependencies"]) <= set(COURSE["dependencies"])  # in the same versions
    said = next(site.glob("simt-*")).joinpath("METADATA").read_text()
    assert re.findall(r"^Requires-Dist: (.*)", said, re.M) == PROJECT["dependencies"]
    assert PROJECT["version"] == simt.__version__ and PROJECT["requires-python"] == COURSE["requires-python"]
    assert PROJECT["license"] == COURSE["license"]
    assert (FOLDER / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_no_module_of_it_imports_anything_else():
    allowed = {*sys.stdlib_module_names, "numpy", "cuda", "nvidia", "simt"}
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, path


def test_the_readmes_three_examples_run_where_it_is_installed(site):
    section = (FOLDER / "README.md").read_text().split("## Three examples")[1].split("\n## ")[0]
    examples = re.findall(r"```python\n(.*?)```", section, re.S)
    assert len(examples) == 3
    printed = run("\n".join([*examples, "print(simt.__file__)"]), site)
    assert "\n3968\n" in printed and "__syncthreads" in printed
    assert printed.splitlines()[-1] == str(site / "simt" / "__init__.py")


def test_an_archive_of_the_sources_builds_the_same_wheel(tmp_path):
    with tarfile.open(tmp_path / packing.build_sdist(tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = wheel.by_path(tmp_path / f"simt-{PROJECT['version']}" / "packing.py")
    (tmp_path / "again").mkdir()
    first, again = packing.build_wheel(tmp_path), unpacked.build_wheel(tmp_path / "again")
    assert (tmp_path / first).read_bytes() == (tmp_path / "again" / again).read_bytes()
    with zipfile.ZipFile(tmp_path / first) as archive:
        assert archive.testzip() is None and "simt/__init__.py" in archive.namelist()
