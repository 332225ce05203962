// A heat equation: seven points in 3 dimensions, and many steps of five points in one launch, with the grid's barrier.

#include <cooperative_groups.h>

namespace cg = cooperative_groups;

__global__ void stencil_3d(const float* in, float* out, int n, float c0, float c1) {  // n x n x n, edges unchanged
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    int z = blockIdx.z * blockDim.z + threadIdx.z;
    if (x >= n || y >= n || z >= n) return;
    int i = (z * n + y) * n + x;
    bool edge = x == 0 || y == 0 || z == 0 || x == n - 1 || y == n - 1 || z == n - 1;
    out[i] = edge ? in[i]
                  : c0 * in[i] + c1 * (in[i - 1] + in[i + 1] + in[i - n] + in[i + n] + in[i - n * n] + in[i + n * n]);
}

#define TILE 8

__global__ void stencil_3d_coarsened(const float* in, float* out, int n, float c0, float c1) {  // planes along z
    __shared__ float plane[TILE][TILE];
    const int inner = TILE - 2;
    int x = blockIdx.x * inner + threadIdx.x - 1, y = blockIdx.y * inner + threadIdx.y - 1;
    bool inside = x >= 0 && x < n && y >= 0 && y < n;
    float below = inside ? in[y * n + x] : 0.0f, here = inside && n > 1 ? in[(n + y) * n + x] : 0.0f;
    for (int z = 1; z < n - 1; z++) {
        plane[threadIdx.y][threadIdx.x] = here;
        __syncthreads();
        float above = inside ? in[((z + 1) * n + y) * n + x] : 0.0f;
        if (x >= 1 && x < n - 1 && y >= 1 && y < n - 1 && threadIdx.x >= 1 && threadIdx.x < TILE - 1 &&
            threadIdx.y >= 1 && threadIdx.y < TILE - 1)
            out[(z * n + y) * n + x] =
                c0 * here + c1 * (plane[threadIdx.y][threadIdx.x - 1] + plane[threadIdx.y][threadIdx.x + 1] +
                                  plane[threadIdx.y - 1][threadIdx.x] + plane[threadIdx.y + 1][threadIdx.x] + below + above);
        __syncthreads();
        below = here;
        here = above;
    }
}

__global__ void jacobi(float* a, float* b, int width, int height, int steps) {  // the result is in a if steps is even
    cg::grid_group grid = cg::this_grid();
    for (int step = 0; step < steps; step++) {
        for (int i = grid.thread_rank(); i < width * height; i += grid.size()) {
            int x = i % width, y = i / width;
            bool edge = x == 0 || y == 0 || x == width - 1 || y == height - 1;
            b[i] = edge ? a[i] : 0.25f * (a[i - 1] + a[i + 1] + a[i - width] + a[i + width]);
        }
        grid.sync();
        float* swapped = a;
        a = b;
        b = swapped;
    }
}
