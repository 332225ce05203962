"""What pip calls to build this package (PEP 517), and how a wheel is written down.

    pip install ./simt     from the course's folder: simt, and no other name, into site-packages

The folder is itself the package, so that the course imports it where it lies. Built here, with nothing but Python's
standard library, nothing is written into that folder, and nothing has to be fetched first. lab/wheel.py packs the whole
course with the same functions. Of no use once installed: this file is in no wheel.
"""

import base64
import hashlib
import io
import os
import tarfile
import tomllib
import zipfile

ROOT = os.path.dirname(os.path.abspath(__file__))
PACKAGE = "simt"
KINDS = ".py", ".cu"
LEFT_OUT = ("packing.py",)
MADE = 1980, 1, 1, 0, 0, 0  # the time of every file in a wheel, so that equal files make equal wheels


# pip's hooks


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Write the wheel, and return its name."""
    files = {}
    for source in sorted(set(sources(ROOT, KINDS)) - set(LEFT_OUT)):
        with open(os.path.join(ROOT, source), "rb") as f:
            files[f"{PACKAGE}/{source}"] = f.read()
    return write_wheel(wheel_directory, ROOT, PACKAGE, files)


def build_sdist(sdist_directory, config_settings=None):
    """Write an archive from which the wheel can be built, and return its name."""
    return write_sdist(sdist_directory, ROOT, PACKAGE, sources(ROOT, KINDS))


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """Write what pip wants to know beforehand, and return the folder's name."""
    return write_metadata(metadata_directory, ROOT, PACKAGE)


# What goes in


def sources(root, kinds):
    """The files of these kinds below a folder, as paths from there, in order."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        paths = [os.path.relpath(os.path.join(folder, name), root) for name in names if name.endswith(kinds)]
        found += [path.replace(os.sep, "/") for path in paths]
    return sorted(found)


# How it is written down: `root` has the pyproject.toml, `package` is the name below which everything lies


def read_project(root):
    with open(os.path.join(root, "pyproject.toml"), "rb") as f:
        return tomllib.load(f)["project"]


def metadata(root):
    """The text of METADATA (version 2.4) for pyproject's table `project`."""
    project = read_project(root)
    with open(os.path.join(root, project["readme"]), encoding="utf-8") as f:
        readme = f.read()
    lines = ["Metadata-Version: 2.4", f"Name: {project['name']}", f"Version: {project['version']}"]
    lines += [f"Summary: {project['description']}", f"Requires-Python: {project['requires-python']}"]
    lines += [f"License-Expression: {project['license']}"]
    lines += [f"License-File: {name}" for name in project["license-files"]]
    lines += [f"Requires-Dist: {requirement}" for requirement in project["dependencies"]]
    for extra, requirements in project.get("optional-dependencies", {}).items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {for_extra(requirement, extra)}" for requirement in requirements]
    return "\n".join([*lines, "Description-Content-Type: text/markdown", "", readme])


def for_extra(requirement, extra):
    what, _, where = (part.strip() for part in requirement.partition(";"))
    return f'{what}; ({where}) and extra == "{extra}"' if where else f'{what}; extra == "{extra}"'


def info_folder(root, package):
    return f"{package}-{read_project(root)['version']}.dist-info"


def about(root, package):
    """{path: bytes} of a wheel's own files, RECORD aside."""
    folder = info_folder(root, package)
    wheel = f"Wheel-Version: 1.0\nGenerator: {package}\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {f"{folder}/METADATA": metadata(root).encode(), f"{folder}/WHEEL": wheel.encode()}
    for name in read_project(root)["license-files"]:
        with open(os.path.join(root, name), "rb") as f:
            files[f"{folder}/licenses/{name}"] = f.read()
    return files


def write_wheel(directory, root, package, files):
    """Write a wheel of these files, {path: bytes}, and its own. Returns its name."""
    folder = info_folder(root, package)
    files = {**files, **about(root, package)}
    record = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in files.items()]
    record = "\n".join([*record, f"{folder}/RECORD,,", ""])
    name = f"{folder.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(directory, name), "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in {**files, f"{folder}/RECORD": record.encode()}.items():
            info = zipfile.ZipInfo(path, MADE)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            archive.writestr(info, data)
    return name


def write_sdist(directory, root, package, files):
    """Write an archive of these files, paths from root, and of those that every archive has. Returns its name."""
    project = read_project(root)
    base = f"{package}-{project['version']}"
    kept = ["pyproject.toml", project["readme"], *project["license-files"], *files]
    with tarfile.open(os.path.join(directory, f"{base}.tar.gz"), "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for name in kept:
            archive.add(os.path.join(root, name), f"{base}/{name}")
        data = metadata(root).encode()
        info = tarfile.TarInfo(f"{base}/PKG-INFO")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return f"{base}.tar.gz"


def write_metadata(directory, root, package):
    """Write what a wheel says of itself, without the wheel, and return the folder's name."""
    for name, data in about(root, package).items():
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(data)
    return info_folder(root, package)


def _digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
