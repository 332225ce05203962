/* The tensor memory accelerator (TMA): one thread asks for a whole box of a matrix, and a unit beside the threads
   copies it. Since compute capability 9.0.

   A tensor map, made by the host, says where the matrix lies, how large it is, how large a box is, and how its words
   of 16 bytes are exchanged in shared memory (swizzled). The kernel takes it as `const __grid_constant__
   CUtensorMap`. What a box has outside of the matrix comes as zeros, and is not written back. Strides of rows and
   addresses are multiples of 16 bytes; a box that is swizzled by 128 bytes lies at a multiple of 1024 in shared
   memory.

   A load arrives at an mbarrier (mbarrier.cuh), with as many bytes as the box has, those outside too. Announce them, or
   the wait is over too early. A store belongs to the thread that started it: the thread commits it, waits until it has
   been read before the place is used again, and until it is written before the kernel ends.

   TMA and the threads see shared memory through different proxies. What threads wrote is behind a fence_async_proxy()
   by each of them, and a barrier, there for a store by TMA: without the fence it may copy what was there before. */
#pragma once
#include "mbarrier.cuh"

struct alignas(64) CUtensorMap {
    unsigned long long opaque[16];
};

/* The map will be needed: 128 bytes from global memory, which the first copy need not wait for then. */
__device__ __forceinline__ void prefetch(const CUtensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/* The box whose first element is (row, column). */
__device__ __forceinline__ void load_tile(void *to, const CUtensorMap &map, int row, int column, Barrier &full) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)), "l"(&map), "r"(column), "r"(row),
                 "r"(full.at()) : "memory");
}
__device__ __forceinline__ void store_tile(const CUtensorMap &map, int row, int column, const void *from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(&map), "r"(column), "r"(row), "r"(shared_address(from)) : "memory");
}

/* How L2 treats what a copy brings or takes, in the instruction's own code (as createpolicy makes it): the first that
   may leave L2, or the last. */
constexpr CachePolicy LEAVES_FIRST = 0x12F0000000000000, LEAVES_LAST = 0x14F0000000000000;

/* Of an array of five axes. A place names them as the instruction does, the array's last axis first. */
struct Place {
    int at[5];
};
__device__ __forceinline__ void load_tile(void *to, const CUtensorMap &map, Place place, Barrier &full,
                                          CachePolicy policy) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(to)), "l"(&map), "r"(place.at[0]),
                 "r"(place.at[1]), "r"(place.at[2]), "r"(place.at[3]), "r"(place.at[4]), "r"(full.at()), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void store_tile(const CUtensorMap &map, Place place, const void *from, CachePolicy policy) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group.L2::cache_hint "
                 "[%0, {%1, %2, %3, %4, %5}], [%6], %7;" ::"l"(&map), "r"(place.at[0]), "r"(place.at[1]),
                 "r"(place.at[2]), "r"(place.at[3]), "r"(place.at[4]), "r"(shared_address(from)), "l"(policy)
                 : "memory");
}

/* The thread's stores since the last commit are a group. */
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/* Until all but PENDING of the thread's groups have been read from shared memory. */
template <int PENDING = 0> __device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
/* Until all are written. */
__device__ __forceinline__ void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/* Global memory that TMA has written, and other threads' knowledge of it, come before what TMA writes there next. */
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/* What this thread has written to shared memory is there for TMA and wgmma, behind the next barrier; what it has read
   of it has come, so that TMA may write there. */
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
