/* out_proj of a prompt, the residual stream and what the next norm needs of it, in one launch: to each tile of sums
   x Wᵀ the residual is added in place, and the next in_proj's factor is made of it, but for the norm's root, which
   waits until whole rows are summed.

       residual += root[row] · x Wᵀ              root: of the gated norm, where x comes without it, or null for 1
       y = residual · weight · before[row]       before: the root of the norm before this one, or null for 1, so that y
                                                 stays of a norm's size, whatever the residual's is
       squares[row][j]: the sum of residual² over the j-th COLUMNS columns (norm_root.cu makes the root of them)

   x (m, k), W (n, k), y (m, n) of T, residual (m, n) float, weight (n,) of T, squares (m, n / COLUMNS, rounded up)
   float. n a multiple of 8. The residual's map: boxes of (ROWS, 32). Compile with SHAPE, of tiles whose consumers lie
   one below the other; launch as planned.cu, whose way to multiply it is. */
#include "../device/pdl.cuh"
#include "../matmul/warpgroups.cuh"
#ifndef SHAPE
#define SHAPE Shape<__half, 128, 256, 2, 4, 8, 2, 1>
#endif
using S = SHAPE;
using T = S::T;
static_assert(S::PART_ROWS == 64 && S::PART_COLUMNS == S::COLUMNS);

/* The residual's tile comes through the ring, behind the steps of k: ALL_BOXES boxes of all rows and LINE columns,
   BOXES in a stage. */
constexpr int LINE = 32, BOX_BYTES = S::ROWS * 128, BOXES = sizeof(Shared<S>::Stage) / BOX_BYTES;
constexpr int ALL_BOXES = S::COLUMNS / LINE;

struct Stream {
    float *residual;
    const T *weight;
    const float *root, *before;
    float *squares;
};

/* What a thread needs beside its sums: it has two rows, 8 apart, and pairs of neighbouring columns. Asked for before
   the products, so that nobody waits for it behind them. */
struct Beside {
    unsigned weight[S::COLUMNS / 8];
    float root[2], before[2];

    __device__ __forceinline__ Beside(const Stream &stream, int row, int column, long long m, int n) {
#pragma unroll
        for (int j = 0; j < S::COLUMNS / 8; j++) {
            weight[j] = 0;
            if (column + 8 * j < n)
                asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(weight[j]) : "l"(stream.weight + column + 8 * j));
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const bool inside = row + 8 * half < m;
            root[half] = stream.root && inside ? stream.root[row + 8 * half] : 1;
            before[half] = stream.before && inside ? stream.before[row + 8 * half] : 1;
        }
    }
};

/* The residual's part of a tile moves on by the sums, which become y's. */
__device__ __forceinline__ void add_residual(Sums<S> &sums, Shared<S> &shared, Phase<S::STAGES> &phase,
                                             const Stream &stream, const Beside &beside, int row, int column,
                                             int in_tile, long long m, int n, unsigned sharer, int lane) {
    float squares[2] = {};
    float *at = stream.residual + (long long)row * n + column;
    const bool there[2] = {row < m, row + 8 < m};
#pragma unroll
    for (int box = 0; box < ALL_BOXES; box++) {
        if (box % BOXES == 0) shared.ring.wait_full(phase);
        const unsigned char *rows = shared.stages[phase.stage].x + box % BOXES * BOX_BYTES;
#pragma unroll
        for (int i = 0; i < LINE / 8; i++) {
            const int j = box * LINE / 8 + i;
            const bool inside = column + 8 * j < n;
            const float2 by = unpack(beside.weight[j], T());
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float *d = sums[0] + 4 * j + 2 * half;
                const float2 old = *reinterpret_cast<const float2 *>(
                    rows + swizzled(in_tile + 8 * half, 2 * i + lane % 4 / 2) + lane % 2 * 8);
                const float2 now = {old.x + beside.root[half] * d[0], old.y + beside.root[half] * d[1]};
                if (inside && there[half]) *reinterpret_cast<float2 *>(at + 8ll * half * n + 8 * j) = now;
                squares[half] += now.x * now.x + now.y * now.y; // outside of x and W all is 0
                d[0] = now.x * by.x * beside.before[half], d[1] = now.y * by.y * beside.before[half];
            }
        }
        if (box % BOXES == BOXES - 1 || box == ALL_BOXES - 1) {
            fence_async_proxy(); // what was read here has come, so that TMA may write again
            __syncwarp();
            release<S>(shared.ring, phase, sharer, lane);
            phase.advance();
        }
    }
    const int parts = divide_up(n, S::COLUMNS), part = column / S::COLUMNS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        squares[half] += __shfl_xor_sync(~0u, squares[half], 1);
        squares[half] += __shfl_xor_sync(~0u, squares[half], 2);
        if (lane % 4 == 0 && there[half] && part < parts)
            stream.squares[(row + 8ll * half) * parts + part] = squares[half];
    }
}

__device__ __forceinline__ void consume(Shared<S> &shared, const CUtensorMap &y, const Stream &stream, long long m,
                                        int n, Work<S> work, int consumer, int thread) {
    const unsigned sharer = work.sharer(thread % 32);
    Phase<S::STAGES> phase;
    int buffer = 0;
    Sums<S> sums;
    for (; work.exists(); work.next()) {
        const int lane = thread % 32, in_tile = consumer * 64 + thread / 32 * 16 + lane / 4;
        const int row = work.row + consumer * 64, column = work.column + lane % 4 * 2;
        const Beside beside(stream, work.row + in_tile, column, m, n);
        multiply<S>(sums, shared, phase, work.end, consumer * 64, 0, sharer, lane);
        add_residual(sums, shared, phase, stream, beside, work.row + in_tile, column, in_tile, m, n, sharer, lane);
        store_boxes<S>(y, sums, shared, row, work.column, buffer, consumer, thread);
    }
    if (thread == 0) store_wait();
}

extern "C" __global__ void __launch_bounds__(S::THREADS, 1)
prompt_out(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap W,
           const __grid_constant__ CUtensorMap y, const __grid_constant__ CUtensorMap residual_map, float *residual,
           const T *weight, const float *root, const float *before, float *squares, long long m, int n, int k) {
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
        auto residual_behind = [&](Phase<S::STAGES> &phase, const Work<S> &work) {
#pragma unroll
            for (int first = 0; first < ALL_BOXES; first += BOXES, phase.advance()) {
                const int boxes = min(BOXES, ALL_BOXES - first);
                Barrier &full = shared.ring.full[phase.stage];
                shared.ring.wait_empty(phase);
                full.expect(boxes * BOX_BYTES);
                for (int i = 0; i < boxes; i++)
                    load_tile(shared.stages[phase.stage].x + i * BOX_BYTES, residual_map, work.row,
                              work.column + (first + i) * LINE, full);
            }
        };
        if (thread == 0) fill_stages<S>(shared, x, W, work, residual_behind);
    } else {
        take_registers<232>();
        consume(shared, y, {residual, weight, root, before, squares}, m, n, work, group, thread);
    }
    __syncwarp();
    if constexpr (S::CLUSTER > 1) cluster_barrier(); // nobody leaves while the other may still write here
}
