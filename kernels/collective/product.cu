/* out = residual + the sum of W x over devices, in one launch: the exchange moves into the epilogue of the product.

   W (rows, cols) and x (cols,): this device's columns of a matrix and its part of a vector, as W_o and W_down of a
   layer are split. residual (rows,) and out (rows,): the same on all devices. mail: [2 turns][rank of who writes][rows]
   numbers of 8 bytes, {sum, number of the exchange}; mails: those of all.

   New since a launch of its own: a row's sum goes to the peers from the registers in which it was made, while other
   blocks still multiply. What waits at the end waits for the slowest block of all devices, not for a launch behind it.

   Moves: 2 * rows * cols bytes of weights, and 8 * (devices - 1) * rows bytes over the link from each device. */
#include "../fusion/products.cuh"
#include "../fusion/warp_dot.cuh"
#include "number.cuh"

/* Where a device's sum of a row lies in any mailbox. */
__device__ __forceinline__ long long place_of(unsigned number, int from, int rows) {
    return ((long long)(number % 2) * DEVICES + from) * rows;
}
__device__ __forceinline__ void send_sum(const Peers &mails, unsigned number, int rank, int rows, int row, float sum) {
#pragma unroll
    for (int r = 0; r < DEVICES; r++)
        if (r != rank)
            send((u64 *)mails.of[r] + place_of(number, rank, rows) + row, (u64)number << 32 | __float_as_uint(sum));
}
/* All devices' sums of a row, in the order of ranks. False where one has not come. */
__device__ __forceinline__ bool take_sums(const u64 *mail, unsigned number, int rank, int rows, int row, float own,
                                          int limit, Told told, float &total) {
    bool come = true;
    total = 0;
#pragma unroll
    for (int r = 0; r < DEVICES; r++) {
        u64 word = __float_as_uint(own);
        if (r != rank)
            come &= wait_for([&] {
                word = look(mail + place_of(number, r, rows) + row);
                return (unsigned)(word >> 32) == number;
            }, r, limit, told);
        total = r ? total + __uint_as_float((unsigned)word) : __uint_as_float((unsigned)word);
    }
    return come;
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
product(const T *W, const T *x, const T *residual, T *out, u64 *mail, Peers mails, uint2 *numbers, Told told, int rank,
        int limit, int rows, int cols) {
    extern __shared__ uint4 shared[];
    let_next_kernel_start();
    const int thread = threadIdx.x;
    const ResidualProduct<S::ROWS> product = {W, rows, cols};
    const CachePolicy once = evict_first();
    Stream weights(shared, product.groups(), thread, [=](int group, Slot slot) {
        copy_rows<S::ROWS, S::WORDS>(slot, [&](int r) { return product.row(group, r); }, cols, once, thread);
    });
    weights.fill();             // 1
    wait_for_previous_kernel(); // 2
    ThreadVector<S::WORDS> x_part;
    x_part.load(x, cols, thread); // 3
    const Exchange now = next_exchange(numbers);
    const auto share = weights.share<S::ROWS>(rows);
    product.load(weights, share, residual);
    weights.multiply<S::ROWS>(share.groups, x_part, cols); // 4
    bool failed = now.failed;
    if (!failed)
        share.each(thread, [&](int row, int i) { // 5
            send_sum(mails, now.number, rank, rows, row, weights.sum(i, weights.warps));
        });
    count_exchange(numbers, now.number);
    share.each(thread, [&](int row, int i) { // 6. what was sent is on its way for 0.75 µs
        float total = 0;
        const float own = weights.sum(i, weights.warps), before = weights.partial[i * PITCH + weights.warps];
        failed = failed || !take_sums(mail, now.number, rank, rows, row, own, limit, told, total);
        if (!failed) out[row] = (T)(before + total);
    });
    note_failure(numbers, failed);
}

/* A warp for a row: where columns are no multiple of 8, or rows are not aligned to 16 bytes. */
extern "C" __global__ void product_any(const T *W, const T *x, const T *residual, T *out, u64 *mail, Peers mails,
                                       uint2 *numbers, Told told, int rank, int limit, int rows, int cols) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    const Exchange now = next_exchange(numbers);
    bool failed = now.failed;
    float squares, own = 0, total;
    if (row < rows && !failed) {
        own = warp_dot<T>(W + (long long)row * cols, x, nullptr, cols, lane, &squares);
        if (lane == 0) send_sum(mails, now.number, rank, rows, row, own);
    }
    count_exchange(numbers, now.number);
    if (row < rows && !failed) {
        if (lane == 0) {
            failed = !take_sums(mail, now.number, rank, rows, row, own, limit, told, total);
            if (!failed) out[row] = (T)((float)residual[row] + total);
        }
    }
    note_failure(numbers, failed);
}
