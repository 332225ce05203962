/* out = x · weight / √(mean of x² + eps): RMSNorm as a launch of its own, the start of the ladder.

   x, weight, out (cols,). One block of at most 1024 threads: 6 bytes an element, so at 4096 columns
   all of the time is launch and latency. */
#include "../device/pdl.cuh"
#include "../device/reduce.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using T = DTYPE;

extern "C" __global__ void rmsnorm(const T *x, const T *weight, T *out, int cols, float eps) {
    __shared__ float squares[32];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float square = 0;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) square += (float)x[c] * (float)x[c];
    square = warp_sum(square);
    if (lane == 0) squares[warp] = square;
    __syncthreads();
    square = warp_sum(lane < warps ? squares[lane] : 0);
    const float scale = rsqrtf(square / cols + eps);
    for (int c = threadIdx.x; c < cols; c += blockDim.x) out[c] = (T)((float)x[c] * scale * (float)weight[c]);
}
