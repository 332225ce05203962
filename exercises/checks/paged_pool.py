"""The check of chapter 10's exercise 2: an allocator of pages that requests share."""

import copy

import numpy as np

from exercises.checks import counted, shown, time_limit
from lab.exercise import Exercise, Wrong

SIZES = [(8, 4), (6, 1), (12, 3), (40, 16)]  # pages, tokens of a page


def exercise_2(Pages, Full):
    """The learner's class, and the exception that it raises."""
    exercise = Exercise("Exercise 2: an allocator")
    with exercise, time_limit(30):
        if not isinstance(Pages, type) or not (isinstance(Full, type) and issubclass(Full, Exception)):
            raise Wrong(f"expected the classes Pages and Full, got {shown(Pages)} and {shown(Full)}")
        _by_hand(Pages, Full)
        for n_pages, page_size in SIZES:
            for _ in range(6):
                _random(Pages, Full, n_pages, page_size)
    return exercise.report(f"right in {counted(len(SIZES) * 6 + 1, 'pool')}, full ones and shared pages among them")


def _by_hand(Pages, Full):
    """The statement's example."""
    pool = _Watched(Pages, Full, 4, 4)
    pool.new("a"), pool.append("a", 4), pool.fork("a", "b")
    pool.append("a", 1), pool.append("b", 1)
    pool.fork("b", "c")
    pool.append("c", 1)
    pool.append("b", 3)
    pool.append("b", 1)
    pool.free("a"), pool.append("b", 1), pool.free("c"), pool.free("b")
    pool = _Watched(Pages, Full, 3, 4)
    pool.new("a"), pool.append("a", 6), pool.fork("a", "b")
    pool.append("b", 4), pool.append("b", 16)  # a copy and another page, and one is free; a copy and four more
    pool.free("a"), pool.append("b", 4)


def _random(Pages, Full, n_pages, page_size):
    rng = np.random.default_rng()
    pool, made = _Watched(Pages, Full, n_pages, page_size), 0
    for _ in range(60):
        alive, step = list(pool.said), rng.random()
        if not alive or step < 0.1:
            pool.new(f"r{made}")
            made += 1
        elif step < 0.25:
            pool.fork(alive[rng.integers(len(alive))], f"r{made}")
            made += 1
        elif step < 0.4:
            pool.free(alive[rng.integers(len(alive))])
        else:
            most = page_size if rng.random() < 0.9 else (n_pages + 1) * page_size
            pool.append(alive[rng.integers(len(alive))], int(rng.integers(1, most + 1)))


class _Watched:
    """A learner's pool, beside what it must be: the tokens that each request was given, and a memory of pages."""

    def __init__(self, Pages, Full, n_pages, page_size):
        self.pool, self.Full, self.n_pages, self.size = Pages(n_pages, page_size), Full, n_pages, page_size
        self.memory, self.said, self.count, self.past = [[None] * page_size for _ in range(n_pages)], {}, 0, []
        for name in ("free_pages", "tables", "lens", "shared"):
            if not hasattr(self.pool, name):
                raise Wrong(f"Pages has no {name}. Keep __init__ as in the stub")

    def new(self, request):
        self._step(f"new({request!r})", self.pool.new, request)
        self.said[request] = []
        self._look()

    def fork(self, request, other):
        free = len(self.pool.free_pages)
        self._step(f"fork({request!r}, {other!r})", self.pool.fork, request, other)
        if len(self.pool.free_pages) < free:
            raise Wrong(f"{self.at}: a fork took {counted(free - len(self.pool.free_pages), 'page')}; it shares them")
        self.said[other] = list(self.said[request])
        self._look()

    def free(self, request):
        self._step(f"free({request!r})", self.pool.free, request)
        del self.said[request]
        self._look()

    def append(self, request, new):
        """With what the pool must do: how many pages, and which copy."""
        pool, tokens = self.pool, len(self.said[request])
        table = list(pool.tables[request])
        copies = tokens % self.size > 0 and sum(table[-1] in other for other in pool.tables.values()) > 1
        needed = -(-(tokens + new) // self.size) - len(table) + copies
        before, free = copy.deepcopy(vars(pool)), len(pool.free_pages)
        call = f"append({request!r}, {new})"
        if needed > free:
            return self._refused(call, request, new, before, needed - free)
        try:
            got = self._step(call, pool.append, request, new)
        except self.Full:
            raise Wrong(f"{self.at} says Full; {counted(needed, 'page')} of {free} free ones would do") from None
        self._copied(got, copies, table, before)
        self.said[request] += range(self.count, self.count + new)
        took = free - len(pool.free_pages)
        if took != needed:
            raise Wrong(f"{self.at}: {counted(took, 'page')} were taken of the free ones, expected {needed}")
        now = pool.tables[request]
        for t in range(tokens, tokens + new):
            if t // self.size >= len(now):
                raise Wrong(f"{self.at}: {request!r} has {counted(tokens + new, 'token')} and the table {shown(now)}")
            self.memory[now[t // self.size]][t % self.size] = self.count + t - tokens
        self.count += new
        self._look()

    def _copied(self, got, copies, table, before):
        if not copies:
            if got is not None:
                why = (
                    "its last page is full"
                    if table and self.full_last(before, table)
                    else "nobody shares its last page"
                )
                raise Wrong(f"{self.at} gave {shown(got)}, expected None: {why}")
            return
        pair = isinstance(got, (tuple, list)) and len(got) == 2 and got[0] == table[-1]
        if not pair or got[1] not in before["free_pages"]:
            raise Wrong(
                f"{self.at} gave {shown(got)}, expected ({table[-1]}, the copy's page): others have page {table[-1]}, "
                "which is partly filled, too"
            )
        self.memory[got[1]] = list(self.memory[got[0]])

    def full_last(self, before, table):
        return next(before["lens"][r] for r, pages in before["tables"].items() if pages == table) % self.size == 0

    def _refused(self, call, request, new, before, lacking):
        try:
            self._step(call, self.pool.append, request, new)
        except self.Full as error:
            if vars(self.pool) != before:
                name = next(n for n in before if vars(self.pool).get(n) != before[n])
                raise Wrong(f"{self.at} says Full, and {name} has changed: nothing may have") from None
            if getattr(error, "lacking", None) != lacking:
                raise Wrong(
                    f"{self.at} says Full with lacking = {getattr(error, 'lacking', None)}, expected {lacking}"
                ) from None
        else:
            raise Wrong(f"{self.at} went through, with {counted(lacking, 'page')} too few; expected Full")

    def _step(self, call, method, *args):
        self.past.append(call)
        try:
            return method(*args)
        except (IndexError, KeyError) as error:
            raise Wrong(f"{self.at} stopped with {type(error).__name__}: {error}") from None

    @property
    def at(self):
        last = self.past[-5:]
        before = ["…"] * (len(self.past) > len(last)) + last[:-1]
        return f"{self.n_pages} pages of {self.size}: after {', '.join(before) or 'nothing'}, {last[-1]}"

    def _look(self):
        """Lists, counts, lengths and what everybody would read."""
        pool = self.pool
        if set(pool.tables) != set(self.said) or set(pool.lens) != set(self.said):
            raise Wrong(f"{self.at}: tables or lens hold {shown(list(pool.tables))}, expected {shown(list(self.said))}")
        holders = [sum(page in table for table in pool.tables.values()) for page in range(self.n_pages)]
        for page, count in enumerate(holders):
            times = list(pool.free_pages).count(page)
            if times != (count == 0):
                raise Wrong(
                    f"{self.at}: {counted(count, 'request')} ha{'s' if count == 1 else 've'} page {page}, "
                    f"and free_pages has it {counted(times, 'time')}"
                )
            if pool.shared[page] != count:
                raise Wrong(f"{self.at}: shared[{page}] is {pool.shared[page]}, expected {count}")
        for request, tokens in self.said.items():
            table = pool.tables[request]
            if pool.lens[request] != len(tokens) or len(table) != -(-len(tokens) // self.size):
                raise Wrong(
                    f"{self.at}: {request!r} has {counted(len(tokens), 'token')}; lens says {pool.lens[request]}, and "
                    f"the table has {counted(len(table), 'page')}"
                )
            for t, token in enumerate(tokens):
                if self.memory[table[t // self.size]][t % self.size] != token:
                    raise Wrong(
                        f"{self.at}: token {t} of {request!r} was overwritten, in page {table[t // self.size]}, "
                        "by another request"
                    )
