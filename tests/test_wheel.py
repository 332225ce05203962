"""The package that pip builds: one name in site-packages, whose kernels run, beside another package named kernels."""

import email
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from lab import results, wheel

ROOT = Path(__file__).resolve().parent.parent
NAMES = {"lab", "lab.card", "kernels", "kernels.gemv", "kernels.ssd.trials", "ref", "ref.ssd", "simt"}


# Names


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("from kernels.gemv import gemv\n", "from matmul_to_mamba.kernels.gemv import gemv\n"),
        ("def f():\n    from lab import card\n", "def f():\n    from matmul_to_mamba.lab import card\n"),
        ("import simt\n", "from matmul_to_mamba import simt\n"),
        ("import ref.ssd\n", "from matmul_to_mamba import ref; import matmul_to_mamba.ref.ssd\n"),
        ("import ref.ssd as r, os\n", "import matmul_to_mamba.ref.ssd as r; import os\n"),
        ("é = [f('kernels.gemv'), 'simt']\n", "é = [f('matmul_to_mamba.kernels.gemv'), 'simt']\n"),
        ("f('lab.card', 'lab.card')\n", "f('matmul_to_mamba.lab.card', 'matmul_to_mamba.lab.card')\n"),
        ("import os, kernelsx\nfrom labs import x\n", None),
        ('"""import simt\nfrom lab import card\n"""\n', None),  # a text is no import
        ("x = 'kernels/gemv/gemv.cu', 'kernels.gemv is fast', 'lab.cards'\n", None),
        ("from . import gemv\n", None),
    ],
)
def test_imports_and_full_names_go_below_the_package(text, wanted):
    assert wheel.renamed(text, NAMES) == (wanted or text)


def test_an_import_that_is_not_on_one_line_is_named():
    with pytest.raises(ValueError, match="line 1: expected 'from lab' on one line and found"):
        wheel.renamed("from  lab import x\n", NAMES)


def test_a_module_is_not_named_in_pieces():
    """f"kernels.{topic}" would look for Hugging Face's; f"{__package__}.{topic}" is found in both places."""
    for source in wheel.sources():
        if source.endswith(".py"):
            lines = (ROOT / source).read_text(encoding="utf-8").splitlines()
            found = [line for line in lines if "import_module(f" in line.replace(" ", "")]
            assert not [line for line in found if any(f'f"{room}.' in line for room in wheel.ROOMS)], source


# What is built


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    return folder / wheel.build_wheel(folder)


def test_the_package_stays_below_its_name_and_holds_every_source(built):
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
        record = archive.read("matmul_to_mamba-0.1.0.dist-info/RECORD").decode().splitlines()
    assert {name.split("/")[0] for name in names} == {"matmul_to_mamba", "matmul_to_mamba-0.1.0.dist-info"}
    assert {line.split(",")[0] for line in record} == names
    tracked = subprocess.run(["git", "ls-files", *wheel.ROOMS], cwd=ROOT, capture_output=True, text=True)
    wanted = {name for name in tracked.stdout.split() if (ROOT / name).is_file()} or set(wheel.sources())
    assert {name for name in wanted if name.endswith(wheel.KINDS)} - set(wheel.LEFT_OUT) <= {
        name.removeprefix("matmul_to_mamba/") for name in names
    }
    wanted -= {"simt/LICENSE", "simt/pyproject.toml"}  # of the machine as a package of its own
    no_use = {".md", ".png", ".safetensors"}  # to a kernel
    assert {Path(name).suffix for name in wanted} <= {*wheel.KINDS, *no_use}


def test_what_it_needs_is_what_pyproject_says(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = wheel.prepare_metadata_for_build_wheel(tmp_path)
    found = email.message_from_string((tmp_path / folder / "METADATA").read_text())
    assert (found["Name"], found["Version"]) == (project["name"], project["version"])
    needed = found.get_all("Requires-Dist")
    assert [r for r in needed if "extra ==" not in r] == project["dependencies"]
    assert found.get_all("Provides-Extra") == list(project["optional-dependencies"])
    assert 'pytest; extra == "test"' in needed
    assert wheel.packing.for_extra("a>1; os_name == 'x'", "e") == "a>1; (os_name == 'x') and extra == \"e\""
    assert found.get_payload() == (ROOT / "README.md").read_text()
    from packaging.requirements import Requirement

    assert all(Requirement(r) for r in needed)


def test_the_course_itself_is_not_installed_where_it_is_used_from_its_folder(tmp_path):
    with zipfile.ZipFile(tmp_path / wheel.build_editable(tmp_path)) as archive:
        assert {name.split("/")[0] for name in archive.namelist()} == {"matmul_to_mamba-0.1.0.dist-info"}


def test_an_archive_of_the_sources_builds_the_same_wheel(tmp_path, built):
    with tarfile.open(tmp_path / wheel.build_sdist(tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    spec = importlib.util.spec_from_file_location("unpacked", tmp_path / "matmul_to_mamba-0.1.0" / "lab" / "wheel.py")
    unpacked = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unpacked)
    assert (tmp_path / unpacked.build_wheel(tmp_path)).read_bytes() == built.read_bytes()


# Beside another package named kernels


@pytest.fixture(scope="module")
def namesake(tmp_path_factory):
    """A folder with a package as Hugging Face's is, as far as its names go."""
    folder = tmp_path_factory.mktemp("site") / "kernels"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from kernels.layer import LayerRepository\nfrom kernels._versions import __version__\n"
        "def get_kernel(name):\n    return LayerRepository, name\n"
    )
    (folder / "layer.py").write_text("class LayerRepository: pass\n")
    (folder / "_versions.py").write_text("__version__ = '9.9'\n")
    return folder.parent


def run(script, *path, **env):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **env}
    done = subprocess.run([sys.executable, "-c", script], cwd=path[-1], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


INSTALLED = """
import json, sys
import kernels
assert kernels.get_kernel("a")[1] == "a" and not hasattr(kernels, "gemv") and kernels.__version__ == "9.9"
import torch
from matmul_to_mamba.kernels.gemv import gemv
from matmul_to_mamba.lab import compile_c, compiler, cuda, results
W, x = torch.randn(5, 33), torch.randn(33)
assert torch.allclose(gemv(W, x), W @ x, atol=1e-5)
assert compile_c("int f(void) { return 5; }").f() == 5
import matmul_to_mamba.kernels.ssd.trials  # which looks a module up by its full name
strange = [name for name in sys.modules if name.split(".")[0] in ("lab", "simt", "ref", "models")]
ours = [name for name in sys.modules if name.startswith("kernels.")]
stored = {str(path.relative_to(results.ROOT)): results.Stored(path).changed() for path in results.paths()}
print(json.dumps([strange, ours, stored, str(compiler.build_folder())]))
"""


def test_installed_it_runs_and_the_other_kernels_is_untouched(tmp_path, namesake):
    pytest.importorskip("pip")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "-q", "--target"]
    done = subprocess.run([*command, site, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in site.iterdir()) == ["matmul_to_mamba", "matmul_to_mamba-0.1.0.dist-info"]
    kept = os.environ.get("SIMT_KEEP_IN", "")
    printed = run(INSTALLED, site, namesake, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"), SIMT_KEEP_IN=kept)
    strange, ours, stored, folder = json.loads(printed.splitlines()[-1])
    assert strange == [] and sorted(ours) == ["kernels._versions", "kernels.layer"]
    assert stored == {str(path.relative_to(ROOT)): results.Stored(path).changed() for path in results.paths()}
    assert folder == str(tmp_path / "cache" / "matmul_to_mamba")  # and nothing is written beside the package
    assert not list(site.rglob(".build"))


IN_ITS_FOLDER = """
import importlib.util, sys
import kernels
assert not hasattr(kernels, "__wrapped__") and not hasattr(kernels, "benching")
from kernels import device  # a folder of ours
assert "kernels.layer" not in sys.modules  # nothing of the other's is run unasked
from kernels import get_kernel
import kernels.layer
assert get_kernel("a") == (kernels.layer.LayerRepository, "a") and kernels.__version__ == "9.9"
assert not hasattr(kernels, "neither") and importlib.util.find_spec("kernels.neither") is None
print(kernels.__file__, len(kernels.__path__))
"""


def test_in_its_folder_names_of_the_other_kernels_are_found_too(tmp_path, namesake):
    assert run(IN_ITS_FOLDER, ROOT, namesake, tmp_path).split() == [str(ROOT / "kernels" / "__init__.py"), "2"]


def test_a_namesake_that_fails_says_so_each_time_and_another_copy_of_the_course_is_none(tmp_path):
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text("raise ImportError('broken')\n")
    script = "import kernels\nfor _ in 0, 1:\n    try: kernels.x\n    except ImportError as e: print(e)\n"
    assert run(script, ROOT, site, tmp_path).split() == ["broken", "broken"]
    (site / "kernels" / "compiling.py").touch()
    assert run("import kernels; print(hasattr(kernels, 'x'))", ROOT, site, tmp_path).split() == ["False"]
