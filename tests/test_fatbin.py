"""Device code inside libraries: read against NVIDIA's own tool, written and reread, and every damage a sentence."""

import os
import struct
import sys

import pytest
from fat_libraries import ARCHES, KERNELS, cubins, parts

from lab import fatbin
from lab.fatbin import agreement, elf
from lab.fatbin.entry import CONTAINER, HEAD


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{name: path}: files of every kind that is read."""
    folder = tmp_path_factory.mktemp("fat")
    packed = {name or "plain": fatbin.container(parts(), name) for name in ("", "zstd", "lz4")}
    files = {}
    for name, data in packed.items():
        files[f"{name}.fatbin"] = data
    files["one.cubin"] = cubins()["sm_90"]
    for name, data in files.items():
        (folder / name).write_bytes(data)
    fatbin.library(folder / "three.so", packed.values(), "int answer(void) { return 42; }", gap=5000)
    fatbin.library(folder / "none.so", [], "int answer(void) { return 42; }")
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["plain.fatbin", "zstd.fatbin", "lz4.fatbin", "three.so", "one.cubin"])
def test_as_cuobjdump_reads_it(made, name):
    entries, deep, problems = agreement.differences(made[name])
    if name == "one.cubin":
        (entry,) = fatbin.read(made[name])
        assert (entry.kind, entry.arch, entry.kernels) == ("elf", "sm_90", KERNELS)
        return
    assert problems == [] and deep
    assert entries == len(parts()) * (3 if name == "three.so" else 1)


def test_a_difference_is_seen(made, monkeypatch):
    """The comparison is no formality: another name, another byte or another architecture is told."""
    real = fatbin.read(made["zstd.fatbin"])
    cubin = next(e for e in real if e.kind == "elf")

    def other(**changes):
        entry = type(cubin)(**{**{f: getattr(cubin, f) for f in cubin.__dataclass_fields__}, **changes})
        monkeypatch.setattr(agreement, "read", lambda path: [entry if e is cubin else e for e in real])
        return entry

    other(number=75)
    assert "cuobjdump lists" in agreement.differences(made["zstd.fatbin"])[2][0]
    object.__setattr__(other(), "kernels", ("another",))
    assert agreement.differences(made["zstd.fatbin"])[2] == ["the kernels of 1 cubins"]
    object.__setattr__(other(), "image", lambda: cubin.image()[:-1] + b"!")
    assert "1 images of elf" in agreement.differences(made["zstd.fatbin"])[2][0]


def test_installed_libraries_are_read():
    """Of what is installed here: most hold no device code, and one that does is read as cuobjdump reads it."""
    import cuda.bindings
    import triton

    folders = [os.path.dirname(p) for p in (triton.__file__, cuda.bindings.__file__)]
    found = [os.path.join(f, n) for folder in folders for f, _, names in os.walk(folder) for n in names if ".so" in n]
    found = [path for path in found if os.path.getsize(path) < 30e6]
    assert len(found) > 20
    for path in found:
        if fatbin.read(path):
            assert agreement.differences(path)[2] == []


@pytest.mark.parametrize("compression", ["", "zstd", "lz4"])
def test_what_is_written_is_read_again(made, compression):
    entries = fatbin.read(made[f"{compression or 'plain'}.fatbin"])
    assert [(e.kind, e.arch, e.image()) for e in entries] == parts()
    assert {e.compression for e in entries} == {compression}
    assert all(e.kernels == KERNELS for e in entries)
    for e, (_, _, image) in zip(entries, parts()):
        padded = len(image) + -len(image) % 8
        assert e.size == (len(image) if compression else padded)
        assert e.stored == (padded if not compression else e.packed + -e.packed % 8)
    assert sum(e.header + e.stored for e in entries) + 16 == os.path.getsize(made[f"{compression or 'plain'}.fatbin"])


def test_a_library_of_several_containers(made):
    entries = fatbin.read(made["three.so"])
    assert [e.image() for e in entries] == 3 * [image for _, _, image in parts()]
    found = fatbin.containers(made["three.so"])
    assert len(found) == 3 == len({e.container for e in entries}) and {s for s, *_ in found} == {".nv_fatbin"}
    assert fatbin.read(made["none.so"]) == [] == fatbin.read(sys.executable)


def test_an_object_file_and_an_archive(made, tmp_path):
    """ar's format, members of odd length among them, and one that is no ELF file."""
    library, text = made["three.so"].read_bytes(), b"odd"
    data = b"!<arch>\n"
    for member in (text, library, text, library):
        data += b"x/".ljust(16) + b"0".ljust(32) + str(len(member)).encode().ljust(10) + b"`\n"
        data += member + b"\n" * (len(member) % 2)
    path = tmp_path / "lib.a"
    path.write_bytes(data)
    entries = fatbin.read(path)
    assert [e.image() for e in entries] == 6 * [image for _, _, image in parts()]
    assert len(fatbin.containers(path)) == 6 and fatbin.containers(path)[0][1] == entries[0].container
    path.write_bytes(data[:-100])
    with pytest.raises(fatbin.Damaged, match="lib.a: expected a member that ends at byte .* cut short"):
        fatbin.read(path)


def test_relocatable_code(made, tmp_path):
    """Code that was to be linked later lies in a section of another name."""
    data = made["three.so"].read_bytes()
    names = [s for s in elf.sections(elf.Bytes(data, "three.so")) if s.name == ".shstrtab"][0]
    table = data[names.offset : names.offset + names.size]
    at = names.offset + table.index(b".nv_fatbin")
    path = tmp_path / "relocatable.o"
    path.write_bytes(data[:at] + b".nv_fatbiX" + data[at + 10 :])
    assert fatbin.read(path) == []
    section = next(s for s in elf.sections(elf.Bytes(data, "x")) if s.name == ".nv_fatbin")
    head = elf.header(elf.Bytes(data, "x"))
    number = [s.name for s in elf.sections(elf.Bytes(data, "x"))].index(".nv_fatbin")
    changed = bytearray(data) + b"\0__nv_relfatbin\0"
    struct.pack_into("<I", changed, head.shoff + 64 * number, len(data) + 1 - names.offset)
    struct.pack_into("<Q", changed, head.shoff + 64 * head.shnames + 32, len(data) + 16 - names.offset)
    path.write_bytes(changed)
    found = fatbin.read(path)
    assert {e.section for e in found} == {"__nv_relfatbin"} and len(found) == 3 * len(parts())
    assert found[0].container >= section.offset


def test_runs_on_follows_cudas_rules():
    def entry(kind, number, flags=0x11):
        return fatbin.Entry("x", 0, 0, 64, 8, 0, 8, kind, number, flags, "")

    assert entry("elf", 86).runs_on((8, 6)) and entry("elf", 86).runs_on((8, 9)) and entry("elf", 80).runs_on((8, 6))
    assert not entry("elf", 86).runs_on((8, 0)) and not entry("elf", 80).runs_on((9, 0))
    assert entry("ptx", 80).runs_on((12, 0)) and not entry("ptx", 120).runs_on((9, 0))
    assert entry("elf", 90, 0x100011).runs_on((9, 0)) and not entry("ptx", 90, 0x100011).runs_on((10, 0))
    assert entry("elf", 120, 0x200011).runs_on((12, 1)) and not entry("elf", 100, 0x100011).runs_on((10, 3))
    assert not entry("ptx", 100, 0x200011).runs_on((12, 0)) and entry("ptx", 100, 0x200011).runs_on((10, 3))
    assert [entry("elf", 103, f).arch for f in (0x11, 0x100011, 0x200011)] == ["sm_103", "sm_103a", "sm_103f"]
    assert entry("ptx", 120).label == "PTX 12.0" and entry("elf", 120).capability == (12, 0)


def test_headers_are_all_that_is_read(made, tmp_path):
    """What lies between containers may be gigabytes of a hole."""
    data, far = made["plain.fatbin"].read_bytes(), 1 << 33
    path = tmp_path / "sparse.o"
    with open(path, "wb") as f:
        f.write(data), f.seek(far), f.write(data)
    assert len(fatbin.read(path)) == 2 * len(parts())


# Damage


def changed(data, at, layout, value):
    data = bytearray(data)
    struct.pack_into(layout, data, at, value)
    return bytes(data)


ENTRY = CONTAINER.size  # where the first entry's header begins
DAMAGES = {
    "an empty file": (lambda d: b"", "an ELF file, an archive of some, or a fat binary and found an empty file"),
    "foreign": (lambda d: b"PK\3\4" + d, r"found a file that begins with b'PK\\x03\\x04'"),
    "version": (lambda d: changed(d, 4, "<H", 2), "version 1 at byte 0 and found version 2"),
    "header": (lambda d: changed(d, 6, "<H", 8), "a header of 8 bytes"),
    "cut short": (lambda d: d[:-9], "a fat binary that ends by byte .* and found one that ends at"),
    "container's size": (lambda d: changed(d, 8, "<Q", 1 << 60), "found one that ends at 1,152,921,504,606,8"),
    "entry's size": (
        lambda d: changed(d, ENTRY + 8, "<Q", 1 << 60),
        "within the fat binary at byte 0, and found",
    ),
    "entry's header": (lambda d: changed(d, ENTRY + 4, "<I", 3), "a header of 3 bytes"),
    "packed size": (lambda d: changed(d, ENTRY + 16, "<I", 1 << 30), "1,073,741,824 packed bytes of"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_fat_binaries_get_a_sentence(made, tmp_path, damage):
    change, words = DAMAGES[damage]
    path = tmp_path / "some.fatbin"
    path.write_bytes(change(made["zstd.fatbin"].read_bytes()))
    with pytest.raises(fatbin.Damaged, match=rf"^some.fatbin: expected .*{words}"):
        fatbin.read(path)


def test_damaged_payloads_get_a_sentence(made, tmp_path):
    path = tmp_path / "some.fatbin"
    for name in ("zstd", "lz4"):
        data = bytearray(made[f"{name}.fatbin"].read_bytes())
        data[ENTRY + HEAD.size : ENTRY + HEAD.size + 40] = 40 * b"\xff"
        path.write_bytes(data)
        with pytest.raises(fatbin.Damaged, match=f"expected {name} at byte {ENTRY + HEAD.size} and found bytes that"):
            fatbin.read(path)[0].image()
        size = next(e for e in fatbin.read(made[f"{name}.fatbin"])).size
        path.write_bytes(changed(made[f"{name}.fatbin"].read_bytes(), ENTRY + 56, "<Q", size + 1))
        with pytest.raises(fatbin.Damaged, match="some.fatbin: expected "):
            fatbin.read(path)[0].image()
    path.write_bytes(made["plain.fatbin"].read_bytes())
    entry = fatbin.read(path)[-1]
    path.write_bytes(b"")
    with pytest.raises(fatbin.Damaged, match=r"expected [\d,]+ bytes of .* and found 0: cut short"):
        entry.image()


@pytest.mark.parametrize("keep", [3, 30, 64, 1000, 9000, -1])
def test_truncated_libraries_get_a_sentence(made, tmp_path, keep):
    path = tmp_path / "some.so"
    path.write_bytes(made["three.so"].read_bytes()[:keep])
    with pytest.raises(fatbin.Damaged, match=r"^some.so: expected .* and found "):
        fatbin.read(path)


def test_foreign_elf_files_get_a_sentence(made, tmp_path):
    path, data = tmp_path / "some.so", made["three.so"].read_bytes()
    head = elf.header(elf.Bytes(data, "x"))
    for at, layout, value, words in [
        (4, "B", 1, "64 bits, little-endian, and found one of another kind"),
        (58, "<H", 40, "sections of 64 bytes each and found of 40"),
        (62, "<H", 999, "the names among .* sections and found number 999"),
        (head.shoff + 64 + 32, "<Q", 1 << 50, "a section that ends at byte .*cut short"),
    ]:
        path.write_bytes(changed(data, at, layout, value))
        with pytest.raises(fatbin.Damaged, match=words.replace(", and found", " and found")):
            fatbin.read(path)


def test_what_is_asked_to_be_written_is_checked():
    for part, compression, words in [
        (("elf", "sm_90", b"x"), "gzip", 'compression must be "zstd", "lz4" or "", got \'gzip\''),
        (("sass", "sm_90", b"x"), "", 'a kind must be "elf" or "ptx", got \'sass\''),
        (("elf", "90", b"x"), "", 'such as "sm_90" or "sm_90a", got \'90\''),
        (("elf", "sm_90", "x"), "", "an image must be bytes, got str"),
    ]:
        with pytest.raises((ValueError, TypeError), match=words):
            fatbin.container([part], compression)
    assert set(ARCHES) == {arch for kind, arch, _ in parts() if kind == "elf"}
