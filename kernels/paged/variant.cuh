/* What a variant of attention may change, as a struct of small functions. Where none is asked for it changes nothing,
   and the machine code is the same as if this file were not here.

   The text of another one comes from variants.py, in front of a kernel's: it defines VARIANT_TENSORS, the tensors that
   the functions read, as parameters of the kernel, VARIANT_MADE, a Variant with these, and Variant itself. */
#pragma once

struct PlainVariant {
    static constexpr bool SCORES = false, SKIPS = false, TURNS = false; // which of the functions there are

    /* Of a scaled score, in natural units, for a token and the query at a position, both counted from 0. request: its
       number in the call; head: of all query heads. */
    __device__ __forceinline__ float score(float s, int request, int head, int token, int position) const { return s; }
    /* Whether the query sees the token. Later ones than its own it never sees. */
    __device__ __forceinline__ bool keep(int request, int head, int token, int position) const { return true; }
    /* No query at this position, or behind it, sees a token before that one: tiles in front of it are not read. */
    static __device__ __forceinline__ int first_token(int position) { return 0; }
    /* How far dimensions pair and pair + HEAD_DIM / 2 of a token are turned, 2**32 being all around. */
    __device__ __forceinline__ unsigned turns(int token, int pair) const { return 0; }
};
#ifndef VARIANT_TENSORS
#define VARIANT_TENSORS
#define VARIANT_MADE {}
using Variant = PlainVariant;
#endif
