/* Between devices: flags and words in memory that another card reads and writes over the link, as its own.

   A store to a peer's memory is on its way for about half a microsecond, and nothing waits for it. So a flag that
   follows its data needs a release, and who waits for it an acquire, both of scope .sys: .gpu does not leave the
   card. Or the data carry their flag: what one store of up to 8 bytes writes arrives together, and needs no order.

   Every wait has a limit. A peer that never comes would otherwise hold up the card for ever, and who reads `told` in
   the host's memory learns which one it was. Needs peer access, or the same memory mapped by both. */
#pragma once
#include "pdl.cuh"

using u64 = unsigned long long;
#ifdef DEVICES
/* Memory of each device, by its rank. A kernel's parameter that is indexed by a number which the compiler does not know
   is a `const __grid_constant__ Peers`: else each thread makes a copy of it. */
struct Peers { void *of[DEVICES]; };
#endif
/* In the host's memory: 0, or 1 + the rank of a peer that did not come. */
struct Told { int *at; };

/* Flags, which order what stands around them. */
__device__ __forceinline__ unsigned load_acquire_system(const unsigned *at) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ void store_release_system(unsigned *at, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

/* Words: 4 numbers of 4 bytes, or 2 of 8, each of which arrives as a whole; one may arrive before another. */
__device__ __forceinline__ uint4 look(const uint4 *at) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ void send(uint4 *to, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ ulonglong2 look(const ulonglong2 *at) {
    ulonglong2 v;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ void send(ulonglong2 *to, ulonglong2 v) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(v.x), "l"(v.y) : "memory");
}
__device__ __forceinline__ u64 look(const u64 *at) {
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ void send(u64 *to, u64 v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}

/* Until come() is true, or the limit. False, and said, where the peer has not come. */
template <class Come> __device__ __forceinline__ bool wait_for(Come come, int peer, int limit, Told told) {
    for (int looks = 0; looks < limit; looks++)
        if (come()) return true;
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(told.at), "r"(peer + 1) : "memory");
    return false;
}
