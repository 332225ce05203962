/* Latent attention, first of two launches: each block reads an equal share of the tokens for 16 to 64 heads, and leaves
   what it found for merge.cu.

   A tile of tokens in shared memory is read twice from there: all its 576 numbers as keys, and the first 512 of them
   as values. So a byte that has come once serves 16 to 64 heads for both products. Eight warps share the work: HEADS /
   16 have different heads, and the PARTS of those with the same heads take different tokens of a tile for scores, and
   different dimensions of the result. Between the two products weights go through shared memory.

   The maximum that sums are relative to is stale, as in ../attention/softmax.cuh: it follows when a score exceeds it by
   RESCALE_ABOVE.

   Moves 1152 bytes a token for each head tile, all but the first from L2, and 2056 bytes for each head and segment.
   Compile with SHAPE and STAGES. Launch with 256 threads on (head tiles, shares) blocks. Shared memory: queries [HEADS]
   [WIDTH], STAGES tiles, weights [HEADS][TILE + 8], maxima [PARTS][HEADS]. table, if PAGED: (batch, max_pages); kv_lens
   (batch,) or none. partial_out, max_and_sum: line.cuh. scale: times log2(e). */
#include "../device/copy.cuh"
#include "../device/half2.cuh"
#include "../device/math.cuh"
#include "../device/mma.cuh"
#include "../device/pdl.cuh"
#include "../device/reduce_fragments.cuh"
#include "cache.cuh"
#include "line.cuh"
#ifndef STAGES
#define STAGES 2
#endif

constexpr int WARPS = 8, SIXTEENS = HEADS / 16, PARTS = WARPS / SIXTEENS; // warps; of heads; warps of the same heads
constexpr int TOKENS = TILE / PARTS, DIMS = LATENT / PARTS;               // of a warp: for scores, of the result
constexpr int WORDS = WIDTH / 8;                                          // of 16 bytes
constexpr int TILE_SIZE = TILE * WIDTH, PITCH = TILE + 8;                 // elements
constexpr float RESCALE_ABOVE = 8, LOWEST = -3.4028235e38f;               // log 2; of all finite scores
static_assert(TOKENS % 8 == 0 && TILE % 16 == 0 && DIMS % 16 == 0, "whole products");

/* Where a word of a row lies, in elements: exchanged within eight, so that ldmatrix finds the same word of eight rows
   in different banks. */
__device__ __forceinline__ int place_of(int row, int word) { return row * WIDTH + (word ^ row % 8) * 8; }

/* Start to copy rows of 576 numbers; those from `there` on become zeros, whatever lies behind them. */
template <int ROWS>
__device__ __forceinline__ void copy_rows(T *to, const T *from, int there) {
    const unsigned at = shared_address(to);
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * WORDS; i += 32 * WARPS) {
        const int row = i / WORDS, word = i - row * WORDS;
        copy_async_or_zero(at + place_of(row, word) * sizeof(T), from + 8ll * i, row < there);
    }
}

/* What a warp knows of 16 heads, in the layout of an mma: lane 4g + c has heads g and g + 8. */
struct HeadSums {
    float values[DIMS / 8][4]; // weighted: (heads, DIMS)
    float maximum[2];
    float weights[4]; // summed: of head g in [0], of g + 8 in [2]

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < DIMS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) values[n][i] = 0;
        maximum[0] = maximum[1] = LOWEST;
        weights[0] = weights[1] = weights[2] = weights[3] = 0;
    }
    /* Follow the highest score, if it is too far above. */
    __device__ __forceinline__ void follow(int r, float highest) {
        if (highest <= maximum[r] + RESCALE_ABOVE) return;
        const float scale = exp2_approx(maximum[r] - highest);
        maximum[r] = highest;
        weights[2 * r] *= scale;
#pragma unroll
        for (int n = 0; n < DIMS / 8; n++) values[n][2 * r] *= scale, values[n][2 * r + 1] *= scale;
    }
};

/* Scores (16 heads, TOKENS), not scaled. */
__device__ __forceinline__ void multiply_keys(float (&s)[TOKENS / 8][4], const T *queries, const T *keys, int lane) {
    const unsigned q = shared_address(queries), k = shared_address(keys);
#pragma unroll
    for (int d = 0; d < WIDTH / 32; d++) {
        unsigned a[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++)
            ldmatrix_x4(a[half], q + place_of(lane % 16, 4 * d + 2 * half + lane / 16) * sizeof(T));
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++) {
            unsigned b[4];
            ldmatrix_x4(b, k + place_of(8 * n + lane % 8, 4 * d + lane / 8) * sizeof(T));
            mma_m16n8k16(s[n], a[0], b[0], b[1], T());
            mma_m16n8k16(s[n], a[1], b[2], b[3], T());
        }
    }
}

/* Add the values, weighted; first_word: of this warp's dimensions. The sum of weights is one more product, with ones:
   of weights as rounded as for the values. */
__device__ __forceinline__ void mix_values(HeadSums &sums, const T *weights, const T *values, int first_word, int lane) {
    const unsigned w = shared_address(weights), v = shared_address(values), ones = pack(1, 1, T());
#pragma unroll
    for (int t = 0; t < TILE / 16; t++) {
        unsigned a[4];
        ldmatrix_x4(a, w + (lane % 16 * PITCH + 16 * t + lane / 16 * 8) * sizeof(T));
        mma_m16n8k16(sums.weights, a, ones, ones, T());
#pragma unroll
        for (int d = 0; d < DIMS / 16; d++) {
            unsigned b[4];
            ldmatrix_x4_trans(b, v + place_of(16 * t + lane % 16, first_word + 2 * d + lane / 16) * sizeof(T));
            mma_m16n8k16(sums.values[2 * d], a, b[0], b[1], T());
            mma_m16n8k16(sums.values[2 * d + 1], a, b[2], b[3], T());
        }
    }
}

/* Of a segment, these heads' results, or what merge.cu makes them of. */
__device__ __forceinline__ void store(const HeadSums &sums, bool whole, T *out, float *partial_out, float2 *max_and_sum,
                                      long long sequence_row, long long segment_row, int heads, int first_dim,
                                      int lane) {
    const int g = lane / 4, column = first_dim + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int head = g + 8 * r;
        if (head >= heads) continue;
        const float share = sums.weights[2 * r] == 0 ? 0 : 1 / sums.weights[2 * r]; // 0: all its scores are -inf
#pragma unroll
        for (int n = 0; n < DIMS / 8; n++) {
            const float x = sums.values[n][2 * r], y = sums.values[n][2 * r + 1];
            if (whole)
                *reinterpret_cast<unsigned *>(out + (sequence_row + head) * LATENT + column + 8 * n) =
                    pack(x * share, y * share, T());
            else
                *reinterpret_cast<float2 *>(partial_out + (segment_row + head) * LATENT + column + 8 * n) =
                    make_float2(x, y);
        }
        if (!whole && column == 0) max_and_sum[segment_row + head] = make_float2(sums.maximum[r], sums.weights[2 * r]);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
split(const T *q, const T *cache, const int *table, const int *kv_lens, T *out, float *partial_out,
      float2 *max_and_sum, int kv_len, int batch, int n_heads, int n_pages, int max_pages, float scale) {
    extern __shared__ __align__(16) uint4 shared[];
    T *queries = reinterpret_cast<T *>(shared), *ring = queries + HEADS * WIDTH, *weights = ring + STAGES * TILE_SIZE;
    float *maxima = reinterpret_cast<float *>(weights + HEADS * PITCH); // [PARTS][HEADS]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const int first_head = warp % SIXTEENS * 16, part = warp / SIXTEENS; // of the head tile
    const int heads_before = blockIdx.x * HEADS, share = blockIdx.y;
    let_next_kernel_start();

    // 1. which tiles
    const Sequences sequences{kv_lens, kv_len, batch};
    const LineShares shares(sequences, gridDim.y, lane);
    const int begin = shares.first_tile(share), count = shares.first_tile(share + 1) - begin;
    wait_for_previous_kernel();
    if (count == 0) return;
    const Cache tokens{cache, table, n_pages, max_pages, kv_len};
    HeadSums sums;
    for (Segment segment(sequences, begin, count, lane);; segment.next(sequences)) {
        const int length = sequences.length(segment.b);
        const long long sequence_row = (long long)segment.b * n_heads + heads_before;
        auto copy_tile = [&](int tile) {
            if (tile < segment.end) {
                const int first = tile * TILE, slot = (tile - segment.tile) % STAGES;
                copy_rows<TILE>(ring + slot * TILE_SIZE, tokens.address(segment.b, first), length - first);
            }
            copy_async_commit(); // with nothing, too: copies are counted
        };

        // 2. queries, and the first tiles
        __syncthreads(); // who still reads the last segment's?
        copy_rows<HEADS>(queries, q + sequence_row * WIDTH, n_heads - heads_before);
#pragma unroll 1
        for (int stage = 0; stage < STAGES - 1; stage++) copy_tile(segment.tile + stage);
        sums.clear();
#pragma unroll 1
        for (int tile = segment.tile; tile < segment.end; tile++) {
            copy_async_wait<STAGES - 2>();
            __syncthreads(); // all have what all have copied, and nobody reads the tile before
            copy_tile(tile + STAGES - 1);
            const T *here = ring + (tile - segment.tile) % STAGES * TILE_SIZE;

            // 3. scores in units of log 2, and the highest of each head
            float s[TOKENS / 8][4] = {};
            multiply_keys(s, queries + first_head * WIDTH, here + part * TOKENS * WIDTH, lane);
            const int there = length - tile * TILE - part * TOKENS - 2 * c;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float highest = LOWEST;
#pragma unroll
                for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float &score = s[n][2 * r + i];
                        score = 8 * n + i < there ? score * scale : -INFINITY;
                        highest = fmaxf(highest, score);
                    }
                highest = row_max(highest);
                if (c == 0) maxima[part * HEADS + first_head + g + 8 * r] = highest;
            }
            __syncthreads();

            // 4. weights
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int head = first_head + g + 8 * r;
                float highest = maxima[head];
#pragma unroll
                for (int p = 1; p < PARTS; p++) highest = fmaxf(highest, maxima[p * HEADS + head]);
                sums.follow(r, highest);
#pragma unroll
                for (int n = 0; n < TOKENS / 8; n++)
                    *reinterpret_cast<unsigned *>(weights + head * PITCH + part * TOKENS + 8 * n + 2 * c) =
                        pack(exp2_approx(s[n][2 * r] - sums.maximum[r]), exp2_approx(s[n][2 * r + 1] - sums.maximum[r]),
                             T());
            }
            __syncthreads();

            // 5. weighted values
            mix_values(sums, weights + first_head * PITCH, here, part * DIMS / 8, lane);
        }

        // 6. what the block hands on
        store(sums, segment.whole(), out, partial_out, max_and_sum, sequence_row + first_head,
              segment.place(share) * n_heads + heads_before + first_head, n_heads - heads_before - first_head,
              part * DIMS, lane);
        if (segment.left == 0) return;
    }
}
