"""The hash of a source file's code, by which a stored figure knows what was measured. Comments, docstrings and blank
lines may change freely."""

import ast
import functools
import hashlib
import io
import re
import tokenize

from lab.compiler import PACKAGE


def code_hash(path):
    """sha256 of a source file's code, without comments, docstrings and blank lines."""
    return _hash(path.read_text(encoding="utf-8"), path.suffix == ".py")


@functools.lru_cache(maxsize=1024)  # many a file of figures names the same sources
def _hash(text, python):
    if PACKAGE and python:
        text = _as_in_the_folder(text)
    text = _bare_python(text) if python else _bare_c(text)
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _as_in_the_folder(text):
    """A source with the names that it has in the course's folder, which is how it was measured: see lab/wheel.py."""
    text = text.replace(PACKAGE, "")
    name = PACKAGE.rstrip(".")
    text = re.sub(rf"\bfrom {name} import \w+; import ", "import ", text)  # import lab.cuda
    return re.sub(rf"\bfrom {name} import (\w+)", r"import \1", text)  # import simt


def _bare_c(text):
    """C or CUDA source without comments and with single spaces; string literals are kept as they are."""
    pattern = r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|(?:[ \t]|//[^\n]*|/\*.*?\*/)+'
    text = re.sub(pattern, lambda m: m[1] or " ", text, flags=re.S)
    return "\n".join(line.strip() for line in text.split("\n"))


def _bare_python(text):
    """Python source without comments and docstrings."""
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                _blank(lines, node.body[0])
    return "\n".join(lines)


def _blank(lines, node):
    """Cut a node out of the lines; its columns count bytes. Code beside it, as in `def f(): "doc"; g()`, stays."""
    for row in range(node.lineno - 1, node.end_lineno):
        line = lines[row].encode()
        start = node.col_offset if row == node.lineno - 1 else 0
        stop = node.end_col_offset if row == node.end_lineno - 1 else len(line)
        lines[row] = (line[:start] + line[stop:]).decode()
