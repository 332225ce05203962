/* The queries of a head tile, for products with codes.

   Operands are float16 whatever the dtype of q. A power of two keeps them in its range: head by head, q is brought
   below 2**q_lift, and a score gets back what that took. What the offset of unsigned codes adds to a product is a
   product of its own, with the offset alone: it is taken off beforehand. */
#pragma once
#include "../device/half2.cuh"
#include "../device/math.cuh"
#include "../device/mma.cuh"
#include "../device/reduce_integers.cuh"
#include "format.cuh"
#include "column_sums.cuh"

/* In shared memory, of a team. */
struct SharedQueries {
    __half *queries; // [HEADS][PITCH]
    int *exponents;  // [HEADS]: each is less than 2**exponent
};

/* In registers: a warp's share on the way in, and then what its lanes need of all. */
struct Queries {
    static constexpr int FOURS = HEAD_DIM / 4;                     // of the channels: what a lane takes at a time
    static constexpr int LANE_FOURS = (FOURS + 31) / 32;           // of a head, for a lane
    static constexpr int WARP_HEADS = (HEADS + TEAM - 1) / TEAM; // a warp takes every TEAM-th head
    uint2 loaded[WARP_HEADS][LANE_FOURS];
    unsigned operand[HEAD_EIGHTS][STEPS][2];        // lane 4g + c has head g, channels 16 * step + 4c .. + 3
    float offset_product[K_GROUPS][HEAD_EIGHTS][4]; // to be added
    float score_scale[HEAD_EIGHTS][2];              // of heads 2c and 2c + 1

    __device__ __forceinline__ void load(const T *q, const HeadTile &tile, int member, int lane) {
        const int first = tile.first_head();
        const uint2 *from = reinterpret_cast<const uint2 *>(q + tile.query_head(first) * HEAD_DIM);
#pragma unroll
        for (int i = 0; i < WARP_HEADS; i++)
#pragma unroll
            for (int j = 0; j < LANE_FOURS; j++) {
                const int head = member + i * TEAM, four = lane + 32 * j;
                const bool there = head < HEADS && first + head < GROUP && four < FOURS;
                loaded[i][j] = there ? __ldcg(from + head * FOURS + four) : uint2{};
            }
    }
    /* What was loaded, as float16. */
    __device__ __forceinline__ void lay_down(const SharedQueries &shared, int q_lift, int member, int lane) const {
#pragma unroll
        for (int i = 0; i < WARP_HEADS; i++) {
            const int head = member + i * TEAM;
            if (head >= HEADS) break;
            unsigned largest = 0; // of the bits, without their signs, of both halves
#pragma unroll
            for (int j = 0; j < LANE_FOURS; j++)
                largest = __vmaxu2(largest, __vmaxu2(loaded[i][j].x & 0x7fff7fff, loaded[i][j].y & 0x7fff7fff));
            const float2 both = unpack(warp_max_u16x2(largest), T());
            const int exponent = max((__float_as_int(fmaxf(both.x, both.y)) >> 23) - 126, -100);
            const float low = power_of_2(q_lift - exponent), high = low / KEYS::HIGH;
#pragma unroll
            for (int j = 0; j < LANE_FOURS; j++) {
                const float2 x = unpack(loaded[i][j].x, T()), y = unpack(loaded[i][j].y, T());
                if (lane + 32 * j < FOURS)
                    *reinterpret_cast<uint2 *>(shared.queries + head * PITCH + 4 * (lane + 32 * j)) =
                        make_uint2(pack(x.x * low, x.y * low, __half()), pack(y.x * high, y.y * high, __half()));
            }
            if (lane == 0) shared.exponents[head] = exponent;
        }
    }
    /* What all warps of the team have laid down; scale: of scores. */
    __device__ __forceinline__ void take(const SharedQueries &shared, int q_lift, float scale, int lane) {
#pragma unroll
        for (int n = 0; n < HEAD_EIGHTS; n++) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const uint2 x = four(shared, n, step, lane);
                if (!BY_CHANNEL) operand[n][step][0] = x.x, operand[n][step][1] = x.y;
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int head = 8 * n + lane % 4 * 2 + i, exponent = head < HEADS ? shared.exponents[head] : 0;
                score_scale[n][i] = scale * power_of_2(exponent - q_lift) / KEYS::KEY_UNIT;
            }
        }
        if (!BY_CHANNEL)
#pragma unroll
            for (int group = 0; group < K_GROUPS; group++) find_offset_product(group);
    }
    /* A new group of tokens: queries times the scales of its channels. */
    __device__ __forceinline__ void take_scaled(const SharedQueries &shared, const uint4 *scales, int lane) {
#pragma unroll
        for (int step = 0; step + 1 < STEPS; step += 2) {
            const uint4 s = scales[step / 2 * 4 + lane % 4];
            take_scaled(shared, step, make_uint2(s.x, s.y), lane);
            take_scaled(shared, step + 1, make_uint2(s.z, s.w), lane);
        }
        if (STEPS % 2) // the last has no other beside it
            take_scaled(shared, STEPS - 1, reinterpret_cast<const uint2 *>(scales + STEPS / 2 * 4)[lane % 4], lane);
        find_offset_product(0);
    }

  private:
    __device__ __forceinline__ void take_scaled(const SharedQueries &shared, int step, uint2 scales, int lane) {
#pragma unroll
        for (int n = 0; n < HEAD_EIGHTS; n++) {
            const uint2 x = four(shared, n, step, lane);
            operand[n][step][0] = mul_x2(x.x, scales.x, __half());
            operand[n][step][1] = mul_x2(x.y, scales.y, __half());
        }
    }
    /* The lane's four channels of a step, of head g of eight. */
    static __device__ __forceinline__ uint2 four(const SharedQueries &shared, int n, int step, int lane) {
        const int head = 8 * n + lane / 4;
        if (head >= HEADS) return uint2{};
        return *reinterpret_cast<const uint2 *>(shared.queries + head * PITCH + 16 * step + lane % 4 * 4);
    }
    __device__ __forceinline__ void find_offset_product(int group) {
        constexpr bool OFFSETS = KEYS::OFFSET > 0;
        const unsigned minus[4] = {KEYS::OFFSET | 0x80008000, KEYS::OFFSET | 0x80008000,
                                   KEYS::OFFSET_HIGH | 0x80008000, KEYS::OFFSET_HIGH | 0x80008000};
#pragma unroll
        for (int n = 0; n < HEAD_EIGHTS; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) offset_product[group][n][i] = 0;
#pragma unroll
            for (int step = group * (STEPS / K_GROUPS); OFFSETS && step < (group + 1) * (STEPS / K_GROUPS); step++)
                mma_m16n8k16(offset_product[group][n], minus, operand[n][step][0], operand[n][step][1], __half());
        }
    }
};
