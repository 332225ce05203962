"""Notebooks, README and glossary as the Markdown that Sphinx reads, with links that lead somewhere on the site.

The folders stay as they are, so that links between notebooks stay too: notebooks/, exercises/, and what they link to
in the course's folder as a page of its own in sources/. Pictures become files, tables plain HTML. Solutions are never
read, and a link to one becomes plain text.
"""

import base64
import html
import os
import re
import struct
from pathlib import Path

from lab.cells import ROOT, alternative, read
from lab.notebooks import COLOUR

PARTS = {
    "I · The machine": "01 02",
    "II · Matrix × vector": "03 04 05 06",
    "III · Attention": "07 08 09 10",
    "IV · State space duality": "11 12 13",
    "V · Hopper by hand": "14 15 16",
    "VI · Whole systems": "17 18 19 20 21",
}
ENTRY = re.compile(r'<a id="([a-z0-9-]+)"></a>(.+?) \(\[\d\d\]\([^)]*\)\): (.+)')
CODE = re.compile(
    r"(^(`{3,}|~{3,}).*?^\2[ \t]*$|(`+)(?!`).+?(?<!`)\3(?!`)|\$\$.+?\$\$|(?<![\\$])\$[^$\n]+\$)", re.M | re.S
)
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^][]*\])*)\]\(\s*([^)\s]+)\s*\)")
LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".cu": "cuda", ".cuh": "cuda", ".json": "json", ".cpp": "cuda"}
FOLDER = " (in the course’s folder)"
MOVES = re.compile(r"The (?:sliders?|controls) needs? a running notebook\.\s+")  # not so here
LISTING = re.compile(r"<div>\s*<code>([^<]*)</code>\s*<pre")


class PageError(Exception):
    """What is wrong with a source of the site, in one sentence that names it."""


def chapters():
    """The chapters' names, "01_roofline" and so on, in order."""
    return [path.stem for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))]


def parts(names=None):
    """{title of a part: its chapters}; every chapter stands in one."""
    names = chapters() if names is None else names
    found = {title: [n for n in names if n[:2] in numbers.split()] for title, numbers in PARTS.items()}
    left = [n for n in names if not any(n in of for of in found.values())]
    if left:
        raise PageError(f"expected each chapter in a part of book/pages.py and found {', '.join(left)} in none")
    return {title: of for title, of in found.items() if of}


def glossary():
    """{anchor: the entry as plain text}, for the text that appears over a link to it."""
    entries = {}
    for line in (ROOT / "notebooks/glossary.md").read_text(encoding="utf-8").splitlines():
        if entry := ENTRY.fullmatch(line):
            entries[entry[1]] = plain(f"{entry[2]}: {entry[3]}")
    return entries


def plain(markdown):
    """The text of a line of Markdown, without its marks; formulas as they are written."""
    text = LINK.sub(r"\2", markdown).replace("**", "").replace("`", "")
    text = re.sub(r"\$([^$]+)\$", lambda found: _spoken(found[1]), text)
    return re.sub(r"(?<!\w)\*|\*(?!\w)", "", text)


def _spoken(formula):
    """A short formula without its commands, as good as plain text gets."""
    names = {"cdot": "·", "circ": "∘", "infty": "∞", "sum": "Σ", "le": "≤", "ge": "≥", "times": "×", "approx": "≈"}
    names |= {
        "lambda": "λ",
        "sigma": "σ",
        "mu": "μ",
        "top": "T",
        "to": "→",
        "leftarrow": "←",
        "dots": "…",
        "oplus": "⊕",
    }
    names |= {"varepsilon": "ε", "lceil": "⌈", "rceil": "⌉", "lfloor": "⌊", "rfloor": "⌋", "cdots": "…", "pm": "±"}
    formula = re.sub(r"\\(?:text|mathrm|mathrel)\{([^{}]*)\}", r"\1", formula)
    formula = re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", formula)
    formula = re.sub(r"\\([a-zA-Z]+)", lambda found: names.get(found[1], found[1]), formula)
    return " ".join(re.sub(r"\\[,;!: ]|[{}]", " ", formula).split()).replace(" ^ ", "^").replace(" _ ", "_")


class Site:
    """A folder of Sphinx's sources, and the files that go beside them as they are."""

    def __init__(self, folder, repository=""):
        self.source, self.extra = Path(folder) / "source", Path(folder) / "extra"
        self.repository = repository  # "owner/name" on GitHub, or nothing
        self.terms, self.linked, self.sliders = glossary(), set(), {}

    def write(self, name, text):
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    # Links

    def links(self, markdown, page):
        """The Markdown of the file `page`, its links turned into those of the site."""
        held = []  # a link's text may hold code, and is put back whole

        def hold(found):
            held.append(self.link(found[1], found[2], found[3], page))
            return f"\x02{len(held) - 1}\x02"

        # Code is hidden first, so that nothing in it is taken for a link; a link whose text is code is found even so.
        codes = []

        def hide(found):
            codes.append(found[0])
            return f"\x01{len(codes) - 1}\x01"

        text = LINK.sub(hold, CODE.sub(hide, markdown))
        text = re.sub(r"\x02(\d+)\x02", lambda found: held[int(found[1])], text)
        return re.sub(r"\x01(\d+)\x01", lambda found: codes[int(found[1])], text)

    def link(self, picture, text, target, page):
        if re.match(r"https?:", target):
            return f"{picture}[{text}]({target})"
        name, _, anchor = target.partition("#")
        path = os.path.normpath(os.path.join(os.path.dirname(page), name)) if name else page
        if picture:
            return self.picture_file(text, path, page)
        if path == "notebooks/glossary.md" and anchor:
            if anchor not in self.terms:
                raise PageError(f"{page}: expected an entry of the glossary and found #{anchor}")
            said = html.escape(self.terms[anchor], quote=True).replace("\n", " ")
            here = "" if page == path else _up(page) + "notebooks/glossary.html"
            return f'<a class="term" href="{here}#{anchor}" title="{said}">{text}</a>'
        if path.startswith("solutions") or not (ROOT / path).is_file():
            if not (ROOT / path).exists():
                raise PageError(f"{page}: expected a file or folder of the course and found {target}")
            return text + FOLDER
        if path == "README.md":
            return f"[{text}]({_up(page)}index.md)"
        if path.endswith(".ipynb"):
            return f"[{text}]({_up(page)}{path.removesuffix('.ipynb')}.md)"
        if path != "notebooks/glossary.md":
            self.linked.add(path)
            path = f"sources/{path}.md"
        return f"[{text}]({_up(page)}{path}" + (f"#{anchor})" if anchor else ")")

    def picture_file(self, text, path, page):
        return self.picture((ROOT / path).read_bytes(), f"{Path(path).parts[1]}_{Path(path).name}", text, page)

    def picture(self, data, name, text, page):
        """An <img> of a PNG, which is written beside the pages."""
        at = self.extra / "pictures" / name
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_bytes(data)
        width, height = struct.unpack(">II", data[16:24])
        said = html.escape(text, quote=True)
        return (
            f'<img class="picture" src="{_up(page)}pictures/{name}" width="{width}" height="{height}" alt="{said}" '
            'loading="lazy">'
        )

    # Notebooks

    def notebook(self, folder, name):
        """The page of a chapter or of its exercises."""
        page, cells = f"{folder}/{name}.ipynb", read(ROOT / folder / f"{name}.ipynb")
        if folder not in ("notebooks", "exercises"):
            raise PageError(f"expected a page in notebooks or exercises and found {folder}/{name}")
        said = []
        for at, cell in enumerate(cells):
            if "colab" in cell["metadata"].get("tags", []):
                continue  # the page says in its own words where it runs
            if cell["cell_type"] == "markdown":
                before = (name, cells[at - 1].get("id"))
                text = MOVES.sub("", cell["source"]) if before in self.sliders else cell["source"]
                said.append(self.links(text, page))
            elif cell["cell_type"] == "code":
                said += self.code(cells, at, page, name)
        said[0] = self.with_badge(said[0], folder, name)
        if folder == "notebooks" and (ROOT / "exercises" / f"{name}.ipynb").is_file():
            said.append(f"```{{toctree}}\n:hidden:\n\n../exercises/{name}\n```")
        self.write(f"{folder}/{name}.md", "\n\n".join(said) + "\n")

    def with_badge(self, title, folder, name):
        """A line below the title: where the page runs."""
        first, _, rest = title.partition("\n")
        run = f"`make lab` opens this page as a notebook, {folder}/{name}.ipynb, in which everything runs."
        if self.repository:
            at = f"https://colab.research.google.com/github/{self.repository}/blob/main/{folder}/{name}.ipynb"
            run += f" Or [open it in Colab]({at})."
        return f'{first}\n\n<div class="run">\n\n{run}\n\n</div>\n{rest}'

    def code(self, cells, at, page, name):
        cell = cells[at]
        source = re.sub(r"^# NBVAL_\w+\n", "", cell["source"], flags=re.M)  # for the tests, not for a reader
        yield fenced(source, "python", "cell")
        if "lab.explore(" in cell["source"]:
            found = self.sliders.get((name, cell["id"]))
            yield found or (
                '<p class="note">Here stands a slider that moves in the notebook: <code>make lab</code>. This page '
                "shows single settings of it as pictures.</p>"
            )
        for number, output in enumerate(cell.get("outputs", [])):
            if shown := self.output(output, cells, at, number, page, name):
                yield shown

    def output(self, output, cells, at, number, page, name):
        data = output["data"]
        if output["output_type"] == "stream":
            return fenced(COLOUR.sub("", output["text"]).rstrip("\n"), "text", "output")
        if "image/png" in data:
            text = alternative(cells, at)
            file = f"{name}/{cells[at]['id']}{f'-{number}' if number else ''}.png"
            return self.picture(base64.b64decode(data["image/png"]), file, text, page)
        shown = data.get("text/html", "")
        if listing := LISTING.match(shown):
            title = html.unescape(listing[1])
            suffix = Path(title.split(",")[0]).suffix
            said = fenced(data["text/plain"], LANGUAGES.get(suffix, "text"), "listing")
            return f'<p class="file"><code>{html.escape(title)}</code></p>\n\n{said}'
        if "<table" in shown:
            return table(shown)
        return fenced(data.get("text/plain", "").rstrip("\n"), "text", "output") if data.get("text/plain") else ""

    # Other pages

    def readme(self):
        """The first page, with the whole book in its table of contents."""
        text = re.sub(r"<!--.*?-->\n?", "", (ROOT / "README.md").read_text(encoding="utf-8"))
        trees = [f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n" for title in parts()]
        said = [self.links(text, "README.md")]
        said += [tree + "\n".join(f"notebooks/{n}" for n in of) + "\n```" for tree, of in zip(trees, parts().values())]
        more = "notebooks/glossary\n" + "\n".join(f"reference/{name}" for name in ("kernels", "simt", "lab", "models"))
        said.append("```{toctree}\n:hidden:\n:caption: Look it up\n\n" + more + "\n```")
        self.write("index.md", "\n\n".join(said) + "\n")

    def glossary(self):
        text = (ROOT / "notebooks/glossary.md").read_text(encoding="utf-8")
        self.write("notebooks/glossary.md", self.links(text, "notebooks/glossary.md"))

    def source_pages(self):
        """Pages of the files that others link to; a page of Markdown may link to more."""
        done = set()
        while left := sorted(self.linked - done):
            for path in left:
                text = (ROOT / path).read_text(encoding="utf-8")
                if path.endswith(".md"):
                    said = self.links(text, path)
                    self.write(f"sources/{path}.md", _moved(said))
                else:
                    language = LANGUAGES.get(Path(path).suffix, "text")
                    said = f"# `{path}`\n\n{fenced(text.rstrip(), language, 'listing')}\n"
                    self.write(f"sources/{path}.md", f"---\norphan: true\n---\n\n{said}")
                done.add(path)


def _up(page):
    """From a page to the top: "../" for each folder. Pages in sources/ lie one deeper than the file that they show."""
    return "../" * page.count("/")


def _moved(markdown):
    """Links of a page from sources/, one folder deeper than its file."""
    deeper = re.sub(r"(\]\(|(?:href|src)=\")((?:\.\./)+)", r"\1../\2", markdown)
    return f"---\norphan: true\n---\n\n{deeper}"


def fenced(text, language, kind):
    """A block of code of some kind (a class), fenced by more backticks than it has itself."""
    ticks = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`+", text) or [""]))
    return f"{ticks}{{code-block}} {language}\n:class: {kind}\n\n{text}\n{ticks}"


def table(shown):
    """A table of an output: no looks of its own, in a box that scrolls."""
    shown = re.sub(r"(<td[^>]*monospace[^>]*>)(?!<code>)(.*?)</td>", r"\1<code>\2</code></td>", shown, flags=re.S)
    bare = re.sub(r' (?:style|class|align|nowrap|valign)(?:="[^"]*")?(?=[ >])', "", shown)
    if caption := re.search(r"<caption>(.*?)</caption>", bare, re.S):
        name = html.unescape(re.sub(r"<[^>]*>", "", caption[1]))
    else:
        name = "counters, line by line"
    if "<thead>" not in bare:
        bare = re.sub(
            r"(<table>(?:<caption>.*?</caption>)?)(<tr>.*?</tr>)", r"\1<thead>\2</thead><tbody>", bare, flags=re.S
        )
        bare = bare.replace("</table>", "</tbody></table>")
    bare = bare.replace("<th></th>", "<td></td>").replace("<th>", '<th scope="col">').replace("\n", " ")
    bare = re.sub(r"<td>((?:(?!</td>).)*?)</td>", _kept_space, bare)
    said = html.escape(name, quote=True)
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{said}">{bare}</div>'


def _kept_space(cell):
    """Leading space stays."""
    text = cell[1]
    return f"<td>{'&nbsp;' * (len(text) - len(text.lstrip(' ')))}{text.lstrip(' ')}</td>"
