/* The product with values: sums of 64 rows and 256 columns, to which a tile's weights times its values are added.
   wgmma.cuh has such a wide product of rows that follow k. Here a value's numbers lie one behind the other, so k, the
   tokens, goes from row to row; and weights come from registers, or from shared memory, where the other warpgroup has
   made them. */
#pragma once
#include "../device/hopper/wgmma.cuh"
#include "hopper_plan.cuh"

using Scores = float[TILE / 2];         // of a warpgroup, (64, TILE)
using Weights = unsigned[TILE / 16][4]; // rounded
using Values = float[SIDE_COLUMNS / 2];      // weighted and summed, (64, SIDE_COLUMNS)

#define SUMS                                                                                                           \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "  \
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "   \
    "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, "   \
    "%68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, "   \
    "%90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "   \
    "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define ALL SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64), SIXTEEN(80), SIXTEEN(96), SIXTEEN(112)
#define WIDE_PRODUCT(T, TYPE)                                                                                          \
    __device__ __forceinline__ void wgmma_wide(Values &d, const unsigned (&a)[4], Descriptor b, bool accumulate, T) {  \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE       \
                     "." TYPE " " SUMS ", {%128, %129, %130, %131}, %132, p, 1, 1, 1; }"                               \
                     : ALL : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate));                \
    }                                                                                                                  \
    __device__ __forceinline__ void wgmma_wide(Values &d, Descriptor a, Descriptor b, bool accumulate, T) {            \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE       \
                     "." TYPE " " SUMS ", %128, %129, p, 1, 1, 0, 1; }"                                                \
                     : ALL : "l"(a), "l"(b), "r"((int)accumulate));                                                    \
    }
WIDE_PRODUCT(__half, "f16")
WIDE_PRODUCT(__nv_bfloat16, "bf16")
#undef SUMS
#undef FOUR
#undef SIXTEEN
#undef ALL
#undef WIDE_PRODUCT

/* Start S = Q K^T of the tile that comes to this slot, from one of its parts to another, as they arrive. */
template <int FROM, int TO>
__device__ __forceinline__ void start_scores(Scores &scores, const Shared &s, int slot, unsigned parity) {
    if (FROM == TO) return; // an empty group would count where groups are waited for
    const unsigned q = shared_address(s.q), tile = shared_address(s.tiles[slot]);
    wgmma_fence();
#pragma unroll
    for (int i = FROM; i < TO; i++) {
        const int part = part_at(i, slot);
        s.full[slot][part].wait(parity);
        const Descriptor queries = k_major(q + part * PART_BYTES), keys = k_major(tile + part * PART_BYTES);
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma<TILE>(scores, advance(queries, 32 * k), advance(keys, 32 * k), i + k > 0, T());
    }
    wgmma_commit();
}

/* Start O += W V; without `more`, O = W V. values: of the warpgroup's side of a slot. */
__device__ __forceinline__ void start_values(Values &o, const Weights &w, unsigned values, bool more) {
    const Descriptor v = mn_major(values);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < TILE / 16; i++) wgmma_wide(o, w[i], advance(v, 16 * 128 * i), more || i > 0, T());
    wgmma_commit();
}
__device__ __forceinline__ void start_values(Values &o, unsigned weights, unsigned values, bool more) {
    const Descriptor w = k_major(weights), v = mn_major(values);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < TILE / 16; i++)
        wgmma_wide(o, advance(w, 32 * i), advance(v, 16 * 128 * i), more || i > 0, T());
    wgmma_commit();
}
