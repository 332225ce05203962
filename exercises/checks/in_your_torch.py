"""Checks of chapter 20: fat binaries read, written, chosen from and cut; kernels found in a cubin."""

import ctypes
import random
import struct
import tempfile
from pathlib import Path

import numpy as np

from exercises.checks import counted, shown, time_limit
from lab import fatbin
from lab.compiler import NoCompiler
from lab.exercise import Exercise, Wrong
from lab.fatbin.entry import CONTAINER, HEAD, MAGIC

NUMBERS = (75, 80, 86, 89, 90, 100, 103, 120)
HEADERS = (64, 80, 112)  # sizes of an entry's header that are seen


def _entry(rng, kind, number, payload, header=None, packed=False):
    """An entry's bytes. Behind the 64 that are known a header may hold more."""
    header = header or rng.choice(HEADERS)
    padded = payload + bytes(-len(payload) % 8)
    sizes = (len(payload), 3 * len(payload)) if packed else (0, 0)
    flags = 0x8011 if packed else 0x11
    fields = (kind, 0x101, header, len(padded), sizes[0], 0, 8, 1, number, 0, 0, flags, 0, sizes[1])
    return HEAD.pack(*fields) + rng.randbytes(header - HEAD.size) + padded


INNER = HEAD.pack(2, 0x101, 64, 8, 0, 0, 8, 1, 75, 0, 0, 0x11, 0, 0) + bytes(8)
INNER = CONTAINER.pack(MAGIC, 1, 16, len(INNER)) + INNER


def _payload(rng, most=300):
    """Random bytes; of the longer ones, one in three holds what looks like a container of its own."""
    data = bytearray(rng.randbytes(rng.randint(1, most)))
    if len(data) > 8 + len(INNER) and rng.random() < 0.3:
        data[8 : 8 + len(INNER)] = INNER
    return bytes(data)


def _section(rng, containers):
    """(bytes of a section, [[(kind, number, payload), ...], ...]): containers with zeros between them."""
    data, found = bytearray(), []
    for _ in range(containers):
        entries = [(rng.choice((1, 2)), rng.choice(NUMBERS), _payload(rng)) for _ in range(rng.randint(0, 5))]
        body = b"".join(_entry(rng, *one, packed=rng.random() < 0.3) for one in entries)
        data += CONTAINER.pack(MAGIC, 1, 16, len(body)) + body + bytes(8 * rng.choice((0, 0, 1, 5, 600)))
        found.append(entries)
    return bytes(data), found


def _dice():
    return random.Random(int(np.random.default_rng().integers(1 << 62)))


# Exercise 1: an architecture table


def exercise_1(arch_table):
    """arch_table(section) -> {(kind, number): bytes}"""
    exercise, rng = Exercise("Exercise 1: an architecture table"), _dice()
    with exercise, time_limit():
        cases = [(n, *_section(rng, n)) for n in (1, 1, 2, 0, 3, 5, 20, 60)]
        for n, data, containers in cases:
            wanted = {}
            for entries in containers:
                for kind, number, payload in entries:
                    key = {1: "ptx", 2: "elf"}[kind], number
                    wanted[key] = wanted.get(key, 0) + len(payload) + -len(payload) % 8
            entries = sum(map(len, containers))
            at = f"with {counted(n, 'container')} and {entries} {'entry' if entries == 1 else 'entries'}"
            got = arch_table(data)
            if not isinstance(got, dict):
                raise Wrong(f"{at} your function gave {shown(got)}, expected a dict")
            for key in sorted({*got, *wanted}, key=repr):
                if key not in wanted:
                    raise Wrong(f"{at}: your table has {shown(key)}, and there is no such entry")
                exercise.require(key in got, f"{at}: your table lacks {key}")
                exercise.require(
                    got[key] == wanted[key], f"{at}: {key} has {shown(got[key])} bytes, expected {wanted[key]}"
                )
    return exercise.report(f"right for {len(cases)} sections, zeros and longer headers among them")


# Exercise 2: write and reread


def exercise_2(write, reread):
    """write(parts) -> bytes; reread(data) -> parts, each (kind, number, image)"""
    exercise, rng = Exercise("Exercise 2: write and reread a container"), _dice()
    kinds = {"ptx": 1, "elf": 2}
    with exercise, time_limit(), tempfile.TemporaryDirectory() as folder:
        cases = [[], [("elf", 90, b"12345678")], [("ptx", 90, b"123")]]
        for n in (2, 3, 5, 12):
            cases.append([(rng.choice(("ptx", "elf")), rng.choice(NUMBERS), _payload(rng)) for _ in range(n)])
        for parts in cases:
            _writes(exercise, write, parts, Path(folder) / "yours.fatbin")
            body = b"".join(_entry(rng, kinds[kind], number, image) for kind, number, image in parts)
            wanted = [(kind, number, image + bytes(-len(image) % 8)) for kind, number, image in parts]
            got = reread(CONTAINER.pack(MAGIC, 1, 16, len(body)) + body)
            at = f"rereading a container of {len(parts)}"
            if not isinstance(got, (list, tuple)) or len(got) != len(wanted):
                raise Wrong(f"{at}, your function gave {shown(got)}, expected a list of {len(wanted)}")
            for n, (mine, right) in enumerate(zip(got, wanted)):
                if not isinstance(mine, (list, tuple)) or len(mine) != 3:
                    raise Wrong(f"{at}: part {n} is {shown(mine)}, expected (kind, number, image)")
                exercise.require(tuple(mine[:2]) == right[:2], f"{at}: part {n} is {mine[:2]}, expected {right[:2]}")
                exercise.require(
                    isinstance(mine[2], (bytes, bytearray)) and bytes(mine[2]) == right[2],
                    f"{at}: the bytes of part {n} are others: {shown(mine[2], 30)}, expected {shown(right[2], 30)}",
                )
    return exercise.report(f"{len(cases)} containers, each as the course's reader has it, and back")


def _writes(exercise, write, parts, path):
    at = f"writing {counted(len(parts), 'part')}"
    data = write(list(parts))
    if not isinstance(data, (bytes, bytearray)):
        raise Wrong(f"{at}, your function gave {shown(data)}, expected bytes")
    exercise.require(len(data) >= 16, f"{at}, your container has {len(data)} bytes, expected 16 or more")
    path.write_bytes(data)
    try:
        entries = fatbin.read(path)
    except fatbin.Damaged as problem:
        raise Wrong(f"{at}: {str(problem).removeprefix('yours.fatbin: ')}") from None
    exercise.require(len(entries) == len(parts), f"{at}: a reader finds {len(entries)} entries, expected {len(parts)}")
    size = CONTAINER.unpack_from(data)[3]
    exercise.require(16 + size == len(data), f"{at}: the container says {size} bytes, and {len(data) - 16} follow")
    for n, (entry, (kind, number, image)) in enumerate(zip(entries, parts)):
        exercise.require(
            (entry.kind, entry.number) == (kind, number),
            f"{at}: entry {n} is {entry.kind} {entry.number}, expected {kind} {number}",
        )
        exercise.require(entry.at % 8 == 0, f"{at}: entry {n} begins at byte {entry.at}, expected a multiple of 8")
        exercise.require(entry.flags == 0x11, f"{at}: entry {n} has the flags {entry.flags:#x}, expected 0x11")
        padded = image + bytes(-len(image) % 8)
        exercise.require(
            len(entry.payload()) == len(padded),
            f"{at}: entry {n} says {counted(len(entry.payload()), 'byte')}, expected {len(padded)}: "
            f"an image of {len(image)}, padded to a multiple of 8",
        )
        exercise.require(entry.payload() == padded, f"{at}: the bytes of entry {n} are others")


# Exercise 3: which one does a card take?

CARDS = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)]
KNOWN = [  # entries, card, the index
    ([("elf", "sm_80"), ("elf", "sm_86"), ("ptx", "sm_80")], (8, 9), 1),
    ([("elf", "sm_80"), ("elf", "sm_90"), ("ptx", "sm_90")], (12, 0), 2),
    ([("elf", "sm_90a"), ("ptx", "sm_90a")], (10, 0), None),
    ([("ptx", "sm_80"), ("ptx", "sm_90"), ("ptx", "sm_100")], (9, 0), 1),
    ([("elf", "sm_100f"), ("elf", "sm_100a")], (10, 3), 0),
    ([("elf", "sm_86")], (8, 0), None),
    ([("ptx", "sm_80"), ("elf", "sm_80")], (8, 6), 1),
    ([], (9, 0), None),
    ([("elf", "sm_120f"), ("ptx", "sm_100")], (12, 1), 0),
    ([("elf", "sm_100f"), ("ptx", "sm_100f")], (11, 0), None),
    ([("elf", "sm_75")], (8, 0), None),
    ([("elf", "sm_80"), ("ptx", "sm_86")], (8, 9), 0),
]


def _takes(entries, card):
    best = None
    for n, (kind, arch) in enumerate(entries):
        number, last = (int(arch[3:-1]), arch[-1]) if arch[-1] in "af" else (int(arch[3:]), "")
        mine = divmod(number, 10)
        if last == "a":
            fits = mine == card
        elif kind == "ptx" and not last:
            fits = mine <= card
        else:
            fits = mine[0] == card[0] and mine <= card
        key = (kind == "elf", mine)
        if fits and (best is None or key > best[0]):
            best = key, n
    return None if best is None else best[1]


def exercise_3(taken):
    """taken(entries, card) -> index or None"""
    exercise, rng = Exercise("Exercise 3: why PTX must stay"), _dice()
    with exercise, time_limit():
        cases = list(KNOWN)
        for _ in range(200):
            arches = rng.sample(
                [f"sm_{n}" for n in NUMBERS] + ["sm_90a", "sm_100a", "sm_100f", "sm_120f"], rng.randint(1, 6)
            )
            entries = [(rng.choice(("elf", "ptx")), arch) for arch in arches]
            card = rng.choice(CARDS)
            known = {(kind, arch.rstrip("af")) for kind, arch in entries}
            if len(known) == len(entries):  # two of one number would both do
                cases.append((entries, card, _takes(entries, card)))
        for entries, card, wanted in cases:
            got = taken([*entries], card)
            text = ", ".join(f"{kind} {arch}" for kind, arch in entries) or "nothing"
            if got is not None and (isinstance(got, bool) or not isinstance(got, (int, np.integer))):
                raise Wrong(f"of {text} your function gave {shown(got)}, expected a place or None")
            which = "nothing" if wanted is None else f"number {wanted}, {' '.join(entries[wanted])}"
            exercise.require(
                got == wanted, f"of {text} a card of {card[0]}.{card[1]} takes {which}; your function says {got}"
            )
    return exercise.report("right for every card and mixture that was drawn")


# Exercise 4: keep one architecture

SOURCE = """
const char before[] = "before"; int answer(void) { return 42; }
"""


def exercise_4(keep):
    """keep(section, number) -> bytes of the same length"""
    exercise, rng, loads = Exercise("Exercise 4: keep one architecture"), _dice(), ""
    with exercise, time_limit(30):
        cases = [(n, *_section(rng, n)) for n in (1, 1, 2, 4, 30)]
        for n, data, containers in cases:
            for number in (90, rng.choice(NUMBERS)):
                _kept(exercise, keep, data, containers, number, f"with {counted(n, 'container')}, sm_{number} kept")
        loads = _loads(exercise, keep, rng)
    return exercise.report(f"right in {2 * len(cases)} sections{loads}")


def _kept(exercise, keep, data, containers, number, at):
    got = keep(bytes(data), number)
    if not isinstance(got, (bytes, bytearray)):
        raise Wrong(f"{at}: your function gave {shown(got)}, expected bytes")
    exercise.require(
        len(got) == len(data), f"{at}: the section has {len(got):,} bytes, expected {len(data):,} as before"
    )
    place = 0
    for n, entries in enumerate(containers):
        place = _container_at(data, place)
        magic, version, head, size = CONTAINER.unpack_from(data, place)
        mine = CONTAINER.unpack_from(got, place)
        exercise.require(mine[:3] == (magic, version, head), f"{at}: container {n} no longer begins at byte {place:,}")
        stay, q = b"", place + head
        for kind, arch, _ in entries:
            _, _, header, padded = struct.unpack_from("<HHIQ", data, q)
            if (kind, arch) == (2, number):
                stay += data[q : q + header + padded]
            q += header + padded
        exercise.require(mine[3] == len(stay), f"{at}: container {n} says {mine[3]:,} bytes, expected {len(stay):,}")
        found = bytes(got[place + head : place + head + size])
        exercise.require(found[: len(stay)] == stay, f"{at}: what container {n} keeps is not what it had, in order")
        exercise.require(not any(found[len(stay) :]), f"{at}: behind what container {n} keeps are bytes that are not 0")
        end = place + head + size
        exercise.require(
            not any(got[end : _container_at(data, end) or len(got)]), f"{at}: bytes between containers changed"
        )
        place = end


def _container_at(data, at):
    """Where the next container begins: behind zeros."""
    while at + CONTAINER.size <= len(data):
        if struct.unpack_from("<I", data, at)[0] == MAGIC:
            return at
        at += 8
    return None


def _loads(exercise, keep, rng):
    """A library whose section was replaced, loaded and read; "" where there is no compiler to make one."""
    parts = [("elf", f"sm_{n}", _payload(rng, 3000)) for n in (80, 90, 100)] + [("ptx", "sm_90", _payload(rng))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "libyours.so"
        try:
            fatbin.library(path, [fatbin.container(parts), fatbin.container(parts[1:])], SOURCE, gap=64)
        except NoCompiler:
            return ""
        spans = fatbin.containers(path)
        begin, end = spans[0][1], spans[-1][1] + sum(spans[-1][2:])
        data = path.read_bytes()
        path.write_bytes(data[:begin] + bytes(keep(data[begin:end], 90)) + data[end:])
        found = [entry.arch for entry in fatbin.read(path)]
        exercise.require(found == ["sm_90", "sm_90"], f"of a library of two containers a reader then finds {found}")
        exercise.require(ctypes.CDLL(str(path)).answer() == 42, "the library computes something else when it is loaded")
    return ", and a library that still loads"


# Exercise 5: which cubin holds this kernel?


def _elf(rng, functions, order, gap):
    """A cubin-like ELF file: functions [(name, info, other), ...]; sections in any order, junk between."""
    names, symbols = b"\0", [struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)]
    for name, info, other in functions:
        symbols.append(struct.pack("<IBBHQQ", len(names), info, other, 1, 0, 64))
        names += name.encode() + b"\0"
    titles = b"\0.text\0.strtab\0.symtab\0.shstrtab\0"
    bodies = {".text": rng.randbytes(64), ".strtab": names, ".symtab": b"".join(symbols), ".shstrtab": titles}
    kinds, data, sections = {".text": 1, ".strtab": 3, ".symtab": 2, ".shstrtab": 3}, bytearray(64), [bytes(64)]
    links = order.index(".strtab") + 1
    for title in order:
        data += rng.randbytes(gap)
        data += bytes(-len(data) % 8)
        link, size = (links, 24) if title == ".symtab" else (0, 0)
        fields = titles.index(title.encode()), kinds[title], 0, 0, len(data), len(bodies[title]), link, 0, 8, size
        sections.append(struct.pack("<IIQQQQIIQQ", *fields))
        data += bodies[title]
    data += bytes(-len(data) % 8)
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 2, 190, 1, 0, 0, len(data), 0, 64, 56, 0, 64,
                       len(sections), order.index(".shstrtab") + 1)  # fmt: skip
    data[:64] = head
    return bytes(data) + b"".join(sections)


FUNCTION, OBJECT, SECTION, ENTRY = 2, 1, 3, 0x10
BINDINGS = 0x00, 0x10, 0x20  # local, global, weak: the upper four bits, as of templates' kernels


def exercise_5(kernels_of):
    """kernels_of(cubin) -> sorted names"""
    exercise, rng = Exercise("Exercise 5: which cubin holds this kernel?"), _dice()
    with exercise, time_limit(30):
        cases = []
        for _ in range(30):
            order = rng.sample([".text", ".strtab", ".symtab", ".shstrtab"], 4)
            names = rng.sample(
                [f"{a}{b}" for a in ("gemv", "_Z4scan", "gemv_", "mix") for b in "abcdefgh"], rng.randint(0, 8)
            )
            kinds = FUNCTION, FUNCTION, FUNCTION, OBJECT, SECTION
            functions = [
                (name, rng.choice(BINDINGS) | rng.choice(kinds), rng.choice((0, ENTRY, ENTRY | 2))) for name in names
            ]
            wanted = sorted(name for name, info, other in functions if info & 15 == FUNCTION and other & ENTRY)
            cases.append(
                (
                    _elf(rng, functions, order, rng.choice((0, 40))),
                    wanted,
                    f"in a made-up cubin of {len(names)} symbols",
                )
            )
        cases += [(data, wanted, "in a cubin of the course's own kernels") for data, wanted in _real()]
        for data, wanted, at in cases:
            got = kernels_of(data)
            if not isinstance(got, (list, tuple)):
                raise Wrong(f"{at} your function gave {shown(got)}, expected a list of names")
            exercise.require([*got] == wanted, f"{at} your function finds {shown([*got])}, expected {shown(wanted)}")
    return exercise.report(f"right for {len(cases)} cubins")


def _real():
    from lab import cuda

    source = """
    __device__ __noinline__ float helper(float v) { return v * v + 1.0f; }
    extern "C" __global__ void square(float *x) { x[threadIdx.x] = helper(x[threadIdx.x]); }
    extern "C" __global__ void half_of(float *x) { x[threadIdx.x] *= 0.5f; }
    """
    module = cuda.compile(source)
    return [(module.cubin(arch), ["half_of", "square"]) for arch in ("sm_80", "sm_100")]
