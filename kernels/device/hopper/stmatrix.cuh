/* Fragments of a product (mma.cuh, wgmma.cuh) to rows in shared memory: the way back of ldmatrix. Since compute
   capability 9.0. Without it a lane writes four bytes at a time, to rows that lie in the same banks. */
#pragma once

/* Four 8 x 8 matrices of 16-bit numbers, r[i] to matrix i: row g, columns 2c and 2c + 1 of lane 4g + c. `row` is the
   address of 16 bytes, in lane 8i + j of row j of matrix i. */
__device__ __forceinline__ void stmatrix_x4(unsigned row, const unsigned (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3]) : "memory");
}
/* The same, transposed on the way: column g of a matrix, rows 2c and 2c + 1. */
__device__ __forceinline__ void stmatrix_x4_trans(unsigned row, const unsigned (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
