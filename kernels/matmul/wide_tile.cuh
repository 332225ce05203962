/* The sizes of rungs 6 and 7: two consumers and a producer, 128 threads each, have a tile of 128 x 256 of y, and a ring
   of four stages. */
#pragma once
#include "dtype.cuh"
#include "tiles.cuh"

constexpr int ROWS = 128, COLUMNS = 256, CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1), STAGES = 4, GROUP = 16;

struct Stage {
    unsigned char x[ROWS * ROW], w[COLUMNS * ROW];
};
