/* The best rung: the product of up to 16 rows of x with a matrix of 8-, 4- or 2-bit codes, on the tensor cores. Few
   rows multiply whole numbers, and weights are never converted; more rows multiply 16-bit numbers, and x is never.

   New since magic:
   - For few rows mma.m16n8k32 multiplies bytes. A code of 8 bits is an operand as it stands, of 4 or 2 bits after
     one mask for four of them: layout.py has put it where it belongs. Sums are whole numbers, hence exact.
   - x becomes whole numbers once. A warp takes its slice of a row of x in units of 2**(e - LIFT), where
     2**e is above the largest of this slice, and writes each number as DIGITS signed bytes to base 256 (the last
     of four is 0). They are columns of B next to each other, which a single row would leave idle. LIFT is 21:
     numbers are rounded by adding 1.5 * 2**23, which leaves 22 bits with the sign, and the digits' signs need
     a carry of 0x8080 within them.
   - For more rows (FLOATS) mma.m16n8k16 takes x as it is: 16 bytes of a row are a lane's operands of two steps.
     Codes become 16-bit numbers as in magic, and where the power of two above them is small, it stays: it comes off the
     group's sum, together with the zero, before the first product.
   - sum (q - zero) scale x = sum over groups of scale (sum q x - zero sum x). The sums of x are made once.
   - One block stays on each multiprocessor. A warp owns UNITS units of 128 columns, so x lies in its
     registers (HOLD), and every tile of 16 rows of its team, through a ring of its own, filled with
     cp.async. WK warps, a team, share a row of tiles.
   - What is asked for first comes first: EARLY stages of the ring before the kernel waits for the one ahead of it, then
     x, then the rest. Of more rows, all warps of a block ask for x before any asks for the rest.
   - 16 rows of x are 128 KB a block at 4096 columns, four times a tile of weights of 4 bits. Loads into registers pass
     through L1, of which a block with this much shared memory leaves 28 KB. COPIED: x goes through shared memory with
     cp.async, over the place of all but FREE stages of the ring and of the sums, which are not needed yet.

   Moves rows * cols * BITS / 8 bytes of codes and 2 * sizeof(SCALE) for each group of a row, once, and x once a block.
   4 * rows * cols multiply-adds of bytes for each row of x, of which one m16n8k32 does 4096; or rows * cols of 16-bit
   numbers, of which one m16n8k16 does 2048.

   Steps: 1 ask for weights   2 wait for the kernel ahead   3 x, or its digits   4 sums of x   5 multiply
   6 scale, once a group   7 add up the warps' sums

   Compile with X (__half or __nv_bfloat16), SCALE (also float), BITS, GROUP (32, 64, 128; 0: a row),
   M (1, 2, 4, 8 or 16, at least m), FLOATS, WK and TEAMS (warps), UNITS, STAGE (units that are
   asked for together), DEPTH (stages of the ring), EARLY, COPIED, FREE, TILES (of a team between two barriers),
   HOLD, WHOLE (cols is 128 * WK * UNITS * gridDim.y), ALIGNED (cols is a multiple of 8, and x of 16 bytes).
   Launch (blocks, splits) blocks of 32 * WK * TEAMS threads with the shared memory that plan.py says; with
   more than one split (SPLIT: how many, else 0), y is float (SPLIT, m, rows), and merge, ceil(m * rows / 512) blocks of
   128, adds it up. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef BITS
#define X __half
#define SCALE __half
#define BITS 4
#define GROUP 128
#define M 1
#define FLOATS 0
#define WK 16
#define TEAMS 1
#define UNITS 2
#define STAGE 2
#define DEPTH 3
#define EARLY 0
#define COPIED 0
#define FREE 0
#define TILES 8
#define HOLD 1
#define WHOLE 1
#define ALIGNED 1
#define SPLIT 0
#endif
template <typename> constexpr bool is_half = false;
template <> constexpr bool is_half<__half> = true;
constexpr bool IS_HALF = is_half<X>;
constexpr int MERGE = 128; // threads of a block of merge
constexpr int WARPS = WK * TEAMS, THREADS = 32 * WARPS;
constexpr int LOADS = BITS / 2;                          // words of 16 bytes of a lane in a unit
constexpr int GROUPS = GROUP ? 128 / GROUP : 0;          // of a unit
constexpr int FACTORS = GROUPS * 32 * sizeof(SCALE) / 16; // words of 16 bytes of a unit
constexpr int SLOT = STAGE * (LOADS * 32 + FACTORS), CHUNKS = (UNITS + STAGE - 1) / STAGE;
constexpr int DIGITS = 4, LIFT = 21;                     // x is rounded to whole numbers below 2**LIFT
constexpr int N = FLOATS ? M : M * DIGITS;               // columns of B,
constexpr int NT = (N + 7) / 8, NB = N < 8 ? N : 8;      // in eights, and stored ones of eight
constexpr int PARTS = FLOATS ? 4 : 2;                    // words of 16 bytes of x of a lane, a unit and eight columns
constexpr float HIGH = FLOATS || BITS == 8 ? 1 : 1 << BITS; // what rows 8 .. 15 of a tile come out too large by
constexpr bool WIDE = FLOATS;                            // the warps' sums of a row are read 16 bytes at a time
constexpr int PLACES = WK > 8 ? 16 : WK > 4 ? 8 : 4;
constexpr bool PADDED = WIDE && WK < PLACES;
constexpr int PITCH = WIDE ? PLACES : WK | 1, SHEET = 16 * PITCH + (WIDE ? 0 : 4); // floats of a row, and of a row of x
constexpr int SHARE = HOLD ? UNITS : 1;
constexpr int SUMS = FLOATS && !GROUPS ? 1 : GROUPS;     // of x that a warp keeps of a unit, for each column of B
constexpr int SHIFTS = UNITS * SUMS * (FLOATS ? 8 : 4) * NT;
constexpr int ROOM = M < 2 ? 2 : M; // floats for a warp, a multiple of 8 bytes
constexpr int THROUGH = UNITS * NT * 128; // words of 16 bytes of x of a warp, on their way into registers
constexpr int X_WORDS = FLOATS ? 0 : UNITS * PARTS * NT * NB * 4; // words of 16 bytes of digits of a warp
static_assert(!FLOATS || HOLD, "more rows of x stay in registers");

/* d += A * B, a warp's: codes times digits */
__device__ __forceinline__ void mma(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* d += A * B: codes, as 16-bit numbers, times x */
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#define MMA(type)                                                                                                      \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                                                 \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                              \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if (IS_HALF)
        MMA("f16");
    else
        MMA("bf16");
}

/* The operand of a step from the lane's words of a unit */
__device__ __forceinline__ void codes(unsigned (&a)[4], const unsigned *w, int step) {
    if (BITS == 8) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = w[4 * step + i];
    } else if (BITS == 4) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            a[2 * i] = w[2 * step + i] & 0x0f0f0f0f;
            a[2 * i + 1] = w[2 * step + i] & 0xf0f0f0f0;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            a[2 * i] = w[step] >> 4 * i & 0x03030303;
            a[2 * i + 1] = w[step] >> 4 * i & 0x0c0c0c0c;
        }
    }
}

__device__ __forceinline__ float2 unpack(unsigned both, __half) {
    return __half22float2(*reinterpret_cast<__half2 *>(&both));
}
__device__ __forceinline__ float2 unpack(unsigned both, __nv_bfloat16) {
    return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000)};
}
/* (scale, zero) number i of an array */
template <typename T> __device__ __forceinline__ float2 factor(const T *all, long long i) {
    return unpack(reinterpret_cast<const unsigned *>(all)[i], T());
}
__device__ __forceinline__ float2 factor(const float *all, long long i) {
    return reinterpret_cast<const float2 *>(all)[i];
}
/* Operand i of m16n8k32 lies AT bits from the end of a byte. Under the bits of 2**MANTISSA it is a 16-bit number: that
   power and the code times 2**PUT, PUT alike in a row of the tile; it is moved DOWN to where the type has room. Where
   the power is small beside the codes, all of it is taken off the group's sum, before the first product; elsewhere
   that would cost digits, and each number is made EXACT: the code less its zero, or less MIDDLE where the zero is that
   of a whole row, which comes off each warp's sum. */
constexpr int MANTISSA = IS_HALF ? 10 : 7;
constexpr int at(int i) { return BITS == 8 ? 0 : BITS == 4 ? i % 2 * 4 : i * 2; }
constexpr int down(int i) { return BITS == 2 ? i / 2 * 4 : BITS == 4 && !IS_HALF ? at(i) : 0; }
constexpr int put(int i) { return at(i) - down(i); }
constexpr bool exact(int i) { return BITS == 8 || MANTISSA - put(i) > BITS + 2; }
constexpr float MIDDLE = FLOATS && GROUP == 0 && BITS == 8 ? 128 : 0;
__device__ __forceinline__ unsigned twice(float v) { // exact: whole numbers of few bits
    if (IS_HALF) {
        const __half2 both = __float2half2_rn(v);
        return reinterpret_cast<const unsigned &>(both);
    }
    const __nv_bfloat162 both = __float2bfloat162_rn(v);
    return reinterpret_cast<const unsigned &>(both);
}
/* a * b + c of two numbers */
__device__ __forceinline__ unsigned fma2(unsigned a, unsigned b, unsigned c) {
    unsigned d;
    if (IS_HALF)
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    else
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
/* Two codes, the low bytes of a word's halves, as 16-bit numbers. less: -(2**(MANTISSA - put) + zero), twice */
__device__ __forceinline__ unsigned pair(unsigned w, int i, unsigned magic, unsigned less, float zero) {
    if (MANTISSA < BITS) { // a byte takes a float's room: under 2**23, whose upper half is the number once that is off
        const float low = __uint_as_float(__byte_perm(w, 0x4b000000, 0x7440)) - (8388608 + zero);
        const float high = __uint_as_float(__byte_perm(w, 0x4b000000, 0x7442)) - (8388608 + zero);
        return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
    }
    const unsigned number = w >> down(i) & ((1 << BITS) - 1) * 0x10001 << put(i) | magic;
    const unsigned scale = IS_HALF ? (15 - put(i)) * 0x04000400 : (127 - put(i)) * 0x00800080; // 2**-put, twice
    return exact(i) ? fma2(number, scale, less) : number;
}
/* The operands of a step, two of m16n8k16 */
__device__ __forceinline__ void numbers(unsigned (&a)[2][4], const unsigned *w, int step, unsigned magic,
                                        const unsigned (&less)[2], const float (&zero)[2]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned word = w[BITS == 8 ? 4 * step + i : BITS == 4 ? 2 * step + i / 2 : step];
        a[i / 2][i % 2] = pair(word, i, magic, less[i % 2], zero[i % 2]);
        a[i / 2][2 + i % 2] = pair(word >> 8, i, magic, less[i % 2], zero[i % 2]);
    }
}
__device__ __forceinline__ float power(int e) { return __int_as_float((e + 127) << 23); } // 2**e
__device__ __forceinline__ float4 four(uint2 raw) {
    const float2 a = unpack(raw.x, X()), b = unpack(raw.y, X());
    return {a.x, a.y, b.x, b.y};
}
__device__ __forceinline__ void copy(unsigned to, const uint4 *from, unsigned long long policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(from), "l"(policy) : "memory");
}
/* 16 bytes, or zeros */
__device__ __forceinline__ void copy_or_zero(unsigned to, const void *from, bool some) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(some ? 16 : 0) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gemv(const uint4 *packed, const SCALE *factors, const X *x, void *y, long long rows, int cols, int m) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    extern __shared__ __align__(16) uint4 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const int slice = warp % WK, team = warp / WK;
    uint4 *const ring = shared + warp * SLOT; // [DEPTH][WARPS] slots: [STAGE][LOADS][32] codes, then factors
    float *const floats = reinterpret_cast<float *>(shared + WARPS * DEPTH * SLOT);
    float *const shifts = floats + warp * SHIFTS;         // [UNITS][GROUPS][NT][4]: sums of x
    float *const whole = floats + WARPS * SHIFTS;         // [WARPS][M]: the sum of a slice
    float *const backs = whole + WARPS * ROOM + warp * ROOM; // [WARPS][M]: its unit
    uint4 *const all_x = reinterpret_cast<uint4 *>(whole + 2 * WARPS * ROOM);
    uint4 *const mine_x = all_x + warp * X_WORDS; // [UNITS][PARTS][NT][NB][4]
    auto sums = reinterpret_cast<float (*)[TILES][TEAMS][M][SHEET]>(all_x + WARPS * X_WORDS); // [2], of [16][PITCH]

    const int units = (cols + 127) / 128, from = (blockIdx.y * WK + slice) * UNITS; // the warp's first unit
    const int there = WHOLE ? UNITS : max(0, min(UNITS, units - from));
    const int groups = GROUP == 0 ? 0 : (cols / (GROUP ? GROUP : 1) + 3) / 4 * 4; // stored, of a row
    const int tiles = (rows + 15) / 16, stride = gridDim.x * TEAMS;
    const int first = blockIdx.x + gridDim.x * team; // of the warp's tiles
    unsigned long long once; // weights are read once, so they are the first that may leave L2
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));

    // 1. ask for weights
    int ask_tile = first, ask_chunk = 0;
    const uint4 *codes_at = packed + ((long long)first * units + from) * (LOADS * 32) + lane;
    const uint4 *factors_at = reinterpret_cast<const uint4 *>(factors);
    if (GROUP) factors_at += ((long long)first * groups * 32 * sizeof(SCALE)) / 16 + from * FACTORS + lane;
    // The lane's place in the ring, and in a slot. Through shuffles: where the compiler sees that part of an address
    // is the same in all lanes, ptxas 13.0 writes a copy that the card calls an illegal instruction. `none` is 0
    const unsigned home = __shfl_sync(~0u, (unsigned)__cvta_generic_to_shared(ring + lane), lane);
    const int none = __shfl_sync(~0u, lane, lane) - lane;
    const unsigned step = WARPS * SLOT * 16 + none;
    unsigned to = home;
    auto ask = [&](unsigned to) {
        if (ask_tile < tiles) {
#pragma unroll
            for (int s = 0; s < STAGE; s++)
                if ((WHOLE && UNITS % STAGE == 0) || ask_chunk * STAGE + s < there)
#pragma unroll
                    for (int i = 0; i < LOADS; i++)
                        copy(to + (s * LOADS + i) * 512, codes_at + (s * LOADS + i) * 32, once);
#pragma unroll
            for (int i = 0; i < STAGE * FACTORS; i += 32)
                if (i + lane < (WHOLE && UNITS % STAGE == 0 ? STAGE : min(STAGE, there - ask_chunk * STAGE)) * FACTORS)
                    copy(to + (STAGE * LOADS * 32 + i) * 16, factors_at + i, once);
            codes_at += STAGE * LOADS * 32, factors_at += STAGE * FACTORS;
            if (++ask_chunk == CHUNKS) {
                ask_chunk = 0, ask_tile += stride;
                codes_at += ((long long)stride * units - CHUNKS * STAGE) * (LOADS * 32);
                factors_at += (long long)stride * groups * 2 * sizeof(SCALE) - CHUNKS * STAGE * FACTORS;
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory"); // of nothing too, so that as many are always behind
    };
#pragma unroll 1
    for (int slot = 0; slot < EARLY; slot++, to += step) ask(to);
    auto ask_more = [&] {
        if (FLOATS && EARLY < DEPTH) __syncthreads(); // no warp's weights are asked for before another one's x
#pragma unroll 1
        for (int slot = EARLY; slot < (COPIED ? FREE : DEPTH); slot++, to += step) ask(to);
    };

    // 2. wait for the kernel ahead
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

    // 3. x: as it is, eight columns of a lane next to each other, or as digits
    uint4 held[SHARE][PARTS][NT];
    // As many numbers as `words`, zeros, has room for: of row j, from column `col` of unit u on
    auto load = [&](auto words, int j, int u, int col) {
        using Words = decltype(words);
        col += (from + u) * 128;
        const X *at = x + (long long)min(j, m - 1) * cols + col; // more rows are there for nothing
        if (u >= there) return words;
        if (ALIGNED) return WHOLE || col < cols ? __ldcg(reinterpret_cast<const Words *>(at)) : words;
#pragma unroll
        for (int i = 0; i < sizeof(Words) / sizeof(X); i += 2) {
            const unsigned short *const pair = reinterpret_cast<const unsigned short *>(at + i);
            const unsigned low = col + i < cols ? __ldcg(pair) : 0, high = col + i + 1 < cols ? __ldcg(pair + 1) : 0;
            reinterpret_cast<unsigned *>(&words)[i / 2] = low | high << 16;
        }
        return words;
    };
    if constexpr (FLOATS) {
        if constexpr (COPIED) {
            // [UNITS][NT * 8][16]; word q of an odd row is at q ^ 4, so that two rows' words are in different banks
            uint4 *const through = shared + FREE * WARPS * SLOT + warp * THROUGH;
            const int half = lane / 16, col = lane % 16 * 8;
            const unsigned place = __cvta_generic_to_shared(through + (lane ^ half * 4));
            const unsigned home_x = __shfl_sync(~0u, place, lane); // see `home`
            const X *const at = x + from * 128 + col;
#pragma unroll
            for (int i = 0; i < NT * 4; i++) {
                // 256 bytes of two rows. Blocks begin at different ones: all read the same x, at the same time
                const int j = (i + blockIdx.x) % (NT * 4) * 2, row = j + half;
#pragma unroll
                for (int u = 0; u < UNITS; u++) {
                    const bool some = row < m && u < there && (WHOLE || (from + u) * 128 + col < cols);
                    const X *const it = some ? at + (long long)row * cols + u * 128 : x;
                    copy_or_zero(home_x + j * 256 + u * (NT * 2048), it, some);
                }
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
            ask_more();
            asm volatile("cp.async.wait_group %0;" ::"n"(FREE - EARLY) : "memory");
            __syncwarp();
#pragma unroll
            for (int u = 0; u < SHARE; u++)
#pragma unroll
                for (int part = 0; part < PARTS; part++)
#pragma unroll
                    for (int nt = 0; nt < NT; nt++)
                        held[u][part][nt] = through[((u * NT + nt) * 8 + g) * 16 + ((part * 4 + c) ^ g % 2 * 4)];
            __syncthreads(); // from here on its place is the ring's and the sums'
#pragma unroll 1
            for (int slot = FREE; slot < DEPTH; slot++, to += step) ask(to);
        } else {
#pragma unroll
            for (int u = 0; u < SHARE; u++)
#pragma unroll
                for (int part = 0; part < PARTS; part++)
#pragma unroll
                    for (int nt = 0; nt < NT; nt++)
                        held[u][part][nt] = load(uint4{}, 8 * nt + g % NB, u, part * 32 + c * 8);
            ask_more();
        }
    } else {
        constexpr int SOME = UNITS > 8 ? 1 : UNITS > 4 ? 2 : UNITS > 2 ? 4 : UNITS > 1 ? 8 : 16;
        constexpr int ROWS = SOME < M ? SOME : M; // of x that are asked for at once
        constexpr int KEPT = UNITS <= 8 ? UNITS : 1;
#pragma unroll 1
        for (int j0 = 0; j0 < M; j0 += ROWS) {
            uint2 raw[ROWS][KEPT];
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int u = 0; u < KEPT; u++) raw[r][u] = load(uint2{}, j0 + r, u, 4 * lane);
            if (j0 == 0) ask_more();
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int j = j0 + r;
                unsigned top = 0; // the largest of both halves without their signs, as bits: NaN is above infinity
#pragma unroll
                for (int u = 0; u < UNITS; u++) {
                    const uint2 v = KEPT == UNITS ? raw[r][KEPT == UNITS ? u : 0] : load(uint2{}, j, u, 4 * lane);
                    top = __vmaxu2(top, __vmaxu2(v.x & 0x7fff7fff, v.y & 0x7fff7fff));
                }
                const unsigned peak = __reduce_max_sync(~0u, max(top & 0xffff, top >> 16));
                const float largest = unpack(peak, X()).x;
                const int e = max((__float_as_int(largest) >> 23) - 126, LIFT - 126); // it is less than 2**e
                const float up = power(LIFT - e);
                const bool finite = largest < __int_as_float(0x7f800000);
                const float unit = finite ? power(e - LIFT) : __int_as_float(0x7fffffff);
                if (lane == 0) backs[j] = unit;
                float total = 0;
#pragma unroll
                for (int u = 0; u < UNITS; u++) {
                    const uint2 raw_v = KEPT == UNITS ? raw[r][KEPT == UNITS ? u : 0] : load(uint2{}, j, u, 4 * lane);
                    const float4 v = four(raw_v);
                    // added to 1.5 * 2**23 a number is rounded to a whole one, in the low bits. 0x80 is added to each
                    // digit but the highest, and taken off again by an exclusive or, so that the digits have signs
                    constexpr int CARRY = 0x8080;
                    constexpr float MAGIC = 12582912.f + CARRY;
                    unsigned d[4] = {__float_as_uint(fmaf(v.x, up, MAGIC)), __float_as_uint(fmaf(v.y, up, MAGIC)),
                                     __float_as_uint(fmaf(v.z, up, MAGIC)), __float_as_uint(fmaf(v.w, up, MAGIC))};
#pragma unroll
                    for (int i = 0; i < 4; i++) d[i] -= 0x4b400000; // the third digit has the sign; there is no fourth
                    // their sum over a group, which GROUP / 4 lanes share, or over a unit
                    int sum = (int)(d[0] + d[1] + d[2] + d[3]) - 4 * CARRY;
                    if (GROUP % 128 == 0) sum = __reduce_add_sync(~0u, sum);
#pragma unroll
                    for (int far = GROUP % 128 / 8; far > 0; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
                    if (GROUP == 0) total += (float)sum;
                    if (GROUP && lane % (GROUP ? GROUP / 4 : 1) == 0) {
                        const int at = (u * GROUPS + lane / (GROUP ? GROUP / 4 : 1)) * NT + j / 2;
                        reinterpret_cast<float2 *>(shifts)[at * 2 + j % 2] = {(float)sum, 0};
                    }
                    const int step = lane / 8, half = lane % 2;
#pragma unroll
                    for (int k = 0; k < DIGITS; k++) {
                        const unsigned pick = k | (k + 4) << 4, n = j * DIGITS + k;
                        unsigned word = 0;
                        if (k < 3)
                            word = __byte_perm(__byte_perm(d[0], d[2], pick), __byte_perm(d[1], d[3], pick), 0x5410);
                        if (CARRY >> 8 * k & 0x80) word ^= 0x80808080;
                        uint4 *to = mine_x + ((u * 2 + step / 2) * NT + n / 8) * (NB * 4) + n % 8 * 4 + lane / 2 % 4;
                        reinterpret_cast<unsigned *>(to)[step % 2 * 2 + half] = word;
                    }
                }
                if (GROUP == 0 && lane == 0) whole[warp * ROOM + j] = total * unit;
            }
        }
    }
    __syncwarp();

    // 4. x as operands, its sums, and the unit of the lane's columns
    auto operand = [&](int u, int part, int nt) {
        if (HOLD) return held[HOLD ? u : 0][part][nt];
        return mine_x[((u * PARTS + part) * NT + nt) * (NB * 4) + lane % (NB * 4)];
    };
    float back[NT] = {};
    auto combine = [](int low, int high) { return (float)(low + 256 * high); };
    if constexpr (FLOATS) {
        constexpr unsigned ONE = IS_HALF ? 0x3c003c00 : 0x3f803f80;
        const unsigned ones[4] = {ONE, ONE, ONE, ONE};
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            float total[2] = {};
#pragma unroll
            for (int u = 0; u < UNITS; u++)
#pragma unroll
                for (int group = 0; group < SUMS; group++) {
                    float d[4] = {};
#pragma unroll
                    for (int part = 0; part < PARTS / SUMS; part++) {
                        const uint4 b = operand(u, group * (PARTS / SUMS) + part, nt);
                        mma(d, ones, b.x, b.y);
                        mma(d, ones, b.z, b.w);
                    }
                    total[0] += d[0], total[1] += d[1];
                    float2 *const to = reinterpret_cast<float2 *>(shifts) + ((u * SUMS + group) * NT + nt) * 4 + c;
                    if (g == 0) *to = {d[0], d[1]};
                }
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (GROUP == 0 && g == 0 && 8 * nt + 2 * c + i < M) whole[warp * ROOM + 8 * nt + 2 * c + i] = total[i];
        }
    } else {
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const int pair = (4 * nt + c) % (M * 2);
            back[nt] = backs[pair / 2] * (pair % 2 ? 65536 : 1);
        }
        if (HOLD)
#pragma unroll
            for (int u = 0; u < SHARE; u++)
#pragma unroll
                for (int part = 0; part < PARTS; part++)
#pragma unroll
                    for (int nt = 0; nt < NT; nt++)
                        held[u][part][nt] = mine_x[((u * PARTS + part) * NT + nt) * (NB * 4) + lane % (NB * 4)];
    }
    __syncwarp();

    if (PADDED) { // places that no warp has
        const int count = (TILES * stride < tiles ? 2 : 1) * TILES * TEAMS * M * SHEET;
        for (int i = threadIdx.x; i < count; i += THREADS) reinterpret_cast<float *>(sums)[i] = 0;
        __syncthreads();
    }

    // 2**MANTISSA, twice. Made from an argument, it stays in a register; a constant would be loaded again and again
    const unsigned magic = m > 0 ? IS_HALF ? 0x64006400 : 0x43004300 : 0;
    // Where a warp's sum of a row of the tile is kept. WIDE: places differ by row and column, so that banks do
    const int place = g * PITCH + (WIDE ? (slice / 4 ^ g * PITCH / 32) * 4 + (slice % 4 ^ c) : slice);
    int slot = none, phase = 0;
#pragma unroll 1
    for (int begin = 0; begin * stride + (int)blockIdx.x < tiles; begin += TILES, phase ^= 1) {
        constexpr unsigned ITEMS = TILES * TEAMS * M * 16;
        // number i of what a phase gives: its tile of 16 rows, and what it is multiplied by
        auto tile_of = [&](unsigned i) {
            return blockIdx.x + gridDim.x * (i / (M * 16) % TEAMS + TEAMS * (begin + i / (M * 16 * TEAMS)));
        };
        auto factor_of = [&](unsigned i) {
            const long long row = (long long)tile_of(i) * 16 + i % 16;
            return i < ITEMS && row < rows ? factor(factors, row) : float2{};
        };
        float2 early = {};
        if (GROUP == 0) early = factor_of(threadIdx.x);
        float *into = &sums[phase][0][team][0][place]; // for the sums of a tile
#pragma unroll 1
        for (int i = begin; i < begin + TILES && first + i * stride < tiles; i++, into += TEAMS * M * SHEET) {
            float t[NT][4] = {};
            // 5. multiply
#pragma unroll(HOLD ? CHUNKS : 1)
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
                __syncwarp();
#pragma unroll
                for (int s = 0; s < STAGE; s++) {
                    const int u = chunk * STAGE + s;
                    if ((UNITS % STAGE == 0 || u < UNITS) && (WHOLE || u < there)) {
                        const uint4 *words = ring + slot * (WARPS * SLOT) + s * LOADS * 32;
                        uint4 w[LOADS];
#pragma unroll
                        for (int l = 0; l < LOADS; l++) w[l] = words[32 * l + lane];
                        const uint4 *of = ring + slot * (WARPS * SLOT) + STAGE * LOADS * 32 + s * FACTORS;
                        const SCALE *f = reinterpret_cast<const SCALE *>(of);
                        if constexpr (FLOATS) {
                            float d[NT][4], scale[2] = {1, 1}, zero[2] = {MIDDLE, MIDDLE};
                            unsigned less[2];
#pragma unroll
                            for (int step = 0; step < 4; step++) {
                                // a group begins with what its sum would come out too large by
                                if (step % (4 / SUMS) == 0) {
                                    const int group = step / (4 / SUMS);
#pragma unroll
                                    for (int half = 0; half < 2; half++) {
                                        if (GROUP) {
                                            const float2 v = factor(f, (group * 8 + g) * 2 + half);
                                            scale[half] = v.x, zero[half] = v.y;
                                        }
                                        less[half] = twice(-zero[half] - (1 << MANTISSA - put(half)));
                                        if (!exact(half)) scale[half] /= 1 << put(half);
                                    }
#pragma unroll
                                    for (int nt = 0; nt < NT; nt++) {
                                        const float2 sum = reinterpret_cast<const float2 *>(
                                            shifts)[((u * SUMS + group) * NT + nt) * 4 + c];
#pragma unroll
                                        for (int i = 0; i < 4; i++) {
                                            const int k = i / 2;
                                            const float much = (1 << MANTISSA) + zero[k] * (1 << put(k));
                                            d[nt][i] = exact(k) ? 0 : -much * (i % 2 ? sum.y : sum.x);
                                        }
                                    }
                                }
                                unsigned a[2][4];
                                numbers(a, reinterpret_cast<const unsigned *>(w), step, magic, less, zero);
#pragma unroll
                                for (int nt = 0; nt < NT; nt++) {
                                    const uint4 b = operand(u, step, nt);
                                    mma(d[nt], a[0], b.x, b.y);
                                    mma(d[nt], a[1], b.z, b.w);
                                }
                                // 6. scale, once a group
                                if ((step + 1) % (4 / SUMS) == 0)
#pragma unroll
                                    for (int nt = 0; nt < NT; nt++)
#pragma unroll
                                        for (int i = 0; i < 4; i++) t[nt][i] += scale[i / 2] * d[nt][i];
                            }
                        } else {
                            int d[NT][4] = {};
#pragma unroll
                            for (int step = 0; step < 4; step++) {
                                unsigned a[4];
                                codes(a, reinterpret_cast<const unsigned *>(w), step);
#pragma unroll
                                for (int nt = 0; nt < NT; nt++) {
                                    const uint4 b = operand(u, step / 2, nt);
                                    mma(d[nt], a, step % 2 ? b.z : b.x, step % 2 ? b.w : b.y);
                                }
                                // 6. scale, once a group; the sums of a unit are added up too where it is a row
                                if (GROUP && (step + 1) % (GROUP / 32) == 0) {
                                    const int group = step / (GROUP ? GROUP / 32 : 1);
                                    const float2 low = factor(f, (group * 8 + g) * 2);
                                    const float2 high = factor(f, (group * 8 + g) * 2 + 1);
#pragma unroll
                                    for (int nt = 0; nt < NT; nt++) {
                                        const float sum = shifts[((u * GROUPS + group) * NT + nt) * 4 + c % (M * 2)];
                                        t[nt][0] += low.x * (combine(d[nt][0], d[nt][1]) - low.y * sum);
                                        t[nt][1] += high.x * (combine(d[nt][2], d[nt][3]) - high.y * (sum * HIGH));
                                        d[nt][0] = d[nt][1] = d[nt][2] = d[nt][3] = 0;
                                    }
                                }
                            }
                            if (GROUP == 0)
#pragma unroll
                                for (int nt = 0; nt < NT; nt++) {
                                    t[nt][0] += combine(d[nt][0], d[nt][1]);
                                    t[nt][1] += combine(d[nt][2], d[nt][3]);
                                }
                        }
                    }
                }
                __syncwarp();
                ask(home + slot * (WARPS * SLOT * 16));
                slot = slot < DEPTH - 1 ? slot + 1 : 0;
            }
            if constexpr (FLOATS) {
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int n = 8 * nt + 2 * c + i % 2;
                        if (n < M) into[n * SHEET + i / 2 * 8 * PITCH] = t[nt][i];
                    }
            } else {
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float all = t[nt][half] * (half ? back[nt] / HIGH : back[nt]);
                        all += __shfl_xor_sync(~0u, all, 1);
                        const int n = (4 * nt + c) / 2;
                        if (c % 2 == 0 && n < M) into[n * SHEET + half * 8 * PITCH] = all;
                    }
            }
        }

        // 7. add up the warps' sums; the next phase has sums of its own, so one barrier is enough
        __syncthreads();
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < ITEMS; i += THREADS) {
            const unsigned j = i / 16 % M, r = i % 16, of = i / (M * 16) % TEAMS;
            const long long row = (long long)tile_of(i) * 16 + r;
            if (row >= rows || j >= m) continue;
            const float2 f = GROUP ? float2{} : i == threadIdx.x ? early : factor_of(i);
            float all = 0;
            const float *const found = sums[phase][i / (M * 16 * TEAMS)][of][j] + r * PITCH;
            if (WIDE) {
#pragma unroll
                for (int k = 0; k < PITCH / 4; k++) {
                    const float4 four = reinterpret_cast<const float4 *>(found)[k ^ r % 8 * PITCH / 32];
                    all += four.x + four.y + (four.z + four.w);
                }
            }
#pragma unroll
            for (int k = 0; k < WK; k++) { // the zero of a whole row comes off each warp's sum, before these grow long
                float some = WIDE ? 0 : found[k];
                if (GROUP == 0) some -= (f.y - MIDDLE) * whole[(of * WK + k) * ROOM + j];
                all += some;
            }
            if (GROUP == 0) all *= f.x;
            if (SPLIT)
                static_cast<float *>(y)[((long long)blockIdx.y * m + j) * rows + row] = all;
            else
                static_cast<X *>(y)[j * rows + row] = (X)all;
        }
    }
}

/* Numbers i .. i + 3 of (SPLIT, count), added up over the first; WORDS: they are one word of 16 bytes */
template <bool WORDS> __device__ __forceinline__ float4 sum_of(const float *parts, long long i, long long count) {
    const long long last = count - 1 - i; // past the end the last one is read again
    float4 all = {};
#pragma unroll 8
    for (int split = 0; split < SPLIT; split++) { // several loads are asked for before the first is used
        const float *const at = parts + split * count + i;
        float4 part;
        if (WORDS)
            part = __ldcg(reinterpret_cast<const float4 *>(at));
        else
            part = {__ldcg(at), __ldcg(at + min(1ll, last)), __ldcg(at + min(2ll, last)), __ldcg(at + min(3ll, last))};
        all.x += part.x, all.y += part.y, all.z += part.z, all.w += part.w;
    }
    return all;
}

/* The sums of all splits: parts (SPLIT, count) -> y (count), four of a thread. Its blocks fit beside those of gemv
   where these leave registers */
extern "C" __global__ void __launch_bounds__(MERGE) merge(const float *parts, X *y, long long count) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    const long long i = ((long long)blockIdx.x * MERGE + threadIdx.x) * 4;
    if (i >= count) return;
    const bool words = count % 4 == 0; // each split's begins at one of 16 bytes
    const float4 all = words ? sum_of<true>(parts, i, count) : sum_of<false>(parts, i, count);
    const X four[4] = {(X)all.x, (X)all.y, (X)all.z, (X)all.w};
    if (words && reinterpret_cast<unsigned long long>(y) % 8 == 0) {
        unsigned raw[4];
#pragma unroll
        for (int k = 0; k < 4; k++) raw[k] = reinterpret_cast<const unsigned short &>(four[k]);
        *reinterpret_cast<uint2 *>(y + i) = {raw[0] | raw[1] << 16, raw[2] | raw[3] << 16};
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (i + k < count) y[i + k] = four[k];
    }
}
