/* out = x · weight / √(mean of x² + eps): RMSNorm as a launch of its own, the start of the ladder.

   x, weight, out (cols,). One block of at most 1024 threads: 6 bytes an element, so at 4096 columns
   all of the time is launch and latency. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using T = DTYPE;

/* Programmatic dependent launch, where a card has it: the next kernel may start, this one waits for
   the one before. */
__device__ void take_turns() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");
#endif
}

extern "C" __global__ void rmsnorm(const T *x, const T *weight, T *out, int cols, float eps) {
    __shared__ float squares[32];
    take_turns();
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float square = 0;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) square += (float)x[c] * (float)x[c];
    for (int d = 16; d; d /= 2) square += __shfl_xor_sync(~0u, square, d);
    if (lane == 0) squares[warp] = square;
    __syncthreads();
    square = lane < warps ? squares[lane] : 0;
    for (int d = 16; d; d /= 2) square += __shfl_xor_sync(~0u, square, d);
    const float scale = rsqrtf(square / cols + eps);
    for (int c = threadIdx.x; c < cols; c += blockDim.x) out[c] = (T)((float)x[c] * scale * (float)weight[c]);
}
