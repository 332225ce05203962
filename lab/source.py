"""Show source code in a notebook, highlighted: a file, a part of it, or Python functions."""

import inspect
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class show:  # noqa: N801 - reads as a verb in a notebook: show("kernels/cpu_gemv/naive.c")
    """Display source code, highlighted.

    show("kernels/cpu_gemv/naive.c")    a file, by its path from the course's folder
    show("lab/roof.c", "read_all")      one function of a C or CUDA file, with the comment above it
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
            self.text = "\n".join(self._function(path.read_text(), name) for name in more) or path.read_text()
        else:
            parts = [part.fget if isinstance(part, property) else part for part in (what, *more)]
            path = Path(inspect.getsourcefile(parts[0])).resolve()
            self.title = path.relative_to(ROOT).as_posix() if ROOT in path.parents else path.name
            self.text, self.language = "\n".join(textwrap.dedent(inspect.getsource(p)) for p in parts), "python"
        if begin is not None:
            self.text = self._part(self.text.splitlines(), begin, end)

    def _function(self, text, name):
        # a comment that ends right above, the declaration with "name(", which may take two lines, and all up to a
        # closing brace at the margin
        declaration = rf"^[a-z_]\w[^\n;{{}}]*(?:\n[^\n;{{}}#/]*)?\b{name}\("
        found = re.search(rf"(^/\*(?:(?!\*/).)*\*/\n)?{declaration}.*?^\}}\n", text, re.S | re.M)
        if not found:
            raise ValueError(f"show: {self.title} has no function {name!r}")
        return found[0]

    def _part(self, lines, begin, end):
        first = next((at for at, line in enumerate(lines) if begin in line), len(lines))
        rest = range(first + 1, len(lines))
        last = next((at for at in rest if (lines[at] == "}" if end is None else end in lines[at])), None)
        if last is None:
            missing = begin if first == len(lines) else end or "}"
            raise ValueError(f"show: {self.title} has no line with {missing!r}" + " behind it" * (first < len(lines)))
        kept = [(line, self.language == "c" and line.startswith("#")) for line in lines[first:last]]  # #pragma
        margin = min((len(line) - len(line.lstrip()) for line, fixed in kept if line and not fixed), default=0)
        return "\n".join(line if fixed else line[margin:] for line, fixed in kept).rstrip()

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

        look = "line-height:1.35; margin:0; white-space:pre; overflow-x:auto; background:none; font-size:90%"
        code = highlight(self.text, get_lexer_by_name(self.language), HtmlFormatter(style=Course, noclasses=True))
        inner = re.search(r"<pre[^>]*>(.*)</pre>", code, re.S)[1]
        return f'<div><code>{self.title}</code><pre style="{look}">{inner}</pre></div>'
