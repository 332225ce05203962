"""The files of an environment: links are not followed, so none leads in a circle, and none is counted twice."""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from models.slim.problems import Problem, why

LIBRARY = re.compile(r"\.so(\.[\w.]+)?$")


@dataclass(frozen=True)
class File:
    """A regular file. name: its path from the environment's folder; size, disk: its length, and the blocks it takes."""

    name: str
    path: Path
    size: int
    disk: int


def folder_of(path, what="ENVIRONMENT"):
    """The folder that is meant, links resolved. Problem if there is none, or none that can be listed."""
    try:
        found = Path(path).resolve(strict=True)
        if not found.is_dir():
            raise Problem(f"{what}: expected a folder and found a file: {path}")
        os.listdir(found)
    except (OSError, RuntimeError) as error:  # RuntimeError: Python 3.11 and 3.12's word for links in a circle
        circle = isinstance(error, RuntimeError)
        words = "links that lead in a circle" if circle else why(error)
        raise Problem(f"{what}: expected a folder that can be read and found {path}: {words}") from None
    return found


def walk(folder):
    """Yield (folder, [folders], [names]) below a folder. Problem if one cannot be listed."""

    def stop(error):
        raise Problem(f"expected a folder that can be read and found {error.filename}: {why(error)}")

    for at, folders, names in os.walk(folder, onerror=stop):
        folders.sort()
        yield Path(at), folders, sorted(names)


def libraries(folder):
    """[File, ...] of the shared libraries below a folder, by name. Problem if there are none."""
    found, seen = [], set()
    for at, _, names in walk(folder):
        for name in names:
            if not LIBRARY.search(name):
                continue
            about = os.lstat(at / name)
            key = about.st_dev, about.st_ino
            if stat.S_ISREG(about.st_mode) and key not in seen:
                seen.add(key)
                path = at / name
                found.append(File(path.relative_to(folder).as_posix(), path, about.st_size, 512 * about.st_blocks))
    if not found:
        raise Problem(f"expected shared libraries (*.so) below {folder} and found none")
    return sorted(found, key=lambda file: file.name)
