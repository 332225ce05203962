"""Wrong answers to the exercises of chapter 02. Each says the mistake that it makes.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer, and words that
the check's verdict must hold.
"""

from itertools import product

WRONG = {1: {}, 2: {}, 3: {}, 4: {}, 5: {}}


def wrong(number, mistake, says):
    """Plant a function as a wrong answer."""

    def plant(answer):
        WRONG[number][mistake] = (answer, says)
        return answer

    return plant


# Exercise 1: share out rows


@wrong(1, "dropped tail: 10 // 4 rows each leave two rows to nobody", "nobody took row")
def _(thread, n_threads, rows):
    each = rows // n_threads
    return thread * each, (thread + 1) * each


@wrong(1, "all left-over rows go to the last thread", "sizes may differ by one at most")
def _(thread, n_threads, rows):
    each = rows // n_threads
    return thread * each, rows if thread == n_threads - 1 else (thread + 1) * each


@wrong(1, "rounds up, so that the last threads get few rows or none", "sizes may differ")
def _(thread, n_threads, rows):
    each = -(-rows // n_threads)
    return min(thread * each, rows), min((thread + 1) * each, rows)


@wrong(1, "rounds up and forgets to stop at the last row", "expected 0 <= begin <= end")
def _(thread, n_threads, rows):
    each = -(-rows // n_threads)
    return thread * each, (thread + 1) * each


@wrong(1, "off by one: takes end to be included", "nobody took row")
def _(thread, n_threads, rows):
    begin, end = thread * rows // n_threads, (thread + 1) * rows // n_threads
    return begin, max(begin, end - 1)


@wrong(1, "divides with /, which gives floats", "whole numbers")
def _(thread, n_threads, rows):
    return thread * rows / n_threads, (thread + 1) * rows / n_threads


@wrong(1, "the first threads take one more, but where they begin does not know of it", "already had a thread")
def _(thread, n_threads, rows):
    each, left = divmod(rows, n_threads)
    return thread * each, (thread + 1) * each + (thread < left)


@wrong(1, "deals the rows out like cards: right sizes, but the ranges lie on top of one another", "had a thread")
def _(thread, n_threads, rows):
    size = len(range(thread, rows, n_threads))
    return (thread, thread + size) if size else (0, 0)


# Exercise 2: a dot product that does not wait


def _dot(body):
    return f"float dot(const float *a, const float *b, int64_t n) {{\n{body}\n}}\n"


def _accumulators(count, sums="float", bound="i + {count} <= n", tail="for (; i < n; i++) total += a[i] * b[i];"):
    return _dot(
        f"    {sums} acc[{count}] = {{0}}, total = 0;\n    int64_t i = 0;\n"
        f"    for (; {bound.format(count=count)}; i += {count})\n"
        f"        for (int k = 0; k < {count}; k++) acc[k] += a[i + k] * b[i + k];\n"
        f"    for (int k = 0; k < {count}; k++) total += acc[k];\n    {tail}\n    return total;"
    )


WRONG[2] = {
    "one accumulator: right, and it waits at every addition": (
        _dot("    float acc = 0;\n    for (int64_t i = 0; i < n; i++) acc += a[i] * b[i];\n    return acc;"),
        "form one chain of 255: each waits for the one before it",
    ),
    "unrolled by four, but into the same accumulator": (
        _dot(
            "    float acc = 0;\n    int64_t i = 0;\n    for (; i + 4 <= n; i += 4) {\n"
            "        acc += a[i] * b[i]; acc += a[i + 1] * b[i + 1];\n"
            "        acc += a[i + 2] * b[i + 2]; acc += a[i + 3] * b[i + 3];\n    }\n"
            "    for (; i < n; i++) acc += a[i] * b[i];\n    return acc;"
        ),
        "form one chain of 255",
    ),
    "one accumulator in double: more exact, and just as slow": (
        _accumulators(1, "double"),
        "one chain of 255",
    ),
    "two accumulators only": (_accumulators(2), "the longest chain is 128 additions"),
    "three accumulators only": (_accumulators(3), "the longest chain is 8"),
    "four products summed from left to right, then added to one accumulator": (
        _dot(
            "    float acc = 0;\n    int64_t i = 0;\n    for (; i + 4 <= n; i += 4)\n"
            "        acc = acc + a[i] * b[i] + a[i + 1] * b[i + 1] + a[i + 2] * b[i + 2]\n"
            "                  + a[i + 3] * b[i + 3];\n"
            "    for (; i < n; i++) acc += a[i] * b[i];\n    return acc;"
        ),
        "form one chain of 255",
    ),
    "dropped tail: right for multiples of four": (
        _accumulators(4, tail=""),
        "wrong at n = 1: a[0]·b[0] is left out",
    ),
    "no tail, and the last group of four reads past the end": (
        _accumulators(4, bound="i < n", tail=""),
        "the result is NaN",
    ),
    "off by one: < in place of <=, so four are lost when n is a multiple of four": (
        _accumulators(4, bound="i + 4 < n", tail="for (i = n - n % 4; i < n; i++) total += a[i] * b[i];"),
        "wrong at n = 4: a[0]·b[0] is left out",
    ),
    "the tail begins one too early and counts a product twice": (
        _accumulators(4, tail="for (i = n / 4 * 4 - (n > 4); i < n; i++) total += a[i] * b[i];"),
        "is counted twice",
    ),
    # Now and then the only product is a whole number: then n = 1 is right.
    "the sum is kept in an int": (_accumulators(4, "int"), "wrong at n = "),
    "the accumulators are static, so they remember the last call": (
        _accumulators(4).replace("float acc[4]", "static float acc[4]").replace(", total = 0", "; float total = 0"),
        "with b all ones and a zero but for a[0] = 1",
    ),
    "reads through an address that does not exist": (
        _dot("    float sum = 0;\n    for (int64_t i = 0; i < n; i++) sum += a[i << 40] * b[i];\n    return sum;"),
        "crashed at n = 2 (segmentation fault",
    ),
    "does not compile": (_dot("    float acc = 0\n    return acc;"), "dot.c does not compile"),
    "another name": (_accumulators(4).replace("float dot", "float my_dot"), "has no function `float dot("),
    "another type for n": (
        _accumulators(4).replace("int64_t n", "int n"),
        "the first line of dot was changed",
    ),
}


# Exercise 3: find the bug

_TILED = """
#include <string.h>
enum {{ TILE = 16 }};
static int64_t min(int64_t a, int64_t b) {{ return a < b ? a : b; }}
void matmul(const float *A, const float *B, float *C, int64_t m, int64_t n, int64_t k) {{
    {clear}
    for (int64_t i0 = 0; i0 < m; i0 += TILE)
        for (int64_t j0 = 0; j0 < n; j0 += TILE)
            for (int64_t p0 = 0; p0 < k; p0 += TILE) {{
                int64_t i1 = {i1}, j1 = min(j0 + TILE, n), p1 = {p1};
                for (int64_t i = i0; i < i1; i++)
                    for (int64_t j = j0; j < j1; j++) {{
                        float acc = {start};
                        for (int64_t p = p0; p < p1; p++) acc += A[i * k + p] * B[p * n + j];
                        C[i * n + j] = acc;
                    }}
            }}
}}
"""


def _tiled(
    clear="memset(C, 0, sizeof(float) * m * n);",
    i1="min(i0 + TILE, m)",
    p1="min(p0 + TILE, k)",
    start="C[i * n + j]",
):
    return _TILED.format(clear=clear, i1=i1, p1=p1, start=start)


WRONG[3] = {
    "clears C, but p still ends at n": (_tiled(p1="min(p0 + TILE, n)"), "m = 1, n = 1, k = 2"),
    "ends p at k, but C is still untouched when k is 0": (
        _tiled(clear="", start="p0 == 0 ? 0 : C[i * n + j]"),
        "m = 1, n = 1, k = 0: 1 of 1 element of C wrong. C[0, 0] is nan, expected 0: what was in C before",
    ),
    "p ends at m: again right for squares": (_tiled(p1="min(p0 + TILE, m)"), "m = 1, n = 1, k = 2"),
    "does not cut the last tile short and reads outside": (
        _tiled(p1="p0 + TILE"),
        "a number outside A or B was read",
    ),
    "drops the last tile along p if it is not a whole one": (
        _tiled(p1="p0 + TILE <= k ? p0 + TILE : p0"),
        "C[0, 0] is 0, expected 1",
    ),
    "bits for bytes: memset counts bytes, not floats": (
        _tiled(clear="memset(C, 0, m * n);"),
        "what was in C before",
    ),
    "clears as if C were square": (
        _tiled(clear="memset(C, 0, sizeof(float) * m * m);"),
        "wrong at m = 1, n = 2",
    ),
    "clears the square of the longer side, past the end of C": (
        _tiled(clear="memset(C, 0, sizeof(float) * (m > n ? m * m : n * n));"),
        "memory outside C was written",
    ),
    "one row too many: reads past the end of A and writes what it finds, NaN, past the end of C": (
        _tiled(i1="min(i0 + TILE, m + 1)"),
        "memory outside C was written",
    ),
    "one element too many: the last row of C goes on for one more column": (
        _tiled().replace("j < j1; j++", "j < j1 + (i + 1 == m && j1 == n); j++"),
        "memory outside C was written",
    ),
    "every tile along p starts a new sum, so only the last one counts": (
        _tiled(start="0"),
        "C[0, 0] is 16, expected 32",
    ),
    "adds to what is in C": (_tiled(clear=""), "what was in C before the call is still there"),
    "never comes to an end": (
        _tiled(clear="for (volatile int wait = 1; wait;) {}"),
        "is there a loop that never ends?",
    ),
}


# Exercise 4: few misses


def _nest(order, tile=None):
    """visit() by plain loops in this order, or by tiles with the corners in the order i, j, p."""

    def visit(n):
        size = tile or max(n, 1)
        starts = range(0, n, size)
        corners = [(i, j, p) for i in starts for j in starts for p in starts]
        for corner in corners:
            ranges = dict(zip("ijp", (range(c, min(c + size, n)) for c in corner)))
            for step in product(*(ranges[axis] for axis in order)):
                at = dict(zip(order, step))
                yield at["i"], at["j"], at["p"]

    return visit


WRONG[4] = {
    "the plain order i, j, p": (_nest("ijp"), "7,200 misses"),
    "the plain order i, p, j, the best of chapter 02's first rungs": (_nest("ipj"), "7,200 misses"),
    "down the columns": (_nest("jpi"), "223,488 misses"),
    "tiles of 8: half of each line is wasted": (_nest("ipj", 8), "2,736 misses"),
    "tiles of 16: right, but A and B are fetched three times": (_nest("ipj", 16), "1,008 misses"),
    "tiles of 24: three lines for two in each row": (_nest("ijp", 24), "misses at n = 48"),
    "tiles of 32: three of them do not fit in the cache": (_nest("ijp", 32), "misses at n = 48"),
}


@wrong(4, "the chapter's tiles of B", "but 1,008 misses at n = 48 (A 432, B 144, C 432); wanted: at most 900")
def _(n):
    for j0 in range(0, n, 16):
        for p0 in range(0, n, 16):
            for i in range(n):
                for p in range(p0, min(p0 + 16, n)):
                    for j in range(j0, min(j0 + 16, n)):
                        yield i, j, p


@wrong(4, "a tall tile of C that is too tall: 48 lines of C and 48 of A do not fit", "misses at n = 48")
def _(n):
    for j0 in range(0, n, 16):
        for p in range(n):
            for i in range(n):
                for j in range(j0, min(j0 + 16, n)):
                    yield i, j, p


@wrong(4, "dropped tail: only whole tiles, right for 48", "steps never come")
def _(n):
    for i0 in range(0, n // 16 * 16, 16):
        for j0 in range(0, n // 16 * 16, 16):
            for p0 in range(0, n // 16 * 16, 16):
                for i in range(i0, i0 + 16):
                    for j in range(j0, j0 + 16):
                        for p in range(p0, p0 + 16):
                            yield i, j, p


@wrong(4, "tiles that go past the edge", "expected whole numbers from 0 to 0")
def _(n):
    for i0 in range(0, n, 16):
        for j0 in range(0, n, 16):
            for p0 in range(0, n, 16):
                for i in range(i0, i0 + 16):
                    for j in range(j0, j0 + 16):
                        for p in range(p0, p0 + 16):
                            yield i, j, p


@wrong(4, "the last tile is moved back to fit, so some steps come twice", "comes more than once")
def _(n):
    corners = [max(0, min(c, n - 16)) for c in range(0, n, 16)]
    for i0 in corners:
        for j0 in corners:
            for p0 in corners:
                for i in range(i0, min(i0 + 16, n)):
                    for j in range(j0, min(j0 + 16, n)):
                        for p in range(p0, min(p0 + 16, n)):
                            yield i, j, p


@wrong(4, "few misses because most steps are left out", "steps never come")
def _(n):
    yield from ((i, i, i) for i in range(n))


@wrong(4, "one step over and over, without end", "comes more than once")
def _(n):
    while True:
        yield 0, 0, 0


@wrong(4, "returns the number of steps in place of the steps", "expected (i, j, p) triples")
def _(n):
    return n**3


@wrong(4, "yields the numbers of steps in place of triples", "expected a triple")
def _(n):
    yield from range(n**3)


# Exercise 5: half to float by bits


def _half(body):
    return (
        f"#include <string.h>\nfloat half_bits_to_float(uint16_t h) {{\n    uint32_t bits = 0;\n{body}\n"
        "    float value;\n    memcpy(&value, &bits, sizeof value);\n    return value;\n}\n"
    )


def _by_parts(
    special="e = 255;",
    normal="e += 112;",
    subnormal="e = 113; while (!(f & 1024)) { f <<= 1; e--; } f &= 1023;",
    more="",
):
    return _half(
        f"    uint32_t sign = h >> 15, f = h & 1023;\n    int e = h >> 10 & 31;\n"
        f"    if (e == 31) {{ {special} }}\n    else if (e > 0) {{ {normal} }}\n"
        f"    else if (f > 0) {{ {subnormal} }}\n"
        f"    bits = sign << 31 | (uint32_t)e << 23 | f << 13;\n    {more}"
    )


WRONG[5] = {
    "subnormals become zero": (
        _by_parts(subnormal="f = 0;"),
        "2046 of 2046 subnormal patterns are wrong. The first is 0x0001: expected 5.96046448e-08 (0x33800000)",
    ),
    "subnormals are half as large: e starts at 0": (
        _by_parts(subnormal="e = 112; while (!(f & 1024)) { f <<= 1; e--; } f &= 1023;"),
        "2046 of 2046 subnormal patterns are wrong. The first is 0x0001",
    ),
    "subnormals keep their leading 1, which lands in the exponent": (
        _by_parts(subnormal="e = 113; while (!(f & 1024)) { f <<= 1; e--; }"),
        "subnormal",
    ),
    "subnormals are treated like normal numbers": (_by_parts(subnormal="e = 112;"), "subnormal"),
    "exponent 31 is treated like any other: infinity is 65536": (
        _by_parts(special="e += 112;"),
        "2 of 2 infinity patterns are wrong. The first is 0x7c00: expected inf",
    ),
    "every NaN becomes infinity": (
        _by_parts(special="e = 255; f = 0;"),
        "2046 of 2046 NaN patterns are wrong",
    ),
    "infinity becomes NaN": (_by_parts(special="e = 255; f |= 512;"), "Wrong: infinity; right: zero, normal"),
    "zero loses its sign": (
        _by_parts(more="if (!(h & 0x7fff)) bits = 0;"),
        "1 of 2 zero patterns are wrong. The first is 0x8000",
    ),
    "the sign is dropped": (_by_parts().replace("h >> 15", "0"), "zero patterns are wrong"),
    "the sign goes to bit 30": (_by_parts().replace("sign << 31", "sign << 30"), "wrong"),
    "zero and normals only, zero through the normal formula": (
        _half("    bits = (uint32_t)(h >> 15) << 31 | ((h >> 10 & 31) + 112u) << 23 | (h & 1023u) << 13;"),
        "2 of 2 zero patterns are wrong. The first is 0x0000",
    ),
    "wrong bias: 15 is not taken off": (
        _by_parts(normal="e += 127;"),
        "61440 of 61440 normal patterns",
    ),
    "the last bit of the fraction is lost": (
        _by_parts(normal="e += 112; f &= 1022;"),
        "of 61440 normal patterns",
    ),
    "uses the hardware's half type": (
        "#include <string.h>\nfloat half_bits_to_float(uint16_t h) {\n"
        "    _Float16 x;\n    memcpy(&x, &h, 2);\n    return x;\n}\n",
        "`_Float16` lets the hardware convert",
    ),
    "uses an intrinsic": (
        "#include <immintrin.h>\nfloat half_bits_to_float(uint16_t h) { return _cvtsh_ss(h); }\n",
        "lets the hardware convert",
    ),
    "loops for ever on zero: it has no leading 1 to find": (
        _by_parts()
        .replace("else if (f > 0)", "else")
        .replace("while (!", "while (*(volatile uint32_t *)&bits == 0 && !"),
        "still running",
    ),
}
