"""What generated kernels read and write: their inputs, the loads that reach them, their outputs."""

import numpy as np

SIZE = 256  # elements of every input
WORDS = [0, 1, 2, 0xFFFFFFFF, 0xFFFFFFFE, 0x80000000, 0x7FFFFFFF, 0x80000001, 0x3F800000, 0xBF800000, 0x7F800000]
WORDS += [0xFF800000, 0x7FC00000, 0x00000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x4F000000, 0xCF000000, 0x4B800001]
WORDS += [0x3C003C00, 0x7C000001, 0x03FFFC00, 0x7BFF0400, 0x3F803F80, 0x7F7F0080, 0x33800000, 0x477FF000, 0x3F000000]


def raw(seed, n):
    """n random 32-bit words, a third of them nasty: infinities, subnormals, INT_MIN, ..."""
    bits = np.random.PCG64(seed).random_raw(2 * n)
    words = (bits[:n] >> np.uint64(32)).astype(np.uint32)
    nasty = np.array(WORDS, np.uint32)[(bits[n:] % np.uint64(len(WORDS))).astype(int)]
    small = words % np.uint32(41) - np.uint32(20)
    return np.where(bits[n:] >> np.uint64(62) == 0, nasty, np.where(bits[n:] >> np.uint64(61) == 7, small, words))


def tame(seed, n):
    """n floats, not too large and not too small, so that sums and products stay finite for a while."""
    words = (np.random.PCG64(seed).random_raw(n) >> np.uint64(40)).astype(np.int64)
    return ((words - (1 << 23)) / 2.0 ** (words % 7 * 4 + 8)).astype(np.float32)


# name -> (type of the element, which input it is). Doubles and halves are made of the same words as the rest.
INPUTS = {
    "in": ("unsigned", lambda s: raw(s, SIZE)),
    "tame": ("float", lambda s: tame(s + 1, SIZE)),
    "wild": ("float", lambda s: raw(s + 2, SIZE).view(np.float32)),
    "shorts": ("short", lambda s: raw(s + 3, SIZE // 2).view(np.int16)),
    "wides": ("unsigned long long", lambda s: raw(s + 4, 2 * SIZE).view(np.uint64)),
    "doubles": (
        "double",
        lambda s: np.where(np.arange(SIZE) % 4, tame(s + 5, SIZE), raw(s + 5, 2 * SIZE).view(np.float64)),
    ),
    "halves": ("__half", lambda s: raw(s + 6, SIZE // 2).view(np.uint16)),
    "tame_halves": ("__half", lambda s: (tame(s + 7, SIZE) % 8).astype(np.float16).view(np.uint16)),
    "brains": ("__nv_bfloat16", lambda s: raw(s + 8, SIZE // 2).view(np.uint16)),
    "tame_brains": ("__nv_bfloat16", lambda s: (tame(s + 9, SIZE).view(np.uint32) >> 16).astype(np.uint16)),
}
LOADS = {  # type of the variable -> the loads that may fill it; I is an index
    "u": [
        "in[I]",
        "__ldg(&in[I])",
        "__ldcg(&in[I])",
        "__ldcs(&in[I])",
        "((const volatile unsigned *)in)[I]",
        "((const unsigned char *)in)[I]",
        "((const uint2 *)in)[I / 2u].y",
        "pair_sum(((const uint2 *)in)[I / 2u])",
        "quad_sum(((const uint4 *)in)[I / 4u])",
        "((const uint4 *)in)[I / 4u].z",
        "quad_sum(__ldg(&((const uint4 *)in)[I / 4u]))",
        "bytes_sum(((const uchar4 *)in)[I])",
    ],
    "i": [
        "((const int *)in)[I]",
        "((const signed char *)in)[I]",
        "shorts[I]",
        "((const short4 *)shorts)[I / 4u].w",
        "shorts_sum(((const short2 *)shorts)[I / 2u])",
        "((const int2 *)in)[I / 2u].x",
    ],
    "f": [
        "tame[I]",
        "tame[I]",
        "tame[I]",
        "wild[I]",
        "((const float2 *)tame)[I / 2u].y",
        "((const float4 *)tame)[I / 4u].z",
        "floats_sum(((const float2 *)tame)[I / 2u])",
        "float4_sum(((const float4 *)tame)[I / 4u])",
        "__ldg(&wild[I])",
    ],
    "q": ["wides[I]", "__ldg(&wides[I])", "wides_sum(((const ulonglong2 *)wides)[I / 2u])"],
    "l": ["((const long long *)wides)[I]"],
    "d": ["doubles[I]", "doubles_sum(((const double2 *)doubles)[I / 2u])"],
    "h": ["halves[I]", "tame_halves[I]", "tame_halves[I]"],
    "p": ["((const __half2 *)tame_halves)[I / 2u]", "((const __half2 *)halves)[I / 2u]"],
    "b": ["brains[I]", "tame_brains[I]", "tame_brains[I]"],
}
# output -> (type, elements for each thread or 0, elements in all, what is in it before)
OUTPUTS = {
    "own": ("unsigned", 8, 0, lambda n: raw(91, n)),
    "own_shorts": ("unsigned short", 8, 0, lambda n: raw(92, n // 2).view(np.uint16)),
    "own_floats": ("float", 4, 0, lambda n: tame(93, n)),
    "own_wides": ("unsigned long long", 2, 0, lambda n: raw(94, 2 * n).view(np.uint64)),
    "swap": ("unsigned", 1, 0, lambda n: raw(95, n)),
    "met": ("unsigned", 0, 256, lambda n: raw(96, n)),
    "met_wides": ("unsigned long long", 0, 64, lambda n: raw(97, 2 * n).view(np.uint64)),
    "met_floats": ("float", 0, 32, lambda n: np.zeros(n, np.float32)),
}
SCALARS = {
    "n": ("int", lambda dice: np.int32(1 + dice.below(5))),
    "word": ("unsigned", lambda dice: np.uint32(dice.random() * 2**32)),
    "real": ("float", lambda dice: np.float32(dice.random() * 8 - 4)),
    "offset": ("long long", lambda dice: np.int64(dice.random() * 2**40)),
    "scale": ("double", lambda dice: np.float64(dice.random() * 8 - 4)),
}
