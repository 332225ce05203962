/* Products on the tensor cores, a warpgroup's at a time (wgmma): d += a * b, where a has 64 rows and b N columns, in
   steps of 16 of k. a and b lie in shared memory, nobody loads them into registers. Compute capability 9.0 alone,
   sm_90a.

   Operands are found by descriptors of 64 bits: where a matrix begins, how far apart its groups of 8 rows are, and
   how it is swizzled. Here rows are 128 bytes, 64 numbers along k, one behind the other, and word w of row r is at
   place w ^ r % 8: what TMA brings with a swizzle of 128 bytes. Tiles begin at multiples of 1024. b has a row for
   each column of the product: it is W as a linear layer has it.

   d is in registers: warp w of the warpgroup has rows 16 w .. 16 w + 15, as an mma has them (mma.cuh), 8 columns after
   the other: d[4 j] is row g, column 8 j + 2 c; d[4 j + 1] the column beside it; d[4 j + 2], d[4 j + 3] 8 rows
   below. a may be in registers too: 16 numbers of k as an mma has them. So sums become a factor of the next product
   without a way through memory: columns 16 i to 16 i + 15 of d, packed, are its i-th 16 of k.

   A product is under way until a wait has completed its group. Before the first, and after other code has written d, a
   fence; behind the last of some, a commit; before d is read or an operand overwritten, a wait. Else d is read too
   early, or products are of the next tile. The compiler does not know that d changes later: keep() behind the wait
   holds back what reads it. */
#pragma once
#include "../copy.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Descriptor = unsigned long long;

/* Of rows that follow k, in a tile that begins here: 1024 bytes from 8 rows to the next 8, swizzled by 128 bytes. */
__device__ __forceinline__ Descriptor k_major(unsigned tile) {
    return (tile & 0x3FFFF) >> 4 | (Descriptor)(1024 >> 4) << 32 | (Descriptor)1 << 62;
}
/* Of a b whose rows follow its columns: 64 of these in a row of 128 bytes, the next 64 in the next tile of 64 rows. */
__device__ __forceinline__ Descriptor mn_major(unsigned tile) {
    return k_major(tile) | (Descriptor)(64 * 128 >> 4) << 16;
}
/* Of what lies so many bytes further on: 32 are the next 16 numbers of k; if mn_major, 16 rows are. */
__device__ __forceinline__ Descriptor advance(Descriptor tile, int bytes) { return tile + (bytes >> 4); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* Until at most PENDING groups are under way. */
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
template <int COUNT> __device__ __forceinline__ void keep(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// The instruction names each register of d, %0 and on; a, b and `accumulate` have the names behind.
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                                       \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
             "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_128                                                                                                      \
    NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
             "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, "     \
             "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, " \
             "%120, %121, %122, %123, %124, %125, %126, %127"
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define NUMBERS_16 SIXTEEN(0)
#define NUMBERS_32 NUMBERS_16, SIXTEEN(16)
#define NUMBERS_64 NUMBERS_32, SIXTEEN(32), SIXTEEN(48)
#define NUMBERS_128 NUMBERS_64, SIXTEEN(64), SIXTEEN(80), SIXTEEN(96), SIXTEEN(112)
#define PRODUCT(N, COUNT, A, B, ACCUMULATE, TYPE)                                                                      \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" ACCUMULATE ", 0; wgmma.mma_async.sync.aligned.m64n" N              \
                 "k16.f32." TYPE "." TYPE " {" NAMES_##COUNT "}, %" A ", %" B ", p, 1, 1, 0, 0; }"                     \
                 : NUMBERS_##COUNT : "l"(a), "l"(b), "r"((int)accumulate))
#define WGMMA(T, TYPE)                                                                                                 \
    template <int N>                                                                                                   \
    __device__ __forceinline__ void wgmma(float (&d)[N / 2], Descriptor a, Descriptor b, bool accumulate, T) {         \
        static_assert(N == 64 || N == 128 || N == 256);                                                                \
        if constexpr (N == 64) PRODUCT("64", 32, "32", "33", "34", TYPE);                                              \
        else if constexpr (N == 128) PRODUCT("128", 64, "64", "65", "66", TYPE);                                       \
        else PRODUCT("256", 128, "128", "129", "130", TYPE);                                                           \
    }

/* d = a b + (accumulate ? d : 0), a 64 x 16, b 16 x N, of __half or __nv_bfloat16. */
WGMMA(__half, "f16")
WGMMA(__nv_bfloat16, "bf16")

/* The same with a in registers, and b of either order. */
enum Order { K_MAJOR, MN_MAJOR };

#define PRODUCT_OF_REGISTERS(N, COUNT, A, B, ACCUMULATE, TURNED, TYPE)                                                 \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" ACCUMULATE ", 0; wgmma.mma_async.sync.aligned.m64n" N              \
                 "k16.f32." TYPE "." TYPE " {" NAMES_##COUNT "}, {" A "}, %" B ", p, 1, 1, %" TURNED "; }"             \
                 : NUMBERS_##COUNT                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate), "n"((int)B_ORDER))
#define WGMMA_OF_REGISTERS(T, TYPE)                                                                                    \
    template <int N, Order B_ORDER>                                                                                    \
    __device__ __forceinline__ void wgmma(float (&d)[N / 2], const unsigned (&a)[4], Descriptor b, bool accumulate,    \
                                          T) {                                                                         \
        static_assert(N == 32 || N == 64 || N == 128);                                                                 \
        if constexpr (N == 32) PRODUCT_OF_REGISTERS("32", 16, "%16, %17, %18, %19", "20", "21", "22", TYPE);           \
        else if constexpr (N == 64) PRODUCT_OF_REGISTERS("64", 32, "%32, %33, %34, %35", "36", "37", "38", TYPE);      \
        else PRODUCT_OF_REGISTERS("128", 64, "%64, %65, %66, %67", "68", "69", "70", TYPE);                            \
    }

WGMMA_OF_REGISTERS(__half, "f16")
WGMMA_OF_REGISTERS(__nv_bfloat16, "bf16")

#undef NAMES_16
#undef NAMES_32
#undef NAMES_64
#undef NAMES_128
#undef FOUR
#undef SIXTEEN
#undef NUMBERS_16
#undef NUMBERS_32
#undef NUMBERS_64
#undef NUMBERS_128
#undef PRODUCT
#undef WGMMA
#undef PRODUCT_OF_REGISTERS
#undef WGMMA_OF_REGISTERS
