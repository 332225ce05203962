"""Wrong answers to the exercises of chapter 20. Each says the mistake that it makes.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer, and words that the check's
verdict must hold. RIGHT has the answers that they were made from.
"""

import struct

from wrong.warp_gemv import changed

TABLE = """
def arch_table(section):
    '''{("elf" or "ptx", number): bytes of payload, padding included} of a section's bytes.'''
    found, at = {}, 0
    while at + 16 <= len(section):
        magic, _, head, size = struct.unpack_from("<IHHQ", section, at)
        if magic != 0xBA55ED50:
            at += 8
            continue
        entry, at = at + head, at + head + size
        while entry < at:
            kind, _, header, padded = struct.unpack_from("<HHIQ", section, entry)
            (number,) = struct.unpack_from("<I", section, entry + 28)
            key = {1: "ptx", 2: "elf"}[kind], number
            found[key] = found.get(key, 0) + padded
            entry += header + padded
    return found
"""
WRITE = """
def write(parts):
    '''The bytes of a container of [(kind, number, image), ...].'''
    entries = b""
    for kind, number, image in parts:
        padded = image + bytes(-len(image) % 8)
        kind = {"ptx": 1, "elf": 2}[kind]
        fields = kind, 0x101, 64, len(padded), 0, 0, 8, 1, number, 0, 0, 0x11, 0, 0
        entries += struct.pack("<HHIQIIHHIIIQQQ", *fields) + padded
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
"""
REREAD = """
def reread(data):
    '''[(kind, number, image with its padding), ...] of a container's bytes.'''
    _, _, at, size = struct.unpack_from("<IHHQ", data)
    end, parts = at + size, []
    while at < end:
        kind, _, header, padded = struct.unpack_from("<HHIQ", data, at)
        (number,) = struct.unpack_from("<I", data, at + 28)
        parts.append(({1: "ptx", 2: "elf"}[kind], number, data[at + header : at + header + padded]))
        at += header + padded
    return parts
"""
TAKEN = """
def taken(entries, card):
    '''The place of the entry that a card of this capability takes, or None.'''
    running = []
    for place, (kind, arch) in enumerate(entries):
        last = arch[-1] if arch[-1] in "af" else ""
        mine = divmod(int(arch[3:].rstrip("af")), 10)
        if last == "a":
            runs = mine == card
        elif kind == "elf" or last == "f":
            runs = mine[0] == card[0] and mine <= card
        else:
            runs = mine <= card
        if runs:
            running.append((kind == "elf", mine, place))
    return max(running)[2] if running else None
"""
KEEP = """
def keep(section, number):
    '''The section with the cubins for this number alone, each container where it was.'''
    new, at = bytearray(section), 0
    while at + 16 <= len(section):
        magic, _, head, size = struct.unpack_from("<IHHQ", section, at)
        if magic != 0xBA55ED50:
            at += 8
            continue
        begin, end, kept = at + head, at + head + size, b""
        entry = begin
        while entry < end:
            kind, _, header, padded = struct.unpack_from("<HHIQ", section, entry)
            (found,) = struct.unpack_from("<I", section, entry + 28)
            if (kind, found) == (2, number):
                kept += section[entry : entry + header + padded]
            entry += header + padded
        struct.pack_into("<Q", new, at + 8, len(kept))
        new[begin:end] = kept + bytes(size - len(kept))
        at = end
    return bytes(new)
"""
KERNELS = """
def kernels_of(cubin):
    '''The names of a cubin's kernels, sorted.'''
    (begin,) = struct.unpack_from("<Q", cubin, 40)
    (count,) = struct.unpack_from("<H", cubin, 60)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, begin + 64 * n) for n in range(count)]
    found = []
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind != 2:
            continue
        names = sections[link][4]
        for at in range(offset, offset + size, 24):
            name, info, other, _, _, _ = struct.unpack_from("<IBBHQQ", cubin, at)
            if info & 15 == 2 and other & 0x10:
                begin = names + name
                found.append(cubin[begin : cubin.index(0, begin)].decode())
    return sorted(found)
"""


def made(source, name, *changes):
    """What a source defines under this name, with each (old, new) changed."""
    names = {"struct": struct}
    exec(compile(changed(source, *changes), f"<wrong {name}>", "exec"), names)
    return names[name]


def table(*changes):
    return made(TABLE, "arch_table", *changes)


def pair(write=(), reread=()):
    return made(WRITE, "write", *write), made(REREAD, "reread", *reread)


def taken(*changes):
    return made(TAKEN, "taken", *changes)


def keep(*changes):
    return made(KEEP, "keep", *changes)


def kernels(*changes):
    return made(KERNELS, "kernels_of", *changes)


def by_searching(section):
    """Looks for the magic number, wherever it stands."""
    found, at = {}, 0
    magic = struct.pack("<I", 0xBA55ED50)
    while (at := section.find(magic, at)) >= 0 and at + 16 <= len(section):
        _, _, head, size = struct.unpack_from("<IHHQ", section, at)
        entry = at + head
        while entry + 64 <= min(at + head + size, len(section)):
            kind, _, header, padded = struct.unpack_from("<HHIQ", section, entry)
            (number,) = struct.unpack_from("<I", section, entry + 28)
            if kind in (1, 2) and header:
                key = {1: "ptx", 2: "elf"}[kind], number
                found[key] = found.get(key, 0) + padded
            entry += header + padded or 8
        at += 8
    return found


def overlapping(cubin):
    """Every name that the file has."""
    return sorted(
        {part.decode() for part in cubin.split(b"\0") if part[:4] in (b"gemv", b"_Z4s", b"squa", b"half", b"mix")}
    )


RIGHT = {1: table(), 2: pair(), 3: taken(), 4: keep(), 5: kernels()}
WRONG = {
    1: {
        "looks for the magic number in payloads": (by_searching, "bytes, expected"),
        "takes every header for one of 64 bytes": (
            table(("found.get(key, 0) + padded", "found.get(key, 0) + header + padded - 64")),
            "bytes, expected",
        ),
        "stops at the first zeros": (table(("at += 8\n            continue", "break")), "lacks"),
        "counts headers, too": (
            table(("found.get(key, 0) + padded", "found.get(key, 0) + header + padded")),
            "bytes, expected",
        ),
        "keeps the last of a kind": (table(("found.get(key, 0) + padded", "padded")), "bytes, expected"),
        "knows cubins alone": (table(("found[key] =", "found[key] = 0 if kind == 1 else")), "bytes, expected"),
    },
    2: {
        "does not pad": (pair(write=[("image + bytes(-len(image) % 8)", "image")]), "padded to a multiple of 8"),
        "pads where nothing lacks": (
            pair(write=[("bytes(-len(image) % 8)", "bytes(8 - len(image) % 8)")]),
            "entry 0 says 16 bytes, expected 8",
        ),
        "counts its own header": (
            pair(write=[("1, 16, len(entries))", "1, 16, 16 + len(entries))")]),
            "writing 0 parts",
        ),
        "confuses the kinds": (pair(write=[('{"ptx": 1, "elf": 2}', '{"ptx": 2, "elf": 1}')]), "expected elf 90"),
        "says the size without padding": (pair(write=[("64, len(padded)", "64, len(image)")]), "writing 1 part"),
        "rereads headers of 64 bytes": (
            pair(reread=[("data[at + header : at + header + padded]", "data[at + 64 : at + 64 + padded]")]),
            "the bytes of part",
        ),
        "strips zeros": (
            pair(reread=[("at + header + padded]))", "at + header + padded].rstrip(b'\\0')))")]),
            "the bytes of part",
        ),
        "forgets the last": (pair(reread=[("return parts", "return parts[:-1]")]), "expected a list of"),
    },
    3: {
        "takes PTX for a cubin": (
            taken(('kind == "elf" or last == "f"', "True")),
            "a card of 12.0 takes number 2, ptx sm_90",
        ),
        "takes the first that runs": (taken(("max(running)[2]", "running[0][2]")), "takes number"),
        "prefers PTX of a higher number": (
            taken(('(kind == "elf", mine, place)', "(mine, kind == 'elf', place)")),
            "takes number",
        ),
        "runs an older card's minor version alone": (
            taken(("mine[0] == card[0] and mine <= card", "mine == card")),
            "a card of 8.9 takes number 1, elf sm_86",
        ),
        "runs later minor versions": (
            taken(("mine[0] == card[0] and mine <= card", "mine[0] == card[0]")),
            "your function says",
        ),
        "ignores the a": (taken(('if last == "a":', 'if last == "x":')), "a card of 10.0 takes nothing"),
        "takes f for a": (taken(('if last == "a":', "if last:")), "your function says None"),
        "runs cubins of older cards": (taken(("mine[0] == card[0] and mine <= card", "mine <= card")), "a card of"),
    },
    4: {
        "keeps PTX": (keep(("(kind, found) == (2, number)", "found == number")), "bytes, expected"),
        "leaves the size": (keep(('struct.pack_into("<Q", new, at + 8, len(kept))', "pass")), "says"),
        "leaves what was there": (
            keep(("new[begin:end] = kept + bytes(size - len(kept))", "new[begin : begin + len(kept)] = kept")),
            "not 0",
        ),
        "makes the section shorter": (keep(("kept + bytes(size - len(kept))", "kept")), "as before"),
        "keeps payloads without headers": (
            keep(("section[entry : entry + header + padded]", "section[entry + header : entry + header + padded]")),
            "bytes, expected",
        ),
        "takes every header for one of 64 bytes": (
            keep(("entry += header + padded", "entry += 64 + padded")),
            "not yet",
        ),
        "cuts the first container alone": (keep(("        at = end\n", "        break\n")), "says"),
    },
    5: {
        "takes every function": (kernels((" and other & 0x10", "")), "finds"),
        "knows global functions alone": (kernels(("info & 15 == 2", "info == 0x12")), "finds"),
        "looks at one bit of the type": (kernels(("info & 15 == 2", "info & 2")), "finds"),
        "takes whatever is marked": (kernels(("info & 15 == 2 and ", "")), "finds"),
        "wants the mark alone": (kernels(("other & 0x10", "other == 0x10")), "finds"),
        "does not sort": (kernels(("return sorted(found)", "return found[::-1]")), "finds"),
        "takes the first names for the right ones": (
            kernels(("sections[link][4]", "[s for s in sections if s[1] == 3][0][4]")),
            "not yet",
        ),
        "takes names without looking": (overlapping, "finds"),
    },
}
