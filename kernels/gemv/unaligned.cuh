/* Rows that begin at any element, in words of 16 bytes all the same: what unaligned.cu and unaligned_ring.cu share. */
#pragma once
#include "../device/copy.cuh"
#include "../device/words.cuh"

/* Where a row lies, as all rows do that begin at the same place in a line: word j is the j-th one from the start of the
   line (LINE bytes, by address) that its first element lies in, and holds columns j * VEC - lead and on. */
template <typename T, int LINE> struct Row {
    static constexpr unsigned VEC = 16 / sizeof(T);
    unsigned lead, end; // elements between the start of the line and the row's first, and to where the row ends

    __device__ __forceinline__ Row(const T *row, unsigned cols)
        : lead((unsigned)reinterpret_cast<unsigned long long>(row) % LINE / sizeof(T)), end(lead + cols) {}
    /* Elements of its first and of its last word, if these are not whole. */
    __device__ __forceinline__ unsigned head() const { return (0 - lead) % VEC; }
    __device__ __forceinline__ unsigned tail() const { return end % VEC; }
    /* Its words, or those that are whole. */
    __device__ __forceinline__ unsigned first() const { return lead / VEC; }
    __device__ __forceinline__ unsigned first_whole() const { return (lead + VEC - 1) / VEC; }
    __device__ __forceinline__ unsigned last() const { return (end + VEC - 1) / VEC; }
    __device__ __forceinline__ unsigned last_whole() const { return end / VEC; }
};

/* Zeros for what is not of columns 0 .. cols - 1: the elements of a word that begins at column c. */
template <typename T, int VEC> __device__ __forceinline__ void keep_columns(Word<T, VEC> &word, int c, int cols) {
#pragma unroll
    for (int p = 0; p < 4; p++) {
        constexpr int EACH = 4 / sizeof(T); // elements of a part
        unsigned kept = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (c + p * EACH + i >= 0 && c + p * EACH + i < cols) kept |= (EACH == 1 ? ~0u : 0xffffu << 16 * i);
        word.bits[p] &= kept;
    }
}

/* The 16 bytes that begin `bytes` (0 .. 15) into two words: two steps by whole registers, and one inside of them. */
template <typename T>
__device__ __forceinline__ Word<T, 16 / sizeof(T)> shifted(const uint4 &low, const uint4 &high, int bytes) {
    unsigned v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 6; i++) v[i] = bytes & 8 ? v[i + 2] : v[i];
#pragma unroll
    for (int i = 0; i < 5; i++) v[i] = bytes & 4 ? v[i + 1] : v[i];
    Word<T, 16 / sizeof(T)> word;
#pragma unroll
    for (int i = 0; i < 4; i++) word.bits[i] = sizeof(T) == 4 ? v[i] : __funnelshift_r(v[i], v[i + 1], 8 * (bytes & 2));
    return word;
}

/* Start to copy 16 bytes, by way of L1. */
__device__ __forceinline__ void copy_async_cached(unsigned to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/* Words `begin` .. `begin` + COUNT - 1 of x, to shared memory, by all threads; zeros for what is not of x. */
template <int COUNT, int THREADS, typename T>
__device__ __forceinline__ void copy_x(uint4 *to, const T *x, int begin, unsigned cols) {
    constexpr int VEC = 16 / sizeof(T);
    const unsigned whole = reinterpret_cast<unsigned long long>(x) % 16 ? 0 : cols / VEC; // words to be copied so
#pragma unroll
    for (int q = threadIdx.x; q < COUNT; q += THREADS) {
        if ((unsigned)(begin + q) < whole) copy_async_cached(shared_address(to + q), x + (begin + q) * VEC);
        else
#pragma unroll 1
            for (int i = 0; i < VEC; i++) {
                const unsigned c = (begin + q) * VEC + i;
                reinterpret_cast<T *>(to + q)[i] = c < cols ? x[c] : T(0.f);
            }
    }
}
