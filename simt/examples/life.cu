// A generation of Conway's Game of Life on a torus, and one through shared memory with a border of dead cells.

__global__ void life(const unsigned char* now, unsigned char* next, int width, int height) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= width || y >= height) return;
    int alive = 0;
    for (int dy = -1; dy <= 1; dy++)
        for (int dx = -1; dx <= 1; dx++)
            if (dx != 0 || dy != 0) alive += now[(y + dy + height) % height * width + (x + dx + width) % width];
    next[y * width + x] = alive == 3 || (alive == 2 && now[y * width + x]);
}

__global__ void life_tiled(const bool* now, bool* next, int width, int height) {
    __shared__ bool tile[18][18];  // of 16 x 16 threads
    for (int i = threadIdx.y * 16 + threadIdx.x; i < 18 * 18; i += 256) {
        int x = blockIdx.x * 16 + i % 18 - 1, y = blockIdx.y * 16 + i / 18 - 1;
        tile[i / 18][i % 18] = x >= 0 && x < width && y >= 0 && y < height && now[y * width + x];
    }
    __syncthreads();
    int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
    if (x >= width || y >= height) return;
    int tx = threadIdx.x + 1, ty = threadIdx.y + 1;
    int alive = tile[ty - 1][tx - 1] + tile[ty - 1][tx] + tile[ty - 1][tx + 1] + tile[ty][tx - 1] + tile[ty][tx + 1] +
                tile[ty + 1][tx - 1] + tile[ty + 1][tx] + tile[ty + 1][tx + 1];
    next[y * width + x] = alive == 3 || (alive == 2 && tile[ty][tx]);
}
