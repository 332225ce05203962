"""Make .venv complete: `make lab`, `make test` and the others run this first.

    python3 lab/bootstrap.py --for lab
    python3 lab/bootstrap.py --for test-latest --latest    .venv-latest, with the newest of everything
    python3 lab/bootstrap.py --for site --site site        .venv-site, with what builds the site, and nothing else

It looks before it leaps: Python, C compiler, a folder that can be written, disk space. Then it makes .venv,
installs the course and its dependencies there, and leaves a stamp, so that the next run has nothing to do.
A killed run is taken up again. Whatever is wrong ends in one sentence: what was expected, what was found,
what to do.

Standard library only, and no syntax newer than Python 3.6: an old Python must be able to read this file to be
told that it is too old.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules must not stand in for those of the standard library

import argparse
import contextlib
import glob
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = ".venv"  # main() changes it for --latest
NEEDED = (3, 11)
GB = 10**9
# On Linux pip takes the PyTorch that brings CUDA along, with or without a GPU: .venv then takes about 8 GB, else 2.3.
# pip unpacks before it installs, so a little more must be free.
SPACE = {"linux": 10 * GB, "other": 3 * GB}
SITE_SPACE = GB  # .venv-site has no PyTorch
COURSE = "matmul_to_mamba"  # as pip spells the course's name
BARE = ("pip", "setuptools", "wheel", "_distutils_hack", "distutils-precedence", "pkg_resources", "__pycache__")
PROGRAM = """\
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
float course(float x) { return sqrtf(x); }
"""


class Stop(Exception):
    """What is wrong, in one sentence for the person at the keyboard."""


# Look: is everything here that only the learner can bring?


def check_python(version=None, bits=None):
    found = tuple(version or sys.version_info[:3])
    bits = bits or (64 if sys.maxsize > 2**32 else 32)
    if found[:2] < NEEDED or bits != 64:
        raise Stop(
            f"expected a 64-bit Python {NEEDED[0]}.{NEEDED[1]} or newer and found a {bits}-bit "
            f"{'.'.join(map(str, found))} ({sys.executable}): install one, or name it with  "
            "PYTHON=/path/to/python3"
        )


def check_compiler(env=None):
    """The command of a C compiler that works: $CC if that is set, else cc, gcc or clang."""
    env = os.environ if env is None else env
    named = env.get("CC", "").strip()
    try:
        candidates = [shlex.split(named)] if named else [["cc"], ["gcc"], ["clang"]]
    except ValueError as e:
        raise Stop(f"expected a command in CC and found {named!r} ({e}): mend it, or unset CC") from None
    failed = []
    for command in candidates:
        if shutil.which(command[0], path=env.get("PATH", os.defpath)):
            said = try_compiler(command, env)
            if said is None:
                return command
            failed.append((" ".join(command), said))
    if failed:
        command, said = failed[0]
        sys.stderr.write(said.rstrip() + "\n")
        raise Stop(
            f"expected a C compiler that works and found that `{command}` cannot build a small library (its "
            "message is above): mend it (Debian and Ubuntu: apt install build-essential), or name another "
            "with  CC=..."
        )
    looked = f"CC={named} is not there" if named else "looked for cc, gcc and clang"
    raise Stop(
        f"expected a C compiler and found none ({looked}): install one (Debian and Ubuntu: apt install "
        "build-essential; Fedora: dnf install gcc; macOS: xcode-select --install), or name it with  CC=..."
    )


def try_compiler(command, env):
    """None if it builds a small shared library, as the course will; else what it said."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = os.path.join(folder, "try.c"), os.path.join(folder, "try.so")
        with open(source, "w") as f:
            f.write(PROGRAM)
        command = command + ["-shared", "-fPIC", "-o", library, source, "-lm"]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            run = subprocess.run(command, env=dict(env), timeout=60, **streams)
        except (OSError, subprocess.TimeoutExpired) as e:
            return str(e)
        if run.returncode == 0 and os.path.exists(library):
            return None
        return run.stdout.decode(errors="replace") or f"it ended with status {run.returncode} and built nothing"


def check_writable(root):
    try:
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as e:
        raise Stop(
            f"expected a folder that can be written and found that {root} cannot ({e.strerror}): copy the "
            "course to a place of your own"
        ) from None


def free_bytes(folder):
    return shutil.disk_usage(folder).free


def check_disk(root, needed, free=free_bytes):
    if free(root) < needed:
        raise Stop(
            f"expected {needed / GB:.0f} GB of free disk space for {VENV} and found {free(root) / GB:.1f} GB "
            f"at {root}: make room, or move the course to a larger disk"
        )


def check_venv_module():
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        version = "{}.{}".format(*sys.version_info[:2])
        raise Stop(
            f"expected Python's venv and ensurepip modules and found that {sys.executable} lacks them: "
            f"install them (Debian and Ubuntu: apt install python{version}-venv)"
        ) from None


# What stands already?


def venv_python(root):
    return os.path.join(root, VENV, *(("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")))


def stamp_file(root):
    return os.path.join(root, VENV, "course.json")


def read_stamp(root):
    try:
        with open(stamp_file(root), encoding="utf-8") as f:
            stamp = json.load(f)
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(root, installed):
    """Say in VENV where and by which Python it was made, and what is installed (None: not finished)."""
    stamp = {"root": root, "machine": platform.machine(), "python": list(sys.version_info[:2])}
    with open(stamp_file(root) + ".new", "w", encoding="utf-8") as f:
        json.dump(dict(stamp, installed=installed), f)
    os.replace(stamp_file(root) + ".new", stamp_file(root))


def wanted(root, *more):
    """What VENV must hold, as a hash: a stamp with another one means that pip has work to do. more: further files."""
    h = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt") + more:
        try:
            with open(os.path.join(root, name), "rb") as f:
                h.update(hashlib.sha256(f.read()).digest())
        except OSError as e:
            raise Stop(
                f"expected the file {name} and could not read it ({e.strerror}): get a fresh copy of the course"
            ) from None
    return h.hexdigest()


def why_anew(root):
    """Why VENV must be made, or made anew; None where it can be used."""
    if not os.path.lexists(os.path.join(root, VENV)):
        return f"making {VENV}"
    stamp = read_stamp(root)
    if not stamp:
        return f"making {VENV} anew: it was not made by this command, or not finished"
    if stamp.get("root") != root or stamp.get("machine") != platform.machine():
        return f"making {VENV} anew: it was made in another place"
    if stamp.get("python") != list(sys.version_info[:2]):
        return f"making {VENV} anew: it was made by another Python than {sys.version_info[0]}.{sys.version_info[1]}"
    runs = [venv_python(root), "-c", "import sys; sys.exit(sys.prefix == sys.base_prefix)"]
    try:
        broken = subprocess.call(runs, env=clean_env(), stderr=subprocess.DEVNULL) != 0
    except OSError:
        broken = True
    return f"making {VENV} anew: its Python is gone" if broken else None


def check_ours(root):
    """Nobody else's VENV is made anew: ours has our stamp or the course in it, or holds nothing that was installed."""
    folder = os.path.join(root, VENV)
    if not os.path.lexists(folder) or os.path.lexists(stamp_file(root)):
        return
    ours = False
    if os.path.isdir(folder):
        found = os.listdir(folder)
        packages = glob.glob(os.path.join(glob.escape(folder), "[Ll]ib*", "python*", "site-packages", "*"))
        packages += glob.glob(os.path.join(glob.escape(folder), "Lib", "site-packages", "*"))
        names = {os.path.basename(p).lower() for p in packages}
        own = any(name.startswith(COURSE) for name in names)
        bare = "pyvenv.cfg" in found and all(name.startswith(BARE) for name in names)  # killed while it was made
        ours = own or bare or not found
    if not ours:
        raise Stop(
            f"expected {VENV} to be made by this command and found one that something else made ({folder}): move it "
            f"away or remove it, then run the same command again"
        )


# Leap: make .venv and fill it.

NEWEST = ["--upgrade", "--upgrade-strategy", "eager"]


@contextlib.contextmanager
def only_one(root):
    """`make lab` and `make test` may be started together: the second waits here for the first."""
    try:
        import fcntl
    except ImportError:  # not a Unix: go without
        yield
        return
    with open(os.path.join(root, ".venv.lock"), "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another make is installing: waiting for it")
            fcntl.flock(f, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: go without
            pass
        yield


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()  # before pip writes its own lines


def clean_env():
    """The environment without what would let packages from elsewhere into VENV, or send them elsewhere."""
    leads_astray = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")
    env = {name: value for name, value in os.environ.items() if name not in leads_astray}
    return dict(env, PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1", PYTHONNOUSERSITE="1")


def make_venv(root):
    # Not sys.executable: where .venv is activated that is .venv's own Python, which is about to be removed.
    python = getattr(sys, "_base_executable", None) or sys.executable
    code = subprocess.call([python, "-m", "venv", "--clear", os.path.join(root, VENV)], env=clean_env())
    if code:
        raise Stop(
            f"expected `{python} -m venv {VENV}` to work and it ended with status {code} (its message is "
            f"above): remove {VENV} if it is there, and see that Python's venv module is complete"
        )
    write_stamp(root, None)


def pip(root, *args):
    code = subprocess.call([venv_python(root), "-m", "pip"] + list(args), cwd=root, env=clean_env())
    if code:
        raise Stop(
            f"expected pip to install the dependencies and it ended with status {code} (its message is "
            "above): see that this machine reaches a package index and has room on its disk "
            f"({free_bytes(root) / GB:.1f} GB are free), then run the same command again: it goes on from "
            "here"
        )


def install(root, *options):
    write_stamp(root, None)  # until pip is through
    # A killed pip leaves packages without RECORD, their list of files, and then takes them for installed.
    for info in glob.glob(os.path.join(glob.escape(root), VENV, "lib*", "python*", "site-packages", "*.dist-info")):
        if not os.path.exists(os.path.join(info, "RECORD")):
            shutil.rmtree(info, ignore_errors=True)
    # Python compiles what is imported; of all that comes along, most never is.
    # -e: what the course needs, and no package of it, which would grow old here (see lab/wheel.py).
    pip(root, "install", "--no-compile", "-e", ".[course,models,test]", *options)


def complete(root, pins=False, latest=False):
    """Look, then make VENV what it should be. Quick where it already is; with `latest`, asks pip each time."""
    check_python()
    check_compiler()
    check_writable(root)
    with only_one(root):
        why = why_anew(root)
        if why:
            check_ours(root)
        if not why and not pins and not latest and read_stamp(root).get("installed") == wanted(root):
            return
        if why:
            check_venv_module()
            check_disk(root, SPACE["linux" if sys.platform.startswith("linux") else "other"])
            say(why)
            make_venv(root)
        if pins:
            renew_pins(root)
        say(f"installing the course's dependencies into {VENV}: this takes a few minutes, once")
        key = wanted(root)
        install(root, *(NEWEST if latest else ["-c", "constraints.txt"]))
        write_stamp(root, key)
        if latest:
            say("other than in constraints.txt: " + (", ".join(differences(root)) or "nothing"))


SITE_PINS = "book/constraints.txt"


def complete_site(root, groups, pins=False):
    """Look, then make VENV what the site needs: these groups of pyproject.toml. No compiler, and no PyTorch."""
    check_python()
    check_writable(root)
    with only_one(root):
        why = why_anew(root)
        if why:
            check_ours(root)
        key = wanted(root, SITE_PINS)
        there = (read_stamp(root).get("installed") or "").split()
        if not why and not pins and there[:1] == [key] and set(groups) <= set(there[1:]):
            return
        if why:
            check_venv_module()
            check_disk(root, SITE_SPACE)
            say(why)
            make_venv(root)
        say("installing what the site is built with into {}: this takes a minute, once".format(VENV))
        write_stamp(root, None)
        limits = NEWEST if pins else ["-c", SITE_PINS]
        pip(root, "install", "--no-compile", "-c", "constraints.txt", *(limits + site_packages(root, groups)))
        if pins:
            renew_site_pins(root)
        write_stamp(root, " ".join([wanted(root, SITE_PINS)] + groups))


def site_packages(root, groups):
    """What pyproject.toml lists in its dependency groups of these names."""
    import tomllib  # by now this is a new Python

    with open(os.path.join(root, "pyproject.toml"), "rb") as f:
        listed = tomllib.load(f)["dependency-groups"]
    return [package for group in groups for package in listed[group]]


def renew_site_pins(root):
    """For authors: write down what came beside the packages of constraints.txt."""
    with open(os.path.join(root, "constraints.txt"), encoding="utf-8") as f:
        course = pinned(f.read())
    name = os.path.join(root, SITE_PINS)
    with open(name, encoding="utf-8") as f:
        lines = [line for line in f if line.startswith("#")]
    pins = installed(root)
    lines += ["{}=={}\n".format(p, pins[p]) for p in sorted(pins, key=str.lower) if p not in course]
    with open(name + ".new", "w", encoding="utf-8") as f:
        f.writelines(lines)
    os.replace(name + ".new", name)


def pinned(text):
    """{package: version} of lines "package==version", without local suffixes such as +cpu."""
    return dict(re.findall(r"^([\w.-]+)==([^+\s]+)", text, re.M))


def installed(root):
    """{package: version} of what is in VENV, the course itself aside."""
    freeze = [venv_python(root), "-m", "pip", "freeze"]  # the course stands there as a folder, without "=="
    return pinned(subprocess.check_output(freeze, cwd=root, env=clean_env()).decode())


def differences(root):
    """What VENV has in another version than constraints.txt, as "torch 2.14.0 (pinned: 2.13.0)"."""
    with open(os.path.join(root, "constraints.txt"), encoding="utf-8") as f:
        pins = pinned(f.read())
    return [f"{p} {v} (pinned: {pins[p]})" for p, v in installed(root).items() if pins.get(p, v) != v]


def renew_pins(root):
    """For authors: upgrade everything that pyproject.toml allows, and write down what came."""
    install(root, *NEWEST)
    pins = installed(root)
    # torch's CUDA build asks for one exact Triton, its CPU build for none: take the one that suits both.
    report = os.path.join(root, VENV, "torch.json")
    ask = ["install", "-q", "--dry-run", "--no-deps", "--ignore-installed", "--report", report]
    pip(root, *ask, f"torch==={pins['torch']}")
    with open(report, encoding="utf-8") as f:
        pins.update(re.findall(r'"(triton)==([\w.]+)', f.read()))
    name = os.path.join(root, "constraints.txt")
    with open(name, encoding="utf-8") as f:
        lines = [line for line in f if line.startswith("#")]
    for package in sorted(pins, key=str.lower):
        if not package.startswith(("nvidia-", "cuda-")):
            lines.append(f"{package}=={pins[package]}\n")
    with open(name + ".new", "w", encoding="utf-8") as f:
        f.writelines(lines)
    os.replace(name + ".new", name)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Make .venv complete.")
    parser.add_argument("--for", dest="target", default="lab", help="the make target this is for")
    parser.add_argument("--pins", action="store_true", help="upgrade everything and write constraints.txt")
    parser.add_argument("--latest", action="store_true", help="fill .venv-latest, with no constraints")
    parser.add_argument("--site", nargs="+", metavar="GROUP", help="fill .venv-site with these dependency groups")
    args = parser.parse_args(argv)
    global VENV
    if args.latest:
        VENV = ".venv-latest"
    elif args.site:
        VENV = ".venv-site"
    try:
        if args.site:
            complete_site(ROOT, args.site, args.pins)
        else:
            complete(ROOT, args.pins, args.latest)
    except Stop as e:
        sys.stderr.write(f"make {args.target}: {e}\n")
        return 1
    except OSError as e:
        sys.stderr.write(f"make {args.target}: expected to set up {VENV} and could not ({e}): see to that and retry\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"\nmake {args.target}: stopped; the same command goes on from here\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
