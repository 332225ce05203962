/* Products on the tensor cores, a warp's at a time: d += a * b, where a has 16 rows and b 8 columns. Since compute
   capability 8.0, and of float16 and bytes since 7.5, in two pieces or four; tensor cores of 7.5 have no bfloat16, and
   a product of that does not compile for them. Every lane calls with its part of each; the lanes' parts are fragments.
   With g = lane / 4 and c = lane % 4 a lane holds

       d (16 x 8)    row g, columns 2c and 2c + 1 in d[0], d[1];  the same of row g + 8 in d[2], d[3]
       a (16 x 16)   16-bit numbers, two a register: row g, columns 2c and 2c + 1 in a[0], row g + 8 in a[1];
                     the same of columns 2c + 8 and 2c + 9 in a[2] and a[3]
       b (16 x 8)    column g, rows 2c and 2c + 1 in b0, rows 2c + 8 and 2c + 9 in b1

   Bytes have twice as many: row g, columns 4c .. 4c + 3 in a[0], and so on, with 16 where 8 stands.
   Sums are kept in fp32 (whole numbers in 32 bits), and are the same whatever order is chosen for the columns of a, if
   the rows of b stand in the same order. */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __half) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else // eight columns of a, then the other eight
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                                             __nv_bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Bytes: a without a sign, b with one. The sums are exact. */
__device__ __forceinline__ void mma_m16n8k32(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else // rows 0 to 7 in a[0] and a[2], rows 8 to 15 in a[1] and a[3]; sixteen columns of a at a time
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+r"(d[i % 2 * 2]), "+r"(d[i % 2 * 2 + 1]) : "r"(a[i]), "r"(i < 2 ? b0 : b1));
#endif
}

/* Four 8 x 8 matrices of 16-bit numbers from shared memory as fragments, r[i] of matrix i: row g, columns 2c and
   2c + 1, or transposed, column g. `row` is the address of a row of 16 bytes, in lane 8i + j of row j of matrix i.
   Rows in different banks cost nothing; in the same, eight times as much. */
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}

/* The warp's 8 x 8 matrix, transposed: rows become columns without a way through memory. */
__device__ __forceinline__ unsigned movmatrix_trans(unsigned r) {
    unsigned turned;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(r));
    return turned;
}
