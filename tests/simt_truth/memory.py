"""Launches about memory: which requests and sectors do loads, stores, atomics and asynchronous copies cost?"""

import re

import numpy as np

from simt_truth import Launch, random

GRID, BLOCK = 2, 128
N = GRID * BLOCK
HALF = "#include <cuda_fp16.h>\n"
POISON = -77  # what a buffer holds where a launch must not write


def poison(size, dtype=np.float32):
    return np.full(size, POISON, dtype)


def whole(name, size, dtype):
    """Small whole numbers, whose sums are exact in any order."""
    return (random(name, size, np.int32) % 64).astype(dtype)


def permutation(name, size):
    return np.argsort(random(name, size), kind="stable").astype(np.int32)


# Loads and stores by stride, offset and element. The other side of each copy is contiguous.

LOAD = """\
extern "C" __global__ void load(const TYPE *x, TYPE *y, int stride, int offset) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = x[i * stride + offset];
}
"""

STORE = """\
extern "C" __global__ void store(const TYPE *x, TYPE *y, int stride, int offset) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i * stride + offset] = x[i];
}
"""


def load(name, stride=1, offset=0, type="float", dtype=np.float32, width=1, include="", source=LOAD):
    size = ((N - 1) * stride + offset + 1) * width

    def expected(x, y, stride, offset):
        return [x.reshape(-1, width)[offset::stride].ravel()]

    args = [random(name, size, dtype), poison(N * width, dtype), np.int32(stride), np.int32(offset)]
    return Launch(name, include + source.replace("TYPE", type), "load", GRID, BLOCK, args, (1,), expected)


def store(name, stride=1, offset=0, type="float", dtype=np.float32, width=1):
    size = ((N - 1) * stride + offset + 1) * width

    def expected(x, y, stride, offset):
        y = y.copy()
        y.reshape(-1, width)[offset::stride] = x.reshape(-1, width)
        return [y]

    args = [random(name, N * width, dtype), poison(size, dtype), np.int32(stride), np.int32(offset)]
    return Launch(name, STORE.replace("TYPE", type), "store", GRID, BLOCK, args, (1,), expected)


STRIDES = [load(f"load_stride_{s}_float", stride=s) for s in (1, 2, 3, 4, 8, 16, 32, 33)]
OFFSETS = [load(f"load_offset_{o}_float", offset=o) for o in (1, 2, 4, 7, 8, 16, 31)]  # offset 0 is stride 1
WIDTHS = [
    load("copy_char", type="char", dtype=np.int8),
    load("copy_short", type="short", dtype=np.int16),
    load("copy_half", type="__half", dtype=np.float16, include=HALF),
    load("copy_half2", type="__half2", dtype=np.float16, width=2, include=HALF),
    load("copy_double", type="double", dtype=np.float64),
    load("copy_float2", type="float2", width=2),
    load("copy_float4", type="float4", width=4),
    load("load_offset_1_float4", type="float4", width=4, offset=1),
    load("load_stride_2_float4", type="float4", width=4, stride=2),
]
STORES = [
    store("store_stride_2_float", stride=2),
    store("store_stride_32_float", stride=32),
    store("store_offset_1_float", offset=1),
    store("store_stride_2_float4", type="float4", width=4, stride=2),
    store("store_offset_1_short", type="short", dtype=np.int16, offset=1),
]
LDG = LOAD.replace("x[i * stride + offset]", "__ldg(x + i * stride + offset)")
RESTRICT = LOAD.replace("*x, TYPE *y", "*__restrict__ x, TYPE *__restrict__ y")
READ_ONLY = [
    load("load_ldg_stride_2", stride=2, source=LDG),
    load("load_restrict_stride_2", stride=2, source=RESTRICT),
]


# One statement per launch: i counts the threads of the grid, and NumPy says what they read or write.


def statement(name, code, args, outputs, expected, grid=GRID, block=BLOCK, include=""):
    """args: {"float *y": array}, in the order of the parameters, of which `outputs` are the positions written."""
    if re.search(r"\bi\b", code):  # else the compiler warns
        code = "int i = blockIdx.x * blockDim.x + threadIdx.x;\n    " + code
    source = f"""\
{include}extern "C" __global__ void run({", ".join(args)}) {{
    {code}
}}
"""
    return Launch(name, source, "run", grid, block, list(args.values()), outputs, expected)


def pattern(name, index, where, size):
    """y[i] = x[index], where `where` is the same index as an array over the threads."""
    args = {"const float *x": random(name, size), "float *y": poison(N)}
    return statement(name, f"y[i] = x[{index}];", args, (1,), lambda x, y: [x[where]])


def some(name, condition, on, grid=GRID, block=BLOCK):
    """if (condition) y[i] = x[i], where `on` says the same of every thread of the grid."""
    n = grid * block
    args = {"const float *x": random(name, n), "float *y": poison(n)}
    code = f"if ({condition}) y[i] = x[i];"
    return statement(name, code, args, (1,), lambda x, y: [np.where(on, x, y)], grid, block)


THREAD = np.arange(N)
LANE = THREAD % 32

PATTERNS = [
    pattern("load_broadcast", "0", np.zeros(N, int), 1),
    pattern("load_reversed", f"{N - 1} - i", THREAD[::-1], N),
    pattern("load_two_addresses", "(i % 2) * 40", np.tile([0, 40], N // 2), 41),
    pattern("load_half_warps_apart", "i + (i % 32) / 16 * 1000", np.where(LANE < 16, THREAD, THREAD + 1000), N + 1000),
    statement(
        "load_gather",
        "y[i] = x[where[i]];",
        {
            "const float *x": random("load_gather", 4096),
            "const int *where": permutation("load_gather", 4096)[:N],
            "float *y": poison(N),
        },
        (2,),
        lambda x, where, y: [x[where]],
    ),
]

LANES_OFF = [
    some("lanes_odd_only", "threadIdx.x % 2", THREAD % 2 == 1),
    some("lanes_first_17_of_block", "threadIdx.x < 17", THREAD % BLOCK < 17),  # three warps of four have nothing to do
    some("lanes_block_of_33", "i < 99", np.ones(99, bool), grid=3, block=33),
    some("lanes_block_of_100_tail", "i < 250", np.arange(300) < 250, grid=3, block=100),
]


def scatter(x, where, y):
    y = y.copy()
    y[where] = x
    return [y]


MORE_STORES = [
    statement(
        "store_reversed",
        f"y[{N - 1} - i] = x[i];",
        {"const float *x": random("store_reversed", N), "float *y": poison(N)},
        (1,),
        lambda x, y: [x[::-1].copy()],
    ),
    statement(
        "store_scatter",
        "y[where[i]] = x[i];",
        {
            "const float *x": random("store_scatter", N),
            "const int *where": permutation("store_scatter", 4096)[:N],
            "float *y": poison(4096),
        },
        (2,),
        scatter,
    ),
    statement(
        "store_same_address",
        "y[i / 32] = value;",  # all the lanes of a warp store the same value
        {"float *y": poison(N // 32 + 8), "float value": np.float32(1.5)},
        (0,),
        lambda y, value: [np.concatenate([np.full(N // 32, value), y[N // 32 :]])],
    ),
    statement(
        "store_one_lane_per_warp",
        "if (threadIdx.x % 32 == 0) y[i / 32] = x[i];",  # 32 warps, a row each: one of four sectors is asked for
        {"const float *x": random("store_one_lane_per_warp", 1024), "float *y": poison(40)},
        (1,),
        lambda x, y: [np.concatenate([x[::32], y[32:]])],
        grid=8,
    ),
    statement(
        "read_modify_write",
        "y[i] = y[i] * 2.0f + 1.0f;",  # twice a float is exact: with or without FMA
        {"float *y": random("read_modify_write", N)},
        (0,),
        lambda y: [y * np.float32(2) + np.float32(1)],
    ),
]

# 16 bytes of a buffer of shorts in one load.
SHORTS = random("load_int4_of_shorts", 8 * N, np.int16)
REINTERPRET = [
    statement(
        "load_int4_of_shorts",
        """\
int4 v = reinterpret_cast<const int4 *>(x)[i];
    const short *s = reinterpret_cast<const short *>(&v);
    int sum = 0;
    for (int j = 0; j < 8; j++) sum += s[j];
    y[i] = sum;""",
        {"const short *x": SHORTS, "int *y": poison(N, np.int32)},
        (1,),
        lambda x, y: [x.reshape(-1, 8).sum(1, dtype=np.int32)],
    ),
]


# Atomics. red: nobody reads the returned value; atom: it is stored. Values are whole numbers: sums are exact.


def red(name, code, type, dtype, where, update, stay=0, include="", width=1):
    """`code` updates y by x[i]; `where` are the elements of y that the threads meet; update is the ufunc."""
    size = (int(where.max()) + 1 + stay) * width

    def expected(x, y):
        y = y.copy()
        update.at(y.reshape(-1, width), where, x.reshape(-1, width))
        return [y]

    args = {f"const {type} *x": whole(name + " x", N * width, dtype), f"{type} *y": whole(name, size, dtype)}
    return statement(name, code, args, (1,), expected, include=include)


def atom(name, code, type, dtype, stride, new):
    """`code` updates y[i * stride] by x[i] and stores what was there as old[i]; `new` of (there, x) is there after."""

    def expected(x, y, old):
        after = y.copy()
        after[::stride] = new(y[::stride], x)
        return [after, y[::stride].copy()]

    args = {
        f"const {type} *x": whole(name + " x", N, dtype),
        f"{type} *y": whole(name, N * stride, dtype),
        f"{type} *old": np.full(N, 77, dtype),
    }
    return statement(name, code, args, (1, 2), expected)


CAS = random("atom_cas y", N, np.int32)

ATOMICS = [
    statement(
        "red_add_int_one_counter",
        "atomicAdd(y, 1);",  # ptxas sees that the address is uniform and may add once per warp
        {"int *y": np.array([5, POISON], np.int32)},
        (0,),
        lambda y: [y + np.array([N, 0], np.int32)],
    ),
    statement(
        "red_add_int_same_address",
        "atomicAdd(&y[where[i]], x[i]);",  # ... and here it cannot see it
        {
            "const int *x": whole("red_add_int_same_address", N, np.int32),
            "const int *where": np.ones(N, np.int32),
            "int *y": np.array([POISON, 5, POISON], np.int32),
        },
        (2,),
        lambda x, where, y: [y + np.array([0, x.sum(), 0], np.int32)],
    ),
    statement(
        "atom_add_int_one_counter",
        "y[atomicAdd(count, 1)] = 7.0f;",  # one warp: the places are 0 to 31 in some order
        {"int *count": np.zeros(1, np.int32), "float *y": poison(64)},
        (0, 1),
        lambda count, y: [count + np.int32(32), np.where(np.arange(64) < 32, np.float32(7), y)],
        grid=1,
        block=32,
    ),
    statement(
        "atom_add_int_same_address",
        "y[atomicAdd(&count[where[i]], 1)] = 7.0f;",
        {"const int *where": np.ones(32, np.int32), "int *count": np.zeros(2, np.int32), "float *y": poison(64)},
        (1, 2),
        lambda where, count, y: [
            count + np.array([0, 32], np.int32),
            np.where(np.arange(64) < 32, np.float32(7), y),
        ],
        grid=1,
        block=32,
    ),
    red("red_add_int_distinct", "atomicAdd(&y[i], x[i]);", "int", np.int32, THREAD, np.add),
    red("red_add_int_stride_2", "atomicAdd(&y[i * 2], x[i]);", "int", np.int32, THREAD * 2, np.add, stay=1),
    atom("atom_add_int_distinct", "old[i] = atomicAdd(&y[i], x[i]);", "int", np.int32, 1, np.add),
    atom("atom_add_int_stride_2", "old[i] = atomicAdd(&y[i * 2], x[i]);", "int", np.int32, 2, np.add),
    red("red_add_float_distinct", "atomicAdd(&y[i], x[i]);", "float", np.float32, THREAD, np.add),
    red("red_add_float_8_bins", "atomicAdd(&y[i % 8], x[i]);", "float", np.float32, THREAD % 8, np.add),
    atom("atom_add_float_distinct", "old[i] = atomicAdd(&y[i], x[i]);", "float", np.float32, 1, np.add),
    red("red_add_double_distinct", "atomicAdd(&y[i], x[i]);", "double", np.float64, THREAD, np.add),
    red(
        "red_add_half2_distinct",
        "atomicAdd(&y[i], x[i]);",
        "__half2",
        np.float16,
        THREAD,
        np.add,
        include=HALF,
        width=2,
    ),
    red("red_add_ull_distinct", "atomicAdd(&y[i], x[i]);", "unsigned long long", np.uint64, THREAD, np.add),
    red("red_max_int_by_4", "atomicMax(&y[i / 4], x[i]);", "int", np.int32, THREAD // 4, np.maximum),
    atom("atom_min_int_distinct", "old[i] = atomicMin(&y[i], x[i]);", "int", np.int32, 1, np.minimum),
    atom("atom_exch_int_distinct", "old[i] = atomicExch(&y[i], x[i]);", "int", np.int32, 1, lambda there, x: x),
    statement(
        "atom_cas_int_distinct",
        "old[i] = atomicCAS(&y[i], compare[i], x[i]);",
        {
            "const int *compare": np.where(THREAD % 3 == 0, CAS, -1).astype(np.int32),
            "const int *x": random("atom_cas x", N, np.int32),
            "int *y": CAS,
            "int *old": poison(N, np.int32),
        },
        (2, 3),
        lambda compare, x, y, old: [np.where(y == compare, x, y), y.copy()],
    ),
    red("red_or_by_4", "atomicOr(&y[i / 4], x[i]);", "unsigned", np.uint32, THREAD // 4, np.bitwise_or),
    red("red_and_distinct", "atomicAnd(&y[i], x[i]);", "unsigned", np.uint32, THREAD, np.bitwise_and),
    atom("atom_xor_distinct", "old[i] = atomicXor(&y[i], x[i]);", "unsigned", np.uint32, 1, np.bitwise_xor),
]


# Local memory: an array that is indexed by what only the run knows.

ORDER = np.argsort(random("local order", (16, N)), axis=0, kind="stable").astype(np.int32)


def local_scatter(x, where, y):
    a = np.empty((16, N), np.float32)
    np.put_along_axis(a, where.reshape(16, N), x.reshape(16, N), axis=0)
    return [np.take_along_axis(a, (np.arange(16)[:, None] + THREAD) % 16, axis=0).ravel()]


LOCAL = [
    statement(
        "local_store_and_load_by_index",
        f"""\
float a[16];
    for (int j = 0; j < 16; j++) a[where[j * {N} + i]] = x[j * {N} + i];
    for (int j = 0; j < 16; j++) y[j * {N} + i] = a[(j + i) % 16];""",
        {
            "const float *x": random("local_store_and_load_by_index", 16 * N),
            "const int *where": ORDER.ravel(),
            "float *y": poison(16 * N),
        },
        (2,),
        local_scatter,
    ),
    statement(
        "local_load_by_index",  # four elements: ptxas may select among registers instead
        f"""\
float a[4];
    for (int j = 0; j < 4; j++) a[j] = x[j * {N} + i];
    y[i] = a[where[i]];""",
        {
            "const float *x": random("local_load_by_index", 4 * N),
            "const int *where": random("local_load_by_index where", N, np.int32) % 4,
            "float *y": poison(N),
        },
        (2,),
        lambda x, where, y: [x.reshape(4, N)[where, THREAD]],
    ),
]


# Two and three dimensions, and a loop over the grid.

MATRIX = """\
extern "C" __global__ void matrix(const float *x, float *y, int rows, int columns) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row < rows && column < columns) y[TO] = x[FROM];
}
"""
BY_ROW, BY_COLUMN = "row * columns + column", "column * rows + row"


def matrix(name, to, source, rows, columns, block, expected):
    grid = (-(-columns // block[0]), -(-rows // block[1]))
    args = [random(name, rows * columns), poison(rows * columns), np.int32(rows), np.int32(columns)]
    code = MATRIX.replace("TO", to).replace("FROM", source)
    return Launch(name, code, "matrix", grid, block, args, (1,), expected)


def same(x, y, rows, columns):
    return [x.copy()]


def from_columns(x, y, rows, columns):
    return [x.reshape(columns, rows).T.ravel()]


def to_columns(x, y, rows, columns):
    return [x.reshape(rows, columns).T.ravel()]


DIMENSIONS = [
    matrix("matrix_by_row_tail", BY_ROW, BY_ROW, 37, 50, (16, 8), same),
    matrix("matrix_load_by_column_tail", BY_ROW, BY_COLUMN, 37, 50, (16, 16), from_columns),
    matrix("matrix_store_by_column", BY_COLUMN, BY_ROW, 32, 64, (32, 8), to_columns),
    Launch(
        "cube",
        """\
extern "C" __global__ void cube(const float *from, float *to) {
    int x = blockIdx.x * blockDim.x + threadIdx.x;
    int y = blockIdx.y * blockDim.y + threadIdx.y;
    int z = blockIdx.z * blockDim.z + threadIdx.z;
    to[(z * 6 + y) * 8 + x] = from[(x * 6 + y) * 4 + z];
}
""",
        "cube",
        (2, 2, 2),
        (4, 3, 2),
        [random("cube", 8 * 6 * 4), poison(8 * 6 * 4)],
        (1,),
        lambda x, y: [x.reshape(8, 6, 4).transpose(2, 1, 0).ravel()],
    ),
    Launch(
        "copy_grid_stride_tail",
        """\
extern "C" __global__ void copy(const float *x, float *y, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = x[i];
}
""",
        "copy",
        3,
        96,
        [random("copy_grid_stride_tail", 1003), poison(1024), np.int32(1003)],
        (1,),
        lambda x, y, n: [np.concatenate([x, y[1003:]])],
    ),
]


# cp.async: WIDTH floats a thread to shared memory; another thread stores them.

ASYNC = """\
extern "C" __global__ void copy(const float *x, float *y, int stride, int offset) {
    __shared__ __align__(16) float s[WIDTH * 128];
    int i = blockIdx.x * 128 + threadIdx.x;
    unsigned to = (unsigned)__cvta_generic_to_shared(s + threadIdx.x * WIDTH);
    const float *from = x + (i * stride + offset) * WIDTH;
    asm volatile("cp.async.HOW.shared.global [%0], [%1], BYTES;" :: "r"(to), "l"(from) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    for (int j = 0; j < WIDTH; j++) y[(blockIdx.x * WIDTH + j) * 128 + threadIdx.x] = s[j * 128 + 127 - threadIdx.x];
}
"""


def cp_async(name, bytes_each, how="ca", stride=1, offset=0):
    width = bytes_each // 4
    source = ASYNC.replace("WIDTH", str(width)).replace("HOW", how).replace("BYTES", str(bytes_each))

    def expected(x, y, stride, offset):
        copied = x.reshape(-1, width)[offset::stride]
        return [copied.reshape(GRID, width, BLOCK)[:, :, ::-1].ravel()]

    size = ((N - 1) * stride + offset + 1) * width
    args = [random(name, size), poison(N * width), np.int32(stride), np.int32(offset)]
    return Launch(name, source, "copy", GRID, BLOCK, args, (1,), expected)


CP_ASYNC = [
    cp_async("cp_async_4", 4),
    cp_async("cp_async_4_offset_1", 4, offset=1),
    cp_async("cp_async_4_stride_2", 4, stride=2),
    cp_async("cp_async_8", 8),
    cp_async("cp_async_16_ca", 16),
    cp_async("cp_async_16_cg", 16, how="cg"),
    cp_async("cp_async_16_cg_stride_2", 16, how="cg", stride=2),
]

LAUNCHES = [
    *STRIDES,
    *OFFSETS,
    *WIDTHS,
    *PATTERNS,
    *LANES_OFF,
    *REINTERPRET,
    *READ_ONLY,
    *STORES,
    *MORE_STORES,
    *ATOMICS,
    *LOCAL,
    *DIMENSIONS,
    *CP_ASYNC,
]
