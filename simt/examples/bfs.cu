// One level of a breadth-first search: over all nodes, and over a frontier with a queue of each block's own.
// To the letter, bfs_level has a race: it reads levels[node] plainly while others write there. Whatever it finds, -1 or
// level + 1, is not `level`, so that the result is right all the same.

#define QUEUE 64  // nodes that a block's queue holds; the rest go to global memory at once

__global__ void bfs_level(const int* starts, const int* edges, int* levels, int level, int* changed, int nodes) {
    int node = blockIdx.x * blockDim.x + threadIdx.x;
    if (node >= nodes || levels[node] != level) return;
    for (int i = starts[node]; i < starts[node + 1]; i++) {
        int neighbour = edges[i];
        if (atomicCAS(&levels[neighbour], -1, level + 1) == -1) *changed = 1;
    }
}

__global__ void bfs_frontier(const int* starts, const int* edges, int* levels, int level, const int* frontier, int size,
                             int* next, int* next_size) {
    __shared__ int queue[QUEUE];
    __shared__ int count, base;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size) {
        int node = frontier[i];
        for (int e = starts[node]; e < starts[node + 1]; e++) {
            int neighbour = edges[e];
            if (atomicCAS(&levels[neighbour], -1, level) == -1) {
                int at = atomicAdd(&count, 1);
                if (at < QUEUE)
                    queue[at] = neighbour;
                else
                    next[atomicAdd(next_size, 1)] = neighbour;
            }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        count = min(count, QUEUE);
        base = atomicAdd(next_size, count);
    }
    __syncthreads();
    for (int at = threadIdx.x; at < count; at += blockDim.x) next[base + at] = queue[at];
}
