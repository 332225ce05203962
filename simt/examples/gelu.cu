// GELU: by the error function, by tanh, four at a time, and on halves in pairs.

#include <cuda_fp16.h>

__device__ __forceinline__ float gelu_tanh_of(float x) {
    const float scale = 0.7978845608028654f;  // sqrt(2 / pi)
    return 0.5f * x * (1.0f + tanhf(scale * (x + 0.044715f * x * x * x)));
}

__global__ void gelu_erf(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 0.5f * x[i] * (1.0f + erff(x[i] * (float)M_SQRT1_2));
}

__global__ void gelu_tanh(const float* x, float* y, int n) {
    int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i + 3 < n) {
        float4 v = *reinterpret_cast<const float4*>(x + i);
        v = make_float4(gelu_tanh_of(v.x), gelu_tanh_of(v.y), gelu_tanh_of(v.z), gelu_tanh_of(v.w));
        *reinterpret_cast<float4*>(y + i) = v;
    } else {
        for (; i < n; i++) y[i] = gelu_tanh_of(x[i]);
    }
}

__global__ void gelu_half2(const __half2* x, __half2* y, int pairs) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    float2 v = __half22float2(x[i]);
    y[i] = __floats2half2_rn(gelu_tanh_of(v.x), gelu_tanh_of(v.y));
}
