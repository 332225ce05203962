"""The checks of chapter 14: a ring of mbarriers, a swizzle, a descriptor, a pipeline without a wait, a tile scheduler.

The learner's CUDA C++ runs on the SIMT machine, which notices who waits forever, what nothing puts in order, and bank
conflicts.
"""

import re

import numpy as np

import simt
from exercises.checks import counted, time_limit
from exercises.checks.launches import compare, compiled, launched, unchanged
from lab.check import unset
from lab.exercise import Exercise, Wrong
from lab.source import ROOT

HOPPER = "sm_90a"
COURSE = f"-I{ROOT}"  # where #include "kernels/..." is found
LINE = 128  # bytes of shared memory that lie in all 32 banks once
INT = r"\s*(const\s+)?int\s+\w+\s*"  # a parameter of a function
UNORDERED = "there is no __syncthreads() between the two"  # what the machine says of threads of two warps


def in_words(error, at):
    """What a message says of an error of the machine, where barriers of the block are not what is asked for."""
    return f"at {at}: {str(error).replace(UNORDERED, 'nothing puts the two in order')}"


def needs(source, pattern, function):
    """Raise Wrong if this source, some text, defines no such function."""
    if isinstance(source, str) and not re.search(pattern, source):
        raise Wrong(f"there is no function `{function}`: keep its first line as it is in the stub")


# Exercise 1: a ring

# What fill and use do. mode 0: they note who comes when, and touch no slot. What a row's filling writes, its use reads;
# what its use writes, the filling of the row that is next in its slot reads. Then a race says which of the two orders
# is missing, whatever else goes wrong. mode 1: they do as they say. mode 2: and a use waits until the ring is full.
RING = """
constexpr int MOST = 32;
enum { OVERWRITE = 1, TOO_EARLY };
__device__ int filled[MOST][32], used[MOST][32];
__device__ volatile int fillings[MOST], uses[MOST], wrong[2];
__constant__ int mode, last;

__device__ void note(int what, int row) {
    if (wrong[0] == 0) wrong[1] = row, wrong[0] = what;
}
__device__ __forceinline__ void fill(int *slot, const int *from, int row) {
    const int lane = threadIdx.x % 32;
    if (mode == 0) {
        const bool again = row >= SLOTS;
        if (lane == 0 && again && !uses[row - SLOTS]) note(OVERWRITE, row);
        filled[row][lane] = again ? used[row - SLOTS][lane] : row;
    } else
        slot[lane] = ~from[32 * row + lane]; // so that a row that goes past the slots comes out wrong
    if (lane == 0) fillings[row] = 1;
}
__device__ __forceinline__ void use(const int *slot, int *to, int row) {
    const int lane = threadIdx.x % 32;
    if (mode == 0) {
        if (lane == 0 && !fillings[row]) note(TOO_EARLY, row);
        used[row][31 - lane] = filled[row][31 - lane];
    } else
        to[32 * row + lane] = ~slot[31 - lane];
    if (mode == 2)
        while (!fillings[min(row + SLOTS - 1, last)]) {}
    if (lane == 0) uses[row] = 1;
}
extern "C" __global__ void keep(int *to) { // or the compiler leaves out what a kernel that calls nothing does not use
    to[0] = mode + last + fillings[0] + uses[0] + wrong[0];
}
"""
NOTED, AS_IT_IS, HELD_BACK = range(3)  # modes
OVERWRITE, TOO_EARLY = 1, 2  # what is noted
RINGS = [(1, 1), (1, 2), (3, 0), (3, 1), (3, 3), (3, 7)]  # slots, rows


def exercise_1(source):
    """CUDA source of ring."""
    exercise = Exercise("Exercise 1: a ring")
    with exercise, time_limit(60):
        needs(
            source,
            r"__global__[^;{]*\sring\s*\(",
            'extern "C" __global__ void ring(const int *from, int *to, int rows)',
        )
        rng, kernels = np.random.default_rng(), {}
        for slots, rows in RINGS:
            if slots not in kernels:
                kernels[slots] = compiled(
                    source, "ring", behind=RING, options=(f"-DSLOTS={slots}", COURSE), arch=HOPPER
                )
            at = f"{counted(slots, 'slot')}, {counted(rows, 'row')}"
            _handed_on(kernels[slots], rng, slots, rows, at)
    return exercise.report(f"right for {len(RINGS)} rings, and no slot is empty without need")


def _handed_on(kernel, rng, slots, rows, at):
    from_ = rng.integers(0, 1000, (max(rows, 1), 32)).astype(np.int32)
    to = np.full_like(from_, -1)

    def launch(mode, tell):
        """Run it; return how many rows were filled in and used, what came out of order and at which row."""
        to[:] = -1
        sizes = {"mode": (), "last": (), "fillings": 32, "uses": 32, "wrong": 2}
        for name, size in sizes.items():
            kernel.module.set(name, np.full(size, {"mode": mode, "last": rows - 1}.get(name, 0), np.int32))

        def notes():
            filled, used, wrong = (kernel.module.get(name, np.int32) for name in ("fillings", "uses", "wrong"))
            return int(filled.sum()), int(used.sum()), *wrong.tolist()

        args = (1, 64, from_.reshape(-1), to.reshape(-1), np.int32(rows))
        how = {"at": at, "tell": lambda error: tell(error, *notes()), "check_races": mode != HELD_BACK}
        launched(kernel, *args, **how)
        return notes()

    def told(error, filled, used, what, row):
        lines = ""
        if not what and isinstance(error, simt.RaceError) and error.buffer in ("filled", "used"):
            what, row = OVERWRITE if error.buffer == "used" else TOO_EARLY, error.offset // 128
            row += slots * (what == OVERWRITE)  # which is filled in behind that use
            lines = dict.fromkeys(line for _, line, _, _ in (error.first, error.second))
            lines = " and ".join(f"line {line}{kernel.program.quote(line)}" for line in lines)
            lines = f": nothing puts {lines} in order"
        if what:
            return _out_of_order(what, row, slots, at) + lines
        if isinstance(error, simt.Deadlock):
            return f"deadlock at {at}, with {counted(filled, 'row')} filled in and {used} used: {error}"
        return in_words(error, at)

    def stopped(error, filled, used, *_):
        if not isinstance(error, simt.Deadlock):
            return in_words(error, at)
        return (
            f"right, but slots stay empty: at {at} the filler waits while row {used} is used, with {filled - used} of "
            f"{slots} slots full"
        )

    _, _, what, row = launch(NOTED, told)
    if what:
        raise Wrong(_out_of_order(what, row, slots, at))
    given, taken, *_ = launch(AS_IT_IS, told)
    compare("to", to[:rows], from_[:rows, ::-1], at)
    if (given, taken) != (rows, rows):
        calls = f"`fill` was called for {counted(given, 'row')} and `use` for {taken}"
        raise Wrong(f"right, but not by these calls at {at}: {calls}, expected: both for each row")
    if rows >= slots > 1:
        launch(HELD_BACK, stopped)


def _out_of_order(what, row, slots, at):
    if what == OVERWRITE:
        before = f"row {row - slots}, which lies in the same slot, has been used"
        return f"overwrite at {at}: row {row} may be filled in before {before}"
    return f"read too early at {at}: row {row} may be used before it has been filled in"


# Exercise 2: a swizzle

ROWS = 64  # of a tile
PLACE = r"__device__[\s\w]*\sint\s+place\s*\(" + ",".join([INT] * 3) + r"\)"
SWIZZLE = """
#include "kernels/device/mma.cuh"
#include "kernels/device/hopper/tma.cuh"
constexpr int ROWS = 64; // a row has `words` words of 16 bytes, 8 at most
__shared__ __align__(1024) unsigned char tile[ROWS * 128];
extern "C" __global__ void places(int *to, int words) {
    for (int i = threadIdx.x; i < ROWS * words; i += 32) to[i] = place(i / words, i % words, words);
}
extern "C" __global__ void read(const uint4 *from, uint4 *to, int words) { // matrices of eight rows, by ldmatrix
    const int lane = threadIdx.x;
    for (int i = lane; i < ROWS * words; i += 32)
        *reinterpret_cast<uint4 *>(tile + place(i / words, i % words, words)) = from[i];
    __syncwarp();
    for (int i = 0; i < ROWS / 32 * words; i++) {
        unsigned r[4];
        ldmatrix_x4(r, shared_address(tile + place(i / words * 32 + lane, i % words, words)));
        to[32 * i + lane] = {r[0], r[1], r[2], r[3]};
    }
}
extern "C" __global__ void box(const __grid_constant__ CUtensorMap matrix, uint4 *to, int words) { // as TMA lays it
    __shared__ Barrier full;
    if (threadIdx.x == 0) {
        full.init(1);
        Barrier::init_done();
        full.expect(ROWS * words * 16);
        load_tile(tile, matrix, 0, 0, full);
    }
    __syncwarp();
    full.wait(0);
    for (int i = threadIdx.x; i < ROWS * words; i += 32) to[i] = reinterpret_cast<const uint4 *>(tile)[i];
}
"""
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"


def exercise_2(source):
    """CUDA source of `__device__ int place(int row, int word, int words)`."""
    exercise = Exercise("Exercise 2: a swizzle")
    with exercise, time_limit(60):
        needs(source, PLACE, "__device__ int place(int row, int word, int words)")
        module = compiled(source, "places", behind=SWIZZLE, options=(COURSE,), arch=HOPPER).module
        rng = np.random.default_rng()
        for words in (8, 4, 2):
            _swizzled(module, rng, words, f"rows of {16 * words} bytes")
    return exercise.report("words lie where TMA puts them, for rows of 128, 64 and 32 bytes, without bank conflicts")


def _swizzled(module, rng, words, at):
    def launch(name, *args):
        return launched(module[name], 1, 32, *args, np.int32(words), at=at)

    places = np.full(ROWS * words, -1, np.int32)
    launch("places", places)
    size, taken = 16 * places.size, {}
    for i, place in enumerate(places.tolist()):
        call = f"place({i // words}, {i % words}, {words})"
        if not 0 <= place < size or place % 16:
            wanted = f"expected a multiple of 16 from 0 on, below {size}, the size of a tile"
            raise Wrong(f"wrong at {at}: {call} is {place}; {wanted}")
        if place in taken:
            raise Wrong(f"wrong at {at}: {call} and {taken[place]} are both {place}: a word would be written over")
        taken[place] = call
    matrix = rng.permutation(8 * places.size).astype(np.uint16).reshape(ROWS, 8 * words)
    to = np.zeros(16 * places.size, np.uint8)
    report = launch("read", matrix.reshape(-1), to)
    conflicts, matrices = int(report.counters[CONFLICTS]), ROWS // 8 * words
    if conflicts:
        r, w, many = _crowded(places.reshape(ROWS, words))
        raise Wrong(
            f"bank conflicts at {at}: ldmatrix reads a word of eight rows in {1 + conflicts / matrices:.3g} turns on "
            f"average, wanted: 1. Of rows {r} to {r + 7}, word {w}, {many} lie in the same four banks"
        )
    laid = np.zeros_like(matrix)
    launch("box", simt.TensorMap(matrix, matrix.shape, swizzle=16 * words), laid.reshape(-1))
    where = {word.tobytes(): 16 * i for i, word in enumerate(laid.reshape(-1, 8))}
    for i, word in enumerate(matrix.reshape(-1, 8)):
        if places[i] != where[word.tobytes()]:
            raise Wrong(
                f"not TMA's at {at}: no bank conflicts, but TMA puts word {i % words} of row {i // words} at byte "
                f"{where[word.tobytes()]}, and place({i // words}, {i % words}, {words}) is {places[i]}"
            )


def _crowded(places):
    """Eight rows and a word of them that most lie in the same four banks: first row, word, how many."""
    four = places // 16 % 8
    found = []
    for r in range(0, len(four), 8):
        for w in range(four.shape[1]):
            found.append((int(np.bincount(four[r : r + 8, w]).max()), -r, -w))
    many, r, w = max(found)
    return -r, -w, many


# Exercise 3: a descriptor

LAYOUTS = {128: 1, 64: 2, 32: 3, 16: 0}  # bits 62 and 63, by the bytes of a panel's rows
NAMES = ["no swizzle", "a swizzle of 128 bytes", "a swizzle of 64 bytes", "a swizzle of 32 bytes"]
DESCRIBE = r"describe\s*\(\s*(const\s+)?unsigned(\s+int)?\s+\w+\s*," + ",".join([INT] * 3) + r"\)"
DESCRIBED = """
extern "C" __global__ void describe_all(const int4 *cases, unsigned long long *to, int count) {
    const int i = threadIdx.x;
    if (i < count) to[i] = describe(cases[i].x, cases[i].y, cases[i].z, cases[i].w);
}
"""
MULTIPLIED = """
#include "kernels/device/hopper/tma.cuh"
#include "kernels/device/hopper/wgmma.cuh"
#include "kernels/matmul/tiles.cuh"
extern "C" __global__ void product(const uint4 *from, float *to, int a_rows, int a_width, int b_rows, int b_width) {
    extern __shared__ __align__(1024) unsigned char tiles[];
    const int words = (a_rows + b_rows) * 8; // rows of 64 numbers
    for (int i = threadIdx.x; i < words; i += 128) reinterpret_cast<uint4 *>(tiles)[i] = from[i];
    fence_async_proxy();
    __syncthreads();
    const unsigned a = shared_address(tiles), b = a + a_rows * ROW;
    float d[32];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 64; k += 16)
        wgmma<64>(d, describe(a, a_rows, a_width, k), describe(b, b_rows, b_width, k), k > 0, __half());
    wgmma_commit();
    wgmma_wait<0>();
    keep(d);
#pragma unroll
    for (int j = 0; j < 8; j++) store_fragment(to, d + 4 * j, threadIdx.x / 32 * 16, 8 * j, 64, 64, threadIdx.x % 32);
}
"""
# address, rows, width, k
TILES = [
    (1024 * at, rows, width, k)
    for width in LAYOUTS
    for at, rows in ((1, 64), (130, 64), (9, 72))
    for k in (0, 16, 32, 48)
]
# rows and width of a, of b: taller than the 64 rows that are multiplied, so that panels are apart
PRODUCTS = [(64, 128, 64, 128), (72, 128, 64, 64), (64, 64, 80, 32), (88, 32, 72, 16), (72, 16, 64, 128)]


def exercise_3(source):
    """CUDA source of `__device__ Descriptor describe(unsigned tile, int rows, int width, int k)`."""
    exercise = Exercise("Exercise 3: a descriptor")
    with exercise, time_limit(60):
        needs(source, DESCRIBE, "__device__ Descriptor describe(unsigned tile, int rows, int width, int k)")
        kernel = compiled(source, "describe_all", behind=DESCRIBED, options=(COURSE,), arch=HOPPER)
        given, to = np.array(TILES, np.int32), np.zeros(len(TILES), np.uint64)
        launched(kernel, 1, len(TILES), given.reshape(-1), to, np.int32(len(TILES)), at="all descriptors")
        for case, descriptor in zip(TILES, to.tolist()):
            _fields(descriptor, *case)
        product = compiled(source, "product", behind=MULTIPLIED, options=(COURSE,), arch=HOPPER)
        rng = np.random.default_rng()
        for shape in PRODUCTS:
            _multiplied(product, rng, *shape)
    return exercise.report(f"{len(TILES)} descriptors, and {len(PRODUCTS)} products with them")


def _fields(descriptor, tile, rows, width, k):
    """Raise Wrong for the first field that does not say what it should."""
    panel, inside = divmod(2 * k, width)
    at = f"describe({tile}, {rows}, {width}, {k})"

    def number(name, begin, count, wanted, what):
        got = descriptor >> begin & (1 << count) - 1
        if got * 16 == wanted:
            return
        why = " (a field counts 16 bytes, not bytes)" if got == wanted & (1 << count) - 1 else f": {what}"
        raise Wrong(
            f"wrong at {at}: the {name}, bits {begin} to {begin + count - 1}, says {16 * got} bytes, expected "
            f"{wanted}{why}"
        )

    start = tile + panel * rows * width + inside
    where = f"number {k} of the first row, in panel {panel}, at byte {inside} of its rows"
    number("start address", 0, 14, start, where)
    if width == 16:  # of no use otherwise
        number("leading byte offset", 16, 14, rows * width, "from 8 numbers of k to the next 8, a panel further on")
    number("stride byte offset", 32, 14, 8 * width, f"from 8 rows to the next 8, rows of {width} bytes")
    layout = descriptor >> 62
    if layout != LAYOUTS[width]:
        said, wanted = NAMES[layout], NAMES[LAYOUTS[width]]
        raise Wrong(
            f"wrong at {at}: the layout, bits 62 and 63, is {layout}: {said}; expected {LAYOUTS[width]}: {wanted}"
        )
    unused = {bit for bit in (14, 15, 30, 31, *range(46, 62)) if descriptor >> bit & 1}
    if unused:
        raise Wrong(f"wrong at {at}: bit {min(unused)} is set, which belongs to none of the four fields")


def _panels(matrix, width):
    """A tile's bytes in shared memory: panels of `width` bytes, whose words are exchanged as TMA does."""
    rows = len(matrix)
    panels = matrix.reshape(rows, -1, width // 2).transpose(1, 0, 2)
    words = np.ascontiguousarray(panels).reshape(-1, 8)
    i = np.arange(len(words))
    laid = np.empty_like(words)
    laid[i ^ i // (LINE // 16) % (width // 16)] = words
    return laid.reshape(-1)


def _multiplied(kernel, rng, a_rows, a_width, b_rows, b_width):
    at = f"a product of {a_rows} rows in panels of {a_width} bytes and {b_rows} rows in panels of {b_width}"
    a, b = ((2 * rng.integers(-4, 4, (rows, 64)) + 1).astype(np.float16) for rows in (a_rows, b_rows))
    given = np.concatenate([_panels(a, a_width), _panels(b, b_width)])
    to = unset((64, 64))
    sizes = [np.int32(n) for n in (a_rows, a_width, b_rows, b_width)]
    launched(kernel, 1, 128, given, to.reshape(-1), *sizes, at=at, shared=given.nbytes, check_races=True)
    compare("to", to, a[:64].astype(np.float32) @ b[:64].astype(np.float32).T, at)


# Exercise 4: the waits that are missing

# Which groups of products thread 0 has under way, how many steps begin while there are some, and how many waits each
# thread comes to. Put before the learner's source, once it is right.
COUNTED = """
#include "kernels/device/hopper/wgmma.cuh"
__device__ int groups, followed, waits[128];
__device__ __forceinline__ void counted_fence() {
    if (threadIdx.x == 0) followed += groups > 0;
    wgmma_fence();
}
__device__ __forceinline__ void counted_commit() {
    if (threadIdx.x == 0) groups++;
    wgmma_commit();
}
template <int PENDING> __device__ __forceinline__ void counted_wait() {
    if (threadIdx.x == 0) groups = min(groups, PENDING);
    if (threadIdx.x < 128) waits[threadIdx.x]++;
    wgmma_wait<PENDING>();
}
#define wgmma_fence counted_fence
#define wgmma_commit counted_commit
#define wgmma_wait counted_wait
"""
STEPS = 4  # of the first case

# m, n, k, blocks: first one tile with more steps than there are stages, then several tiles of one step, then both
MATMULS = [(64, 64, 256, 1), (64, 192, 64, 2), (8, 72, 200, 1)]
SHARED = 3 * 2 * 8192 + 8192 + 1024


def exercise_4(source):
    """CUDA source of matmul."""
    exercise = Exercise("Exercise 4: the waits that are missing")
    with exercise, time_limit(60):
        kernel, rng = compiled(source, "matmul", options=(COURSE,), arch=HOPPER), np.random.default_rng()
        for case in MATMULS:
            _product(kernel, rng, *case, check_races=True)
        kernel = compiled(COUNTED + source, "matmul", options=(COURSE,), arch=HOPPER)
        for name, size in {"groups": 1, "followed": 1, "waits": 128}.items():
            kernel.module.set(name, np.zeros(size, np.int32))
        _product(kernel, rng, *MATMULS[0])
        waits = kernel.module.get("waits", np.int32)
        if (waits != waits.max()).any():
            most, least = int(waits.argmax()), int(waits.argmin())
            few = f"thread {most} comes to {waits[most]} of them, thread {least} to {waits[least]}"
            raise Wrong(f"wgmma_wait is for all threads of a warpgroup together: {few}")
        followed = int(kernel.module.get("followed", np.int32)[0])
        exercise.require(
            followed == STEPS - 1,
            f"right, but {'some steps wait for their' if followed else 'each step waits for its'} own products before "
            f"the next are asked for: of {STEPS} steps {followed} begin while products of the step before are under "
            f"way, wanted: {STEPS - 1}. The tensor cores rest in between",
        )
    return exercise.report(f"right for {len(MATMULS)} products; no race, and products always under way")


def _product(kernel, rng, m, n, k, blocks, **how):
    """Raise Wrong if this one does not come out right."""
    at = f"m = {m}, n = {n}, k = {k}, {counted(blocks, 'block')}"
    x, W = (rng.integers(-4, 5, (rows, k)).astype(np.float16) for rows in (m, n))
    y = unset((m, n), np.float16)
    before = {"x": x.copy(), "W": W.copy()}
    maps = [simt.TensorMap(a, (64, 64), swizzle=128) for a in (x, W, y)]
    sizes = [np.int32(size) for size in (m, n, k)]
    launched(kernel, blocks, 160, *maps, *sizes, at=at, tell=lambda error: in_words(error, at), shared=SHARED, **how)
    wanted = (x.astype(np.float32) @ W.astype(np.float32).T).astype(np.float16)
    compare("y", y, wanted, at)
    unchanged({"x": x, "W": W}, before, at)


# Exercise 5: which tile next

TILE_OF = r"__device__[\s\w]*\sint2\s+tile_of\s*\(" + r",".join([r"\s*(const\s+)?int\s+\w+\s*"] * 5) + r"\)"
SCHEDULE = """
// What a persistent kernel does: tiles until there are no more. One thread a block; to (blocks, most) and counts.
extern "C" __global__ void schedule(int2 *to, int *counts, int blocks, int rows, int columns, int most) {
    const int block = blockIdx.x * blockDim.x + threadIdx.x;
    if (block >= blocks) return;
    int round = 0;
    for (; round < most; round++) {
        const int2 tile = tile_of(block, round, blocks, rows, columns);
        if (tile.x < 0) break;
        to[block * most + round] = tile;
    }
    counts[block] = round;
}
"""
GRIDS = [(1, 1, 1), (1, 1, 4), (3, 5, 1), (5, 3, 4), (17, 4, 8), (4, 33, 8), (40, 9, 132), (33, 31, 132)]
# rows, columns, blocks, and the most strips that the tiles of a round may need on average
LARGE = [(64, 64, 132, 34), (16, 96, 132, 34), (96, 16, 132, 34), (70, 50, 132, 34), (48, 80, 64, 24)]


def exercise_5(source):
    """CUDA source of `__device__ int2 tile_of(int block, int round, int blocks, int rows, int columns)`."""
    exercise = Exercise("Exercise 5: which tile next")
    with exercise, time_limit(60):
        needs(source, TILE_OF, "__device__ int2 tile_of(int block, int round, int blocks, int rows, int columns)")
        kernel = compiled(source, "schedule", behind=SCHEDULE)
        for rows, columns, blocks in GRIDS:
            _schedule(kernel, rows, columns, blocks)
        for rows, columns, blocks, most in LARGE:
            at, rounds = _schedule(kernel, rows, columns, blocks)
            strips = [len(np.unique(t[:, 0])) + len(np.unique(t[:, 1])) for t in rounds[:-1]]
            mean = np.mean(strips)
            exercise.require(
                mean <= most,
                f"right, but not for L2: {at}, the tiles of a round need {mean:.1f} strips of x and W on average, "
                f"wanted: at most {most}",
            )
    return exercise.report(f"each tile once on {len(GRIDS) + len(LARGE)} grids, and neighbours at a time")


def _schedule(kernel, rows, columns, blocks):
    """Where, for messages, and the tiles (n, 2) of each round."""
    tiles = rows * columns
    rounds = -(-tiles // blocks)
    at = f"at {rows} × {columns} tiles on {counted(blocks, 'block')}"
    most = rounds + 1
    to, counts = np.full((blocks, most, 2), -1, np.int32), np.full(blocks, -1, np.int32)
    sizes = [np.int32(n) for n in (blocks, rows, columns, most)]
    launched(kernel, -(-blocks // 64), 64, to.reshape(-1), counts, *sizes, at=at.removeprefix("at "))
    seen = {}
    for block in range(blocks):
        for n in range(counts[block]):
            row, column = to[block, n].tolist()
            who = f"block {block} in round {n}"
            if row >= rows or not 0 <= column < columns:
                raise Wrong(f"wrong {at}: {who} gets tile ({row}, {column}), which lies outside")
            if (row, column) in seen:
                raise Wrong(f"wrong {at}: {who} gets tile ({row}, {column}), and so does {seen[row, column]}")
            seen[row, column] = who
    if counts.max() > rounds:
        few = f"{counted(rounds, 'tile')} a block are enough if all take their part"
        raise Wrong(f"not shared {at}: block {counts.argmax()} has more than {rounds}; {few}")
    for row in range(rows):
        for column in range(columns):
            if (row, column) not in seen:
                raise Wrong(f"wrong {at}: nobody gets tile ({row}, {column})")
    return at, [to[counts > n, n] for n in range(rounds)]
