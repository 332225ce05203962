/* A warpgroup is four neighbouring warps, 128 threads from a multiple of 128 on: who multiplies with wgmma.
   Warpgroups of a block may have work of their own, and then registers and barriers of their own. */
#pragma once

/* Registers move between warpgroups: a kernel starts with as many for each thread, and who only starts copies needs
   few, who has sums in registers many. By all warps of a warpgroup; 24 to 256, a multiple of 8, since compute
   capability 9.0 (sm_90a). One that takes waits until others have given. The kernel states how many threads it has
   (__launch_bounds__), and each role is one branch; else the compiler drops the instruction (warning C7508), and the
   sums go to memory. */
template <int REGISTERS> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

/* A barrier for THREADS threads of the block, whole warps. Barrier 0 is __syncthreads(); there are 16. Since compute
   capability 2.0. A __syncthreads() would wait for warpgroups that never come. */
template <int THREADS> __device__ __forceinline__ void named_barrier(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

/* Be counted there, and go on: the others, who wait at named_barrier, count these threads, too. */
template <int THREADS> __device__ __forceinline__ void named_barrier_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

/* The same number in all lanes: now the compiler knows, and keeps what is made of it in uniform registers. */
__device__ __forceinline__ int warp_uniform(int v) { return __shfl_sync(~0u, v, 0); }
