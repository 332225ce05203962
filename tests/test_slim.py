"""An environment's device code: reported, traced, cut in three ways, verified, explained; and what cannot be."""

import ctypes
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fat_libraries import ARCHES, cubins, parts
from made_up_cupti import environment

from lab import fatbin
from lab.fatbin import agreement, elf
from models.slim import __main__ as command
from models.slim import choice, cut, explain, measure, report, running, thin, trace, verify
from models.slim.problems import Problem


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    return environment(tmp_path_factory.mktemp("slim") / "env")


@pytest.fixture
def to(tmp_path):
    return tmp_path / "copy"


def fingerprint(folder):
    """All that a tree is: names, kinds, contents."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mode, path.stat().st_mtime
    return found


def said(capsys, *words):
    """(exit code, output, errors) of the command."""
    code = command.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def work(env, *archs, library="libfirst.so", kernel="gemv"):
    words = [env / "bin/work", env / "lib" / library]
    return [
        str(word)
        for arch in archs
        for word in (words if arch == archs[0] else []) + [env / f"cubins/{arch}.cubin", kernel]
    ]


# Which entries a card needs


def entry(at, kind, number, flags=0x11, container=0, name=""):
    return fatbin.Entry("x", container, at, 64, 8, 0, 8, kind, number, flags, "", name)


A, F = 0x100011, 0x200011
CASES = [  # card, entries of one container, those that stay
    ((9, 0), [("elf", 80), ("elf", 90), ("elf", 100), ("ptx", 90)], [1]),
    ((9, 0), [("elf", 90), ("elf", 90, A), ("ptx", 120)], [0, 1]),
    ((8, 9), [("elf", 80), ("elf", 86), ("elf", 90), ("ptx", 80)], [1]),
    ((8, 0), [("elf", 86), ("ptx", 75), ("ptx", 80), ("ptx", 86)], [2]),
    ((9, 0), [("elf", 100), ("ptx", 80)], [1]),
    ((9, 0), [("elf", 100), ("ptx", 100)], []),
    ((10, 0), [("elf", 90, A), ("ptx", 90, A), ("elf", 120)], []),
    ((12, 1), [("elf", 120, F), ("elf", 121, A), ("elf", 100)], [1]),
    ((10, 3), [("elf", 100, F), ("elf", 100, A)], [0]),
    ((9, 0), [("kind 16", 50), ("elf", 80)], [0]),
]


@pytest.mark.parametrize("card, found, stay", CASES)
def test_what_the_driver_would_take_stays(card, found, stay):
    entries = [entry(at, *one) for at, one in enumerate(found)]
    assert choice.kept(entries, [card]) == set(stay)


def test_containers_are_chosen_from_one_by_one():
    entries = [entry(0, "elf", 90), entry(1, "elf", 80, container=9), entry(2, "ptx", 80, container=9)]
    assert choice.kept(entries, [(9, 0)]) == {0, 2}
    assert choice.kept(entries, [(8, 0), (9, 0)]) == {0, 1, 2}
    assert choice.kept(entries, [(9, 0)], used=set()) == {2}  # it may yet be compiled
    assert choice.kept(entries, [(9, 0)], used={1}) == {1, 2}
    assert choice.kept([entry(0, "elf", 90), entry(1, "ptx", 80), entry(2, "ptx", 90)], [(9, 0)], keep_ptx=True) == {
        0,
        2,
    }


# Three ways


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A library with data before and behind 2 MB of device code."""
    path = tmp_path_factory.mktemp("large") / "liblarge.so"
    many = [fatbin.container(parts() * 12) for _ in range(3)]
    source = """
    const char text[] = "before"; int answer = 42; static int zeros[200000];
    int *where(void) { return zeros; }
    int sum(void) { int s = answer; for (int i = 0; i < 200000; i++) s += zeros[i]; return s; }
    """
    return fatbin.library(path, many, source, gap=3000)


@pytest.mark.parametrize("way", thin.WAYS)
def test_a_library_still_loads_with_one_architecture(large, tmp_path, way):
    path = tmp_path / large.name
    entries = fatbin.read(large)
    stay = choice.kept(entries, [(9, 0)])
    assert thin.write(large, path, stay, way)
    loaded = ctypes.CDLL(str(path))
    assert loaded.sum() == 42 and ctypes.c_char_p.in_dll(loaded, "text") is not None
    assert ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(loaded, "text"))) == b"before"
    before, after = os.stat(large), os.stat(path)
    kept_images = [e.image() for e in entries if e.at in stay]
    found = fatbin.read(path)
    if way == "holes":
        assert [e.image() for e in found if e.at in stay] == kept_images
        with pytest.raises(fatbin.Damaged, match="and found zeros: it was cut away"):
            found[0].image()
    else:
        assert [e.image() for e in found] == kept_images and {e.arch for e in found} == {"sm_90", "sm_90a"}
        assert agreement.differences(path)[2] == []
    gone = sum(e.stored for e in entries if e.at not in stay)
    assert gone > 1e6
    assert (before.st_size - after.st_size > 0.8 * gone) == (way == "compacted")
    assert after.st_size <= before.st_size and after.st_mode == before.st_mode
    assert 512 * after.st_blocks < before.st_size - 0.8 * gone + 64 * 4096


def test_a_compacted_library_has_its_addresses_and_sections(large, tmp_path):
    path = tmp_path / large.name
    thin.write(large, path, choice.kept(fatbin.read(large), [(9, 0)]), "compacted")
    old, new = elf.OnDisk(large), elf.OnDisk(path)
    assert [(s.name, s.addr) for s in elf.sections(new)] == [(s.name, s.addr) for s in elf.sections(old)]
    for before, after in zip(elf.sections(old), elf.sections(new)):
        if before.type != elf.NOBITS and before.name != ".nv_fatbin":
            assert new.pread(after.size, after.offset) == old.pread(before.size, before.offset), before.name
    pieces = [s for s in elf.segments(new) if s.type == 1]
    assert len(pieces) > len([s for s in elf.segments(old) if s.type == 1])
    for piece in pieces:
        assert (piece.offset - piece.vaddr) % 4096 == 0 and piece.offset + piece.filesz <= new.size
        (whole,) = [s for s in elf.segments(old) if s.type == 1 and s.vaddr <= piece.vaddr < s.vaddr + max(s.memsz, 1)]
        assert (piece.flags, piece.vaddr + piece.memsz <= whole.vaddr + whole.memsz) == (whole.flags, True)


def test_what_loses_nothing_is_a_plain_copy(large, tmp_path):
    stay = {entry.at for entry in fatbin.read(large)}
    for way in thin.WAYS:
        assert not thin.write(large, tmp_path / way, stay, way)
        assert (tmp_path / way).read_bytes() == large.read_bytes()


# Reports


def test_report_counts_what_is_there(env):
    found = report.report(env)
    first = next(library for library in found.libraries if library.name == "lib/libfirst.so")
    one = sum(64 + len(image) + -len(image) % 8 for kind, _, image in parts() if kind == "elf")
    assert sum(size for label, size in first.device.items() if label != "PTX 9.0") == 3 * one
    assert first.entries == 3 * len(parts()) and first.size == (env / first.name).stat().st_size
    assert [library.name for library in found.libraries[:2]] == ["lib/libfirst.so", "lib/libsecond.so.1"]
    assert len(found.libraries) == 4 and found.damaged == []  # links count once
    assert set(found.by_label()) == {*ARCHES, "PTX"} and sum(found.by_label().values()) == found.stored
    mine = sum(found.by_label()[label] for label in ("sm_90", "sm_90a"))
    assert found.share_for((9, 0)) == pytest.approx(mine / found.stored)
    assert "all 4" in str(found.library_table(most=1)) and "3 others" in str(found.library_table(most=1))


def test_report_command(env, tmp_path, capsys):
    code, out, err = said(capsys, "report", env, "--json", tmp_path / "r.json", "--picture", tmp_path / "r.png")
    assert code == 0 and err == "" and "libfirst.so" in out and "sm_120" in out
    assert (tmp_path / "r.png").stat().st_size > 10_000
    assert {one["name"] for one in json.loads((tmp_path / "r.json").read_text())["libraries"]} >= {"lib/libfirst.so"}
    for option, words in [("--json", "expected a file that can be written"), ("--picture", "expected a")]:
        code, _, err = said(capsys, "report", env, option, tmp_path / "no" / "where.what")
        assert code == 2 and err.startswith(f"{option}: {words}")


def test_a_damaged_library_is_named_and_the_others_are_read(env, tmp_path, capsys):
    shutil.copytree(env / "lib", tmp_path / "lib", symlinks=True)
    data = (env / "lib/libfirst.so").read_bytes()
    (tmp_path / "lib/libshort.so").write_bytes(data[: len(data) // 2])
    (tmp_path / "lib/libtext.so").write_text("INPUT(libfirst.so)")
    code, out, err = said(capsys, "report", tmp_path)
    assert code == 0 and "all 6" in out
    assert (
        err.count("notice: ") == 2
        and "libshort.so: expected a " in err
        and "found a file that begins with b'INPU'" in err
    )


# Copies


def test_a_copy_is_whole_and_the_original_untouched(env, to, capsys):
    before = fingerprint(env)
    code, out, err = said(capsys, "cut", env, "--keep-arch", "9.0", "--to", to)
    assert (code, err) == (0, "") and "entries cut from 2 libraries" in out
    assert fingerprint(env) == before
    after = fingerprint(to)
    assert set(after) == {*before, cut.NAME}
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"lib/libfirst.so", "lib/libsecond.so.1", "bin/script", "lib/round"}
    assert os.readlink(to / "lib/round") == str(to) and (to / "bin/script").read_text().startswith(f"#!{to}/bin/python")
    assert {e.arch for e in fatbin.read(to / "lib/libfirst.so")} == {"sm_90", "sm_90a"}
    record = json.loads((to / cut.NAME).read_text())
    assert record["keep"] == ["9.0"] and record["way"] == "compacted" and record["from"] == str(env)
    about = record["libraries"]["lib/libfirst.so"]
    assert about["sha256"] == hashlib.sha256((env / "lib/libfirst.so").read_bytes()).hexdigest()
    kept = {e.at for e in fatbin.read(env / "lib/libfirst.so") if e.arch.startswith("sm_90") and e.kind == "elf"}
    assert set(about["cut"]) == {e.at for e in fatbin.read(env / "lib/libfirst.so")} - kept


def test_links_instead_of_copies(env, to, capsys):
    assert said(capsys, "cut", env, "--keep-arch", "sm_100", "--to", to, "--link", "--way", "holes")[0] == 0
    same = [
        name for name in ("bin/work", "lib/libnone.so", "lib/libfirst.so") if os.path.samefile(env / name, to / name)
    ]
    assert same == ["bin/work", "lib/libnone.so"]


def test_two_architectures_and_ptx(env, to, capsys):
    assert said(capsys, "cut", env, "--keep-arch", "8.0", "--keep-arch", "12.0", "--keep-ptx", "--to", to)[0] == 0
    assert [e.label for e in fatbin.read(to / "lib/libfirst.so")] == 3 * ["sm_80", "sm_120", "PTX 9.0"]
    code, out, _ = said(capsys, "report", to)
    assert code == 0 and "sm_100" not in out


def unwritten(to):
    """Nothing of a copy is left, nor a part of it."""
    return not [path for path in to.parent.iterdir() if path.name.startswith(to.name)]


def bad_environments(tmp_path, env):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "ring").mkdir()
    (tmp_path / "ring" / "self").symlink_to("../ring")
    return {
        "empty": r"expected shared libraries \(\*\.so\) below .*empty and found none",
        "ring": r"expected shared libraries \(\*\.so\) below .*ring and found none",
        "file": "expected a folder and found a file",
        "nowhere": "expected a folder that can be read and found .*nowhere: no such file",
        "round": "expected a folder that can be read and found .*round: (links that lead in a circle|too many levels)",
    }


def test_bad_environments_get_a_sentence(env, tmp_path, to, capsys):
    for name, words in bad_environments(tmp_path, env).items():
        for more in (["report"], ["cut", "--keep-arch", "9.0", "--to", to], ["trace", "--out", tmp_path / "t"]):
            kind, *rest = more
            tail = ["--", "true"] if kind == "trace" else []
            code, out, err = said(capsys, kind, tmp_path / name, *rest, *tail)
            assert (code, out) == (2, "") and len(err.splitlines()) == 1
            with pytest.raises(Problem, match=words):
                raise Problem(err)
    assert unwritten(to) and not (tmp_path / "t").exists()


def test_no_rights_get_a_sentence(env, tmp_path, capsys, monkeypatch):
    """As root nothing is forbidden: then the system's answer is made up."""
    shutil.copytree(env / "lib", tmp_path / "lib", symlinks=True)
    real_open, real_list = open, os.listdir

    def denied(path, *args, **more):
        if str(path).endswith("libfirst.so"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real_open(path, *args, **more)

    monkeypatch.setattr("builtins.open", denied)
    code, out, err = said(capsys, "report", tmp_path)
    assert code == 0 and "lib/libfirst.so: expected a file that can be read and found: permission denied" in err
    code, _, err = said(capsys, "cut", tmp_path, "--keep-arch", "9.0", "--to", tmp_path.with_name("copied"))
    assert code == 2 and err.startswith("expected a file that can be read and found ") and "permission denied" in err
    monkeypatch.undo()

    def unlisted(path):
        if str(path) == str(tmp_path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real_list(path)

    monkeypatch.setattr(os, "listdir", unlisted)
    code, _, err = said(capsys, "report", tmp_path)
    assert (
        code == 2
        and err == f"ENVIRONMENT: expected a folder that can be read and found {tmp_path}: permission denied\n"
    )


def test_bad_targets_get_a_sentence(env, to, tmp_path, capsys, monkeypatch):
    def refused(*words, target=to):
        code, out, err = said(capsys, "cut", env, "--to", target, *words)
        assert (code, out) == (2, "") and len(err.splitlines()) == 1
        return err

    keep = ["--keep-arch", "9.0"]
    assert "expected a folder outside of ENVIRONMENT" in refused(*keep, target=env / "copy")
    assert "expected a folder to make it in and found none" in refused(*keep, target=tmp_path / "a" / "b")
    assert 'expected a capability such as 9.0 and found "ninety"' in refused("--keep-arch", "ninety")
    err = refused("--keep-arch", "7.0")
    assert "an architecture that a library has code for and found 7.0; there are PTX 9.0, sm_100" in err
    assert "expected rewritten or compacted with --used and found holes" in refused(
        *keep, "--way", "holes", "--used", "x"
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    assert "GB of room for the copy and found 0.00" in refused(*keep)
    assert unwritten(to)
    monkeypatch.undo()
    to.symlink_to("nowhere")
    assert "expected a folder that is not there yet and found one" in refused(*keep)
    assert os.readlink(to) == "nowhere"


@pytest.mark.parametrize(
    "end", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"), ValueError("x")]
)
def test_whatever_ends_it_the_copy_so_far_is_removed(env, to, capsys, monkeypatch, end):
    real, seen = shutil.copy2, []

    def stopping(source, target, **more):
        seen.append(len(list(to.parent.glob("copy.*.part"))))
        if len(seen) == 3:
            raise end
        return real(source, target, **more)

    monkeypatch.setattr(shutil, "copy2", stopping)
    words = ["cut", env, "--keep-arch", "9.0", "--to", to]
    if isinstance(end, ValueError):  # a fault of ours is shown as one
        with pytest.raises(ValueError, match="x"):
            said(capsys, *words)
    else:
        code, _, err = said(capsys, *words)
        interrupted = isinstance(end, KeyboardInterrupt)
        assert code == (130 if interrupted else 2)
        assert err == "cut: interrupted; the copy so far is removed\n" if interrupted else "no space left" in err
    assert seen == [1, 1, 1] and unwritten(to)


# Workloads, on a card that is a program


@pytest.fixture(scope="module")
def traced(env):
    """A trace of a workload that loads one cubin of two containers' three."""
    path = env.parent / "trace.json"
    trace.trace(env, work(env, "sm_90"), path)
    return path


def test_a_trace_names_what_was_loaded(env, traced):
    found = json.loads(traced.read_text())
    first = [e.at for e in fatbin.read(env / "lib/libfirst.so") if e.arch == "sm_90" and e.kind == "elf"]
    second = [e.at for e in fatbin.read(env / "lib/libsecond.so.1") if e.arch == "sm_90"]
    used = {name: one["used"] for name, one in found["libraries"].items()}
    assert used == {"lib/libfirst.so": first, "lib/libsecond.so.1": second} and len(first) == 3
    assert found["kernels"] == ["gemv"] and found["modules"] == 1 and found["elsewhere"] == []


def test_modules_from_elsewhere_are_counted(env, tmp_path):
    other = cubins()["sm_120"][:-8] + b"elsewher"
    code, _ = cut.device_code(env)
    found = trace.record(env, ["x"], [cubins()["sm_90a"], other], ["gemv"], code)
    assert found["modules"] == 2 and found["elsewhere"] == [{"bytes": len(other), "kernels": ["gemv", "zero"]}]
    assert [len(one["used"]) for one in found["libraries"].values()] == [3, 1]


def test_a_copy_of_what_is_used_does_the_same(env, traced, to, capsys):
    assert said(capsys, "cut", env, "--keep-arch", "9.0", "--used", traced, "--to", to)[0] == 0
    assert [e.arch for e in fatbin.read(to / "lib/libfirst.so")] == 3 * ["sm_90"]
    code, out, err = said(capsys, "verify", env, to, "--", *work(env, "sm_90"))
    assert (code, err) == (0, "") and out.endswith("the same output, lazy and eager\n")
    for row in ("files, MB", "on disk, MB", "zstd, MB", "lazy: peak memory, MB", "eager: run, s"):
        assert row in out


def test_a_kernel_that_was_cut_is_named(env, traced, to, capsys):
    cut.cut(env, to, [(9, 0)], [traced])
    code, out, _ = said(capsys, "verify", env, to, "--no-zstd", "--", *work(env, "sm_90", "sm_90a", kernel="zero"))
    assert code == 1
    assert (
        "lazy: the copy's run ended with 1: RuntimeError: CUDA error: invalid device ordinal (CUDA's words for" in out
    )
    assert "lib/libfirst.so: zero (sm_90a) was cut" in out and "gemv" not in out.split("was cut")[0].splitlines()[-1]
    assert f"cut {env} --keep-arch 9.0 --used {traced} --used more.json --to {to}.new" in out
    code, out, _ = said(capsys, "explain", env, to, "--", *work(env, "sm_90", "sm_90a", kernel="zero"))
    assert code == 0 and "zero (sm_90a) was cut" in out


def test_the_way_to_keep_it_keeps_it(env, traced, to, tmp_path):
    wanted = work(env, "sm_90", "sm_90a", kernel="zero")
    trace.trace(env, wanted, tmp_path / "more.json")
    cut.cut(env, to, [(9, 0)], [traced, tmp_path / "more.json"])
    assert verify.verify(env, to, wanted, zstd=False)[1] == []


def test_another_card_is_told(env, to, capsys):
    """A copy for one card, and a workload that loads another's code."""
    cut.cut(env, to, [(9, 0)])
    code, out, _ = said(capsys, "explain", env, to, "--", *work(env, "sm_80"))
    assert code == 0 and "gemv (sm_80) was cut" in out and "--keep-arch 9.0 --keep-arch 8.0 --to" in out
    fine = explain.explain(env, to, work(env, "sm_90"))
    assert fine == ["no kernel that this command loads was cut: it fails for another reason"]


def test_another_output_is_seen(env, to, capsys):
    cut.cut(env, to, [(9, 0)])
    shutil.copy(env / "cubins/sm_90a.cubin", to / "cubins/sm_90.cubin")
    code, out, _ = said(capsys, "verify", env, to, "--no-zstd", "--", *work(env, "sm_90"))
    assert code == 1 and "lazy: the copy's output is another: line 2 differs" in out


def test_workloads_that_cannot_be_compared(env, to, capsys):
    cut.cut(env, to, [(9, 0)])
    for words, problem in [
        (["sh", "-c", "echo $$"], "expected a command that writes the same each time and found one that does not"),
        (
            ["sh", "-c", "echo bad >&2; exit 7"],
            f"a command that succeeds in {env} and found one that ended with 7: bad",
        ),
        (["no-such-program"], "expected a command that starts and found no-such-program: no such file"),
        ([], "verify: expected a command behind -- and found none"),
    ]:
        code, _, err = said(capsys, "verify", env, to, "--", *words)
        assert code == 2 and problem in err, err
    code, _, err = said(capsys, "verify", env, env, "--", "true")
    assert code == 2 and "COPY: expected a folder that `cut` made and found " in err
    shutil.copytree(to, to.with_name("moved"), symlinks=True)
    other = json.loads((to / cut.NAME).read_text()) | {"from": "/elsewhere"}
    (to / cut.NAME).write_text(json.dumps(other))
    assert (
        f"COPY: expected a copy of {env} and found one of /elsewhere"
        in said(capsys, "verify", env, to, "--", "true")[2]
    )


def test_traces_that_cannot_be_made(env, tmp_path, capsys, monkeypatch):
    out = tmp_path / "t.json"
    code, _, err = said(capsys, "trace", env, "--out", out, "--", "echo", "hello")
    assert code == 2 and "a command that uses a card and found that no process did: it ended with 0" in err
    code, _, err = said(capsys, "trace", env, "--out", tmp_path / "no" / "t", "--", "true")
    assert code == 2 and "--out: expected a folder to write it in" in err
    code, _, err = said(capsys, "trace", env, "--out", out, "--", *work(env, "sm_90"), str(env / "cubins/none"), "x")
    assert code == 2 and "expected a command that succeeds and found one that ended with 3" in err
    monkeypatch.setenv("SLIM_CUPTI", str(tmp_path / "none.so"))
    code, _, err = said(capsys, "trace", env, "--out", out, "--", *work(env, "sm_90"))
    assert code == 2 and "expected SLIM_CUPTI to name libcupti.so" in err
    (tmp_path / "none.so").write_text("no library")
    code, _, err = said(capsys, "trace", env, "--out", out, "--", *work(env, "sm_90"))
    assert code == 2 and "CUPTI (" in err and "does not answer: -1" in err
    assert not out.exists()


def test_traces_of_another_version_are_refused(env, traced, to, tmp_path, capsys):
    good = json.loads(traced.read_text())

    def refused(record):
        path = tmp_path / "changed.json"
        path.write_text(record if isinstance(record, str) else json.dumps(record))
        code, _, err = said(capsys, "cut", env, "--keep-arch", "9.0", "--used", path, "--to", to)
        assert code == 2 and unwritten(to)
        return err

    def changed(name, **values):
        return good | {"libraries": good["libraries"] | {name: good["libraries"].get(name, {}) | values}}

    assert "another version of lib/libfirst.so (sha256 0000" in refused(changed("lib/libfirst.so", sha256="0" * 64))
    assert "which has lib/libx.so, too" in refused(changed("lib/libx.so", sha256="0" * 64, used=[]))
    assert "which lacks lib/libsecond.so.1" in refused(
        good | {"libraries": {"lib/libfirst.so": good["libraries"]["lib/libfirst.so"]}}
    )
    assert "expected a trace of this version" in refused(good | {"schema": 99})
    assert "expected a trace of this version" in refused("{")
    code, _, err = said(capsys, "cut", env, "--keep-arch", "9.0", "--used", tmp_path / "no.json", "--to", to)
    assert code == 2 and "expected a trace and found" in err and "no such file" in err


def test_measuring_goes_all_the_way(env, tmp_path, monkeypatch):
    """The command that a machine with a card runs, on workloads for the card that is a program."""
    loads = {"one": ["sm_90"], "two": ["sm_90", "sm_100"], "unseen": ["sm_90", "sm_90a"]}
    lines = []
    monkeypatch.setattr(measure, "WORKLOADS", ("one", "two"))
    monkeypatch.setattr(measure, "TIMED", "one")
    monkeypatch.setattr(measure, "PACKAGES", ("lib",))
    monkeypatch.setattr(measure, "words_of", lambda name: work(env, *loads[name], kernel=name))
    monkeypatch.setattr(measure.torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(measure.running, "run", _without_reports(measure.running.run))
    saved = []
    one = measure.Measuring(env, tmp_path, lines.append, lambda tables: saved.append(len(tables)))
    one.there()
    outputs = one.loaded()
    one.copies(outputs), one.copy_of_one(outputs), one.timed(1), one.asked_for_more()
    tables = {table.title: table.rows for table in one.tables}
    assert tables["All of it"]["torch, and what comes with it"]["libraries"] == 4
    assert tables["Who is loaded"]["two"] == {
        "modules": 2, "of libraries": 2, "from elsewhere": 0, "kernels launched": 1
    }  # fmt: skip
    assert saved == [1, 2, 3, 4, 5, 6, 7, 8]
    copies = tables["Copies"]
    assert copies["as it comes"]["the same output"] == "2 of 2"
    assert copies["other architectures gone"]["the same output"] == "1 of 2, not two"
    assert copies["only what is used"]["the same output"] == "2 of 2"
    by_size = ["only what is used", "other architectures gone", "as it comes"]
    assert sorted(by_size, key=lambda name: copies[name]["device code, MB"]) == [by_size[1], by_size[0], by_size[2]]
    of_one = tables["A copy for one alone"]["only what one uses"]
    assert of_one["the same output"] == "1 of 1"
    assert of_one["device code, MB"] < copies["only what is used"]["device code, MB"]
    timed = {"eager: as it comes", "lazy: only what is used", "eager: only what one uses"}
    assert set(tables["Memory and time of one"]) >= timed
    last = {name: row["what"] for name, row in tables["A kernel that was cut"].items()}
    assert last["CUDA's words"].endswith("CUDA error: invalid device ordinal") and last["explain, kernels named"] == 4
    assert last["explain, the first"] == "lib/libfirst.so: gemv (sm_90a) was cut"
    assert not [path for path in tmp_path.iterdir() if "holes" in path.name]


def _without_reports(real):
    """running.run, but a report by a process of its own, which takes seconds, is none."""

    def run(words, *args):
        return real(["true"] if "report" in words else words, *args)

    return run


def test_what_a_run_takes_is_measured():
    hungry = "import sys, time; print('a', flush=True); time.sleep(0.3); x = bytearray(200_000_000); print(len(x))"
    done = running.run([sys.executable, "-c", hungry], sys.prefix)
    assert done.code == 0 and done.output == b"a\n200000000\n"
    assert done.peak > 200e6 and done.seconds - done.first > 0.25 and done.first > 0
    small = running.run([sys.executable, "-c", "pass"], sys.prefix)
    assert small.peak < 100e6 and small.output == b""


def test_names_of_the_environment_become_the_copys():
    words = ["/e/bin/python", "/e", "/elsewhere", "x/e/y", "--lib=/e/x"]
    assert running.command_in(words, "/e", "/c") == ["/c/bin/python", "/c", "/elsewhere", "x/e/y", "--lib=/e/x"]


def test_cuptis_headers_say_what_inject_declares():
    """Where CUDA's headers are at hand: numbers and layouts."""
    home = Path("/usr/local/cuda/include")
    if not (home / "cupti.h").is_file():
        pytest.skip("no CUPTI headers")
    source = trace.SOURCE.read_text().split("static const")[0].replace("DRIVER = 1", "DRIVER_ = 1")
    check = """
    #include <cupti.h>
    #include <stddef.h>
    _Static_assert(offsetof(Module, size) == offsetof(CUpti_ModuleResourceData, cubinSize), "");
    _Static_assert(offsetof(Module, cubin) == offsetof(CUpti_ModuleResourceData, pCubin), "");
    _Static_assert(offsetof(Resource, descriptor) == offsetof(CUpti_ResourceData, resourceDescriptor), "");
    _Static_assert(offsetof(Call, result) == offsetof(CUpti_CallbackData, functionReturnValue), "");
    _Static_assert(offsetof(Call, symbol) == offsetof(CUpti_CallbackData, symbolName), "");
    _Static_assert(MODULE_LOADED == CUPTI_CBID_RESOURCE_MODULE_LOADED && EXIT == CUPTI_API_EXIT, "");
    """
    done = subprocess.run(["cc", "-fsyntax-only", "-x", "c", f"-I{home}", "-"], input=source + check, text=True)
    assert done.returncode == 0
