"""Where the codes and scales of a quantised cache lie in memory: as decode.cu takes them.

A tile is 16 tokens of one kv head. The lanes of a warp multiply it in steps of 16 channels with mma.m16n8k16, whose
left operand, 16 rows by 16 columns, is spread so: lane 4g + c has the rows g and g + 8, and of each four columns. For
keys, rows are tokens and columns channels; for values, rows are channels and columns tokens, since the product sums
over columns. So the two lie differently. Of each step a lane has 8 codes, 8 bytes or 4:

    step    8 bits  [pair of columns][row][column of the pair]
            4 bits  [column of the pair][row][pair of columns], the last in the halves of a byte
            keys    columns 4c .. 4c + 3 of the step
            values  columns 2c, 2c + 1 and 2c + 8, 2c + 9
    codes   (batch, n_kv_heads, tiles, bytes of a tile): words of 16 bytes, each of 2 steps or 4 of one lane, as
            (words, lane, steps of the word); what steps are left over in words of 8 bytes, and then of 4
    scale   (batch, n_kv_heads, tiles, scales of a tile), or (batch, n_kv_heads, groups of tokens, head_dim)
            keys, axis="token"     of a tile (g, group, row)
            keys, axis="channel"   of each pair of steps (c, step, 4 columns), of a last one without another
                                   (c, 4 columns)
            values                 of a tile (c, group, pair of columns, column)

int8 and int4 are stored with 128 and 8 added; a byte of two int4 has the first in its lower half.
"""

import torch

TILE = 16  # tokens that lie together; also the channels of a step
LANES = 32


def tile_bytes(bits, head_dim):
    """Bytes of the codes of a tile."""
    return TILE * head_dim * (4 if bits == 4 else 8) // 8


def pack(codes, bits, role):
    """Codes (1, tiles * 16, n_kv_heads, head_dim) -> bytes (n_kv_heads, tiles, bytes of a tile)."""
    _, length, n_kv_heads, head_dim = codes.shape
    tiles, steps = length // TILE, head_dim // TILE
    if bits != "fp8":
        codes = (codes + (8 if bits == 4 else -128)).view(torch.uint8)  # int8: 128 and -128 are one byte
    if role == "keys":  # -> head, tile, step, g, c, pair, row, column
        codes = codes.view(tiles, 2, 8, n_kv_heads, steps, 4, 2, 2).permute(3, 0, 4, 2, 5, 6, 1, 7)
    else:
        codes = codes.view(tiles, 2, 4, 2, n_kv_heads, steps, 2, 8).permute(4, 0, 5, 7, 2, 1, 6, 3)
    if bits == 4:
        codes = codes.permute(0, 1, 2, 3, 4, 7, 6, 5)  # column, row, pair
        codes = codes[..., 0] | codes[..., 1] << 4
    codes = codes.flatten(5).flatten(3, 4)  # head, tile, step, lane, byte
    parts = [
        codes[:, :, first:end].unflatten(2, (-1, each)).transpose(3, 4).flatten(2)
        for first, end, each in _words(steps, codes.shape[4])
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def unpack(packed, bits, role, b, begin, end):
    """The codes (1, end - begin, n_kv_heads, head_dim) of tokens of a sequence; `begin` is where a tile begins."""
    packed = packed[b, :, begin // TILE : -(-end // TILE)]
    n_kv_heads, tiles, length = packed.shape
    step = 4 if bits == 4 else 8  # bytes of a lane
    steps, parts = length // (LANES * step), []
    for first, last, each in _words(steps, step):
        part = packed[:, :, LANES * step * first : LANES * step * last]
        parts.append(part.reshape(n_kv_heads, tiles, -1, LANES, each, step).transpose(3, 4).flatten(2, 3))
    codes = torch.cat(parts, 2).view(n_kv_heads, tiles, steps, 8, 4, *((2, 2) if bits == 4 else (2, 2, 2)))
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).permute(0, 1, 2, 3, 4, 7, 6, 5)
    if role == "keys":  # from head, tile, step, g, c, pair, row, column
        codes = codes.permute(1, 6, 3, 0, 2, 4, 5, 7)
    else:
        codes = codes.permute(1, 5, 4, 7, 0, 2, 6, 3)
    codes = codes.reshape(1, tiles * TILE, n_kv_heads, -1)[:, : end - begin]
    if bits == "fp8":
        return codes.contiguous()
    return codes.view(torch.int8) - (8 if bits == 4 else -128)


def _words(steps, step):
    """(first step, one past the last, steps of a word) of the words of 16, 8 and 4 bytes, where a step has so many."""
    first, found = 0, []
    for width in (16, 8, 4):
        each = width // step
        if each and steps - first >= each:
            last = first + (steps - first) // each * each
            found.append((first, last, each))
            first = last
    return found


def pack_token_scales(scale, role):
    """Scales (n, tiles * 16, n_kv_heads, groups) -> (n, n_kv_heads, tiles, 16 * groups)."""
    n, length, n_kv_heads, groups = scale.shape
    if role == "keys":
        return scale.view(n, length // TILE, 2, 8, n_kv_heads, groups).permute(0, 4, 1, 3, 5, 2).flatten(3)
    return scale.view(n, length // TILE, 2, 4, 2, n_kv_heads, groups).permute(0, 5, 1, 3, 6, 2, 4).flatten(3)


def unpack_token_scales(scale, role):
    """The other way round."""
    batch, n_kv_heads, tiles, count = scale.shape
    groups = count // TILE
    if role == "keys":  # -> sequence, tile, tokens of it, head, group
        scale = scale.unflatten(3, (8, groups, 2)).permute(0, 2, 5, 3, 1, 4)
    else:
        scale = scale.unflatten(3, (4, groups, 2, 2)).permute(0, 2, 5, 3, 6, 1, 4)
    return scale.reshape(batch, tiles * TILE, n_kv_heads, groups)


def pack_channel_scales(scale):
    """Scales (..., head_dim), channels in order -> as they lie."""
    return _swapped(scale, (2, 4, 4))


def unpack_channel_scales(scale):
    """The other way round."""
    return _swapped(scale, (4, 2, 4))


def _swapped(scale, axes):
    """Of each 32 channels, split into `axes`, the first two axes swapped; what is left over stays."""
    paired = scale.shape[-1] // 32 * 32
    pairs = scale[..., :paired].unflatten(-1, (-1, *axes)).transpose(-3, -2).flatten(-4)
    return torch.cat([pairs, scale[..., paired:]], -1) if paired < scale.shape[-1] else pairs
