/* Ways of a word from global memory to where it is used.

   - load_streaming: into registers, past L1. For what is read once, so that L1 keeps what is read again. The load is
     volatile: it stays in front of a wait that stands behind it. Since compute capability 7.0.
   - copy_async: into shared memory, passing by L1 and the registers (cp.async, since compute capability 8.0). A
     thread asks for as much as shared memory holds, not as registers do, and goes on. Copies are counted in groups:
     commit closes one, wait is over when at most so many of the thread's own are still on their way. Whoever reads
     what *another* thread copied needs a barrier behind the wait. On an older card (T4, RTX 20) a copy goes through
     registers, and has arrived when the next line begins: right, and slower, since each waits for memory.

   Both bring 16 bytes, load_streaming also fewer, and addresses are multiples of as many. The hint L2::128B of
   copy_async makes L2 fetch the whole line of 128 bytes: without it the gates of chapter 05 take a quarter longer on an
   H200. Policies came with compute capability 8.0.

   A trap: where ptxas 13.0 sees that part of copy_async's address in shared memory is the same in all lanes, it may
   write an instruction that the card calls illegal. hidden.cuh hides that part from it. */
#pragma once

/* How L2 shall treat what a copy brings. */
using CachePolicy = unsigned long long;

/* For what is read once: it is the first that may leave L2. */
__device__ __forceinline__ CachePolicy evict_first() {
#if __CUDA_ARCH__ >= 800
    CachePolicy policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
#else
    return 0;
#endif
}

/* 16, 8, 4 or 2 bytes past L1; above 2 bytes stand zeros. */
__device__ __forceinline__ uint4 load_streaming(const uint4 *from) {
    uint4 w;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(from));
    return w;
}
__device__ __forceinline__ uint2 load_streaming(const uint2 *from) {
    uint2 w;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(w.x), "=r"(w.y) : "l"(from));
    return w;
}
__device__ __forceinline__ unsigned load_streaming(const unsigned *from) {
    unsigned w;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(w) : "l"(from));
    return w;
}
__device__ __forceinline__ unsigned load_streaming(const unsigned short *from) {
    unsigned w;
    asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=r"(w) : "l"(from));
    return w;
}

/* A place in shared memory, as instructions name it: a number of 32 bits. */
__device__ __forceinline__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

#if __CUDA_ARCH__ >= 800
/* Start to copy 16 bytes. */
__device__ __forceinline__ void copy_async(unsigned to, const void *from, CachePolicy policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "l"(policy) : "memory");
}
/* 16 bytes, or as many zeros; the address need not be one, then. */
__device__ __forceinline__ void copy_async_or_zero(unsigned to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

/* Four bytes, or the first two of them, behind which stand zeros: what a thread needs of rows that lie far apart. */
__device__ __forceinline__ void copy_async_word(unsigned to, const void *from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/* Close a group of copies; an empty one counts too. */
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Until at most PENDING of this thread's groups are on their way. They arrive in order. */
template <int PENDING> __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#else // the same, through registers: nothing is on its way afterwards
__device__ __forceinline__ void store_shared(unsigned to, uint4 w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
                 : "memory");
}
__device__ __forceinline__ void copy_async(unsigned to, const void *from, CachePolicy) {
    store_shared(to, load_streaming(static_cast<const uint4 *>(from)));
}
__device__ __forceinline__ void copy_async_or_zero(unsigned to, const void *from, bool there) {
    store_shared(to, there ? load_streaming(static_cast<const uint4 *>(from)) : uint4{0, 0, 0, 0});
}
__device__ __forceinline__ void copy_async_word(unsigned to, const void *from, int bytes) {
    unsigned w = 0;
    if (bytes == 4) w = *static_cast<const unsigned *>(from);
    else if (bytes == 2) w = *static_cast<const unsigned short *>(from);
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(w) : "memory");
}
__device__ __forceinline__ void copy_async_commit() {}
template <int PENDING> __device__ __forceinline__ void copy_async_wait() {}
#endif
