"""Wrong answers to the exercises of chapter 08. Each says the mistake that it makes.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer, and words that
the check's verdict must hold. RIGHT has the answers that they were made from.
"""

import numpy as np

from wrong.five_kernels import from_source
from wrong.warp_gemv import changed

# Exercise 1: softmax over a stream


def _stream(total_corrected=True, sum_corrected=True, start=-np.inf, skip=True):
    def stream_mean(pairs):
        m, total, mixed = start, 0.0, 0.0
        for s, value in pairs:
            if skip and s == -np.inf:
                continue
            m_new = max(m, s)
            correction, p = np.exp(m - m_new), np.exp(s - m_new)
            total = (correction if total_corrected else 1) * total + p
            mixed = (correction if sum_corrected else 1) * mixed + p * value
            m = m_new
        return mixed / total

    return stream_mean


def _without_maximum(pairs):
    total, mixed = 0.0, 0.0
    for s, value in pairs:
        total, mixed = total + np.exp(s), mixed + np.exp(s) * value
    return mixed / total


def _by_the_first(pairs):
    """Relative to the first score, for ever."""
    m, total, mixed = None, 0.0, 0.0
    for s, value in pairs:
        if s == -np.inf:
            continue
        m = s if m is None else m
        p = np.exp(s - m)
        total, mixed = total + p, mixed + p * value
    return mixed / total


def _in_long_double(pairs):
    """No correction, in numbers of 80 bits, whose largest is e to the 11,356."""
    total, mixed = np.longdouble(0), np.longdouble(0)
    for s, value in pairs:
        p = np.exp(np.longdouble(s))
        total, mixed = total + p, mixed + p * value
    return mixed / total


def _starts_anew(pairs):
    """With each new maximum, what was before is forgotten where it should be corrected."""
    m, total, mixed = -np.inf, 0.0, 0.0
    for s, value in pairs:
        if s > m + 3:
            m, total, mixed = s, 0.0, 0.0
        if s > -np.inf:
            p = np.exp(s - m)
            total, mixed = total + p, mixed + p * value
    return mixed / total


def _overwritten(pairs):
    m, total, mixed = -np.inf, 0.0, 0.0
    for s, value in pairs:
        if s > -np.inf:
            m_new = max(m, s)
            value *= np.exp(s - m_new)
            total, mixed, m = np.exp(m - m_new) * total + np.exp(s - m_new), np.exp(m - m_new) * mixed + value, m_new
    return mixed / total


def _in_single(pairs):
    return _stream()((np.float32(s), value.astype(np.float32)) for s, value in pairs)


def _collected(pairs):
    scores, values = zip(*pairs)
    weights = np.exp(np.array(scores) - max(scores))
    return weights @ np.array(values) / weights.sum()


def _collected_copies(pairs):
    scores, values = zip(*((s, value.tolist()) for s, value in pairs))
    weights = np.exp(np.array(scores) - max(scores))
    return weights @ np.array(values) / weights.sum()


def _stacked(pairs):
    scores, values = [], np.zeros((0, 0))
    for s, value in pairs:
        scores.append(s)
        values = np.vstack([values.reshape(-1, len(value)), value])
    weights = np.exp(np.array(scores) - max(scores))
    return weights @ values / weights.sum()


def _without_values(pairs):
    total = sum(np.exp(s) for s, _ in pairs)
    return sum(np.exp(s) * value for s, value in pairs) / total


# Exercise 2: merge


def _merge(out_a, lse_a, out_b, lse_b):
    m = max(lse_a, lse_b)
    if m == -np.inf:
        return out_a, m
    a, b = np.exp(lse_a - m), np.exp(lse_b - m)
    return (a * out_a + b * out_b) / (a + b), m + np.log(a + b)


def _forgets_empty(out_a, lse_a, out_b, lse_b):
    m = max(lse_a, lse_b)
    a, b = np.exp(lse_a - m), np.exp(lse_b - m)
    return (a * out_a + b * out_b) / (a + b), m + np.log(a + b)


def _plain_mean(out_a, lse_a, out_b, lse_b):
    return (out_a + out_b) / 2, _merge(out_a, lse_a, out_b, lse_b)[1]


def _no_maximum(out_a, lse_a, out_b, lse_b):
    a, b = np.exp(np.float64(lse_a)), np.exp(np.float64(lse_b))
    return (a * out_a + b * out_b) / (a + b), np.log(a + b)


def _by_lse(out_a, lse_a, out_b, lse_b):
    return (lse_a * out_a + lse_b * out_b) / (lse_a + lse_b), lse_a + lse_b


def _larger_lse(out_a, lse_a, out_b, lse_b):
    return _merge(out_a, lse_a, out_b, lse_b)[0], max(lse_a, lse_b)


# Exercise 3: shares


def _share(kv_len, splits, i):
    tiles = -(-kv_len // 16)
    return tuple(min(kv_len, 16 * (tiles * n // splits)) for n in (i, i + 1))


def _dropped_tail(kv_len, splits, i):
    each = kv_len // splits // 16 * 16
    return each * i, each * (i + 1)


def _last_takes_the_rest(kv_len, splits, i):
    each = kv_len // splits // 16 * 16
    return each * i, kv_len if i == splits - 1 else each * (i + 1)


def _rounded_up(kv_len, splits, i):
    each = -(-kv_len // (16 * splits)) * 16
    return min(kv_len, each * i), min(kv_len, each * (i + 1))


def _tokens_not_tiles(kv_len, splits, i):
    return kv_len * i // splits, kv_len * (i + 1) // splits


def _behind_the_end(kv_len, splits, i):
    tiles = -(-kv_len // 16)
    return 16 * (tiles * i // splits), 16 * (tiles * (i + 1) // splits)


def _tail_dropped_with_its_tile(kv_len, splits, i):
    tiles = kv_len // 16
    return 16 * (tiles * i // splits), 16 * (tiles * (i + 1) // splits)


# Exercise 4: splits


def _splits(waves=lambda blocks, room: -(-blocks // room), tokens=lambda n, s: -(-n // s), merged=True, last=False):
    def best_splits(kv_len, heads, room, step, merge):
        def time(splits):
            return waves(heads * splits, room) * tokens(kv_len, splits) * step + splits * merge * merged

        return min(range(1, kv_len + 1), key=lambda n: (time(n), -n if last else n))

    return best_splits


def _one_wave(kv_len, heads, room, step, merge):
    return max(1, min(kv_len, room // heads))


# Exercise 5: the mended kernel

STALE = r"""
#define WARPS 8
extern "C" __global__ void stale(const float *q, const float *k, const float *v, float *out, int kv_len) {
    __shared__ float ms[WARPS], totals[WARPS], sums[WARPS][64];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float q0 = q[lane], q1 = q[lane + 32];
    float m = -3e38f, total = 0, sum0 = 0, sum1 = 0;
    for (int t = warp; t < kv_len; t += WARPS) {
        const float *key = k + t * 64, *value = v + t * 64;
        float s = q0 * key[lane] + q1 * key[lane + 32];
        for (int far = 16; far > 0; far /= 2) s += __shfl_xor_sync(0xffffffff, s, far);
        if (s > m + 8) {
            total *= exp2f(m - s), sum0 *= exp2f(m - s), sum1 *= exp2f(m - s); // 1
            m = s;
        }
        const float p = exp2f(s - m);
        total += p, sum0 += p * value[lane], sum1 += p * value[lane + 32];
    }
    ms[warp] = m, totals[warp] = total;
    sums[warp][lane] = sum0, sums[warp][lane + 32] = sum1;
    __syncthreads();
    if (threadIdx.x >= 64) return;
    float highest = ms[0], weight = 0, sum = 0;
    for (int w = 1; w < WARPS; w++) highest = fmaxf(highest, ms[w]);
    for (int w = 0; w < WARPS; w++) {
        const float factor = exp2f(ms[w] - highest);
        weight += factor * totals[w], sum += factor * sums[w][threadIdx.x]; // 2
    }
    out[threadIdx.x] = sum / weight;
}
"""
CHANNEL = ", sum1 *= exp2f(m - s); // 1", ";"
TOTAL = "weight += factor * totals[w]", "weight += totals[w]"
ALWAYS = "if (s > m + 8) {", "if (s > m) {"

# Exercise 6: the online softmax

ONLINE = r"""
extern "C" __global__ void
online(const float *q, const float *k, const float *v, float *out, int kv_len, int heads) {
    int lane = threadIdx.x % 32, head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (head >= heads) return;
    float q0 = q[head * 64 + lane], q1 = q[head * 64 + lane + 32];
    float m = -1.0f / 0.0f, total = 0, sum0 = 0, sum1 = 0;
    for (int t = 0; t < kv_len; t++) {
        const float *key = k + t * 64, *value = v + t * 64;
        float s = q0 * key[lane] + q1 * key[lane + 32];
        for (int far = 16; far > 0; far /= 2) s += __shfl_xor_sync(0xffffffff, s, far);
        float m_new = fmaxf(m, s), correction = expf(m - m_new), p = expf(s - m_new);
        total = correction * total + p;
        sum0 = correction * sum0 + p * value[lane];
        sum1 = correction * sum1 + p * value[lane + 32];
        m = m_new;
    }
    out[head * 64 + lane] = sum0 / total;
    out[head * 64 + lane + 32] = sum1 / total;
}
"""
SCORE = """        float s = q0 * key[lane] + q1 * key[lane + 32];
        for (int far = 16; far > 0; far /= 2) s += __shfl_xor_sync(0xffffffff, s, far);
"""
FIRST_WALK = f"""    for (int t = 0; t < kv_len; t++) {{
        const float *key = k + t * 64;
{SCORE}        m = fmaxf(m, s);
    }}
"""
PAIRS = [  # neighbouring channels a lane, by single loads: 8 sectors would be 4 sectors twice
    ("q[head * 64 + lane]", "q[head * 64 + 2 * lane]"),
    ("q[head * 64 + lane + 32]", "q[head * 64 + 2 * lane + 1]"),
    ("key[lane] + q1 * key[lane + 32]", "key[2 * lane] + q1 * key[2 * lane + 1]"),
    ("value[lane];", "value[2 * lane];"),
    ("value[lane + 32];", "value[2 * lane + 1];"),
    ("out[head * 64 + lane] =", "out[head * 64 + 2 * lane] ="),
    ("out[head * 64 + lane + 32] =", "out[head * 64 + 2 * lane + 1] ="),
]

# Exercise 7: a Triton kernel, and its launch

MERGE = """
from lab.interpreter import interpreter

@triton.jit
def merge_kernel(partial, lse, out, splits, heads, head_dim, SPLITS: tl.constexpr, CHANNELS: tl.constexpr):
    h, s, c = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, CHANNELS)
    there, channels = s < splits, c < head_dim
    weight = tl.load(lse + s * heads + h, there, other=-float("inf"))
    m = tl.maximum(tl.max(weight, 0), -1e30)
    weight = tl.exp2(weight - m)
    at = (s * heads + h)[:, None] * head_dim + c[None, :]
    part = tl.load(partial + at, there[:, None] & channels[None, :], other=0)
    total = tl.sum(weight, 0)
    total = tl.where(total == 0, 1, total)
    tl.store(out + h * head_dim + c, tl.sum(weight[:, None] * part, 0) / total, channels)

def merge_splits(partial, lse, out):
    splits, heads, head_dim = partial.shape
    SPLITS, CHANNELS = triton.next_power_of_2(splits), triton.next_power_of_2(head_dim)
    with interpreter(merge_kernel) as kernel:
        kernel[(heads,)](partial, lse, out, splits, heads, head_dim, SPLITS, CHANNELS)
"""
LOAD = "    part = tl.load(partial + at, there[:, None] & channels[None, :], other=0)\n"
BY_TORCH = (
    MERGE[: MERGE.index("    splits, heads")]
    + """
    weight = (lse - lse.amax(0).clamp(min=-1e30)).exp2()
    total = weight.sum(0)
    out[:] = (weight[..., None] * partial).sum(0) / (total + (total == 0))[:, None]
"""
)

RIGHT = {1: _stream(), 2: _merge, 3: _share, 4: _splits(), 5: STALE, 6: ONLINE, 7: from_source(MERGE)}
WRONG = {
    1: {
        "the total is not corrected": (_stream(total_corrected=False), "with 2 tokens element 0 is"),
        "the sum of values is not corrected": (_stream(sum_corrected=False), "with 2 tokens element 0 is"),
        "no maximum": (_without_maximum, "with scores that grow by 2000 element 0 is nan"),
        "the maximum starts at 0": (_stream(start=0.0), "with scores around -2000 element 0 is nan"),
        "-inf minus -inf": (_stream(skip=False), "with -inf first element 0 is nan"),
        "relative to the first score, without a correction": (
            _by_the_first,
            "with scores that grow by 2000 element 0 is nan",
        ),
        "no maximum, in long double": (_in_long_double, " element 0 is nan"),
        "forgets in place of correcting": (_starts_anew, "with scores that grow element 0 is"),
        "overwrites the values": (_overwritten, "your function changed the value of token"),
        "in fp32": (_in_single, "rounded"),
        "collects the stream": (_collected, "values before were still kept"),
        "collects copies": (_collected_copies, "held as much memory as"),
        "stacks the values": (_stacked, "held as much memory as"),
        "goes through it twice": (_without_values, "with 1 token the result has shape ()"),
    },
    2: {
        "forgets that both may be empty": (_forgets_empty, "with the lse -inf and -inf element 0 is nan"),
        "the mean, whatever the weights": (_plain_mean, "with the lse 3 and 4.09861 element 0 is"),
        "no maximum": (_no_maximum, "with the lse 5000 and 5001.5: overflow"),
        "weighted by the logarithms": (_by_lse, "with the lse 0 and 0: invalid value"),
        "the larger lse": (_larger_lse, "with the lse 0 and 0 the result's lse is 0, expected 0.693147"),
        "no lse": (lambda *args: _merge(*args)[0], "expected a pair (out, lse)"),
    },
    3: {
        "drops the newest tokens": (_dropped_tail, "the tokens from 0 on belong to no block"),
        "drops the last, shorter tile": (_tail_dropped_with_its_tile, "the tokens from 0 on belong to no block"),
        "the last block takes the rest": (
            _last_takes_the_rest,
            "kv_len = 17, splits = 2: one block has 0 tiles, another 2",
        ),
        "rounded up, so that the last are idle": (_rounded_up, "one block has"),
        "cuts within tiles": (_tokens_not_tiles, "is no multiple of 16 and not the end"),
        "ends behind the last token": (_behind_the_end, "gave (0, 16), with 1 token"),
        "one number": (lambda kv_len, splits, i: 0, "expected a pair of whole numbers"),
    },
    4: {
        "blocks never wait": (_splits(waves=lambda blocks, room: 1), "µs; "),
        "waves in fractions": (_splits(waves=lambda blocks, room: blocks / room), "µs; "),
        "rounds waves down": (_splits(waves=lambda blocks, room: max(1, blocks // room)), "µs; "),
        "merging is free": (_splits(merged=False), "µs; "),
        "always one full wave": (_one_wave, "µs; "),
        "the largest of equal ones": (_splits(last=True), "as long, and is smaller"),
        "no split": (lambda *args: 0, "expected 1 to"),
    },
    5: {
        "only the sums are merged right": (changed(STALE, TOTAL), "kv_len = 2, scores 0 and 1"),
        "half of the channels are not corrected": (changed(STALE, CHANNEL), "of out differ"),
        "as it was": (changed(STALE, CHANNEL, TOTAL), "out[0] is 2.25, expected 3"),
        "the total is not corrected": (
            changed(STALE, ("total *= exp2f(m - s), ", "")),
            "of out differ",
        ),
        "no correction": (
            changed(STALE, (STALE[STALE.index("            total *=") : STALE.index("            m = s;")], "")),
            "of out differ",
        ),
        "the maximum of warp 0 for all": (
            changed(STALE, ("    for (int w = 1; w < WARPS; w++) highest = fmaxf(highest, ms[w]);\n", "")),
            "scores one far above all: 64 of 64 elements of out differ. out[0] is nan",
        ),
        "no barrier": (changed(STALE, ("    __syncthreads();\n", "")), "race on byte"),
        "the maximum never moves": (changed(STALE, ("            m = s;\n", "")), "out[0] is nan"),
    },
    6: {
        "the total is not corrected": (changed(ONLINE, ("total = correction * total", "total = total")), "kv_len = 2"),
        "half of the channels are not corrected": (
            changed(ONLINE, ("sum1 = correction * sum1", "sum1 = sum1")),
            "kv_len = 2",
        ),
        "the sums are never set": (
            changed(ONLINE, ("total = 0, sum0 = 0, sum1 = 0;", "total, sum0, sum1;")),
            "`total` is read before it is set",
        ),
        "no maximum": (
            changed(ONLINE, ("float m_new = fmaxf(m, s)", "float m_new = 0"), ("m = -1.0f / 0.0f", "m = 0")),
            "scores around 2000",
        ),
        "the maximum starts at 0": (changed(ONLINE, ("m = -1.0f / 0.0f", "m = 0")), "scores around -2000"),
        "two walks": (
            changed(ONLINE, ("    for (int t = 0;", FIRST_WALK + "    for (int t = 0;")),
            "wanted: at most 1,616, 4 for a token and head",
        ),
        "a score of its own for each lane": (changed(ONLINE, (SCORE.splitlines()[1] + "\n", "")), "wrong at heads = 1"),
        "neighbouring channels, one at a time": (changed(ONLINE, *PAIRS), "not coalesced"),
        "the last token is left out": (changed(ONLINE, ("t < kv_len", "t < kv_len - 1")), "kv_len = 1, scores random"),
    },
    7: {
        "tiles that end before the last split": (
            from_source(MERGE, ("triton.next_power_of_2(splits),", "1 << splits.bit_length() - 1,")),
            "lse around 0: out[",
        ),
        "tiles that end before the last channel": (
            from_source(MERGE, ("triton.next_power_of_2(head_dim)", "1 << head_dim.bit_length() - 1")),
            "with 3 splits, 2 heads, 5 channels, lse around 0: out[0, 4] was never set",
        ),
        "where there is no split, the lse is 0": (
            from_source(MERGE, ('other=-float("inf")', "other=0")),
            "lse around 0: out[",
        ),
        "where there is no split, the lse may be anything": (
            from_source(MERGE, (', other=-float("inf"))', ")")),
            "with 3 splits, 2 heads, 5 channels, lse around 0: out[0, 0] is nan",
        ),
        "what is not there may be anything, times 0": (
            from_source(MERGE, ("channels[None, :], other=0)", "channels[None, :])")),
            "with 3 splits, 2 heads, 5 channels, lse around 0: out[0, 0] is nan",
        ),
        "the maximum is not taken off": (
            from_source(MERGE, ("tl.exp2(weight - m)", "tl.exp2(weight)")),
            "with 4 splits, 3 heads, 16 channels, lse around 5000: out[0, 0] is nan",
        ),
        "the maximum of 0 and all": (
            from_source(MERGE, ("-1e30)", "0.0)")),
            "with 5 splits, 2 heads, 17 channels, lse around -5000: out[0, 0] is 0",
        ),
        "-inf minus -inf": (
            from_source(MERGE, ("tl.maximum(tl.max(weight, 0), -1e30)", "tl.max(weight, 0)")),
            "with 1 split, 1 head, 1 channel, lse no token at all in the last head: out[0, 0] is nan",
        ),
        "0 / 0": (
            from_source(MERGE, ("tl.where(total == 0, 1, total)", "total")),
            "with 1 split, 1 head, 1 channel, lse no token at all in the last head: out[0, 0] is nan",
        ),
        "powers of e": (from_source(MERGE, ("tl.exp2(", "tl.exp(")), "lse 3 and 4: out[0, 0] is 17.31"),
        "the heads' lse one after another": (
            from_source(MERGE, ("lse + s * heads + h", "lse + h * splits + s")),
            "lse around 0: out[",
        ),
        "no mask for splits": (
            from_source(MERGE, ("there[:, None] & channels[None, :]", "channels[None, :]")),
            "the kernel read outside all arrays",
        ),
        "no mask for channels where it stores": (
            from_source(MERGE, ("/ total, channels)", "/ total)")),
            "the kernel wrote outside all arrays",
        ),
        "one program for all": (
            from_source(MERGE, ("kernel[(heads,)]", "kernel[(1,)]")),
            "with 3 splits, 2 heads, 5 channels, lse around 0: out[1, 0] was never set",
        ),
        "a program for each head and split": (
            from_source(MERGE, ("kernel[(heads,)]", "kernel[heads, splits]")),
            "2 elements of it; wanted: 1",
        ),
        "partial results are read twice": (
            from_source(MERGE, (LOAD, LOAD + LOAD)),
            "right, but 4 elements of partial were loaded; wanted: 2, each once",
        ),
        "no launch": (from_source(MERGE, ("        kernel[(heads,)](", "        (")), "out[0, 0] was never set"),
        "no kernel": (from_source(BY_TORCH), "out is right, but a kernel stored 0 elements of it; wanted: 1"),
        "the weights are written over lse": (
            from_source(MERGE, ("    at = (s", "    tl.store(lse + s * heads + h, weight, there)\n    at = (s")),
            "the kernel changed lse",
        ),
        "the kernel, and no launch": (from_source(MERGE[: MERGE.index("def merge_splits")]), "expected a function"),
    },
}
