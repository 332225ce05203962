/* Rows of 128 bytes in shared memory, as tensor cores read them: 8 words of 16 bytes, word w of row r at place
   w ^ r % 8. One word of eight rows, one below the other, would lie in the same four banks; exchanged so, they have all
   32. TMA brings and takes boxes so (a swizzle of 128 bytes), and wgmma reads them. */
#pragma once

/* Bytes from the tile's begin to a word of a row. */
__device__ __forceinline__ int swizzled(int row, int word) { return row * 128 + (word ^ row % 8) * 16; }
