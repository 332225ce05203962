"""Wrong answers to the exercises of chapter 14. Each says the mistake that it makes.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer, and words that
the check's verdict must hold. RIGHT has the answers that they were made from.
"""

from wrong.warp_gemv import changed

# Exercise 1: a ring

RING = """
#include "kernels/device/hopper/mbarrier.cuh"
__device__ void fill(int *slot, const int *from, int row);
__device__ void use(const int *slot, int *to, int row);
extern "C" __global__ void ring(const int *from, int *to, int rows) {
    __shared__ int slots[SLOTS][32];
    __shared__ Barrier full[SLOTS], empty[SLOTS];
    if (threadIdx.x == 0)
        for (int slot = 0; slot < SLOTS; slot++) full[slot].init(32), empty[slot].init(32);
    __syncthreads();
    for (int row = 0; row < rows; row++) {
        const int slot = row % SLOTS, parity = row / SLOTS % 2;
        if (threadIdx.x < 32) {
            empty[slot].wait(parity ^ 1);
            fill(slots[slot], from, row);
            full[slot].arrive();
        } else {
            full[slot].wait(parity);
            use(slots[slot], to, row);
            empty[slot].arrive();
        }
    }
}
"""
WAIT_EMPTY = "            empty[slot].wait(parity ^ 1);\n"
WAIT_FULL = "            full[slot].wait(parity);\n"
FILL, FILLED = "            fill(slots[slot], from, row);\n", "            full[slot].arrive();\n"
USE, USED = "            use(slots[slot], to, row);\n", "            empty[slot].arrive();\n"
BEGIN, LOOP = RING.index("    if (threadIdx.x == 0)"), RING.index("    for (int row")
HEAD, READY = RING[:BEGIN], RING[BEGIN:LOOP]  # up to what a learner writes; the initialisation
INIT = "full[slot].init(32), empty[slot].init(32);"


def _ring(*pairs):
    return changed(RING, *pairs)


# Exercise 2: a swizzle


def _place(body):
    return f"__device__ int place(int row, int word, int words) {{\n    {body}\n}}\n"


PLACE = _place("return (row * words + (word ^ row * words / 8 % words)) * 16;")

# Exercise 3: a descriptor

DESCRIBE = """
using Descriptor = unsigned long long;
__device__ Descriptor describe(unsigned tile, int rows, int width, int k) {
    const unsigned panel = rows * width, start = tile + 2 * k / width * panel + 2 * k % width;
    const Descriptor layout = width == 128 ? 1 : width == 64 ? 2 : width == 32 ? 3 : 0;
    Descriptor descriptor = start >> 4;
    descriptor |= (Descriptor)(panel >> 4) << 16;
    descriptor |= (Descriptor)(8 * width >> 4) << 32;
    return descriptor | layout << 62;
}
"""
START, LEADING, STRIDE = "start >> 4", "(Descriptor)(panel >> 4) << 16", "(Descriptor)(8 * width >> 4) << 32"

# Exercise 4: the waits that are missing

PIPELINE = """
#include "kernels/device/hopper/tma.cuh"
#include "kernels/device/hopper/warpgroup.cuh"
#include "kernels/device/hopper/wgmma.cuh"
#include "kernels/matmul/tiles.cuh"
constexpr int TILE = 64, STAGES = 3;
struct Stage {
    unsigned char x[TILE * ROW], w[TILE * ROW];
};
struct Shared {
    Stage stages[STAGES];
    unsigned char box[TILE * ROW];
    Ring<STAGES> ring;
};
extern "C" __global__ void __launch_bounds__(160)
matmul(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap W,
       const __grid_constant__ CUtensorMap y, int m, int n, int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    Ring<STAGES> &ring = shared.ring;
    const int thread = threadIdx.x, lane = thread % 32, warp = warp_uniform(thread / 32), steps = divide_up(k, STEP);
    const TileOrder<16> order{divide_up(m, TILE), divide_up(n, TILE)};
    if (thread == 0) ring.init(1, 4);
    __syncthreads();
    Phase<STAGES> phase, before;
    if (warp == 4) {
        for (int i = blockIdx.x; lane == 0 && i < order.count(); i += gridDim.x)
            for (int step = 0; step < steps; step++) {
                Stage &stage = shared.stages[phase.stage];
                ring.wait_empty(phase);
                ring.full[phase.stage].expect(sizeof(Stage));
                load_tile(stage.x, x, order.at(i).x * TILE, step * STEP, ring.full[phase.stage]);
                load_tile(stage.w, W, order.at(i).y * TILE, step * STEP, ring.full[phase.stage]);
                phase.advance();
            }
        return;
    }
    float sums[TILE / 2];
    for (int i = blockIdx.x; i < order.count(); i += gridDim.x) {
        for (int step = 0; step < steps; step++) {
            ring.wait_full(phase);
            const Stage &stage = shared.stages[phase.stage];
            const Descriptor a = k_major(shared_address(stage.x)), b = k_major(shared_address(stage.w));
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < STEP / 16; j++)
                wgmma<TILE>(sums, advance(a, 32 * j), advance(b, 32 * j), step + j > 0, __half());
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0 && lane == 0) ring.release(before);
            before = phase;
            phase.advance();
        }
        wgmma_wait<0>();
        keep(sums);
        if (lane == 0) ring.release(before);
        if (thread == 0) store_wait_read();
        named_barrier<128>(1); // read
#pragma unroll
        for (int j = 0; j < TILE / 4; j++) {
            const int row = 16 * warp + lane / 4 + 8 * (j % 2);
            *reinterpret_cast<unsigned *>(shared.box + swizzled(row, j / 2) + lane % 4 * 4) =
                pack(sums[2 * j], sums[2 * j + 1], __half());
        }
        fence_async_proxy();
        named_barrier<128>(1); // written
        if (thread == 0) {
            store_tile(y, order.at(i).x * TILE, order.at(i).y * TILE, shared.box);
            store_commit();
        }
    }
    if (thread == 0) store_wait();
}
"""
PRODUCTS, STORE = "            wgmma_wait<1>();\n", "        if (thread == 0) store_wait_read();\n"
RELEASE = "            if (step > 0 && lane == 0) ring.release(before);\n"
READ, WRITTEN = "        named_barrier<128>(1); // read\n", "        named_barrier<128>(1); // written\n"
COMMITTED = "            store_commit();\n"
NOT_AGAIN = ("        if (lane == 0) ring.release(before);\n        if", "        if")


def _pipeline(*pairs):
    return changed(PIPELINE, *pairs)


# Exercise 5: which tile next


def _tile(body):
    return f"__device__ int2 tile_of(int block, int round, int blocks, int rows, int columns) {{\n{body}\n}}\n"


NUMBER = "    const int number = round * blocks + block;\n    if (number >= rows * columns) return {-1, -1};\n"
BANDS = """    const int band = number / (16 * columns), in_band = number % (16 * columns);
    const int height = min(16, rows - 16 * band);
    return {16 * band + in_band % height, in_band / height};"""
TILE = _tile(NUMBER + BANDS)

RIGHT = {1: RING, 2: PLACE, 3: DESCRIBE, 4: PIPELINE, 5: TILE}

WRONG = {
    1: {
        "the filler does not wait": (_ring((WAIT_EMPTY, "")), "overwrite at 1 slot, 2 rows: row 1 may be filled in"),
        "the filler waits for the first round only": (
            _ring((WAIT_EMPTY, "            if (row < SLOTS) empty[slot].wait(1);\n")),
            "overwrite at 1 slot, 2 rows",
        ),
        "the filler always asks for parity 1": (
            _ring((WAIT_EMPTY, "            empty[slot].wait(1);\n")),
            "overwrite at 1 slot, 2 rows",
        ),
        "the filler asks for the phase of its own round": (
            _ring((WAIT_EMPTY, "            empty[slot].wait(parity);\n")),
            "deadlock at 1 slot, 1 row",
        ),
        "the reader does not wait": (_ring((WAIT_FULL, "")), "read too early at 1 slot, 1 row: row 0 may be used"),
        "the reader always asks for parity 0": (
            _ring((WAIT_FULL, "            full[slot].wait(0);\n")),
            "read too early at 1 slot, 2 rows: row 1",
        ),
        "the reader asks for the round before": (
            _ring((WAIT_FULL, "            full[slot].wait(parity ^ 1);\n")),
            "read too early at 1 slot, 1 row",
        ),
        "parities change with each row": (
            _ring(("parity = row / SLOTS % 2", "parity = row % 2")),
            "read too early at 3 slots, 3 rows: row 1",
        ),
        "nobody says that a slot is full": (
            _ring((FILLED, "")),
            "deadlock at 1 slot, 1 row, with 1 row filled in and 0 used",
        ),
        "nobody gives a slot back": (_ring((USED, "")), "deadlock at 1 slot, 2 rows, with 1 row filled in and 1 used"),
        "the slot is full before it is filled in": (_ring((FILL + FILLED, FILLED + FILL)), "read too early at 1 slot"),
        "the slot is given back before it is used": (_ring((USE + USED, USED + USE)), "overwrite at 1 slot, 2 rows"),
        "the reader waits at the filler's barrier": (
            _ring((WAIT_FULL, "            empty[slot].wait(parity);\n"), (USED, FILLED)),
            "deadlock at 1 slot, 1 row",
        ),
        "32 arrivals come where one is enough": (
            _ring((INIT, INIT.replace("full[slot].init(32)", "full[slot].init(1)"))),
            "whose phase 32 in block (0, 0, 0) lacks 1 of 1 arrivals",
        ),
        "half of the arrivals are enough": (
            _ring((INIT, INIT.replace("empty[slot].init(32)", "empty[slot].init(16)"))),
            "whose phase 2 in block (0, 0, 0) lacks 16 of 16 arrivals",
        ),
        "both warps are counted": (_ring((INIT, INIT.replace("32", "64"))), "deadlock at 1 slot, 1 row"),
        "lane 0 arrives for all, and 32 are counted": (
            _ring((USED, "            if (threadIdx.x == 32) empty[slot].arrive();\n")),
            "deadlock at 1 slot, 2 rows",
        ),
        "lane 0 gives back what others may still read": (
            _ring(
                (USED, "            if (threadIdx.x == 32) empty[slot].arrive();\n"),
                (INIT, INIT.replace("empty[slot].init(32)", "empty[slot].init(1)")),
            ),
            "overwrite at 1 slot, 2 rows",
        ),
        "lane 0 says that it is full while others still fill": (
            _ring(
                (FILLED, "            if (threadIdx.x == 0) full[slot].arrive();\n"),
                (INIT, INIT.replace("full[slot].init(32)", "full[slot].init(1)")),
            ),
            "read too early at 1 slot, 1 row",
        ),
        "no barrier behind init": (_ring(("    __syncthreads();\n", "")), "at 1 slot, 1 row: "),
        "one half is not initialised": (_ring((INIT, INIT.split(",")[0] + ";")), "has not been initialised"),
        "all threads initialise": (_ring(("    if (threadIdx.x == 0)\n", "")), "several threads of a block initialise"),
        "slots of the filler and of the reader differ": (
            _ring((USE, USE.replace("[slot]", "[(slot + 1) % SLOTS]"))),
            "at 3 slots, 1 row: ",
        ),
        "one slot for all rows": (
            _ring(("slot = row % SLOTS, parity = row / SLOTS % 2", "slot = 0, parity = row % 2")),
            "right, but slots stay empty: at 3 slots, 3 rows the filler waits",
        ),
        "in lock-step": (
            _ring(
                (WAIT_EMPTY, "            if (row > 0) empty[(row - 1) % SLOTS].wait((row - 1) / SLOTS % 2);\n"),
            ),
            "at 3 slots, 3 rows the filler waits while row 0 is used, with 1 of 3 slots full",
        ),
        "one slot fewer than there are": (
            _ring(
                (
                    "slot = row % SLOTS, parity = row / SLOTS % 2",
                    "n = SLOTS > 1 ? SLOTS - 1 : 1, slot = row % n, parity = row / n % 2",
                )
            ),
            "at 3 slots, 3 rows the filler waits while row 0 is used, with 2 of 3 slots full",
        ),
        "a batch at a time: fills all slots, then waits until all have been used": (
            _ring(
                (
                    WAIT_EMPTY,
                    "            if (slot == 0)\n"
                    "                for (int s = 0; s < SLOTS; s++) empty[s].wait(parity ^ 1);\n",
                ),
            ),
            "right, but slots stay empty: at 3 slots, 7 rows the filler waits while row 1 is used, with 2 of 3",
        ),
        "past the slots": (
            _ring((USE, "            use((int *)from + 32 * row, to, row);\n")),
            "wrong at 1 slot, 1 row: 32 of 32 elements of to differ",
        ),
        "without the calls": (
            _ring(
                (FILL, "            slots[slot][threadIdx.x] = from[32 * row + threadIdx.x];\n"),
                (USE, "            to[32 * row + threadIdx.x - 32] = slots[slot][63 - threadIdx.x];\n"),
            ),
            "right, but not by these calls at 1 slot, 1 row: `fill` was called for 0 rows and `use` for 0",
        ),
        "the other way round at both": (
            _ring((FILLED, FILLED.replace("full", "empty")), (USED, USED.replace("empty", "full"))),
            "read too early at 1 slot, 2 rows",
        ),
        "waits for the slot behind": (
            _ring((WAIT_EMPTY, "            empty[(slot + 1) % SLOTS].wait(parity ^ 1);\n")),
            "deadlock at 3 slots, 3 rows",
        ),
        "does nothing": (HEAD + "}\n", "wrong at 1 slot, 1 row: 32 of 32 elements of to differ"),
        "does not return when there are no rows": (
            _ring(("    for (int row = 0;", "    if (rows == 0) full[0].wait(0);\n    for (int row = 0;")),
            "deadlock at 3 slots, 0 rows",
        ),
    },
    2: {
        "plain order": (
            _place("return (row * words + word) * 16;"),
            "bank conflicts at rows of 128 bytes: ldmatrix reads a word of eight rows in 8 turns on average",
        ),
        "XORed with all of the row": (
            _place("return (row * words + (word ^ row)) * 16;"),
            "wrong at rows of 128 bytes: place(",
        ),
        "the row's number for the line's": (
            _place("return (row * words + (word ^ row % words)) * 16;"),
            "bank conflicts at rows of 64 bytes: ldmatrix reads a word of eight rows in 2 turns on average",
        ),
        "always modulo 8": (
            _place("return (row * words + (word ^ row * words / 8 % 8)) * 16;"),
            "wrong at rows of 64 bytes: place(",
        ),
        "turned in place of exchanged": (
            _place("return (row * words + (word + row * words / 8) % words) * 16;"),
            "not TMA's at rows of 128 bytes: no bank conflicts, but TMA puts word 1 of row 1 at byte 128",
        ),
        "the line's number from the other end": (
            _place("return (row * words + (word ^ 7 - row * words / 8 % 8 & words - 1)) * 16;"),
            "not TMA's at rows of 128 bytes",
        ),
        "precedence: ^ binds more loosely than +": (
            _place("return (row * words + word ^ row * words / 8 % words * 16) * 16;"),
            "at rows of 128 bytes",
        ),
        "in words, not in bytes": (
            _place("return row * words + (word ^ row * words / 8 % words);"),
            "wrong at rows of 128 bytes: place(0, 1, 8) is 1; expected a multiple of 16",
        ),
        "the swizzle of 128 bytes for all rows": (
            _place("return row * 128 + (word ^ row % 8) * 16;"),
            "wrong at rows of 64 bytes: place(32, 0, 4) is 4096; expected a multiple of 16 from 0 on, below 4096",
        ),
        "a word of padding a row": (
            _place("return (row * (words + 1) + word) * 16;"),
            "below 8192, the size of a tile",
        ),
        "exchanges bytes of the address one bit too low": (
            _place("int at = (row * words + word) * 16; return at ^ (at >> 6 & words - 1) << 4;"),
            "rows of 128 bytes",
        ),
        "XORs half of the line's number": (
            _place("return (row * words + (word ^ row * words / 8 % (words / 2))) * 16;"),
            "bank conflicts at rows of 128 bytes: ldmatrix reads a word of eight rows in 2 turns",
        ),
        "another function": (
            "__device__ int places(int row, int word, int words) { return 0; }",
            "there is no function",
        ),
        "nothing is returned": (_place(""), "at rows of 128 bytes"),
    },
    3: {
        "the start address in bytes": (changed(DESCRIBE, (START, "start")), "the start address, bits 0 to 13, says"),
        "the stride in bytes": (
            changed(DESCRIBE, (STRIDE, "(Descriptor)(8 * width) << 32")),
            "the stride byte offset, bits 32 to 45, says 16384 bytes, expected 1024 (a field counts 16 bytes",
        ),
        "the stride in numbers": (
            changed(DESCRIBE, (STRIDE, "(Descriptor)(8 * width / 2 >> 4) << 32")),
            "the stride byte offset, bits 32 to 45, says 512 bytes, expected 1024: from 8 rows to the next 8",
        ),
        "always the stride of rows of 128 bytes": (
            changed(DESCRIBE, (STRIDE, "(Descriptor)(1024 >> 4) << 32")),
            "describe(1024, 64, 64, 0): the stride byte offset, bits 32 to 45, says 1024 bytes, expected 512",
        ),
        "leading and stride change places": (
            changed(DESCRIBE, ("<< 16", "<< 00"), ("<< 32", "<< 16"), ("<< 00", "<< 32")),
            "describe(1024, 64, 128, 0): the stride byte offset",
        ),
        "a leading offset of one word": (
            changed(DESCRIBE, (LEADING, "1ull << 16")),
            "describe(1024, 64, 16, 0): the leading byte offset, bits 16 to 29, says 16 bytes, expected 1024",
        ),
        "a leading offset of two panels, as 16 numbers are": (
            changed(DESCRIBE, (LEADING, "(Descriptor)(2 * panel >> 4) << 16")),
            "the leading byte offset, bits 16 to 29, says 2048 bytes, expected 1024",
        ),
        "layouts as the tensor map counts them": (
            changed(
                DESCRIBE,
                (
                    "width == 128 ? 1 : width == 64 ? 2 : width == 32 ? 3 : 0",
                    "width == 128 ? 3 : width == 64 ? 2 : width == 32 ? 1 : 0",
                ),
            ),
            "the layout, bits 62 and 63, is 3: a swizzle of 32 bytes; expected 1: a swizzle of 128 bytes",
        ),
        "no swizzle": (changed(DESCRIBE, (" | layout << 62", "")), "is 0: no swizzle; expected 1"),
        "always the swizzle of 128 bytes": (
            changed(DESCRIBE, ("layout << 62", "1ull << 62")),
            "describe(1024, 64, 64, 0): the layout, bits 62 and 63, is 1",
        ),
        "k in bytes": (
            changed(DESCRIBE, ("2 * k / width * panel + 2 * k % width", "k / width * panel + k % width")),
            "describe(1024, 64, 128, 16): the start address, bits 0 to 13, says 1040 bytes, expected 1056: number 16",
        ),
        "k goes on through the row, whatever the panel": (
            changed(DESCRIBE, ("2 * k / width * panel + 2 * k % width", "2 * k")),
            "describe(1024, 64, 64, 32): the start address, bits 0 to 13, says 1088 bytes, expected 5120: number 32",
        ),
        "panels of 64 rows": (
            changed(DESCRIBE, ("panel = rows * width", "panel = 64 * width")),
            "describe(9216, 72, 64, 32): the start address, bits 0 to 13, says 13312 bytes, expected 13824",
        ),
        "only 14 bits of the address": (
            changed(DESCRIBE, (START, "(start & 0x3FFF) >> 4")),
            "describe(133120, 64, 128, 0): the start address, bits 0 to 13, says 2048 bytes, expected 133120",
        ),
        "an int is shifted by 32": (
            changed(DESCRIBE, (STRIDE, "8 * width >> 4 << 32")),
            "the stride byte offset",
        ),
        "sets a bit of the base offset": (
            changed(DESCRIBE, ("return descriptor", "return 1ull << 49 | descriptor")),
            "bit 49 is set",
        ),
        "another function": (changed(DESCRIBE, ("int k)", "long long k)")), "there is no function"),
    },
    4: {
        "as it was": (_pipeline((PRODUCTS, ""), (STORE, "")), "which the wgmma of line "),
        "only the products are waited for": (_pipeline((STORE, "")), "m = 64, n = 192, k = 64, 2 blocks: "),
        "the wait for the products stands behind the release": (
            _pipeline((PRODUCTS + RELEASE, RELEASE + PRODUCTS)),
            "nothing puts the two in order",
        ),
        "waits for all but two": (
            _pipeline((PRODUCTS, PRODUCTS.replace("<1>", "<2>"))),
            "nothing puts the two in order",
        ),
        "waits for all but one, and gives back the stage that it has just asked to read": (
            _pipeline((RELEASE, "            if (lane == 0) ring.release(phase);\n"), NOT_AGAIN),
            "nothing puts the two in order",
        ),
        "waits before the commit, and so not for these": (
            _pipeline(("            wgmma_commit();\n" + PRODUCTS, PRODUCTS + "            wgmma_commit();\n")),
            "nothing puts the two in order",
        ),
        "each step waits for its own products": (
            _pipeline((PRODUCTS, PRODUCTS.replace("<1>", "<0>"))),
            "right, but each step waits for its own products",
        ),
        "waits for all in the loop, and for all but one behind it": (
            _pipeline(
                (PRODUCTS, PRODUCTS.replace("<1>", "<0>")), ("        keep(sums)", PRODUCTS + "        keep(sums)")
            ),
            "right, but each step waits for its own products",
        ),
        "every second step waits for its own products": (
            _pipeline((PRODUCTS, "            if (step % 2) wgmma_wait<0>();\n            else wgmma_wait<1>();\n")),
            "right, but some steps wait for their own products",
        ),
        "only the lane that releases waits": (
            _pipeline(
                (PRODUCTS + RELEASE, "if (step > 0 && lane == 0) {\n wgmma_wait<1>();\n ring.release(before);\n}\n"),
            ),
            "wgmma.wait_group is for all threads of a warpgroup together",
        ),
        "one warp of the four waits": (
            _pipeline((PRODUCTS, "            if (warp == 0) wgmma_wait<1>();\n")),
            "wgmma_wait is for all threads of a warpgroup together: thread 0 comes to 5 of them, thread 32 to 1",
        ),
        "waits for the store in the midst of writing": (
            _pipeline((STORE, ""), ("        fence_async_proxy();\n", STORE + "        fence_async_proxy();\n")),
            "m = 64, n = 192, k = 64, 2 blocks: ",
        ),
        "waits for the store behind the barrier": (
            _pipeline((STORE + READ, READ + STORE)),
            "m = 64, n = 192, k = 64, 2 blocks: ",
        ),
        "another thread waits for the store": (
            _pipeline((STORE, STORE.replace("thread == 0", "thread == 32"))),
            "m = 64, n = 192, k = 64, 2 blocks: ",
        ),
        "all stores but one": (
            _pipeline((STORE, STORE.replace("store_wait_read()", "store_wait_read<1>()"))),
            "m = 64, n = 192, k = 64, 2 blocks: ",
        ),
        "waits for the others at a barrier of the whole block": (
            _pipeline((READ, "        __syncthreads();\n")),
            "every thread that is left waits",
        ),
    },
    5: {
        "one row after the other": (
            _tile(NUMBER + "    return {number / columns, number % columns};"),
            "right, but not for L2: at 64 × 64 tiles on 132 blocks, the tiles of a round need 67.0 strips",
        ),
        "one column after the other": (
            _tile(NUMBER + "    return {number % rows, number / rows};"),
            "right, but not for L2: at 64 × 64 tiles on 132 blocks",
        ),
        "bands of two rows": (
            changed(TILE, ("16", "2")),
            "right, but not for L2: at 64 × 64 tiles on 132 blocks",
        ),
        "a band's rows one after the other": (
            _tile(
                NUMBER + "    const int band = number / (16 * columns), in_band = number % (16 * columns);\n"
                "    return {16 * band + in_band / columns, in_band % columns};"
            ),
            "right, but not for L2: at 64 × 64 tiles on 132 blocks",
        ),
        "each block has a piece of the line": (
            _tile(
                "    const int many = (rows * columns + blocks - 1) / blocks, number = block * many + round;\n"
                "    if (round >= many || number >= rows * columns) return {-1, -1};\n" + BANDS
            ),
            "right, but not for L2: at 64 × 64 tiles on 132 blocks",
        ),
        "the last band is taken for as high as the others": (
            changed(TILE, ("min(16, rows - 16 * band)", "16")),
            "wrong at 3 × 5 tiles on 1 block: block 0 in round 3 gets tile (3, 0), which lies outside",
        ),
        "the last band is left out": (
            changed(TILE, ("number >= rows * columns", "number >= rows / 16 * 16 * columns")),
            "wrong at 1 × 1 tiles on 1 block: nobody gets tile (0, 0)",
        ),
        "all bands are as high as the last": (
            changed(TILE, ("min(16, rows - 16 * band)", "(rows - 1) % 16 + 1")),
            "tiles on 8 blocks: ",
        ),
        "rows and columns change places": (
            changed(
                TILE,
                (
                    "{16 * band + in_band % height, in_band / height}",
                    "{in_band / height, 16 * band + in_band % height}",
                ),
            ),
            "wrong at 3 × 5 tiles on 1 block: block 0 in round 9 gets tile (3, 0), which",
        ),
        "one round after the other takes the next block's tile": (
            changed(TILE, ("round * blocks + block", "round + block")),
            "wrong at 5 × 3 tiles on 4 blocks: block 1 in round 0 gets tile (1, 0), and so does block 0 in round 1",
        ),
        "a tile too many": (changed(TILE, ("number >=", "number >")), "wrong at 1 × 1 tiles on 1 block: block 0 in"),
        "never ends": (
            changed(TILE, ("if (number >= rows * columns) return {-1, -1};", "")),
            "wrong at 1 × 1 tiles on 1 block: block 0 in round 1 gets tile",
        ),
        "begins with tile 1": (
            changed(TILE, ("round * blocks + block", "round * blocks + block + 1")),
            "wrong at 1 × 1 tiles on 1 block: nobody gets tile (0, 0)",
        ),
        "one block does it all": (
            changed(TILE, ("round * blocks + block;", "block ? rows * columns : round;")),
            "not shared at 5 × 3 tiles on 4 blocks: block 0 has more than 4; 4 tiles a block are enough",
        ),
        "only the first round": (
            changed(TILE, ("number >= rows", "round > 0 || number >= rows")),
            "nobody gets tile",
        ),
        "ends a round early": (
            changed(TILE, ("number >= rows * columns", "(round + 1) * blocks > rows * columns")),
            "wrong at 1 × 1 tiles on 4 blocks: nobody gets tile (0, 0)",
        ),
        "squares, without what is left over at the edge": (
            _tile(
                "    const int side = 12, across = columns / side, number = round * blocks + block;\n"
                "    const int square = number / 144, in = number % 144;\n"
                "    if (!across || square >= across * (rows / side)) return {-1, -1};\n"
                "    return {square / across * side + in / side, square % across * side + in % side};"
            ),
            "nobody gets tile",
        ),
        "another function": (changed(TILE, ("tile_of", "tile_at")), "there is no function"),
    },
}
