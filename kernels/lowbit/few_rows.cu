/* The best rung for 1 to 4 rows of x: whole numbers on the integer tensor cores. Weights are never converted.

   New since digits:
   - One block stays on each multiprocessor, and makes its digits once. A warp owns UNITS units of 128 columns, so they
     lie in its registers (X_IN_REGISTERS), and every tile of 16 rows of its team, through a ring of its own
     (unit.cuh).
   - What is asked for first comes first: STAGES_BEFORE_WAIT stages of the ring before the kernel waits for the one
     ahead of it, then x, then the rest.
   - Two rows of x fill the eight columns of B; four take two instructions. 8 and 2 bits, any group, any shape.

   Moves rows * cols * BITS / 8 bytes of codes and 2 * sizeof(Scale) for each group of a row, once, and x once a block.
   8 * rows * cols multiply-adds of bytes for one or two rows of x, 16 for three or four; one m16n8k32 does 4096.

   Compile with MATRIX, INPUT, BLOCK and RING (unit.cuh), TILES_IN_PHASE (of a team), X_IN_REGISTERS, and Y, the type
   of y: float where the columns are split.
   Launch (blocks, splits) blocks of THREADS with the shared memory that plan.py says. With more than one split y is
   (splits, m, rows), and merge.cu adds it up. */
#include "../device/mma.cuh"
#include "../device/pdl.cuh"
#include "team_sums.cuh"
#include "x_digits.cuh"
#ifndef MATRIX
#define MATRIX Matrix<__half, 4, 128>
#define INPUT Input<__half, 1, true>
#define BLOCK Block<16, 1, 2, true>
#define RING Ring<2, 3, 0>
#define TILES_IN_PHASE 8
#define X_IN_REGISTERS true
#define Y __half
#endif
using W = MATRIX;
using I = INPUT;
using B = BLOCK;
using R = RING;
using Digits = XDigits<W, I, B>;
using Stream = WeightStream<W, B, R>;
using Sums = TeamSums<I, B, TILES_IN_PHASE>;
constexpr int EIGHTS = Digits::EIGHTS;
constexpr bool SPLIT = sizeof(Y) == 4;
constexpr float HIGH = W::BITS == 8 ? 1 : 1 << W::BITS; // what rows 8 .. 15 of a tile come out too large by
using Fragments = uint4[B::UNITS][2][EIGHTS];           // the lane's digits of x, of two steps each

/* The operand of a step, 32 columns, from the lane's words of a unit. */
__device__ __forceinline__ void codes(unsigned (&a)[4], const unsigned *w, int step) {
    if (W::BITS == 8) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = w[4 * step + i];
    } else if (W::BITS == 4) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            a[2 * i] = w[2 * step + i] & 0x0f0f0f0f;
            a[2 * i + 1] = w[2 * step + i] & 0xf0f0f0f0;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            a[2 * i] = w[step] >> 4 * i & 0x03030303;
            a[2 * i + 1] = w[step] >> 4 * i & 0x0c0c0c0c;
        }
    }
}

/* x becomes digits, as many rows at a time as registers have room for. The rest of the ring is asked for behind the
   first of them. */
template <class After>
__device__ __forceinline__ void make_digits(const Digits &digits, const I::X *x, const Share<B> &share, int cols, int m,
                                            int lane, After after_first_load) {
    constexpr int UNITS = B::UNITS, SOME = UNITS > 8 ? 1 : UNITS > 4 ? 2 : UNITS > 2 ? 4 : UNITS > 1 ? 8 : 16;
    constexpr int AT_ONCE = SOME < I::ROWS ? SOME : I::ROWS; // rows of x
    constexpr int KEPT = UNITS <= 8 ? UNITS : 1;             // units; of more each is loaded twice
#pragma unroll 1
    for (int j0 = 0; j0 < I::ROWS; j0 += AT_ONCE) {
        uint2 raw[AT_ONCE][KEPT];
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++)
#pragma unroll
            for (int u = 0; u < KEPT; u++) raw[r][u] = load_x<uint2, I>(x, share, cols, m, j0 + r, u, 4 * lane);
        if (j0 == 0) after_first_load();
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++)
            digits.make(j0 + r, lane, [&](int u) {
                return KEPT == UNITS ? raw[r][KEPT == UNITS ? u : 0]
                                     : load_x<uint2, I>(x, share, cols, m, j0 + r, u, 4 * lane);
            });
    }
    __syncwarp();
}

/* Two digits, the columns that a lane has of a product, as one number. */
__device__ __forceinline__ float combine(int low, int high) { return (float)(low + 256 * high); }

/* t += the products of a unit, scaled group by group; of a unit as a whole where a group is a row. */
__device__ __forceinline__ void multiply(float (&t)[EIGHTS][2], const Stream &weights, int s, int unit,
                                         const Fragments &x_fragments, const Digits &digits, int lane) {
    const int g = lane / 4, c = lane % 4;
    uint4 words[W::LOADS];
    weights.load(words, s);
    const W::Scale *scales = weights.scales(s);
    int d[EIGHTS][4] = {};
#pragma unroll
    for (int step = 0; step < 4; step++) {
        unsigned a[4];
        codes(a, reinterpret_cast<const unsigned *>(words), step);
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++) {
            const uint4 b = X_IN_REGISTERS ? x_fragments[unit][step / 2][eight]
                                           : digits.operand(unit, step / 2, eight, lane);
            mma_m16n8k32(d[eight], a, step % 2 ? b.z : b.x, step % 2 ? b.w : b.y);
        }
        if (W::GROUP && (step + 1) % (W::GROUP / 32) == 0) {
            const int group = step / (W::GROUP ? W::GROUP / 32 : 1);
            const float2 low = scale_and_zero(scales, (group * 8 + g) * 2);
            const float2 high = scale_and_zero(scales, (group * 8 + g) * 2 + 1);
#pragma unroll
            for (int eight = 0; eight < EIGHTS; eight++) {
                const float x_sum =
                    digits.x_group_sums[((unit * W::GROUPS + group) * EIGHTS + eight) * 4 + c % (I::ROWS * 2)];
                t[eight][0] += low.x * (combine(d[eight][0], d[eight][1]) - low.y * x_sum);
                t[eight][1] += high.x * (combine(d[eight][2], d[eight][3]) - high.y * (x_sum * HIGH));
                d[eight][0] = d[eight][1] = d[eight][2] = d[eight][3] = 0;
            }
        }
    }
    if (W::GROUP == 0)
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++) {
            t[eight][0] += combine(d[eight][0], d[eight][1]);
            t[eight][1] += combine(d[eight][2], d[eight][3]);
        }
}

/* Keep a warp's sums of a tile: a row's lower and upper digits, which two lanes have, added up in units of x. */
__device__ __forceinline__ void keep(float *sums, const float (&t)[EIGHTS][2], const float (&unit_of_column)[EIGHTS],
                                     int lane) {
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float all = t[eight][half] * (half ? unit_of_column[eight] / HIGH : unit_of_column[eight]);
            all += __shfl_xor_sync(~0u, all, 1);
            const int x_row = (4 * eight + lane % 4) / 2;
            if (lane % 2 == 0 && x_row < I::ROWS) sums[x_row * Sums::X_ROW + half * 8 * Sums::PITCH] = all;
        }
}

extern "C" __global__ void __launch_bounds__(B::THREADS, 1)
gemv(const uint4 *packed, const W::Scale *factors, const I::X *x, Y *y, long long rows, int cols, int m) {
    let_next_kernel_start();
    extern __shared__ __align__(16) uint4 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int slice = warp % B::WARPS_PER_TEAM, team = warp / B::WARPS_PER_TEAM;
    float *const behind_ring = reinterpret_cast<float *>(shared + R::STAGES * Stream::APART);
    const Digits digits(behind_ring, warp);
    const Sums sums{behind_ring + Digits::FLOATS};
    const Share<B> share(rows, cols, warp);

    // 1. ask for weights
    Stream weights(packed, factors, share, cols, shared, warp, lane);
    weights.fill<0, R::STAGES_BEFORE_WAIT>();

    // 2. wait for the kernel ahead
    wait_for_previous_kernel();

    // 3. x becomes digits, and these operands
    make_digits(digits, x, share, cols, m, lane, [&] { weights.fill<R::STAGES_BEFORE_WAIT, R::STAGES>(); });
    float unit_of_column[EIGHTS]; // of the lane's two columns of B
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
        const int pair = (4 * eight + lane % 4) % (I::ROWS * 2);
        unit_of_column[eight] = digits.x_units[pair / 2] * (pair % 2 ? 65536 : 1);
    }
    Fragments x_fragments;
    if (X_IN_REGISTERS)
#pragma unroll
        for (int i = 0; i < B::UNITS * 2 * EIGHTS; i++)
            x_fragments[i / (2 * EIGHTS)][i / EIGHTS % 2][i % EIGHTS] =
                digits.operand(i / (2 * EIGHTS), i / EIGHTS % 2, i % EIGHTS, lane);
    __syncwarp();

    const int place = Sums::place(lane / 4, lane % 4, slice);
    int set = 0;
#pragma unroll 1
    for (int begin = 0; (int)blockIdx.x + begin * share.tile_stride < share.tiles; begin += TILES_IN_PHASE, set ^= 1) {
        const Phase<W, I, B, Sums> phase(factors, rows, begin, threadIdx.x);
        float *tile_sums = sums.first + set * Sums::SET + team * Sums::TILE + place;
        int tile = share.first_tile + begin * share.tile_stride;
#pragma unroll 1
        for (int i = 0; i < TILES_IN_PHASE && tile < share.tiles; i++, tile += share.tile_stride) {
            // 4. multiply, and scale once a group
            float t[EIGHTS][2] = {};
#pragma unroll(X_IN_REGISTERS ? Stream::TILE_STAGES : 1)
            for (int stage = 0; stage < Stream::TILE_STAGES; stage++) {
                weights.wait_full();
#pragma unroll
                for (int s = 0; s < R::UNITS_PER_STAGE; s++) {
                    const int unit = stage * R::UNITS_PER_STAGE + s;
                    if (unit < B::UNITS && (B::WHOLE || unit < share.units))
                        multiply(t, weights, s, unit, x_fragments, digits, lane);
                }
                weights.refill();
            }
            keep(tile_sums, t, unit_of_column, lane);
            tile_sums += B::TEAMS * Sums::TILE;
        }

        // 5. add up the warps' sums; the next phase has sums of its own, so one barrier is enough
        __syncthreads();
        phase.add_up<Digits::ROOM>(sums.first + set * Sums::SET, digits.all_slice_sums, 0, m,
                                   [&](unsigned x_row, long long row, float sum) {
            y[(SPLIT ? (long long)blockIdx.y * m + x_row : x_row) * rows + row] = (Y)sum;
        });
    }
}
