"""Launches about shared memory and arithmetic: bank conflicts, barriers, warps, divergence, number formats, mma."""

import numpy as np

from . import Launch, random

LAUNCHES = []
F32, F64, I32, U32, U64, F16 = np.float32, np.float64, np.int32, np.uint32, np.uint64, np.float16
POISON = -77  # what an output holds where nothing is written


def add(name, source, grid, block, args, outputs, expected, **more):
    LAUNCHES.append(Launch(name, source, "k", grid, block, list(args), outputs, expected, **more))


def poison(shape, dtype=F32):
    dtype = np.dtype(dtype)
    return np.full(shape, 77 if dtype.kind == "u" else POISON, dtype)


def whole(name, shape, low=-8, high=9, dtype=F32):
    """Small whole numbers, so that sums are exact in any order."""
    return (random(name, shape, I32) % (high - low) + low).astype(dtype)


def lanes(n):
    return np.arange(n)


# ---- shared memory: one access pattern a launch ----
# exchange: s[i(t)] = in[t], barrier, out[t] = s[i(T-1-t)]. The same pattern is stored and loaded; every i(t) differs.
# gather:   s filled in order, barrier, out[t] = s[i(t)] where the condition holds.
# scatter:  s filled in order, barrier, s[i(t)] = in[t] where the condition holds, barrier, s read in order.

EXCHANGE = """
extern "C" __global__ void k(const TYPE* in, TYPE* out) {
    __shared__ TYPE s[SIZE];
    int t = threadIdx.x;
    s[INDEX] = in[t];
    __syncthreads();
    t = blockDim.x - 1 - t;
    out[threadIdx.x] = s[INDEX];
}
"""

GATHER = """
extern "C" __global__ void k(const TYPE* in, TYPE* out, const int* index) {
    __shared__ TYPE s[SIZE];
    int t = threadIdx.x;
    for (int i = t; i < SIZE; i += blockDim.x) s[i] = in[i];
    __syncthreads();
    if (WHERE) out[t] = s[INDEX];
}
"""

SCATTER = """
extern "C" __global__ void k(const TYPE* in, TYPE* out) {
    __shared__ TYPE s[SIZE];
    int t = threadIdx.x;
    for (int i = t; i < SIZE; i += blockDim.x) s[i] = in[i];
    __syncthreads();
    if (WHERE) s[INDEX] = in[SIZE + t];
    __syncthreads();
    for (int i = t; i < SIZE; i += blockDim.x) out[i] = s[i];
}
"""

# C type -> NumPy's, components per element
TYPES = {
    "float": (F32, 1),
    "int": (I32, 1),
    "unsigned char": (np.uint8, 1),
    "unsigned short": (np.uint16, 1),
    "double": (F64, 1),
    "float2": (F32, 2),
    "float4": (F32, 4),
}


def fill(template, ctype, size, index, where="true"):
    words = {"TYPE": ctype, "SIZE": size, "INDEX": index, "WHERE": where}
    for word, value in words.items():
        template = template.replace(word, str(value))
    return template


def shape(ctype, n):
    width = TYPES[ctype][1]
    return (n, width) if width > 1 else (n,)


def exchange(name, ctype, index, f, threads=64):
    dtype = TYPES[ctype][0]
    size = int(f(lanes(threads)).max()) + 1
    args = [random(name, shape(ctype, threads), dtype), poison(shape(ctype, threads), dtype)]
    add(name, fill(EXCHANGE, ctype, size, index), 1, threads, args, (1,), lambda x, out: [x[::-1].copy()])


def gather(name, ctype, index, f, where="true", g=None, threads=64, table=None):
    dtype = TYPES[ctype][0]
    size = int(f(lanes(threads)).max()) + 1
    if table is None:
        table = lanes(threads).astype(I32)

    def expected(x, out, table):
        t = lanes(threads)
        t = t if g is None else t[g(t)]
        out = out.copy()
        out[t] = x[f(t)]
        return [out]

    args = [random(name, shape(ctype, size), dtype), poison(shape(ctype, threads), dtype), table]
    add(name, fill(GATHER, ctype, size, index, where), 1, threads, args, (1,), expected)


def scatter(name, ctype, index, f, where="true", g=None, threads=64):
    dtype = TYPES[ctype][0]
    size = int(f(lanes(threads)).max()) + 1

    def expected(x, out):
        t = lanes(threads)
        t = t if g is None else t[g(t)]
        result = x[:size].copy()
        result[f(t)] = x[size + t]
        return [result]

    args = [random(name, shape(ctype, size + threads), dtype), poison(shape(ctype, size), dtype)]
    add(name, fill(SCATTER, ctype, size, index, where), 1, threads, args, (1,), expected)


for stride in 1, 2, 3, 4, 8, 16, 17, 31, 32, 33:
    exchange(f"shared_word_stride_{stride}", "float", f"t * {stride}", lambda t, stride=stride: t * stride)
exchange("shared_word_reversed", "float", "63 - t", lambda t: 63 - t)
exchange("shared_word_odd_tail", "float", "t * 2", lambda t: t * 2, threads=45)  # the second warp has 13 lanes
gather("shared_load_broadcast", "float", "t / 32", lambda t: t // 32)
gather("shared_load_pairs", "float", "t / 2", lambda t: t // 2)
gather("shared_load_twice_16", "float", "t % 16", lambda t: t % 16)
gather("shared_load_four_rows_same_bank", "float", "t / 8 * 32", lambda t: t // 8 * 32)  # 4 words, 8 lanes each
gather("shared_load_rows_and_pairs", "float", "t / 2 % 4 * 32 + t / 8", lambda t: t // 2 % 4 * 32 + t // 8)
gather("shared_load_even_lanes", "float", "t * 2", lambda t: t * 2, "t % 2 == 0", lambda t: t % 2 == 0)
permutation = np.argsort(random("shared_load_permutation", 64), kind="stable").astype(I32)
gather("shared_load_permutation", "float", "index[t]", lambda t: permutation[t], table=permutation)
anywhere = random("shared_load_random", 256, I32) % 1024
anywhere[7] = 1023
gather("shared_load_random", "float", "index[t]", lambda t: anywhere[t], table=anywhere, threads=256)
scatter("shared_store_few_lanes", "float", "t * 32", lambda t: t * 32, "t % 32 < 5", lambda t: t % 32 < 5)

exchange("shared_8bit_stride_1", "unsigned char", "t", lambda t: t)
exchange("shared_8bit_stride_3", "unsigned char", "t * 3", lambda t: t * 3)
exchange("shared_8bit_stride_128", "unsigned char", "t * 128", lambda t: t * 128)
exchange("shared_16bit_stride_1", "unsigned short", "t", lambda t: t)
exchange("shared_16bit_stride_6", "unsigned short", "t * 6", lambda t: t * 6)
exchange("shared_16bit_stride_64", "unsigned short", "t * 64", lambda t: t * 64)

for stride in 1, 2, 3, 16:
    exchange(f"shared_double_stride_{stride}", "double", f"t * {stride}", lambda t, stride=stride: t * stride)
exchange("shared_float2_stride_17", "float2", "t * 17", lambda t: t * 17)
gather("shared_float2_pairs", "float2", "t / 2", lambda t: t // 2)
gather("shared_float2_pairs_conflict", "float2", "t / 2 * 16", lambda t: t // 2 * 16)
gather("shared_double_even_lanes", "double", "t", lambda t: t, "t % 2 == 0", lambda t: t % 2 == 0)
gather("shared_double_few_lanes", "double", "t * 16", lambda t: t * 16, "t % 32 < 9", lambda t: t % 32 < 9)
scatter("shared_double_store_upper_half", "double", "t * 4", lambda t: t * 4, "t % 32 >= 16", lambda t: t % 32 >= 16)
for stride in 1, 2, 3, 8:
    exchange(f"shared_float4_stride_{stride}", "float4", f"t * {stride}", lambda t, stride=stride: t * stride)
gather("shared_float4_pairs", "float4", "t / 2", lambda t: t // 2)
gather("shared_float4_twins_2_apart", "float4", "t / 4 * 2 + t % 2", lambda t: t // 4 * 2 + t % 2)
gather("shared_float4_twins_4_apart", "float4", "t / 8 * 4 + t % 4", lambda t: t // 8 * 4 + t % 4)
gather("shared_float4_broadcast", "float4", "t / 32", lambda t: t // 32)
gather("shared_float4_every_fourth_lane", "float4", "t", lambda t: t, "t % 4 == 0", lambda t: t % 4 == 0)
gather("shared_float4_few_lanes", "float4", "t * 8", lambda t: t * 8, "t % 32 < 5", lambda t: t % 32 < 5)
scatter("shared_float4_store_odd_lanes", "float4", "t * 2", lambda t: t * 2, "t % 2", lambda t: t % 2 == 1)

add(
    "shared_dynamic_two_arrays",
    """
extern "C" __global__ void k(const float* a, const int* b, float* out, int n) {
    extern __shared__ float s[];
    int* whole = (int*)(s + n);
    int t = threadIdx.x, i = blockIdx.x * n + t;
    s[t] = a[i];
    whole[t * 2] = b[i];
    __syncthreads();
    out[i] = s[n - 1 - t] + (float)whole[(n - 1 - t) * 2];
}
""",
    3,
    96,
    [random("dynamic a", 288), random("dynamic b", 288, I32), poison(288), I32(96)],
    (2,),
    lambda a, b, out, n: [(a + b.astype(F32)).reshape(3, 96)[:, ::-1].reshape(-1)],
    shared=96 * 12,
)

TRANSPOSE = """
extern "C" __global__ void k(const float* in, float* out, int rows, int cols) {
    __shared__ float tile[32][PITCH];
    int x = threadIdx.x, x0 = blockIdx.x * 32, y0 = blockIdx.y * 32;
    for (int y = threadIdx.y; y < 32; y += 8)
        if (y0 + y < rows && x0 + x < cols) tile[y][STORE] = in[(y0 + y) * cols + x0 + x];
    __syncthreads();
    for (int y = threadIdx.y; y < 32; y += 8)
        if (x0 + y < cols && y0 + x < rows) out[(x0 + y) * rows + y0 + x] = tile[x][LOAD];
}
"""
for name, pitch, store, load, rows, cols in [
    ("plain", 32, "x", "y", 64, 64),
    ("padded", 33, "x", "y", 64, 64),
    ("swizzled", 32, "x ^ y", "y ^ x", 64, 64),
    ("padded_edges", 33, "x", "y", 50, 70),
]:
    source = TRANSPOSE.replace("PITCH", str(pitch)).replace("STORE", store).replace("LOAD", load)
    add(
        f"transpose_{name}",
        source,
        (-(-cols // 32), -(-rows // 32)),
        (32, 8),
        [random(f"transpose {name}", (rows, cols)), poison((cols, rows)), I32(rows), I32(cols)],
        (1,),
        lambda x, out, rows, cols: [x.T.copy()],
    )

# ---- shared atomics ----

ATOMIC = """
extern "C" __global__ void k(const TYPE* in, TYPE* out, const int* bin) {
    __shared__ TYPE s[64];
    int t = threadIdx.x;
    if (t < 64) s[t] = 0;
    __syncthreads();
    CALL;
    __syncthreads();
    if (t < 64) out[blockIdx.x * 64 + t] = s[t];
}
"""


def atomic(name, ctype, call, bins, ufunc=np.add):
    dtype = TYPES[ctype][0]

    def expected(x, out, bin):
        result = np.zeros((2, 64), dtype)
        for b in range(2):
            ufunc.at(result[b], bins(lanes(128), bin[b]), x[b])
        return [result]

    args = [whole(name, (2, 128), 1, 20, dtype), poison((2, 64), dtype), random(name + " bin", (2, 128), I32) % 64]
    source = ATOMIC.replace("TYPE", ctype).replace("CALL", call)
    add(name, source, 2, 128, args, (1,), expected)


atomic("shared_atomic_same_address", "int", "atomicAdd(&s[3], in[blockIdx.x * 128 + t])", lambda t, bin: t * 0 + 3)
atomic("shared_atomic_distinct", "int", "atomicAdd(&s[t % 64], in[blockIdx.x * 128 + t])", lambda t, bin: t % 64)
atomic(
    "shared_atomic_bins",
    "int",
    "atomicAdd(&s[bin[blockIdx.x * 128 + t]], in[blockIdx.x * 128 + t])",
    lambda t, bin: bin,
)
atomic("shared_atomic_max", "int", "atomicMax(&s[t / 4], in[blockIdx.x * 128 + t])", lambda t, bin: t // 4, np.maximum)
atomic(
    "shared_atomic_float_distinct", "float", "atomicAdd(&s[t % 64], in[blockIdx.x * 128 + t])", lambda t, bin: t % 64
)
atomic("shared_atomic_float_same_address", "float", "atomicAdd(&s[0], in[blockIdx.x * 128 + t])", lambda t, bin: t * 0)

add(
    "shared_atomic_ticket",
    """
extern "C" __global__ void k(const int* in, int* out, int* count) {
    __shared__ int next;
    int t = threadIdx.x;
    if (t == 0) next = 0;
    __syncthreads();
    if (in[t] & 1) out[atomicAdd(&next, 1)] = 5;
    __syncthreads();
    if (t == 0) count[0] = next;
}
""",
    1,
    96,
    [random("ticket", 96, I32), poison(96, I32), poison(1, I32)],
    (1, 2),
    lambda x, out, count: [np.where(lanes(96) < (x & 1).sum(), 5, POISON).astype(I32), np.array([(x & 1).sum()], I32)],
)

# ---- blocks that work together ----

MATMUL = """
extern "C" __global__ void k(const float* a, const float* b, float* c, int m, int n, int depth) {
    __shared__ float as[TILE][TILE + PAD], bs[TILE][TILE + PAD];
    int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * TILE + y, col = blockIdx.x * TILE + x;
    float sum = 0;
    for (int k0 = 0; k0 < depth; k0 += TILE) {
        as[y][x] = row < m && k0 + x < depth ? a[row * depth + k0 + x] : 0.0f;
        bs[y][x] = k0 + y < depth && col < n ? b[(k0 + y) * n + col] : 0.0f;
        __syncthreads();
        for (int i = 0; i < TILE; i++) sum += as[y][i] * bs[i][x];
        __syncthreads();
    }
    if (row < m && col < n) c[row * n + col] = sum;
}
"""
for tile, pad, m, n in (16, 0, 32, 32), (16, 1, 32, 32), (32, 0, 32, 32), (32, 1, 32, 32), (16, 0, 21, 35):
    name = f"matmul_tile_{tile}_pad_{pad}_{m}x{n}"
    a, b = whole(name + " a", (m, 48)), whole(name + " b", (48, n))
    add(
        name,
        MATMUL,
        (-(-n // tile), -(-m // tile)),
        (tile, tile),
        [a, b, poison((m, n)), I32(m), I32(n), I32(48)],
        (2,),
        lambda a, b, c, m, n, depth: [(a.astype(F64) @ b.astype(F64)).astype(F32)],
        options=(f"-DTILE={tile}", f"-DPAD={pad}"),
    )

# b transposed in shared memory, so that one column is a column of the tile: conflicts unless padded
add(
    "matmul_b_transposed_conflicts",
    MATMUL.replace("bs[y][x] =", "bs[x][y] =").replace("bs[i][x]", "bs[x][i]"),
    (2, 2),
    (16, 16),
    [whole("mbt a", (32, 48)), whole("mbt b", (48, 32)), poison((32, 32)), I32(32), I32(32), I32(48)],
    (2,),
    lambda a, b, c, m, n, depth: [a @ b],
    options=("-DTILE=16", "-DPAD=0"),
)

REDUCE = """
extern "C" __global__ void k(const float* in, float* out, int n) {
    __shared__ float s[256];
    int t = threadIdx.x, i = blockIdx.x * 256 + t;
    s[t] = i < n ? in[i] : 0.0f;
    __syncthreads();
    LOOP
    if (t == 0) out[blockIdx.x] = s[0];
}
"""
for name, loop in {
    "sequential": "for (int d = 128; d; d /= 2) { if (t < d) s[t] += s[t + d]; __syncthreads(); }",
    "interleaved": "for (int d = 1; d < 256; d *= 2) { if (t % (2 * d) == 0) s[t] += s[t + d]; __syncthreads(); }",
    "interleaved_dense": "for (int d = 1; d < 256; d *= 2) { int j = 2 * d * t; if (j < 256) s[j] += s[j + d]; "
    "__syncthreads(); }",
}.items():
    add(
        f"reduce_{name}",
        REDUCE.replace("LOOP", loop),
        4,
        256,
        [whole(name, 1000), poison(4), I32(1000)],
        (1,),
        lambda x, out, n: [np.append(x, np.zeros(24, F32)).reshape(4, 256).sum(1)],
    )

add(
    "scan_hillis_steele",
    """
extern "C" __global__ void k(const int* in, int* out) {
    __shared__ int s[2][128];
    int t = threadIdx.x, from = 0;
    s[0][t] = in[blockIdx.x * 128 + t];
    __syncthreads();
    for (int d = 1; d < 128; d *= 2) {
        s[1 - from][t] = s[from][t] + (t >= d ? s[from][t - d] : 0);
        from = 1 - from;
        __syncthreads();
    }
    out[blockIdx.x * 128 + t] = s[from][t];
}
""",
    2,
    128,
    [random("scan", (2, 128), I32), poison((2, 128), I32)],
    (1,),
    lambda x, out: [np.cumsum(x, axis=1, dtype=I32)],
)

# ---- warps: shuffles, votes ----

WARP = """
extern "C" __global__ void k(const TYPE* in, TYPE* out) {
    int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
    TYPE x = in[i];
    BODY
    out[i] = x;
}
"""
EACH = "0xffffffffu, x"


def warp(name, ctype, body, f, threads=64, x=None):
    """f maps the (warps, 32) inputs to the (warps, 32) outputs."""
    dtype = {"unsigned": U32}.get(ctype) or TYPES[ctype][0]
    x = random(name, threads * 2, dtype) if x is None else x
    add(
        name,
        WARP.replace("TYPE", ctype).replace("BODY", body),
        2,
        threads,
        [x, poison(x.shape, dtype)],
        (1,),
        lambda x, out: [np.ascontiguousarray(f(x.reshape(-1, 32)), dtype).reshape(-1)],
    )


L = np.arange(32)
warp("shuffle_broadcast", "float", f"x = __shfl_sync({EACH}, 7);", lambda x: np.broadcast_to(x[:, 7:8], x.shape))
warp("shuffle_rotate", "float", f"x = __shfl_sync({EACH}, t + 3);", lambda x: np.roll(x, -3, 1))
warp("shuffle_up", "float", f"x = __shfl_up_sync({EACH}, 5);", lambda x: x[:, np.where(L < 5, L, L - 5)])
warp("shuffle_down", "float", f"x = __shfl_down_sync({EACH}, 9);", lambda x: x[:, np.where(L + 9 > 31, L, L + 9)])
warp(
    "shuffle_xor_reduce",
    "float",
    f"for (int d = 16; d; d /= 2) x += __shfl_xor_sync({EACH}, d);",
    lambda x: np.repeat(x.sum(1, keepdims=True), 32, 1),
    x=whole("xor reduce", 128),
)
warp(
    "shuffle_width_16",
    "float",
    f"x = __shfl_down_sync({EACH}, 4, 16) * 100 + __shfl_sync({EACH}, t + 5, 16) + "
    f"1000000 * __shfl_up_sync({EACH}, 1, 16);",
    lambda x: (
        100 * x[:, np.where(L % 16 + 4 > 15, L, L + 4)]
        + x[:, L // 16 * 16 + (L + 5) % 16]
        + 1000000 * x[:, np.where(L % 16 < 1, L, L - 1)]
    ),
    x=whole("width 16", 128, 0, 8),
)
warp("shuffle_double", "double", f"x = __shfl_xor_sync({EACH}, 1);", lambda x: x[:, L ^ 1])
warp(
    "shuffle_part_of_warp",
    "float",
    "if (t % 32 < 20) x = __shfl_sync(0x000fffffu, x, (t * 3 + 1) % 32 % 20);",
    lambda x: x[:, np.where(L < 20, (L * 3 + 1) % 32 % 20, L)],
)


def bits(mask):
    """(warps, 32, 32) truth values -> (warps, 32) words, the last axis being the bit."""
    return (mask.astype(U64) << np.arange(32, dtype=U64)).sum(-1).astype(U32)


warp(
    "vote_ballot",
    "unsigned",
    "x = __ballot_sync(0xffffffffu, x % 3 == 0);",
    lambda x: np.repeat(bits(x % 3 == 0)[:, None], 32, 1),
)
warp(
    "vote_any_all",
    "unsigned",
    "int a = __any_sync(0xffffffffu, x == 9), b = __all_sync(0xffffffffu, x < 14), "
    "c = __all_sync(0xffffffffu, x < 20); x = a + 2 * b + 4 * c;",
    lambda x: np.repeat(((x == 9).any(1) + 2 * (x < 14).all(1) + 4 * (x < 20).all(1))[:, None], 32, 1),
    x=np.concatenate([lanes(32) % 8, lanes(32) % 15, lanes(32) % 13, lanes(32)]).astype(U32),
)
warp(
    "vote_match_any",
    "unsigned",
    "x = __match_any_sync(0xffffffffu, x);",
    lambda x: bits(x[:, :, None] == x[:, None, :]),
    x=whole("match any", 128, 0, 6, U32),
)
warp(
    "reduce_add_unsigned",
    "unsigned",
    "x = __reduce_add_sync(0xffffffffu, x) ^ __reduce_max_sync(0xffffffffu, x);",
    lambda x: np.repeat((x.sum(1, dtype=U32) ^ x.max(1))[:, None], 32, 1),
)

# ---- divergence ----

DIVERGE = """
extern "C" __global__ void k(const int* in, int* out, int n) {
    int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
    if (i >= n) return;
    int x = in[i];
    BODY
    out[i] = x;
}
"""


def diverge(name, body, f, grid=2, threads=96, n=180, before=""):
    """f maps (thread in block, input) to the output, one thread at a time; None where nothing is written."""

    def expected(x, out, n):
        for i in range(n):
            value = f(i % threads, int(x[i]))
            out[i] = out[i] if value is None else value
        return [out]

    args = [random(name, n, I32) % 1000, poison(n, I32), I32(n)]
    add(
        name,
        before + DIVERGE.replace("BODY", body),
        grid,
        threads,
        args,
        (1,),
        lambda x, out, n: expected(x, out.copy(), int(n)),
    )


def collatz(x):
    steps = 0
    while x > 1:
        x = 3 * x + 1 if x % 2 else x // 2
        steps += 1
    return steps


def lcg(x, times):
    for _ in range(times):
        x = (x * 5 + 3) & 0xFFFF
    return x


# a chain of dependent steps keeps the arms too long to be predicated
STEP = """__device__ __forceinline__ int chain(int x, int times) {
    #pragma unroll 1
    for (int j = 0; j < times; j++) x = (x * 5 + 3) & 0xffff;
    return x;
}
"""
diverge(
    "diverge_parity",
    "if (t & 1) x = chain(x, 7); else x = chain(x, 4) + 1;",
    lambda t, x: lcg(x, 7) if t & 1 else lcg(x, 4) + 1,
    before=STEP,
)
diverge("diverge_parity_short", "if (t & 1) x = x * 3; else x = x + 1;", lambda t, x: x * 3 if t & 1 else x + 1)
diverge(
    "diverge_by_warp",
    "if (t / 32 & 1) x = chain(x, 7); else x = chain(x, 4) + 1;",
    lambda t, x: lcg(x, 7) if t // 32 & 1 else lcg(x, 4) + 1,
    before=STEP,
)
diverge(
    "diverge_nested",
    "if (t & 1) { if (t & 2) x = chain(x, 3); else if (t & 4) x = chain(x, 5); x ^= 21; } else x = chain(x, 2);",
    lambda t, x: (lcg(x, 3) if t & 2 else lcg(x, 5) if t & 4 else x) ^ 21 if t & 1 else lcg(x, 2),
    before=STEP,
)
diverge("diverge_trip_count", "x = chain(x, t % 7);", lambda t, x: lcg(x, t % 7), before=STEP)
diverge(
    "diverge_collatz",
    """int steps = 0;
    while (x > 1) { x = x & 1 ? 3 * x + 1 : x / 2; steps++; }
    x = steps;""",
    lambda t, x: collatz(x),
    grid=1,
    threads=45,
    n=45,
)
diverge(
    "diverge_early_return",
    "if (x % 3 == 0) return; x = chain(x, 6);",
    lambda t, x: None if x % 3 == 0 else lcg(x, 6),
    before=STEP,
)
diverge(
    "diverge_switch",
    """switch (x % 5) {
        case 0: x = chain(x, 2); break;
        case 1: x = chain(x, 3) - 4;  // and falls through
        case 2: x = chain(x, 1); break;
        case 3: x = -x; break;
        default: x = chain(x, 5);
    }""",
    lambda t, x: [lcg(x, 2), lcg(lcg(x, 3) - 4, 1), lcg(x, 1), -x, lcg(x, 5)][x % 5],
    before=STEP,
)
diverge(
    "diverge_break_continue",
    """int sum = 0;
    #pragma unroll 1
    for (int j = 0; j < 20; j++) {
        if ((j ^ t) % 3 == 0) continue;
        sum = chain(sum + x + j, 1);
        if ((sum & 7) == 5) break;
    }
    x = sum;""",
    lambda t, x: broken(t, x),
    before=STEP,
)
diverge(
    "diverge_grid_33",
    "if (t & 4) x = chain(x, 2);",
    lambda t, x: lcg(x, 2) if t & 4 else x,
    grid=33,
    threads=40,
    n=1300,
    before=STEP,
)


def broken(t, x):
    total = 0
    for j in range(20):
        if (j ^ t) % 3 == 0:
            continue
        total = lcg(total + x + j, 1)
        if total & 7 == 5:
            break
    return total


add(
    "syncwarp_in_both_arms",
    """
extern "C" __global__ void k(const int* in, int* out) {
    __shared__ int s[64];
    int t = threadIdx.x, x = in[t];
    if (t & 1) {
        s[t] = x * 3;
        __syncwarp(0xaaaaaaaau);
        x = s[t ^ 2];
    } else {
        s[t] = x + 100;
        __syncwarp(0x55555555u);
        x = s[t ^ 4];
    }
    __syncwarp();
    s[t] = x;
    __syncwarp();
    out[t] = s[t ^ 1];
}
""",
    1,
    64,
    [random("syncwarp", 64, I32), poison(64, I32)],
    (1,),
    lambda x, out: [np.where(lanes(64) & 1, (x * 3)[lanes(64) ^ 2], (x + 100)[lanes(64) ^ 4])[lanes(64) ^ 1]],
)

# ---- arithmetic: several results per thread, out[result][thread] ----

ELEMENTS = """HEADER
extern "C" __global__ void k(PARAMETERS, OUT* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
    BODY
}
"""


def elements(name, inputs, out, results, f, body="", header=""):
    """inputs: C type, array for a, b, c; results: C expressions, each stored in its own row; f: the same in NumPy."""
    n = len(inputs[0][1])
    parameters = ", ".join(f"const {ctype}* p{v}" for (ctype, _), v in zip(inputs, "abc"))
    load = "".join(f"{ctype} {v} = p{v}[i];\n    " for (ctype, _), v in zip(inputs, "abc"))
    store = "\n    ".join(f"out[{j} * n + i] = {result};" for j, result in enumerate(results))
    source = ELEMENTS
    for word, value in ("HEADER", header), ("PARAMETERS", parameters), ("OUT", out[0]), ("BODY", load + body + store):
        source = source.replace(word, value)
    arrays = [x for _, x in inputs]

    def expected(*args):
        with np.errstate(all="ignore"):
            return [np.stack([np.ascontiguousarray(r, out[1]) for r in f(*args[:-1])])]

    add(
        name,
        source,
        n // 64,
        64,
        [*arrays, poison((len(results), n, *arrays[0].shape[1:]), out[1])],
        (len(arrays),),
        expected,
    )


HALF, BF16 = "#include <cuda_fp16.h>", "#include <cuda_bf16.h>"


def bf16(x):
    """float32 -> the bits of bfloat16, to nearest, ties to even; x is finite."""
    word = np.ascontiguousarray(x, F32).view(U32)
    return ((word + 0x7FFF + (word >> 16 & 1)) >> 16).astype(np.uint16)


def unbf16(x):
    return (x.astype(U32) << 16).view(F32)


def f64(*arrays):
    return [x.astype(F64) for x in arrays]


def half2(a, b, c):
    a, b, c = f64(a, b, c)
    return [a * b + c, a + b, a * b, a - c]


def half_toward_zero(x):
    near = x.astype(F16)
    return np.where(np.abs(near.astype(F32)) > np.abs(x), np.nextafter(near, F16(0)), near)


h = [random(f"half {v}", 128, F16) for v in "abc"]
h2 = [random(f"half2 {v}", (128, 2), F16) for v in "abc"]
elements(
    "half2_arithmetic",
    [("__half2", x) for x in h2],
    ("__half2", F16),
    ["__hfma2(a, b, c)", "__hadd2(a, b)", "__hmul2(a, b)", "__hsub2(a, c)"],
    half2,
    header=HALF,
)
elements(
    "half_arithmetic",
    [("__half", x) for x in h],
    ("__half", F16),
    [
        "__hfma(a, b, c)",
        "__hadd(a, b)",
        "__hmul(a, b)",
        "__hneg(c)",
        "__habs(a)",
        "__hmax(a, b)",
        "__hlt(a, b) ? c : a",
    ],
    lambda a, b, c: [*half2(a, b, c)[:3], -c, np.abs(a), np.maximum(a, b), np.where(a < b, c, a)],
    header=HALF,
)
wide = np.concatenate([random("to half", 122) * F32(300), F32([65519.9, 65520, 1e6, 6e-8, 2.98e-8, -1e-9])])
elements(
    "half_conversions",
    [("float", wide), ("__half", h[0])],
    ("float", F32),
    [
        "__half2float(__float2half_rn(a))",
        "__half2float(b)",
        "__half2float(__float2half_rz(a))",
        "__half2float(__int2half_rn((int)a))",
        "(float)__half2int_rn(b)",
    ],
    lambda a, b: [
        a.astype(F16).astype(F32),
        b.astype(F32),
        half_toward_zero(a).astype(F32),
        np.trunc(a).astype(F16).astype(F32) + F32(0),  # an int has no −0
        np.rint(b.astype(F32)) + F32(0),
    ],
    header=HALF,
)
b3 = [bf16(random(f"bf16 {v}", 128)) for v in "abc"]
elements(
    "bf16_arithmetic",
    [("__nv_bfloat16", x) for x in b3],
    ("__nv_bfloat16", np.uint16),
    ["__hmul(a, b)", "__hadd(a, b)", "__hfma(a, b, c)"],
    lambda a, b, c: [bf16(unbf16(a) * unbf16(b)), bf16_sum(a, b), bf16_sum(a, b, c)],
    header=BF16,
)
elements(
    "bf16_conversions",
    [("float", random("to bf16", 128) * F32(1e3)), ("__nv_bfloat16", b3[0])],
    ("float", F32),
    ["__bfloat162float(__float2bfloat16_rn(a))", "__bfloat162float(b)", "__bfloat162float(__float2bfloat16_rz(a))"],
    lambda a, b: [unbf16(bf16(a)), unbf16(b), (a.view(U32) & U32(0xFFFF0000)).view(F32)],
    header=BF16,
)


def bf16_sum(a, b, c=None):
    """a + b or a * b + c in bfloat16: the exact value in 64 bits, then one rounding."""
    a, b = f64(unbf16(a), unbf16(b))
    exact = a + b if c is None else a * b + unbf16(c).astype(F64)
    word = exact.view(U64)
    exponent = ((word >> U64(52)) & U64(0x7FF)).astype(np.int64) - 1023
    unit = np.ldexp(1.0, (exponent - 7).astype(I32))
    return bf16((np.rint(exact / unit) * unit).astype(F32))


def unsigned(name, n=128, top=1 << 32):
    """Random words, with a few special ones."""
    rng = np.random.default_rng([ord(ch) for ch in name])
    x = rng.integers(0, top, n, dtype=np.uint64)
    x[:6] = [0, 1, top - 1, top >> 1, (top >> 1) - 1, 255]
    return x.astype(U32)


def prmt(a, b, selector):
    source = np.stack([(w >> s) & 255 for w in (a, b) for s in (0, 8, 16, 24)]).astype(U32)
    result = np.zeros_like(a)
    for j in range(4):
        pick = (selector >> (4 * j)) & 7
        result |= source[pick, lanes(len(a))] << U32(8 * j)
    return result


def count(x):
    return sum((x >> U32(j)) & 1 for j in range(32))


def reverse(x):
    return sum(((x >> U32(j)) & 1) << U32(31 - j) for j in range(32)).astype(U32)


def length(x):
    """Bits up to the highest set one."""
    return np.array([int(v).bit_length() for v in x])


def first(x):
    return np.array([(int(v) & -int(v)).bit_length() for v in x])


u3 = [unsigned(f"u{v}") for v in "abc"]
words = [("unsigned", x) for x in u3]
elements(
    "int_byte_perm",
    words,
    ("unsigned", U32),
    [
        "__byte_perm(a, b, c & 0x7777)",
        "__byte_perm(a, b, 0x0123)",
        "__byte_perm(a, b, 0x5410)",
        "__byte_perm(a, 0, 0x4140)",
    ],
    lambda a, b, c: [
        prmt(a, b, c & 0x7777),
        prmt(a, b, c * 0 + 0x0123),
        (b << 16) | (a & 0xFFFF),
        (a & 0xFF) | ((a >> 8 & 0xFF) << 16),
    ],
)
elements(
    "int_funnel_shift",
    words,
    ("unsigned", U32),
    [
        "__funnelshift_l(a, b, c)",
        "__funnelshift_r(a, b, c)",
        "__funnelshift_l(a, a, 7)",
        "__funnelshift_rc(a, b, c & 63)",
    ],
    lambda a, b, c: [
        funnel(a, b, c)[0],
        funnel(a, b, c)[1],
        (a << 7) | (a >> 25),
        np.where((c & 63) >= 32, b, funnel(a, b, c)[1]),
    ],
)
elements(
    "int_bit_counts",
    words[:1],
    ("int", I32),
    ["__popc(a)", "__clz(a)", "(int)__brev(a)", "__ffs(a)", "__ffs(~a)"],
    lambda a: [count(a), 32 - length(a), reverse(a).view(I32), first(a), first(~a)],
)
elements(
    "int_logic",
    words,
    ("unsigned", U32),
    ["(a & b) | (~a & c)", "(a & b) ^ (b & c) ^ (a & c)", "a ^ b ^ c", "(a | ~b) & c"],
    lambda a, b, c: [bits(row) for row in logic(bit_planes(a), bit_planes(b), bit_planes(c))],
)
elements(
    "int_bit_fields",
    words[:2],
    ("unsigned", U32),
    [
        "(a >> 5) & 0x7ff",
        "(a >> (b & 15)) & 0xff",
        "(unsigned)((int)(a << 7) >> 20)",
        "(a & ~(0xffu << 9)) | ((b & 0xff) << 9)",
    ],
    lambda a, b: [
        a // 32 % 2048,
        (a >> (b & 15)) % 256,
        sign_extend(a // (1 << 13) % 4096, 12),
        a - (a // 512 % 256) * 512 + b % 256 * 512,
    ],
)
elements(
    "int_dp4a",
    [("int", x.view(I32)) for x in u3],
    ("int", I32),
    ["__dp4a(a, b, c)", "__dp4a(a, b, 0)", "(int)__dp4a((unsigned)a, (unsigned)b, (unsigned)c)"],
    lambda a, b, c: [dp4a(a, b, c, np.int8), dp4a(a, b, c * 0, np.int8), dp4a(a, b, c, np.uint8)],
)
elements(
    "int_multiply",
    words,
    ("unsigned", U32),
    [
        "__umulhi(a, b)",
        "(unsigned)__mulhi((int)a, (int)b)",
        "__umul24(a, b)",
        "(unsigned)__mul24((int)a, (int)b)",
        "a * b + c",
        "a / (b | 1)",
        "a % (b | 1)",
        "(unsigned)((int)a / 7)",
        "(unsigned)((int)a % 10)",
    ],
    lambda a, b, c: products(a, b, c),
)
big = [np.random.default_rng(j).integers(0, 1 << 64, 128, dtype=np.uint64) for j in (1, 2, 3)]
elements(
    "int_64bit",
    [("unsigned long long", x) for x in big],
    ("unsigned long long", U64),
    [
        "a * b",
        "a + b",
        "a - b",
        "a << (c & 63)",
        "a >> (c & 63)",
        "(unsigned long long)((long long)a >> (c & 63))",
        "(unsigned long long)(unsigned)a * (unsigned)b",
        "__umul64hi(a, b)",
        "a / (b >> 40 | 1)",
    ],
    lambda a, b, c: long_words(a, b, c),
)


def funnel(low, high, shift):
    both = (high.astype(U64) << U64(32)) | low
    s = (shift & 31).astype(U64)
    return ((both << s) >> U64(32)).astype(U32), (both >> s).astype(U32)


def bit_planes(x):
    return ((x[:, None] >> np.arange(32, dtype=U32)) & 1).astype(bool)


def logic(a, b, c):
    """Told by counting set inputs, not by the same expressions."""
    return np.where(a, b, c), (a.astype(int) + b + c) >= 2, (a.astype(int) + b + c) % 2 == 1, np.where(c, a >= b, False)


def sign_extend(x, width):
    return np.where(x >> (width - 1) & 1, x.astype(np.int64) - (1 << width), x).astype(I32).view(U32)


def dp4a(a, b, c, dtype):
    a, b = (np.ascontiguousarray(x).view(dtype).reshape(-1, 4).astype(np.int64) for x in (a, b))
    return ((a * b).sum(1) + c).astype(U32).view(I32)


def wrap(values, width=32):
    return np.array([v & ((1 << width) - 1) for v in values], U32 if width == 32 else U64)


def signed(x, width):
    return [v - (v >> (width - 1) << width) for v in x]


def products(a, b, c):
    a, b, c = ([int(v) for v in x] for x in (a, b, c))
    sa, sb = signed(a, 32), signed(b, 32)
    low_a, low_b = signed([v % (1 << 24) for v in a], 24), signed([v % (1 << 24) for v in b], 24)

    def toward_zero(x, y):
        return abs(x) // y if x >= 0 else -(abs(x) // y)

    return [
        wrap(row)
        for row in (
            [x * y >> 32 for x, y in zip(a, b)],
            [x * y >> 32 for x, y in zip(sa, sb)],
            [x % (1 << 24) * (y % (1 << 24)) for x, y in zip(a, b)],
            [x * y for x, y in zip(low_a, low_b)],
            [x * y + z for x, y, z in zip(a, b, c)],
            [x // (y | 1) for x, y in zip(a, b)],
            [x % (y | 1) for x, y in zip(a, b)],
            [toward_zero(x, 7) for x in sa],
            [x - 10 * toward_zero(x, 10) for x in sa],
        )
    ]


def long_words(a, b, c):
    a, b, c = ([int(v) for v in x] for x in (a, b, c))
    sa = signed(a, 64)
    return [
        wrap(row, 64)
        for row in (
            [x * y for x, y in zip(a, b)],
            [x + y for x, y in zip(a, b)],
            [x - y for x, y in zip(a, b)],
            [x << z % 64 for x, z in zip(a, c)],
            [x >> z % 64 for x, z in zip(a, c)],
            [x >> z % 64 for x, z in zip(sa, c)],
            [x % (1 << 32) * (y % (1 << 32)) for x, y in zip(a, b)],
            [x * y >> 64 for x, y in zip(a, b)],
            [x // (y >> 40 | 1) for x, y in zip(a, b)],
        )
    ]


f3 = [random(f"float {v}", 128) for v in "abc"]


def fma(a, b, c):
    """a * b + c with one rounding: the product is exact in 64 bits; the sum is rounded to odd, then to nearest."""
    p, c = a.astype(F64) * b.astype(F64), c.astype(F64)
    s = p + c
    bb = s - p
    error = (p - (s - bb)) + (c - bb)
    odd = s.view(U64) & U64(1) == 1
    toward = np.where((error > 0) == (s > 0), 1, -1)
    word = s.view(np.int64) + np.where((error != 0) & ~odd, toward, 0)
    return word.view(F64).astype(F32)


elements(
    "float_exact",
    [("float", x) for x in f3],
    ("float", F32),
    [
        "fmaf(a, b, c)",
        "__fadd_rn(a, b)",
        "__fmul_rn(a, b)",
        "__fadd_rn(__fmul_rn(a, b), c)",
        "a * b + c",
        "__fdiv_rn(a, b)",
        "__fsqrt_rn(fabsf(a))",
    ],
    lambda a, b, c: [fma(a, b, c), a + b, a * b, a * b + c, fma(a, b, c), a / b, np.sqrt(np.abs(a))],
)
odd_floats = F32([np.nan, 1, -np.inf, np.inf, 2.5, 3.5, -2.5, -0.5, 0.5, 1e10])
some = np.concatenate([odd_floats, random("rounding", 118) * F32(100)])
other = np.where(np.isnan(some), F32(4), random("other", 128))
other[1] = np.nan
elements(
    "float_rounding",
    [("float", np.where(np.isnan(some), F32(7.5), some))],
    ("float", F32),
    ["rintf(a)", "floorf(a)", "ceilf(a)", "truncf(a)", "fabsf(a)", "-a"],
    lambda a: [np.rint(a), np.floor(a), np.ceil(a), np.trunc(a), np.abs(a), -a],
)
elements(
    "float_min_max_nan",
    [("float", some), ("float", other)],
    ("float", F32),
    ["fminf(a, b)", "fmaxf(a, b)", "a < b ? 1.0f : 0.0f", "a != a ? 1.0f : 0.0f", "!(a >= b) ? 1.0f : 0.0f"],
    lambda a, b: [np.fmin(a, b), np.fmax(a, b), a < b, np.isnan(a), ~(a >= b)],
)
elements(
    "float_to_int",
    [("float", some)],
    ("int", I32),
    [
        "__float2int_rn(a)",
        "__float2int_rz(a)",
        "__float2int_rd(a)",
        "__float2int_ru(a)",
        "__float_as_int(a)",
        "(int)__float2uint_rz(a)",
    ],
    lambda a: [
        *(clip(f(a)) for f in (np.rint, np.trunc, np.floor, np.ceil)),
        a.view(I32),
        np.clip(np.nan_to_num(np.trunc(a).astype(F64), nan=0), 0, 2**32 - 1).astype(U32).view(I32),
    ],
)
elements(
    "int_to_float",
    [("int", u3[0].view(I32)), ("long long", big[0].view(np.int64))],
    ("float", F32),
    [
        "__int2float_rn(a)",
        "__int2float_rz(a)",
        "__uint2float_rn((unsigned)a)",
        "__int_as_float(a & 0x7f7fffff)",
        "__double2float_rn((double)a * 1.1)",
        "__ll2float_rn(b)",
    ],
    lambda a, b: [
        a.astype(F32),
        toward_zero_float(a),
        a.view(U32).astype(F32),
        (a & 0x7F7FFFFF).view(F32),
        (a.astype(F64) * 1.1).astype(F32),
        b.astype(F32),
    ],
)
elements(
    "double_arithmetic",
    [("double", random(f"double {v}", 128, F64)) for v in "abc"],
    ("double", F64),
    ["__dadd_rn(a, b)", "__dmul_rn(a, b)", "__ddiv_rn(a, b)", "__dsqrt_rn(fabs(c))"],
    lambda a, b, c: [a + b, a * b, a / b, np.sqrt(np.abs(c))],
)


def clip(x):
    return np.clip(np.nan_to_num(x.astype(F64), nan=0), -(2**31), 2**31 - 1).astype(I32)


def toward_zero_float(x):
    """int -> float, bits beyond the 24 highest dropped."""
    size = np.abs(x.astype(np.int64))
    drop = np.maximum(length(size) - 24, 0)
    return (np.sign(x.astype(np.int64)) * (size >> drop << drop)).astype(F32)


# ---- tensor cores ----

MMA = """
extern "C" __global__ void k(const unsigned* a, const unsigned* bt, const float* c, float* d) {
    int lane = threadIdx.x, g = lane / 4, q = lane % 4;  // words hold two elements; a 16 x 16, b transposed 8 x 16
    unsigned a0 = a[g * 8 + q], a1 = a[(g + 8) * 8 + q], a2 = a[g * 8 + q + 4], a3 = a[(g + 8) * 8 + q + 4];
    unsigned b0 = bt[g * 8 + q], b1 = bt[g * 8 + q + 4];
    int i = g * 8 + q * 2, j = i + 64;
    float x0, x1, x2, x3;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%10,%11,%12,%13};"
                 : "=f"(x0), "=f"(x1), "=f"(x2), "=f"(x3)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[i]), "f"(c[i + 1]), "f"(c[j]),
                   "f"(c[j + 1]));
    d[i] = x0; d[i + 1] = x1; d[j] = x2; d[j + 1] = x3;
}
"""
for kind, narrow, widen in ("f16", lambda x: x.astype(F16), lambda x: x.astype(F32)), ("bf16", bf16, unbf16):
    a, bt, c = whole(kind + " a", (16, 16)), whole(kind + " b", (8, 16)), whole(kind + " c", (16, 8), -99, 100)
    add(
        f"mma_m16n8k16_{kind}",
        MMA.replace("KIND", kind),
        1,
        32,
        [narrow(a), narrow(bt), c, poison((16, 8))],
        (3,),
        lambda a, bt, c, d, widen=widen: [widen(a) @ widen(bt).T + c],
    )

LDMATRIX = """
extern "C" __global__ void k(const unsigned short* in, unsigned* out) {
    __shared__ __align__(128) unsigned short s[16 * PITCH];
    int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) s[i / 16 * PITCH + i % 16] = in[i];
    __syncthreads();
    unsigned at = (unsigned)__cvta_generic_to_shared(s + lane % ROWS * PITCH + lane / 16 * (COUNT > 2 ? 8 : 0));
    unsigned r[4];
    ASM
    for (int j = 0; j < COUNT; j++) out[lane * COUNT + j] = r[j];
}
"""


def ldmatrix(name, count, pitch, trans=False):
    registers = ", ".join(f"%{j}" for j in range(count))
    results = ", ".join(f'"=r"(r[{j}])' for j in range(count))
    asm = (
        f'asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{".trans" if trans else ""}.shared.b16 '
        f'{{{registers}}}, [%{count}];" : {results} : "r"(at) : "memory");'
    )

    def expected(x, out):
        x = x.reshape(16, 16)
        tiles = [x[:8, :8], x[8:, :8], x[:8, 8:], x[8:, 8:]][:count]
        fragments = [np.ascontiguousarray(tile.T if trans else tile).view(U32).reshape(32) for tile in tiles]
        return [np.stack(fragments, 1)]

    source = LDMATRIX.replace("ASM", asm).replace("COUNT", str(count)).replace("PITCH", str(pitch))
    add(
        name,
        source.replace("ROWS", "8" if count == 1 else "16"),
        1,
        32,
        [random(name, 256, np.uint16), poison((32, count), U32)],
        (1,),
        expected,
    )


ldmatrix("ldmatrix_x1", 1, 16)
ldmatrix("ldmatrix_x1_conflicts", 1, 64)
ldmatrix("ldmatrix_x1_trans", 1, 24, trans=True)
ldmatrix("ldmatrix_x2", 2, 24)
ldmatrix("ldmatrix_x4", 4, 16)
ldmatrix("ldmatrix_x4_padded", 4, 24)
ldmatrix("ldmatrix_x4_conflicts", 4, 64)
ldmatrix("ldmatrix_x4_trans", 4, 24, trans=True)

# ---- the rest ----

add(
    "launch_bounds",
    """
extern "C" __global__ void __launch_bounds__(128, 4) k(const float* in, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i] * 2.0f;
}
""",
    3,
    128,
    [random("launch bounds", 300), poison(320), I32(300)],
    (1,),
    lambda x, out, n: [np.append(x * F32(2), out[300:])],
)

CONSTANT = """
__constant__ float table[16] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
extern "C" __global__ void k(const float* in, float* out) {
    int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
    out[i] = in[i] * table[INDEX];
}
"""
for name, index, f in ("uniform", "blockIdx.x + 3", lambda i: i // 64 + 3), ("per_lane", "t % 16", lambda i: i % 16):
    add(
        f"constant_{name}",
        CONSTANT.replace("INDEX", index),
        2,
        64,
        [random(f"constant {name}", 128), poison(128)],
        (1,),
        lambda x, out, f=f: [x * F32(2) ** f(lanes(128)).astype(F32)],
    )

add(
    "block_3d",
    """
extern "C" __global__ void k(const float* in, float* out) {
    __shared__ float s[8][4][4];
    int x = threadIdx.x, y = threadIdx.y, z = threadIdx.z;
    s[z][y][x] = in[((blockIdx.x * 8 + z) * 4 + y) * 4 + x];
    __syncthreads();
    out[((blockIdx.x * 4 + x) * 8 + z) * 4 + y] = s[z][y][x] + 100 * z + 10 * y + x;
}
""",
    2,
    (4, 4, 8),
    [whole("block 3d", (2, 8, 4, 4)), poison((2, 4, 8, 4))],
    (1,),
    lambda x, out: [
        (
            x
            + 100 * np.arange(8, dtype=F32)[:, None, None]
            + 10 * np.arange(4, dtype=F32)[:, None]
            + np.arange(4, dtype=F32)
        )
        .transpose(0, 3, 1, 2)
        .copy()
    ],
)

add(
    "grid_3d",
    """
extern "C" __global__ void k(int* out) {
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    int size = blockDim.x * blockDim.y * blockDim.z;
    out[block * size + thread] = blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z + 1000 * (threadIdx.x
        + 10 * threadIdx.y + 100 * threadIdx.z);
}
""",
    (3, 2, 2),
    (5, 3, 2),
    [poison((12, 30), I32)],
    (0,),
    lambda out: [
        np.array(
            [
                [
                    b % 3 + 10 * (b // 3 % 2) + 100 * (b // 6) + 1000 * (t % 5 + 10 * (t // 5 % 3) + 100 * (t // 15))
                    for t in range(30)
                ]
                for b in range(12)
            ],
            I32,
        )
    ],
)
