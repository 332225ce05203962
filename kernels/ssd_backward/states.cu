/* Launch 2 of the backward pass: states before each pair of chunks, and their gradients behind each.

   A block walks a head's chunks in one of two directions (walk.cuh). Before it adds the first chunk of a pair, it
   writes what it has, rounded to 16 bits: for the pair k that is h before it, and dh behind it. Those are what the
   products of launch 3 take, which makes h and dh between the two chunks itself: one product for each chunk and head,
   and half of the bytes. The walk adds in float32 and is never rounded.

   Moves x and dy once, B and C once for each head (from L2), and writes 2 * 64 * STATE numbers of 16 bits for each pair
   and head. A block has 64 WALK_TILES columns of the state. Launch with THREADS on (rows * parts of a state, batch, 2)
   blocks. Maps: x, dy, B, C (1, batch, heads or groups, seqlen, columns), boxes of a tile; states (1, batch * pairs,
   rows, 64, STATE), boxes of 16 rows of a tile. initial, final_gradients: (batch, heads, headdim, dstate) or null;
   initial_gradients too. */
#include "../device/hopper/tma.cuh"
#include "../device/hopper/warpgroup.cuh"
#include "walk.cuh"

#ifndef WALK_TILES
#define WALK_TILES 1
#endif
constexpr int THREADS = 160; // a warpgroup that multiplies, and a warp that brings
constexpr int TILES = WALK_TILES, COLUMNS = 64 * TILES, NUMBERS = COLUMNS / 2; // of a state, in a block; in a thread
constexpr int STAGES = 3;
static_assert(STATE_TILES % TILES == 0);

struct Shared {
    unsigned char rows[STAGES][TILE];           // x or dy
    unsigned char columns[STAGES][TILES][TILE]; // B or C
    unsigned char out[2][4][TILES][TILE / 4];   // of each warp: 16 rows of the state
    Line lines[STAGES];
    Ring<STAGES> ring;
};
#ifdef SHARED_BYTES
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher asks for too little shared memory");
#endif

/* What the walk's direction changes. */
struct Walk {
    const CUtensorMap &rows, &columns, &to;
    bool backwards;
    int chunks, first; // first: of the state's columns, those that the block has

    __device__ __forceinline__ int chunk(int step) const { return backwards ? chunks - 1 - step : step; }
};

/* The role of a warp: tiles by TMA, and the chunk's line. */
__device__ __forceinline__ void bring(Shared &s, const Sizes &sizes, const Walk &walk, const Line *lines, int batch,
                                      int row, int lane) {
    const int head = sizes.head_of(row), column = sizes.column_of(row), group = sizes.group_of(row);
    Phase<STAGES> phase;
    for (int step = 0; step < walk.chunks; step++, phase.advance()) {
        const int stage = phase.stage, chunk = walk.chunk(step), token = chunk * CHUNK;
        s.ring.wait_empty(phase);
        Barrier &full = s.ring.full[stage];
        if (lane == 0) {
            full.expect((1 + TILES) * TILE);
            load_tile(s.rows[stage], walk.rows, Place{{column, token, head, batch, 0}}, full, AS_ANY);
            for (int i = 0; i < TILES; i++)
                load_tile(s.columns[stage][i], walk.columns, Place{{walk.first + 64 * i, token, group, batch, 0}}, full,
                          LEAVES_LAST);
        }
        copy_line(s.lines[stage], lines + sizes.line_of(batch, head, chunk), lane);
        full.arrive_with_copies();
    }
    copy_async_wait<0>();
}

/* Rows of the state (columns of x) from 16 warp on, as the warp's own 16 rows of tiles; TMA takes them. */
__device__ __forceinline__ void write_state(unsigned char (&out)[TILES][TILE / 4], const float (&state)[NUMBERS],
                                            const CUtensorMap &to, int first, int place, int row, int warp, int lane) {
    if (lane == 0) store_wait_read<1>(); // the store before the last has left this place
    __syncwarp();
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++)
        store_columns(spot_of_block(shared_address(out[k / 4]), 0, k % 4, lane), state, k);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
        for (int i = 0; i < TILES; i++)
            store_tile(to, Place{{first + 64 * i, 16 * warp, row, place, 0}}, out[i], LEAVES_FIRST);
        store_commit();
    }
}

/* Where a thread's numbers 4 i and 4 i + 1 lie in a (headdim, dstate) matrix; 4 i + 2 and + 3 eight rows below. */
struct Matrix {
    const Sizes &sizes;
    int row, column;

    __device__ __forceinline__ Matrix(const Sizes &sizes, int first_row, int first_column, int thread)
        : sizes(sizes), row(first_row + thread / 32 * 16 + thread % 32 / 4), column(first_column + thread % 4 * 2) {}
    __device__ __forceinline__ bool there(int i, int h) const {
        return row + 8 * h < sizes.headdim && column + 8 * i < sizes.dstate;
    }
    __device__ __forceinline__ int at(int i, int h) const { return (row + 8 * h) * sizes.dstate + column + 8 * i; }
};

/* The role of a warpgroup. */
__device__ __forceinline__ void multiply(Shared &s, const Sizes &sizes, const Walk &walk, const float *start,
                                         float *end, int batch, int row, int thread) {
    const int lane = thread % 32, warp = warp_uniform(thread / 32);
    const long long matrix = ((long long)batch * sizes.heads + sizes.head_of(row)) * sizes.headdim * sizes.dstate;
    const Matrix own(sizes, sizes.column_of(row), walk.first, thread);
    float state[NUMBERS];
    clear(state);
    if (start)
#pragma unroll
        for (int i = 0; i < NUMBERS / 4; i++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (own.there(i, h)) {
                    const float2 v = *(const float2 *)(start + matrix + own.at(i, h));
                    state[4 * i + 2 * h] = v.x, state[4 * i + 2 * h + 1] = v.y;
                }
    Phase<STAGES> phase;
    for (int step = 0; step < walk.chunks; step++, phase.advance()) {
        const int stage = warp_uniform(phase.stage);
        const int pair = (batch * walk.chunks + walk.chunk(step)) / 2;
        if (step % 2 == 0)
            write_state(s.out[step / 2 % 2][warp], state, walk.to, walk.first, pair, row, warp, lane);
        s.ring.wait_full(phase);
        add_chunk<COLUMNS>(state, shared_address(s.rows[stage]), shared_address(s.columns[stage]), s.lines[stage],
                  walk.backwards, warp, lane);
        fence_async_proxy(); // of what has been read
        __syncwarp();
        if (lane == 0) s.ring.release(phase);
    }
    if (end)
#pragma unroll
        for (int i = 0; i < NUMBERS / 4; i++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (own.there(i, h))
                    *(float2 *)(end + matrix + own.at(i, h)) =
                        make_float2(state[4 * i + 2 * h], state[4 * i + 2 * h + 1]);
    if (lane == 0) store_wait();
}

extern "C" __global__ void __launch_bounds__(THREADS, TILES == 1 ? 3 : 2)
states(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap b,
       const __grid_constant__ CUtensorMap dy, const __grid_constant__ CUtensorMap c,
       const __grid_constant__ CUtensorMap h, const __grid_constant__ CUtensorMap dh, const Line *lines,
       const float *initial, const float *final_gradients, float *initial_gradients, int seqlen, int chunks, int heads,
       int groups, int headdim, int dstate, int parts) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const Sizes sizes{seqlen, chunks, heads, groups, headdim, dstate, parts};
    constexpr int PARTS = STATE_TILES / TILES; // of a state: side by side, as they read the same rows
    const int row = blockIdx.x / PARTS, batch = blockIdx.y;
    const bool backwards = blockIdx.z;
    const int first = (int)blockIdx.x % PARTS * COLUMNS;
    const Walk walk{backwards ? dy : x, backwards ? c : b, backwards ? dh : h, backwards, chunks, first};
    if (threadIdx.x == 0) {
        s.ring.init(1 + 32, 4); // (the warp that brings: its first lane for TMA, all for the line), (4 warps)
        prefetch(walk.rows), prefetch(walk.columns), prefetch(walk.to);
    }
    __syncthreads();
    if (threadIdx.x < 128)
        multiply(s, sizes, walk, backwards ? final_gradients : initial, backwards ? initial_gradients : nullptr, batch,
                 row, threadIdx.x);
    else bring(s, sizes, walk, lines, batch, row, threadIdx.x % 32);
}
