/* Words that are their own flag: what was not written yet is -0, in every number.

   A sender writes +0 for a word of nothing but -0, which changes no sum but in the sign of a zero; and it adds the same
   itself, so that all devices get the same bits. Who has taken a word puts the -0 back, for the exchange after the
   next. A mailbox is all -0 before the first. */
#pragma once
#include "mail.cuh"

constexpr unsigned NOT_YET = sizeof(T) == 4 ? 0x80000000 : 0x80008000;

__device__ __forceinline__ unsigned sendable(unsigned v) { return v == NOT_YET ? 0 : v; }
__device__ __forceinline__ uint4 sendable(uint4 v) {
    return {sendable(v.x), sendable(v.y), sendable(v.z), sendable(v.w)};
}
/* Take a word out of the own mailbox. False where it has not come. */
__device__ __forceinline__ bool take(uint4 *from, uint4 &v, int peer, int limit, Told told) {
    const bool come = wait_for([&] {
        v = look(from);
        return v.x != NOT_YET && v.y != NOT_YET && v.z != NOT_YET && v.w != NOT_YET;
    }, peer, limit, told);
    if (come) send(from, make_uint4(NOT_YET, NOT_YET, NOT_YET, NOT_YET));
    return come;
}
