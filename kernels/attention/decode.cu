/* The best rung of decode attention, first of two launches: each block reads an equal share of the
   cache, and leaves what it found for merge.cu.

   New since split:
   - The query heads of a kv head are the rows of mma.m16n8k16, so k and v are read once for all of
     them: S = Q Kᵀ, then O += W V. S leaves the first mma laid out as W enters the second.
   - A warp owns a ring of STAGES tiles of 16 tokens. It copies them with cp.async, waits for its own
     copies alone, and meets the other warps only at the end of a segment.
   - Shares are equal but for a tile, whatever the batch and the lengths (see flash.cuh).
   - The maximum of the online softmax is stale (see flash.cuh).
   - With WHOLE a share is a row: nothing is left to be merged, and this is the only launch.
   - Under programmatic dependent launch the ring is filled before the wait. The newest token of a
     sequence, q and what the merge before still reads come after it.

   Moves 4 * kv_len * HEAD_DIM bytes for each sequence and kv head once, and 4 * (HEAD_DIM + 2) bytes
   for each head and segment, with WHOLE 2 * HEAD_DIM for each head. 4 * kv_len * HEAD_DIM flops for each head.

   Compile with the constants of flash.cuh and STAGES. Launch with 32 * WARPS threads on as many
   blocks as there are to be shares, with LENS even more than tiles, with WHOLE batch * rows;
   rows = n_kv_heads * PANELS / SIDE. partial, sums: see Panel::deliver.
   Shared memory: [WARPS][STAGES] tiles of k and v, [WARPS] queries of a panel, EXCHANGE floats.
   q, out (batch, n_heads, HEAD_DIM); k, v (batch, kv_len, n_kv_heads, HEAD_DIM); all addresses
   multiples of 16 bytes. scale: times log2(e). early: launched as a dependent. */
#include "flash.cuh"
#ifndef STAGES
#define STAGES 2
#endif

constexpr int WORDS = HEAD_DIM / 8;       // of 16 bytes, in a token
constexpr int SLOT = 2 * TILE * HEAD_DIM; // elements of a slot of the ring: keys, then values
constexpr int COPIES = TILE * WORDS / 32; // words of a tile that a lane copies
static_assert(HEAD_DIM % 16 == 0, "a token must be whole mma operands");

/* Where a word of a token lies in a tile, in elements. Words are exchanged within aligned groups, so that
   ldmatrix finds the same word of 8 tokens in different banks, and the 128 bytes that come from memory
   together stay together: into padded rows, an H200 copies 4 % more slowly. */
__device__ __forceinline__ int place_of(int token, int word) {
    constexpr int TURN = WORDS % 8 == 0 ? 8 : WORDS % 4 == 0 ? 4 : 2;
    return token * HEAD_DIM + (word ^ token / (8 / TURN) % TURN) * 8;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
decode(const T *q, const T *k, const T *v, const int *kv_lens, Result *partial, float2 *sums, int kv_len, int batch,
       int rows, int each, int rest, float scale, int early) {
    extern __shared__ __align__(16) uint4 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slice = warp / SIDE, side = warp % SIDE;
    T *ring = reinterpret_cast<T *>(shared) + warp * STAGES * SLOT;
    T *sheet = reinterpret_cast<T *>(shared) + WARPS * STAGES * SLOT + warp * HEADS * Queries::PITCH_Q;
    float *exchange = reinterpret_cast<float *>(reinterpret_cast<T *>(shared) +
                                                WARPS * (STAGES * SLOT + HEADS * Queries::PITCH_Q));
    let_the_next_kernel_start();
    if (!early) wait_for_the_kernel_before();

    Line line{kv_lens, kv_len, batch, rows, each, rest};
    line.share_out(gridDim.x);
    const int begin = line.begin(blockIdx.x);
    int left = line.begin(blockIdx.x + 1) - begin; // tiles of the share
    if (left == 0) {
        wait_for_the_kernel_before(); // who waits for this kernel takes the one before as done, too
        return;
    }
    unsigned long long once; // the cache is read once, so it is the first that may leave L2
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));

    // The warp's next tile to be asked for, and how many tiles of the share are left from there on.
    Place place(line, begin), next = place;
    int to_ask = left - slice;
    if (to_ask > 0) next.advance(line, slice);
    const int token_stride = rows * SIDE / PANELS * HEAD_DIM;
    const unsigned ring_at = (unsigned)__cvta_generic_to_shared(ring);

    bool waited = !early, ask_q = true, fresh = true; // fresh: at the first tile of a segment
    Queries queries;
    Panel panel;
    int slot = 0, mine = slice; // the warp's next tile, counted from place
#pragma unroll 1
    for (int step = -STAGES;; step++) {
        // 1. q, and the newest token of a sequence, may come from the kernels ahead
        if (!waited && (step >= 0 || to_ask <= 0 || next.tile + 1 == next.tiles)) {
            wait_for_the_kernel_before();
            waited = true;
        }
        if (waited && ask_q) {
            queries.ask(q, (long long)place.b * rows + place.row, side);
            ask_q = false;
        }
        if (step >= 0) {
            const int tiles = min(left, place.tiles - place.tile); // of the segment
            if (fresh) {
                queries.take(sheet, place.row, side);
                panel.clear();
                fresh = false;
            }
            if (mine >= tiles) {
                panel.deliver(exchange, (WHOLE ? 0 : blockIdx.x) + (long long)place.b * rows + place.row, partial,
                              sums);
                left -= tiles;
                if (left == 0) return;
                mine -= tiles;
                place.tile = 0;
                place.next_row(line);
                fresh = ask_q = true;
                continue;
            }
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
            __syncwarp();
            const unsigned keys = ring_at + slot * SLOT * (int)sizeof(T);
            const unsigned values = keys + TILE * HEAD_DIM * (int)sizeof(T);

            // 2. scores, (heads, 16 tokens)
            float s[2][4] = {};
#pragma unroll
            for (int d = 0; d < STEPS; d++) {
                unsigned b[4];
                load_matrices(b, keys + place_of(lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2) * (int)sizeof(T));
                mma(s[0], queries.a[d], b[0], b[1], T());
                mma(s[1], queries.a[d], b[2], b[3], T());
            }
            const int tokens = line.length(place.b) - (place.tile + mine) * TILE - lane % 4 * 2; // from the lane's on
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[n][i] = 8 * n + i % 2 < tokens ? s[n][i] * scale : NONE;

            // 3. weights, and 4. weighted values
            unsigned weights[4];
            panel.weigh(s, weights);
#pragma unroll
            for (int d = 0; d < STEPS; d++) {
                unsigned b[4];
                load_matrices_transposed(b, values + place_of(lane % 16, 2 * d + lane / 16) * (int)sizeof(T));
                mma(panel.o[2 * d], weights, b[0], b[1], T());
                mma(panel.o[2 * d + 1], weights, b[2], b[3], T());
            }
            mine += SLICES;
            __syncwarp();
        }
        // 5. ask for what comes STAGES tiles later
        if (to_ask > 0) {
            const int first = next.tile * TILE, there = line.length(next.b) - first;
            const long long at = ((long long)next.b * kv_len + first) * token_stride +
                                 (next.row * SIDE + side) / PANELS * HEAD_DIM;
#pragma unroll
            for (int kv = 0; kv < 2; kv++)
#pragma unroll
                for (int i = 0; i < COPIES; i++) {
                    int token = (32 * i + lane) / WORDS, word = (32 * i + lane) % WORDS;
                    const T *from = (kv ? v : k) + at + token * (long long)token_stride + 8 * word;
                    const int into = slot * SLOT + kv * TILE * HEAD_DIM + place_of(token, word);
                    if (token < there)
                        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(
                                         ring_at + into * (int)sizeof(T)),
                                     "l"(from), "l"(once) : "memory");
                    else
                        *reinterpret_cast<uint4 *>(ring + into) = uint4{}; // past the end anything may stand
                }
            to_ask -= SLICES;
            if (to_ask > 0) next.advance(line, SLICES);
        }
        asm volatile("cp.async.commit_group;" ::: "memory"); // an empty one too, so that STAGES - 1 are always behind
        slot = slot + 1 < STAGES ? slot + 1 : 0;
    }
}
