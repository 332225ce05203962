"""Times as called, in the record of a results file: each ladder has its own account of what they rest on.

A time in a graph rests on a kernel's source. As called, the processor counts too, and the Python that a call runs; and
these times may be measured anew without the others. So a ladder's item in the file holds, under "called_on", the card,
the day, the processor, the versions, and a hash of each file at that time.
"""

from dataclasses import asdict, replace

from lab.figure import AsCalled, Figure
from lab.timing import Timing

KEY = "called_on"
COLUMNS = "called", "host"


def account(called_on, card, date, versions, hash_of):
    """The item of an AsCalled that was measured just now. hash_of(path) gives a file's hash, None if it is gone."""
    sources = {path: hash_of(path) for path in called_on.sources}
    if gone := [path for path, then in sources.items() if then is None]:
        raise FileNotFoundError(f"there is no source {gone[0]} in the course's folder")
    return asdict(replace(called_on, sources=sources, card=card, date=date, versions=versions, stale=False))


def read(item):
    """The AsCalled of a ladder's item, None where it has none; ValueError or TypeError where it is damaged."""
    raw = item.get(KEY)
    if raw is None:
        return None
    found = AsCalled(**raw)
    texts = [found.processor, found.card, found.date, *found.sources, *found.sources.values(), *found.versions.values()]
    if not all(isinstance(text, str) for text in texts) or not isinstance(found.stale, bool):
        raise ValueError(f"{raw!r} where an account of times as called belongs")
    return found


def timings(raw):
    """{column: Timing or None} of a figure's item."""
    return {column: Timing(**raw[column]) if raw.get(column) else None for column in COLUMNS}


def put(item, ladder, called_on):
    """A ladder's item with the times as called of another run, which has all of its rows that had such times.

    ladder  with these rows, measured;  called_on  what `account` gave.  KeyError names a row that is missing
    """
    found, figures = {figure.name: figure for figure in ladder.figures}, []
    for raw in item["figures"]:
        figure = found.get(raw["name"])
        if figure is None and raw.get("called"):
            raise KeyError(raw["name"])
        figures.append(raw | {c: _raw(figure, c) for c in COLUMNS} if figure else raw)
    return item | {"figures": figures, KEY: called_on}


def _raw(figure: Figure, column):
    timing = getattr(figure, column)
    return asdict(timing) if timing else None


def changed(record, hash_of):
    """Sources of times as called whose code is no longer what was measured; ladders that are marked do not count."""
    found = {}
    for item in record["ladders"]:
        if item.get(KEY) and not item[KEY]["stale"]:
            found |= {s: None for s, then in item[KEY]["sources"].items() if hash_of(s) != then}
    return list(found)


def current(record, hash_of):
    """Titles of the ladders whose times as called, unmarked, rest on the code as it is."""
    accounts = {item["title"]: item[KEY] for item in record["ladders"] if item.get(KEY)}
    return {
        title
        for title, found in accounts.items()
        if not found["stale"] and all(hash_of(s) == then for s, then in found["sources"].items())
    }


def marked(record, hash_of):
    """The record with a mark at each ladder whose times as called rest on changed code."""
    return record | {"ladders": [_mark(item, hash_of) for item in record["ladders"]]}


def _mark(item, hash_of):
    if not item.get(KEY) or all(hash_of(s) == then for s, then in item[KEY]["sources"].items()):
        return item
    return item | {KEY: item[KEY] | {"stale": True}}


def with_hash(record, source, hash_now):
    """The record with this hash of a source in every account that names it."""
    ladders = []
    for item in record["ladders"]:
        account_ = item.get(KEY)
        if account_ and source in account_["sources"]:
            item = item | {KEY: account_ | {"sources": account_["sources"] | {source: hash_now}}}
        ladders.append(item)
    return record | {"ladders": ladders}


def hashes(record, source):
    """The hashes that accounts have of a source."""
    accounts = [item[KEY]["sources"] for item in record["ladders"] if item.get(KEY)]
    return {sources[source] for sources in accounts if source in sources}
