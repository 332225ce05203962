"""How codes lie in memory for the best rung: worked out once, offline, so that the kernel has little to do. For up to
four rows of x a mask makes an operand of codes, at 2 bits with a shift for every other pair. For more rows, which want
16-bit numbers, shifts also bring odd bytes to even places, and narrow codes to where the number has room.

The layout is that of one instruction's operands, and of no other's. mma.m16n8k32 multiplies 16 rows × 32 columns of
unsigned bytes, four words a lane. Which column is which is free, if x is laid out alike: here a lane has eight
neighbours of a row. Lane 4g + c (g 0..7, c 0..3) holds

    a0  row g      columns 8c .. 8c + 3             a2  row g      columns 8c + 4 .. 8c + 7
    a1  row g + 8  the same columns                 a3  row g + 8  the same columns as a2

Four columns are the four bytes of a word, in the order 0, 2, 1, 3: bytes 0 and 2, the low ones of its halves, are
neighbours, as mma.m16n8k16 wants them where codes become 16-bit numbers: there the words of a lane are its operands of
two steps. Narrow codes share these bytes: with one mask a word turns into an operand, whose value is the code times a
power of two.

    bits   words of a lane, for 32 columns      bits 7 .. 0 of each byte
    8      4: a0, a1, a2, a3                    a0 a0 a0 a0 a0 a0 a0 a0
    4      2: a0 with a1, a2 with a3            a1 a1 a1 a1 a0 a0 a0 a0
    2      1: all four                          a3 a3 a2 a2 a1 a1 a0 a0

A unit is 16 rows × 128 columns, four such steps. Its words are dealt out so that a lane's next 16 bytes, and with them
512 bytes of its warp, are always one load:

    packed   (tiles, units, loads, 32 lanes, 4 words) int32; loads = bits / 2 of a unit
             word i of load l is word (4 l + i) % (bits / 2) of step (4 l + i) // (bits / 2)
    factors  groups: (tiles, groups up to a multiple of 4, 8, 2, 2), of group j and rows g and g + 8: scale, zero
             one for a row: (tiles, 16, 2)

A tile is 16 rows. What lies beyond the last row or column is 0, with a scale of 0.
"""

import torch

TILE, UNIT, STEPS = 16, 128, 4  # rows of a tile, columns of a unit, mma's in it
BITS = (8, 4, 2)


def interleave(q, bits):
    """Codes, uint8 (rows, cols), as the best rung reads them: int32 (tiles, units, loads, 32, 4) on the same device."""
    rows, cols = q.shape
    tiles, units = -(-rows // TILE), -(-cols // UNIT)
    q = torch.nn.functional.pad(q, (0, units * UNIT - cols, 0, tiles * TILE - rows))
    # tile, row half, g, unit, step, c, column half, and byte as (half, which) of (which, half)
    # -> tile, unit, step, g, c, column half, row half, byte
    q = q.view(tiles, 2, 8, units, STEPS, 4, 2, 2, 2).permute(0, 3, 4, 2, 5, 6, 1, 8, 7)
    q = q.reshape(tiles, units, STEPS, 32, bits // 2, 8 // bits, 4)  # ..., lane, word, operand in it, byte
    word = q[..., 0, :].clone()
    for operand in range(1, 8 // bits):
        word |= q[..., operand, :] << bits * operand
    word = word.contiguous().view(torch.int32)[..., 0]  # tile, unit, step, lane, word of the step
    word = word.permute(0, 1, 2, 4, 3).reshape(tiles, units, bits // 2, 4, 32)
    return word.transpose(3, 4).contiguous()


def deinterleave(packed, bits, shape):
    """The codes again: uint8 of this shape, (rows, cols)."""
    tiles, units = packed.shape[:2]
    word = packed.transpose(3, 4).reshape(tiles, units, STEPS, bits // 2, 32).transpose(3, 4)
    word = word.contiguous()[..., None].view(torch.uint8)  # tile, unit, step, lane, word, byte
    q = torch.stack([word >> bits * operand & (1 << bits) - 1 for operand in range(8 // bits)], -2)
    q = q.view(tiles, units, STEPS, 8, 4, 2, 2, 2, 2).permute(0, 6, 3, 1, 2, 4, 5, 8, 7)
    return q.reshape(tiles * TILE, units * UNIT)[: shape[0], : shape[1]].contiguous()


def interleave_factors(scale, zero):
    """Scales and zeros, (rows, groups) of one dtype, side by side."""
    rows, groups = scale.shape
    tiles = -(-rows // TILE)
    padding = (0, -groups % 4 if groups > 1 else 0, 0, tiles * TILE - rows)
    both = torch.stack([torch.nn.functional.pad(x, padding) for x in (scale, zero)], -1)
    if groups == 1:
        return both.view(tiles, TILE, 2)
    # tile, row half, g, group, which -> tile, group, g, row half, which
    return both.view(tiles, 2, 8, -1, 2).permute(0, 3, 2, 1, 4).contiguous()
