"""Checks of chapter 18, exercises 2 and 3: a ring of the convolution's inputs, and a prompt in pieces."""

import warnings

import numpy as np

from exercises.checks import array_from, counted, shown, time_limit
from lab.check import differs
from lab.exercise import Exercise, Wrong
from ref.ssd_steps import silu


def convolved(seen, weight, bias, count):
    """What a convolution gives for the last `count` of the tokens seen, (width − 1 + count, channels)."""
    return silu(bias + sum(weight[:, w] * seen[w : w + count] for w in range(weight.shape[1])))


def _same(what, got, wanted, at, why=""):
    bad = np.argwhere(~(np.abs(got - wanted) <= 1e-9))
    if len(bad):
        place = tuple(int(n) for n in bad[0])
        index = ", ".join(map(str, place))
        raise Wrong(f"{at}: {differs(f'{what}[{index}]', got[place], wanted[place])}{why}")


# Exercise 2: a ring

# width, channels, tokens of each call
TEXTS = [
    (2, 1, (1, 1, 1)),
    (4, 1, (6, 1)),
    (4, 1, (6, 1, 1)),
    (4, 1, (4, 1)),
    (4, 2, (1, 1, 1, 1, 1)),
    (4, 3, (5, 2, 1, 1)),
    (4, 3, (2, 1, 7, 3, 1)),
    (3, 5, (3, 4, 1, 2, 1)),
    (2, 4, (9, 1, 1)),
    (6, 3, (2, 2, 2, 2, 1, 13, 1)),
]


def exercise_2(conv_tokens):
    """conv_tokens(xBC, weight, bias, ring, position) -> (tokens, channels)"""
    exercise = Exercise("Exercise 2: a ring, one off")
    rng, first = np.random.default_rng(), np.random.default_rng(18)  # the stub's verdict is the same on every run
    texts = [*TEXTS, *((int(rng.integers(2, 7)), 3, tuple(rng.integers(1, 9, 6).tolist())) for _ in range(10))]
    with exercise, time_limit():
        for n, text in enumerate(texts):
            _ringed(conv_tokens, first if n < len(TEXTS) else rng, *text)
    return exercise.report(f"right for {len(texts)} texts, in whatever pieces they come")


def _ringed(conv_tokens, rng, width, channels, pieces):
    weight, bias = rng.standard_normal((channels, width)), rng.standard_normal(channels)
    text = rng.standard_normal((sum(pieces), channels))
    padded = np.concatenate([np.zeros((width - 1, channels)), text])
    ring, position = np.zeros((width - 1, channels)), 0
    for count in pieces:
        at = f"with width = {width}, calls of {', '.join(map(str, pieces))} tokens, the call at position {position}"
        mine, before = text[position : position + count].copy(), ring.copy()
        given = weight.copy(), bias.copy()
        try:
            got = conv_tokens(mine, *given, ring, position)
        except (ValueError, IndexError) as error:
            raise Wrong(f"{at}: {error}") from None
        got = array_from(got, (count, channels), at)
        why = _order_of(got, before, text[position : position + count], weight, bias, position)
        _same(
            "the result", got, convolved(padded[position : position + count + width - 1], weight, bias, count), at, why
        )
        if not np.array_equal(mine, text[position : position + count]) or not all(
            np.array_equal(a, b) for a, b in zip(given, (weight, bias))
        ):
            raise Wrong(f"{at} your function changed xBC, weight or bias")
        position += count
        _in_place(ring, padded, width, position, at)


def _order_of(got, ring, xBC, weight, bias, position):
    """What it looks like: rows of the ring taken from another place than the oldest's."""
    rows, right = len(ring), position % len(ring)
    for turn in range(rows):
        seen = np.concatenate([np.roll(ring, -turn, axis=0), xBC])
        if turn != right and np.allclose(got, convolved(seen, weight, bias, len(xBC)), rtol=0, atol=1e-9):
            return f": as if row {turn} of the ring were the oldest, and not row {right}"
    return ""


def _in_place(ring, padded, width, position, at):
    for t in range(position - width + 1, position):
        row = t % (width - 1)
        if not np.allclose(ring[row], padded[t + width - 1], rtol=0, atol=1e-12):
            here = [s for s in range(position) if np.array_equal(ring[row], padded[s + width - 1])]
            found = f"that of token {here[-1]}" if here else "another"
            wanted = f"that of token {t}" if t >= 0 else "zeros: it has none yet"
            raise Wrong(f"{at}: after it, the input in row {row} of the ring is {found}, expected {wanted}")


# Exercise 3: in pieces

# width, tokens of each prompt that comes, piece
PROMPTS = [
    (4, (8,), 4),
    (4, (16, 8), 8),
    (4, (7,), 4),
    (4, (5,), 8),
    (4, (9, 3), 8),
    (4, (1, 1, 6), 4),
    (4, (4,), 2),
    (4, (7, 2), 1),
    (2, (10, 5), 4),
    (4, (3, 12), 3),
]
NHEADS, HEADDIM, DSTATE = 2, 3, 4
CHANNELS = NHEADS * HEADDIM + 2 * DSTATE


def exercise_3(prefill):
    """prefill(block, xBC, dt, conv_state, ssm_state, piece) -> (y, conv state, SSM state)"""
    exercise = Exercise("Exercise 3: a prompt in pieces")
    rng, first = np.random.default_rng(), np.random.default_rng(18)
    drawn = [
        (int(rng.integers(2, 5)), tuple(rng.integers(1, 30, 3).tolist()), int(rng.integers(1, 12))) for _ in range(10)
    ]
    with exercise, time_limit(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n, prompt in enumerate(PROMPTS + drawn):
            _in_pieces(prefill, first if n < len(PROMPTS) else rng, *prompt)
    return exercise.report(f"{len(PROMPTS + drawn)} prompts in pieces, as at once, with both states handed on")


class Weights:
    """Of a block between in_proj and the gate, and how it runs."""

    def __init__(self, rng, width):
        self.conv, self.bias = rng.standard_normal((CHANNELS, width)), rng.standard_normal(CHANNELS)
        self.A, self.dt_bias = -rng.uniform(0.05, 1, NHEADS), rng.uniform(-1, 2, NHEADS)

    def run(self, xBC, dt, conv_state, ssm_state):
        """Any number of tokens: (y, conv state, SSM state)."""
        seen = np.concatenate([conv_state, xBC])
        mixed = convolved(seen, self.conv, self.bias, len(xBC))
        x, B, C = np.split(mixed, [NHEADS * HEADDIM, NHEADS * HEADDIM + DSTATE], axis=1)
        x, dt, h, y = x.reshape(-1, NHEADS, HEADDIM), np.logaddexp(0, dt + self.dt_bias), ssm_state, []
        for t in range(len(x)):
            h = np.exp(self.A * dt[t])[:, None, None] * h + (dt[t, :, None] * x[t])[..., None] * B[t]
            y.append(h @ C[t])
        return np.array(y), seen[len(xBC) :], h


def _in_pieces(prefill, rng, width, prompts, piece):
    weights = Weights(rng, width)
    conv = np.zeros((width - 1, CHANNELS))
    h, at = np.zeros((NHEADS, HEADDIM, DSTATE)), ""
    calls = []

    def block(xBC, dt, conv_state, ssm_state):
        shapes = {"xBC": (piece, CHANNELS), "dt": (piece, NHEADS), "conv_state": conv.shape, "ssm_state": h.shape}
        given = [
            array_from(a, s, at, f"block's {n}") for (n, s), a in zip(shapes.items(), (xBC, dt, conv_state, ssm_state))
        ]
        calls.append(piece)
        y, _, state = weights.run(*given)
        return y, state

    for n, tokens in enumerate(prompts):
        at = f"with width = {width}, piece = {piece}, prompts of {', '.join(map(str, prompts))} tokens, prompt {n + 1}"
        xBC, dt = rng.standard_normal((tokens, CHANNELS)), rng.standard_normal((tokens, NHEADS))
        wanted = weights.run(xBC, dt, conv, h)
        given = [a.copy() for a in (xBC, dt, conv, h)]
        calls.clear()
        try:
            got = prefill(block, *given, piece)
        except ValueError as error:
            raise Wrong(f"{at}: {error}") from None
        if not isinstance(got, tuple) or len(got) != 3:
            raise Wrong(f"{at}: your function gave {shown(got)}, expected (y, conv_state, ssm_state)")
        for a, b in zip(given, (xBC, dt, conv, h)):
            if not np.array_equal(a, b):
                raise Wrong(f"{at}: your function changed what it was given")
        if len(calls) > -(-tokens // piece):
            raise Wrong(f"{at}: block was called {counted(len(calls), 'time')}, {-(-tokens // piece)} are enough")
        names = ("y", "the conv state", "the SSM state")
        for name, part, right in zip(names, got, wanted):
            _same(
                name, array_from(part, right.shape, at, name), right, at, _lost(name, part, xBC, tokens, piece, width)
            )
        conv, h = wanted[1:]


def _lost(name, part, xBC, tokens, piece, width):
    """What it looks like."""
    rest = tokens % piece
    if name == "the conv state" and np.asarray(part).shape[0] == width - 1 and not np.asarray(part)[-1].any():
        return ": its last rows are those of tokens that are not there"
    if name == "the SSM state" and rest:
        return (
            f": the last piece has {counted(rest, 'token')}, and what stands behind them must leave the state as it is"
        )
    return ""
