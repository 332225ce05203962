"""Wrong answers to the exercises of chapter 12, each with what the check must say, and the right ones they come from.

A kernel is made from its source, as the learner's cell makes it.
"""

import itertools
import linecache

import triton
import triton.language as tl

_number = itertools.count()


def kernel(source):
    """The last function of this source, as a Triton kernel."""
    label = f"<wrong {next(_number)}>"
    linecache.cache[label] = (len(source), None, source.splitlines(keepends=True), label)
    names = {"tl": tl, "triton": triton, "LOG2_E": tl.constexpr(1.4426950408889634), "__name__": "__main__"}
    exec(compile(source, label, "exec"), names)
    return list(names.values())[-1]


def changed(source, *changes):
    """The source with each (old, new), of which old must be there once."""
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def from_source(source, *changes):
    return kernel(changed(source, *changes))


def _between(sums=3, table=2, states=4, whole=False, number=4):
    def between(L, Q, H, P, N, G):
        chunks, t = L // Q, Q // 64
        tiles = t * t if whole else t * (t + 1) // 2
        return number * (sums * 2 * L * H + table * chunks * G * tiles * 64 * 64 + states * chunks * H * P * N)

    return between


def _all_heads(L, Q, H, P, N, G):
    return _between()(L, Q, H, P, N, G) + 4 * (H // G - 1) * (L // Q) * G * (Q // 64) * (Q // 64 + 1) // 2 * 64 * 64


CUMSUM = """
@triton.jit
def cumsum_kernel(dt, A, cum, seqlen, nheads, Q: tl.constexpr):
    chunk, h = tl.program_id(0), tl.program_id(1)
    q = tl.arange(0, Q)
    token = chunk * Q + q
    step = tl.load(dt + token * nheads + h, token < seqlen, other=0)
    total = tl.cumsum(step * tl.load(A + h) * LOG2_E, 0)
    tl.store(cum + (h * tl.num_programs(0) + chunk) * Q + q, total)
"""
STATE = """
@triton.jit
def state_kernel(x, B, dt, cum, states, seqlen, P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr):
    chunk = tl.program_id(0)
    q, p, n = tl.arange(0, Q), tl.arange(0, P), tl.arange(0, N)
    token = chunk * Q + q
    there = (token < seqlen)[:, None]
    last = tl.load(cum + chunk * Q + Q - 1)
    scale = tl.exp2(last - tl.load(cum + chunk * Q + q)) * tl.load(dt + chunk * Q + q)
    xs = tl.load(x + token[:, None] * P + p[None, :], there, other=0)
    bs = tl.load(B + token[:, None] * N + n[None, :], there, other=0)
    state = tl.dot(tl.trans((xs * scale[:, None]).to(tl.float16)), bs)
    tl.store(states + (chunk * P + p[:, None]) * N + n[None, :], state)
"""
TWICE = """    xs = tl.load(x + token[:, None] * P + p[None, :], there, other=0)
"""
SCAN = """
@triton.jit
def scan_kernel(x, C, CB, dt, cum, states, y, seqlen, P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr):
    chunk = tl.program_id(0)
    q, p, n = tl.arange(0, Q), tl.arange(0, P), tl.arange(0, N)
    token = chunk * Q + q
    there = (token < seqlen)[:, None]
    xs = tl.load(x + token[:, None] * P + p[None, :], there, other=0)
    cs = tl.load(C + token[:, None] * N + n[None, :], there, other=0)
    steps, sums = tl.load(dt + chunk * Q + q), tl.load(cum + chunk * Q + q)
    table = tl.load(CB + (chunk * Q + q[:, None]) * Q + q[None, :])
    state = tl.load(states + (chunk * P + p[:, None]) * N + n[None, :])
    weight = table * tl.exp2(sums[:, None] - sums[None, :]) * steps[None, :]
    weight = tl.where(q[:, None] >= q[None, :], weight, 0)
    out = tl.dot(cs, tl.trans(state.to(tl.float16))) * tl.exp2(sums)[:, None]
    out += tl.dot(weight.to(tl.float16), xs)
    tl.store(y + token[:, None] * P + p[None, :], out, there)
"""
SELECT = "    weight = tl.where(q[:, None] >= q[None, :], weight, 0)\n"
LAYER = """
@triton.jit
def layer_kernel(x, B, C, dt, cum, y, final, seqlen, P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr):
    q, p, n = tl.arange(0, Q), tl.arange(0, P), tl.arange(0, N)
    state = tl.full((P, N), 0, tl.float32)
    for start in range(0, seqlen, Q):
        token = start + q
        there = token < seqlen
        steps = tl.load(dt + token, there, other=0)
        sums = tl.load(cum + token, there, other=0)
        xs = tl.load(x + token[:, None] * P + p[None, :], there[:, None], other=0)
        bs = tl.load(B + token[:, None] * N + n[None, :], there[:, None], other=0)
        cs = tl.load(C + token[:, None] * N + n[None, :], there[:, None], other=0)
        triangle = q[:, None] >= q[None, :]
        weight = tl.dot(cs, tl.trans(bs)) * tl.exp2(sums[:, None] - sums[None, :]) * steps[None, :]
        weight = tl.where(triangle, weight, 0)
        last = tl.load(cum + tl.minimum(start + Q, seqlen) - 1)
        out = tl.dot(weight, xs) + tl.exp2(sums)[:, None] * tl.dot(cs, tl.trans(state))
        tl.store(y + token[:, None] * P + p[None, :], out, there[:, None])
        scale = tl.where(there, tl.exp2(last - sums) * steps, 0)
        state = tl.exp2(last) * state + tl.dot(tl.trans(xs * scale[:, None]), bs)
    tl.store(final + p[:, None] * N + n[None, :], state)
"""
MULTIPLIED = "weight = tl.where(triangle, weight, 0)", "weight = weight * triangle"
LAST_PLACE = (
    "last = tl.load(cum + tl.minimum(start + Q, seqlen) - 1)",
    "last = tl.sum(tl.where(q == Q - 1, sums, 0), 0)",
)

RIGHT = {1: _between(), 2: kernel(CUMSUM), 3: kernel(STATE), 4: kernel(SCAN), 5: kernel(LAYER)}
WRONG = {
    1: {
        "each once": (_between(sums=2, table=1, states=2), "gave 17,416, expected 34,320"),
        "states only as kernel 3 and 5 see them": (_between(states=2), "expected 34,320"),
        "the whole square": (_between(whole=True), "(128, 128, 1, 1, 1, 1) gave"),
        "16 bits": (_between(number=2), "gave 17,160, expected 34,320"),
        "every head reads the table": (_all_heads, "(65536, 256, 80, 64, 128, 1) gave"),
        "a fraction": (lambda *args: _between()(*args) / 2, "expected a whole number"),
    },
    2: {
        "no mask": (
            from_source(CUMSUM, (", token < seqlen, other=0)", ")")),
            "outside all arrays, 0 bytes behind the last element of dt",
        ),
        "what the mask leaves out may be anything": (
            from_source(CUMSUM, (", token < seqlen, other=0)", ", token < seqlen)")),
            "with 1 token, 1 head, chunks of 16: cum[0, 0, 1] is nan",
        ),
        "powers of e": (from_source(CUMSUM, (" * LOG2_E", "")), "cum[0, 0, 0] is"),
        "past the end it is 0": (
            from_source(CUMSUM, ("+ q, total)", "+ q, tl.where(token < seqlen, total, 0))")),
            "with 1 token, 1 head, chunks of 16: cum[0, 0, 1] is 0, expected",
        ),
        "past the end nothing is written": (
            from_source(CUMSUM, ("+ q, total)", "+ q, total, token < seqlen)")),
            "cum[0, 0, 1] was never set",
        ),
        "a sum that forgets A": (from_source(CUMSUM, (" * tl.load(A + h)", "")), "cum[0, 0, 0] is"),
        "dt lies by heads": (
            from_source(CUMSUM, ("token * nheads + h", "h * seqlen + token")),
            "with 16 tokens, 3 heads, chunks of 16: cum[0, 0, 1] is",
        ),
        "chunks and heads exchanged": (
            from_source(CUMSUM, ("(h * tl.num_programs(0) + chunk)", "(chunk * nheads + h)")),
            "with 33 tokens, 2 heads, chunks of 16: cum[0, 1, 0] is",
        ),
        "the sum does not begin anew": (
            from_source(
                CUMSUM,
                ("    tl.store(", "    total += chunk * tl.load(A + h)\n    tl.store("),
            ),
            "with 33 tokens, 2 heads, chunks of 16: cum[0, 1, 0] is",
        ),
        "each dt twice": (
            from_source(
                CUMSUM,
                ("    total =", "    step = tl.load(dt + token * nheads + h, token < seqlen, other=0)\n    total ="),
            ),
            "32 elements of dt were read, expected 16, each once",
        ),
    },
    3: {
        "no mask": (
            from_source(
                STATE,
                (
                    "    xs = tl.load(x + token[:, None] * P + p[None, :], there, other=0)",
                    "    xs = tl.load(x + token[:, None] * P + p[None, :])",
                ),
            ),
            "outside all arrays",
        ),
        "what the mask leaves out may be anything": (
            from_source(STATE, ("P + p[None, :], there, other=0)", "P + p[None, :], there)")),
            "with 1 token in chunks of 16, A = -1: states[0, 0, 0] is nan",
        ),
        "the decay as a quotient": (
            from_source(
                STATE,
                (
                    "tl.exp2(last - tl.load(cum + chunk * Q + q))",
                    "tl.exp2(last) * tl.exp2(-tl.load(cum + chunk * Q + q))",
                ),
            ),
            "with 40 tokens in chunks of 16, A = -2e+03: states[0, 0, 0] is nan",
        ),
        "the decay from the chunk's start": (
            from_source(
                STATE, ("tl.exp2(last - tl.load(cum + chunk * Q + q))", "tl.exp2(tl.load(cum + chunk * Q + q))")
            ),
            "states[0, ",
        ),
        "forgets dt": (from_source(STATE, (" * tl.load(dt + chunk * Q + q)", "")), "states["),
        "powers of e": (from_source(STATE, ("tl.exp2(last", "tl.exp(last")), "states["),
        "transposed": (
            from_source(
                STATE,
                (
                    "(chunk * P + p[:, None]) * N + n[None, :], state)",
                    "(chunk * N + n[:, None]) * P + p[None, :], tl.trans(state))",
                ),
            ),
            "states[",
        ),
        "the second chunk over the first": (
            from_source(STATE, ("states + (chunk * P", "states + (0 * P")),
            "with 17 tokens in chunks of 16",
        ),
        "x is read twice": (from_source(STATE, (TWICE, 2 * TWICE)), "elements of x were read, expected"),
    },
    4: {
        "the triangle is multiplied": (
            from_source(SCAN, (SELECT, "    weight = weight * (q[:, None] >= q[None, :])\n")),
            "y[0, 0] is nan",
        ),
        "NaN above the diagonal is scaled": (
            from_source(SCAN, (SELECT, "    weight = tl.where(q[:, None] >= q[None, :], weight, weight * 0)\n")),
            "y[0, 0] is nan",
        ),
        "no diagonal": (from_source(SCAN, ("q[:, None] >= q[None, :]", "q[:, None] > q[None, :]")), ": y["),
        "the decay as a product": (
            from_source(
                SCAN, ("tl.exp2(sums[:, None] - sums[None, :])", "tl.exp2(sums)[:, None] * tl.exp2(-sums)[None, :]")
            ),
            "with 40 tokens in chunks of 16, A = -2e+03: y[",
        ),
        "the decay the wrong way": (
            from_source(SCAN, ("sums[:, None] - sums[None, :]", "sums[None, :] - sums[:, None]")),
            "with 16 tokens in chunks of 16, A = -1: y[",
        ),
        "forgets the state's decay": (from_source(SCAN, (" * tl.exp2(sums)[:, None]", "")), "y[0, "),
        "forgets the state": (
            from_source(SCAN, ("    out += tl.dot(weight", "    out = tl.dot(weight")),
            "y[0, ",
        ),
        "dt of the row": (from_source(SCAN, ("* steps[None, :]", "* steps[:, None]")), "with 16 tokens"),
        "writes past the end": (
            from_source(SCAN, ("out, there)", "out)")),
            "the kernel wrote outside all arrays, 0 bytes behind the last element of y",
        ),
        "states are read twice": (
            from_source(
                SCAN,
                (
                    "    weight = table *",
                    "    state = tl.load(states + (chunk * P + p[:, None]) * N + n[None, :])\n    weight = table *",
                ),
            ),
            "elements of states were read, expected",
        ),
    },
    5: {
        "as it was": (from_source(LAYER, MULTIPLIED, LAST_PLACE), "y[0, 0] is nan"),
        "only the triangle is mended": (from_source(LAYER, LAST_PLACE), "with 3 tokens in chunks of 16"),
        "only the end is mended": (from_source(LAYER, MULTIPLIED), "A = -300: y["),
        "the last place, past the end": (
            from_source(LAYER, ("tl.minimum(start + Q, seqlen) - 1", "start + Q - 1")),
            "outside all arrays",
        ),
        "the last token of all": (
            from_source(LAYER, ("tl.minimum(start + Q, seqlen) - 1", "seqlen - 1")),
            "with 32 tokens in chunks of 16",
        ),
        "no triangle": (from_source(LAYER, ("tl.where(triangle, weight, 0)", "weight")), "y[0, "),
    },
}
