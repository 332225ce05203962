"""Wrong answers to the exercises of chapter 16. Each says the mistake that it makes.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer, and words that
the check's verdict must hold. RIGHT has the answers that they were made from.
"""

import numpy as np

from wrong.paged_attention import made
from wrong.warp_gemv import changed

# Exercise 1: absorb the projections

DECODE = """
def latent_decode(q_nope, q_rope, cache, w_uk, w_uv, scale):
    latent = w_uk.shape[2]
    q = np.concatenate([np.einsum("hd,hdl->hl", q_nope, w_uk), q_rope], axis=1)
    s = scale * (q @ cache.T)
    p = np.exp(s - s.max(axis=1, keepdims=True, initial=-1e300))
    total = p.sum(axis=1, keepdims=True)
    mixed = p @ cache[:, :latent] / np.where(total == 0, 1, total)
    return np.einsum("hl,hvl->hv", mixed, w_uv)
"""


def _decode(*changes):
    return made(DECODE, "latent_decode", *changes)


def _keys_and_values(q_nope, q_rope, cache, w_uk, w_uv, scale):
    """As the model has it: all heads' keys and values at once."""
    heads, latent = len(q_nope), w_uk.shape[2]
    c, turned = cache[:, :latent], cache[:, latent:]
    k = np.concatenate([np.einsum("tl,hdl->htd", c, w_uk), np.broadcast_to(turned, (heads, *turned.shape))], axis=2)
    s = scale * np.einsum("hd,htd->ht", np.concatenate([q_nope, q_rope], axis=1), k)
    p = np.exp(s - s.max(axis=1, keepdims=True, initial=-1e300))
    total = p.sum(axis=1, keepdims=True)
    v = np.einsum("tl,hvl->htv", c, w_uv)
    return np.einsum("ht,htv->hv", p / np.where(total == 0, 1, total), v)


def _head_by_head(q_nope, q_rope, cache, w_uk, w_uv, scale):
    heads = range(len(q_nope))
    parts = [_decode()(*(a[h : h + 1] for a in (q_nope, q_rope)), cache, w_uk[h : h + 1], w_uv[h : h + 1], scale)
             for h in heads]  # fmt: skip
    return np.concatenate(parts)


# Exercise 2: bytes and flops


def _latent_cost(cache_cards=False, rounded=64, token=576, numbers=576 + 512, q=True, up=True, of_tile=False):
    def latent_cost(batch, tokens, heads, cards):
        mine = -(-heads // cards) if up else max(1, heads // cards)
        rows = rounded * -(-mine // rounded)
        of = tokens / cards if cache_cards else tokens
        moved = 2 * batch * (token * of + q * (576 + 512) * (rows if of_tile else mine))
        return moved, 2 * numbers * batch * tokens * rows

    return latent_cost


def _ridge_heads(each=2 * (576 + 512) / 1152, cast=np.ceil):
    def ridge_heads(read, flops):
        return int(cast(flops / read / each))

    return ridge_heads


# Exercise 3: exponents

TIMES = """
def times_power(x, n):
    n = np.rint(np.minimum(np.fmax(n, -30), 30)).astype(np.int32)
    bits = x.view(np.int32)
    e, sign = bits >> 23 & 255, bits & np.int32(-(2**31))
    moved = bits + (n << 23)
    moved = np.where((e == 0) | (e + n < 1), sign, moved)
    moved = np.where((e > 0) & (e + n > 254), sign | np.int32(255 << 23), moved)
    moved = np.where(e == 255, bits, moved)
    return moved.view(np.float32)
"""
ROUND = "n = np.rint(np.minimum(np.fmax(n, -30), 30)).astype(np.int32)"
LAST = "    moved = np.where(e == 255, bits, moved)\n"
FLOW = "np.where((e > 0) & (e + n > 254), sign | np.int32(255 << 23), moved)"
AWAY = "(np.sign(n) * np.floor(np.abs(n) + 0.5))"
ZERO = "np.where((e == 0) | (e + n < 1), sign, moved)"


def _times(*changes):
    return made(TIMES, "times_power", *changes)


def _by_a_product(x, n):
    return np.asarray(x * np.exp2(np.rint(np.minimum(np.fmax(n, -30), 30))), np.float32)


def _by_ldexp(x, n):
    return np.ldexp(x, np.rint(np.minimum(np.fmax(n, -30), 30)).astype(np.int32))


def _in_float64(take):
    """By a product of numbers that are taken out of the array; all else, NaN among it, is right."""

    def times_power(x, n):
        with np.errstate(all="ignore"):
            size = take(x) * 2.0 ** np.rint(np.minimum(np.fmax(n, -30), 30))
            size = np.where(np.abs(size) < 2.0**-126, np.copysign(0, size), size).astype(np.float32)
        bits = x.view(np.int32)
        e, sign = bits >> 23 & 255, bits & np.int32(-(2**31))
        bits = np.where(e == 0, sign, np.where(e == 255, bits, size.view(np.int32)))
        return bits.view(np.float32)

    return times_power


# Exercise 4: a reference that may be stale

ATTEND = """
def attend(s, v, rescale):
    sums, total, r = np.zeros(v.shape[2], np.float32), np.float32(0), None
    for t, values in zip(s, v):
        top = t.max()
        if top == -np.inf:
            continue
        if r is None or top > r + 8:
            new = np.ceil(top)
            if r is not None:
                sums, total = rescale(sums, r - new), rescale(total, r - new)
            r = new
        p = np.exp2(t - np.float32(r))
        sums, total = sums + p @ values, total + p.sum()
    return sums / (total if total > 0 else 1)
"""
DUE = "if r is None or top > r + 8:"
BOTH = "sums, total = rescale(sums, r - new), rescale(total, r - new)"


def _attend(*changes):
    return made(ATTEND, "attend", *changes)


def _online(call=lambda rescale, sums, total, n: None):
    """Online softmax as ever, in float64: the true maximum, and products."""

    def attend(s, v, rescale):
        sums, total, r, at = np.zeros(v.shape[2]), 0.0, -np.inf, None
        for t, values in zip(s.astype(np.float64), v):
            if (top := t.max()) == -np.inf:
                continue
            if at is None or top > at + 8:
                if at is not None:
                    call(rescale, np.float32(sums), np.float32(total), at - np.ceil(top))
                at = np.ceil(top)
            new = max(r, top)
            by, p = np.exp2(r - new), np.exp2(t - new)
            sums, total, r = by * sums + p @ values, by * total + p.sum(), new
        return sums / (total or 1)

    return attend


def _called_for_show(rescale, sums, total, n):
    rescale(sums, n)
    rescale(total, n)


# Exercise 5: find the bug

MERGED = r"""
__device__ unsigned in_order(float v) {
    const unsigned bits = __float_as_uint(v);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}
__device__ float from_order(unsigned v) { return __uint_as_float(v >> 31 ? v & 0x7fffffff : ~v); }

__device__ void meet(unsigned *arrived, unsigned count) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(arrived, 1);
        while (*(volatile unsigned *)arrived < count) {
        }
        __threadfence();
    }
    __syncthreads();
}

extern "C" __global__ void
merged(const float *values, const float *maxima, const float *sums, float *place, float *total,
       unsigned *highest, unsigned *arrived, float *out, int rows) {
    const int part = blockIdx.x, parts = gridDim.x, i = threadIdx.x;
    for (int row = i; row < rows; row += 64)
        if (sums[part * rows + row] > 0) atomicMax(highest + row, in_order(maxima[part * rows + row]));
    for (int at = 64 * part + i; at < 64 * rows; at += 64 * parts) place[at] = 0;
    for (int row = 64 * part + i; row < rows; row += 64 * parts) total[row] = 0;
    meet(arrived, parts);
    for (int row = 0; row < rows; row++) {
        const int mine = part * rows + row;
        if (sums[mine] == 0) continue; // no token
        const float by = exp2f(maxima[mine] - from_order(highest[row]));
        atomicAdd(place + 64 * row + i, by * values[64 * mine + i]);
        if (i == 0) atomicAdd(total + row, by * sums[mine]);
    }
    meet(arrived, 2 * parts);
    for (int at = 64 * part + i; at < 64 * rows; at += 64 * parts)
        out[at] = total[at / 64] > 0 ? place[at] / total[at / 64] : 0;
}
"""
FIRST = "    __syncthreads();\n    if (threadIdx.x == 0) {\n"
RELEASE = "        __threadfence();\n        atomicAdd"
ACQUIRE = "        }\n        __threadfence();\n"
MEETS = "meet(arrived, 2 * parts);"
PLAIN = "return bits >> 31 ? ~bits : bits | 0x80000000;"
BACK = "v >> 31 ? v & 0x7fffffff : ~v"
AGREE = "atomicMax(highest + row, in_order(maxima[part * rows + row]));"
HALF = (  # of negative ones, the lowest is the highest
    (PLAIN, "return bits >> 31 ? bits & 0x7fffffff : bits | 0x80000000;"),
    (BACK, "v >> 31 ? v & 0x7fffffff : v | 0x80000000"),
)
EMPTY = "        if (sums[mine] == 0) continue; // no token\n"
ADD = "atomicAdd(place + 64 * row + i, by * values[64 * mine + i]);"
ONE = "if (i == 0) atomicAdd(total + row, by * sums[mine]);"


def _merged(*changes):
    return changed(MERGED, *changes)


RIGHT = {
    1: _decode(),
    2: (_latent_cost(), _ridge_heads()),
    3: _times(),
    4: _attend(),
    5: MERGED,
}
WRONG = {
    1: {
        "scale of the absorbed query": (
            _decode(("s = scale * (q @ cache.T)", "s = (q @ cache.T) * q.shape[1] ** -0.5")),
            "out[",
        ),
        "without the turned part": (
            _decode(("q @ cache.T", "q[:, :latent] @ cache[:, :latent].T")),
            "out[",
        ),
        "turned key in front": (
            _decode(
                ('[np.einsum("hd,hdl->hl", q_nope, w_uk), q_rope]', '[q_rope, np.einsum("hd,hdl->hl", q_nope, w_uk)]')
            ),
            "out[",
        ),
        "without a maximum": (
            _decode(("s - s.max(axis=1, keepdims=True, initial=-1e300)", "s")),
            "overflow",
        ),
        "divides by nothing": (_decode(("np.where(total == 0, 1, total)", "total")), "with 3 heads and 0 tokens: "),
        "one maximum for all heads": (
            _decode(("s.max(axis=1, keepdims=True, initial=-1e300)", "s.max(initial=-1e300)")),
            "with scores beyond 1000: ",
        ),
        "a maximum of at least 0": (_decode(("initial=-1e300", "initial=0")), "with one token, "),
        "another head's values": (_decode(("hl,hvl->hv", "hl,gvl->hv")), "out["),
        "keys and values of all heads": (_keys_and_values, "nothing of all heads' keys or values is made"),
        "head by head": (_head_by_head, "takes steps for each head or token"),
        "writes to the cache": (
            _decode(("    s = scale", "    cache *= 1.5\n    s = scale")),
            "your function wrote to cache",
        ),
    },
    2: {
        "the cache is divided": ((_latent_cost(cache_cards=True), _ridge_heads()), "bytes are "),
        "rows as they are": ((_latent_cost(rounded=1), _ridge_heads()), "flops are "),
        "tiles of 128 rows": ((_latent_cost(rounded=128), _ridge_heads()), "flops are "),
        "values are read as well": ((_latent_cost(token=576 + 512), _ridge_heads()), "bytes are "),
        "all of a token is a value": ((_latent_cost(numbers=2 * 576), _ridge_heads()), "flops are "),
        "the cache alone": ((_latent_cost(q=False), _ridge_heads()), "bytes are "),
        "queries of rows that nobody needs": ((_latent_cost(of_tile=True), _ridge_heads()), "bytes are "),
        "rounded down": ((_latent_cost(up=False), _ridge_heads()), "latent_cost("),
        "a head too few": ((_latent_cost(), _ridge_heads(cast=np.floor)), "ridge_heads("),
        "one flop for a multiply-add": ((_latent_cost(), _ridge_heads(each=1088 / 1152)), "ridge_heads("),
        "two flops a byte": ((_latent_cost(), _ridge_heads(each=2)), "ridge_heads("),
        "no whole number": ((_latent_cost(), lambda read, flops: flops / read / (2 * 1088 / 1152)), "a whole number"),
    },
    3: {
        "zero is moved": (_times((ZERO, "np.where(e + n < 1, sign, moved)")), "x = 0, "),
        "underflow borrows from the sign": (_times((ZERO, "np.where(e == 0, sign, moved)")), "differ"),
        "zeros lose their sign": (
            _times((ZERO, "np.where((e == 0) | (e + n < 1), 0, moved).astype(np.int32)")),
            "x = -",
        ),
        "overflow is not seen": (_times((FLOW, "moved")), "differ"),
        "infinity and NaN are moved": (_times((LAST, "")), "differ"),
        "overflow from 255 on is late": (_times(("e + n > 254", "e + n > 255")), "differ"),
        "normal numbers from 0 on": (_times(("e + n < 1", "e + n < 0")), "differ"),
        "truncated": (_times((ROUND, ROUND.replace("np.rint(", "np.trunc("))), "n = "),
        "half away from zero": (
            _times((ROUND, f"n = np.minimum(np.fmax(n, -30), 30)\n    n = {AWAY}.astype(np.int32)")),
            "n = 2.5",
        ),
        "cast first": (_times((ROUND, "n = np.clip(np.rint(n).astype(np.int32), -30, 30)")), "invalid value"),
        "NaN is not seen": (_times(("np.fmax(n, -30)", "np.maximum(n, -30)")), "invalid value"),
        "NaN is 30": (_times(("np.minimum(np.fmax(n, -30), 30)", "np.fmax(np.fmin(n, 30), -30)")), "n = nan"),
        "by a product": (_by_a_product, "calls np.multiply on x"),
        "by ldexp": (_by_ldexp, "calls np.ldexp on x"),
        "other NaN": (
            _times((LAST, LAST.replace("bits,", "np.where(bits << 9 != 0, sign | 0x7FC00000, bits),"))),
            "NaN (bits 0x7f800001), n = 0 you gave NaN (bits 0x7fc00000)",
        ),
        "by a product of a plain array": (
            _in_float64(lambda x: x.view(np.ndarray).astype(np.float64)),
            "calls view on x",
        ),
        "by a product in float64": (_in_float64(lambda x: x.astype(np.float64)), "calls astype on x"),
        "by a product of a list": (_in_float64(lambda x: np.reshape(x.tolist(), x.shape)), "calls tolist on x"),
        "in place": (
            _times(("    e, sign", "    bits += n == 3\n    e, sign")),
            "wrote to x",
        ),
    },
    4: {
        "a reference that is no whole number": (_attend(("np.ceil(top)", "top")), "takes whole numbers"),
        "slack of 7": (_attend((DUE, "if r is None or top > r + 7:")), "rescale is called"),
        "at 8, too": (_attend((DUE, "if r is None or top >= r + 8:")), "exactly 8 above"),
        "whenever a score is higher": (_attend((DUE, "if r is None or top > r:")), "rescale is called"),
        "in each tile": (_attend((DUE, "if True:")), "rescale"),
        "never": (_attend((DUE, "if r is None:")), "overflow"),
        "the sum of weights is forgotten": (_attend((BOTH, "sums = rescale(sums, r - new)")), "out["),
        "slack of 60": (_attend((DUE, "if r is None or top > r + 60:")), "rescale is called with n = []"),
        "online softmax as ever": (_online(), "rescale is called with n = []"),
        "products in place of rescale": (
            _attend((BOTH, "sums, total = sums * np.exp2(r - new), total * np.exp2(r - new)")),
            "rescale is called with n = []",
        ),
        "a product for the sum of weights": (
            _attend((BOTH, "sums, total = rescale(sums, r - new), total * np.exp2(r - new)")),
            "and for all of the sums",
        ),
        "rounded down": (_attend(("np.ceil(top)", "np.floor(top)")), "rescale is called with n = "),
        "rescale is called for show": (_online(_called_for_show), "relative to the reference"),
        "the wrong way round": (_attend((BOTH, BOTH.replace("r - new", "new - r"))), "sums become less"),
        "no reference": (_attend((DUE, "if r is None:"), ("np.ceil(top)", "np.float32(0)")), "overflow"),
        "the first reference is 0": (
            _attend(("total, r = ", "total = "), ("np.float32(0), None", "np.float32(0)\n    r = 0.0")),
            "with ",
        ),
        "a tile of -inf": (_attend(("        if top == -np.inf:\n            continue\n", "")), "with a "),
        "divides by nothing": (_attend(("(total if total > 0 else 1)", "total")), "with no score at all"),
        "in float64": (_attend(("np.zeros(v.shape[2], np.float32)", "np.zeros(v.shape[2])")), "float64"),
    },
    5: {
        "bits as they are": (_merged((PLAIN, "return bits;"), (BACK, "v")), "wrong at parts = 7"),
        "negative ones alone": (
            _merged((PLAIN, "return bits >> 31 ? ~bits : bits;"), (BACK, "v")),
            "wrong at parts = ",
        ),
        "negative ones the wrong way round": (_merged(*HALF), "rows = 4, maxima about -900"),
        "a row without tokens is divided": (
            _merged(("total[at / 64] > 0 ? place[at] / total[at / 64] : 0", "place[at] / total[at / 64]")),
            "no token in row 0",
        ),
        "no barrier in front": (_merged((FIRST, "    if (threadIdx.x == 0) {\n")), "race on "),
        "no barrier behind": (_merged(("    }\n    __syncthreads();\n}", "    }\n}")), "race on "),
        "the second meeting waits for nobody": (_merged((MEETS, "meet(arrived, parts);")), "wrong at parts = 520"),
        "the second meeting waits for too many": (_merged((MEETS, "meet(arrived, 3 * parts);")), "at parts = 1"),
        "no second meeting": (_merged((MEETS, "__syncthreads();")), "race on "),
        "no release": (_merged((RELEASE, "        atomicAdd")), "race on "),
        "no acquire": (_merged((ACQUIRE, "        }\n")), "race on "),
        "no fence of the grid": (_merged((RELEASE, RELEASE.replace("fence();", "fence_block();"))), "race on "),
        "added by plain stores": (_merged((ADD, "place[64 * row + i] += by * values[64 * mine + i];")), "race on "),
        "all threads add weights": (
            _merged((ONE, "atomicAdd(total + row, by * sums[mine] / 64);")),
            "additions and maxima",
        ),
        "added 64 times": (_merged((ONE, "atomicAdd(total + row, by * sums[mine]);")), "wrong at parts = 1"),
        "its own maximum alone": (_merged((AGREE, "highest[row] = in_order(maxima[part * rows + row]);")), "race on "),
        "parts without tokens count": (_merged((EMPTY, "")), "wrong at parts = 3"),
        "nothing is cleared": (_merged((" place[at] = 0;", " ;")), "at parts = 1"),
    },
}
