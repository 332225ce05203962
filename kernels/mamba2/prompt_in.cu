/* in_proj of a prompt with the norm's root ahead of it and the convolution behind it, in one launch.

       y = root[row] · x Wᵀ, and of it `channels` columns from `inner` on: silu(bias + Σ taps[k] y[t - WIDTH + 1 + k])

   x (m, k) comes without the norm's root, as prompt_out.cu makes it: times `before`, and with squares (m, parts), whose
   sum over parts is a row's sum of squares. root = 1 / √(sum / k + eps), which goes to `after`, over `before`. Where
   squares is null, x has been normed already.

   A consumer has 64 rows of a tile: of its channels it can do all but the first WIDTH - 1 rows, whose inputs lie in the
   tile above. The first and last WIDTH - 1 rows of inputs go to edges (m / 64, rounded up; 2 (WIDTH - 1); channels), and
   conv_edges.cu does those. Inputs are rounded to T first, as if they had been stored.

   W (n, k), y (m, n) of T, y with `stride` numbers from row to row; n, inner and channels multiples of 8; inner and channels of 64, so that a box of 64 columns is
   of one kind. taps (channels, WIDTH), bias (channels,) float. Compile with SHAPE and WIDTH; launch as planned.cu. */
#include "../device/math.cuh"
#include "../device/pdl.cuh"
#include "../matmul/warpgroups.cuh"
#ifndef SHAPE
#define SHAPE Shape<__half, 128, 256, 2, 4, 8, 2, 1>
#endif
using S = SHAPE;
using T = S::T;
static_assert(S::PART_ROWS == 64 && S::PART_COLUMNS == S::COLUMNS);

constexpr int PAST = WIDTH - 1, VEC = 8; // inputs before a token's own; numbers in a word of 16 bytes
constexpr int RUN = 4;                   // rows of a box that a thread does, in one word of columns

struct Norm {
    const float *squares, *before;
    float *after;
    int parts;
    float eps;
};
struct Convolution {
    const float *taps, *bias;
    T *edges, *y;
    int inner, channels;
    long long stride; // of y
};

/* The sums of a thread's two rows times the rest of the norm. */
__device__ __forceinline__ void scale_rows(Sums<S> &sums, const Norm &norm, int row, int column, long long m, int k,
                                           int thread) {
    if (!norm.squares) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const long long r = row + thread / 32 * 16 + thread % 32 / 4 + 8 * half;
        float scale = 0;
        if (r < m) {
            float sum = 0;
            for (int i = 0; i < norm.parts; i++) sum += __ldg(norm.squares + r * norm.parts + i);
            const float root = rsqrtf(sum / k + norm.eps);
            scale = norm.before ? root / __ldg(norm.before + r) : root;
            if (column == 0 && thread % 4 == 0) norm.after[r] = root;
        }
#pragma unroll
        for (int j = 0; j < S::COLUMNS / 8; j++) sums[0][4 * j + 2 * half] *= scale, sums[0][4 * j + 2 * half + 1] *= scale;
    }
}

/* A box of inputs, from `row` and channel `c` on, in shared memory: RUN tokens of VEC channels. */
__device__ __forceinline__ void convolve(const unsigned char *box, const Convolution &conv, int row, int c,
                                         long long m, int thread) {
    const int first = thread / 8 * RUN, word = thread % 8, rows = (int)min(64ll, m - row);
    c += word * VEC;
    uint4 words[PAST + RUN];
#pragma unroll
    for (int i = 0; i < PAST + RUN; i++) {
        const int r = first - PAST + i;
        words[i] = r >= 0 ? *reinterpret_cast<const uint4 *>(box + swizzled(r, word)) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < RUN; i++) { // what the strips above and below need
        const int r = first + i;
        T *edge = conv.edges + ((long long)(row / 64) * 2 * PAST * conv.channels + c);
        if (r < PAST && r < rows) *reinterpret_cast<uint4 *>(edge + (long long)r * conv.channels) = words[PAST + i];
        const int last = r - (rows - PAST);
        if (last >= 0 && last < PAST)
            *reinterpret_cast<uint4 *>(edge + (long long)(PAST + last) * conv.channels) = words[PAST + i];
    }
    float taps[VEC][WIDTH], start[VEC];
#pragma unroll
    for (int v = 0; v < VEC; v++) {
        start[v] = conv.bias ? __ldg(conv.bias + c + v) : 0;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) taps[v][i] = __ldg(conv.taps + (long long)(c + v) * WIDTH + i);
    }
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        float sum[VEC];
#pragma unroll
        for (int v = 0; v < VEC; v++) sum[v] = start[v];
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            float x[VEC];
            widen(words[i + k], x, T());
#pragma unroll
            for (int v = 0; v < VEC; v++) sum[v] += taps[v][k] * x[v];
        }
#pragma unroll
        for (int v = 0; v < VEC; v++) sum[v] *= reciprocal_approx(1 + exp2_approx(-LOG2_E * sum[v]));
        if (first + i < PAST || first + i >= rows) continue;
        const uint4 out = {pack(sum[0], sum[1], T()), pack(sum[2], sum[3], T()), pack(sum[4], sum[5], T()),
                           pack(sum[6], sum[7], T())};
        *reinterpret_cast<uint4 *>(conv.y + (row + first + i) * conv.stride + conv.inner + c) = out;
    }
}

/* A tile's sums to y, box by box: as they are, or by way of the convolution. */
__device__ __forceinline__ void store_parts(const CUtensorMap &y, const Sums<S> &sums, Shared<S> &shared,
                                            const Convolution &conv, int row, int column, long long m,
                                            int &buffer, int consumer, int thread) {
#pragma unroll
    for (int c = 0; c < S::COLUMNS / BOX; c++) {
        const int channel = column + c * BOX - conv.inner;
        if (channel < 0 || channel >= conv.channels) {
            store_box<S>(y, sums, shared, 0, c, row, column, buffer, consumer, thread);
            continue;
        }
        unsigned char *box = shared.y[consumer][buffer].rows;
        if (thread == 0) store_wait_read<0>();
        named_barrier<128>(1 + consumer); // and all have read what the convolution had there
        put_box<S>(box, sums, 0, c, thread);
        named_barrier<128>(1 + consumer);
        if (row < m) convolve(box, conv, row, channel, m, thread);
        buffer ^= 1;
    }
}

__device__ __forceinline__ void consume(Shared<S> &shared, const CUtensorMap &y, const Norm &norm,
                                        const Convolution &conv, long long m, int k, Work<S> work, int consumer, int thread) {
    const unsigned sharer = work.sharer(thread % 32);
    Phase<S::STAGES> phase;
    int buffer = 0;
    Sums<S> sums;
    for (; work.exists(); work.next()) {
        multiply<S>(sums, shared, phase, work.end, consumer * 64, 0, sharer, thread % 32);
        const int row = work.row + consumer * 64;
        scale_rows(sums, norm, row, work.column, m, k, thread);
        store_parts(y, sums, shared, conv, row, work.column, m, buffer, consumer, thread);
    }
    if (thread == 0) store_wait();
}

extern "C" __global__ void __launch_bounds__(S::THREADS, 1)
prompt_in(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap W,
          const __grid_constant__ CUtensorMap y_map, T *y, const float *squares, const float *before, float *after,
          const float *taps, const float *bias, T *edges, long long m, int n, int k, int parts, int inner, int channels,
          long long stride, float eps) {
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
        consume(shared, y_map, {squares, before, after, parts, eps}, {taps, bias, edges, y, inner, channels, stride}, m, k, work,
                group, thread);
    }
    __syncwarp();
    if constexpr (S::CLUSTER > 1) cluster_barrier(); // nobody leaves while the other may still write here
}
