"""The exercises of chapter 14: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
from exercise_contract import SourceContract
from wrong.matmul import (
    COMMITTED,
    HEAD,
    NUMBER,
    PIPELINE,
    PRODUCTS,
    READ,
    READY,
    RIGHT,
    RING,
    STORE,
    TILE,
    USED,
    WAIT_EMPTY,
    WAIT_FULL,
    WRONG,
    _place,
    _tile,
)
from wrong.warp_gemv import changed

import simt
from exercises.checks import matmul as checks
from ref.matmul import tile_order


class TestExercises(SourceContract):
    name, checks, right, wrong = "14_matmul", checks, RIGHT, WRONG
    answers = {
        1: "ring_source",
        2: "place_source",
        3: "describe_source",
        4: "pipeline_source",
        5: "tile_source",
    }
    draws = 1  # and once in the solutions' notebook, whose output is compared
    runs_already = {4: ("not yet: at m = 64, n = 64, k = 256, 1 block: ", "which the wgmma of line")}


judge = TestExercises.judge


# Statements that must be true


@pytest.mark.parametrize("m, n, k, blocks", [(64, 64, 64, 1), (64, 128, 192, 2), (128, 64, 128, 3)])
def test_the_pipelines_author_saw_nothing(m, n, k, blocks, stubs):
    """As the statement says: one tile for each block, up to three steps."""
    kernel = checks.compiled(stubs["pipeline_source"], "matmul", options=(checks.COURSE,), arch=checks.HOPPER)
    rng = np.random.default_rng(k)
    x, W = (rng.integers(-4, 5, (rows, k)).astype(np.float16) for rows in (m, n))
    y = np.full((m, n), np.nan, np.float16)
    maps = [simt.TensorMap(a, (64, 64), swizzle=128) for a in (x, W, y)]
    kernel(blocks, 160, *maps, np.int32(m), np.int32(n), np.int32(k), shared=checks.SHARED)
    assert np.array_equal(y, x.astype(np.float32) @ W.astype(np.float32).T)


def mean_strips(tiles, blocks):
    rounds = [tiles[i : i + blocks] for i in range(0, len(tiles) - blocks, blocks)]
    return np.mean([sum(len(set(side)) for side in zip(*of)) for of in rounds])


def test_as_many_strips_as_the_statement_says():
    squares = [(16 * i + r, 16 * j + c) for i in range(4) for j in range(4) for r in range(16) for c in range(16)]
    for tiles, said in ((list(tile_order(64, 64, 1)), 67), (list(tile_order(64, 64, 16)), 27), (squares, 32)):
        assert round(mean_strips(tiles, 132)) == said
    assert len({r for r, _ in squares}) == 64 and len(set(squares)) == 64 * 64


def test_panels_lie_as_tma_lays_them():
    matrix = np.random.default_rng().permutation(64 * 64).astype(np.uint16).reshape(64, 64)
    places = checks.compiled(RIGHT[2], "places", behind=checks.SWIZZLE, options=(checks.COURSE,), arch=checks.HOPPER)
    for words in (8, 4, 2):
        panels = checks._panels(matrix, 16 * words).reshape(8 // words, 64, 8 * words)
        for panel, box in zip(panels, np.split(matrix, 8 // words, axis=1)):
            laid = np.zeros_like(panel)
            box = simt.TensorMap(box, box.shape, swizzle=16 * words)
            places.module["box"](1, 32, box, laid.reshape(-1), np.int32(words))
            assert np.array_equal(laid, panel)


def test_an_error_in_a_header_names_no_folder_of_this_machine(monkeypatch, capsys):
    monkeypatch.chdir(checks.ROOT / "exercises")  # where learners are
    said = judge(1, "#define STAGES 3\n" + RING).message
    assert "\nkernels/device/hopper/mbarrier.cuh:" in said and str(checks.ROOT) not in said


# Right answers that are not the solution's

TRY = """            for (unsigned over = 0; !over;)
                asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                             "selp.u32 %0, 1, 0, p; }" : "=r"(over) : "r"(full[slot].at()), "r"(parity) : "memory");
"""
RINGS = {
    "a parity that is turned when the slots are through": HEAD
    + READY
    + """    for (int row = 0, slot = 0, phase = 0; row < rows; row++) {
        if (threadIdx.x / 32 == 1) {
            full[slot].wait(phase);
            use(slots[slot], to, row);
            empty[slot].arrive();
        } else {
            empty[slot].wait(1 - phase);
            fill(slots[slot], from, row);
            full[slot].arrive();
        }
        if (++slot == SLOTS) {
            slot = 0;
            phase ^= 1;
        }
    }
}
""",
    "two loops, lane 0 waits and arrives for all": HEAD
    + """    const int lane = threadIdx.x & 31;
    if (threadIdx.x < SLOTS) {
        full[threadIdx.x].init(1);
        empty[threadIdx.x].init(1);
    }
    __syncthreads();
    if (threadIdx.x >= 32) {
        for (int i = 0; i < rows; ++i) {
            if (lane == 0) full[i % SLOTS].wait((i / SLOTS) & 1);
            __syncwarp();
            use(slots[i % SLOTS], to, i);
            __syncwarp();
            if (lane == 0) empty[i % SLOTS].arrive();
        }
        return;
    }
    for (int i = 0; i < rows; ++i) {
        if (lane == 0 && i >= SLOTS) empty[i % SLOTS].wait((i / SLOTS - 1) & 1);
        __syncwarp();
        fill(slots[i % SLOTS], from, i);
        __syncwarp();
        if (lane == 0) full[i % SLOTS].arrive();
    }
}
""",
    "round by round, unrolled": HEAD
    + READY
    + """    for (int round = 0; round * SLOTS < rows; round++)
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) {
            const int row = round * SLOTS + slot;
            if (row >= rows) break;
            if (threadIdx.x < 32) {
                if (round > 0) empty[slot].wait(round - 1 & 1);
                fill(slots[slot], from, row);
                full[slot].arrive();
            } else {
                full[slot].wait(round & 1);
                use(slots[slot], to, row);
                empty[slot].arrive();
            }
        }
}
""",
    "the reader gives all slots back before it begins": changed(
        RING,
        (WAIT_EMPTY, "            empty[slot].wait(parity);\n"),
        (
            "    for (int row",
            "    for (int slot = 0; slot < SLOTS && threadIdx.x >= 32; slot++) empty[slot].arrive();\n    for (int row",
        ),
    ),
    "a loop of its own around try_wait": changed(RING, (WAIT_FULL, TRY)),
    "the last that uses a slot need not give it back": changed(
        RING, (USED, "            if (row + SLOTS < rows) empty[slot].arrive();\n")
    ),
    "what the header has": HEAD.replace(
        "__shared__ Barrier full[SLOTS], empty[SLOTS];", "__shared__ Ring<SLOTS> handed;"
    )
    + """    if (threadIdx.x == 0) handed.init(32, 32);
    __syncthreads();
    Phase<SLOTS> phase;
    for (int row = 0; row < rows; row++, phase.advance())
        if (threadIdx.x < 32) {
            handed.wait_empty(phase);
            fill(slots[phase.stage], from, row);
            handed.full[phase.stage].arrive();
        } else {
            handed.wait_full(phase);
            use(slots[phase.stage], to, row);
            handed.release(phase);
        }
}
""",
}
PLACES = {
    "by the bits of the address": _place(
        "const int at = row * 16 * words + word * 16;\n    return at ^ (at >> 7 & words - 1) << 4;"
    ),
    "by cases": _place(
        "if (words == 8) return row * 128 + (word ^ row % 8) * 16;\n"
        "    if (words == 4) return row * 64 + (word ^ row / 2 % 4) * 16;\n"
        "    return row * 32 + (row / 4 % 2 ? 1 - word : word) * 16;"
    ),
    "by lines and places in them": _place(
        "const int in_line = row % (8 / words) * words, line = row / (8 / words);\n"
        "    return 128 * line + 16 * (in_line + (word ^ line & words - 1));"
    ),
}
DESCRIPTORS = {
    "fields of a struct": """
using Descriptor = unsigned long long;
union Fields {
    struct {
        Descriptor start : 14, : 2, leading : 14, : 2, stride : 14, : 16, layout : 2;
    };
    Descriptor all;
};
__device__ Descriptor describe(unsigned tile, int rows, int width, int k) {
    Fields fields;
    fields.all = 0;
    int byte = 2 * k;
    while (byte >= width) byte -= width, tile += rows * width;
    fields.start = tile + byte >> 4;
    fields.leading = width == 16 ? rows : 1;
    fields.stride = width / 2;
    fields.layout = width == 16 ? 0 : 4 - (31 - __clz(width) - 4);
    return fields.all;
}
""",
    "as the header's, and advanced": """
typedef unsigned long long Descriptor;
__device__ inline Descriptor describe(unsigned tile, const int rows, const int width, const int k) {
    Descriptor d = 0;
    switch (width) {
    case 128: d = (Descriptor)1 << 62; break;
    case 64: d = (Descriptor)2 << 62; break;
    case 32: d = (Descriptor)3 << 62; break;
    default: d = (unsigned long long)rows << 16; // rows * 16 bytes
    }
    const int numbers = width / 2;
    const unsigned at = tile + k / numbers * (rows * width) + k % numbers * 2;
    return d | (Descriptor)width >> 1 << 32 | (at & 0x3FFFF) >> 4;
}
""",
}
PIPELINES = {
    "the store is waited for where it was started": changed(
        PIPELINE, (STORE, ""), (COMMITTED, COMMITTED + "            store_wait_read();\n")
    ),
    "until the store is written, and by all threads": changed(
        PIPELINE, (STORE + READ, "        store_wait();\n" + READ), (PRODUCTS, "            if (step > 0)\n" + PRODUCTS)
    ),
}
TILES = {
    "bands of eight rows, one to the right and one to the left": _tile(
        NUMBER
        + """    int band = 0, left = number;
    while (left >= 8 * columns) left -= 8 * columns, band++;
    const int height = rows - 8 * band < 8 ? rows - 8 * band : 8, column = left / height;
    int2 tile;
    tile.x = 8 * band + left % height;
    tile.y = band & 1 ? columns - 1 - column : column;
    return tile;"""
    ),
    "bands of twelve columns": _tile(
        NUMBER
        + """    const int band = number / (12 * rows), in_band = number % (12 * rows);
    const int width = min(12, columns - band * 12);
    return make_int2(in_band / width, band * 12 + in_band % width);"""
    ),
    "squares of 16 x 16, walked until it is this tile's round": _tile(
        """    int number = round * blocks + block;
    for (int top = 0; top < rows; top += 16)
        for (int left = 0; left < columns; left += 16) {
            const int height = min(16, rows - top), width = min(16, columns - left);
            if (number < height * width) return {top + number / width, left + number % width};
            number -= height * width;
        }
    return {-1, 0};"""
    ),
    "blocks from the other end": changed(TILE, ("+ block", "+ blocks - 1 - block")),
}
OTHERS = {1: RINGS, 2: PLACES, 3: DESCRIPTORS, 4: PIPELINES, 5: TILES}


@pytest.mark.parametrize("number, way", [(number, way) for number, ways in OTHERS.items() for way in ways])
def test_other_right_answers_pass(number, way, capsys):
    exercise = judge(number, OTHERS[number][way])
    assert exercise.passed, exercise.message
