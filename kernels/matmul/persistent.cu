/* Rung 7, persistent: a block for each multiprocessor, which takes one tile after another.

   New since specialised:
   - A block stays. The producer goes on to the next tile's stages while consumers still multiply this one's, so first
     copies are waited for once. The phases of the ring go on from tile to tile.
   - Sums leave through TMA: a consumer rounds 64 x 64 of them into shared memory (stmatrix, words exchanged as ever),
     and one thread stores the box. Nobody waits for it until its place is needed again, two boxes later: the last
     stores of a tile are under way while the next is multiplied. From registers a warp writes 16 bytes of each of 8
     rows at a time, half of a sector.

   Work for an H200, 4096 x 4096 x 4096: 137 GFLOP, 139 us at 989 TFLOP/s (1.83 GHz). With all tensor cores at work the
   card's 700 W allow about 1.4 to 1.7 GHz: 150 to 180 us. 512 tiles on 132 multiprocessors are 3.88 rounds, of which 4
   are paid.

   n a multiple of 8, y at a multiple of 16 bytes, as a tensor map with boxes of (64, 64), swizzled by 128 bytes; x
   and W as for specialised. Launch at most as many blocks as there are tiles, of 384 threads. */
#include "../device/hopper/stmatrix.cuh"
#include "../device/hopper/warpgroup.cuh"
#include "../device/hopper/wgmma.cuh"
#include "load_by_tma.cuh"
#include "wide_tile.cuh"

constexpr int BOX = 64, BUFFERS = 2; // rows and columns of y that one store takes; those of a consumer at a time

struct Shared {
    alignas(1024) Stage stages[STAGES];
    unsigned char y[CONSUMERS][BUFFERS][BOX * ROW];
    Ring<STAGES> ring;
};

/* The producer: stages of all the block's tiles, one after another. */
__device__ __forceinline__ void fill_stages(Shared &shared, const CUtensorMap &x, const CUtensorMap &W,
                                            TileOrder<GROUP> order, int steps) {
    Phase<STAGES> phase;
    for (int i = blockIdx.x; i < order.count(); i += gridDim.x) {
        const int2 tile = order.at(i);
        for (int step = 0; step < steps; step++)
            load_step(shared.ring, phase, shared.stages, x, W, tile.x * ROWS, tile.y * COLUMNS, step);
    }
}

/* Steps 2 and 3: a consumer's 64 rows of the tile, from row `row` of it on. */
__device__ __forceinline__ void multiply(float (&sums)[COLUMNS / 2], Shared &shared, Phase<STAGES> &phase, int row,
                                         int steps, int lane) {
    Phase<STAGES> before;
    for (int step = 0; step < steps; step++) {
        shared.ring.wait_full(phase);
        const Stage &stage = shared.stages[phase.stage];
        const Descriptor a = k_major(shared_address(stage.x + row * ROW)), b = k_major(shared_address(stage.w));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < STEP / 16; i++)
            wgmma<COLUMNS>(sums, advance(a, 32 * i), advance(b, 32 * i), step + i > 0, T());
        wgmma_commit();
        wgmma_wait<1>(); // the step before has read its stage
        if (step > 0 && lane == 0) shared.ring.release(before);
        before = phase;
        phase.advance();
    }
    wgmma_wait<0>();
    keep(sums);
    if (lane == 0) shared.ring.release(before);
}

/* Step 4: the sums to y, a box at a time, which go by turns to the consumer's two buffers. */
__device__ __forceinline__ void store_boxes(const CUtensorMap &y, const float (&sums)[COLUMNS / 2],
                                            unsigned char (&buffers)[BUFFERS][BOX * ROW], int row, int column,
                                            int barrier, int thread) {
    const int lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int c = 0; c < COLUMNS / BOX; c++) {
        unsigned char *box = buffers[c % BUFFERS];
        if (thread == 0) store_wait_read<BUFFERS - 1>(); // what lay there has been read
        named_barrier<128>(barrier);
#pragma unroll
        for (int i = 0; i < BOX / 16; i++) { // the warp's 16 rows, 16 columns at a time
            const float *d = sums + c * BOX / 2 + 8 * i;
            stmatrix_x4(shared_address(box + swizzled(16 * warp + lane % 16, 2 * i + lane / 16)),
                        {pack(d[0], d[1], T()), pack(d[2], d[3], T()), pack(d[4], d[5], T()), pack(d[6], d[7], T())});
        }
        fence_async_proxy();
        named_barrier<128>(barrier);
        if (thread == 0) {
            store_tile(y, row, column + c * BOX, box);
            store_commit();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap W,
       const __grid_constant__ CUtensorMap y, long long m, int n, int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const int thread = threadIdx.x % 128, group = warp_uniform(threadIdx.x / 128), steps = divide_up(k, STEP);
    const TileOrder<GROUP> order{divide_up(m, ROWS), divide_up(n, COLUMNS)};
    if (threadIdx.x == 0) shared.ring.init(1, 4 * CONSUMERS);
    __syncthreads();
    if (group == CONSUMERS) { // the producer
        give_registers<40>();
        if (thread == 0) fill_stages(shared, x, W, order, steps);
    } else {
        take_registers<232>();
        Phase<STAGES> phase;
        float sums[COLUMNS / 2];
        for (int i = blockIdx.x; i < order.count(); i += gridDim.x) {
            const int2 tile = order.at(i); // 1. a tile of y
            multiply(sums, shared, phase, group * 64, steps, thread % 32);
            store_boxes(y, sums, shared.y[group], tile.x * ROWS + group * 64, tile.y * COLUMNS, 1 + group, thread);
        }
        if (thread == 0) store_wait(); // written, before the block's shared memory is gone
    }
}
