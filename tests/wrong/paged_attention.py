"""Wrong answers to the exercises of chapter 10. Each says the mistake that it makes.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer, and words that
the check's verdict must hold. RIGHT has the answers that they were made from.
"""

import itertools

import numpy as np

from wrong.warp_gemv import changed

# Exercise 1: a freed page

LAST_PAGES = """
def last_pages(q, k, v, lens):
    there = (np.arange(k.shape[1]) < lens[:, None])[..., None]
    k, v = np.where(there, k, 0), np.where(there, v, 0)
    s = np.where(there, k @ q[..., None], -np.inf)
    m = s.max(axis=1, keepdims=True)
    p = np.exp(s - np.where(m == -np.inf, 0, m))
    total = p.sum(axis=1)
    empty = total == 0
    lse = np.where(empty, -np.inf, m[:, 0] + np.log(np.where(empty, 1, total)))
    return (p * v).sum(axis=1) / np.where(empty, 1, total), lse[:, 0]
"""
CLEAN = "k, v = np.where(there, k, 0), np.where(there, v, 0)"


def made(source, name, *changes, **names):
    """What a source defines under this name, with each (old, new) changed."""
    names = {"np": np, **names}
    exec(compile(changed(source, *changes), f"<wrong {name}>", "exec"), names)
    return names[name]


def _last_pages(*changes):
    return made(LAST_PAGES, "last_pages", *changes)


def _one_by_one(q, k, v, lens):
    found = [_last_pages()(*(a[i : i + 1] for a in (q, k, v, lens))) for i in range(len(q))]
    return tuple(np.concatenate(parts) for parts in zip(*found))


# Exercise 2: an allocator

PAGES = """
class Pages:
    def __init__(self, n_pages, page_size):
        self.page_size = page_size
        self.free_pages = list(range(n_pages))
        self.shared = [0] * n_pages
        self.tables, self.lens = {}, {}

    def new(self, request):
        self.tables[request], self.lens[request] = [], 0

    def append(self, request, new):
        table, tokens = self.tables[request], self.lens[request]
        copies = tokens % self.page_size > 0 and self.shared[table[-1]] > 1
        needed = -(-(tokens + new) // self.page_size) - len(table)
        if needed + copies > len(self.free_pages):
            raise Full(needed + copies - len(self.free_pages))
        pair = None
        if copies:
            old = table.pop()
            self.shared[old] -= 1
            pair = old, self._take(table)
        for _ in range(needed):
            self._take(table)
        self.lens[request] += new
        return pair

    def fork(self, request, other):
        self.tables[other], self.lens[other] = list(self.tables[request]), self.lens[request]
        for page in self.tables[other]:
            self.shared[page] += 1

    def free(self, request):
        for page in self.tables.pop(request):
            self.shared[page] -= 1
            if not self.shared[page]:
                self.free_pages.append(page)
        del self.lens[request]

    def _take(self, table):
        page = self.free_pages.pop()
        self.shared[page] = 1
        table.append(page)
        return page
"""
CHECKED = """        if needed + copies > len(self.free_pages):
            raise Full(needed + copies - len(self.free_pages))
"""
FORK = """list(self.tables[request]), self.lens[request]
        for page in self.tables[other]:
            self.shared[page] += 1"""
FORK_BY_COPYING = """[], self.lens[request]
        for _ in self.tables[request]:
            self._take(self.tables[other])"""
POP = "        page = self.free_pages.pop()\n"


class Full(Exception):
    def __init__(self, lacking):
        super().__init__(lacking)
        self.lacking = lacking


def _pages(*changes):
    return made(PAGES, "Pages", *changes, Full=Full), Full


# Exercise 3: when a prefix pays


def _pays(token=4, overlapped=True, merged=True, flop_heads=0, from_all=True, most=4096, own=True):
    def prefix_pays(prefix, suffix, heads, kv_heads, head_dim, read, flops, merge):
        size = token * kv_heads * head_dim / read
        asking = (heads, kv_heads)[flop_heads]

        def by_bytes(n):
            return (prefix + n * suffix * own) * size

        def by_flops(n):
            return 4 * n * (prefix + (0 if from_all else suffix)) * head_dim * asking / flops

        def together(n):
            parts = by_bytes(n), by_flops(n)
            return (max(parts) if overlapped else sum(parts)) + merge * merged

        counts = range(1, most + 1)
        pays = next((n for n in counts if together(n) < n * (prefix + suffix) * size), None)
        return pays, next((n for n in counts if by_flops(n) > by_bytes(n)), None)

    return prefix_pays


# Exercise 4: merge

MERGE_ROWS = """
def merge_rows(out, lse, begins):
    rows = len(begins) - 1
    merged, total = np.zeros((rows, out.shape[1])), np.full(rows, -np.inf)
    for row in range(rows):
        mine = slice(begins[row], begins[row + 1])
        there = lse[mine] > -np.inf
        if there.any():
            high = lse[mine].max()
            weights = np.exp(lse[mine][there] - high)
            merged[row] = weights @ out[mine][there] / weights.sum()
            total[row] = high + np.log(weights.sum())
    return merged, total
"""


def _merge_rows(*changes):
    return made(MERGE_ROWS, "merge_rows", *changes)


def _all_alike(out, lse, begins):
    """As if each row had as many parts as the first."""
    count = max(begins[1], 1)
    return _merge_rows()(out, lse, np.minimum(np.arange(len(begins)) * count, len(lse)))


# Exercise 5: a block's share

SHARE = """
def share(tiles, blocks, block):
    each, more = divmod(sum(tiles), blocks)
    begin, end = (b * each + min(b, more) for b in (block, block + 1))
    at, found = 0, []
    for row, many in enumerate(tiles):
        first, last = max(begin, at), min(end, at + many)
        if first < last:
            found.append((row, first - at, last - first, block + row))
        at += many
    return found
"""


BOUNDS = "begin, end = (b * each + min(b, more) for b in (block, block + 1))"
LAST_TAKES_THE_REST = "begin = block * each; end = begin + each + more * (block == blocks - 1)"


def _share(*changes):
    return made(SHARE, "share", *changes)


def _tile_by_tile(tiles, blocks, block):
    each, more = divmod(sum(tiles), blocks)
    begin, end = (b * each + min(b, more) for b in (block, block + 1))
    at, found = 0, []
    for row, many in enumerate(tiles):
        mine = []
        for tile in range(many):
            if begin <= at + tile < end:
                mine.append(tile)
        if mine:
            found.append((row, mine[0], len(mine), block + row))
        at += many
    return found


def _other_blocks_first(tiles, blocks, block):
    """The places of all parts before it are counted."""
    parts = itertools.chain(*(_share()(tiles, blocks, b) for b in range(block)))
    before = sum(1 for _ in parts)
    return [(*work[:3], before + n) for n, work in enumerate(_share()(tiles, blocks, block))]


# Exercise 6: split through a table


def table_cost(first, last, page):
    if first == last:
        return 0, 0
    begin, end = first // page, (last - 1) // page + 1
    windows = [(at, min(at + 32, end)) for at in range(begin, end, 32)]
    return len(windows), sum((b - 1) // 8 - a // 8 + 1 for a, b in windows)


def _cost_of_aligned(first, last, page):
    """As if each window began at a sector."""
    if first == last:
        return 0, 0
    pages = (last - 1) // page + 1 - first // page
    return -(-pages // 32), -(-pages // 8)


def _cost_of_tokens(first, last, page):
    pages = -(-(last - first) // page)
    return -(-pages // 32), -(-pages // 8)


def _cost_of_each_page(first, last, page):
    pages = (last - 1) // page + 1 - first // page if last > first else 0
    return pages, pages


SPLIT = r"""
extern "C" __global__ void
split(const float *q, const float *k_pages, const float *v_pages, const int *table, float *out, float *lse,
      int tokens) {
    const int lane = threadIdx.x, head = blockIdx.x, heads = gridDim.x, splits = gridDim.y;
    const int first = (long long)tokens * blockIdx.y / splits, last = (long long)tokens * (blockIdx.y + 1) / splits;
    const float2 *keys = (const float2 *)k_pages, *values = (const float2 *)v_pages;
    const float2 query = ((const float2 *)q)[head * 32 + lane];
    float m = -3e38f, total = 0, sum0 = 0, sum1 = 0;
    int window = 0;
    for (int t = first; t < last; t++) {
        const int number = t / PAGE - first / PAGE;
        if (number % 32 == 0 && (t == first || t % PAGE == 0))
            window = table[min(t / PAGE + lane, (last - 1) / PAGE)];
        const long long page = __shfl_sync(0xffffffff, window, number % 32);
        const long long at = (page * PAGE + t % PAGE) * 32 + lane;
        const float2 key = keys[at], value = values[at];
        float s = query.x * key.x + query.y * key.y;
        for (int far = 16; far > 0; far /= 2) s += __shfl_xor_sync(0xffffffff, s, far);
        const float m_new = fmaxf(m, s), correction = expf(m - m_new), p = expf(s - m_new);
        total = correction * total + p;
        sum0 = correction * sum0 + p * value.x;
        sum1 = correction * sum1 + p * value.y;
        m = m_new;
    }
    const int to = head * splits + blockIdx.y;
    const float share = total == 0 ? 0 : 1 / total;
    ((float2 *)out)[to * 32 + lane] = make_float2(sum0 * share, sum1 * share);
    if (lane == 0) lse[to] = m + logf(total);
}
"""
FAR_APART = """const long long begin = (page * PAGE + t % PAGE) * 64;
        const float2 key = make_float2(k_pages[begin + lane], k_pages[begin + lane + 32]);
        const float2 value = make_float2(v_pages[begin + lane], v_pages[begin + lane + 32]);"""
PAGE_OF = "const long long page = __shfl_sync(0xffffffff, window, number % 32);"
DUE = "if (number % 32 == 0 && (t == first || t % PAGE == 0))"
CLAMPED = "table[min(t / PAGE + lane, (last - 1) / PAGE)]"


def _split(*changes, cost=table_cost):
    return cost, changed(SPLIT, *changes)


# Exercise 7: the mended kernel

SERVED = r"""
#include <cuda_fp16.h>
#define PAGE 16
extern "C" __global__ void served(const float *q, const __half *pool, const int *indptr, const int *indices,
                                  const int *lens, float *out) {
    const int lane = threadIdx.x, r = blockIdx.x;
    const int pages = indptr[r + 1] - indptr[r], of_last = lens[r] & (PAGE - 1);
    const float q0 = q[64 * r + lane], q1 = q[64 * r + lane + 32];
    float m = -3e38f, total = 0, sum0 = 0, sum1 = 0;
    for (int n = 0; n < pages; n++) {
        const int page = indices[indptr[r] + n], tokens = min(PAGE, lens[r] - n * PAGE);
        const __half *keys = pool + (long long)page * 2 * PAGE * 64, *values = keys + PAGE * 64;
        for (int t = 0; t < tokens; t++) {
            float s = q0 * (float)keys[t * 64 + lane] + q1 * (float)keys[t * 64 + lane + 32];
            for (int far = 16; far > 0; far /= 2) s += __shfl_xor_sync(0xffffffff, s, far);
            const float m_new = fmaxf(m, s), correction = exp2f(m - m_new), p = exp2f(s - m_new);
            total = correction * total + p;
            sum0 = correction * sum0 + p * (float)values[t * 64 + lane];
            sum1 = correction * sum1 + p * (float)values[t * 64 + lane + 32];
            m = m_new;
        }
    }
    out[64 * r + lane] = total == 0 ? 0 : sum0 / total;
    out[64 * r + lane + 32] = total == 0 ? 0 : sum1 / total;
}
"""
LOOP = "        for (int t = 0; t < tokens; t++) {\n"
READ_FIRST = """        for (int t = 0; t < tokens; t++)
            m = fmaxf(m, __shfl_sync(0xffffffff, (float)keys[t * 64 + lane] * 0 - 3e38f, 0));
"""
COUNT = "tokens = min(PAGE, lens[r] - n * PAGE)"
MODULO = COUNT, "tokens = n < pages - 1 ? PAGE : of_last"
WIDE = "pool + (long long)page * 2 * PAGE * 64"
NARROW = WIDE, "pool + page * 2 * PAGE * 64"

RIGHT = {
    1: _last_pages(),
    2: _pages(),
    3: _pays(),
    4: _merge_rows(),
    5: _share(),
    6: _split(),
    7: SERVED,
}
WRONG = {
    1: {
        "the score alone is masked": (_last_pages((CLEAN, "k = np.where(there, k, 0)")), "NaN behind them"),
        "keys are not masked": (_last_pages((CLEAN, "v = np.where(there, v, 0)")), "infinity behind them: invalid"),
        "no mask but zeros": (_last_pages((CLEAN, CLEAN), (", -np.inf)\n    m", ", 0)\n    m")), "lens [3], NaN"),
        "NaN becomes 0, wherever it is": (
            _last_pages((CLEAN, "k, v = np.nan_to_num(k, posinf=0), np.nan_to_num(v, posinf=0)")),
            "a NaN in a value that counts: out[0, 2] is",
        ),
        "hides a NaN that counts": (
            _last_pages((CLEAN, CLEAN + "; v = np.nan_to_num(v)")),
            "a NaN in a value that counts: out[0, 2] is",
        ),
        "cleans the pages themselves": (
            _last_pages((CLEAN, "k[~there[..., 0]] = 0; v[~there[..., 0]] = 0")),
            "your function wrote to k",
        ),
        "-inf minus -inf": (_last_pages(("np.where(m == -np.inf, 0, m)", "m")), "lens [0], NaN behind them: invalid"),
        "0 / 0": (_last_pages((" / np.where(empty, 1, total)", " / total")), "lens [0], NaN behind them: invalid"),
        "an empty page has the lse 0": (_last_pages(("empty, -np.inf, m", "empty, 0, m")), "lse[0] is 0"),
        "the maximum is forgotten in the lse": (_last_pages(("m[:, 0] + np.log", "np.log")), "lse[0] is"),
        "one token more": (_last_pages(("< lens[:, None]", "<= lens[:, None]")), "lens [3], NaN"),
        "a loop over requests": (_one_by_one, "loops over requests"),
    },
    2: {
        "no copy on write": (_pages(("        if copies:\n", "        if False:\n")), "expected"),
        "copies what nobody shares": (
            _pages(("self.shared[table[-1]] > 1", "self.shared[table[-1]] > 0")),
            "of 0 free ones would do",
        ),
        "copies a full page": (
            _pages(("tokens % self.page_size > 0 and self", "tokens > 0 and self")),
            "its last page is full",
        ),
        "a fork with the same list": (_pages(("list(self.tables[request])", "self.tables[request]")), "'a'"),
        "a fork that nobody counts": (_pages(("self.shared[page] += 1", "pass")), "is 1, expected 2"),
        "frees what others have": (_pages(("if not self.shared[page]:", "if True:")), "and free_pages has it 1 time"),
        "the old page keeps its count": (_pages(("self.shared[old] -= 1", "pass")), "is 2, expected 1"),
        "the copy is not counted among what lacks": (
            _pages((CHECKED, CHECKED.replace("needed + copies", "needed"))),
            "stopped with IndexError",
        ),
        "takes pages until there are none": (
            _pages((CHECKED, ""), (POP, "        if not self.free_pages:\n            raise Full(1)\n" + POP)),
            "has changed: nothing may have",
        ),
        "says how many are needed": (
            _pages(("raise Full(needed + copies - len(self.free_pages))", "raise Full(needed + copies)")),
            "says Full with lacking =",
        ),
        "one page too many": (
            _pages(("-(-(tokens + new) // self.page_size)", "(tokens + new) // self.page_size + 1")),
            "taken",
        ),
        "forks by copying": (
            _pages(
                (
                    FORK,
                    FORK_BY_COPYING,
                )
            ),
            "a fork took",
        ),
        "the copy is not told": (_pages(("        return pair\n", "        return None\n")), "gave None, expected ("),
    },
    3: {
        "keys without values": (_pays(token=2), "expected"),
        "one after the other": (_pays(overlapped=False), "pays is"),
        "the merge is free": (_pays(merged=False), "pays is"),
        "flops by KV heads": (_pays(flop_heads=1), "limit is"),
        "flops of the suffixes, too": (_pays(from_all=False), "limit is"),
        "suffixes are free": (_pays(own=False), "limit is"),
        "looks no further than 100": (_pays(most=100), "limit is None, expected 114"),
        "always two": (lambda *args: (2, 36), "expected"),
    },
    4: {
        "as many parts for each row": (_all_alike, "with"),
        "empty parts times 0": (
            _merge_rows(("> -np.inf", "< np.inf")),
            "with 3 parts and the lse [-inf, 2.0, -inf]: out[0, 0] is nan",
        ),
        "-inf minus -inf": (
            _merge_rows(("> -np.inf", "< np.inf"), ("out[mine][there]", "np.nan_to_num(out[mine][there])")),
            "invalid value",
        ),
        "no maximum": (_merge_rows(("high = lse[mine].max()", "high = 0")), "overflow"),
        "the maximum of all rows": (_merge_rows(("high = lse[mine].max()", "high = lse.max()")), "invalid value"),
        "the largest lse": (_merge_rows(("high + np.log(weights.sum())", "high")), "lse[0] is 1.09861"),
        "the mean of the parts": (
            _merge_rows(("weights @ out[mine][there] / weights.sum()", "out[mine][there].mean(axis=0)")),
            "out[0, 0] is",
        ),
        "empty rows are left as they are": (
            _merge_rows(("np.zeros((rows, out.shape[1]))", "np.empty((rows, out.shape[1]))")),
            "out[0, 0] is",
        ),
        "drops the last row": (_merge_rows(("range(rows)", "range(max(1, rows - 1))")), "out["),
        "cleans the parts themselves": (
            _merge_rows(("    for row in", "    out[lse == -np.inf] = 0\n    for row in")),
            "your function wrote to out",
        ),
    },
    5: {
        "drops what does not divide": (_share(("min(b, more)", "0")), "the tiles from 4 on are nobody's"),
        "the last block takes the rest": (_share((BOUNDS, LAST_TAKES_THE_REST)), "expected"),
        "rounds up": (_share(("divmod(sum(tiles), blocks)", "-(-sum(tiles) // blocks), 0")), "expected"),
        "the place is the block": (_share(("block + row))", "block))")), "the place"),
        "the place is the row": (_share(("block + row))", "row))")), "the place"),
        "a place for each row of each block": (_share(("block + row))", "block * len(tiles) + row))")), "is not below"),
        "tiles of the line, not of the row": (_share(("first - at,", "first,")), "has no such tiles"),
        "from the row's beginning": (_share(("first - at,", "0,")), "comes again"),
        "empty parts, too": (_share(("if first < last:", "if first <= last:")), "has no such tiles"),
        "a step for each tile": (_tile_by_tile, "a step for each tile"),
        "a step for each block": (_other_blocks_first, "or for each block"),
    },
    6: {
        "as if windows began at sectors": (_split(cost=_cost_of_aligned), "sectors are"),
        "as if splits began at pages": (_split(cost=_cost_of_tokens), "are"),
        "a request for each page": (_split(cost=_cost_of_each_page), "(0, 512, 16): requests are 32, expected 1"),
        "a number for each token": (
            _split((PAGE_OF, "const long long page = *(const volatile int *)(table + t / PAGE);")),
            "load requests; wanted: at most",
        ),
        "a number for each page": (
            _split((DUE, "if (t == first || t % PAGE == 0)"), (CLAMPED, "table[t / PAGE]")),
            "load requests; wanted: at most",
        ),
        "a window for each page": (
            _split((DUE, "if (t == first || t % PAGE == 0)"), (PAGE_OF, PAGE_OF.replace("number % 32", "0"))),
            "load requests; wanted: at most",
        ),
        "reads behind the table": (
            _split((CLAMPED, "table[t / PAGE + lane]")),
            "reads table[1], but table has 1 element",
        ),
        "lanes behind the last page load the table's first": (
            _split((CLAMPED, "table[t / PAGE + lane <= (last - 1) / PAGE ? t / PAGE + lane : 0]")),
            "sectors; wanted: at most",
        ),
        "windows by the request's pages": (
            _split(
                (DUE, "if (t / PAGE % 32 == 0 && t % PAGE == 0)"), (PAGE_OF, PAGE_OF.replace("number", "(t / PAGE)"))
            ),
            "wrong at heads = 2, splits = 5",
        ),
        "no second window": (
            _split((DUE, "if (t == first)")),
            "wrong at heads = 1, splits = 1, tokens = 40, pages of 1",
        ),
        "pages begin where the split does": (
            _split(("number = t / PAGE - first / PAGE", "number = (t - first) / PAGE")),
            "pages of 16",
        ),
        "an empty split has the lse 0": (
            _split(("m + logf(total)", "total == 0 ? 0 : m + logf(total)")),
            "a split without a token is 0.0, expected -inf",
        ),
        "0 / 0": (_split(("total == 0 ? 0 : 1 / total", "1 / total")), "out[0, 0, 0] is nan"),
        "log2": (_split(("logf(total)", "log2f(total)")), "of lse differ"),
        "a lane has channels that are far apart": (
            _split(
                (
                    "const float2 key = keys[at], value = values[at];",
                    FAR_APART,
                ),
                ("((const float2 *)q)[head * 32 + lane]", "make_float2(q[head * 64 + lane], q[head * 64 + lane + 32])"),
                (
                    "((float2 *)out)[to * 32 + lane] = make_float2(sum0 * share, sum1 * share);",
                    "out[to * 64 + lane] = sum0 * share; out[to * 64 + lane + 32] = sum1 * share;",
                ),
            ),
            "load requests; wanted: at most",
        ),
    },
    7: {
        "as it was": (changed(SERVED, MODULO, NARROW), "wrong at lens = [100, 5, 48, 23]"),
        "offsets in 32 bits": (changed(SERVED, NARROW), "a pool of"),
        "the product in 32 bits, then widened": (
            changed(SERVED, (WIDE, "pool + (long long)(page * 2 * PAGE * 64)")),
            "a pool of",
        ),
        "a full last page has none": (changed(SERVED, MODULO), "wrong at lens = [100, 5, 48, 23]"),
        "a last page is always full": (changed(SERVED, (COUNT, "tokens = PAGE")), "lens = [5]"),
        "an empty request takes its neighbour's page": (
            changed(
                SERVED,
                (COUNT, "tokens = n < pages - 1 ? PAGE : (lens[r] + PAGE - 1) % PAGE + 1"),
                ("n < pages;", "n < max(pages, 1);"),
            ),
            "lens = [100, 0, 16, 3]",
        ),
        "0 / 0": (changed(SERVED, ("total == 0 ? 0 : sum0 / total", "sum0 / total")), "lens = [100, 0, 16, 3]"),
        "the values are the keys": (
            changed(SERVED, ("*values = keys + PAGE * 64", "*values = keys")),
            "wrong at lens = [5]",
        ),
        "reads its tokens twice": (
            changed(
                SERVED,
                (
                    LOOP,
                    READ_FIRST + LOOP,
                ),
            ),
            "load requests; wanted: at most",
        ),
    },
}
