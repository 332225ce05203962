// One step of n bodies: all pairs, the others' positions tile by tile through shared memory.

#define SOFTENING 1e-3f

__device__ float3 interact(float4 mine, float4 other, float3 sum) {
    float3 r = make_float3(other.x - mine.x, other.y - mine.y, other.z - mine.z);
    float squared = r.x * r.x + r.y * r.y + r.z * r.z + SOFTENING;
    float inverse = rsqrtf(squared);
    float s = other.w * inverse * inverse * inverse;
    sum.x += r.x * s, sum.y += r.y * s, sum.z += r.z * s;
    return sum;
}

__global__ void forces(const float4* bodies, float3* accelerations, int n) {
    extern __shared__ float4 tile[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float4 mine = i < n ? bodies[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float3 sum = {0.0f, 0.0f, 0.0f};
    for (int start = 0; start < n; start += blockDim.x) {
        int j = start + threadIdx.x;
        tile[threadIdx.x] = j < n ? bodies[j] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // no mass, no force
        __syncthreads();
#pragma unroll 4
        for (int t = 0; t < blockDim.x; t++) sum = interact(mine, tile[t], sum);
        __syncthreads();
    }
    if (i < n) accelerations[i] = sum;
}

__global__ void integrate(float4* bodies, float3* velocities, const float3* accelerations, float dt, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float3 v = velocities[i], a = accelerations[i];
    v.x += a.x * dt, v.y += a.y * dt, v.z += a.z * dt;
    velocities[i] = v;
    bodies[i].x += v.x * dt;
    bodies[i].y += v.y * dt;
    bodies[i].z += v.z * dt;
}
