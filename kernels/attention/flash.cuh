/* What decode attention on tensor cores is made of, whatever the cache holds: how its tiles are
   shared out, the online softmax, and what becomes of a share's result.

   A tile is TILE tokens of one kv head. A panel is up to 16 query heads of one kv head: the
   rows of an mma. A block takes SIDE neighbouring panels side by side, so its warps stand in SIDE
   panels and SLICES = WARPS / SIDE slices: warp w serves panel w % SIDE, and every SLICES-th tile.
   A row is a sequence with SIDE panels. All tiles of all rows, one row after another, are a line that
   is cut into gridDim.x equal shares, one for each block. Where a share and a row meet is a segment.
   Segments are numbered share + row: going along the line, one of the two grows from each segment
   to the next.

   Compiled for   DTYPE     of q and out: __half or __nv_bfloat16
                  HEAD_DIM  a multiple of 16
                  GROUP     query heads of a kv head
                  SIDE      panels side by side
                  LENS      1: each sequence has a length of its own
                  WARPS     of a block, a multiple of SIDE
                  TILE      16, or a multiple of it
                  WHOLE     1: each share is one row, and its result is final: merge.cu is not launched */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef DTYPE
#define DTYPE __nv_bfloat16
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef GROUP
#define GROUP 4
#endif
#ifndef SIDE
#define SIDE 1
#endif
#ifndef LENS
#define LENS 0
#endif
#ifndef WARPS
#define WARPS 8
#endif
#ifndef TILE
#define TILE 16
#endif
#ifndef WHOLE
#define WHOLE 0
#endif
using T = DTYPE;
#if WHOLE
using Result = T; // (batch, n_heads, HEAD_DIM)
#else
using Result = float; // (segments, SIDE, HEADS, HEAD_DIM)
#endif
constexpr int SLICES = WARPS / SIDE;
constexpr int PANELS = (GROUP + 15) / 16;            // of a kv head
constexpr int HEADS = (GROUP + PANELS - 1) / PANELS; // of a panel; the last of a kv head may have fewer
constexpr int ROWS = HEADS > 8 ? 2 : 1;              // of an mma that a lane holds: g, and g + 8
constexpr int STEPS = HEAD_DIM / 16;                 // mmas along head_dim
constexpr int PITCH = HEAD_DIM + 8;                  // floats of a row in the exchange: no bank conflicts
constexpr int EXCHANGE = SLICES > 1 ? WARPS * HEADS * (PITCH + 2) : 0; // floats of shared memory for `Panel::deliver`
constexpr float FEW = 8;                             // the maximum may be 2**FEW too small: see Panel
constexpr float LOWEST = -3.4028235e38f;             // of all finite scores: a maximum before there is one
#define NONE __int_as_float(0xff800000)              // the score of no token: -inf

// Programmatic dependent launch; without it, and on older cards, both are of no effect.
__device__ __forceinline__ void let_the_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_the_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A warp's 16 × 8 product: d += a * b.
__device__ __forceinline__ void mma(float *d, const unsigned *a, unsigned b0, unsigned b1, __nv_bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(float *d, const unsigned *a, unsigned b0, unsigned b1, __half) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 × 8 matrices; lane 8i + j points at row j of matrix i.
__device__ __forceinline__ void load_matrices(unsigned *to, unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(unsigned *to, unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ float exp2_fast(float a) {
    float b;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(b) : "f"(a));
    return b;
}
__device__ __forceinline__ unsigned pack(float low, float high, __nv_bfloat16) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<unsigned *>(&pair);
}
__device__ __forceinline__ unsigned pack(float low, float high, __half) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<unsigned *>(&pair);
}

/* Where the tiles of all rows lie on the line, and which share holds which. Every lane of a warp
   calls, and all get the same answer. With LENS each sequence has a length of its own. */
struct Line {
    const int *kv_lens; // (batch,); not looked at without LENS
    int kv_len, batch, rows; // rows of a sequence
    int each, rest; // tiles of a share; the first `rest` shares have one more

    __device__ __forceinline__ int length(int b) const {
        return LENS ? min(max(__ldg(kv_lens + b), 0), kv_len) : kv_len;
    }
    __device__ __forceinline__ int tiles(int b) const { return (length(b) + TILE - 1) / TILE; }

    // Tiles of a row, summed over the sequences before b.
    __device__ __forceinline__ int before(int b) const {
        if (!LENS) return b * tiles(0);
        int sum = 0;
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < b; i += 32) sum += tiles(i);
#pragma unroll
        for (int far = 16; far; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
        return sum;
    }
    // Without LENS the host has done it.
    __device__ __forceinline__ void share_out(int shares) {
        if (!LENS) return;
        unsigned total = before(batch) * rows;
        each = total / shares, rest = total - each * shares;
    }
    __device__ __forceinline__ int begin(int share) const { return share * each + min(share, rest); }
    __device__ __forceinline__ int share_of(unsigned tile) const {
        unsigned longer = rest * (each + 1);
        return tile < longer ? tile / (each + 1) : rest + (tile - longer) / max(each, 1);
    }
};

/* A place on the line. */
struct Place {
    int b, row, tile, tiles; // sequence, row of the sequence, tile of the row; tiles of the row

    // The at-th tile on the line, which must exist.
    __device__ __forceinline__ Place(const Line &line, unsigned at) : b(0) {
        if (LENS) {
            const int lane = threadIdx.x % 32;
#pragma unroll 1
            for (int from = 0;; from += 32) {
                unsigned mine = from + lane < line.batch ? line.tiles(from + lane) * line.rows : 0, upto = mine;
#pragma unroll
                for (int far = 1; far < 32; far *= 2) {
                    unsigned other = __shfl_up_sync(~0u, upto, far);
                    if (lane >= far) upto += other;
                }
                unsigned later = __ballot_sync(~0u, at < upto); // it is in the first of these sequences
                if (later) {
                    int first = __ffs(later) - 1;
                    b = from + first;
                    at -= __shfl_sync(~0u, upto - mine, first);
                    break;
                }
                at -= __shfl_sync(~0u, upto, 31);
            }
        }
        tiles = line.tiles(b);
        row = at / tiles;
        tile = at - row * tiles;
        if (!LENS && line.batch > 1) {
            b = (unsigned)row / line.rows;
            row -= b * line.rows;
        }
    }
    __device__ __forceinline__ void next_row(const Line &line) {
        if (++row == line.rows) {
            row = 0;
            do
                tiles = ++b < line.batch ? line.tiles(b) : 1;
            while (LENS && tiles == 0);
        }
    }
    __device__ __forceinline__ void advance(const Line &line, int by) {
        tile += by;
        while (tile >= tiles) {
            tile -= tiles;
            next_row(line);
        }
    }
};

/* What a warp knows of a panel: sums of weights and of weighted values, relative to a maximum of the
   scores so far, in the layout of an mma: lane 4g + q holds rows g and g + 8. Scores and maximum
   are in units of log 2. The sum of weights is one more product, with ones.

   The maximum is stale: it follows only when a score exceeds it by more than FEW, so that almost
   every tile does without the shuffles that find it, and without scaling the sums. That is exact,
   since any reference cancels in the quotient of the sums; it only must be near enough to the scores
   that 2**(score - reference) neither overflows (here it is at most 2**FEW) nor vanishes. */
struct Panel {
    float o[2 * STEPS][4]; // (heads, head_dim)
    float m[2], l[4];      // l: of row g in l[0], of row g + 8 in l[2], the same in all lanes of the row

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[n][i] = 0;
        m[0] = m[1] = LOWEST;
        l[0] = l[1] = l[2] = l[3] = 0;
    }

    // s: scores of 16 tokens, NONE for none; becomes weights, in w as the mma with the values takes them.
    __device__ __forceinline__ void weigh(float (&s)[2][4], unsigned (&w)[4]) {
        float top[ROWS];
        bool far = false;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            top[r] = fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1]));
            far |= top[r] > m[r] + FEW;
        }
        if (__any_sync(~0u, far)) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float high = fmaxf(m[r], top[r]);
                high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
                high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
                float scale = exp2_fast(m[r] - high);
                m[r] = high;
                l[2 * r] *= scale;
#pragma unroll
                for (int n = 0; n < 2 * STEPS; n++) o[n][2 * r] *= scale, o[n][2 * r + 1] *= scale;
            }
        }
        w[1] = w[3] = 0;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                float low = exp2_fast(s[n][2 * r] - m[r]), high = exp2_fast(s[n][2 * r + 1] - m[r]);
                w[2 * n + r] = pack(low, high, T());
            }
        // As rounded as for the values: else the mean of values near the largest of their type may be infinity.
        const unsigned ones = pack(1, 1, T());
        mma(l, w, ones, ones, T());
    }

    /* The end of a segment. Its sums go to `partial`, (segments, SIDE, HEADS, HEAD_DIM), and their
       maximum and sum of weights to `sums`, (segments, SIDE, HEADS). With WHOLE, segments are rows, `partial` is
       the output, and `sums` is not touched. All warps of a block call. */
    __device__ __forceinline__ void deliver(float *exchange, long long segment, Result *partial, float2 *sums) {
        static_assert(!WHOLE || (SLICES > 1 && !LENS), "a row without a share would get no result");
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
        if constexpr (SLICES == 1) {
            const long long at = (segment * SIDE + warp) * HEADS + g;
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (g + 8 * r < HEADS) {
#pragma unroll
                    for (int n = 0; n < 2 * STEPS; n++)
                        *reinterpret_cast<float2 *>(partial + (at + 8 * r) * HEAD_DIM + 8 * n + 2 * q) =
                            make_float2(o[n][2 * r], o[n][2 * r + 1]);
                    if (q == 0) sums[at + 8 * r] = make_float2(m[r], l[2 * r]);
                }
            return;
        }
        float2 *pairs = reinterpret_cast<float2 *>(exchange); // [WARPS][HEADS]
        float *sheet = exchange + 2 * WARPS * HEADS;          // [WARPS][HEADS][PITCH]
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (q == 0 && g + 8 * r < HEADS) pairs[warp * HEADS + g + 8 * r] = make_float2(m[r], l[2 * r]);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (g + 8 * r < HEADS) {
                const float2 *slices = pairs + warp % SIDE * HEADS + g + 8 * r;
                float high = m[r], total = 0;
#pragma unroll
                for (int s = 0; s < SLICES; s++) high = fmaxf(high, slices[s * SIDE * HEADS].x);
                const float scale = exp2_fast(m[r] - high);
#pragma unroll
                for (int n = 0; n < 2 * STEPS; n++)
                    *reinterpret_cast<float2 *>(sheet + (warp * HEADS + g + 8 * r) * PITCH + 8 * n + 2 * q) =
                        make_float2(o[n][2 * r] * scale, o[n][2 * r + 1] * scale);
                if (!WHOLE && warp < SIDE && q == 0) {
#pragma unroll
                    for (int s = 0; s < SLICES; s++) {
                        float2 pair = slices[s * SIDE * HEADS];
                        total += pair.y * exp2_fast(pair.x - high);
                    }
                    sums[(segment * SIDE + warp) * HEADS + g + 8 * r] = make_float2(high, total);
                }
            }
        __syncthreads();
#pragma unroll 2
        for (int i = threadIdx.x; i < SIDE * HEADS * (HEAD_DIM / 4); i += 32 * WARPS) {
            int column = i % (HEAD_DIM / 4) * 4, row = i / (HEAD_DIM / 4);
            float4 sum = {};
#pragma unroll
            for (int s = 0; s < SLICES; s++) {
                float4 a = *reinterpret_cast<float4 *>(sheet + (s * SIDE * HEADS + row) * PITCH + column);
                sum.x += a.x, sum.y += a.y, sum.z += a.z, sum.w += a.w;
            }
            if constexpr (WHOLE) {
                float high = LOWEST, total = 0;
#pragma unroll
                for (int s = 0; s < SLICES; s++) high = fmaxf(high, pairs[s * SIDE * HEADS + row].x);
#pragma unroll
                for (int s = 0; s < SLICES; s++) {
                    float2 pair = pairs[s * SIDE * HEADS + row];
                    total += pair.y * exp2_fast(pair.x - high);
                }
                const float share = 1 / total;
                const long long panel = segment * SIDE + row / HEADS; // of all panels
                const int head = (PANELS > 1 ? panel % PANELS * HEADS : 0) + row % HEADS; // of the kv head
                const uint2 mean = make_uint2(pack(sum.x * share, sum.y * share, T()),
                                              pack(sum.z * share, sum.w * share, T()));
                if (head < GROUP) // stored as a whole only when said so
                    __stcg(reinterpret_cast<uint2 *>(partial + (panel / PANELS * GROUP + head) * HEAD_DIM + column),
                           mean);
            } else
                *reinterpret_cast<float4 *>(partial + (segment * SIDE * HEADS + row) * HEAD_DIM + column) = sum;
        }
    }
};

/* The panel's queries, in three steps: asked for, in words of 16 bytes; laid down in shared memory, (HEADS, PITCH_Q);
   and taken up as the mma with the keys wants them. Its last head also stands for those that the panel lacks. */
struct Queries {
    static constexpr int PITCH_Q = HEAD_DIM + 8, WORDS = HEADS * HEAD_DIM / 8, HELD = (WORDS + 31) / 32;
    uint4 held[HELD];
    unsigned a[STEPS][4];

    __device__ __forceinline__ void ask(const T *q, long long row, int panel) {
        const long long at = row * SIDE + panel; // of all panels
        const int first = PANELS > 1 ? at % PANELS * HEADS : 0; // head of the kv head
        const uint4 *from = reinterpret_cast<const uint4 *>(q + (at / PANELS * GROUP + first) * HEAD_DIM);
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            int word = 32 * i + threadIdx.x % 32;
            if (word < WORDS && first + word / (HEAD_DIM / 8) < GROUP) held[i] = __ldcg(from + word);
        }
    }
    // The lanes of a warp meet in here.
    __device__ __forceinline__ void take(T *shared, int row_of_panels, int panel) {
        const int lane = threadIdx.x % 32, first = PANELS > 1 ? (row_of_panels * SIDE + panel) % PANELS * HEADS : 0;
        __syncwarp(); // who still reads the last ones?
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            int word = 32 * i + lane, head = word / (HEAD_DIM / 8);
            if (head < HEADS && first + head < GROUP)
                *reinterpret_cast<uint4 *>(shared + head * PITCH_Q + word % (HEAD_DIM / 8) * 8) = held[i];
        }
        __syncwarp();
        const int head = min(lane % 16, min(HEADS, GROUP - first) - 1);
#pragma unroll
        for (int d = 0; d < STEPS; d++)
            load_matrices(a[d], (unsigned)__cvta_generic_to_shared(shared + head * PITCH_Q + 16 * d + lane / 16 * 8));
    }
};
