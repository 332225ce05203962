"""A copy of an environment whose libraries hold no more device code than a card, or a workload, needs."""

import hashlib
import json
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab import fatbin
from lab.machine import core_count
from models.slim import choice, thin, tree
from models.slim.problems import Problem, why

NAME = "slim.json"  # what was cut, at the top of the copy
SCHEMA = 1


def sha256(path):
    """The hash of a file, in hex."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def hashes(files):
    """{name: sha256} of tree.File objects, several at a time."""
    with ThreadPoolExecutor(core_count()) as pool:
        return dict(zip([f.name for f in files], pool.map(sha256, [f.path for f in files])))


def device_code(folder):
    """({name: [Entry, ...]}, [sentence, ...]): the libraries with device code; those that cannot be read stay whole."""
    found, damaged = {}, []
    for file in tree.libraries(folder):
        try:
            if entries := fatbin.read(file.path):
                found[file] = entries
        except fatbin.Damaged as problem:
            damaged.append(f"{problem}; it is copied as it is")
        except OSError as error:
            raise Problem(f"expected a file that can be read and found {file.path}: {why(error)}") from None
    return found, damaged


def expect_arch(code, cards):
    """Problem if there is nothing at all for one of these cards."""
    for card in cards:
        if not any(entry.runs_on(card) for entries in code.values() for entry in entries):
            there = sorted({e.label for entries in code.values() for e in entries})
            raise Problem(
                f"--keep-arch: expected an architecture that a library has code for and found {card[0]}.{card[1]}; "
                f"there are {', '.join(there) or 'none'}"
            )


def used_by(traces, code):
    """{name: {entry.at, ...}} of what traces say was loaded. Problem if one is of other libraries than these."""
    used, now = {}, hashes(code)
    for path in traces:
        trace = read_json(path, "--used", "a trace")
        for name, was in trace["libraries"].items():
            if name not in now:
                raise Problem(f"--used: expected a trace of these libraries and found {path}, which has {name}, too")
            if now[name] != was["sha256"]:
                raise Problem(
                    f"--used: expected a trace of these libraries and found {path}, made with another version of "
                    f"{name} (sha256 {was['sha256'][:12]}…, here {now[name][:12]}…): trace again"
                )
            used.setdefault(name, set()).update(was["used"])
        if missing := sorted(set(now) - set(trace["libraries"])):
            raise Problem(f"--used: expected a trace of these libraries and found {path}, which lacks {missing[0]}")
    return used, now


def read_json(path, option, what):
    """A file of this room's. Problem if it cannot be read, or is something else."""
    try:
        record = json.loads(Path(path).read_text())
        if record["schema"] != SCHEMA or not isinstance(record["libraries"], dict):
            raise ValueError(f"schema {record['schema']!r}")
    except OSError as error:
        raise Problem(f"{option}: expected {what} and found {path}: {why(error)}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Problem(f"{option}: expected {what} of this version and found {path} ({error!r})") from None
    return record


def cut(folder, to, cards, traces=(), way="compacted", keep_ptx=False, link=False, say=print):
    """Copy an environment, without the device code that is not kept; the record of what was cut.

    cards     capabilities, [(9, 0), ...];  traces  paths: no other cubins than these were seen to load
    way       "compacted", "rewritten" or "holes" (thin.py)
    link      what is not cut is a hard link: quick, and a change to one file is a change to both

    Raises Problem, and then nothing was written. Whatever else ends it, Ctrl-C too: the copy so far is removed.
    """
    folder, to = tree.folder_of(folder), Path(os.path.abspath(to))
    if traces and way == "holes":
        raise Problem("--way: expected rewritten or compacted with --used and found holes, which leave what was cut on "
                      "the list of what a card may load")  # fmt: skip
    if way == "compacted" and os.sysconf("SC_PAGE_SIZE") != thin.PAGE:
        raise Problem(f"--way: expected pages of {thin.PAGE} bytes for compacted: take rewritten")
    _expect_target(folder, to)
    code, damaged = device_code(folder)
    for sentence in damaged:
        say(f"notice: {sentence}")
    expect_arch(code, cards)
    used, now = used_by(traces, code) if traces else ({}, hashes(code))
    stay = {
        file.name: choice.kept(entries, cards, used.get(file.name, set()) if traces else None, keep_ptx)
        for file, entries in code.items()
    }
    _expect_room(folder, to, link, {file.name for file in code})
    part = to.with_name(f"{to.name}.{os.getpid()}.part")
    try:
        _copy_tree(folder, part, to, stay, way, link, say)
        record = _record(folder, part, code, stay, now, cards, way, traces)
        (part / NAME).write_text(json.dumps(record, indent=1) + "\n")
        os.rename(part, to)
    except OSError as error:
        _remove(part)
        raise Problem(f"--to: the copy ended, and was removed: {why(error)}") from None
    except BaseException:
        _remove(part)
        raise
    return record


def _remove(part):
    if part.exists():
        shutil.rmtree(part, ignore_errors=True)


def _expect_target(folder, to):
    if os.path.lexists(to):
        raise Problem(f"--to: expected a folder that is not there yet and found one: {to}")
    if folder in [to, *to.parents]:
        raise Problem(f"--to: expected a folder outside of ENVIRONMENT and found {to}, within it")
    if not to.parent.is_dir():
        raise Problem(f"--to: expected a folder to make it in and found none: {to.parent}")
    if not os.access(to.parent, os.W_OK):
        raise Problem(f"--to: expected a folder that can be written and found {to.parent}: permission denied")


def _expect_room(folder, to, link, cut_ones):
    needed = 0
    for at, _, names in tree.walk(folder):
        for name in names:
            about = os.lstat(at / name)
            if not link or (at / name).relative_to(folder).as_posix() in cut_ones:
                needed += 512 * about.st_blocks  # what is cut takes less, and a copy must not stop half-way
    if link and os.stat(folder).st_dev != os.stat(to.parent).st_dev:
        raise Problem(f"--link: expected a folder on the same file system and found {to.parent} on another")
    free = shutil.disk_usage(to.parent).free
    if free < needed:
        raise Problem(f"--to: expected {needed / 1e9:.2f} GB of room for the copy and found {free / 1e9:.2f} at {to}")


def _copy_tree(folder, part, to, stay, way, link, say):
    part.mkdir()
    for at, folders, names in tree.walk(folder):
        here = part / at.relative_to(folder)
        for name in [*folders, *names]:
            source, target = at / name, here / name
            mode = os.lstat(source).st_mode
            if stat.S_ISLNK(mode):
                _copy_link(source, target, folder, to)
            elif stat.S_ISDIR(mode):
                target.mkdir()
            elif not stat.S_ISREG(mode):
                say(f"notice: {source} is neither a file nor a folder nor a link, and is left out")
            elif (places := stay.get(source.relative_to(folder).as_posix())) is not None:
                thin.write(source, target, places, way)
            elif _names_folder(source, folder):
                data = source.read_bytes()
                target.write_bytes(data.replace(os.fsencode(folder), os.fsencode(to), 1))
                shutil.copystat(source, target)
            elif link:
                os.link(source, target)
            else:
                shutil.copy2(source, target)


def _copy_link(source, target, folder, to):
    """A link as it is; one that names the environment's own folder names the copy's."""
    leads = os.readlink(source)
    if os.path.isabs(leads) and folder in [Path(leads), *Path(leads).parents]:
        leads = str(to / Path(leads).relative_to(folder))
    os.symlink(leads, target)


def _names_folder(source, folder):
    """Whether a file is a script of the environment's own interpreter: it begins with #!, and that folder."""
    with open(source, "rb") as f:
        return f.read(2 + len(os.fsencode(folder)) + 1) == b"#!" + os.fsencode(folder) + b"/"


def _record(folder, part, code, stay, now, cards, way, traces):
    libraries = {}
    for file, entries in code.items():
        gone = [entry.at for entry in entries if entry.at not in stay[file.name]]
        about = os.stat(part / file.name)
        libraries[file.name] = {
            "sha256": now[file.name],
            "before": file.size,
            "after": about.st_size,
            "disk": 512 * about.st_blocks,
            "cut": gone,
        }
    keep = [f"{major}.{minor}" for major, minor in cards]
    names = [os.fspath(trace) for trace in traces]
    return {"schema": SCHEMA, "from": str(folder), "keep": keep, "way": way, "used": names, "libraries": libraries}
