"""Show source code in a notebook, highlighted: a file, a part of it, or Python functions."""

import inspect
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.M)


def with_includes(*sources, root=None):
    """The sources, paths from the course's folder, and behind them what they include by `#include "..."`, and what
    that includes; each once. A header is looked for beside the file that names it; one that is not there is none of
    the course's."""
    root, found = root or ROOT, list(dict.fromkeys(sources))
    for source in found:  # which grows
        path = root / source
        if path.suffix not in (".c", ".h", ".cu", ".cuh") or not path.is_file():
            continue
        for header in INCLUDE.findall(path.read_text(encoding="utf-8")):
            at = (path.parent / header).resolve()
            if root in at.parents and at.is_file() and (name := at.relative_to(root).as_posix()) not in found:
                found.append(name)
    return tuple(found)


def inlined(path, root=None, seen=None):
    """The text of a source, a path from the course's folder, with what it includes by `#include "..."` in its place,
    each once: for a variant in which a piece of a header is replaced."""
    root, seen = root or ROOT, set() if seen is None else seen
    at = (root / path).resolve()
    seen.add(at)

    def text_of(found):
        header = (at.parent / found[1]).resolve()
        if root not in header.parents or not header.is_file():
            return found[0]
        return "" if header in seen else inlined(header.relative_to(root), root, seen)

    return INCLUDE.sub(text_of, at.read_text(encoding="utf-8")).replace("#pragma once\n", "")


def _definition(path, name):
    """(source, text) of a function or a struct of a C or CUDA file or of what it includes, with the comment above."""
    *outer, last = name.split("::")
    for source in with_includes(path):
        lines = (ROOT / source).read_text(encoding="utf-8").splitlines()
        for struct in outer:
            lines = _lines_of(lines, struct) or []
        if found := _lines_of(lines, last):
            return source, _without_margin(found)
    raise ValueError(f"show: {path}, and what it includes, define no {name!r}")


def _lines_of(lines, name):
    """The lines of the first definition of a name, with its comment; None if there is none."""
    template, before = r"(?:template\b.*?>\s*)?", r"(?:[^=;/(]*[\s*&]|.*\)\s*)?"
    begins = re.compile(rf"(\s*){template}(?:struct {name}\b|{before}{name}\()")
    for at, line in enumerate(lines):
        found = begins.match(line)
        rest = "\n".join(lines[at : at + 8])[found.end() :] if found else ""
        if not re.match(r"[^;{}]*\{", rest) or re.match(r"\s*(?:if|for|while|else|return|case)\b", line):
            continue  # a call, or a declaration alone
        first = at
        while first and re.search(r"[\w>)]\s*$", lines[first - 1]) and not re.match(r"\s*[#/]", lines[first - 1]):
            first -= 1  # what stands in front of the name
        margin, last = re.match(r"\s*", lines[first])[0], at
        if line.count("{") != line.count("}") or "{" not in line:
            last = next((at for at in range(at + 1, len(lines)) if re.match(rf"{margin}\}}", lines[at])), len(lines))
        above = lines[first - 1].strip() if first else ""
        if above.endswith("*/"):
            first = max(at for at in range(first) if lines[at].lstrip().startswith("/*"))
        while first and lines[first - 1].lstrip().startswith("//"):
            first -= 1
        return lines[first : last + 1]
    return None


def _without_margin(lines):
    """Lines as one text, without the space that all begin with; those that belong at the margin (#pragma) stay."""
    fixed = [bool(re.match(r"#\s*(?:pragma|if|else|endif|define|include|undef)", line)) for line in lines]
    margin = min((len(line) - len(line.lstrip()) for line, at in zip(lines, fixed) if line and not at), default=0)
    return "\n".join(line if at else line[margin:] for line, at in zip(lines, fixed)).rstrip()


class show:  # noqa: N801 - reads as a verb in a notebook: show("kernels/cpu_gemv/naive.c")
    """Display source code, highlighted.

    show("kernels/cpu_gemv/naive.c")    a file, by its path from the course's folder
    show("lab/roof.c", "read_all")      one function of a C or CUDA file or of what it includes, with the comment above
                                        it; or a struct, or a function of a struct, `Struct::function` where there are
                                        several of this name; several names show several parts
    show(path, begin="for (", end="}")  from the first line with `begin` up to the next one with `end`, without the
                                        margin; without end, up to the closing brace of the function
    show(roofline.weight_bytes, ...)    Python functions, classes or properties
    """

    def __init__(self, what, *more, begin=None, end=None):
        if isinstance(what, (str, Path)):
            path = (ROOT / what).resolve()
            if ROOT not in path.parents or not path.is_file():
                raise FileNotFoundError(f"show: there is no file {what} in the course's folder")
            self.title, self.language = str(what), "python" if path.suffix == ".py" else "c"
            self.text = path.read_text(encoding="utf-8")
            if more:
                found = [_definition(path.relative_to(ROOT).as_posix(), name) for name in more]
                self.title = ", ".join(dict.fromkeys(source for source, _ in found))
                self.text = "\n".join(f"{text}\n" for _, text in found)
        else:
            parts = [part.fget if isinstance(part, property) else inspect.unwrap(part) for part in (what, *more)]
            path = Path(inspect.getsourcefile(parts[0])).resolve()
            self.title = path.relative_to(ROOT).as_posix() if ROOT in path.parents else path.name
            self.text, self.language = "\n".join(textwrap.dedent(inspect.getsource(p)) for p in parts), "python"
        if begin is not None:
            self.text = self._part(self.text.splitlines(), begin, end)

    def _part(self, lines, begin, end):
        first = next((at for at, line in enumerate(lines) if begin in line), len(lines))
        rest = range(first + 1, len(lines))
        last = next((at for at in rest if (lines[at] == "}" if end is None else end in lines[at])), None)
        if last is None:
            missing = begin if first == len(lines) else end or "}"
            raise ValueError(f"show: {self.title} has no line with {missing!r}" + " behind it" * (first < len(lines)))
        return _without_margin(lines[first:last])

    def __repr__(self):
        return self.text

    def _repr_html_(self):
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import get_lexer_by_name
        from pygments.style import Style
        from pygments.token import Comment, Keyword, Number, String

        class Course(Style):  # no colour for plain code: it takes the page's, light or dark
            styles = {Comment: "italic #7A7A7A", Keyword: "bold #0072B2", Number: "#D55E00", String: "#009E73"}

        code = highlight(self.text, get_lexer_by_name(self.language), HtmlFormatter(style=Course, noclasses=True))
        return listing(self.title, re.search(r"<pre[^>]*>(.*)</pre>", code, re.S)[1])


def listing(title, code):
    """Code that Pygments has coloured, as HTML that keeps its look where style is dropped (GitHub, a notebook that is
    not trusted): the elements say what is code, a keyword (<b>), a comment (<i>), and style adds colour to that."""
    for look, element in (("; font-weight: bold", "b"), ("; font-style: italic", "i"), ("", "span")):
        coloured = rf'<span style="color: (#\w+){look}">([^<]*)</span>'
        code = re.sub(coloured, rf'<{element} style="color:\1">\2</{element}>', code)
    # JupyterLab and nbconvert would wrap lines, and give code in an output a background.
    plain = "white-space:pre; background:none; padding:0; border:0"
    return (
        f'<div><code>{title}</code><pre style="white-space:pre; overflow-x:auto; background:none">'
        f'<code style="{plain}">{code}</code></pre></div>'
    )
