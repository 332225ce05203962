"""Kernels by the names of their source, though C++ spells them otherwise: saxpy for _Z5saxpyifPKfPf, and templates.

A template is no kernel until it has its arguments, and the compiler must be told with which it is wanted: "sum<256>".
It then says how that instance is spelt, which is noted at the end of the PTX text.
"""

import difflib
import re

NOTE = "// instance "  # of a line at the end of the PTX


def noted(spelt):
    """The lines that say how instances are spelt: {"sum<256>": "_Z3sumILi256EEvPKfPfi"}."""
    return "".join(f"\n{NOTE}{spelling} {name}" for name, spelling in spelt.items())


def instances(ptx):
    """{name without blanks: spelling}, from the lines at the end of PTX."""
    found = re.findall(rf"^{NOTE}(\S+) (.*)$", ptx, re.M)
    return {unspaced(name): spelling for spelling, name in found}


def unspaced(name):
    return "".join(name.split())


def find(name, entries, spelt):
    """The spelling of the kernel that a name means, or None: as it stands, an instance's, or the only one so named."""
    if not isinstance(name, str):
        return None
    if name in entries:
        return name
    if unspaced(name) in spelt:
        return spelt[unspaced(name)]
    found = so_named(name, entries)
    return found[0] if len(found) == 1 else None


def so_named(name, entries):
    """The spellings of the kernels of this name: those of other parameters, and instances of a template."""
    return [entry for entry in entries if entry.startswith(f"_Z{len(name)}{name}")]


def plain(entry, entries, spelt):
    """What a reader would call a kernel."""
    for name, spelling in spelt.items():
        if spelling == entry:
            return name
    found = re.match(r"_Z(\d+)(\w+)", entry)
    name = found[2][: int(found[1])] if found else entry
    return name if find(name, entries, spelt) == entry else entry


def unknown(name, entries, spelt, source):
    """What to say of a name that means no kernel, or several."""
    names = [plain(entry, entries, spelt) for entry in entries]
    text = f"module has no kernel {name!r}; it has {', '.join(names) if names else 'none'}"
    if not isinstance(name, str):
        return text
    several = so_named(name, entries)
    if len(several) > 1:
        return f'{text}. {len(several)} are named {name!r}: say which, or write extern "C" before one\'s __global__'
    base = re.escape(name.partition("<")[0].strip())
    if re.search(rf"\btemplate\s*<[^;{{}}]*__global__[^;{{}}]*\b{base}\s*\(", source):
        wanted = name if "<" in name else f"{name}<...>"
        return f"{text}. {base} is a template: simt.compile(source, instances=[{wanted!r}]) makes a kernel of it"
    near = difflib.get_close_matches(name, names, 1)
    return f"{text}. Did you mean {near[0]!r}?" if near else text
