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
#ifndef MATRIX
#define MATRIX Matrix<__half, 4, 128>
#define INPUT Input<__half, 1, true>
#define BLOCK Block<16, 1, 2, true>
#define RING Ring<2, 3, 0>
#define TILES_IN_PHASE 8
#define X_IN_REGISTERS true
#define Y __half
#endif
#include "../device/pdl.cuh"
#include "few_rows.cuh"

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
            multiply_tile(t, weights, x_fragments, digits, share, lane);
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
