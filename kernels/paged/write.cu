/* New tokens of requests into their pages: the last ones of each. Lengths and tables say where, and are
   read here, so that a graph's replay follows them.

   A slot out of range is nobody's, and a token in front of a request's first, or behind what its table
   has room for, is nobody's either: nothing is written. A page number out of the pool neither.

   Launch with blocks of any number of threads, along x enough for all words of 16 bytes of k.
   k, v (n_requests, new_tokens, n_kv_heads, head_dim), words = head_dim * 2 / 16 of a token and head;
   k_pages, v_pages (n_pages, n_kv_heads, page_size, head_dim). */
#include "../device/pdl.cuh"

extern "C" __global__ void
write(const uint4 *k, const uint4 *v, uint4 *k_pages, uint4 *v_pages, const int *slots, const int *lens,
      const int *table, int n_requests, int new_tokens, int n_kv_heads, int words, int max_requests, int max_pages,
      int n_pages, int page_size) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const long long number = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= (long long)n_requests * new_tokens * n_kv_heads * words) return;
    const int word = number % words;
    const long long vector = number / words, token = vector / n_kv_heads;
    const int kv_head = vector % n_kv_heads, b = token / new_tokens;

    const int slot = slots[b];
    if ((unsigned)slot >= (unsigned)max_requests) return;
    const int position = lens[slot] - new_tokens + (int)(token - (long long)b * new_tokens);
    if (position < 0 || position / page_size >= max_pages) return;
    const int page = table[(long long)slot * max_pages + position / page_size];
    if ((unsigned)page >= (unsigned)n_pages) return;
    const long long to = (((long long)page * n_kv_heads + kv_head) * page_size + position % page_size) * words + word;
    k_pages[to] = k[number];
    v_pages[to] = v[number];
}
