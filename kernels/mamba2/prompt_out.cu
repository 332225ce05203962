/* out_proj of a prompt, the residual stream and what the next norm needs of it, in one launch: to each tile of sums
   x Wᵀ the residual is added in place, and the next in_proj's factor is made of it, but for the norm's root, which
   waits until whole rows are summed.

       residual += root[row] · x Wᵀ              root: of the gated norm, where x comes without it, or null for 1
       y = residual · weight · before[row]       before: the root of the norm before this one, or null for 1, so that y
                                                 stays of a norm's size, whatever the residual's is
       squares[row][j]: the sum of residual² over the j-th COLUMNS columns (prompt_in.cu makes the root of them)

   x (m, k), W (n, k), y (m, n) of T, residual (m, n) float, weight (n,) of T, squares (m, n / COLUMNS, rounded up)
   float. n a multiple of 8. Compile with SHAPE, of tiles whose consumers lie one below the other; launch as planned.cu,
   whose way to multiply it is. The residual's way, 8 bytes a number, and y's lie beside the products of other tiles. */
#include "../device/pdl.cuh"
#include "../matmul/warpgroups.cuh"
#ifndef SHAPE
#define SHAPE Shape<__half, 128, 256, 2, 4, 8, 2, 1>
#endif
using S = SHAPE;
using T = S::T;
static_assert(S::PART_ROWS == 64 && S::PART_COLUMNS == S::COLUMNS);

#ifndef PAIRS_AHEAD
#define PAIRS_AHEAD 8
#endif
constexpr int AHEAD = PAIRS_AHEAD; // pairs of the residual on their way, of each of a thread's two rows

struct Stream {
    float *residual;
    const T *weight;
    const float *root, *before;
    float *squares;
};

/* Asks for a consumer's part of the residual, of 64 rows, while its products are made: it is in L2 when it is wanted. */
__device__ __forceinline__ void ask_for_residual(const float *residual, int row, int column, long long m, int n,
                                                 int thread) {
    constexpr int LINE = 32, LINES = S::COLUMNS / LINE; // numbers in a line of 128 bytes; lines of a row
#pragma unroll
    for (int i = thread; i < 64 * LINES; i += 128) {
        const long long r = row + i / LINES;
        const int c = column + i % LINES * LINE;
        if (r < m && c < n) asm volatile("prefetch.global.L2 [%0];" ::"l"(residual + r * n + c));
    }
}

/* The residual's part of a tile moves on by the sums, which become y's. A thread has two rows, 8 apart, and pairs of
   neighbouring columns. */
__device__ __forceinline__ void add_residual(Sums<S> &sums, const Stream &stream, int row, int column, long long m,
                                             int n, int thread) {
    const int lane = thread % 32;
    row += thread / 32 * 16 + lane / 4, column += lane % 4 * 2;
    float root[2], scale[2], squares[2] = {};
    float *at[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const long long r = row + 8 * half;
        root[half] = stream.root && r < m ? __ldg(stream.root + r) : 1;
        scale[half] = stream.before && r < m ? __ldg(stream.before + r) : 1;
        at[half] = stream.residual + r * n + column;
    }
#pragma unroll
    for (int j = 0; j < S::COLUMNS / 8; j += AHEAD) {
        float2 old[AHEAD][2];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const bool inside = row + 8 * half < m && column + 8 * (j + i) < n;
                old[i][half] = inside ? *reinterpret_cast<const float2 *>(at[half] + 8 * (j + i)) : float2{};
            }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const bool there = column + 8 * (j + i) < n;
            float2 by = {};
            if (there) by = unpack(__ldg(reinterpret_cast<const unsigned *>(stream.weight + column + 8 * (j + i))), T());
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float *d = sums[0] + 4 * (j + i) + 2 * half;
                const float2 now = {old[i][half].x + root[half] * d[0], old[i][half].y + root[half] * d[1]};
                if (there && row + 8 * half < m) *reinterpret_cast<float2 *>(at[half] + 8 * (j + i)) = now;
                squares[half] += now.x * now.x + now.y * now.y; // outside of x and W all is 0
                d[0] = now.x * by.x * scale[half], d[1] = now.y * by.y * scale[half];
            }
        }
    }
    const int parts = divide_up(n, S::COLUMNS), part = column / S::COLUMNS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        squares[half] += __shfl_xor_sync(~0u, squares[half], 1);
        squares[half] += __shfl_xor_sync(~0u, squares[half], 2);
        const long long r = row + 8 * half;
        if (lane % 4 == 0 && r < m && part < parts) stream.squares[r * parts + part] = squares[half];
    }
}

__device__ __forceinline__ void consume(Shared<S> &shared, const CUtensorMap &y, const Stream &stream, long long m,
                                        int n, Work<S> work, int consumer, int thread) {
    const unsigned sharer = work.sharer(thread % 32);
    Phase<S::STAGES> phase;
    int buffer = 0;
    Sums<S> sums;
    for (; work.exists(); work.next()) {
        const int row = work.row + consumer * 64;
        ask_for_residual(stream.residual, row, work.column, m, n, thread);
        multiply<S>(sums, shared, phase, work.end, consumer * 64, 0, sharer, thread % 32);
        add_residual(sums, stream, row, work.column, m, n, thread);
        store_boxes<S>(y, sums, shared, row, work.column, buffer, consumer, thread);
    }
    if (thread == 0) store_wait();
}

extern "C" __global__ void __launch_bounds__(S::THREADS, 1)
prompt_out(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap W,
           const __grid_constant__ CUtensorMap y, float *residual, const T *weight, const float *root,
           const float *before, float *squares, long long m, int n, int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared<S> &shared = *reinterpret_cast<Shared<S> *>(memory);
    const int group = warp_uniform(threadIdx.x / 128), thread = threadIdx.x % 128;
    if (threadIdx.x == 0) shared.ring.init(1, 4 * S::CONSUMERS * S::SHARERS);
    if constexpr (S::CLUSTER == 1) __syncthreads();
    else cluster_barrier();
    let_next_kernel_start();
    wait_for_previous_kernel();
    const Work<S> work(m, n, k, 1);
    if (group == S::CONSUMERS) {
        give_registers<40>();
        if (thread == 0) fill_stages<S>(shared, x, W, work);
    } else {
        take_registers<232>();
        consume(shared, y, {residual, weight, root, before, squares}, m, n, work, group, thread);
    }
    __syncwarp();
    if constexpr (S::CLUSTER > 1) cluster_barrier(); // nobody leaves while the other may still write here
}
