"""ELF files of 64 bits, little-endian: sections, symbols, program headers. Read from anything with pread(size, at)."""

import os
import struct
from collections import namedtuple

from lab.fatbin.damage import expect

MAGIC = b"\x7fELF"
CUDA = 190  # e_machine of a cubin
HEAD = struct.Struct(
    "<16xHHIQQQIHHHHHH"
)  # type machine version entry phoff shoff flags ehsize ph-size n sh-size n names
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
SEGMENT = struct.Struct("<IIQQQQQQ")
NOBITS, SYMTAB, FUNCTION, KERNEL = 8, 2, 2, 0x10

Header = namedtuple("Header", "type machine version entry phoff shoff flags ehsize phsize phnum shsize shnum shnames")
Section = namedtuple("Section", "name_at type flags addr offset size link info align entry_size name")
Segment = namedtuple("Segment", "type flags offset vaddr paddr filesz memsz align")


class Bytes:
    """An image in memory, read as a file is."""

    def __init__(self, data, path):
        self.data, self.path, self.size = data, path, len(data)

    def pread(self, size, at):
        return self.data[at : at + size]


class OnDisk:
    """A file, opened for each reading."""

    def __init__(self, path):
        self.path, self.size = path, os.path.getsize(path)

    def pread(self, size, at):
        with open(self.path, "rb") as f:
            return os.pread(f.fileno(), size, at)


def header(file):
    """The Header of an ELF file; Damaged if it is none, or of another kind than 64 bits little-endian."""
    raw = file.pread(64, 0)
    expect(raw[:4] == MAGIC, file.path, "an ELF file", f"a file that begins with {raw[:4]!r}")
    expect(raw[4:6] == b"\x02\x01", file.path, "an ELF file of 64 bits, little-endian", "one of another kind")
    expect(len(raw) == 64, file.path, "a header of 64 bytes", f"a file of {len(raw)}")
    return Header(*HEAD.unpack(raw))


def table(file, layout, at, size, count, of):
    """The `count` structures of a table; Damaged if it does not lie within the file."""
    expect(size == layout.size or not count, file.path, f"{of} of {layout.size} bytes each", f"of {size}")
    end = at + size * count
    expect(end <= file.size, file.path, f"a table of {of} that ends at byte {end:,}", f"{file.size:,} bytes: cut short")
    return list(layout.iter_unpack(file.pread(size * count, at)))


def sections(file):
    """[Section, ...] with their names, the empty first one included. Each with bytes in the file lies within it."""
    head = header(file)
    count = head.shnum
    if head.shoff and not count:  # more than 65,279: their number stands in the first one's size
        ((_, _, _, _, _, count, *_),) = table(file, SECTION, head.shoff, head.shsize, 1, "sections")
    raw = table(file, SECTION, head.shoff, head.shsize, count, "sections")
    if not raw:
        return []
    names_of = head.shnames if head.shnames != 0xFFFF else raw[0][6]
    expect(names_of < count, file.path, f"the names among {count} sections", f"number {names_of}")
    for fields in raw:
        end = fields[4] + fields[5]
        expect(
            fields[1] in (0, NOBITS) or end <= file.size,
            *(file.path, f"a section that ends at byte {end:,}", f"{file.size:,} bytes: cut short"),
        )
    names = file.pread(raw[names_of][5], raw[names_of][4])
    return [
        Section(*fields, names[fields[0] : names.find(b"\0", fields[0])].decode(errors="replace")) for fields in raw
    ]


def _name(names, at):
    return names[at : names.find(b"\0", at)].decode(errors="replace")


def segments(file):
    """[Segment, ...]: the program headers, by which a loader goes."""
    head = header(file)
    return [Segment(*fields) for fields in table(file, SEGMENT, head.phoff, head.phsize, head.phnum, "segments")]


def kernels(file):
    """Names of a cubin's kernels, in order: its functions that are marked as entries."""
    found, parts = set(), sections(file)
    for part in parts:
        if part.type != SYMTAB:
            continue
        count = part.size // SYMBOL.size
        expect(part.link < len(parts), file.path, "names of symbols", f"section {part.link} of {len(parts)}")
        names = file.pread(parts[part.link].size, parts[part.link].offset)
        for name, info, other, _, _, _ in table(file, SYMBOL, part.offset, SYMBOL.size, count, "symbols"):
            if info & 15 == FUNCTION and other & KERNEL:
                found.add(_name(names, name))
    return tuple(sorted(found))


def length(file):
    """Bytes of an ELF image, which something may follow: up to the end of its tables and sections."""
    head = header(file)
    ends = [s.offset + s.size for s in sections(file) if s.type not in (0, NOBITS)]
    return max([64, head.shoff + head.shsize * head.shnum, head.phoff + head.phsize * head.phnum, *ends])
