"""For authors: keep the notebooks run, canonical, and the exercises in step with their solutions.

    python -m lab.notebooks strip                  write exercises/ from solutions/
    python -m lab.notebooks execute 01_roofline    run from top to bottom, store the outputs
    python -m lab.notebooks check                  is each notebook as these two would leave it?
    python -m lab.notebooks dress                  give stored outputs today's looks and pictures a text; runs nothing
    python -m lab.notebooks badge OWNER/NAME       where the course is published: each notebook opens in Google Colab
    python -m lab.notebooks badge none             ... and no longer

Without names: all of them. In a solution, what the learner is to write stands between markers:

    ### BEGIN SOLUTION about 6 lines    the exercise says "# your code here: about 6 lines"
    ### STUB return x                   optional: a line for the learner, in place of the usual stub
    ### END SOLUTION

and the same after // in C source. A cell with the tag `solution-only` is left out of the exercise.
"""

import argparse
import copy
import hashlib
import json
import os
import re
import sys
import time
import warnings
from pathlib import Path

import nbformat

from lab.cells import alternative
from lab.source import listing

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("notebooks", "solutions", "exercises")
SECONDS_PER_CELL = 600

WIDGET = "application/vnd.jupyter.widget-view+json"
KEPT_CELL_METADATA = ("tags", "jupyter")  # the rest is an editor's or a run's own: timings, scroll state
KERNEL = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

MARKER = re.compile(
    r"(?P<indent>[ \t]*)(?P<c>//[ \t]*)?### (?P<word>BEGIN SOLUTION|END SOLUTION|STUB)(?: (?P<text>.*))?"
)
# Meant as a marker, but none: wrong case, a missing space, code before it. It would give the solution away.
NEARLY = re.compile(r"#\s*(?i:begin|end)\W*(?i:solution)|##+\s*STUB\b")
# An absolute path on somebody's machine; not a part of an address (example.org/home/) or of ./tmp/.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:home|root|tmp|Users|private|var/folders)/|\b[A-Z]:\\[\w .-]+\\")
OLD_LISTING = re.compile(
    r"<div><code>([^<]*)</code><pre style=\"font-family[^>]*><code[^>]*>(.*)</code></pre></div>", re.S
)
OLD_CELL = r'<(t[dh]) style="text-align:left; white-space:nowrap; padding:2px 5px">'
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class NotebookError(Exception):
    """What is wrong, in one sentence that names the notebook and the cell."""


# Reading and writing


def read(path):
    """The notebook as it is in the file, its text joined; nothing is mended on the way in."""
    try:
        nb = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise NotebookError(f"{label(path)}: cannot be read ({e.strerror})") from None
    except ValueError as e:
        raise NotebookError(f"{label(path)}: is not a notebook ({e})") from None
    if not isinstance(nb, dict) or nb.get("nbformat") != 4:
        raise NotebookError(f"{label(path)}: expected a notebook of format 4")
    valid(copy.deepcopy(nb), label(path))  # of a copy, because nbformat mends cell ids as it goes
    for cell in nb["cells"]:
        cell["source"] = joined(cell["source"])
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = joined(output["text"])
            for kind, data in output.get("data", {}).items():
                output["data"][kind] = data if kind.endswith("json") else joined(data)
    return nbformat.from_dict(nb)


def valid(nb, name):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about ids, of which canonical() takes care
            nbformat.validate(nb)
    except (nbformat.ValidationError, AttributeError, KeyError, TypeError) as e:  # nbformat trips over some
        raise NotebookError(f"{name}: is not a valid notebook ({str(e).splitlines()[0]})") from None


def joined(text):
    """Notebooks store text whole or as a list of lines."""
    return "".join(text) if isinstance(text, list) else text


def text_of(nb):
    """The canonical file's text. Lines are stored one by one and keys in order, so that a diff is small."""
    return nbformat.writes(nb, version=4).rstrip("\n") + "\n"


def write(nb, path):
    """Whole or not at all: a run that is killed leaves the old file."""
    path = Path(path)
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        new.write_text(text_of(nb), encoding="utf-8", newline="\n")
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def label(path):
    path = Path(path).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def at(name, number, cell):
    return f"{name}, cell {number} (id {cell.get('id', 'none')})"


# The canonical form


def canonical(nb, name="notebook"):
    """The same notebook in its one stable form, as a new object.

    Refuses outputs that hold an error or a path of this machine.
    """
    cells = []
    for number, cell in enumerate(nb.cells, 1):
        where = at(name, number, cell)
        new = {
            "id": cell.get("id") or hashlib.sha256(f"{number} {cell.source}".encode()).hexdigest()[:8],
            "cell_type": cell.cell_type,
            "metadata": {k: v for k, v in cell.get("metadata", {}).items() if k in KEPT_CELL_METADATA},
            "source": cell.source,
        }
        if any(new["id"] == other["id"] for other in cells):
            raise NotebookError(f"{where}: another cell has the same id")
        if cell.get("attachments"):
            new["attachments"] = cell.attachments
        if cell.cell_type == "code":
            new["execution_count"] = cell.get("execution_count")
            new["outputs"] = canonical_outputs(cell.get("outputs", []), where)
            if new["outputs"] and new["execution_count"] is None:
                raise NotebookError(f"{where}: has outputs but no execution count; run it again")
        cells.append(new)
    new = nbformat.from_dict({"cells": cells, "metadata": KERNEL, "nbformat": 4, "nbformat_minor": 5})
    valid(new, name)
    return new


def canonical_outputs(outputs, where):
    kept = []
    for output in outputs:
        if output["output_type"] == "error":
            raise NotebookError(f"{where}: its output is an error, {output.get('ename')}: {output.get('evalue')}")
        if WIDGET in output.get("data", {}):
            continue  # widget state is never stored, and without it a viewer shows an error here
        output = {k: v for k, v in output.items() if k != "transient"}
        if output["output_type"] == "stream":
            last = kept[-1] if kept else {}
            if last.get("name") == output["name"]:  # only streams have a name
                kept.pop()
                output["text"] = last["text"] + output["text"]
        kept.append(output)
    for output in kept:
        if output["output_type"] == "stream":
            output["text"] = as_on_a_terminal(output["text"])
        for text in texts_in({k: v for k, v in output.items() if k != "metadata"}):
            path = MACHINE_PATH.search(text)
            if path or str(ROOT) in text:
                found = text[path.start() :].split()[0] if path else str(ROOT)
                raise NotebookError(f"{where}: its output holds a path of this machine, {found:.80}")
    return kept


def as_on_a_terminal(text):
    """A progress line rewrites itself after a carriage return: keep what would be left on the screen."""
    return re.sub(r"[^\n]*\r(?=[^\r\n])", "", text.replace("\r\n", "\n"))


def texts_in(value, kind=""):
    """Every string that a reader can see. Pictures are left out: base64 may hold "/tmp/" by chance."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from texts_in(part, key)
    elif isinstance(value, list):
        for part in value:
            yield from texts_in(part, kind)
    elif isinstance(value, str) and (kind == "image/svg+xml" or not kind.startswith(("image/", "application/pdf"))):
        yield re.sub(r"base64,[\w+/=\s]+", "", COLOUR.sub("", value))


# Running


def execute(path):
    """Run a notebook from top to bottom in its own folder, store its outputs, return the seconds."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    path = Path(path)
    nb = nbformat.from_dict(dict(read(path), metadata=KERNEL, nbformat_minor=5))
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        nb,
        timeout=SECONDS_PER_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.resolve().parent)}},
        store_widget_state=True,
        record_timing=False,
    )
    # The course's packages, also where they are not installed.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    start = time.perf_counter()
    try:
        client.execute(env=dict(os.environ, PYTHONPATH=os.pathsep.join(paths)))
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as e:
        raise NotebookError(f"{label(path)}: stopped, and nothing was written\n{e}") from None
    seconds = time.perf_counter() - start
    write(dressed(canonical(nb, label(path))), path)
    return seconds


# Looks


def dressed(nb):
    """The notebook, a new object, with its stored outputs as today's code would show them: tables and listings without
    styles that carry their look, and pictures with a text for who does not see them."""
    nb = copy.deepcopy(nb)
    for number, cell in enumerate(nb.cells):
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/html" in data:
                data["text/html"] = restyled(data["text/html"])
            if "image/png" in data:  # nbconvert reads it there
                output["metadata"] = dict(output.get("metadata", {}))
                output["metadata"]["image/png"] = {"alt": alternative(nb.cells, number)}
    return nb


def restyled(shown):
    """HTML of a table, a listing or a report as it was stored until November 2026, as it is made now; other HTML as it
    is."""
    if old := OLD_LISTING.fullmatch(shown):
        return listing(*old.groups())
    if "white-space:nowrap; padding:2px 5px" in shown:
        now = re.sub(OLD_CELL, r'<\1 align="left" nowrap style="text-align:left">', shown)
        now = now.replace("<caption style=", '<caption align="left" style=')
        now = re.sub(
            r"(</caption>)(<tr>.*?</tr>)(.*)(</table>)", r"\1<thead>\2</thead><tbody>\3</tbody>\4", now, flags=re.S
        )
        return now
    if "border-collapse:collapse;font-size:85%" in shown:
        left, right = "padding:1px 6px;text-align:left", "padding:1px 6px;text-align:right"
        now = shown.replace("border-collapse:collapse;font-size:85%", "font-size:85%")
        now = now.replace('<tr style="border-top:1px solid #888">', "<tr>")
        code = rf'<td style="{left};font-family:monospace;white-space:pre">(.*?)</td>'
        now = re.sub(code, r'<td align="left" nowrap style="text-align:left"><code>\1</code></td>', now)
        now = now.replace(f'<th style="{left}"', '<th align="left" nowrap style="text-align:left"')
        now = re.sub(rf'<(t[dh]) style="{right}"', r'<\1 align="right" style="text-align:right"', now)
        return re.sub(r'<pre style="font-family[^"]*">(.*?)</pre>', r"<pre><code>\1</code></pre>", now, flags=re.S)
    return shown


# Google Colab

BADGE, FETCH = "colab-badge", "colab-fetch"  # the cells' ids
SITE = "https://github.com/{}"
COLAB = """\
# Only in Google Colab: fetches the course and what it needs. Anywhere else it does nothing.
import os
import sys

if "google.colab" in sys.modules:
    if not os.path.isdir("/content/course"):
        os.system("git clone -q --depth 1 {address} /content/course && python /content/course/lab/colab.py")
    os.chdir("/content/course/{folder}")"""


def with_badge(nb, path, repository):
    """The notebook at `path`, a new object, with a badge that opens it in Colab and a cell that sets up there, hidden
    in JupyterLab; without both where there is no repository. The cells' numbers stay in order."""
    nb, path = copy.deepcopy(nb), Path(path)
    there = any(cell.id == FETCH for cell in nb.cells)
    nb.cells = [cell for cell in nb.cells if cell.id not in (BADGE, FETCH)]
    run = any(cell.get("execution_count") for cell in nb.cells)
    if repository:
        at = f"https://colab.research.google.com/github/{repository}/blob/main/{path.parent.name}/{path.name}"
        badge = f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({at})"
        fetch = COLAB.format(address=SITE.format(repository), folder=path.parent.name)
        looks = {"tags": ["colab"], "jupyter": {"source_hidden": True}}
        count = 1 if run else None
        nb.cells[1:1] = [
            nbformat.from_dict(
                {"id": BADGE, "cell_type": "markdown", "metadata": {"tags": ["colab"]}, "source": badge}
            ),
            nbformat.from_dict(
                {"id": FETCH, "cell_type": "code", "metadata": looks, "source": fetch, "execution_count": count}
                | {"outputs": []}
            ),
        ]
    for cell in nb.cells:
        if cell.get("execution_count") and cell.id != FETCH:
            cell.execution_count += bool(repository) - there
    return nb


# Solutions and exercises


def strip(nb, name="notebook"):
    """The exercise of a solution: the marked regions replaced by stubs, no outputs."""
    cells = []
    for number, cell in enumerate(nb.cells, 1):
        where = at(name, number, cell)
        if "solution-only" in cell.get("metadata", {}).get("tags", []):
            continue
        cell = nbformat.from_dict(cell)
        if cell.id in (BADGE, FETCH):
            cell.source = cell.source.replace("main/solutions/", "main/exercises/").replace("/solutions", "/exercises")
        if cell.cell_type == "code":
            cell.source = strip_source(cell.source, where)
            cell.outputs, cell.execution_count = [], None
        elif any(MARKER.fullmatch(line) for line in cell.source.splitlines()):
            raise NotebookError(f"{where}: a marker outside a code cell hides nothing; tag the cell solution-only")
        cells.append(cell)
    return canonical(nbformat.from_dict(dict(nb, cells=cells)), name)


def strip_source(source, where="cell"):
    kept, begin, stub = [], None, []  # begin: the marker of the region that we are in
    for line in source.split("\n"):
        marker = MARKER.fullmatch(line.rstrip())
        if not marker:
            if NEARLY.search(line):
                raise NotebookError(f"{where}: expected a marker alone on its line, found {line.strip()!r:.80}")
            if begin is None:
                kept.append(line)
            continue
        word, in_c = marker["word"], bool(marker["c"])
        if (begin is None) != (word == "BEGIN SOLUTION"):
            problem = "inside another region" if begin else "outside a region"
            raise NotebookError(f"{where}: {word} {problem}: {line.strip()!r:.80}")
        if begin and in_c != bool(begin["c"]):
            raise NotebookError(f"{where}: expected // at all markers of a region or none: {line.strip()!r:.80}")
        if word == "BEGIN SOLUTION":
            begin, stub = marker, []
        elif word == "STUB":
            stub.append((marker["indent"] + (marker["text"] or "")).rstrip())
        else:
            indent, comment, default = begin["indent"], "#", 'raise NotImplementedError("not done yet")'
            if in_c:
                comment, default = "//", '#error "not done yet"'
            if begin["text"]:
                kept.append(f"{indent}{comment} your code here: {begin['text'].strip()}")
            kept.extend(stub or [indent + default])
            begin = None
    if begin:
        raise NotebookError(f"{where}: BEGIN SOLUTION without END SOLUTION")
    return "\n".join(kept)


def sources(nb):
    """What a notebook says, without what it printed."""
    return [(cell.id, cell.cell_type, cell.metadata, cell.source, cell.get("attachments")) for cell in nb.cells]


def write_exercise(solution):
    """Write the exercise of a solution; True if it changed. Where nothing changed, it keeps its outputs."""
    path = ROOT / "exercises" / Path(solution).name
    stripped = strip(read(solution), label(solution))
    try:
        if sources(canonical(read(path), label(path))) == sources(stripped):
            return False
    except NotebookError:  # not there, or damaged
        pass
    path.parent.mkdir(exist_ok=True)
    write(stripped, path)
    return True


# Checking


def problems(path):
    """What is wrong with a committed notebook, as sentences; [] if nothing is."""
    path, found = Path(path), []
    name = label(path)
    try:
        nb = read(path)
        stable = canonical(nb, name)
    except NotebookError as e:
        return [str(e)]
    if path.read_text(encoding="utf-8") != text_of(stable):
        found.append(f"{name}: is not in canonical form; `make notebooks ARGS={path.stem}` runs and rewrites it")
    counts = [c.execution_count for c in stable.cells if c.cell_type == "code" and c.source.strip()]
    if counts != list(range(1, len(counts) + 1)):
        found.append(f"{name}: was not run from top to bottom, its cells are numbered {counts}")
    other = {"solutions": "exercises", "exercises": "solutions"}.get(path.parent.name)
    if other and not (path.parent.parent / other / path.name).exists():
        found.append(f"{name}: there is no {other}/{path.name}")
    elif path.parent.name == "exercises":
        try:
            master = path.parent.parent / "solutions" / path.name
            if sources(strip(read(master), label(master))) != sources(stable):
                found.append(
                    f"{name}: differs from what solutions/{path.name} gives (a learner's answers do "
                    "that, and are welcome; an author runs `make notebooks`)"
                )
        except NotebookError as e:
            found.append(str(e))
    return found


def find(names=(), folders=FOLDERS):
    """The notebooks, in order: all of them, or those named ("01_roofline", "solutions/01_roofline")."""
    every = [path for folder in folders for path in sorted((ROOT / folder).glob("*.ipynb"))]
    if not names:
        return every
    chosen = []
    for name in names:
        plain = name.removesuffix(".ipynb")
        fits = [p for p in every if plain in (p.stem, f"{p.parent.name}/{p.stem}")]
        if not fits:
            there = ", ".join(sorted({p.stem for p in every})) or "none"
            raise NotebookError(
                f"expected the name of a notebook in {', '.join(folders)}, found {name!r}; there: {there}"
            )
        chosen += [p for p in fits if p not in chosen]
    return chosen


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m lab.notebooks", description="Keep the notebooks in order.")
    parser.add_argument("command", choices=("execute", "strip", "check", "dress", "badge"))
    parser.add_argument("names", nargs="*", help="for example 01_roofline or solutions/01_roofline; all if none")
    args = parser.parse_args(argv)
    failed, repository = False, None
    if args.command == "badge":
        repository, *args.names = args.names or [""]
        if not re.fullmatch(r"[\w.-]+/[\w.-]+|none", repository):
            parser.error(f"badge: expected OWNER/NAME of a repository on GitHub, or none, and found {repository!r}")
    try:
        for path in find(args.names, ("solutions",) if args.command == "strip" else FOLDERS):
            try:
                if args.command == "execute":
                    print(f"{label(path)}: ", end="", flush=True)
                    print(f"{execute(path):.1f} s", flush=True)
                elif args.command == "strip":
                    print(f"exercises/{path.name}: {'written' if write_exercise(path) else 'is up to date'}")
                elif args.command in ("dress", "badge"):
                    nb = canonical(read(path), label(path))
                    new = dressed(nb) if repository is None else with_badge(nb, path, repository.replace("none", ""))
                    if text_of(new) != path.read_text(encoding="utf-8"):
                        write(new, path)
                        print(f"{label(path)}: written")
                else:
                    for problem in problems(path):
                        failed = True
                        print(problem)
            except NotebookError as e:
                failed = True
                print(e)
    except NotebookError as e:
        failed = True
        print(e)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
