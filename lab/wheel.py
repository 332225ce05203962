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
import base64
import hashlib
import io
import os
import tarfile
import tokenize
import tomllib
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGE = "matmul_to_mamba"
ROOMS = "kernels", "lab", "models", "ref", "simt"
KINDS = ".py", ".c", ".h", ".cu", ".cuh", ".json"
LEFT_OUT = (  # of use in the course's folder alone
    *("lab/notebooks.py", "lab/wheel.py"),
    *(f"models/{name}.py" for name in ("corpus", "small_networks", "train_small")),
    *(f"models/small{kind}/{name}.json" for kind in ("", "_mamba2") for name in ("config", "tokenizer", "training")),
)
INIT = f'''"""{{summary}}

Kernels: {PACKAGE}.kernels. CUDA C++ on NumPy: {PACKAGE}.simt. References: {PACKAGE}.ref. Workbench: {PACKAGE}.lab.
Models from a folder on disk, with the extra [models]: {PACKAGE}.models.
"""

__version__ = "{{version}}"
'''
MADE = 1980, 1, 1, 0, 0, 0  # the time of every file in a wheel, so that equal files make equal wheels


# pip's hooks


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Write the wheel, and return its name."""
    project = read_project()
    init = INIT.format(summary=project["description"], version=project["version"])
    files = {f"{PACKAGE}/__init__.py": init.encode()}
    names = modules()
    for source in sources():
        with open(os.path.join(ROOT, source), "rb") as f:
            data = f.read()
        files[f"{PACKAGE}/{source}"] = renamed(data.decode(), names).encode() if source.endswith(".py") else data
    return write_wheel(wheel_directory, project, files)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Write a wheel of no files, for its dependencies' sake, and return its name."""
    return write_wheel(wheel_directory, read_project(), {})


def build_sdist(sdist_directory, config_settings=None):
    """Write an archive from which the wheel can be built, and return its name."""
    project = read_project()
    base = f"{PACKAGE}-{project['version']}"
    kept = ["pyproject.toml", project["readme"], *project["license-files"], *sorted({*sources(), *LEFT_OUT})]
    with tarfile.open(os.path.join(sdist_directory, f"{base}.tar.gz"), "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for name in kept:
            archive.add(os.path.join(ROOT, name), f"{base}/{name}")
        data = metadata(project).encode()
        info = tarfile.TarInfo(f"{base}/PKG-INFO")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return f"{base}.tar.gz"


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """Write what pip wants to know beforehand, and return the folder's name."""
    project = read_project()
    folder = info_folder(project)
    for name, data in about(project).items():
        path = os.path.join(metadata_directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(data)
    return folder


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


# What goes in


def sources():
    """The files of the rooms, as paths from the course's folder, in order."""
    found = []
    for room in ROOMS:
        for folder, folders, names in os.walk(os.path.join(ROOT, room)):
            folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
            paths = [os.path.relpath(os.path.join(folder, name), ROOT) for name in names if name.endswith(KINDS)]
            found += [path.replace(os.sep, "/") for path in paths]
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


# How it is written down


def read_project():
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as f:
        return tomllib.load(f)["project"]


def metadata(project):
    """The text of METADATA (version 2.4) for pyproject's table `project`."""
    with open(os.path.join(ROOT, project["readme"]), encoding="utf-8") as f:
        readme = f.read()
    lines = ["Metadata-Version: 2.4", f"Name: {project['name']}", f"Version: {project['version']}"]
    lines += [f"Summary: {project['description']}", f"Requires-Python: {project['requires-python']}"]
    lines += [f"License-Expression: {project['license']}"]
    lines += [f"License-File: {name}" for name in project["license-files"]]
    lines += [f"Requires-Dist: {requirement}" for requirement in project["dependencies"]]
    for extra, requirements in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {_for_extra(requirement, extra)}" for requirement in requirements]
    return "\n".join([*lines, "Description-Content-Type: text/markdown", "", readme])


def _for_extra(requirement, extra):
    what, _, where = (part.strip() for part in requirement.partition(";"))
    return f'{what}; ({where}) and extra == "{extra}"' if where else f'{what}; extra == "{extra}"'


def info_folder(project):
    return f"{PACKAGE}-{project['version']}.dist-info"


def about(project):
    """{path: bytes} of a wheel's own files, RECORD aside."""
    folder = info_folder(project)
    wheel = f"Wheel-Version: 1.0\nGenerator: {PACKAGE}\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {f"{folder}/METADATA": metadata(project).encode(), f"{folder}/WHEEL": wheel.encode()}
    for name in project["license-files"]:
        with open(os.path.join(ROOT, name), "rb") as f:
            files[f"{folder}/licenses/{name}"] = f.read()
    return files


def write_wheel(directory, project, files):
    """Write a wheel of these files, {path: bytes}, and its own. Returns its name."""
    folder = info_folder(project)
    files = {**files, **about(project)}
    record = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in files.items()]
    record = "\n".join([*record, f"{folder}/RECORD,,", ""])
    name = f"{PACKAGE}-{project['version']}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(directory, name), "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in {**files, f"{folder}/RECORD": record.encode()}.items():
            info = zipfile.ZipInfo(path, MADE)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            archive.writestr(info, data)
    return name


def _digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
