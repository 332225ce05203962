/* Programmatic dependent launch (PDL): a kernel that is launched so may start while the one before it in the stream
   still runs, and do what does not depend on it. Ask for weights, say: no kernel writes them.

   Since compute capability 9.0 (Hopper). On older cards, and in an ordinary launch, both functions do nothing, and no
   kernel overlaps with another. Without the wait a kernel reads what is not written yet, and writes what is still
   read: wrong now and then, and hardly ever under a debugger.

   Every thread waits. Then the end of this kernel means that all those before it have ended too. A second wait is
   over at once. */
#pragma once

/* The next kernel may start once every block here has said so, or has ended. Say it early: what we write, the next
   kernel sees only after its own wait. */
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* Until the kernels before have ended, and what they wrote can be seen. */
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
