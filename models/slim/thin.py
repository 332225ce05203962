"""A copy of one library without some of its device code, in one of three ways.

holes       nothing moves: what was dropped becomes a hole in the file, which takes no room on a disk
rewritten   each container keeps its place and holds the entries that stay, one behind another; then comes a hole
compacted   rewritten, and the holes leave the file: the loader's table (program headers) is split around them.
            Addresses stay as they are, so that no pointer has to change; the file is really shorter
"""

import os
import shutil
from collections import defaultdict
from dataclasses import dataclass

from lab import fatbin
from lab.fatbin import elf
from lab.fatbin.entry import CONTAINER, MAGIC

WAYS = "compacted", "rewritten", "holes"
PAGE = 4096
LEAST = 16 * PAGE  # a hole that is smaller stays in the file: each costs the loader a mapping


@dataclass
class Plan:
    """copies [(from, to, bytes), ...]: spans of the old file and where they go; dead [(begin, end), ...]: what the new
    one has nothing in; patches {at: bytes}. All places are the old file's own, holes not yet taken out."""

    copies: list
    dead: list
    patches: dict


def plan(path, stay, way):
    """The Plan of a copy in which the entries at the places `stay` remain; None if all do."""
    entries = fatbin.read(path)
    gone = [entry for entry in entries if entry.at not in stay]
    if not gone:
        return None
    size = os.path.getsize(path)
    if way == "holes":
        dead = [(entry.at + entry.header, entry.at + entry.header + entry.stored) for entry in gone]
        return Plan(_others(dead, size), dead, {})
    of = defaultdict(list)
    for entry in entries:
        of[entry.container].append(entry)
    moved, patches, dead, touched = [], {}, [], []
    for _, at, head, length in fatbin.containers(path):
        if all(entry.at in stay for entry in of[at]):
            continue
        to = at + head
        for entry in of[at]:
            if entry.at in stay:
                moved.append((entry.at, to, entry.header + entry.stored))
                to += entry.header + entry.stored
        patches[at] = CONTAINER.pack(MAGIC, 1, head, to - at - head)
        touched.append((at + head, at + head + length))
        dead.append((to, at + head + length))
    return Plan(_others(touched, size) + moved, dead, patches)


def _others(spans, size):
    """[(at, at, bytes), ...] of what lies between spans."""
    found, at = [], 0
    for begin, end in sorted(spans):
        found += [(at, at, begin - at)] if begin > at else []
        at = end
    return found + ([(at, at, size - at)] if at < size else [])


def write(source, target, stay, way="compacted", least=LEAST):
    """Write the copy; whether anything was dropped. If nothing was, it is a plain copy.

    least  bytes of a hole that leaves the file of a compacted copy
    """
    made = plan(source, stay, way)
    if made is None:
        shutil.copy2(source, target)
        return False
    size = os.path.getsize(source)
    cuts = _cuts(source, made.dead, least) if way == "compacted" else []
    place = _Places(cuts)
    patches = made.patches | ({} if not cuts else _tables(source, cuts, place, size))
    with open(source, "rb") as f, open(target, "wb") as g:
        g.truncate(place(size))
        for begin, to, length in made.copies:
            _copy(f, g, begin, place(to), length)
        for at, data in patches.items():
            g.seek(place(at))
            g.write(data)
    shutil.copystat(source, target)
    return True


def _copy(f, g, begin, to, length):
    """Copy a span from one file to another; in the kernel, where it can."""
    while length:
        try:
            done = os.copy_file_range(f.fileno(), g.fileno(), length, begin, to)
        except (OSError, AttributeError):  # between file systems, or another system
            done = os.pwrite(g.fileno(), os.pread(f.fileno(), min(length, 1 << 22), begin), to)
        if not done:
            raise OSError(f"{f.name} became shorter while it was copied")
        begin, to, length = begin + done, to + done, length - done


class _Places:
    """Where a byte of the old file lies in the new one: cuts before it are gone."""

    def __init__(self, cuts):
        self.cuts = cuts

    def __call__(self, at):
        return at - sum(min(end, max(begin, at)) - begin for begin, end in self.cuts)


def _cuts(source, dead, least):
    """The whole pages of dead spans that may leave the file: not a segment's last page, for zeros may follow it."""
    whole = elf.OnDisk(source)
    ends = {s.offset + s.filesz for s in elf.segments(whole) if s.type == 1 and s.filesz}
    cuts = []
    for begin, end in sorted(dead):
        begin, last = -(-begin // PAGE) * PAGE, end // PAGE * PAGE
        if any(begin < stop <= last for stop in ends):
            last -= PAGE
        if last - begin >= max(least, PAGE):
            cuts.append((begin, last))
    return cuts


def _tables(source, cuts, place, size):
    """{at in the old file: bytes}: program headers behind the end, section headers, and the header that names them."""
    whole = elf.OnDisk(source)
    head = elf.header(whole)
    program = []
    for segment in elf.segments(whole):
        program += _split(segment, cuts, place)
    at = -(-place(size) // 8) * 8
    sections = []
    for section in elf.sections(whole):
        begin, end = section.offset, section.offset + (0 if section.type == elf.NOBITS else section.size)
        sizes = section.size if section.type == elf.NOBITS else place(end) - place(begin)
        sections.append(elf.SECTION.pack(*section._replace(offset=place(begin), size=sizes)[:10]))
    fields = head._replace(phoff=at, shoff=place(head.shoff), phsize=elf.SEGMENT.size, phnum=len(program))
    table = b"".join(elf.SEGMENT.pack(*segment) for segment in program)
    found = {0: whole.pread(16, 0) + elf.HEAD.pack(*fields)[16:], head.shoff: b"".join(sections)}
    return found | {size + at - place(size): table}


def _split(segment, cuts, place):
    """What becomes of a segment: itself at its new place, or the pieces between cuts."""
    if segment.type == 6:  # the table of segments itself: a loader that finds none reads the file's
        return []
    if segment.type != 1:
        return [segment._replace(offset=place(segment.offset))]
    end, found = segment.offset + segment.filesz, []
    inside = [(a, z) for a, z in cuts if segment.offset <= a and z <= end]
    at = segment.offset
    for begin, after in [*inside, (end, None)]:
        if begin > at or not inside:
            move = at - segment.offset
            found.append(
                segment._replace(
                    offset=place(at),
                    vaddr=segment.vaddr + move,
                    paddr=segment.paddr + move,
                    filesz=begin - at,
                    memsz=begin - at,
                )
            )
        at = after
    found[-1] = found[-1]._replace(memsz=found[-1].filesz + segment.memsz - segment.filesz)
    return [_aligned(piece) for piece in found]


def _aligned(piece):
    """A segment whose alignment its new place still has."""
    fits = piece.align <= 1 or (piece.offset - piece.vaddr) % piece.align == 0
    return piece if fits else piece._replace(align=PAGE)
