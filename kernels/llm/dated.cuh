/* Numbers that say themselves when they are there: how blocks of one launch hand vectors to each other without a barrier.

   A dated number is a float and a date, 8 bytes that are written and read as one. Who needs it reads until it has the date
   that is waited for. Nothing else tells of its arrival: no flag that would have to come behind it, so no fence and no
   second way to L2 and back. A barrier of the grid (device/grid.cuh) takes three such ways: write, arrive, read.

   Dates only rise, so that nothing is cleared between launches. A place is written again only by who has, through others,
   what was made of its last number. */
#pragma once

using Dated = unsigned long long;

__device__ __forceinline__ void publish(Dated *at, float value, unsigned date) {
    const Dated both = (Dated)date << 32 | __float_as_uint(value);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(both) : "memory");
}
__device__ __forceinline__ Dated look(const Dated *at) {
    Dated both;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(both) : "l"(at) : "memory");
    return both;
}
__device__ __forceinline__ bool has(Dated both, unsigned date) { return (unsigned)(both >> 32) == date; }
__device__ __forceinline__ float value_of(Dated both) { return __uint_as_float((unsigned)both); }

/* Until the number is there. `seen`: what a look at it gave earlier. */
__device__ __forceinline__ float wait_for(const Dated *at, unsigned date, Dated seen) {
    while (!has(seen, date)) seen = look(at);
    return value_of(seen);
}
__device__ __forceinline__ float wait_for(const Dated *at, unsigned date) { return wait_for(at, date, look(at)); }

/* N of them, each where at(i) says, all asked for before the first is waited for. */
template <int N, class At> __device__ __forceinline__ void wait_for_all(float (&to)[N], unsigned date, At at) {
    Dated seen[N];
    bool all;
    do {
        all = true;
#pragma unroll
        for (int i = 0; i < N; i++) seen[i] = look(at(i));
#pragma unroll
        for (int i = 0; i < N; i++) all &= has(seen[i], date);
    } while (!all);
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = value_of(seen[i]);
}
