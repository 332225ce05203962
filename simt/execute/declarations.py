"""The name of a variable that nothing has set, found in the source: for the message."""

import re

QUALIFIERS = {"const", "volatile", "unsigned", "signed", "long", "short", "struct", "alignas", "register"}
NO_TYPES = {
    "if", "for", "while", "switch", "return", "goto", "else", "using", "typedef", "extern", "static", "case", "delete",
    "new", "throw", "do",
}  # fmt: skip
DECLARATION = re.compile(r"\s*((?:[A-Za-z_][\w:]*(?:\s*<[^;=]*?>)?[\s*&]+)+)([A-Za-z_].*)", re.S)
DECLARATOR = re.compile(r"[\s*&]*([A-Za-z_]\w*)\s*((?:\[[^\]]*\]\s*)*)(=.*)?", re.S)


def variables(source, line):
    """The variables of a function that its `line` (from 1) reads and that were declared without a value."""
    lines = re.sub(r"//[^\n]*|/\*.*?\*/", blank, source, flags=re.S).split("\n")
    if not 0 < line <= len(lines):
        return []
    text = function_until("\n".join(lines[:line]))
    found = [name for statement in re.split(r"[;{}]", without_brackets(text)) for name in declared(statement)]
    before = text[: text.rfind("\n") + 1]
    open_ones = [n for n in found if not re.search(rf"\b{n}\s*(?:\[[^\]]*\]\s*)*=[^=]", before)]
    here = [n for n in open_ones or found if re.search(rf"\b{n}\b", lines[line - 1])]
    return here or (open_ones if len(open_ones) == 1 else [])


def blank(comment):
    return re.sub(r"[^\n]", " ", comment[0])


def function_until(text):
    """What of a text belongs to the function, not yet closed or just so, in which it ends."""
    depth, start = 0, 0
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 1 and brace[0] == "{":
            start = brace.start()
    return text[start:]


def without_brackets(text):
    """Casts, conditions and arguments declare nothing; nor do the heads of loops, but for what has a value."""
    shorter = re.sub(r"\([^()]*\)", " ", text)
    return shorter if shorter == text else without_brackets(shorter)


def declared(statement):
    """The names that a statement declares without a value."""
    found = DECLARATION.fullmatch(statement)
    if found is None or NO_TYPES & set(re.findall(r"\w+", found[1])) or "__shared__" in found[1]:
        return []
    parts = [DECLARATOR.fullmatch(part) for part in found[2].split(",")]
    return [p[1] for p in parts if p is not None and p[3] is None and p[1] not in QUALIFIERS]
