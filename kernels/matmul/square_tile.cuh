/* The sizes of rungs 2 to 5: 256 threads have a tile of 128 x 128 of y, and a ring of three stages. */
#pragma once
#include "dtype.cuh"
#include "tiles.cuh"

constexpr int TILE = 128, THREADS = 256, STAGES = 3, GROUP = 16; // GROUP: of TileOrder

struct Stage {
    unsigned char x[TILE * ROW], w[TILE * ROW];
};
