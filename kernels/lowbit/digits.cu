/* Rung 3, digits: whole numbers on the integer tensor cores. Codes are bytes as they stand; x becomes bytes, too.

   New since magic:
   - mma.m16n8k32 multiplies 16 rows x 32 columns of bytes by 32 rows x 8 columns of signed bytes. A code is never
     converted: one mask makes an operand of four codes, because layout.py has put them where they belong. An operand of
     row g + 8 has its code in the upper half of each byte, 16 times too large.
   - x is one column, and B has eight. So 128 numbers of x become whole numbers of signed bytes, to base 256
     (digits.cuh), and each digit is a column of its own. All sums are exact.
   - sum (q - zero) scale x = scale (sum q x - zero sum x), once a group. There is no subtraction of a zero any more.

   A block has a tile of 16 rows, and each of its warps every WARPS-th unit of 128 columns, which is a group. Steps:

       1 load   2 x as whole numbers   3 their digits, as operands   4 multiply   5 scale   6 add up the warps' sums

   Moves rows * cols / 2 bytes of codes and 4 for each group of a row, once, and the 2 * cols bytes of x once a block.
   8 * rows * cols multiply-adds of bytes, eight times what counts: one instruction does 4096 of them. Still lost: every
   block makes the same digits, and a warp that does so has nothing on its way.

   packed, factors as layout.py has them, 4 bits, groups of 128, and more than one of them; rows is a multiple of 16.
   Launch rows / 16 blocks of 32 * WARPS threads. */
#include "../device/mma.cuh"
#include "digits.cuh"

constexpr int WARPS = 16;

/* The operand of a step, 32 columns of a unit, from the lane's 32 bytes of codes. */
__device__ __forceinline__ void operand(unsigned (&a)[4], const unsigned (&codes)[8], int step) {
    a[0] = codes[2 * step] & 0x0f0f0f0f, a[1] = codes[2 * step] & 0xf0f0f0f0;
    a[2] = codes[2 * step + 1] & 0x0f0f0f0f, a[3] = codes[2 * step + 1] & 0xf0f0f0f0;
}

/* sum q x of row g, or g + 8: of two neighbouring lanes one has digits 0 and 1, the other 2 and 3. */
__device__ __forceinline__ float product(const int (&d)[4], int upper, int lane) {
    const float two_digits = (float)(d[2 * upper] + 256 * d[2 * upper + 1]) * (lane % 2 ? 65536 : 1);
    return (two_digits + __shfl_xor_sync(~0u, two_digits, 1)) / (upper ? 16 : 1);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
gemv(const uint4 *packed, const __half *factors, const __half *x, __half *y, int cols) {
    __shared__ uint2 digits[WARPS][DIGITS][16 + 4]; // of columns 8i .. 8i + 7; 4 more, so that digits' banks differ
    __shared__ float sums[WARPS][16];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const int units = cols / 128, groups = (units + 3) / 4 * 4; // as they are stored
    float sum[2] = {};                                          // of rows g and g + 8
    for (int unit = warp; unit < units; unit += WARPS) {
        // 1. load: 32 bytes of codes, two pairs of a scale and a zero, four numbers of x
        const uint4 *from = packed + ((long long)blockIdx.x * units + unit) * 64 + lane;
        const uint4 first = from[0], second = from[32];
        const unsigned codes[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
        const uint2 *pairs = reinterpret_cast<const uint2 *>(factors) + ((long long)blockIdx.x * groups + unit) * 8;
        const uint2 scales = pairs[g], numbers = reinterpret_cast<const uint2 *>(x)[unit * 32 + lane];

        // 2. x as whole numbers, in units of a power of two that the largest of the 128 decides
        const unsigned both = __vmaxu2(numbers.x & 0x7fff7fff, numbers.y & 0x7fff7fff); // without their signs, as bits
        const unsigned largest = __reduce_max_sync(~0u, max(both & 0xffff, both >> 16));
        const DigitScale scale(unpack(largest, __half()).x);
        unsigned whole[4];
        to_whole<__half>(whole, numbers, scale.up);
        const int x_sum = __reduce_add_sync(~0u, (int)(whole[0] + whole[1] + whole[2] + whole[3]) - 4 * CARRY);

        // 3. their digits, as operands: the lane's four numbers are columns 4 * lane .. of the unit
        __syncwarp();
#pragma unroll
        for (int k = 0; k < DIGITS; k++)
            reinterpret_cast<unsigned *>(digits[warp][k])[lane] = digit_of_four(whole, k);
        __syncwarp();

        // 4. multiply: column g of B is digit g, and once more
        int d[4] = {};
#pragma unroll
        for (int step = 0; step < 4; step++) {
            unsigned a[4];
            operand(a, codes, step);
            const uint2 b = digits[warp][g % DIGITS][4 * step + c];
            mma_m16n8k32(d, a, b.x, b.y);
        }

        // 5. scale, once a group
        const float2 low = unpack(scales.x, __half()), high = unpack(scales.y, __half());
        sum[0] += low.x * scale.unit * (product(d, 0, lane) - low.y * x_sum);
        sum[1] += high.x * scale.unit * (product(d, 1, lane) - high.y * x_sum);
    }

    // 6. add up the warps' sums
    if (c == 0) sums[warp][g] = sum[0], sums[warp][g + 8] = sum[1];
    __syncthreads();
    if (threadIdx.x < 16) {
        float total = 0;
#pragma unroll
        for (int v = 0; v < WARPS; v++) total += sums[v][threadIdx.x];
        y[blockIdx.x * 16ll + threadIdx.x] = (__half)total;
    }
}
