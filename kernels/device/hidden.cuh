/* A number of which the compiler does not know what it is.

   Where ptxas 13.0 sees that part of a copy's address (copy_async with a policy) is the same in all lanes, it may put
   this part into a uniform register. It writes a wrong instruction then: the card stops with "illegal instruction".
   What has come through a shuffle is not known to be the same. So a thread's place is hidden, and what is added to it,
   but for constants: a place in a ring that begins with a hidden 0 is not uniform either.

   Whether it does so hangs on all that stands around. Today ring.cu of chapter 04 is spared without hiding anything, as
   is x in lowbit's many_rows.cu, which is copied without a policy. fusion, attention and the quantised cache hide their
   places as insurance: as their addresses are written now, they would be spared, too. tests/test_copies.py looks at the
   machine code of all of them. */
#pragma once

__device__ __forceinline__ unsigned hidden(unsigned v, int lane) { return __shfl_sync(~0u, v, lane); }
__device__ __forceinline__ unsigned hidden_zero(int lane) { return hidden(lane, lane) - lane; }
