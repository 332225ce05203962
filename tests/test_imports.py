"""The house has floors: who imports whom, read from the import statements, those within functions too."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What each floor may import of the course. Within a floor, and in simt within its rooms, there are no circles either.
FLOORS = {
    "ref": (), "simt": (), "lab": ("simt",), "kernels": ("lab", "simt", "ref"), "models": ("kernels", "lab", "ref"),
    "book": ("lab",),
}  # fmt: skip
PACKAGES = {"ref": {"numpy"}, "simt": {"numpy", "cuda", "nvidia"}}  # what else; the others may use anything
ROOMS = ["ptx", "arithmetic", "memory", "hopper", "execute", "translate"]  # of simt, each on top of those before it
SHARED = {"simt.errors", "simt.report"}  # which all rooms may import


def modules(root, floors):
    """{name: path} of every module."""
    paths = [path for floor in floors for path in (root / floor).rglob("*.py")]
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imported(path, known):
    """The names of the modules that a file imports: of `from package import name`, the module of that name if there
    is one, else the package."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: the course names its modules in full"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module


def graph(root=ROOT, floors=FLOORS):
    known = modules(root, floors)
    return {name: set(imported(path, known)) - {name} for name, path in known.items()}


def circle(imports):
    """Modules that import each other, in order, the first again at the end; [] if there are none."""
    done = set()

    def walk(name, way):
        if name in way:
            return [*way[way.index(name) :], name]
        if name not in done:
            for other in sorted(imports[name] & imports.keys()):
                if found := walk(other, [*way, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in sorted(imports) if (found := walk(name, []))), [])


@pytest.fixture(scope="module")
def imports():
    return graph()


def test_no_modules_import_each_other(imports):
    assert circle(imports) == []


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_only_what_is_below(imports, floor):
    allowed = {floor, *FLOORS[floor], *sys.stdlib_module_names, *PACKAGES.get(floor, ())}
    for name, others in imports.items():
        if name.split(".")[0] == floor:
            found = {other for other in others if other.split(".")[0] in FLOORS or floor in PACKAGES}
            assert {other for other in found if other.split(".")[0] not in allowed} == set(), name


def test_rooms_of_simt_import_only_what_is_below(imports):
    for name, others in imports.items():
        _, *way = name.split(".")
        if name.startswith("simt.") and way[0] in ROOMS:
            above = {f"simt.{room}" for room in ROOMS[ROOMS.index(way[0]) + 1 :]}
            for other in others:
                assert ".".join(other.split(".")[:2]) not in above, f"{name} imports {other}"
                top = other.startswith("simt") and (len(other.split(".")) == 1 or other.split(".")[1] not in ROOMS)
                assert not top or other in SHARED, f"{name} imports {other}"


def test_circles_are_found(tmp_path):
    for name, text in {"a": "import x.b", "b": "def f():\n    from x import c", "c": "from x.a import g"}.items():
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / f"{name}.py").write_text(text)
    (tmp_path / "x" / "__init__.py").write_text("from x.a import g")
    assert circle(graph(tmp_path, ["x"])) == ["x.a", "x.b", "x.c", "x.a"]
    (tmp_path / "x" / "c.py").write_text("import os")
    assert circle(graph(tmp_path, ["x"])) == []
