/* Mailboxes: each device writes into the others' memory, and waits at its own.

   A device has [2 turns][rank of who writes][block][WORDS] words of 16 bytes. A block writes and reads the boxes of its
   own number only, and by turns, as its number of the exchange is even or odd. When a peer writes a box for the second
   time, it has had this block's words of the exchange between, which were sent when the launch of the first had ended:
   the box has been read.

   A block waits for the block of its number elsewhere, so that one must get to run. Cards begin blocks in the order of
   their numbers: the first block that has not ended everywhere is under way on each device that has yet to end it. */
#pragma once
#include "exchange.cuh"

constexpr int WORDS = 512; // of 16 bytes, that a block has of a message at most

/* Which box of a device, of so many words. */
__device__ __forceinline__ long long box_of(unsigned number, int from, int words) {
    return (((long long)(number % 2) * DEVICES + from) * BLOCKS + blockIdx.x) * words;
}
