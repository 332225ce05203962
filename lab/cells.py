"""A notebook's cells, read without running them: what a statement rests on, and what a picture shows."""

import ast
import json
import re
import symtable
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def read(path):
    """The cells of a notebook, their texts joined."""
    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        cell["source"] = joined(cell["source"])
        for output in cell.get("outputs", []):
            output["text"] = joined(output.get("text", ""))
            output["data"] = {kind: joined(data) for kind, data in output.get("data", {}).items()}
    return cells


def joined(text):
    return "".join(text) if isinstance(text, list) else text


def statements(cells):
    """The top-level statements of code cells, as trees, in order. A cell that is no plain Python has none."""
    for cell in cells:
        if cell["cell_type"] == "code":
            try:
                yield from ast.parse(cell["source"]).body
            except SyntaxError:
                continue


def bound(statement):
    """The names that a statement gives a meaning, or changes in place by an assignment."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    targets = [node for node in ast.walk(statement) if isinstance(getattr(node, "ctx", None), ast.Store)]
    names = {node.id for node in targets if isinstance(node, ast.Name)}
    for target in targets:
        while isinstance(target, (ast.Subscript, ast.Attribute, ast.Starred)):
            target = target.value
        if isinstance(target, ast.Name):
            names.add(target.id)
    return names


def used(tree):
    """The names of the notebook that a statement, or an expression, refers to; what functions call their own aside."""
    found, tables = set(), [symtable.symtable(ast.unparse(tree), "cell", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        top = table.get_type() == "module"
        found |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global())}
    return found


def needed(before, names):
    """Of the statements in `before`, those on which the names rest, in order."""
    before, names = list(before), set(names)
    while True:
        kept = _needed(before, names)
        # What a function refers to, it looks up when it is called, at the end: later meanings count too.
        later = set().union(*(used(s) for s in kept if isinstance(s, (ast.FunctionDef, ast.ClassDef))))
        if later <= names:
            return kept
        names |= later


def _needed(before, names):
    kept, names = [], set(names)
    for statement in reversed(before):
        given = bound(statement) & names
        if given:
            kept.append(_part(statement, given))
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)):
                names -= given
            elif isinstance(statement, ast.Assign):  # outright, not in place
                names -= given & {node.id for target in statement.targets for node in _plain(target)}
            names |= used(statement)
    return kept[::-1]


def _part(statement, names):
    """Of an import, what brings these names."""
    if not isinstance(statement, (ast.Import, ast.ImportFrom)):
        return statement
    aliases = [alias for alias in statement.names if (alias.asname or alias.name).split(".")[0] in names]
    if isinstance(statement, ast.Import):
        return ast.copy_location(ast.Import(aliases), statement)
    return ast.copy_location(ast.ImportFrom(statement.module, aliases, statement.level), statement)


def _plain(target):
    """The names that an assignment replaces: a, or a and b of `a, b = ...`."""
    if isinstance(target, ast.Name):
        return [target]
    return [name for part in target.elts for name in _plain(part)] if isinstance(target, (ast.Tuple, ast.List)) else []


@lru_cache
def drawn():
    """{function of lab.plots: the first sentence of its docstring}."""
    files = {}
    for node in ast.parse((ROOT / "lab/plots/__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            files.update({alias.name: node.module.split(".")[-1] for alias in node.names})
    said = {}
    for file in set(files.values()):
        for node in ast.parse((ROOT / f"lab/plots/{file}.py").read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and files.get(node.name) == file:
                said[node.name] = first_sentence(ast.get_docstring(node) or "")
    return said


def first_sentence(text):
    text = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) ", text)[0].replace("`", "")


def alternative(cells, at):
    """What the picture that cell number `at` shows, in a sentence or two: what its kind of drawing shows, as the
    docstring of the function that draws it says, and the texts that the cell gives to it."""
    *before, last = list(statements([cells[at]])) or [ast.parse("None").body[0]]
    before = [*statements(cells[:at]), *before]
    kind = _drawing(last, before) or "A picture drawn by the cell above."
    heading = next((h for h in map(_heading, reversed(cells[:at])) if h), "")
    said = [text for text in _texts(last) if text.lower() not in kind.lower()]
    parts = [kind, f"Here: {'; '.join(said)}." if said else "", f"(Section: {heading})" if heading else ""]
    return " ".join(part for part in parts if part)


def _drawing(tree, before, depth=4):
    """The sentence of the function of lab.plots that a statement comes to, by way of the notebook's own functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "plots" and drawn().get(node.attr):
                return drawn()[node.attr]
            if node.attr in ("bars", "roofline"):
                return {
                    "bars": "A bar for each rung: its rate, as a share of the measured roof, which is a dashed line.",
                    "roofline": drawn()["roofline"],
                }[node.attr]
    if depth:
        names = used(tree)
        for statement in reversed(before):
            if bound(statement) & names and (found := _drawing(statement, before[:-1], depth - 1)):
                return found
    return None


def _heading(cell):
    if cell["cell_type"] != "markdown":
        return ""
    found = re.findall(r"^#+ +(.+)$", cell["source"], re.M)
    return re.sub(r"[`*$]|\]\([^)]*\)|\[", "", found[-1]) if found else ""


def _texts(tree):
    """Titles and names: the texts in a statement that a reader of the picture sees."""
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = " ".join(node.value.split()).strip(" (,;:.")
            if len(text) > 3 and " " in text and text not in texts and not re.search(r"[/\\%{}]", text):
                texts.append(text)
    return texts[:6]
