/* A layer's attention for one new token in one launch: biases, norms of heads, positions, the token's place in the
   cache, and the mix of all values (steps 2 to 5 of ref.llm), which were three launches: rope_append.cu, and decode.cu
   with merge.cu of chapter 08.

   A cluster of CLUSTER blocks has a kv head and its query heads. So
   - its blocks share the tokens, tile by tile by turns, whatever the length;
   - the block whose tile has the newest token makes its key and value, and stores them; the query heads each block
     makes for itself, as they are few;
   - what the blocks have of the result meets in their shared memory: each sends every other its part of the channels,
     with the maximum and the sum of weights that it is relative to. One barrier of the cluster stands between, and no
     launch.

   Everything that no kernel of this token writes is asked for before the wait: the length, the angles of its position,
   and the first tiles. So the launch behind the length's writer must not be a dependent one.

   qkv        (n_heads + 2 · n_kv_heads, HEAD_DIM), what the product gave; bias, q_norm, k_norm, turns, kv_len: as for
              rope_append.cu
   k, v       (capacity, n_kv_heads, HEAD_DIM): the cache; addresses are multiples of 16 bytes
   out        (n_heads, HEAD_DIM)
   scale      times log2(e)

   Moves 4 · kv_len · n_kv_heads · HEAD_DIM bytes, and little else. A length outside of 1 … capacity appends nothing,
   and is taken as the nearest of 0 and capacity; one of 0 gives zeros. Compile with SHAPE (a group of at most 16) and
   SCHEDULE (attention/shape.cuh; one head tile of a block, no lengths, rows that are shared), RING_STAGES and CLUSTER.
   Launch with 32 * WARPS threads on n_kv_heads * CLUSTER blocks in clusters of CLUSTER. */
#ifndef SHAPE
#define SHAPE Shape<__half, 128, 4>
#define SCHEDULE Schedule<8, 16, 1, false, false>
#define RING_STAGES 3
#define CLUSTER 8
#endif
#include "../attention/partial.cuh"
#include "../attention/tile_products.cuh"
#include "../device/hidden.cuh"
#include "../device/hopper/cluster_store.cuh"
#include "../device/pdl.cuh"
#include "../device/ring.cuh"
#define DTYPE SHAPE::T
#include "head.cuh"

constexpr int STAGES = RING_STAGES;         // tiles of a warp's ring
constexpr int COLUMNS = HEAD_DIM / CLUSTER; // channels of a block's result
static_assert(HEAD_TILES == 1 && HEAD_TILES_PER_BLOCK == 1 && WARPS > 1, "a block has all query heads of a kv head");
static_assert(HEAD_DIM % (4 * CLUSTER) == 0, "each block has whole words of four channels");

/* What the blocks of a cluster send each other: [block that sent it][HEADS], COLUMNS channels each, and a pair. */
struct ClusterSums {
    static constexpr int FLOATS = CLUSTER * HEADS * (COLUMNS + 2);
    float *values, *pairs;
    int mine; // rank

    __device__ __forceinline__ ClusterSums(float *first, int mine)
        : values(first), pairs(first + CLUSTER * HEADS * COLUMNS), mine(mine) {}

    /* As WarpSums hands on four channels of a head; found: the maximum and the sum that they are relative to. */
    __device__ __forceinline__ void store(int, int head, int channel, float4 sum, float2 found) const {
        const int rank = channel / COLUMNS, at = mine * HEADS + head;
        const float four[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int i = 0; i < 4; i++) store_in_cluster(values + at * COLUMNS + channel % COLUMNS + i, rank, four[i]);
        if (channel % COLUMNS == 0) {
            store_in_cluster(pairs + 2 * at, rank, found.x);
            store_in_cluster(pairs + 2 * at + 1, rank, found.y);
        }
    }
    /* All have sent: two channels of a head for each thread. out: of the kv head's first query head */
    __device__ __forceinline__ void add_up(T *out, int thread) const {
        const float2 *const found = reinterpret_cast<const float2 *>(pairs);
        for (int i = 2 * thread; i < HEADS * COLUMNS; i += 2 * 32 * WARPS) {
            const int head = i / COLUMNS, channel = i % COLUMNS;
            const float2 whole = joined<CLUSTER>(found + head, HEADS);
            float2 sum = {0, 0};
#pragma unroll
            for (int block = 0; block < CLUSTER; block++) {
                const float weight = exp2_approx(found[block * HEADS + head].x - whole.x);
                const float *const part = values + (block * HEADS + head) * COLUMNS + channel;
                sum.x += weight * part[0], sum.y += weight * part[1];
            }
            const float share = whole.y > 0 ? 1 / whole.y : whole.y; // NaN stays; no tokens: zeros
            *reinterpret_cast<unsigned *>(out + head * HEAD_DIM + mine * COLUMNS + channel) =
                pack(sum.x * share, sum.y * share, T());
        }
    }
};

/* A warp's tiles of 16 tokens on their way into its ring. */
struct Tiles {
    const T *k, *v; // of the kv head
    T *ring;
    int token_stride, old_tokens, newest; // elements; tokens that are in the cache; the one that comes, or -1
    int next, tiles;                      // the tile to be asked for, of so many
    CachePolicy once;

    __device__ __forceinline__ void prefetch(int slot, int lane) {
        if (next < tiles) {
            const unsigned slot_at = hidden(shared_address(ring + 2 * slot * TILE_SIZE), lane);
#pragma unroll
            for (int kv = 0; kv < 2; kv++)
#pragma unroll
                for (int number = lane; number < TILE * WORDS; number += 32) {
                    const int token = number / WORDS, word = number % WORDS, at = next * TILE + token;
                    const unsigned to = slot_at + (kv * TILE_SIZE + place_of(token, word)) * BYTES;
                    if (at < old_tokens) copy_async(to, (kv ? v : k) + (long long)at * token_stride + 8 * word, once);
                    else if (at != newest) store_zeros(to);
                }
            next += CLUSTER * WARPS;
        }
        CopyRing<STAGES>::filled(); // with nothing, too
    }
    /* Lay the newest token's key or value down in its tile. */
    __device__ __forceinline__ void lay_down(T *tile, const float (&a)[PAIRS], const float (&b)[PAIRS],
                                             int lane) const {
        for (int n = 0; n < PAIRS; n++)
            for (int half = 0; half < 2; half++) {
                const int channel = lane + 32 * n + half * (HEAD_DIM / 2);
                if (lane + 32 * n < HEAD_DIM / 2)
                    tile[place_of(newest % TILE, channel / 8) + channel % 8] = (T)(half ? b[n] : a[n]);
            }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
attend(const T *qkv, const T *bias, const T *q_norm, const T *k_norm, const double *turns, const int *kv_len, T *k,
       T *v, T *out, int n_kv_heads, int capacity, float eps, float scale) {
    extern __shared__ __align__(16) uint4 shared[];
    let_next_kernel_start();
    cluster_begin();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int kv_head = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, n_heads = n_kv_heads * GROUP;
    T *const rings = reinterpret_cast<T *>(shared), *const queries = rings + WARPS * STAGES * 2 * TILE_SIZE;
    const WarpSums warp_sums(reinterpret_cast<float *>(queries + HEADS * PITCH));
    const ClusterSums cluster_sums(warp_sums.values + WarpSums::FLOATS, rank);

    // 1. which tiles; fill the ring
    const int said = *kv_len, position = said - 1, length = min(max(said, 0), capacity);
    const bool appends = said == length && length > 0;
    const int mine = rank + CLUSTER * warp;
    T *const ring_memory = rings + warp * STAGES * 2 * TILE_SIZE;
    const int old_tokens = appends ? position : length, newest = appends ? position : -1;
    Tiles tiles = {k + kv_head * HEAD_DIM, v + kv_head * HEAD_DIM, ring_memory, n_kv_heads * HEAD_DIM,
                   old_tokens, newest, mine, (length + TILE - 1) / TILE, evict_first()};
#pragma unroll 1
    for (int slot = 0; slot < STAGES; slot++) tiles.prefetch(slot, lane);
    const Turns here(turns, position, lane);
    wait_for_previous_kernel();

    // 2. the query heads; and, where the newest token is, its key and value
    float key[2][PAIRS], value[2][PAIRS];
    const int newest_tile = appends ? position / TILE : -1;
    const bool has_newest = appends && newest_tile % (CLUSTER * WARPS) == mine;
    for (int head = warp; head < HEADS; head += WARPS) {
        const int at = (kv_head * GROUP + head) * HEAD_DIM;
        float a[PAIRS], b[PAIRS];
        take_head(a, b, qkv + at, bias ? bias + at : nullptr, q_norm, eps, &here, lane);
        store_head(queries + head * PITCH, a, b, lane);
    }
    if (has_newest) {
        const int at_k = (n_heads + kv_head) * HEAD_DIM, at_v = at_k + n_kv_heads * HEAD_DIM;
        const long long place = (long long)position * tiles.token_stride + kv_head * HEAD_DIM;
        take_head(key[0], key[1], qkv + at_k, bias ? bias + at_k : nullptr, k_norm, eps, &here, lane);
        take_head(value[0], value[1], qkv + at_v, bias ? bias + at_v : nullptr, nullptr, eps, nullptr, lane);
        store_head(k + place, key[0], key[1], lane);
        store_head(v + place, value[0], value[1], lane);
    }
    __syncthreads();
    QueryOperands operands;
#pragma unroll
    for (int d = 0; d < STEPS; d++)
        ldmatrix_x4(operands[d], shared_address(queries + min(lane % 16, HEADS - 1) * PITCH + 16 * d + lane / 16 * 8));

    CopyRing<STAGES> ring;
    SoftmaxSums sums;
    sums.clear();
#pragma unroll 1
    for (int tile = mine; tile < tiles.tiles; tile += CLUSTER * WARPS) {
        T *const here_in_ring = ring_memory + ring.wait_full() * 2 * TILE_SIZE;
        if (tile == newest_tile) {
            tiles.lay_down(here_in_ring, key[0], key[1], lane);
            tiles.lay_down(here_in_ring + TILE_SIZE, value[0], value[1], lane);
        }
        __syncwarp();
        const unsigned keys = shared_address(here_in_ring);

        // 3. scores, 4. weights, and 5. weighted values
        Scores s = {};
        multiply_keys(s, operands, keys, lane);
        scale_and_mask(s, scale, length - tile * TILE - lane % 4 * 2);
        Weights weights;
        sums.online_softmax(s, weights);
        mix_values(sums, weights, keys + TILE_SIZE * BYTES, lane);
        __syncwarp();
        tiles.prefetch(ring.slot, lane);
        ring.advance();
    }

    // 6. the sums of the block's warps, and of the cluster's blocks
    warp_sums.lay_down(sums, warp, lane);
    cluster_wait(); // all blocks have begun, and can be sent something
    warp_sums.store(cluster_sums, threadIdx.x);
    cluster_arrive();
    cluster_wait();
    cluster_sums.add_up(out + (long long)kv_head * GROUP * HEAD_DIM, threadIdx.x);
}
