"""The pages of functions, from docstrings. The sources are read and not imported: no torch, no GPU."""

import ast
import html
import re
from pathlib import Path

from lab.cells import ROOT

# What each page holds: modules, in order. A module shows what its __all__ lists, or else what has no underscore.
PAGES = {
    "kernels": [
        "kernels",
        *(f"kernels.{p.parent.name}" for p in sorted((ROOT / "kernels").glob("[a-z]*/__init__.py"))),
    ],
    "simt": ["simt"],
    "lab": ["lab", "lab.cuda", "lab.cuda_timing", "lab.operators", "lab.results", "lab.table", "lab.law", "lab.fatbin"]
    + ["lab.tensor_map", "lab.triton_on_simt", "lab.interpreter", "lab.plots"],
    "models": ["models", "models.llm", "models.several", "models.serving", "models.generate", "models.to_safetensors"]
    + ["models.slim"],
}
WORDS = {
    "kernels": "The ladders: every kernel of the course, called with torch tensors.",
    "simt": "The SIMT machine: CUDA C++ on the processor, counted.",
    "lab": "The workbench: compile, check, time, draw.",
    "models": "Whole language models from the kernels.",
}


def file_of(module):
    """The file of a module, or None."""
    path = ROOT / module.replace(".", "/")
    return next((p for p in (path / "__init__.py", path.with_suffix(".py")) if p.is_file()), None)


class Module:
    """A module's source, with what it defines and what it takes from others of the course."""

    seen = {}

    def __new__(cls, name):
        if name not in cls.seen:
            cls.seen[name] = made = super().__new__(cls)
            made.read(name)
        return cls.seen[name]

    def read(self, name):
        self.name, self.path = name, file_of(name)
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        self.doc, self.listed = ast.get_docstring(tree) or "", None
        self.defined, self.taken, self.made = {}, {}, {}  # made: {name: the call that wraps a function}
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.defined[node.name] = node
            elif isinstance(node, ast.ImportFrom) and node.module and file_of(node.module):
                self.taken.update({alias.asname or alias.name: (node.module, alias.name) for alias in node.names})
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                targets = node.targets[0].elts
                values = getattr(node.value, "elts", [node.value] * len(targets))
                self.made.update({t.id: v for t, v in zip(targets, values) if isinstance(t, ast.Name)})
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.made[node.targets[0].id] = node.value
            if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in node.targets):
                self.listed = [
                    constant.value for constant in ast.walk(node.value) if isinstance(constant, ast.Constant)
                ]

    def public(self):
        """[(name, its tree)], in the order of the file that defines them."""
        names = self.listed or [n for n in self.defined if not n.startswith("_")]
        found = [(name, self.find(name)) for name in names]
        return [(name, node) for name, node in found if node]

    def find(self, name, depth=6):
        if name in self.defined:
            return self.defined[name]
        if name in self.taken and depth:
            module, other = self.taken[name]
            return Module(module).find(other, depth - 1) if file_of(module) else None
        if (
            isinstance(self.made.get(name), (ast.Call, ast.GeneratorExp, ast.Attribute)) and depth
        ):  # an operator made from a function: that one
            found = [f for f in (self._meant(node, depth) for node in ast.walk(self.made[name])) if f]
            named = [f for f in found if f.name == name]
            return (named or found or [None])[0]
        return None

    def _meant(self, node, depth):
        """The function that a name, or module.name, in a call means, if it is the course's and says what it does."""
        found = None
        if isinstance(node, ast.Name):
            found = self.find(node.id, depth - 1)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self.taken:
            inner = ".".join(self.taken[node.value.id])
            found = Module(inner).find(node.attr, depth - 1) if file_of(inner) else None
        return found if isinstance(found, ast.FunctionDef) and not found.name.startswith("_") else None


def signature(name, node):
    """name(arguments), or for a class its constructor's."""
    if isinstance(node, ast.FunctionDef):
        return f"{name}({ast.unparse(_without_self(node.args))})"
    made = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if made:
        return f"{name}({ast.unparse(_without_self(made.args))})"
    fields = [ast.unparse(n).split(":")[0] + _default(n) for n in node.body if isinstance(n, ast.AnnAssign)]
    is_data = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
    return f"{name}({', '.join(fields)})" if is_data and fields else name


def _default(node):
    return "" if node.value is None or isinstance(node.value, ast.Call) else f"={ast.unparse(node.value)}"


def _without_self(arguments):
    first = [a for a in arguments.args if a.arg not in ("self", "cls")]
    return ast.arguments(
        arguments.posonlyargs, first, arguments.vararg, arguments.kwonlyargs, arguments.kw_defaults, arguments.kwarg,
        arguments.defaults[-len(first) :] if first else [],
    )  # fmt: skip


def methods(node):
    """The public methods and properties of a class that say what they are."""
    if isinstance(node, ast.ClassDef):
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and not part.name.startswith("_") and ast.get_docstring(part):
                shown = [ast.unparse(d) for d in part.decorator_list]
                yield (
                    (part.name if "property" in shown or "cached_property" in shown else signature(part.name, part)),
                    part,
                )


def laid_out(doc):
    """A docstring as HTML: paragraphs flow; what is set in columns, or indented, keeps its lines."""
    blocks = []
    for block in re.split(r"\n[ \t]*\n", doc.strip("\n")):
        text = html.escape(block, quote=False)
        if re.search(r"^[ \t]|\S[ \t]{2,}\S|^ *[-*|] ", block, re.M):
            blocks.append(f"<pre>{text}</pre>")
        else:
            blocks.append(f"<p>{' '.join(text.split())}</p>")
    return f'<div class="doc">{"".join(blocks).replace(chr(10), "&#10;")}</div>'


def page(name):
    """A page of functions as MyST Markdown."""
    said = [f"# {name}", WORDS[name]]
    for module in PAGES[name]:
        read = Module(module)
        if module != name:
            said.append(f"## {module}")
        said.append(laid_out(read.doc))
        for public, node in read.public():
            doc = ast.get_docstring(node)
            kind = "class " if isinstance(node, ast.ClassDef) else ""
            anchor = f"{module}.{public}"
            said.append(f'<a id="{anchor}"></a>\n\n### {public}')
            said.append(f'<p class="signature"><code>{kind}{html.escape(signature(public, node))}</code></p>')
            if doc:
                said.append(laid_out(doc))
            for call, method in methods(node):
                shown = f'<p class="signature method"><code>.{html.escape(call)}</code></p>'
                said.append(shown + laid_out(ast.get_docstring(method)))
    return "\n\n".join(said) + "\n"


def write(site):
    for name in PAGES:
        site.write(f"reference/{name}.md", page(name))


def modules():
    """Every module that a page names, for the test that they are there."""
    return [module for of in PAGES.values() for module in of]


if __name__ == "__main__":
    print(Path(__file__).name, sum(len(Module(m).public()) for m in modules()))
