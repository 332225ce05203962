"""Find the fat binaries of a file, and their entries, by reading headers alone."""

import errno
import os
from pathlib import Path

from lab.fatbin import elf
from lab.fatbin.damage import Damaged, expect
from lab.fatbin.entry import CONTAINER, HEAD, KINDS, MAGIC, Entry

SECTIONS = ".nv_fatbin", "__nv_relfatbin"
ARCHIVE, MEMBER = b"!<arch>\n", 60
CHUNK = 1 << 16


class Part:
    """A file from byte `base`, `size` bytes of it, read as if it were one of its own."""

    def __init__(self, descriptor, path, base, size):
        self.descriptor, self.path, self.base, self.size = descriptor, path, base, size

    def pread(self, size, at):
        return os.pread(self.descriptor, max(0, min(size, self.size - at)), self.base + at)


def read(path):
    """[Entry, ...]: the device code of a file, in the order in which it lies there.

    path  a library, program or object file (ELF), a static library (.a), a fat binary, or a cubin

    An ELF file without device code has none: []. Raises Damaged for a file of another kind, one that is cut short or
    contradicts itself; OSError for one that cannot be read.
    """
    path = os.fspath(Path(path))
    with open(path, "rb") as f:
        found = []
        for part in _parts(f.fileno(), path):
            if part.pread(4, 0) == elf.MAGIC and elf.header(part).machine == elf.CUDA:
                found.append(_whole(part))
            else:
                for section, at, head, size in _containers(part):
                    found += _entries(part, section, at, head, size)
        return found


def containers(path):
    """[(section, byte in the file, bytes of header, bytes of what follows), ...]: the containers of a file."""
    path = os.fspath(Path(path))
    with open(path, "rb") as f:
        parts = _parts(f.fileno(), path)
        found = [(part, one) for part in parts if not _is_cubin(part) for one in _containers(part)]
        return [(section, part.base + at, head, size) for part, (section, at, head, size) in found]


def _is_cubin(part):
    return part.pread(4, 0) == elf.MAGIC and elf.header(part).machine == elf.CUDA


def _parts(descriptor, path):
    """The file itself; of an archive its members that are ELF files."""
    whole = Part(descriptor, path, 0, os.fstat(descriptor).st_size)
    start = whole.pread(8, 0)
    if start != ARCHIVE:
        magic = CONTAINER.pack(MAGIC, 0, 0, 0)[:4]
        expect(
            start[:4] in (elf.MAGIC, magic),
            *(path, "an ELF file, an archive of some, or a fat binary"),
            f"a file that begins with {start[:4]!r}" if start else "an empty file",
        )
        return [whole]
    found, at = [], len(ARCHIVE)
    while at + MEMBER <= whole.size:
        head = whole.pread(MEMBER, at)
        expect(head[58:] == b"`\n" and head[48:58].strip().isdigit(), path, f"a member at byte {at:,}", "none")
        size = int(head[48:58])
        end = at + MEMBER + size
        expect(end <= whole.size, path, f"a member that ends at byte {end:,}", f"{whole.size:,} bytes: cut short")
        member = Part(descriptor, path, at + MEMBER, size)
        if member.pread(4, 0) == elf.MAGIC:
            found.append(member)
        at = end + end % 2
    return found


def _containers(part):
    """(section, at, size of the header, size of what follows) of each container."""
    if part.pread(4, 0) != elf.MAGIC:
        places = [("", 0, part.size)]
    else:
        sections = [s for s in elf.sections(part) if s.type != elf.NOBITS]
        places = [(s.name, s.offset, s.offset + s.size) for s in sections if s.name in SECTIONS]
    for section, at, end in places:
        while (at := _next(part, at, end)) is not None:
            magic, version, head, size = CONTAINER.unpack(part.pread(CONTAINER.size, at))
            if version != 1 or head < CONTAINER.size:
                raise Damaged(
                    f"{os.path.basename(part.path)}: expected a fat binary of version 1 at byte {part.base + at:,} "
                    f"and found version {version}, a header of {head} bytes"
                )
            beyond = f"one that ends at {part.base + at + head + size:,}"
            limit = f"a fat binary that ends by byte {part.base + end:,}"
            expect(at + head + size <= end, part.path, limit, beyond)
            yield section, at, head, size
            at += head + size


def _next(part, at, end):
    """Where the next container begins, None if there is none: at a multiple of 8, behind zeros or the remains of
    entries that were cut. Holes of the file are passed over unread."""
    magic = CONTAINER.pack(MAGIC, 0, 0, 0)[:4]
    begin = at
    while at + CONTAINER.size <= end:
        data = part.pread(min(CHUNK, end - at), at)
        place = data.find(magic)
        while place >= 0 and (at + place - begin) % 8:
            place = data.find(magic, place + 1)
        if place >= 0:
            return at + place if at + place + CONTAINER.size <= end else None
        if len(data) < CHUNK:
            return None
        at += CHUNK - 8
        if not any(data):
            try:  # to where data begins again, at a multiple of 8 from here
                there = os.lseek(part.descriptor, part.base + at, os.SEEK_DATA) - part.base
            except OSError as error:
                if error.errno == errno.ENXIO:  # there is none
                    return None
                there = at  # a file system that knows no holes
            except AttributeError:  # nor does the system
                there = at
            at += max(0, there - at) // 8 * 8
    return None


def _entries(part, section, at, head, size):
    begin, end, found = part.base + at, at + head + size, []
    at += head
    while at + HEAD.size <= end:
        kind, _, header, padded, packed, _, _, _, number, name_at, name_length, flags, _, unpacked = HEAD.unpack(
            part.pread(HEAD.size, at)
        )
        after = at + header + padded
        if header < HEAD.size or after > end or packed > padded:
            raise Damaged(
                f"{os.path.basename(part.path)}: expected an entry within the fat binary at byte {begin:,}, and found "
                f"one at byte {part.base + at:,} that ends at {part.base + after:,}, behind {part.base + end:,}"
                if header >= HEAD.size and packed <= padded
                else f"{os.path.basename(part.path)}: expected an entry at byte {part.base + at:,} and found a header "
                f"of {header} bytes with {packed:,} packed bytes of {padded:,}"
            )
        name = part.pread(name_length, at + name_at).rstrip(b"\0").decode(errors="replace") if name_length else ""
        is_packed = packed and unpacked
        place = (part.path, begin, part.base + at, header, padded, packed if is_packed else 0)
        sizes = unpacked if is_packed else padded
        found.append(Entry(*place, sizes, KINDS.get(kind, f"kind {kind}"), number, flags, section, name))
        at = after
    return found


def _whole(part):
    """The entry that a cubin is, as a file."""
    flags = elf.header(part).flags
    number = flags >> 8 & 0xFF if flags >> 24 else flags & 0xFF  # newer cubins have it in the second byte
    return Entry(part.path, part.base, part.base, 0, part.size, 0, part.size, "elf", number, 0x11, "")
