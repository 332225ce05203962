"""What pip calls to build the package (PEP 517): the course's rooms as one name, matmul_to_mamba.

    pip install .       into site-packages: matmul_to_mamba, with kernels, lab, models, ref and simt below it, and
                        no other name
    pip install -e .    nothing but what it needs: the course is used from its folder (so lab/bootstrap.py does it)

In its folder the course says `from kernels.gemv import gemv`. Installed so, its `kernels` would stand in for Hugging
Face's package of that name, which transformers imports. So the wheel holds each file with its imports renamed, to `from
matmul_to_mamba.kernels.gemv import gemv`, line for line; and strings that are a module's full name, as importlib and
`python -m` take them. Paths such as "kernels/gemv/gemv.cu" go from the folder above `lab`, and stay.

Standard library only: pip runs this where nothing is installed yet.
"""

import ast
import importlib.util
import io
import os
import tokenize

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGE = "matmul_to_mamba"
ROOMS = "kernels", "lab", "models", "ref", "simt"
KINDS = ".py", ".c", ".h", ".cu", ".cuh", ".json"
LEFT_OUT = (  # of use in the course's folder alone
    *("lab/notebooks.py", "lab/wheel.py", "simt/packing.py"),
    *(f"models/{name}.py" for name in ("corpus", "small_networks", "train_small")),
    *(f"models/small{kind}/{name}.json" for kind in ("", "_mamba2") for name in ("config", "tokenizer", "training")),
)
INIT = f'''"""{{summary}}

Kernels: {PACKAGE}.kernels. CUDA C++ on NumPy: {PACKAGE}.simt. References: {PACKAGE}.ref. Workbench: {PACKAGE}.lab.
Models from a folder on disk, with the extra [models]: {PACKAGE}.models.
"""

__version__ = "{{version}}"
'''


def by_path(path):
    """A module by its file: where pip runs this one, the others have no names yet."""
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], os.path.join(ROOT, path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


packing = by_path("simt/packing.py")  # how a wheel is written down


# pip's hooks


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Write the wheel, and return its name."""
    project = packing.read_project(ROOT)
    init = INIT.format(summary=project["description"], version=project["version"])
    files = {f"{PACKAGE}/__init__.py": init.encode()}
    names = modules()
    for source in sources():
        with open(os.path.join(ROOT, source), "rb") as f:
            data = f.read()
        files[f"{PACKAGE}/{source}"] = renamed(data.decode(), names).encode() if source.endswith(".py") else data
    return packing.write_wheel(wheel_directory, ROOT, PACKAGE, files)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Write a wheel of no files, for its dependencies' sake, and return its name."""
    return packing.write_wheel(wheel_directory, ROOT, PACKAGE, {})


def build_sdist(sdist_directory, config_settings=None):
    """Write an archive from which the wheel can be built, and return its name."""
    return packing.write_sdist(sdist_directory, ROOT, PACKAGE, sorted({*sources(), *LEFT_OUT}))


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """Write what pip wants to know beforehand, and return the folder's name."""
    return packing.write_metadata(metadata_directory, ROOT, PACKAGE)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


# What goes in


def sources():
    """The files of the rooms, as paths from the course's folder, in order."""
    found = [f"{room}/{path}" for room in ROOMS for path in packing.sources(os.path.join(ROOT, room), KINDS)]
    return sorted(set(found) - set(LEFT_OUT))


def modules():
    """The full names of the course's modules and packages."""
    names = {source[:-3].replace("/", ".") for source in sources() if source.endswith(".py")}
    return {name[: -len(".__init__")] if name.endswith(".__init__") else name for name in names}


def renamed(text, names):
    """A Python source whose imports of modules of these names go below PACKAGE, with as many lines as before."""
    lines = text.splitlines(keepends=True)
    rooms = {name.split(".")[0] for name in names}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] in rooms:
            _replace(lines, node.lineno, node.col_offset, f"from {node.module}", f"from {PACKAGE}.{node.module}")
        elif isinstance(node, ast.Import) and any(alias.name.split(".")[0] in rooms for alias in node.names):
            new = "; ".join(_imported(alias, rooms) for alias in node.names)
            _replace(lines, node.lineno, node.col_offset, ast.get_source_segment(text, node), new)
    text = "".join(lines)
    if not any(f"{quote}{room}." in text for room in rooms for quote in "\"'"):
        return text
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.STRING]
    for token in reversed(tokens):  # those ahead on the line stay where they are
        if token.string[1:-1] in names and "." in token.string:
            quote, name = token.string[0], token.string[1:-1]
            _replace(lines, *token.start, token.string, f"{quote}{PACKAGE}.{name}{quote}")
    return "".join(lines)


def _imported(alias, rooms):
    """One name of an import statement as a statement of its own, which binds the same name."""
    room = alias.name.split(".")[0]
    if room not in rooms:
        return f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
    if alias.asname:
        return f"import {PACKAGE}.{alias.name} as {alias.asname}"
    below = f"; import {PACKAGE}.{alias.name}" if "." in alias.name else ""
    return f"from {PACKAGE} import {room}{below}"


def _replace(lines, row, column, old, new):
    line = lines[row - 1]
    if not line[column:].startswith(old):
        raise ValueError(f"line {row}: expected {old!r} on one line and found {line.rstrip()!r}: write it so")
    lines[row - 1] = line[:column] + new + line[column + len(old) :]
