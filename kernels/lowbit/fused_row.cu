/* One row of x, and what stands before and behind its product in a layer, in the same launch.

   New since few_rows:
   - NORM: x goes through an RMSNorm first. A warp multiplies its slice by the norm's weight, makes digits of that, and
     adds up the squares of x on the way; all that the block has of y is multiplied by 1 / √(mean of squares + eps) at
     the end. So the norm costs no launch, and is not rounded before the product.
   - GLU: rows 0 .. 7 of each tile are rows of W_gate, and 8 .. 15 the same of W_up (fused.py), so that a gate and its
     partner meet in one thread: y = silu(gate) · up, half as many rows.
   - RESIDUAL: y = residual + W x.

   Moves what few_rows does, and the norm's weight or the residual once. Compile as few_rows.cu with one row of x, and
   with AROUND, which says what of these there is; y is like x, and the columns are not split. norm (cols,), residual
   (rows,): where they are not asked for, anything. */
#ifndef MATRIX
#define MATRIX Matrix<__half, 4, 128>
#define INPUT Input<__half, 1, true>
#define BLOCK Block<16, 1, 2, true>
#define RING Ring<2, 3, 0>
#define TILES_IN_PHASE 8
#define X_IN_REGISTERS true
#define Y __half
#define AROUND Around<true, true, false>
#endif
#include "../device/pdl.cuh"
#include "../device/reduce.cuh"
#include "few_rows.cuh"

/* What stands around the product. */
template <bool Norm, bool Glu, bool Residual> struct Around {
    static constexpr bool NORM = Norm, GLU = Glu, RESIDUAL = Residual;
};
constexpr bool NORM = AROUND::NORM, GLU = AROUND::GLU, RESIDUAL = AROUND::RESIDUAL;

using X = I::X;
constexpr int UNITS = B::UNITS;
static_assert(I::ROWS == 1 && !SPLIT, "one row of x, whole sums");

/* The slice of x times the norm's weight becomes digits; the rest of the ring is asked for behind its loads. Returns
   the sum of squares of the slice. */
template <class After>
__device__ __forceinline__ float make_normed_digits(const Digits &digits, const X *x, const uint2 (&weight)[UNITS],
                                                    const Share<B> &share, int cols, int lane, After after_loads) {
    float number[UNITS][4], squares = 0, largest = 0;
    uint2 raw[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++) raw[u] = load_x<uint2, I>(x, share, cols, 1, 0, u, 4 * lane);
    after_loads();
    unsigned top = 0; // the largest without its sign, as bits: NaN is above infinity
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const float2 a = unpack(raw[u].x, X()), b = unpack(raw[u].y, X());
        const float2 c = unpack(weight[u].x, X()), d = unpack(weight[u].y, X());
        squares += a.x * a.x + a.y * a.y + (b.x * b.x + b.y * b.y);
        const float products[4] = {a.x * c.x, a.y * c.y, b.x * d.x, b.y * d.y};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            number[u][i] = products[i];
            top = max(top, __float_as_uint(products[i]) & 0x7fffffff);
        }
    }
    largest = __uint_as_float(__reduce_max_sync(~0u, top));
    digits.make_of(0, lane, largest, [&](int u, unsigned(&whole)[4], float up) { to_whole(whole, number[u], up); });
    __syncwarp();
    return warp_sum(squares);
}

/* Sum number i of a phase, scaled: its row's product. slices: what the warps' slices of x add up to. */
using Tiles = Phase<W, I, B, Sums>;
__device__ __forceinline__ float product_of(unsigned i, const float *sums, const float *slices, float2 factor) {
    const unsigned team = i / 16 % B::TEAMS;
    const float all = Sums::total(sums + i / 16 * Sums::X_ROW, i % 16, [&](int warp) {
        return W::GROUP ? 0 : factor.y * slices[(team * B::WARPS_PER_TEAM + warp) * Digits::ROOM];
    });
    return W::GROUP ? all : all * factor.x;
}

/* What becomes of a phase's sums: a thread has every THREADS-th of its results. */
struct Results {
    static constexpr unsigned EACH = GLU ? 2 : 1, COUNT = Tiles::ITEMS / EACH;
    const Tiles &tiles;
    float2 factor, partner;  // of the thread's first result: on their way while there are no sums yet
    float residual;

    /* The sum that a result begins with; its partner is 8 further. */
    static __device__ __forceinline__ unsigned sum_of(unsigned n) { return GLU ? n / 8 * 16 + n % 8 : n; }
    __device__ __forceinline__ long long result(unsigned n) const {
        const long long row = tiles.row(sum_of(n));
        return GLU ? (row - n % 8) / 2 + n % 8 : row;
    }
    __device__ __forceinline__ bool there(unsigned n) const {
        return n < COUNT && tiles.row(sum_of(n)) + 8 * GLU < tiles.rows;
    }
    __device__ __forceinline__ void load(unsigned n, const X *from) {
        const bool here = there(n);
        if (W::GROUP == 0 && here) factor = tiles.row_factor(sum_of(n));
        if (W::GROUP == 0 && here && GLU) partner = tiles.row_factor(sum_of(n) + 8);
        if (RESIDUAL && here) residual = (float)from[result(n)];
    }
    __device__ __forceinline__ Results(const Tiles &tiles, unsigned thread, const X *from)
        : tiles(tiles), factor{}, partner{}, residual(0) {
        load(thread, from);
    }
    __device__ __forceinline__ void store(X *y, const X *from, const float *sums, const float *slices, float scale) {
#pragma unroll 1
        for (unsigned n = tiles.thread; n < COUNT; n += B::THREADS) {
            if (n != tiles.thread) load(n, from);
            if (!there(n)) continue;
            float found = product_of(sum_of(n), sums, slices, factor) * scale;
            if (GLU) found = silu(found) * (product_of(sum_of(n) + 8, sums, slices, partner) * scale);
            y[result(n)] = (X)(found + residual);
        }
    }
};

extern "C" __global__ void __launch_bounds__(B::THREADS, 1)
fused_row(const uint4 *packed, const W::Scale *factors, const X *x, const X *norm, const X *residual, X *y,
          long long rows, int cols, float eps) {
    let_next_kernel_start();
    extern __shared__ __align__(16) uint4 shared[];
    __shared__ float squares[B::WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int slice = warp % B::WARPS_PER_TEAM, team = warp / B::WARPS_PER_TEAM;
    float *const behind_ring = reinterpret_cast<float *>(shared + R::STAGES * Stream::APART);
    const Digits digits(behind_ring, warp);
    const Sums sums{behind_ring + Digits::FLOATS};
    const Share<B> share(rows, cols, warp);

    // 1. ask for weights
    Stream weights(packed, factors, share, cols, shared, warp, lane);
    weights.fill<0, R::STAGES_BEFORE_WAIT>();
    uint2 norm_weight[UNITS];
    if (NORM)
#pragma unroll
        for (int u = 0; u < UNITS; u++) norm_weight[u] = load_x<uint2, I>(norm, share, cols, 1, 0, u, 4 * lane);

    // 2. wait for the kernel ahead
    wait_for_previous_kernel();

    // 3. x becomes digits, and these operands
    const auto fill = [&] { weights.fill<R::STAGES_BEFORE_WAIT, R::STAGES>(); };
    if constexpr (NORM) {
        const float mine = make_normed_digits(digits, x, norm_weight, share, cols, lane, fill);
        if (lane == 0) squares[warp] = mine; // seen behind the first phase's barrier
    } else
        make_digits(digits, x, share, cols, 1, lane, fill);
    const float unit_of_column[EIGHTS] = {digits.x_units[0] * (lane % 2 ? 65536 : 1)};
    Fragments x_fragments;
    if (X_IN_REGISTERS)
#pragma unroll
        for (int i = 0; i < UNITS * 2; i++) x_fragments[i / 2][i % 2][0] = digits.operand(i / 2, i % 2, 0, lane);
    __syncwarp();

    const int place = Sums::place(lane / 4, lane % 4, slice);
    int set = 0;
#pragma unroll 1
    for (int begin = 0; (int)blockIdx.x + begin * share.tile_stride < share.tiles; begin += TILES_IN_PHASE, set ^= 1) {
        const Tiles tiles(factors, rows, begin, threadIdx.x);
        Results results(tiles, threadIdx.x, residual);
        float *tile_sums = sums.first + set * Sums::SET + team * Sums::TILE + place;
        int tile = share.first_tile + begin * share.tile_stride;
#pragma unroll 1
        for (int i = 0; i < TILES_IN_PHASE && tile < share.tiles; i++, tile += share.tile_stride) {
            // 4. multiply, and scale once a group
            float t[EIGHTS][2] = {};
            multiply_tile(t, weights, x_fragments, digits, share, lane);
            keep(tile_sums, t, unit_of_column, lane);
            tile_sums += B::TEAMS * Sums::TILE;
        }

        // 5. add up the warps' sums; the next phase has sums of its own, so one barrier is enough
        __syncthreads();
        float scale = 1;
        if (NORM) {
            float total = 0;
#pragma unroll
            for (int w = 0; w < B::WARPS_PER_TEAM; w++) total += squares[w];
            scale = rsqrtf(total / cols + eps);
        }
        results.store(y, residual, sums.first + set * Sums::SET, digits.all_slice_sums, scale);
    }
}
