/* The sizes of a kernel of latent attention. A token's 576 numbers are its key for all heads; the first 512 are its
   value, too. A head tile is so many query heads of a sequence, which read a tile of tokens once. */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class Type, int Heads, int Tile, bool Paged> struct Shape {
    using T = Type;                      // of q, cache and out
    static constexpr int HEADS = Heads;  // of a head tile: 16, 32 or 64
    static constexpr int TILE = Tile;    // tokens
    static constexpr bool PAGED = Paged; // the cache lies in pages of 64 tokens
};
#ifndef SHAPE
#define SHAPE Shape<__nv_bfloat16, 64, 32, false>
#endif
using S = SHAPE;
using T = S::T;
constexpr int HEADS = S::HEADS, TILE = S::TILE;
constexpr bool PAGED = S::PAGED;
constexpr int LATENT = 512, ROPE = 64, WIDTH = LATENT + ROPE, PAGE = 64;
static_assert(PAGE % TILE == 0, "a tile lies in one page");
