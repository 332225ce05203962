"""Wrong answers to the exercises of chapter 06. Each says the mistake that it makes.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer, and words that
the check's verdict must hold.
"""

import numpy as np

from wrong.warp_gemv import changed

# Exercise 1: pack and unpack


def pack(q, bits, *, dtype=np.uint32, reverse=False, fill=0, short=False):
    (rows, cols), per_word = q.shape, 32 // bits
    words = cols // per_word if short else -(-cols // per_word)
    padded = np.full((rows, words * per_word), fill, dtype)
    padded[:, : min(cols, words * per_word)] = q[:, : words * per_word]
    shifts = (bits * np.arange(per_word)).astype(dtype)
    fields = padded.reshape(rows, -1, per_word) << (shifts[::-1] if reverse else shifts)
    return np.bitwise_or.reduce(fields, axis=2).astype(np.uint32)


def unpack(words, bits, cols, *, reverse=False, keep=None, dtype=np.uint8):
    shifts = bits * np.arange(32 // bits, dtype=np.uint32)
    fields = words[..., None] >> (shifts[::-1] if reverse else shifts) & np.uint32(2 ** (keep or bits) - 1)
    return fields.reshape(len(words), -1)[:, :cols].astype(dtype)


def _pack(**mistake):
    return lambda q, bits: pack(q, bits, **mistake)


def _unpack(**mistake):
    return lambda words, bits, cols: unpack(words, bits, cols, **mistake)


def all_rows_in_one(q, bits):
    """Packs the rows one after another, so that a word may hold the end of one and the start of the next."""
    words = pack(q.reshape(1, -1), bits)[0]
    return np.resize(words, (len(q), -(-q.shape[1] * bits // 32)))


def left_empty(q, bits):
    """What lies behind the last code is whatever was in memory."""
    (rows, cols), per_word = q.shape, 32 // bits
    padded = np.empty((rows, -(-cols // per_word) * per_word), np.uint32)
    padded[:, :cols] = q
    fields = padded.reshape(rows, -1, per_word) << bits * np.arange(per_word, dtype=np.uint32)
    return np.bitwise_or.reduce(fields, axis=2)


def in_place(q, bits):
    words = pack(q, bits)
    q[:] = 0
    return words


# Exercise 2: a magic number for bf16

MAGIC = """
#include <cuda_bf16.h>
__device__ void numbers(unsigned word, __nv_bfloat162 (&pair)[4]) {
    #pragma unroll
    for (int j = 0; j < 4; j++) {
        unsigned bits = word >> 4 * j & 0x000f000f | 0x43004300;
        pair[j] = __hsub2(*(__nv_bfloat162 *)&bits, __floats2bfloat162_rn(128, 128));
    }
}
union Eight { __nv_bfloat162 pair[4]; uint4 all; };
extern "C" __global__ void convert(const unsigned *words, uint4 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Eight eight;
    numbers(words[i], eight.pair);
    out[i] = eight.all;
}
"""
BODY = MAGIC[MAGIC.index("        unsigned bits") : MAGIC.index("    }\n}")]
ONE_BY_ONE = """
        unsigned short low = word >> 4 * j & 15 | 0x4300, high = word >> 4 * j + 16 & 15 | 0x4300;
        __nv_bfloat16 magic = __float2bfloat16(128);
        pair[j] = __halves2bfloat162(__hsub(*(__nv_bfloat16 *)&low, magic), __hsub(*(__nv_bfloat16 *)&high, magic));
"""

# Exercise 3: the mended product

SIGNED = """
extern "C" __global__ void product(const unsigned *words, const float *x, float *y, int rows, int cols) {
    int lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    int n = (cols + 15) / 16;
    float sum = 0;
    for (int k = lane; k < n; k += 32) {
        unsigned word = words[(long long)row * n + k];
        for (int i = 0; i < 16 && 16 * k + i < cols; i++) {
            int code = word >> 2 * i & 3;
            code = (code ^ 2) - 2;
            sum += code * x[16 * k + i];
        }
    }
    for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
    if (lane == 0) y[row] = sum;
}
"""
SIGN = "            code = (code ^ 2) - 2;\n"
FIELD = "int code = word >> 2 * i & 3;"
LOAD = "        unsigned word = words[(long long)row * n + k];\n"

# Exercise 4: fold the zero point

FOLDED = """
#include <cuda_fp16.h>
extern "C" __global__ void product(const unsigned *words, const __half *scale, const __half *zero, const float *x,
                                   float *y, int rows, int cols) {
    int lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    int groups = (cols + 127) / 128;
    float sum = 0;
    for (int k = lane; k < cols / 8; k += 32) {
        unsigned word = words[row * (cols / 8) + k];
        __half s = scale[row * groups + k / 16], z = zero[row * groups + k / 16];
        float part = 0;
        __half2 bias = __half2half2(__hadd(z, __float2half(1024)));
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            unsigned both = word >> 4 * i & 0x000f000f | 0x64006400;
            __half2 pair = *(__half2 *)&both;
            float x0 = x[8 * k + i], x1 = x[8 * k + i + 4];
            float2 w = __half22float2(__hsub2(pair, bias));
            part += w.x * x0;
            part += w.y * x1;
        }
        sum += __half2float(s) * part;
    }
    for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
    if (lane == 0) y[row] = sum;
}
"""
BIAS = "__half2 bias = __half2half2(__hadd(z, __float2half(1024)));"
WEIGHTS = "float2 w = __half22float2(__hsub2(pair, bias));"
ADD = "            part += w.x * x0;\n            part += w.y * x1;\n"
SCALED = "sum += __half2float(s) * part;"
PART = FOLDED[FOLDED.index("        float part") : FOLDED.index("    for (int far")]
BY_INTEGERS = """        float part = 0;
        int whole = (int)__half2float(z);
        #pragma unroll
        for (int i = 0; i < 8; i++) part += (float)((int)(word >> 4 * i & 15) - whole) * x[8 * k + i];
        sum += __half2float(s) * part;
    }
"""
TAKES_OFF = "sum += __half2float(s) * (part - (1024 + __half2float(z)) * xs);"

# Exercise 5: interleave


def interleave(q, *, axes=(0, 1, 3, 2, 5, 4), last=(2, 32, 8, 2), fill=0, dtype=np.uint32, short=False):
    rows, cols = q.shape
    steps = max(1, cols // 1024) if short else -(-cols // 1024)
    padded = np.full((rows, steps * 1024), fill, dtype)
    padded[:, :cols] = q[:, : steps * 1024]
    ordered = padded.reshape(rows, -1, *last).transpose(axes)
    shifts = (2 * np.arange(16)).astype(dtype)
    words = np.bitwise_or.reduce(ordered.reshape(rows, steps, 32, 2, 16) << shifts, axis=4)
    return words.astype(np.uint32)


def _interleave(**mistake):
    return lambda q: interleave(q, **mistake)


def along_rows(q):
    """Interleaves the rows of the matrix, where columns were asked for."""
    turned = np.resize(np.roll(q, 1, axis=0).T, q.shape) if len(q) > 1 else q[:, ::-1]
    return interleave(np.ascontiguousarray(turned))


def in_q(q):
    words = interleave(q)
    q += 1
    return words


# Exercise 6: digits with signs

DIGITS = """
__device__ void digits_of(const int (&whole)[4], unsigned (&digits)[3]) {
    unsigned v[4];
    for (int i = 0; i < 4; i++) v[i] = whole[i] + 0x8080;
    for (int k = 0; k < 3; k++) {
        unsigned pick = k | k + 4 << 4;
        unsigned first = __byte_perm(v[0], v[1], pick), second = __byte_perm(v[2], v[3], pick);
        digits[k] = __byte_perm(first, second, 0x5410);
        if (k < 2) digits[k] ^= 0x80808080;
    }
}
extern "C" __global__ void write_digits(const int4 *whole, unsigned *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int4 four = whole[i];
    const int numbers[4] = {four.x, four.y, four.z, four.w};
    unsigned digits[3];
    digits_of(numbers, digits);
    for (int k = 0; k < 3; k++) out[k * n + i] = digits[k];
}
"""
XOR = "        if (k < 2) digits[k] ^= 0x80808080;\n"
MAKE = DIGITS[DIGITS.index("    unsigned v[4];") : DIGITS.index("}\nextern")]
ONE_DIGIT_AT_A_TIME = """    for (int k = 0; k < 3; k++) digits[k] = 0;
    for (int i = 0; i < 4; i++) {
        int rest = whole[i];
        for (int k = 0; k < 3; k++) {
            int digit = (signed char)rest;
            digits[k] |= (digit & 255) << 8 * i;
            rest = (rest - digit) / 256;
        }
    }
"""
SHIFTED = """    for (int k = 0; k < 3; k++) {
        digits[k] = 0;
        for (int i = 0; i < 4; i++)
            digits[k] |= (unsigned)(whole[i] + (k == 0 ? 0 : k == 1 ? 0x80 : 0x8080) >> 8 * k & 255) << 8 * i;
    }
"""

RIGHT = {1: (pack, unpack), 2: MAGIC, 3: SIGNED, 4: FOLDED, 5: interleave, 6: DIGITS}

WRONG = {
    1: {
        "high field first, both ways: the round trip passes": (
            (_pack(reverse=True), _unpack(reverse=True)),
            "wrong at pack, 4 bits, 1 × 9 codes, the example: word [0, 0] is 0x12345678, expected 0x87654321",
        ),
        "the last, short word is dropped": (
            (_pack(short=True), unpack),
            "the example: pack's result has shape (1, 1), expected (1, 2)",
        ),
        "shifts in uint8: whatever is past bit 7 is lost": (
            (_pack(dtype=np.uint8), unpack),
            "wrong at pack, 4 bits, 1 × 9 codes, the example: word [0, 0] is 0x00000021",
        ),
        "the end of a row is filled with ones": (
            (_pack(fill=1), unpack),
            "wrong at pack, 4 bits, 1 × 9 codes, the example: word [0, 1] is 0x11111119",
        ),
        "the end of a row is never set": (
            (left_empty, unpack),
            "wrong at pack, 4 bits, 1 × 9 codes, the example: word [0, 1] is 0xfffffff9, expected 0x00000009",
        ),
        "rows run on into each other": ((all_rows_in_one, unpack), "wrong at pack, "),
        "the mask is too wide": ((pack, _unpack(keep=8)), "wrong at unpack, 4 bits, 1 × 9 codes, the example"),
        "the way back begins at the other end": (
            (pack, _unpack(reverse=True)),
            "wrong at unpack, 4 bits, 1 × 9 codes, the example: code [0, 0] is 8, expected 1",
        ),
        "padding comes back as codes": (
            (pack, lambda words, bits, cols: unpack(words, bits, 32 // bits * words.shape[1])),
            "unpack's result has shape (1, 16), expected (1, 9)",
        ),
        "codes of 32 bits": ((pack, _unpack(dtype=np.uint32)), "unpack's result has dtype uint32, expected uint8"),
        "q is used up": ((in_place, unpack), "pack changed q"),
    },
    2: {
        "the code is left at bit 4, where it does not fit beside an exponent": (
            changed(MAGIC, ("word >> 4 * j & 0x000f000f", "(j ? word >> 4 * j - 4 : word << 4) & 0x00f000f0")),
            "wrong at all codes in place 0, 0 beside them: code 0 of the word 0x00000001 is 1, and became 16",
        ),
        "the magic number of fp16": (
            changed(MAGIC, ("0x43004300", "0x64006400")),
            "wrong at all codes in place 0, 0 beside them: code 0 of the word 0x00000000 is 0, and became 9",
        ),
        "the mask keeps two codes": (
            changed(MAGIC, ("0x000f000f", "0x00ff00ff")),
            "wrong at all codes in place 1, 0 beside them: code 0 of the word 0x00000010 is 0, and became 16",
        ),
        "subtracts 8 more, as if codes had signs": (
            changed(MAGIC, ("_rn(128, 128)", "_rn(136, 136)")),
            "wrong at all codes in place 0, 0 beside them: code 0 of the word 0x00000000 is 0, and became -8",
        ),
        "pairs of neighbours in place of codes four apart": (
            changed(
                MAGIC,
                ("word >> 4 * j & 0x000f000f", "(word >> 8 * j & 15 | (word >> 8 * j + 4 & 15) << 16)"),
            ),
            "wrong at all codes in place 1, 0 beside them",
        ),
        "the halves the wrong way round": (
            changed(MAGIC, ("word >> 4 * j &", "(word << 16 | word >> 16) >> 4 * j &")),
            "wrong at all codes in place 0, 0 beside them: code 0 of the word 0x00000001 is 1, and became 0",
        ),
        "the last pair is forgotten": (
            changed(MAGIC, ("j < 4", "j < 3")),
            "wrong at all codes in place ",
        ),
        "the upper half of each pair is 0": (
            changed(MAGIC, ("word >> 4 * j & 0x000f000f | 0x43004300", "(word >> 4 * j) % 16 + 0x43004300")),
            "wrong at all codes in place 4, 0 beside them",
        ),
        "converts integers: right, and counted": (
            changed(
                MAGIC,
                (
                    BODY,
                    "        pair[j] = __halves2bfloat162(__int2bfloat16_rn(word >> 4 * j & 15), "
                    "__int2bfloat16_rn(word >> 4 * j + 16 & 15));\n",
                ),
            ),
            "right, but the compiled code converts from integers (cvt.rn.bf16.s32)",
        ),
        "one code at a time: right, and more instructions": (
            changed(MAGIC, (BODY, ONE_BY_ONE)),
            "instructions; wanted: at most 42, two codes at a time",
        ),
    },
    3: {
        "a field that is shifted and masked is never negative": (
            changed(SIGNED, (SIGN, "")),
            "wrong at a weight of -1 in place 0: y[0] is ",
        ),
        "shifted to the top and down again, without a sign to copy": (
            changed(SIGNED, (FIELD, "int code = word << 30 - 2 * i >> 30;"), (SIGN, "")),
            "wrong at a weight of -1 in place 0: y[0] is ",
        ),
        "as it was handed over: -2 stays 2": (
            changed(SIGNED, (SIGN, "            if (code > 2) code -= 4;\n")),
            "wrong at a weight of -2 in place 0: y[0] is ",
        ),
        "flips the bit, and does not subtract it": (
            changed(SIGNED, ("(code ^ 2) - 2", "code ^ 2")),
            "wrong at 16 weights of 1: y[0] is ",
        ),
        "flips both bits": (changed(SIGNED, ("code ^ 2", "code ^ 3")), "wrong at 16 weights of 1: y[0] is "),
        "right for all places but the last": (
            changed(SIGNED, (FIELD, "int code = i < 15 ? word >> 2 * i & 3 : word >> 31;")),
            "wrong at 16 weights of 1",
        ),
        "the sign of the last place alone is forgotten": (
            changed(SIGNED, (SIGN, "            if (i < 15) code = (code ^ 2) - 2;\n")),
            "wrong at a weight of -1 in place 15: y[0] is ",
        ),
        "the magnitude with a sign in front": (
            changed(SIGNED, (SIGN, "            code = code & 2 ? -(code & 1) : code;\n")),
            "wrong at a weight of -2 in place 0: y[0] is ",
        ),
        "64 words of a row only": (
            changed(SIGNED, ("k < n", "k < min(n, 64)")),
            "wrong at 8 × 2048 weights: 8 of 8 elements of y differ. y[0] is",
        ),
        "dropped tail: only whole words": (
            changed(
                SIGNED,
                ("int n = (cols + 15) / 16;", "int n = (cols + 15) / 16, whole = cols / 16;"),
                ("k < n", "k < whole"),
            ),
            "random weights: y[",
        ),
        "loads the word for each code: right, and sixteen times the requests": (
            changed(
                SIGNED,
                (LOAD, ""),
                (FIELD, "int code = ((volatile const unsigned *)words)[(long long)row * n + k] >> 2 * i & 3;"),
            ),
            "each word is loaded once",
        ),
        "asks for each code in turn: right, and slow": (
            changed(
                SIGNED,
                (
                    SIGN,
                    "            float weights[4] = {0, 1, -2, -1}, weight = 0;\n            #pragma unroll\n"
                    "            for (int c = 0; c < 4; c++)\n                if (code == c) weight = weights[c];\n",
                ),
                ("sum += code * x", "sum += weight * x"),
            ),
            "wanted: at most one more",
        ),
    },
    4: {
        "one FMA, whose constant is rounded": (
            changed(
                FOLDED,
                (
                    BIAS,
                    "__half2 ss = __half2half2(s), bias = __half2half2(__hadd(z, __float2half(1024)));\n"
                    "        bias = __hneg2(__hmul2(ss, bias));",
                ),
                (WEIGHTS, "float2 w = __half22float2(__hfma2(pair, ss, bias));"),
                (SCALED, "sum += part;"),
            ),
            "wrong at rows = ",
        ),
        "the zero is forgotten": (
            changed(FOLDED, ("__hadd(z, __float2half(1024))", "__float2half(1024)")),
            "wrong at rows = ",
        ),
        "the magic number is forgotten": (
            changed(FOLDED, ("__hadd(z, __float2half(1024))", "z")),
            "wrong at rows = ",
        ),
        "the zero of the first group for all": (
            changed(FOLDED, ("z = zero[row * groups + k / 16]", "z = zero[row * groups]")),
            "wrong at rows = ",
        ),
        "sums in fp16": (
            changed(
                FOLDED,
                ("float part = 0;", "__half2 all = __half2half2(__float2half(0)), xs = all;"),
                (BIAS, ""),
                (WEIGHTS, "__half2 both_x = __floats2half2_rn(x0, x1);"),
                (ADD, "            all = __hfma2(pair, both_x, all), xs = __hadd2(xs, both_x);\n"),
                (
                    SCALED,
                    "sum += __half2float(s) * (__low2float(all) + __high2float(all) "
                    "- (1024 + __half2float(z)) * (__low2float(xs) + __high2float(xs)));",
                ),
            ),
            "wrong at rows = ",
        ),
        "the weights in the wrong order": (
            changed(FOLDED, ("part += w.x * x0;", "part += w.y * x0;"), ("part += w.y * x1;", "part += w.x * x1;")),
            "wrong at rows = ",
        ),
        "one weight of two": (
            changed(FOLDED, ("            part += w.y * x1;\n", "")),
            "wrong at rows = ",
        ),
        "the scale is forgotten": (changed(FOLDED, (SCALED, "sum += part;")), "wrong at rows = "),
        "subtracts in fp32, one weight at a time: right, and counted": (
            changed(
                FOLDED,
                (BIAS, "float bias = 1024 + __half2float(z);"),
                (WEIGHTS, "float2 w = __half22float2(pair);"),
                (ADD, "            part += (w.x - bias) * x0;\n            part += (w.y - bias) * x1;\n"),
            ),
            "instructions; wanted: at most 8.1",
        ),
        "converts integers: right, and counted": (
            changed(FOLDED, (PART, BY_INTEGERS)),
            "right, but the compiled code converts from integers (cvt.rn.f32.s32)",
        ),
        "subtracts twice: right, and counted": (
            changed(
                FOLDED,
                (BIAS, "__half2 thousand = __half2half2(__float2half(1024)), zz = __half2half2(z);"),
                ("__hsub2(pair, bias)", "__hsub2(__hsub2(pair, thousand), zz)"),
            ),
            "instructions; wanted: at most 8.1",
        ),
        "the sum of x for each word: right, and counted": (
            changed(
                FOLDED,
                ("float part = 0;", "float part = 0, xs = 0;"),
                (BIAS, ""),
                ("__hsub2(pair, bias)", "pair"),
                ("part += w.y * x1;", "part += w.y * x1, xs += x0, xs += x1;"),
                (SCALED, TAKES_OFF),
            ),
            "instructions; wanted: at most 8.1",
        ),
    },
    5: {
        "as they come: 16 neighbours in a word": (
            _interleave(axes=(0, 1, 3, 2, 4, 5)),
            "with your words the kernel's y[",
        ),
        "pairs eight apart in place of neighbours": (
            _interleave(last=(2, 32, 2, 8), axes=(0, 1, 3, 2, 5, 4)),
            "with your words the kernel's y[",
        ),
        "32 neighbours for a lane": (
            _interleave(last=(32, 2, 8, 2), axes=(0, 1, 2, 3, 5, 4)),
            "with your words the kernel's y[",
        ),
        "words and lanes in the wrong order": (
            _interleave(axes=(0, 1, 2, 3, 5, 4)),
            "with your words the kernel's y[",
        ),
        "right only for a multiple of 1024 columns": (
            _interleave(short=True),
            "3 × 1025 codes: the result has shape (3, 1, 32, 2), expected (3, 2, 32, 2)",
        ),
        "rows in place of columns": (along_rows, "wrong at "),
        "behind the last column, weights of 0 in place of codes of 0": (
            _interleave(fill=1),
            "wrong at 1 × 16 codes: word [0, 0, 0, 1] is 0x55555555, expected 0x00000000",
        ),
        "shifts in uint8": (_interleave(dtype=np.uint8), "wrong at "),
        "one word for a lane": (
            lambda q: interleave(q)[..., 0],
            "1 × 16 codes: the result has shape (1, 1, 32), expected (1, 1, 32, 2)",
        ),
        "q is changed": (in_q, "interleave changed q"),
        "nothing": (lambda q: None, "the result is None, expected an array"),
    },
    6: {
        "bytes as they are: 128 and more count 256 less, and nobody makes up for it": (
            changed(DIGITS, (" + 0x8080", ""), (XOR, "")),
            "the example: the number 128 in place 2 has the digits -128, 0, 0, the lowest first; expected -128, 1, 0",
        ),
        "the 128 that was added stays": (
            changed(DIGITS, (XOR, "")),
            "wrong at the example: the number 1 in place 0 has the digits -127, -128, 0",
        ),
        "takes off what was never added": (
            changed(DIGITS, (" + 0x8080", "")),
            "wrong at the example: the number 1 in place 0 has the digits -127, -128, 0",
        ),
        "the highest digit loses 128, too": (
            changed(DIGITS, ("if (k < 2) digits", "digits")),
            "wrong at the example: the number 1 in place 0 has the digits 1, 0, -128",
        ),
        "carries out of the lowest digit alone": (
            changed(DIGITS, ("0x8080;", "0x80;"), ("k < 2", "k < 1")),
            "the number 32640 in place 0 has the digits -128, -128, 0, the lowest first; expected -128, -128, 1",
        ),
        "the order of the kernel's layout: 0, 2, 1, 3": (
            changed(
                DIGITS,
                ("__byte_perm(v[0], v[1], pick), second", "__byte_perm(v[0], v[2], pick), second"),
                ("__byte_perm(v[2], v[3], pick)", "__byte_perm(v[1], v[3], pick)"),
            ),
            "wrong at the example: the number 127 in place 1 has the digits -128, 1, 0",
        ),
        "the digits of the magnitude": (
            changed(DIGITS, (" + 0x8080;", " + (whole[i] < 0 ? -0x8080 : 0x8080);")),
            "wrong at the example: the number -1 in place 3 has the digits -1, -1, -1",
        ),
        "the third digit is forgotten": (
            changed(DIGITS, ("digits[k] = __byte_perm(first", "digits[k] = k > 1 ? 0 : __byte_perm(first")),
            "wrong at numbers in place 0, 0 beside them: the number 32640 in place 0",
        ),
        "one digit at a time: right, and counted": (
            changed(DIGITS, (MAKE, ONE_DIGIT_AT_A_TIME)),
            "instructions; wanted: at most 48",
        ),
        "shifts and masks: right, and counted": (
            changed(DIGITS, (MAKE, SHIFTED)),
            "instructions; wanted: at most 48",
        ),
    },
}
