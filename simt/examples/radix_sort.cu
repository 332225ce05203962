// One step of a radix sort, four bits at a time: count the digits of each block, place them, scatter in order.

#include <cub/block/block_load.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/block/block_store.cuh>

#define BLOCK 128
#define DIGITS 16

__global__ void count_digits(const unsigned int* keys, unsigned int* counts, int n, int shift) {
    __shared__ unsigned int mine[DIGITS];
    if (threadIdx.x < DIGITS) mine[threadIdx.x] = 0;
    __syncthreads();
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) atomicAdd(&mine[(keys[i] >> shift) & (DIGITS - 1)], 1u);
    __syncthreads();
    if (threadIdx.x < DIGITS) counts[threadIdx.x * gridDim.x + blockIdx.x] = mine[threadIdx.x];  // digit by digit
}

__global__ void scan_counts(unsigned int* counts, int n) {  // one block, exclusive
    using Scan = cub::BlockScan<unsigned int, BLOCK>;
    __shared__ typename Scan::TempStorage storage;
    unsigned int before = 0;
    for (int base = 0; base < n; base += BLOCK) {
        int i = base + threadIdx.x;
        unsigned int value = i < n ? counts[i] : 0, all;
        Scan(storage).ExclusiveSum(value, value, all);
        if (i < n) counts[i] = before + value;
        before += all;
        __syncthreads();
    }
}

__global__ void scatter(const unsigned int* keys, unsigned int* sorted, const unsigned int* places, int n, int shift) {
    __shared__ unsigned int digits[BLOCK];
    int i = blockIdx.x * BLOCK + threadIdx.x;
    unsigned int key = i < n ? keys[i] : 0, digit = i < n ? (key >> shift) & (DIGITS - 1) : DIGITS;
    digits[threadIdx.x] = digit;
    __syncthreads();
    if (i >= n) return;
    unsigned int rank = 0;  // equal digits ahead in this block, so that the order stays
    for (int t = 0; t < threadIdx.x; t++) rank += digits[t] == digit;
    sorted[places[digit * gridDim.x + blockIdx.x] + rank] = key;
}

__global__ void sort_tile(const unsigned int* in, unsigned int* out, int n) {  // 4 keys to a thread, with CUB
    using Load = cub::BlockLoad<unsigned int, BLOCK, 4, cub::BLOCK_LOAD_TRANSPOSE>;
    using Sort = cub::BlockRadixSort<unsigned int, BLOCK, 4>;
    using Store = cub::BlockStore<unsigned int, BLOCK, 4, cub::BLOCK_STORE_WARP_TRANSPOSE>;
    __shared__ union {
        typename Load::TempStorage load;
        typename Sort::TempStorage sort;
        typename Store::TempStorage store;
    } storage;
    unsigned int keys[4];
    Load(storage.load).Load(in, keys, n, 0xffffffffu);
    __syncthreads();
    Sort(storage.sort).Sort(keys);
    __syncthreads();
    Store(storage.store).Store(out, keys, n);
}
