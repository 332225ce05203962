"""The checks of chapter 01, roofline.

Every check starts with the smallest cases, so that the first one to fail is easy to follow by hand. Then come
fresh random ones.
"""

from fractions import Fraction
from itertools import combinations, product

import numpy as np

from exercises.checks import call_text, close, counted, number_from, time_limit
from lab.check import apart
from lab.exercise import Exercise
from ref.roofline import LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B, MISTRAL_7B, ModelConfig
from ref.roofline import bytes_per_token as right_bytes_per_token

# A model whose heads are narrower than hidden / n_heads.
MISTRAL_NEMO_12B = ModelConfig("Mistral-Nemo-12B", 40, 5120, 14336, 32, 8, 128, 131072)


def exercise_1(gemv_intensity):
    """Flops per byte of y = W x."""
    exercise = Exercise("Exercise 1: intensity of a matrix–vector product")
    rng = np.random.default_rng()
    # (rows, cols, weight_bytes) or (rows, cols, weight_bytes, vector_bytes)
    cases = [(1, 1, 4), (1, 2, 4), (2, 1, 4), (2, 3, 4), (2, 3, 2), (2, 3, 0.5), (2, 3, 0.5, 2), (3, 2, 1, 8)]
    cases += [(1, 100_003, 2), (100_003, 1, 2), (4096, 14336, 2), (14336, 4096, 0.5, 2)]
    for _ in range(50):
        rows, cols = (int(n) for n in rng.integers(1, 5000, 2))
        cases.append((rows, cols, float(rng.choice([0.5, 1, 2, 4])), int(rng.choice([2, 4]))))
    with exercise, time_limit():
        for case in cases:
            rows, cols, weight_bytes, vector_bytes = (*case, 4)[:4]
            flops = 2 * rows * cols
            parts = rows * cols * weight_bytes, cols * vector_bytes, rows * vector_bytes
            wanted = flops / sum(parts)
            got = number_from(gemv_intensity, *case)
            mine, right = apart(got, wanted)
            exercise.require(
                close(got, wanted),
                f"{call_text(gemv_intensity, *case)} gave {mine}, expected {right}: it does {flops} "
                "flops; W takes {:g} bytes, x {:g} and y {:g}".format(*parts),
            )
    return exercise.report(f"right for {len(cases)} matrices, from 1 × 1 to long and thin")


def exercise_2(kv_cache_bytes, sequences_that_fit):
    """Bytes of a cache with grouped queries, and how many caches fit beside the weights."""
    exercise = Exercise("Exercise 2: the size of a KV cache")
    names = ("layers", "n_kv_heads", "head_dim", "context", "batch", "bits")
    rng = np.random.default_rng()
    with exercise, time_limit():
        one = (1, 1, 1, 1, 1, 8)
        cases = [(one, "one key and one value, each of one number of 8 bits")]
        for place, value in enumerate((2, 3, 5, 7, 11)):
            case = (*one[:place], value, *one[place + 1 :])
            cases.append((case, f"{value} times what {names[place]} = 1 needs"))
        for bits in (16, 4, 32):
            cases.append(((*one[:5], bits), f"one key and one value, each of one number of {bits} bits"))
        for _ in range(50):
            small = (int(n) for n in rng.integers(1, 200, 5))
            cases.append(((*small, int(rng.choice([4, 8, 16, 32]))), "count each factor once"))
        big = (127, 7, 129, 1_000_003, 1_000_003, 8)
        cases.append((big, "a float cannot hold so many digits; stay with whole numbers: // and not /"))
        for case, why in cases:
            named = dict(zip(names, case))
            layers, n_kv_heads, head_dim, context, batch, bits = case
            wanted = 2 * layers * n_kv_heads * head_dim * context * batch * bits // 8
            got = number_from(kv_cache_bytes, whole=True, **named)
            call = call_text(kv_cache_bytes, **named)
            exercise.require(got == wanted, f"{call} gave {got}, expected {wanted}: {why}")

        cases = [
            ((10, 4, 2), "6 bytes are free, 2 for each"),
            ((10, 4, 6), "6 bytes are free, exactly one fits"),
            ((10, 4, 4), "6 bytes are free, and a sequence needs its whole cache"),
            ((10, 4, 7), "6 bytes are free, too few for one"),
            ((10, 10, 3), "no byte is free"),
            ((10, 11, 3), "the weights alone do not fit, so no sequence does"),
            ((10, 31, 3), "the weights alone do not fit, so no sequence does"),
            (
                (3 * 10**17 - 1, 0, 10**17),
                "one byte is missing for the third, which a float cannot tell; stay with whole numbers: // and not /",
            ),
        ]
        for _ in range(50):
            cache, count, weights = (int(n) for n in rng.integers((2, 1, 0), (10**9, 2000, 10**11)))
            full = weights + count * cache
            cases += [((full, weights, cache), "the last one fits exactly")]
            cases += [((full - 1, weights, cache), "one byte is missing for the last one")]
        for case, why in cases:
            memory, weights, cache = case
            wanted = max(0, memory - weights) // cache
            got = number_from(sequences_that_fit, *case, whole=True)
            call = call_text(sequences_that_fit, *case)
            exercise.require(got == wanted, f"{call} gave {got}, expected {wanted}: {why}")
    memory, weights = 141 * 10**9, 2 * MISTRAL_7B.parameters
    grouped, each = (memory - weights) // 2**30, (memory - weights) // 2**32
    return exercise.report(
        f"{grouped} sequences of 8192 fit beside Mistral-7B; with 32 heads of keys and values, {each} would"
    )


def exercise_3(smallest_batch):
    """The smallest batch at the ridge of the roofline or beyond it."""
    exercise = Exercise("Exercise 3: how many tokens make it compute bound")
    formats = (2, 1, 4, 0.5, 0.5625, 0.6875)  # bytes of a weight; the last two are 4 and 5 bits, with scales
    rng = np.random.default_rng()
    small = [(w, bandwidth, flops) for bandwidth in (1, 2, 9, 11) for flops in range(1, 65) for w in formats]
    # exactly on the ridge with 5, 25 and 55 tokens, where dividing twice comes out a hair above
    small += [(0.5625, 9, 160), (0.6875, 11, 800), (0.6875, 9, 1440)]
    large = []
    for n in [1, 2, 3, *(int(n) for n in rng.integers(1, 300, 60))]:
        for w in formats:
            bandwidth = 9 * 11 * int(rng.integers(10**9, 5 * 10**10))  # so that flops below is a whole number
            flops = int(2 * n * bandwidth / Fraction(w))
            # exactly on the ridge with a batch of n, then a little above and below
            large += [(w, bandwidth, flops + by) for by in (0, flops // 10**9 + 1, -(flops // 10**9) - 1)]
    with exercise, time_limit():
        for case in small + large:
            weight_bytes, bandwidth, flops = case
            ridge = Fraction(flops, bandwidth)
            got = number_from(smallest_batch, *case, whole=True)
            call = call_text(smallest_batch, *case)
            exercise.require(got >= 1, f"{call} gave {got}; a batch holds at least one token")
            # By the definition: this batch is at the ridge or above, and one token less is not.
            enough, says = _against_ridge(got, weight_bytes, ridge)
            exercise.require(enough, f"{call} gave {got}, which is too few: {says}")
            enough, says = _against_ridge(got - 1, weight_bytes, ridge)
            exercise.require(not enough, f"{call} gave {got}, but fewer will do: {says}")
    return exercise.report(
        f"right for {len(small + large)} cases. An H200 needs 207 tokens with 16-bit weights, 52 with 4-bit"
    )


def _against_ridge(batch, weight_bytes, ridge):
    """Is the batch at the ridge or above? And the same in words."""
    intensity = 2 * batch / Fraction(weight_bytes)
    where = "below" if intensity < ridge else "exactly at" if intensity == ridge else "above"
    tokens = f"{counted(batch, 'token')} {'gives' if batch == 1 else 'give'}"
    given, limit = apart(float(intensity), float(ridge), 12)
    says = f"{tokens} {given} flops per byte, {where} the ridge of {limit}"
    return intensity >= ridge, says


def exercise_4(bytes_per_token):
    """Find the bug: bytes per token of any Llama-style model."""
    exercise = Exercise("Exercise 4: find the bug")
    rng = np.random.default_rng()
    models = [LLAMA_2_7B, MISTRAL_7B, LLAMA_3_8B, LLAMA_3_70B, MISTRAL_NEMO_12B]
    for number in range(20):
        layers, hidden, ffn, groups, n_kv_heads, head_dim, vocab = (int(n) for n in rng.integers(1, 50, 7))
        widths = layers, 2 * hidden, ffn, groups * n_kv_heads, n_kv_heads, 2 * head_dim, vocab
        models.append(ModelConfig(f"random model {number + 1}", *widths))
    with exercise, time_limit():
        for model in models:
            for weight_bits, kv_bits in ((16, 16), (8, 8), (4, 16), (16, 4)):
                off_without_cache = 0
                for context in (0, 1, 4096):
                    case = (model, weight_bits, kv_bits, context)
                    off = number_from(bytes_per_token, *case) - right_bytes_per_token(*case)
                    part = "With no cache yet, the bytes are those of the weights"
                    if context:
                        part = "With context 0 it is right, so look at the cache"
                    exercise.require(off == off_without_cache == 0, _off_by(model, off, *case[1:], part))
    return exercise.report("right to the byte for 5 models and 20 random ones")


def _off_by(model, off, weight_bits, kv_bits, context, part):
    what = f"{abs(off):,} bytes {'more' if off > 0 else 'less'} than the right count"
    shape = ", ".join(f"{n}={getattr(model, n)}" for n in ("hidden", "n_heads", "n_kv_heads", "head_dim"))
    return (
        f"{model.name} with {weight_bits}-bit weights, {kv_bits}-bit cache and context {context}: {what}. "
        f"{part}. It has {shape}"
    )


def exercise_5(expected_expert_bytes):
    """Expected bytes of experts read by a batch."""
    exercise = Exercise("Exercise 5: a batch in a mixture of experts")
    rng = np.random.default_rng()
    with exercise, time_limit(20):
        # One token, and every expert for every token: no probability is needed.
        for case in [(2, 1, 1, 1), (8, 2, 10, 1), (3, 3, 1, 2), (64, 6, 1000, 1), (64, 64, 1000, 7)]:
            n_experts, top_k, size, batch = case
            why = "one token reads the experts it picks" if batch == 1 else "every token picks all of them"
            _expect(exercise, expected_expert_bytes, case, top_k * size, why)

        # Small enough to write down everything that can happen.
        for n_experts, top_k, batch in product((2, 3, 4, 5), (1, 2, 3), (2, 3, 0)):
            if top_k <= n_experts:
                mean, ways = every_outcome(n_experts, top_k, batch)
                why = f"the mean over all {ways} ways for {batch} tokens to pick {top_k} of {n_experts} experts"
                why = why if batch else "without a token, nothing is read"
                _expect(exercise, expected_expert_bytes, (n_experts, top_k, 10, batch), 10 * mean, why)

        # Models as they are: draw batches at random and compare with the mean.
        for n_experts, top_k, batch in [(8, 2, 4), (64, 6, 16), (128, 8, 32)]:
            mean, error = simulated(rng, n_experts, top_k, batch)
            case = (n_experts, top_k, 1, batch)
            got = number_from(expected_expert_bytes, *case)
            exercise.require(
                abs(got - mean) <= 6 * error + 1e-9,  # a right answer fails about twice in a billion runs
                f"{call_text(expected_expert_bytes, *case)} gave {got:.4f}, but batches drawn at random read "
                f"{mean:.4f} experts on average, give or take {error:.4f}",
            )

        # Any sizes: each expert is missed by a token with probability 1 - top_k / n_experts.
        for _ in range(100):
            n_experts = int(rng.integers(1, 257))
            top_k, batch = int(rng.integers(1, n_experts + 1)), int(rng.choice([1, 2, 7, 100, 2000]))
            size = int(rng.integers(1, 10**9))
            case = (n_experts, top_k, size, batch)
            wanted = size * n_experts * (1 - float(1 - Fraction(top_k, n_experts)) ** batch)
            _expect(exercise, expected_expert_bytes, case, wanted, "the exact mean")
    return exercise.report("with 8 experts, 2 for each token, 8 tokens read 3.6 times the bytes of one, not 8 times")


def _expect(exercise, function, case, wanted, why):
    got = number_from(function, *case)
    call = call_text(function, *case)
    mine, right = apart(got, float(wanted), 10)
    exercise.require(close(got, wanted), f"{call} gave {mine}, expected {right}: {why}")


def every_outcome(n_experts, top_k, batch):
    """The exact mean number of experts read, and the number of outcomes: every token picks in every way."""
    picks = list(combinations(range(n_experts), top_k))
    read = [len(set().union(*outcome)) for outcome in product(picks, repeat=batch)]
    return Fraction(sum(read), len(read)), len(read)


def simulated(rng, n_experts, top_k, batch, samples=1000):
    """The mean number of experts read over random batches, and its standard error."""
    order = rng.random((samples, batch, n_experts)).argpartition(top_k - 1, axis=2)
    picked = np.zeros((samples, n_experts), bool)
    np.put_along_axis(picked, order[:, :, :top_k].reshape(samples, -1), True, axis=1)
    read = picked.sum(axis=1)
    return float(read.mean()), float(read.std(ddof=1) / samples**0.5)
