/* A unit, 16 rows × 128 columns of codes, and how units reach a warp.

   The codes of a unit lie as a warp's operands (layout.py), and its scales and zeros beside each other, so that a warp
   copies both as they are, 512 bytes at a time. A warp of a team owns UNITS units of the columns, a slice, in every
   tile of 16 rows that its team has. They come through a ring in shared memory that is the warp's own: copied by its
   lanes and read by its lanes, so that a barrier of the warp is enough. */
#pragma once
#include "../device/half2.cuh"
#include "../device/hidden.cuh"
#include "../device/ring.cuh"

/* The weights. */
template <typename ScaleType, int Bits, int Group> struct Matrix {
    using Scale = ScaleType;               // of scales and zeros: __half, __nv_bfloat16 or float
    static constexpr int BITS = Bits;      // of a code: 8, 4 or 2
    static constexpr int GROUP = Group;    // columns that share a scale: 32, 64 or 128; 0: all of a row
    static constexpr int GROUPS = GROUP ? 128 / GROUP : 0; // of a unit
    static constexpr int LOADS = BITS / 2; // words of 16 bytes of a lane in a unit
    static constexpr int FACTORS = GROUPS * 32 * sizeof(Scale) / 16; // words of a unit's scales and zeros
};

/* x. */
template <typename Element, int Rows, bool Aligned> struct Input {
    using X = Element;                       // of x and y: __half or __nv_bfloat16
    static constexpr int ROWS = Rows;        // a power of two, of which m are there
    static constexpr bool ALIGNED = Aligned; // cols is a multiple of 8, and x lies at one of 16 bytes
};

/* The warps of a block. */
template <int WarpsPerTeam, int Teams, int Units, bool Whole> struct Block {
    static constexpr int WARPS_PER_TEAM = WarpsPerTeam; // they share a tile's columns
    static constexpr int TEAMS = Teams;                  // each has tiles of its own
    static constexpr int UNITS = Units;                 // of a warp
    static constexpr bool WHOLE = Whole;                // every warp has so many; else the last have fewer
    static constexpr int WARPS = WARPS_PER_TEAM * TEAMS, THREADS = 32 * WARPS;
};

/* A warp's ring. */
template <int UnitsPerStage, int Stages, int StagesBeforeWait> struct Ring {
    static constexpr int UNITS_PER_STAGE = UnitsPerStage;        // that are asked for together
    static constexpr int STAGES = Stages;                        // that the ring holds
    static constexpr int STAGES_BEFORE_WAIT = StagesBeforeWait;  // asked for before the kernel ahead has ended
};

/* (scale, zero) number i. */
template <typename T> __device__ __forceinline__ float2 scale_and_zero(const T *factors, long long i) {
    return unpack(reinterpret_cast<const unsigned *>(factors)[i], T());
}
__device__ __forceinline__ float2 scale_and_zero(const float *factors, long long i) {
    return reinterpret_cast<const float2 *>(factors)[i];
}

/* What a warp has of the matrix. */
template <class B> struct Share {
    int row_units, first_unit, units;   // of a row of tiles; of these the warp's first; and how many it has
    int tiles, first_tile, tile_stride; // of the matrix; the team's first, and how far it is to its next

    __device__ __forceinline__ Share(long long rows, int cols, int warp) {
        const int slice = warp % B::WARPS_PER_TEAM, team = warp / B::WARPS_PER_TEAM;
        row_units = (cols + 127) / 128;
        first_unit = (blockIdx.y * B::WARPS_PER_TEAM + slice) * B::UNITS;
        units = B::WHOLE ? B::UNITS : max(0, min(B::UNITS, row_units - first_unit));
        tiles = (rows + 15) / 16, tile_stride = gridDim.x * B::TEAMS;
        first_tile = blockIdx.x + gridDim.x * team;
    }
};

/* As many numbers of x as Words has room for, or zeros: of row x_row, from column `col` of the warp's unit on. */
template <typename Words, class I, class B>
__device__ __forceinline__ Words load_x(const typename I::X *x, const Share<B> &share, int cols, int m, int x_row,
                                        int unit, int col) {
    Words words = {};
    col += share.first_unit * 128;
    // More rows are there for nothing. The unit comes last: so far it is known, and takes no address of its own
    const typename I::X *const from = x + (long long)min(x_row, m - 1) * cols + col + unit * 128;
    col += unit * 128;
    if (unit >= share.units) return words;
    if (I::ALIGNED) return B::WHOLE || col < cols ? __ldcg(reinterpret_cast<const Words *>(from)) : words;
#pragma unroll
    for (int i = 0; i < sizeof(Words) / 2; i += 2) {
        const unsigned short *const pair = reinterpret_cast<const unsigned short *>(from + i);
        const unsigned low = col + i < cols ? __ldcg(pair) : 0, high = col + i + 1 < cols ? __ldcg(pair + 1) : 0;
        reinterpret_cast<unsigned *>(&words)[i / 2] = low | high << 16;
    }
    return words;
}

/* A warp's codes and scales, stage after stage, tile after tile. */
template <class W, class B, class R> struct WeightStream {
    static constexpr int STAGE = R::UNITS_PER_STAGE, TILE_STAGES = (B::UNITS + STAGE - 1) / STAGE;
    static constexpr int SLOT = STAGE * (W::LOADS * 32 + W::FACTORS); // words: [STAGE][LOADS][32] codes, then factors
    static constexpr int APART = B::WARPS * SLOT;                     // from a slot of the warp to its next
    static constexpr bool ALL = B::WHOLE && B::UNITS % STAGE == 0;    // all stages are full

    const Share<B> &share;
    const int lane;
    int tile, stage = 0;          // to be asked for
    const uint4 *codes, *factors; // the lane's words of it
    const int tile_factors;       // words of a tile's factors
    const uint4 *const slots;     // the warp's first
    const CachePolicy once = evict_first(); // weights are read once
    const unsigned lane_slot, slot_bytes;   // the lane's place in slot 0, and how far it is to the next (hidden.cuh)
    unsigned to;                            // the lane's place in the slot that `fill` fills next
    CopyRing<R::STAGES> ring;

    __device__ __forceinline__ WeightStream(const uint4 *packed, const typename W::Scale *scales, const Share<B> &share,
                                            int cols, const uint4 *shared, int warp, int lane)
        : share(share), lane(lane), tile(share.first_tile),
          codes(packed + ((long long)tile * share.row_units + share.first_unit) * (W::LOADS * 32) + lane),
          factors(reinterpret_cast<const uint4 *>(scales)),
          tile_factors(W::GROUP ? (cols / (W::GROUP ? W::GROUP : 1) + 3) / 4 * 4 * 2 * (int)sizeof(*scales) : 0),
          slots(shared + warp * SLOT), lane_slot(hidden(shared_address(slots + lane), lane)),
          slot_bytes(APART * 16 + hidden_zero(lane)), to(lane_slot) {
        if (W::GROUP) factors += (long long)tile * tile_factors + share.first_unit * W::FACTORS + lane;
        ring.slot = hidden_zero(lane);
    }

    /* Ask for the next stage, the lane's words from slot_address on; behind the last for nothing: the ring counts that
       too. */
    __device__ __forceinline__ void prefetch(unsigned slot_address) {
        if (tile < share.tiles) {
#pragma unroll
            for (int s = 0; s < STAGE; s++)
                if (ALL || stage * STAGE + s < share.units)
#pragma unroll
                    for (int i = s * W::LOADS; i < (s + 1) * W::LOADS; i++)
                        copy_async(slot_address + i * 512, codes + i * 32, once);
#pragma unroll
            for (int i = 0; i < STAGE * W::FACTORS; i += 32)
                if (i + lane < (ALL ? STAGE : min(STAGE, share.units - stage * STAGE)) * W::FACTORS)
                    copy_async(slot_address + (STAGE * W::LOADS * 32 + i) * 16, factors + i, once);
            codes += STAGE * W::LOADS * 32, factors += STAGE * W::FACTORS;
            if (++stage == TILE_STAGES) {
                stage = 0, tile += share.tile_stride;
                codes += ((long long)share.tile_stride * share.row_units - TILE_STAGES * STAGE) * (W::LOADS * 32);
                factors += (long long)share.tile_stride * tile_factors - TILE_STAGES * STAGE * W::FACTORS;
            }
        }
        ring.filled();
    }
    /* Ask for the ring's slots FROM to TO for the first time. */
    template <int FROM, int TO> __device__ __forceinline__ void fill() {
#pragma unroll 1
        for (int slot = FROM; slot < TO; slot++, to += slot_bytes) prefetch(to);
    }
    /* Until the oldest stage is here, as all lanes copied it. */
    __device__ __forceinline__ void wait_full() const {
        ring.wait_full();
        __syncwarp();
    }
    /* The lane's words of unit s of this stage, and the unit's scales and zeros. */
    __device__ __forceinline__ void load(uint4 (&words)[W::LOADS], int s) const {
        const uint4 *from = slots + ring.slot * APART + s * W::LOADS * 32;
#pragma unroll
        for (int l = 0; l < W::LOADS; l++) words[l] = from[32 * l + lane];
    }
    __device__ __forceinline__ const typename W::Scale *scales(int s) const {
        const uint4 *from = slots + ring.slot * APART + STAGE * W::LOADS * 32 + s * W::FACTORS;
        return reinterpret_cast<const typename W::Scale *>(from);
    }
    /* No lane reads the oldest stage any more: ask for another into its slot. */
    __device__ __forceinline__ void refill() {
        __syncwarp();
        prefetch(lane_slot + ring.slot * (APART * 16));
        ring.advance();
    }
};
