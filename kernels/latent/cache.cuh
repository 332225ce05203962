/* Where a tile of tokens lies: in one piece with all others of its sequence, or in a page. */
#pragma once
#include "shape.cuh"

struct Cache {
    const T *tokens;  // (batch, kv_len, WIDTH), or pages (n_pages, PAGE, WIDTH)
    const int *table; // (batch, max_pages): the page of the pool that holds each page of a sequence
    int n_pages, max_pages, kv_len;

    /* A page's first row in the whole pool. A number out of the pool is the last one in it. */
    __device__ __forceinline__ long long page_row(int b, int page) const {
        const unsigned number = __ldg(table + (long long)b * max_pages + page);
        return (long long)min(number, (unsigned)n_pages - 1) * PAGE;
    }
    /* Of a sequence's `first` token on, as many as its page has; tiles lie in one page. */
    __device__ __forceinline__ long long row(int b, int first) const {
        if constexpr (PAGED) return page_row(b, first / PAGE) + first % PAGE;
        return (long long)b * kv_len + first;
    }
    __device__ __forceinline__ const T *address(int b, int first) const { return tokens + row(b, first) * WIDTH; }
};
