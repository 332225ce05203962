/* Decode attention over a quantised cache, first of two launches: each block reads an equal share of
   the codes, and leaves what it found for ../attention/merge.cu.

   New since decode.cu of ../attention:
   - The codes lie in memory as the lanes of an mma take them: 16 tokens of a kv head are HEAD_DIM *
     bits / 256 words of 16 bytes for each lane. A warp asks for 512 neighbouring bytes at a time,
     and a lane reads what it copied itself: no ldmatrix, no padding. A tile is twice as long, TILE =
     32, so that two chains of mma run side by side.
   - Codes become float16 in registers (codes.cuh). Scales do not touch them. A scale of keys goes into
     the score of its token, or, where a channel has it, into q, once for each group of tokens; a
     scale of values goes into the weight of its token.
   - Keys and values are the left operands, Sᵀ = K Qᵀ and Oᵀ += Vᵀ Wᵀ, so that 8 query heads, not 16,
     fill an mma. movmatrix turns Sᵀ into Wᵀ.
   - Operands are float16 whatever the dtype of q. Powers of two keep them in its range: q is brought
     below 2**q_lift, head by head, and the weights carry 2**lift.
   - A warp has neighbouring tiles, so that it meets a group's scales once. Keys and values are
     waited for one after the other.

   Moves HEAD_DIM * (bits of k + bits of v) / 8 bytes for each token and kv head, and 2 for each
   scale; and 4 * (HEAD_DIM + 2) bytes for each head and segment.

   Compile with DTYPE, HEAD_DIM (a multiple of 64), GROUP, WARPS, LENS and TILE of flash.cuh, and
     STAGES          tiles in a warp's ring
     BLOCKS          that a multiprocessor is to have room for
     KEYS, VALUES    Int8, Int4 or Fp8
     KEY_TOKENS      tokens that share a scale of a channel, a multiple of TILE; 0: scales belong to tokens
     KEY_CHANNELS    channels that share a scale of a token, if KEY_TOKENS is 0; VALUE_CHANNELS likewise:
                     multiples of 16 that divide HEAD_DIM
   Launch with 32 * WARPS threads on as many blocks as there are to be shares, at most one for each
   tile; rows = n_kv_heads * PANELS; each, rest: see Line. Shared memory: [WARPS][STAGES][SLOT] words
   of 16 bytes, [WARPS][HEADS] times PITCH + 2 floats, and [HEADS] times PITCH float16 and an int.
   With WHOLE, shares are rows, `partial` is the output, (batch, n_heads, HEAD_DIM), and there is no merge.
   q (batch, n_heads, HEAD_DIM); k, v and their scales as quantization.py lays them out, with room for
   k_room and v_room tiles in a sequence. scale: times log2(e). */
#include "../attention/flash.cuh"
#include "codes.cuh"
#ifndef STAGES
#define STAGES 4
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef KEYS
#define KEYS Int8
#endif
#ifndef VALUES
#define VALUES Int8
#endif
#ifndef KEY_TOKENS
#define KEY_TOKENS 0
#endif
#ifndef KEY_CHANNELS
#define KEY_CHANNELS HEAD_DIM
#endif
#ifndef VALUE_CHANNELS
#define VALUE_CHANNELS HEAD_DIM
#endif

__device__ __forceinline__ float2 unpack(unsigned pair, __half) {
    return __half22float2(*reinterpret_cast<__half2 *>(&pair));
}
__device__ __forceinline__ float2 unpack(unsigned pair, __nv_bfloat16) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
}

constexpr bool BY_CHANNEL = KEY_TOKENS > 0, OFFSETS = KEYS::OFFSET > 0;
constexpr int TIMES = (HEADS + 7) / 8, HALVES = TILE / 16; // mmas for the heads of a panel, and for a tile
constexpr int K_LOADS = HEAD_DIM * KEYS::BITS / 256, V_LOADS = HEAD_DIM * VALUES::BITS / 256; // of a lane, 16 tokens
constexpr int K_GROUPS = BY_CHANNEL ? 1 : HEAD_DIM / KEY_CHANNELS, V_GROUPS = HEAD_DIM / VALUE_CHANNELS;
constexpr int K_WORDS = 32 * HALVES * K_LOADS, V_WORDS = 32 * HALVES * V_LOADS; // of a tile, of 16 bytes
constexpr int V_SCALES = HALVES * 2 * V_GROUPS, K_SCALES = BY_CHANNEL ? HEAD_DIM / 8 : HALVES * 2 * K_GROUPS;
constexpr int SLOT = (K_WORDS + V_WORDS + K_SCALES + V_SCALES + 7) / 8 * 8; // whole lines of 128 bytes
constexpr int LATE = BY_CHANNEL ? KEY_TOKENS : TILE; // tokens that an appended one may change
static_assert(!WHOLE || !LENS, "a row without a share would get no result");
static_assert(LATE % TILE == 0, "a tile of keys has one set of scales for its channels");

/* 2**e, -126 <= e <= 127 */
__device__ __forceinline__ float power(int e) { return __int_as_float((e + 127) << 23); }

/* Where a warp is: the tiles of a share, one segment after another, of each those of the warp's slice. */
struct Walk {
    Place place; // tile: the next of this warp
    int left;    // tiles of the share that follow this segment
    int mine;    // tiles that the warp still has in it

    __device__ __forceinline__ Walk(const Line &line, int first, int count) : place(line, first), left(count) {
        enter();
    }
    __device__ __forceinline__ void enter() {
        const int slice = threadIdx.x / 32, tiles = min(left, place.tiles - place.tile);
        const int from = tiles * slice / WARPS;
        left -= tiles;
        mine = tiles * (slice + 1) / WARPS - from;
        place.tile += from;
    }
    __device__ __forceinline__ void next_segment(const Line &line) {
        place.tile = 0;
        place.next_row(line);
        enter();
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
decode(const T *q, const uint4 *k, const uint4 *v, const uint4 *k_scale, const uint4 *v_scale, const int *kv_lens,
       Result *partial, float2 *sums, int kv_len, int batch, int rows, int each, int rest, int k_room, int v_room,
       float scale, int q_lift, int lift, int early) {
    extern __shared__ __align__(16) uint4 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    uint4 *ring = shared + warp * STAGES * SLOT;
    float *exchange = reinterpret_cast<float *>(shared + WARPS * STAGES * SLOT); // [WARPS][HEADS][PITCH]
    float2 *pairs = reinterpret_cast<float2 *>(exchange + WARPS * HEADS * PITCH); // [WARPS][HEADS]
    __half *sheet = reinterpret_cast<__half *>(pairs + WARPS * HEADS);            // [HEADS][PITCH]: queries
    int *exponents = reinterpret_cast<int *>(sheet + HEADS * PITCH);              // [HEADS]: of their scale
    let_the_next_kernel_start();
    if (!early) wait_for_the_kernel_before();

    Line line{kv_lens, kv_len, batch, rows, each, rest};
    line.share_out(gridDim.x);
    const int first = line.begin(blockIdx.x), count = line.begin(blockIdx.x + 1) - first;
    if (count == 0) {
        wait_for_the_kernel_before(); // who waits for this kernel takes the one before as done, too
        return;
    }
    unsigned long long once; // the cache is read once, so it is the first that may leave L2
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    auto copy = [&](uint4 *to, const uint4 *from) {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(
                         (unsigned)__cvta_generic_to_shared(to)),
                     "l"(from), "l"(once) : "memory");
    };

    Walk here(line, first, count), next = here;
    bool waited = !early, asked = false, entered = true, begins = true; // next enters a segment; here begins one
    constexpr int FOURS = HEAD_DIM / 4, TAKES = (HEADS + WARPS - 1) / WARPS, PIECES = (FOURS + 31) / 32;
    uint2 held[TAKES][PIECES]; // queries on their way: a warp takes every WARPS-th head, a lane four channels at a time
    int slot = 0;
    const uint4 *k_at, *v_at, *k_scale_at, *v_scale_at; // what `next` is to ask for
    unsigned right[TIMES][STEPS][2]; // the queries, as they meet the keys
    float start[K_GROUPS][TIMES][4]; // what the offsets of keys add to a product, taken off beforehand
    float to_score[TIMES][2];        // of heads 2c and 2c + 1
    float o[STEPS][TIMES][4];        // (channels, heads): lane 4g + c has channels g, g + 8 of heads 2c, 2c + 1
    float m[TIMES][2], l[TIMES][2];  // of heads 2c, 2c + 1; l: of this lane's tokens alone
    auto query = [&](int n, int step) {
        return 8 * n + g < HEADS ? *reinterpret_cast<const uint2 *>(sheet + (8 * n + g) * PITCH + 16 * step + 4 * c)
                                 : uint2{};
    };
    auto find_start = [&](int group) {
        const unsigned minus[4] = {KEYS::OFFSET | 0x80008000, KEYS::OFFSET | 0x80008000,
                                   KEYS::OFFSET_HIGH | 0x80008000, KEYS::OFFSET_HIGH | 0x80008000};
#pragma unroll
        for (int n = 0; n < TIMES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) start[group][n][i] = 0;
#pragma unroll
            for (int step = group * (STEPS / K_GROUPS); OFFSETS && step < (group + 1) * (STEPS / K_GROUPS); step++)
                mma(start[group][n], minus, right[n][step][0], right[n][step][1], __half());
        }
    };

#pragma unroll 1
    for (int step = -STAGES;; step++) {
        while (next.mine == 0 && next.left > 0) next.next_segment(line), entered = true;

        // 1. what a kernel ahead may still write: q, the last token of a sequence, and all that shares its scale
        if (!waited && (step >= 0 || (next.mine > 0 && next.place.tile * TILE >=
                                                           (line.length(next.place.b) - 1) / LATE * LATE))) {
            wait_for_the_kernel_before();
            waited = true;
        }
        if (waited && !asked) {
            const long long row = (long long)here.place.b * rows + here.place.row;
            const int first = PANELS > 1 ? row % PANELS * HEADS : 0; // head of the kv head
            const uint2 *from = reinterpret_cast<const uint2 *>(q + (row / PANELS * GROUP + first) * HEAD_DIM);
#pragma unroll
            for (int i = 0; i < TAKES; i++)
#pragma unroll
                for (int j = 0; j < PIECES; j++) {
                    const int head = warp + i * WARPS, four = lane + 32 * j;
                    const bool there = head < HEADS && first + head < GROUP && four < FOURS;
                    held[i][j] = there ? __ldcg(from + head * FOURS + four) : uint2{};
                }
            asked = true;
        }
        if (step >= 0) {
            if (begins) {
                // 2. the queries as the right operand: lane 4g + c has head g, channels 16 * step + 4c .. + 3
#pragma unroll
                for (int i = 0; i < TAKES; i++) {
                    const int head = warp + i * WARPS;
                    if (head >= HEADS) break;
                    unsigned largest = 0; // of the bits, without their signs, of both halves
#pragma unroll
                    for (int j = 0; j < PIECES; j++)
                        largest = __vmaxu2(largest, __vmaxu2(held[i][j].x & 0x7fff7fff, held[i][j].y & 0x7fff7fff));
#pragma unroll
                    for (int far = 16; far; far /= 2) largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, far));
                    const float2 both = unpack(largest, T());
                    const int e = max((__float_as_int(fmaxf(both.x, both.y)) >> 23) - 126, -100); // less than 2**e
                    const float low = power(q_lift - e), high = low / KEYS::HIGH;
#pragma unroll
                    for (int j = 0; j < PIECES; j++) {
                        const float2 x = unpack(held[i][j].x, T()), y = unpack(held[i][j].y, T());
                        if (lane + 32 * j < FOURS)
                            *reinterpret_cast<uint2 *>(sheet + head * PITCH + 4 * (lane + 32 * j)) =
                                make_uint2(pack(x.x * low, x.y * low, __half()), pack(y.x * high, y.y * high, __half()));
                    }
                    if (lane == 0) exponents[head] = e;
                }
                __syncthreads();
#pragma unroll
                for (int n = 0; n < TIMES; n++) {
#pragma unroll
                    for (int step = 0; step < STEPS; step++) {
                        const uint2 x = query(n, step);
                        if (!BY_CHANNEL) right[n][step][0] = x.x, right[n][step][1] = x.y;
#pragma unroll
                        for (int i = 0; i < 4; i++) o[step][n][i] = 0;
                    }
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int head = 8 * n + 2 * c + i;
                        to_score[n][i] = scale * power((head < HEADS ? exponents[head] : 0) - q_lift) / KEYS::KEY_UNIT;
                        m[n][i] = LOWEST, l[n][i] = 0;
                    }
                }
                if (!BY_CHANNEL)
#pragma unroll
                    for (int group = 0; group < K_GROUPS; group++) find_start(group);
            }
            if (here.mine == 0) {
                // 7. the end of a segment: add up the slices, each relative to its own maximum
                const long long segment = blockIdx.x + (long long)here.place.b * rows + here.place.row;
#pragma unroll
                for (int n = 0; n < TIMES; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
#pragma unroll
                        for (int far = 4; far < 32; far *= 2) l[n][i] += __shfl_xor_sync(~0u, l[n][i], far);
                        const int head = 8 * n + 2 * c + i;
                        if (head >= HEADS) continue;
                        if (g == 0) pairs[warp * HEADS + head] = make_float2(m[n][i], l[n][i]);
                        float *to = exchange + (warp * HEADS + head) * PITCH + g;
#pragma unroll
                        for (int step = 0; step < STEPS; step++)
                            to[16 * step] = o[step][n][i], to[16 * step + 8] = o[step][n][i + 2];
                    }
                __syncthreads();
#pragma unroll 1
                for (int i = threadIdx.x; i < HEADS * (HEAD_DIM / 2); i += 32 * WARPS) {
                    const int channel = i % (HEAD_DIM / 2) * 2, head = i / (HEAD_DIM / 2);
                    float high = LOWEST, total = 0;
#pragma unroll
                    for (int w = 0; w < WARPS; w++) high = fmaxf(high, pairs[w * HEADS + head].x);
                    float2 sum = {};
#pragma unroll
                    for (int w = 0; w < WARPS; w++) {
                        const float2 pair = pairs[w * HEADS + head];
                        const float2 a = *reinterpret_cast<float2 *>(exchange + (w * HEADS + head) * PITCH + channel);
                        const float share = exp2_fast(pair.x - high);
                        sum.x += a.x * share, sum.y += a.y * share, total += pair.y * share;
                    }
                    sum.x /= VALUES::VALUE_UNIT, sum.y /= VALUES::VALUE_UNIT;
                    if constexpr (WHOLE) {
                        const long long row = (long long)here.place.b * rows + here.place.row;
                        const int at = (PANELS > 1 ? row % PANELS * HEADS : 0) + head; // head of the kv head
                        const float share = 1 / total;
                        if (at < GROUP)
                            *reinterpret_cast<unsigned *>(partial + (row / PANELS * GROUP + at) * HEAD_DIM + channel) =
                                pack(sum.x * share, sum.y * share, T());
                    } else {
                        *reinterpret_cast<float2 *>(partial + (segment * HEADS + head) * HEAD_DIM + channel) = sum;
                        if (channel == 0) sums[segment * HEADS + head] = make_float2(high, total);
                    }
                }
                if (here.left == 0) return;
                __syncthreads();
                here.next_segment(line);
                begins = true, asked = false;
                step--; // nothing has left the ring
                continue;
            }
            asm volatile("cp.async.wait_group %0;" ::"n"(2 * STAGES - 1) : "memory"); // keys
            __syncwarp();
            const uint4 *words = ring + slot * SLOT + lane;
            const char *k_scales = reinterpret_cast<const char *>(ring + slot * SLOT + K_WORDS + V_WORDS);
            const char *v_scales = k_scales + 16 * K_SCALES;

            // 3. a new group of tokens: queries times the scales of its channels
            if (BY_CHANNEL && (begins || here.place.tile * TILE % LATE == 0)) {
#pragma unroll
                for (int step = 0; step < STEPS; step += 2) {
                    const uint4 s = *reinterpret_cast<const uint4 *>(k_scales + (step / 2 * 4 + c) * 16);
#pragma unroll
                    for (int n = 0; n < TIMES; n++) {
                        const uint2 x = query(n, step), y = query(n, step + 1);
                        right[n][step][0] = multiply(x.x, s.x);
                        right[n][step][1] = multiply(x.y, s.y);
                        right[n][step + 1][0] = multiply(y.x, s.z);
                        right[n][step + 1][1] = multiply(y.y, s.w);
                    }
                }
                find_start(0);
            }
            begins = false;

            // 4. scores (tokens, heads): lane 4g + c has tokens g, g + 8 of heads 2c, 2c + 1
            float s[HALVES][TIMES][4];
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                uint4 keys[K_LOADS];
#pragma unroll
                for (int i = 0; i < K_LOADS; i++) keys[i] = words[32 * (half * K_LOADS + i)];
#pragma unroll
                for (int group = 0; group < K_GROUPS; group++) {
                    float part[TIMES][4];
#pragma unroll
                    for (int n = 0; n < TIMES; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) part[n][i] = OFFSETS ? start[group][n][i] : 0;
#pragma unroll
                    for (int step = group * (STEPS / K_GROUPS); step < (group + 1) * (STEPS / K_GROUPS); step++) {
                        unsigned a[4];
                        KEYS::keys(a, reinterpret_cast<const unsigned *>(keys) + step * KEYS::WORDS);
#pragma unroll
                        for (int n = 0; n < TIMES; n++) mma(part[n], a, right[n][step][0], right[n][step][1], __half());
                    }
                    float2 scales = {1, 1};
                    if (!BY_CHANNEL)
                        scales = __half22float2(
                            *reinterpret_cast<const __half2 *>(k_scales + ((half * 8 + g) * K_GROUPS + group) * 4));
#pragma unroll
                    for (int n = 0; n < TIMES; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            const float x = BY_CHANNEL ? part[n][i] : part[n][i] * (i < 2 ? scales.x : scales.y);
                            s[half][n][i] = group ? s[half][n][i] + x : x;
                        }
                }
            }
#pragma unroll
            for (int half = 0; half < HALVES; half++)
#pragma unroll
                for (int n = 0; n < TIMES; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) s[half][n][i] *= to_score[n][i % 2];
            if (here.place.tile + 1 == here.place.tiles) { // what lies beyond the length
                const int tokens = line.length(here.place.b) - here.place.tile * TILE - g; // from the lane's first on
#pragma unroll
                for (int half = 0; half < HALVES; half++)
#pragma unroll
                    for (int n = 0; n < TIMES; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            if (16 * half + i / 2 * 8 >= tokens) s[half][n][i] = NONE;
            }

            // 5. weights, with a stale maximum (see Panel in flash.cuh); m is 2**lift below it
            bool far = false;
#pragma unroll
            for (int half = 0; half < HALVES; half++)
#pragma unroll
                for (int n = 0; n < TIMES; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) far |= s[half][n][i] > m[n][i % 2] + (FEW + lift);
            if (__any_sync(~0u, far)) {
#pragma unroll
                for (int n = 0; n < TIMES; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float high = LOWEST;
#pragma unroll
                        for (int half = 0; half < HALVES; half++)
                            high = fmaxf(high, fmaxf(s[half][n][i], s[half][n][i + 2]));
#pragma unroll
                        for (int far = 4; far < 32; far *= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, far));
                        high = fmaxf(m[n][i], high - lift);
                        const float shrink = exp2_fast(m[n][i] - high);
                        m[n][i] = high;
                        l[n][i] *= shrink;
#pragma unroll
                        for (int step = 0; step < STEPS; step++)
                            o[step][n][i] *= shrink, o[step][n][i + 2] *= shrink;
                    }
            }
            unsigned weights[HALVES][TIMES][2]; // (heads, tokens): lane 4g + c has head g, tokens 2c, 2c + 1 and 8 more
#pragma unroll
            for (int half = 0; half < HALVES; half++)
#pragma unroll
                for (int n = 0; n < TIMES; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const float x = exp2_fast(s[half][n][2 * i] - m[n][0]);
                        const float y = exp2_fast(s[half][n][2 * i + 1] - m[n][1]);
                        l[n][0] += x, l[n][1] += y;
                        asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
                            : "=r"(weights[half][n][i]) : "r"(pack(x, y, __half())));
                    }

            // 6. mix the values
            asm volatile("cp.async.wait_group %0;" ::"n"(2 * STAGES - 2) : "memory");
            __syncwarp();
            words += K_WORDS;
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                uint4 values[V_LOADS];
#pragma unroll
                for (int i = 0; i < V_LOADS; i++) values[i] = words[32 * (half * V_LOADS + i)];
#pragma unroll
                for (int group = 0; group < V_GROUPS; group++) {
                    const uint2 two =
                        *reinterpret_cast<const uint2 *>(v_scales + ((half * 4 + c) * V_GROUPS + group) * 8);
                    unsigned b[TIMES][2];
#pragma unroll
                    for (int n = 0; n < TIMES; n++)
                        b[n][0] = multiply(weights[half][n][0], two.x), b[n][1] = multiply(weights[half][n][1], two.y);
#pragma unroll
                    for (int step = group * (STEPS / V_GROUPS); step < (group + 1) * (STEPS / V_GROUPS); step++) {
                        unsigned a[4];
                        VALUES::values(a, reinterpret_cast<const unsigned *>(values) + step * VALUES::WORDS);
#pragma unroll
                        for (int n = 0; n < TIMES; n++) mma(o[step][n], a, b[n][0], b[n][1], __half());
                    }
                }
            }
            here.mine--, here.place.tile++;
            __syncwarp();
        }

        // 8. ask for what comes STAGES tiles later; scales of channels come with the first of a group or segment
        if (next.mine > 0) {
            uint4 *to = ring + slot * SLOT;
            const int tile = next.place.tile;
            if (entered) {
                const long long row = (long long)next.place.b * (rows / PANELS) + next.place.row / PANELS;
                const long long key = row * k_room + tile, value = row * v_room + tile;
                k_at = k + key * K_WORDS + lane, v_at = v + value * V_WORDS + lane;
                v_scale_at = v_scale + value * V_SCALES + lane;
                k_scale_at = k_scale + lane;
                if (BY_CHANNEL)
                    k_scale_at += row * ((k_room * TILE + LATE - 1) / LATE) * K_SCALES;
                else
                    k_scale_at += key * K_SCALES;
            }
#pragma unroll
            for (int i = 0; i < K_WORDS; i += 32) copy(to + i + lane, k_at + i);
            if (!BY_CHANNEL || entered || tile * TILE % LATE == 0) {
                const uint4 *from = BY_CHANNEL ? k_scale_at + tile * TILE / LATE * K_SCALES : k_scale_at;
#pragma unroll
                for (int i = 0; i < K_SCALES; i += 32)
                    if (i + lane < K_SCALES) copy(to + K_WORDS + V_WORDS + i + lane, from + i);
            }
            k_at += K_WORDS;
            if (!BY_CHANNEL) k_scale_at += K_SCALES;
        }
        asm volatile("cp.async.commit_group;" ::: "memory"); // also of nothing, so that as many are always behind
        if (next.mine > 0) {
            uint4 *to = ring + slot * SLOT + K_WORDS + lane;
#pragma unroll
            for (int i = 0; i < V_WORDS; i += 32) copy(to + i, v_at + i);
#pragma unroll
            for (int i = 0; i < V_SCALES; i += 32)
                if (i + lane < V_SCALES) copy(to + V_WORDS + K_SCALES + i, v_scale_at + i);
            v_at += V_WORDS, v_scale_at += V_SCALES;
            entered = false;
            next.place.tile++, next.mine--;
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        slot = slot + 1 < STAGES ? slot + 1 : 0;
    }
}
