/* Hopper's own instructions, one small function each: mbarriers, bulk tensor copies (TMA), warpgroup matrix products
   (wgmma), and what lays fragments out. Compile for sm_90a.

   Addresses in shared memory are 32 bit ("at"). Tiles are 64 rows of 128 bytes, as a tensor map with a box of 64
   halves a row and the 128-byte swizzle brings them: 16 bytes of a row lie at place (word ^ row % 8). */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef BF16
#define BF16 0 // 1: the operands are bfloat16, else half
#endif
#define DEVICE __device__ __forceinline__

typedef unsigned long long u64;
struct alignas(64) CUtensorMap {
    u64 opaque[16];
};

constexpr int ROW = 128, TILE = 64 * ROW; // bytes

DEVICE unsigned at(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// ---- mbarriers ----

DEVICE void init(u64 *bar, unsigned count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at(bar)), "r"(count) : "memory");
}
DEVICE void arrive(u64 *bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(bar)) : "memory"); }
DEVICE void arrive_and_expect(u64 *bar, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at(bar)), "r"(bytes) : "memory");
}
DEVICE void wait(u64 *bar, unsigned parity) {
    asm volatile(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }" ::"r"(at(bar)),
        "r"(parity)
        : "memory");
}

// ---- bulk tensor copies ----

DEVICE void prefetch(const CUtensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// How L2 keeps what a copy brings, in the instruction's own code (PTX: createpolicy): dropped first, or last.
constexpr u64 ONCE = 0x12F0000000000000ull, AGAIN = 0x14F0000000000000ull;

/* Tiles of an array (batch, major, minor, token, 64): one copy may bring several, of consecutive major or minor. */
DEVICE void load_tiles(unsigned to, const CUtensorMap *map, int token, int minor, int major, int batch, u64 *bar,
                       u64 keep = ONCE) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
                 "[%1, {%2, %3, %4, "
                 "%5, %6}], [%7], %8;" ::"r"(to),
                 "l"(map), "r"(0), "r"(token), "r"(minor), "r"(major), "r"(batch), "r"(at(bar)), "l"(keep)
                 : "memory");
}
/* The way back, by one thread: what lies outside of the array is not written. */
DEVICE void store_tile(const CUtensorMap *map, unsigned from, int token, int minor, int major, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%1, %2, %3, %4, %5}], [%6], %7;" ::
            "l"(map),
        "r"(0), "r"(token), "r"(minor), "r"(major), "r"(batch), "r"(from), "l"(ONCE)
        : "memory");
}
DEVICE void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/* Until all have been read from shared memory, or have been written. */
DEVICE void stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void stores_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
/* What this thread has written to shared memory is there for wgmma, too, and for TMA, behind the next barrier. */
DEVICE void show_to_tma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- copies of single words, by each thread for itself ----

/* Four bytes, or the first two of them and zeros. */
DEVICE void copy_word(unsigned to, u64 from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// ---- warpgroups ----

template <int COUNT> DEVICE void meet(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(COUNT) : "memory");
}
template <int REGISTERS> DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- fragments ----

/* Two floats as two halves; the first in the lower bits. */
DEVICE unsigned pack(float low, float high) {
    unsigned both;
    if (BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
DEVICE float2 unpack(unsigned both) {
    if (BF16)
        return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000));
    else
        return __half22float2(*reinterpret_cast<half2 *>(&both));
}

/* On two halves at once. */
DEVICE unsigned times(unsigned a, unsigned b) {
    unsigned both;
    if (BF16)
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    else
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
}

DEVICE float half_at(const unsigned char *place) { return unpack(*reinterpret_cast<const unsigned short *>(place)).x; }

/* Four 8 x 8 matrices of halves, transposed on the way; lane i names row i % 8 of matrix i / 8. Who reads them later
   waits at a barrier first, and who wrote them before has: these are in order among themselves and with barriers. */
DEVICE void read_transposed(unsigned *r, unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row));
}
DEVICE void write_transposed(unsigned row, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b),
                 "r"(c), "r"(d));
}
DEVICE void write_matrices(unsigned row, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
                 "r"(d));
}

/* Where 16 bytes lie in a tile: `word` counts them within the row. */
DEVICE unsigned place(int row, int word) { return row * ROW + (word ^ row % 8) * 16; }

// ---- wgmma: D += A B, D 64 x N in registers. B, and A where it is no fragment, are tiles ----

/* The rows of the matrix are the tile's rows. */
DEVICE u64 rows_of(unsigned tile) { return (tile & 0x3FFFF) >> 4 | (u64)(1024 >> 4) << 32 | (u64)1 << 62; }
/* The rows of the matrix are the tile's columns; more than 64 of them go on in the next tile. */
DEVICE u64 columns_of(unsigned tile) { return rows_of(tile) | (u64)(TILE >> 4) << 16; }

/* The descriptor of what lies so many bytes further on. */
DEVICE u64 moved(u64 descriptor, int bytes) { return descriptor + (bytes >> 4); }

/* The same number in all lanes: now the compiler knows, and keeps descriptors made of it in uniform registers. */
DEVICE int uniform(int v) { return __shfl_sync(~0u, v, 0); }

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
/* Keeps the compiler from moving reads of an accumulator in front of the wait. */
template <int COUNT> DEVICE void hold(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// The type of the operands is a part of the instruction's name, and must be known to the preprocessor.
#if BF16
#define KIND "bf16.bf16"
#else
#define KIND "f16.f16"
#endif

// The instruction takes each number of D by name: %0 and on; what comes behind them has the next names.
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                                       \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"                        \
             ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 4), FOUR(d, i + 8), FOUR(d, i + 12)
#define FRAGMENT(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
/* Of so many columns; behind D come A, B and `add` (0: D = A B). turned: which of A and B are tiles by columns_of. */
#define PRODUCT(columns, d, a_and_b, add, turned)                                                                      \
    "{ .reg .pred p; setp.ne.b32 p, " add ", 0; wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." KIND " {" d      \
    "}, " a_and_b ", p, 1, 1, " turned "; }"

/* 64 x 64, both tiles; rows of A and B as rows_of. */
DEVICE void product(float *d, u64 a, u64 b, int add) {
    asm volatile(PRODUCT("64", NAMES_32, "%32, %33", "%34", "0, 0")
                 : SIXTEEN(d, 0), SIXTEEN(d, 16)
                 : "l"(a), "l"(b), "r"(add));
}
/* A a fragment (64 x 16), B as rows_of. */
template <int N> DEVICE void product_of_fragment(float *d, const unsigned *a, u64 b, int add) {
    static_assert(N == 64 || N == 32);
    if constexpr (N == 64)
        asm volatile(PRODUCT("64", NAMES_32, "{%32, %33, %34, %35}, %36", "%37", "0")
                     : SIXTEEN(d, 0), SIXTEEN(d, 16)
                     : FRAGMENT(a), "l"(b), "r"(add));
    else
        asm volatile(PRODUCT("32", NAMES_16, "{%16, %17, %18, %19}, %20", "%21", "0")
                     : SIXTEEN(d, 0)
                     : FRAGMENT(a), "l"(b), "r"(add));
}
/* A a fragment (64 x 16), B as columns_of. */
template <int N> DEVICE void product_of_fragment_turned(float *d, const unsigned *a, u64 b, int add) {
    static_assert(N == 128 || N == 64);
    if constexpr (N == 128)
        asm volatile(PRODUCT("128", NAMES_64, "{%64, %65, %66, %67}, %68", "%69", "1")
                     : SIXTEEN(d, 0), SIXTEEN(d, 16), SIXTEEN(d, 32), SIXTEEN(d, 48)
                     : FRAGMENT(a), "l"(b), "r"(add));
    else
        asm volatile(PRODUCT("64", NAMES_32, "{%32, %33, %34, %35}, %36", "%37", "1")
                     : SIXTEEN(d, 0), SIXTEEN(d, 16)
                     : FRAGMENT(a), "l"(b), "r"(add));
}
