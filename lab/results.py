"""Measured figures, stored beside the code they were measured on.

`make bench` writes kernels/<topic>/measured/<card>.json. A notebook on another machine renders from that file and
says so. Each figure names its sources, and the file holds a hash of each: when the code changes, a test fails until
the figure is measured again (`make bench`) or marked stale (`python -m lab.results stale`). Times as called rest on
more than that, and are accounted for one ladder at a time: lab/stored_called.py.
The hash sees code only: comments, docstrings and blank lines may change freely. A source may have another path, too:
`python -m lab.results moved OLD NEW` writes it into the files. And where other code is compiled to the same machine
code, `python -m lab.results same SOURCE WHY` keeps the figures, and WHY beside them.

    stored = results.stored_on("gemv")                                      the newest run on an H200, or None
    results.measured(stored, "GEMV fp16, 4096 × 4096", "one warp a row")    rows of one of its ladders; and `table`
"""

import datetime
import hashlib
import json
import math
import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

from lab import machine, stored_called
from lab.code_hash import code_hash
from lab.compiler import BASE_FLAGS
from lab.figure import Figure
from lab.ladder import Ladder
from lab.roof import Roof
from lab.source import with_includes
from lab.table import Table
from lab.timing import Timing

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 1
# These stand among the sources: a flag decides speed as a source does.
C_FLAGS = "C compiler flags"
CUDA_FLAGS = "CUDA compiler flags"
NOTHING = "no stored run of these kernels yet (`make bench` with an NVIDIA GPU makes one)"


class ResultsError(RuntimeError):
    """A results file that cannot be read; the message names it and says what to do."""


def save(folder, ladders, roof, versions, sources=(), *, tables=(), name="", keep=False):
    """Write what was measured on this machine to folder/measured/<card>.json, whole or not at all.

    ladders   Ladder objects whose figures name their sources (paths from the course's folder); what these include is
              added
    versions  {"numpy": "2.4.6", ...}: whatever the figures depend on
    sources   further sources that they rest on, as the roof does
    tables    Table objects that name theirs
    name      of a further file of this card, <card>_<name>.json
    keep      whether what the file has of other ladders and tables stays, with the date on which it was measured. What
              rests on code that is no longer what was measured is marked stale, and named
    Returns the path.
    """

    def whole(item):
        return replace(item, sources=with_includes(*item.sources, root=ROOT))

    ladders = [replace(x, figures=[whole(f) for f in x.figures]) for x in ladders]
    tables = [whole(x) for x in tables]
    groups = [
        with_includes(*sources, root=ROOT),
        *(f.sources for x in ladders for f in x.figures),
        *(x.sources for x in tables),
    ]
    sources = {source for group in groups for source in (*group, *_flags(group))}
    if gone := [s for s in sources if _hash_now(s) is None]:
        raise FileNotFoundError(f"there is no source {gone[0]} in the course's folder")
    today = datetime.date.today().isoformat()
    record = {
        "schema": SCHEMA,
        "card": roof.card,
        "date": today,
        "versions": versions,
        "roof": asdict(roof) | {"by_threads": {str(k): v for k, v in roof.by_threads.items()}},
        "sources": {s: _hash_now(s) for s in sorted(sources)},
        "stale": [],
        "ladders": [_item(x, roof.card, today, versions) for x in ladders],
    }
    if tables:
        record["tables"] = [{"title": x.title, "rows": x.rows, "sources": x.sources} for x in tables]
    path = folder / "measured" / file_of(roof.card, name)
    if keep and path.is_file():
        _keep(record, Stored(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, record)
    return path


def save_called(folder, ladders, card, versions):
    """Put times as called that were measured just now into what is stored of this card; all else stays as it is.

    ladders   Ladder objects with the titles of stored ones and with all of their rows that have such times. One that
              is not stored, or lacks such a row, is named and left as it is
    versions  as for `save`
    Returns the path, None if nothing was put.
    """
    path = folder / "measured" / file_of(card)
    record, new, put = Stored(path).record, {ladder.title: ladder for ladder in ladders}, []
    today, items = datetime.date.today().isoformat(), []
    for item in record["ladders"]:
        if (ladder := new.pop(item["title"], None)) is not None:
            try:
                account = stored_called.account(ladder.called_on, card, today, versions, _hash_now)
                item = stored_called.put(item, ladder, account)
                put.append(ladder.title)
            except KeyError as row:
                print(f"notice: {item['title']} keeps its times as called: {row} was not measured")
        items.append(item)
    for title in new:
        print(f"notice: {title} is not stored, so there is nothing to put its times as called beside")
    if not put:
        return None
    _write(path, record | {"ladders": items})
    return path


def _item(ladder, card, today, versions):
    """A ladder's item in a record."""
    item = {"title": ladder.title, "bound": ladder.bound, "device": ladder.device}
    item |= {"note": ladder.note} if ladder.note else {}
    item["figures"] = [asdict(f) for f in ladder.figures]
    if ladder.called_on:
        item[stored_called.KEY] = stored_called.account(ladder.called_on, card, today, versions, _hash_now)
    return item


def _keep(record, before):
    """Add to a record what was stored before, and is not measured now."""
    gone = {source for source, then in before.sources.items() if _hash_now(source) != then}
    for kind in ("ladders", "tables"):
        new, kept = {item["title"]: item for item in record.get(kind, ())}, []
        for item in before.record.get(kind, ()):
            if item["title"] in new:
                kept.append(new.pop(item["title"]))  # in the place that it had
                continue
            rests_on = {s for part in item.get("figures", [item]) for s in part["sources"]}
            rests_on |= _flags(rests_on)
            if changed := sorted(rests_on & gone):
                print(f"notice: {item['title']} is kept as stale: {', '.join(changed)} changed since it was measured")
            kept.append({"date": before.date} | _as_stale(item, gone))
            hashes = {s: _hash_now(s) if s in gone else before.sources.get(s) for s in rests_on}
            record["sources"] |= {s: found for s, found in hashes.items() if found is not None}
            same = [one for one in before.record.get("same", ()) if one["source"] in rests_on]
            record["same"] = record.get("same", []) + [one for one in same if one not in record.get("same", ())]
        if found := [*kept, *new.values()]:
            record[kind] = found


def _as_stale(item, gone):
    """A ladder's or table's item, with a mark at what rests on one of these sources, whose hashes are others' now."""

    def mark(part):
        return part | {"stale": True} if gone & {*part["sources"], *_flags(part["sources"])} else part

    return item | {"figures": [mark(raw) for raw in item["figures"]]} if "figures" in item else mark(item)


def file_of(card, name=""):
    """The name of a card's file."""
    return f"{_stem(card, name)}.json"


def _stem(card, name=""):
    """The name of a card's file, without its ending."""
    return re.sub(r"[^a-z0-9]+", "_", f"{card} {name}".lower()).strip("_")


def _write(path, record):
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(part, path)  # in one step: a reader sees the old file or the new one, never half of one
    finally:
        part.unlink(missing_ok=True)


class Stored:
    """One results file: `card`, `date`, `roof`, `versions`, and its ladders and tables by title."""

    def __init__(self, path):
        self.path = path
        name = _shown(path)
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error  # without the path of this machine
            raise ResultsError(f"{name} cannot be read ({why}); measure again with `make bench`") from None
        found = record.get("schema") if isinstance(record, dict) else None
        if found != SCHEMA:
            raise ResultsError(
                f"{name} has format {found!r}, this course reads format {SCHEMA}; measure again with `make bench`"
            )
        try:
            self.card, self.date, self.versions = record["card"], record["date"], dict(record["versions"])
            self.sources, self.stale = dict(record["sources"]), list(record["stale"])
            by_threads = {int(k): tuple(v) for k, v in record["roof"]["by_threads"].items()}
            self.roof = Roof(**(record["roof"] | {"by_threads": by_threads}))
            _expect_text(self.card, self.date, self.roof.card)
            _expect_positive(self.roof.read, self.roof.copy, self.roof.flops)
            _expect_positive(*(rate for rates in by_threads.values() for rate in rates))
            self.source = f"stored run: {self.card}, {self.date}"
            self.ladders = [self._ladder(item) for item in record["ladders"]]
            self.tables = [self._table(item) for item in record.get("tables", [])]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ResultsError(f"{name} is damaged ({error!r}); measure again with `make bench`") from None
        self.record = record

    def _ladder(self, item):
        figures = []
        _expect_text(item["title"], item.get("date", ""), item.get("note", ""))
        for raw in item["figures"]:
            timings = {"timing": Timing(**raw["timing"])} | stored_called.timings(raw)
            timings |= {"sustained": Timing(**raw["sustained"]) if raw.get("sustained") else None}
            figure = Figure(**(raw | timings | {"sources": tuple(raw["sources"])}))
            _expect_text(figure.name, figure.checked, *figure.sources)
            times = [t for timing in timings.values() if timing for t in asdict(timing).values()]
            _expect_positive(figure.bytes, figure.flops, figure.share, *times)
            rests_on = {*figure.sources, *_flags(figure.sources)}
            figures.append(replace(figure, stale=figure.stale or bool(rests_on & set(self.stale))))
        if not figures:
            raise ValueError("a ladder without figures")
        about = {"device": item.get("device", "cpu"), "called_on": stored_called.read(item)}
        about |= {"note": item.get("note", "")}
        return Ladder(item["title"], item["bound"], figures, self._source(item), **about)

    def _table(self, item):
        sources, rows = tuple(item["sources"]), item["rows"]
        _expect_text(item["title"], *sources)
        for value in (value for row in rows.values() for value in row.values()):
            if not isinstance(value, str):
                _expect_number(value)
        _expect_text(item.get("date", ""))
        stale = item.get("stale", False) or bool({*sources, *_flags(sources)} & set(self.stale))
        return Table(item["title"], rows, sources, self._source(item), stale)

    def _source(self, item):
        """Where and when a ladder or a table was measured: some are kept when others are measured again, and times as
        called may be measured anew alone."""
        source = f"stored run: {self.card}, {item['date']}" if "date" in item else self.source
        called = item.get(stored_called.KEY)
        later = called and called["date"] != item.get("date", self.date)
        return f"{source}; as called: {called['date']}" if later else source

    def table(self, title):
        """The table of this title, or None."""
        return next((table for table in self.tables if table.title == title), None)

    def ladder(self, title):
        """The ladder whose title starts with `title`."""
        for ladder in self.ladders:
            if ladder.title.startswith(title):
                return ladder
        raise KeyError(f"{_shown(self.path)}: no ladder {title!r}; there are {[x.title for x in self.ladders]}")

    def changed(self):
        """Sources whose code is no longer the code that was measured, and that nobody has marked stale."""
        found = [s for s, then in self.sources.items() if s not in self.stale and _hash_now(s) != then]
        return list(dict.fromkeys([*found, *stored_called.changed(self.record, _hash_now)]))

    def current(self, called=False):
        """Titles of the ladders that rest on the code as it is, unmarked: their figures, or their times as called."""
        if called:
            return stored_called.current(self.record, _hash_now)
        old = {s for s, then in self.sources.items() if s in self.stale or _hash_now(s) != then}

        def is_old(figure):
            return figure.stale or old & {*figure.sources, *_flags(figure.sources)}

        return {ladder.title for ladder in self.ladders if not any(map(is_old, ladder.figures))}

    def mark_stale(self):
        """Mark every changed source, so that tables and plots show its figures as stale. Returns them."""
        changed = self.changed()
        if changed:
            stale = {s for s in changed if s in self.sources and _hash_now(s) != self.sources[s]}
            record = stored_called.marked(self.record, _hash_now)
            _write(self.path, record | {"stale": sorted({*self.stale, *stale})})
        return changed

    def move(self, old, new):
        """Name a source `new` that was `old` when it was measured, its code the same. Whether anything was to do.

        ResultsError where the code differs, now or when `new` was measured: then the figures must be measured again.
        """
        then = self._hashes(old)
        if not then:
            return False
        if len({_hash_now(new), *then, *self._hashes(new)}) > 1:
            raise ResultsError(f"{new} is not the code that {_shown(self.path)} was measured with as {old}")
        text = json.dumps(self.record, indent=1).replace(json.dumps(old), json.dumps(new))
        _write(self.path, json.loads(text))
        return True

    def _hashes(self, source):
        """All that a source had when figures were measured that rest on it."""
        then = {self.sources[source]} if source in self.sources else set()
        return then | stored_called.hashes(self.record, source)

    def same(self, source, why):
        """Keep the figures that rest on a source whose code has changed, but not what the machine runs.

        Both hashes, the day and `why` stay in the file; what the source includes now counts for its figures, too.
        Whether anything was to do.
        """
        now = _hash_now(source)
        if source not in self.changed() or now is None:
            return False
        record = json.loads(json.dumps(self.record))
        for part in [f for x in record["ladders"] for f in x["figures"]] + record.get("tables", []):
            if source in part["sources"]:
                part["sources"] = list(with_includes(*part["sources"], root=ROOT))
                record["sources"] = {s: _hash_now(s) for s in part["sources"]} | record["sources"]
        before = next(iter(self._hashes(source) - {now}))
        found = {"source": source, "measured": self.sources.get(source, before), "now": now, "why": why}
        record["same"] = [*record.get("same", ()), found | {"date": datetime.date.today().isoformat()}]
        if source in self.sources:
            record["sources"][source] = now
        record["sources"] = dict(sorted(record["sources"].items()))
        _write(self.path, stored_called.with_hash(record, source, now))
        return True


def _expect_text(*values):
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"{value!r} where a text belongs")


def _expect_number(value):
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} where a number belongs")


def _expect_positive(*values):
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"{value!r} where a positive number belongs")


def _flags(sources):
    """Which compilers' flags decide the speed of code with these sources: C headers are CUDA's where a .cu includes
    them."""
    if any(s.endswith((".cu", ".cuh")) for s in sources):
        return {CUDA_FLAGS}
    return {C_FLAGS} if any(s.endswith((".c", ".h")) for s in sources) else set()


def _hash_now(source):
    """The hash of a source as it is now, or None if it is gone."""
    if source == CUDA_FLAGS:
        from simt import nvrtc

        return hashlib.sha256(repr(nvrtc.FLAGS).encode()).hexdigest()
    if source == C_FLAGS:
        return hashlib.sha256(repr((BASE_FLAGS, machine.ISA_FLAGS)).encode()).hexdigest()
    path = ROOT / source
    return code_hash(path) if path.is_file() else None


def _shown(path):
    return path.relative_to(ROOT).as_posix() if ROOT in path.parents else path.name


def paths():
    """Every results file of the course."""
    places = "kernels/*/measured/*.json", "lab/measured/*.json", "models/*/measured/*.json"
    return sorted(path for place in places for path in ROOT.glob(place))


def stored(topic, name=""):
    """The readable stored results of a topic ("cpu_gemv"), newest first; a damaged file is named and passed over.

    name: the cards' further files of this name
    """
    places = ROOT / "kernels" / topic, ROOT / "models" / topic
    folder = ROOT / "lab" if topic == "roof" else next((place for place in places if place.is_dir()), places[0])
    found = []
    for path in sorted(folder.glob("measured/*.json")):
        try:
            item = Stored(path)
        except ResultsError as error:
            print(f"notice: {error}")
            continue
        if path.stem == _stem(item.card, name):
            found.append(item)
    return sorted(found, key=lambda s: s.date, reverse=True)


# What a notebook shows of a stored run: a run is what `stored_on` gives, and may be None.


def stored_on(topic, name="", card="NVIDIA H200"):
    """The newest stored results of a topic on this card, or None. name: as for `stored`"""
    return next((run for run in stored(topic, name) if run.card == card), None)


def ladder(run, title):
    """The ladder of a stored run with this title, or None."""
    return next((one for one in run.ladders if one.title == title), None) if run else None


def measured(run, title, *names, first=""):
    """Rows of a stored ladder, as a ladder: those with these names, or with names that begin so; without names, all.

    first: the row that the speed-up is over, if not the first of those shown.
    None, after a sentence, if nothing is stored.
    """
    whole = ladder(run, title)
    figures = whole.figures if whole else []
    exact = {f.name for f in figures}.intersection(names)  # "decode" is not "decode, PDL" as well
    begins = tuple(name for name in names if name not in exact)
    rows = [f for f in figures if not names or f.name in exact or f.name.startswith(begins)]
    if not rows:
        print(NOTHING)
        return None
    return replace(whole, figures=rows, first=whole[first] if first else None)


def table(run, title):
    """The table of a stored run with this title, or None, after a sentence."""
    found = run.table(title) if run else None
    if found is None:
        print(NOTHING)
    return found


USAGE = """usage: python -m lab.results                 which figures are out of date
       python -m lab.results stale           mark them
       python -m lab.results moved OLD NEW   a source has another path, and the code that was measured
       python -m lab.results same SOURCE WHY a source has other code that runs the same: WHY says how one knows"""


def main(arguments):
    """The command `python -m lab.results`: 0, 1 if a file cannot be read or nothing is to do, 2 for other arguments."""
    named = arguments[1:] if arguments[:1] in (["moved"], ["same"]) and len(arguments) == 3 else None
    if arguments not in ([], ["stale"]) and not (named and all(text.strip() for text in named)):
        print(USAGE)
        return 2
    failed, found = False, 0
    for path in paths():
        try:
            item = Stored(path)
            if named:
                found += (item.move if arguments[0] == "moved" else item.same)(*named)
                continue
        except ResultsError as error:
            print(error)
            failed = True
            continue
        changed = item.mark_stale() if arguments else item.changed()
        verb = "marked stale" if arguments else "changed since"
        state = f"{verb}: {', '.join(changed)}" if changed else "up to date"
        print(f"{_shown(path)} ({item.date}): {state}" + (f"; stale: {', '.join(item.stale)}" if item.stale else ""))
    if named:
        first, second = named
        done = f"{second} stands for {first}" if arguments[0] == "moved" else f"{first} keeps its figures"
        print(f"{done} in {found} file{'s' * (found != 1)}")
        failed |= not found
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
