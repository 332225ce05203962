"""The exercises of chapter 10: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
from exercise_contract import ExerciseContract
from exercise_tools import expect_each_part_counts
from wrong.paged_attention import (
    DUE,
    PAGE_OF,
    RIGHT,
    SERVED,
    SPLIT,
    WIDE,
    WRONG,
    changed,
    table_cost,
)  # fmt: skip

from exercises.checks import paged_attention as checks
from exercises.checks import paged_kernels


class TestExercises(ExerciseContract):
    name, checks, right, wrong = "10_paged_attention", checks, RIGHT, WRONG
    answers = {1: "last_pages", 2: ("Pages", "Full"), 3: "prefix_pays", 4: "merge_rows", 5: "share"}
    answers |= {6: ("table_cost", "split_source"), 7: "served_source"}
    runs_already = {7: ("not yet: ", "wrong at lens = [100, 5, 48, 23]")}
    draws = 2


judge = TestExercises.judge


@pytest.mark.parametrize("part", TestExercises.answers[6])
def test_each_part_of_the_split_counts(part, stubs, solutions, capsys):
    expect_each_part_counts(judge, 6, part, TestExercises.answers[6], stubs, solutions)


def test_each_method_of_the_allocator_counts(stubs, solutions, capsys):
    for method in ("append", "fork", "free"):
        kept = {name: getattr(solutions["Pages"], name) for name in ("append", "fork", "free", "_take")}
        kept[method] = getattr(stubs["Pages"], method)
        assert judge(2, type("Pages", (stubs["Pages"],), kept), solutions["Full"]).message == "not done yet"


def test_the_bugs_author_saw_nothing(stubs):
    """5, 40 and 100 tokens in a small pool are right, as the statement says."""
    kernel = checks_kernel(stubs["served_source"])
    for lens in ([5], [40], [100]):
        pool = np.full((12, 2, 16, 64), np.nan, np.float16)
        paged_kernels._served(kernel, np.random.default_rng(), pool, list(range(12)), lens, "")


def checks_kernel(source):
    return paged_kernels.compiled(source, "served")


def test_each_of_the_two_defects_shows_alone(capsys):
    for mistake in ("offsets in 32 bits", "a full last page has none"):
        assert not judge(7, WRONG[7][mistake][0]).passed


# Right answers that are not the solution's


def by_einsum(q, k, v, lens):
    there = np.arange(k.shape[1])[None] < np.asarray(lens)[:, None]
    k, v = k.copy(), v.copy()
    k[~there] = v[~there] = 0
    s = np.einsum("nd,npd->np", q, k)
    high = np.where(there, s, -1e300).max(1)
    p = np.where(there, np.exp(np.where(there, s - high[:, None], 0)), 0)
    total = p.sum(1)
    mixed = np.einsum("np,npd->nd", p, v) / np.maximum(total, 1e-300)[:, None]
    lse = np.full(len(q), -np.inf)
    lse[total > 0] = high[total > 0] + np.log(total[total > 0])
    return mixed, lse


class Full(Exception):
    lacking = 0


class OtherPages:
    """Counts by looking, a free list from the front, tables as they are needed."""

    def __init__(self, n_pages, page_size):
        self.page_size, self.free_pages, self.shared = page_size, list(range(n_pages)), [0] * n_pages
        self.tables, self.lens = {}, {}

    def new(self, request):
        self.tables[request], self.lens[request] = [], 0

    def append(self, request, new):
        size, table, tokens = self.page_size, list(self.tables[request]), self.lens[request]
        pages, pair = -(-(tokens + new) // size), None
        own = tokens % size == 0 or self.shared[table[-1]] == 1
        many = pages - len(table) + (not own)
        if many > len(self.free_pages):
            full = Full()
            full.lacking = many - len(self.free_pages)
            raise full
        taken, self.free_pages = self.free_pages[:many], self.free_pages[many:]
        if not own:
            pair = [table[-1], taken[0]]
            table[-1] = taken.pop(0)
            self.shared[pair[0]] -= 1
            self.shared[pair[1]] = 1
        for page in taken:
            self.shared[page] = 1
        self.tables[request], self.lens[request] = table + taken, tokens + new
        return pair

    def fork(self, request, other):
        self.tables[other], self.lens[other] = [*self.tables[request]], self.lens[request]
        self.shared = [n + (page in self.tables[other]) for page, n in enumerate(self.shared)]

    def free(self, request):
        pages, _ = self.tables.pop(request), self.lens.pop(request)
        for page in pages:
            self.shared[page] -= 1
        self.free_pages = [*(page for page in pages if self.shared[page] == 0), *self.free_pages]


def by_arrays(prefix, suffix, heads, kv_heads, head_dim, read, flops, merge):
    n = np.arange(1, 4097)
    token, asked = 4 * kv_heads * head_dim, 4.0 * head_dim * heads
    once, products = (prefix + n * suffix) * token / read, n * prefix * asked / flops
    found = []
    for where in (np.maximum(once, products) + merge < n * (prefix + suffix) * token / read, products > once):
        found.append(int(n[where][0]) if where.any() else None)
    return found


def two_by_two(out, lse, begins):
    """By ufuncs on two at a time."""
    rows = [(np.zeros(out.shape[1]), -np.inf) for _ in begins[1:]]
    for row, (first, last) in enumerate(zip(begins, begins[1:])):
        for i in range(first, last):
            if lse[i] > -np.inf:
                before, weight = rows[row]
                both = np.logaddexp(weight, lse[i])
                rows[row] = np.exp(weight - both) * before + np.exp(lse[i] - both) * out[i], both
    return np.array([o for o, _ in rows]), np.array([w for _, w in rows])


def by_bisection(tiles, blocks, block):
    ends = np.cumsum(np.array(tiles, object))
    each, more = divmod(int(ends[-1]), blocks)
    begin, end = (b * each + min(b, more) for b in (block, block + 1))
    found = []
    for row, (many, to) in enumerate(zip(tiles, ends)):
        first, last = max(0, begin - (to - many)), min(many, end - (to - many))
        if first < last:
            found.append([row, int(first), int(last - first), blocks - 1 - block + len(tiles) - 1 - row])
    return found


def in_numbers_of_numpy(tiles, blocks, block):
    return [tuple(np.array(work)) for work in by_bisection(tiles, blocks, block)]


PREFETCHED = changed(  # the window behind this one is asked for in place of a new one
    SPLIT,
    ("    int window = 0;\n", "    int window = 0, base = first / PAGE;\n"),
    (DUE, "if (t == first || t / PAGE >= base + 32)"),
    ("window = table[", "base = t / PAGE, window = table["),
    (PAGE_OF, PAGE_OF.replace("number % 32", "t / PAGE - base")),
)
BY_LENGTH = changed(
    SERVED, ("tokens = min(PAGE, lens[r] - n * PAGE)", "tokens = n < pages - 1 ? PAGE : (lens[r] - 1) % PAGE + 1")
)
BY_SIZE = changed(SERVED, (WIDE, "pool + (size_t)page * (2 * PAGE * 64)"))


@pytest.mark.parametrize(
    "number, answer",
    [
        (1, by_einsum),
        (2, (OtherPages, Full)),
        (3, by_arrays),
        (4, two_by_two),
        (5, by_bisection),
        (5, in_numbers_of_numpy),
        (6, (table_cost, PREFETCHED)),
        (7, BY_LENGTH),
        (7, BY_SIZE),
    ],
)
def test_other_right_answers_pass(number, answer, capsys):
    exercise = judge(number, answer)
    assert exercise.passed, exercise.message
