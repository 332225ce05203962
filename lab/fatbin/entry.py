"""One entry of a fat binary: a cubin for one architecture, or PTX.

A container begins with 16 bytes: the magic number 0xBA55ED50, the version 1, the header's size, the size of what
follows. Then entry on entry, each a header and its payload, padded to 8 bytes. An entry's header of 64 bytes, or more:

    byte 0   2   kind: 1 PTX, 2 a cubin                      28   4   architecture: 90
         2   2   version: 0x101                              32   4   where its name is, from the header
         4   4   size of this header                         36   4   the name's length
         8   8   size of the payload with its padding        40   8   flags, as below
        16   4   bytes that count of it, if it is packed     48   8   0
        20   4   where its options are, or 0                 56   8   unpacked size, if it is packed
        24   2   minor and 2 major version of the format
"""

import os
import re
import struct
from dataclasses import dataclass
from functools import cached_property

from lab.fatbin import elf
from lab.fatbin.damage import Damaged, expect

MAGIC = 0xBA55ED50
CONTAINER = struct.Struct("<IHHQ")
HEAD = struct.Struct("<HHIQIIHHIIIQQQ")
KINDS = {1: "ptx", 2: "elf"}
# Flags: 0x1 and 0x10 stand in all of them (64 bits, Linux); 0x1000000 with cubins of sm_100 and later.
USUAL, LZ4, ZSTD, EXACT, FAMILY = 0x11, 0x2000, 0x8000, 0x100000, 0x200000


@dataclass(frozen=True)
class Entry:
    """An entry as its header has it. Its payload is read from the file when it is asked for."""

    path: str
    container: int  # where in the file its container begins
    at: int  # ... and its own header
    header: int  # bytes
    stored: int  # bytes of its payload in the file, padding included
    packed: int  # those that count, if it is packed; else 0
    size: int  # bytes of the cubin or PTX; where it is not packed, with up to 7 of padding
    kind: str  # "elf", "ptx", or "kind 16" for one that is not known here
    number: int  # the architecture as it stands there: 90
    flags: int
    section: str  # ".nv_fatbin", "__nv_relfatbin", or "" for a file that is a fat binary
    name: str = ""

    @property
    def arch(self):
        """Such as "sm_90", "sm_90a" (of that very architecture) or "sm_120f" (of its family)."""
        return f"sm_{self.number}{'a' if self.flags & EXACT else 'f' if self.flags & FAMILY else ''}"

    @property
    def capability(self):
        """(9, 0) of sm_90."""
        return divmod(self.number, 10)

    @property
    def compression(self):
        """ "zstd", "lz4" or ""."""
        return "zstd" if self.flags & ZSTD else "lz4" if self.flags & LZ4 else ""

    @property
    def label(self):
        """What people call it: "sm_90", or "PTX 12.0"."""
        return self.arch if self.kind != "ptx" else "PTX {}.{}".format(*self.capability)

    def payload(self):
        """The bytes that lie in the file, without padding if it is packed."""
        with open(self.path, "rb") as f:
            data = os.pread(f.fileno(), self.packed or self.stored, self.at + self.header)
        expect(
            len(data) == (self.packed or self.stored),
            *(self.path, f"{self.packed or self.stored:,} bytes of {self.label}", f"{len(data):,}: cut short"),
        )
        return data

    def image(self):
        """The cubin or the PTX, unpacked and without padding: bytes. Damaged if it does not unpack."""
        data = self.payload()
        wanted = f"the {self.kind} of {self.label} at byte {self.at:,}"
        expect(any(data[:64]), self.path, wanted, "zeros: it was cut away")
        if self.compression:
            data = _unpack(data, self)
            expect(len(data) == self.size, self.path, f"{self.size:,} bytes of {self.label}", f"{len(data):,}")
        if self.kind == "elf" and not self.compression:
            return data[: elf.length(elf.Bytes(data, self.path))]
        return data.rstrip(b"\0") if self.kind == "ptx" else data

    @cached_property
    def kernels(self):
        """The names of its kernels, sorted: mangled ones, as in the file. Unpacks the image."""
        if self.kind == "ptx":
            text = re.sub(rb"//[^\n]*", b"", self.image())
            return tuple(sorted({name.decode() for name in re.findall(rb"\.entry\s+([\w$.]+)", text)}))
        return elf.kernels(elf.Bytes(self.image(), self.path)) if self.kind == "elf" else ()

    def runs_on(self, capability):
        """Whether a card of this capability, (9, 0), can run it as it is, or, of PTX, by compiling it."""
        mine = self.capability
        if self.flags & EXACT:
            return mine == tuple(capability)
        if self.kind == "ptx" and not self.flags & FAMILY:
            return mine <= tuple(capability)
        return mine[0] == capability[0] and mine[1] <= capability[1]


def _unpack(data, entry):
    try:
        if entry.compression == "zstd":
            import zstandard

            return zstandard.ZstdDecompressor().decompress(data, max_output_size=entry.size)
        import lz4.block

        return lz4.block.decompress(data, uncompressed_size=entry.size)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"{os.path.basename(entry.path)}: its device code is packed with {entry.compression}; "
            f"expected the package {missing.name.split('.')[0]} and found none: install it",
            name=missing.name,
        ) from None
    except Exception as problem:  # each package has errors of its own
        raise Damaged(
            f"{os.path.basename(entry.path)}: expected {entry.compression} at byte {entry.at + entry.header:,} "
            f"and found bytes that do not unpack ({problem})"
        ) from None
