"""What is in there: an environment's libraries and their device code, by library and by architecture."""

from dataclasses import dataclass, field

from lab import fatbin
from lab.table import Table
from models.slim import tree

MB = 1e6


@dataclass
class Library:
    """A library's bytes. device {label: bytes in the file, headers included}, unpacked: of all its entries."""

    name: str
    size: int
    disk: int
    device: dict = field(default_factory=dict)
    unpacked: int = 0
    entries: int = 0

    @property
    def stored(self):
        return sum(self.device.values())


@dataclass
class Report:
    """libraries [Library, ...], largest device code first; damaged [sentence, ...]: those that could not be read."""

    libraries: list
    damaged: list

    @property
    def size(self):
        return sum(library.size for library in self.libraries)

    @property
    def disk(self):
        return sum(library.disk for library in self.libraries)

    @property
    def stored(self):
        return sum(library.stored for library in self.libraries)

    @property
    def unpacked(self):
        return sum(library.unpacked for library in self.libraries)

    @property
    def entries(self):
        return sum(library.entries for library in self.libraries)

    def by_label(self):
        """{label: bytes}: largest first; "PTX" for all of it."""
        found = {}
        for library in self.libraries:
            for label, size in library.device.items():
                label = "PTX" if label.startswith("PTX") else label
                found[label] = found.get(label, 0) + size
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def share_for(self, capability):
        """The part of the device code in cubins that a card of this capability would run as they are."""
        mine = 0
        for library in self.libraries:
            for label, size in library.device.items():
                number = label.removeprefix("sm_").rstrip("af")
                mine += size if number.isdigit() and divmod(int(number), 10) == tuple(capability) else 0
        return mine / self.stored if self.stored else 0.0

    def library_table(self, most=12, title="Libraries, by their device code"):
        """A Table of the libraries with most of it, the others in one row, and all."""
        holding = [library for library in self.libraries if library.stored]
        rows = {library.name.rpartition("/")[2]: _row([library]) for library in holding[:most]}
        others = [library for library in self.libraries if library not in holding[:most]]
        if others:
            rows[f"{len(others)} others"] = _row(others)
        return Table(title, rows | {f"all {len(self.libraries)}": _row(self.libraries)})

    def arch_table(self, title="Device code, by what it is for"):
        total = self.stored or 1
        rows = {
            label: {"MB": size / MB, "share": f"{100 * size / total:.1f} %"} for label, size in self.by_label().items()
        }
        return Table(title, rows)

    def plain(self):
        """As JSON has it."""
        return {
            "libraries": [vars(library) for library in self.libraries],
            "damaged": self.damaged,
        }


def _row(libraries):
    size, stored = (sum(getattr(library, name) for library in libraries) for name in ("size", "stored"))
    return {
        "MB": size / MB,
        "device code, MB": stored / MB,
        "share": f"{100 * stored / size:.0f} %" if size else "–",
        "unpacked, MB": sum(library.unpacked for library in libraries) / MB,
        "entries": sum(library.entries for library in libraries),
    }


def look(file):
    """The Library that a tree.File is."""
    found = Library(file.name, file.size, file.disk)
    for entry in fatbin.read(file.path):
        found.device[entry.label] = found.device.get(entry.label, 0) + entry.header + entry.stored
        found.unpacked += entry.size
        found.entries += 1
    return found


def report(folder):
    """The Report of an environment. Libraries that are damaged, foreign or without rights are named in `damaged`, and
    count with their size alone."""
    found, damaged = [], []
    for file in tree.libraries(folder):
        try:
            found.append(look(file))
        except fatbin.Damaged as problem:
            damaged.append(str(problem))
            found.append(Library(file.name, file.size, file.disk))
        except OSError as error:
            damaged.append(f"{file.name}: expected a file that can be read and found: {(error.strerror or '').lower()}")
            found.append(Library(file.name, file.size, file.disk))
    return Report(sorted(found, key=lambda library: (-library.stored, library.name)), damaged)
