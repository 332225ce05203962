/* What a later launch reads, asked for into L2 while this one has nothing more to ask for itself: between two launches
   the memory would else rest, from the last words of one to the first of the next.

   Two arrays, of whose beginnings each warp of the grid asks for a piece: codes and their scales, say. Nothing is
   waited for, and nothing is wrong when it does not come. A piece is a multiple of 16 bytes, as is where an array
   begins; 0: nothing. Since compute capability 9.0; before, nothing is asked for. */
#pragma once

__device__ __forceinline__ void ask_for_in_l2(const void *from, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

/* Piece number `warp` of the grid's. One lane calls it. */
__device__ __forceinline__ void ask_ahead(const uint4 *first, unsigned first_piece, const uint4 *second,
                                          unsigned second_piece, long long warp) {
    if (first_piece) ask_for_in_l2(reinterpret_cast<const char *>(first) + warp * first_piece, first_piece);
    if (second_piece) ask_for_in_l2(reinterpret_cast<const char *>(second) + warp * second_piece, second_piece);
}
