"""Checks of chapter 06: packing, magic numbers, a lost sign, zero points, codes laid out for their lanes, and digits.

The CUDA C++ runs on the SIMT machine; quality is counted there, as instructions and requests, and read from the
compiled PTX, where a conversion from integers shows.
"""

import re

import numpy as np

import ref.lowbit
import simt
from exercises.checks import expect_array, time_limit
from exercises.checks.costs import garbage_in_empty
from exercises.checks.launches import BLOCK, blocks_for, compare, compiled, launched, near, requests, unchanged
from lab.check import differs, unset
from lab.exercise import Exercise, Wrong

INSTRUCTIONS = "smsp__inst_executed.sum"


def _equal_words(got, wanted, at):
    bad = np.argwhere(got != wanted)
    if len(bad):
        index = tuple(map(int, bad[0]))
        raise Wrong(
            f"wrong at {at}: word {list(index)} is {got[index]:#010x}, expected {wanted[index]:#010x}, the first of "
            f"{len(bad)} that differ"
        )


# Exercise 1: pack and unpack


def exercise_1(pack, unpack):
    """pack(q, bits) -> words; unpack(words, bits, cols) -> q."""
    exercise = Exercise("Exercise 1: pack and unpack")
    rng = np.random.default_rng()
    cases = [(4, np.arange(1, 10)[None])]
    cases += [(bits, rng.integers(0, 1 << bits, (2, 32 // bits))) for bits in (8, 4, 2)]
    cases += [(bits, np.full((1, 40), (1 << bits) - 1)) for bits in (8, 4, 2)]
    cases += [
        (b, rng.integers(0, 1 << b, (rows, cols))) for b in (8, 4, 2) for rows, cols in ((1, 1), (3, 17), (5, 33))
    ]
    with exercise, time_limit():
        for n, (bits, q) in enumerate(cases):
            q = q.astype(np.uint8)
            at = f"{bits} bits, {q.shape[0]} × {q.shape[1]} codes" + (", the example" if n == 0 else "")
            before, words = q.copy(), ref.lowbit.pack(q, bits)
            with garbage_in_empty():
                got = pack(q, bits)
            expect_array(got, "pack's result", np.uint32, words.shape, at)
            _equal_words(got, words, f"pack, {at}")
            exercise.require(np.array_equal(q, before), f"{at}: pack changed q, which it should only read")
            given = words.copy()
            with garbage_in_empty():
                back = unpack(given, bits, q.shape[1])
            expect_array(back, "unpack's result", np.uint8, q.shape, at)
            bad = np.argwhere(back != q)
            if len(bad):
                r, c = map(int, bad[0])
                raise Wrong(f"wrong at unpack, {at}: code [{r}, {c}] is {back[r, c]}, expected {q[r, c]}")
            exercise.require(np.array_equal(given, words), f"{at}: unpack changed words, which it should only read")
    return exercise.report(f"right on {len(cases)} cases, in the order of the reference")


# Exercise 2: a magic number for bf16

FROM_INTEGER = re.compile(r"\bcvt\.rn\.\w+\.[su]\d+\b")
MOST_OF_A_WORD = 42  # instructions


def exercise_2(source):
    """CUDA source of numbers and convert."""
    exercise = Exercise("Exercise 2: a magic number for bf16")
    rng = np.random.default_rng()
    every = [np.full((16, 8), beside) for beside in (0, 15) for _ in range(8)]
    for place, codes in enumerate(every):
        codes[:, place % 8] = np.arange(16)
    cases = [(f"all codes in place {p % 8}, {15 * (p // 8)} beside them", c) for p, c in enumerate(every)]
    cases += [(f"{n} words of random codes", rng.integers(0, 16, (n, 8))) for n in (1, 31, 257, 1024)]
    with exercise, time_limit(60):
        kernel = compiled(source, "convert")
        for at, codes in cases:
            words, n = ref.lowbit.pack(codes.astype(np.uint8), 4).reshape(-1), len(codes)
            out = np.full((n, 4), 0xFFFFFFFF, np.uint32)  # NaN
            report = launched(kernel, blocks_for(n), BLOCK, words, out, np.int32(n), at=at)
            pairs = out.view(np.uint16).reshape(n, 4, 2)  # pair, half: codes j and j + 4
            got = ref.lowbit.read(pairs, "bfloat16").transpose(0, 2, 1).reshape(n, 8)
            bad = np.argwhere(~(got == codes))
            if len(bad):
                i, place = map(int, bad[0])
                raise Wrong(
                    f"wrong at {at}: code {place} of the word {words[i]:#010x} is {codes[i, place]}, and became "
                    f"{got[i, place]:g}"
                )
        _no_conversion(source)
        each = report.counters[INSTRUCTIONS] * 32 / n
        exercise.require(
            each <= MOST_OF_A_WORD,
            f"right, but a word takes {each:.0f} instructions; wanted: at most {MOST_OF_A_WORD}, two codes at a time",
        )
    return exercise.report(f"right on {len(cases)} cases, two codes at a time and without a conversion")


def _no_conversion(source):
    """Raise Wrong if the compiled code makes floats of integers."""
    if found := FROM_INTEGER.search(simt.compile(source).ptx):
        raise Wrong(
            f"right, but the compiled code converts from integers ({found[0]}); wanted: bits put together, and a "
            "subtraction"
        )


# Exercise 3: find the bug

MOST_OF_A_SIGN = 1.1  # instructions for a weight, beside those of the kernel as it was handed over


def exercise_3(source):
    """CUDA source of product."""
    exercise = Exercise("Exercise 3: find the bug")
    rng = np.random.default_rng()
    cases = [("16 weights of 1", np.ones((1, 16)))]
    for weight in (-1, -2):
        for place in (0, 7, 15):
            alone = np.zeros((1, 16))
            alone[0, place] = weight
            cases.append((f"a weight of {weight} in place {place}", alone))
    everywhere = (np.arange(16)[:, None] // 4 + np.arange(16)) % 4 - 2
    cases.append(("all weights in all places", everywhere))
    cases += [
        (f"{r} × {c} random weights", rng.integers(-2, 2, (r, c))) for r, c in ((1, 1), (9, 17), (5, 530), (17, 95))
    ]
    with exercise, time_limit(60):
        kernel = compiled(source, "product")
        for at, weights in cases:
            weights, (rows, cols) = weights.astype(int), weights.shape
            words = ref.lowbit.pack((weights & 3).astype(np.uint8), 2)
            # not random where a first message comes from: the notebook's output is compared
            x = rng.integers(1, 9, cols) if "random" in at else 1 + np.arange(cols) % 7
            x = x.astype(np.float32)
            y, before = unset(rows), {"words": words.copy(), "x": x.copy()}
            args = (words, x, y, np.int32(rows), np.int32(cols))
            launched(kernel, blocks_for(rows, 8), BLOCK, *args, at=at)
            wanted = weights @ x
            bad = np.flatnonzero(~(y == wanted))
            if len(bad):
                r = int(bad[0])
                raise Wrong(f"wrong at {at}: {differs(f'y[{r}]', y[r], wanted[r])}")
            unchanged({"words": words, "x": x}, before, at)
        handed = _ternary_product(compiled(HANDED_OVER, "product"), rng)
        report = _ternary_product(kernel, rng)
        loads, allowed = requests(report, "ld"), requests(handed, "ld")
        exercise.require(
            loads <= allowed,
            f"right, but there are {loads:,} load requests where {allowed:,} were before: each word is loaded once",
        )
        each, before = (one.counters[INSTRUCTIONS] * 32 / (8 * 2048) for one in (report, handed))
        exercise.require(
            each <= before + MOST_OF_A_SIGN,
            f"right, but a weight takes {each:.1f} instructions where it took {before:.1f}; wanted: at most one more",
        )
    return exercise.report(f"right on {len(cases)} cases, with all four weights in all places")


def _ternary_product(kernel, rng):
    weights, x, y = rng.integers(0, 2, (8, 2048)), rng.integers(1, 9, 2048).astype(np.float32), unset(8)
    words, at = ref.lowbit.pack(weights.astype(np.uint8), 2), "8 × 2048 weights"
    report = launched(kernel, 1, BLOCK, words, x, y, np.int32(8), np.int32(2048), at=at)
    compare("y", y, weights @ x, at)
    return report


HANDED_OVER = """
extern "C" __global__ void product(const unsigned *words, const float *x, float *y, int rows, int cols) {
    int lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    int n = (cols + 15) / 16;
    float sum = 0;
    for (int k = lane; k < n; k += 32) {
        unsigned word = words[(long long)row * n + k];
        for (int i = 0; i < 16 && 16 * k + i < cols; i++) {
            int code = word >> 2 * i & 3;
            if (code > 2) code -= 4;
            sum += code * x[16 * k + i];
        }
    }
    for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
    if (lane == 0) y[row] = sum;
}
"""

# Exercise 4: fold the zero point

MOST_OF_A_WEIGHT = 8.1  # instructions
FOLDED = 1e-4  # error, over the sum of magnitudes


def exercise_4(source):
    """CUDA source of product."""
    exercise = Exercise("Exercise 4: fold the zero point")
    shapes = [(1, 8), (1, 128), (2, 256), (9, 136), (3, 1000), (5, 2056)]
    with exercise, time_limit(60):
        kernel, rng = compiled(source, "product"), np.random.default_rng()
        for rows, cols in shapes:
            _folded(kernel, rng, rows, cols, positive=False)
        rows, cols = 8, 14336
        report = _folded(kernel, rng, rows, cols, positive=True)
        each = report.counters[INSTRUCTIONS] * 32 / (rows * cols)
        exercise.require(
            each <= MOST_OF_A_WEIGHT,
            f"right, but a weight takes {each:.2f} instructions; wanted: at most {MOST_OF_A_WEIGHT}, with one "
            "subtraction for two weights, one multiply-add for each, and one product with the scale for a word",
        )
        _no_conversion(source)
    return exercise.report(f"right on {len(shapes) + 1} shapes, with one subtraction for two weights")


def _folded(kernel, rng, rows, cols, positive):
    at = f"rows = {rows}, cols = {cols}" + (", x positive" if positive else "")
    groups = -(-cols // 128)
    q = rng.integers(0, 16, (rows, cols)).astype(np.uint8)
    scale = (0.01 + 0.1 * rng.random((rows, groups))).astype(np.float16)
    zero = rng.integers(0, 16, (rows, groups)).astype(np.float16)
    zero[:, ::2] = 15
    x = (rng.random(cols) + 0.5 if positive else rng.standard_normal(cols)).astype(np.float32)
    words, y = ref.lowbit.pack(q, 4), unset(rows)
    given = {"words": words, "scale": scale, "zero": zero, "x": x}
    before = {name: array.copy() for name, array in given.items()}
    report = launched(
        kernel, blocks_for(rows, 8), BLOCK, words, scale, zero, x, y, np.int32(rows), np.int32(cols), at=at
    )
    weights = (q - np.repeat(zero, 128, 1)[:, :cols].astype(float)) * np.repeat(scale, 128, 1)[:, :cols].astype(float)
    wanted, size = weights @ x.astype(float), np.abs(weights) @ np.abs(x.astype(float))
    near("y", y, wanted, FOLDED, at, size)
    unchanged(given, before, at)
    return report


# Exercise 5: interleave

TERNARY = """#include <cuda_fp16.h>
// y = W x for weights code - 1. words (rows, steps, 32, 2), x (cols,) from a multiple of 16 bytes on, y (rows,).
// A warp for each row, blocks of 256 threads.
struct alignas(16) Sixteen { __half x[16]; };

__device__ Sixteen load(const __half *x, int column, int cols) { // x[column ..], and zeros behind its end
    Sixteen some = {};
    if (column + 16 <= cols) {
        uint4 *to = (uint4 *)some.x;
        to[0] = *(const uint4 *)(x + column), to[1] = *(const uint4 *)(x + column + 8);
    } else
        for (int i = 0; i < 16; i++)
            if (column + i < cols) some.x[i] = x[column + i];
    return some;
}

extern "C" __global__ void product(const uint2 *words, const __half *x, float *y, int rows, int cols) {
    int lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return; // the whole warp
    int steps = (cols + 1023) / 1024;
    float sum = 0;
    for (int step = 0; step < steps; step++) {
        uint2 both = words[((long long)row * steps + step) * 32 + lane];
        for (int w = 0; w < 2; w++) {
            Sixteen some = load(x, 1024 * step + 512 * w + 16 * lane, cols);
            for (int i = 0; i < 8; i++) { // fields i and i + 8, for x[2 i] and x[2 i + 1]
                unsigned codes = (w ? both.y : both.x) >> 2 * i & 0x00030003 | 0x64006400;
                __half2 weights = __hsub2(*(__half2 *)&codes, __floats2half2_rn(1025, 1025));
                float2 a = __half22float2(weights), b = __half22float2(*(__half2 *)&some.x[2 * i]);
                sum += a.x * b.x + a.y * b.y;
            }
        }
    }
    for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
    if (lane == 0) y[row] = sum;
}"""


def exercise_5(interleave):
    """interleave(q) -> words."""
    exercise = Exercise("Exercise 5: interleave")
    rng = np.random.default_rng()
    shapes = [(1, 16), (1, 1024), (2, 512), (1, 1), (3, 1025), (2, 2048), (9, 333), (2, 2500)]
    with exercise, time_limit(60):
        kernel = simt.compile(TERNARY)["product"]
        for rows, cols in shapes:
            at, steps = f"{rows} × {cols} codes", -(-cols // 1024)
            q = rng.integers(0, 3, (rows, cols)).astype(np.uint8)
            before = q.copy()
            with garbage_in_empty():
                words = interleave(q)
            exercise.require(np.array_equal(q, before), f"{at}: interleave changed q, which it should only read")
            expect_array(words, "the result", np.uint32, (rows, steps, 32, 2), at)
            x = rng.integers(1, 1000, cols).astype(np.float16)  # sums are exact, and hardly ever equal
            y = unset(rows)
            args = (np.ascontiguousarray(words), x, y, np.int32(rows), np.int32(cols))
            launched(kernel, blocks_for(rows, 8), BLOCK, *args, at=at)
            wanted = (q.astype(int) - 1) @ x.astype(int)
            bad = np.flatnonzero(y != wanted)
            if len(bad):
                r = int(bad[0])
                raise Wrong(f"wrong at {at}: with your words the kernel's {differs(f'y[{r}]', y[r], wanted[r])}")
            _equal_words(words, _interleaved(q), at)
    return exercise.report(f"right on {len(shapes)} shapes: each lane finds its 32 codes in 8 bytes")


def _interleaved(q):
    """The words one by one, as the statement says them."""
    rows, cols = q.shape
    words = np.zeros((rows, -(-cols // 1024), 32, 2), np.uint32)
    c = np.arange(cols)
    field = c % 16 // 2 + 8 * (c % 2)
    for r in range(rows):
        place = (r, c // 1024, c % 512 // 16, c % 1024 // 512)
        np.bitwise_or.at(words, place, q[r].astype(np.uint32) << (2 * field).astype(np.uint32))
    return words


# Exercise 6: digits with signs

MOST_OF_FOUR = 48  # instructions


def exercise_6(source):
    """CUDA source of digits_of and write_digits."""
    exercise = Exercise("Exercise 6: digits with signs")
    rng, top = np.random.default_rng(), 1 << 21
    edges = [0, 1, 127, 128, 255, 256, 32639, 32640, 32767, 32768, 65535, 65536, top - 1]
    edges = np.array([*edges, *(-edge for edge in edges[1:]), -129, -32896, -32897, -top])
    cases = [("the example", np.array([[1, 127, 128, -1]]))]
    for place in range(4):
        numbers = np.zeros((len(edges), 4))
        numbers[:, place] = edges
        cases.append((f"numbers in place {place}, 0 beside them", numbers))
    cases += [(f"{4 * n} random numbers", rng.integers(-top, top, (n, 4))) for n in (1, 31, 257, 1024)]
    with exercise, time_limit(60):
        kernel = compiled(source, "write_digits")
        for at, numbers in cases:
            numbers, n = numbers.astype(np.int32), len(numbers)
            given, out = numbers.copy(), np.full((3, n), 0xA5A5A5A5, np.uint32)
            report = launched(kernel, blocks_for(n), BLOCK, given, out, np.int32(n), at=at)
            got, wanted = out.view(np.int8).reshape(3, n, 4), _digits(numbers)
            bad = np.argwhere((got != wanted).any(0))
            if len(bad):
                i, place = map(int, bad[0])
                listed, expected = (", ".join(str(d) for d in some[:, i, place]) for some in (got, wanted))
                raise Wrong(
                    f"wrong at {at}: the number {numbers[i, place]} in place {place} has the digits {listed}, the "
                    f"lowest first; expected {expected}"
                )
            unchanged({"whole": given}, {"whole": numbers}, at)
        each = report.counters[INSTRUCTIONS] * 32 / n
        exercise.require(
            each <= MOST_OF_FOUR,
            f"right, but four numbers take {each:.0f} instructions; wanted: at most {MOST_OF_FOUR}, with one addition "
            "for a number and one exclusive or for four digits",
        )
    return exercise.report(f"right on {len(cases)} cases, in all four places")


def _digits(numbers):
    """int8 (3, ...): one digit after the other, as the definition says it."""
    rest, digits = numbers.astype(np.int64), []
    for _ in range(3):
        digits.append((rest + 128) % 256 - 128)
        rest = (rest - digits[-1]) // 256
    return np.array(digits, np.int8)
