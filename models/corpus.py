"""The course's own text, for the small model: the prose of chapters and exercises, of READMEs and of the sources.

    train, held_out = texts()       lists of paragraphs; every tenth is held out, by a hash of its text

Pictures, tables, markup of lines and links' targets are left out: what is left are sentences.
"""

import ast
import hashlib
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHORTEST = 60  # characters of a paragraph that is taken


def texts(root=ROOT):
    """(paragraphs to learn from, paragraphs held out)."""
    train, held_out = [], []
    for paragraph in sorted({p for source in sources(root) for p in paragraphs(source)}):
        digest = hashlib.sha256(paragraph.encode()).digest()
        (held_out if digest[0] % 10 == 0 else train).append(paragraph)
    return train, held_out


def sources(root):
    """The text of every Markdown cell and README, and what the sources say at their heads and in docstrings."""
    for folder in ("notebooks", "solutions"):
        for path in sorted((root / folder).glob("*.ipynb")):
            for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
                if cell["cell_type"] == "markdown":
                    yield "".join(cell["source"])
    for path in [root / "README.md", *sorted(root.glob("*/README.md"))]:
        yield path.read_text(encoding="utf-8")
    for room in ("ref", "kernels", "simt", "lab", "models"):
        for path in sorted((root / room).rglob("*.py")):
            yield from docstrings(path.read_text(encoding="utf-8"))
        for path in sorted(p for ending in ("*.c", "*.cu", "*.cuh") for p in (root / room).rglob(ending)):
            yield from re.findall(r"/\*(.*?)\*/", path.read_text(encoding="utf-8"), flags=re.S)


def docstrings(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
            yield text


def paragraphs(text):
    """The sentences of a Markdown text, a paragraph each."""
    text = re.sub(r"```.*?```|<!--.*?-->|\$\$.*?\$\$", "\n\n", text, flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)  # pictures
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)  # links: their words
    text = re.sub(r"<[^>]+>", "", text)
    for part in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in part.splitlines()]
        if any(line.startswith(("|", "#", ">")) or re.search(r"\S   +\S", line) for line in lines):
            continue  # tables, those of names and meanings too
        joined = " ".join(re.sub(r"^([-*]|\d+\.)\s+", "", line) for line in lines)
        joined = re.sub(r"[*`]", "", joined).strip()
        if len(joined) >= SHORTEST and joined[-1] in ".:?!)":
            yield joined
