/* New tokens of requests into their pages of 8 or 4 bits, quantised as they are written: the last ones of each. Lengths
   and tables say where, and are read here, so that a graph's replay follows them.

   Each token has scales of its own, so the codes of others stay what they are (../kv_cache/put_head.cuh). In 4 bits a
   byte holds the values of two tokens of a unit. So a warp writes all new tokens of a unit, of a kv head's keys or
   values, one after another.

   Who is nobody's: as in write.cu. Launch with blocks of whole warps, a warp for each request, unit that its new tokens
   may touch, kv head, and keys or values. Compile with DTYPE, HEAD_DIM, BITS, GROUP and FP8. k, v (n_requests,
   new_tokens, n_kv_heads, HEAD_DIM); k_pages, v_pages (n_pages, n_kv_heads, units, bytes of a unit); scales (n_pages,
   n_kv_heads, units, 2, 16 * GROUPS). touched: units that a request's new tokens are in, at most. */
#include "../device/pdl.cuh"
#include "../kv_cache/put_head.cuh"
#include <cuda_bf16.h>

extern "C" __global__ void write_codes(const DTYPE *k, const DTYPE *v, unsigned char *k_pages, unsigned char *v_pages,
                                       __half *scales, const int *slots, const int *lens, const int *table,
                                       int n_requests, int new_tokens, int n_kv_heads, int touched, int max_requests,
                                       int max_pages, int n_pages, int units) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const long long number = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32, is_v = number % 2, kv_head = number / 2 % n_kv_heads;
    const long long piece = number / 2 / n_kv_heads; // of all requests
    const int b = piece / touched;
    if (b >= n_requests) return;

    const int slot = slots[b];
    if ((unsigned)slot >= (unsigned)max_requests) return;
    const int length = min(lens[slot], max_pages * units * TILE), first = lens[slot] - new_tokens;
    const int unit = max(first, 0) / TILE + (int)(piece - (long long)b * touched);
    const int end = min(unit * TILE + TILE, length);
    if (unit * TILE >= end) return;
    const int page = table[(long long)slot * max_pages + unit / units];
    if ((unsigned)page >= (unsigned)n_pages) return;

    const long long to = ((long long)page * n_kv_heads + kv_head) * units + unit % units;
    for (int token = max(unit * TILE, first); token < end; token++) {
        const long long from = ((long long)b * new_tokens + token - first) * n_kv_heads + kv_head;
        float x[MINE];
        for (int n = 0; n < MINE; n++)
            x[n] = lane + 32 * n < HEAD_DIM ? (float)(is_v ? v : k)[from * HEAD_DIM + lane + 32 * n] : 0;
        put_head(x, (is_v ? v_pages : k_pages) + to * TILE_BYTES, scales + (2 * to + is_v) * TILE * GROUPS,
                 token % TILE, is_v, lane);
    }
}
