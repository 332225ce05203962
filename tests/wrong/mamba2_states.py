"""Wrong answers to exercises 2 and 3 of chapter 18, in the form of mamba2.py's."""

import numpy as np

from ref.ssd_steps import silu

# Exercise 2: a ring


def _ring(
    before=lambda ring, position: np.roll(ring, -(position % len(ring)), axis=0),
    rows=lambda first, end, n: np.arange(first, end) % n,
    last=lambda xBC, n: xBC[-n:],
    taps=lambda weight: weight,
    gate=silu,
    update=True,
):
    """Right, but for what is said."""

    def conv_tokens(xBC, weight, bias, ring, position):
        tokens, n = len(xBC), len(ring)
        seen, kept = np.concatenate([before(ring, position), xBC]), last(xBC, n)
        out = bias + sum(taps(weight)[:, w] * seen[w : w + tokens] for w in range(n + 1))
        if update:
            ring[rows(position + tokens - len(kept), position + tokens, n)] = kept
        return gate(out)

    return conv_tokens


def _as_it_was(xBC, weight, bias, ring, position):
    tokens, n = len(xBC), len(ring)
    seen, last = np.concatenate([ring, xBC]), xBC[-n:]
    ring[: len(last)] = last
    return silu(bias + sum(weight[:, w] * seen[w : w + tokens] for w in range(n + 1)))


def _fresh(xBC, weight, bias, ring, position):
    """A prompt of several tokens begins anew."""
    return RING(xBC, weight, bias, ring if len(xBC) == 1 or not position else _emptied(ring), position)


def _emptied(ring):
    ring[:] = 0
    return ring


def _other_ring(xBC, weight, bias, ring, position):
    return RING(xBC, weight, bias, ring.copy(), position)


def _scales(xBC, weight, bias, ring, position):
    weight *= 1.0 + 1e-12
    xBC += 0.0
    weight[:, 0] += 0.0
    found = RING(xBC, weight, bias, ring, position)
    xBC[:] = 0
    return found


RING = _ring()
AS_IF = "of the ring were the oldest"
EX2 = {
    "as it was": (_as_it_was, AS_IF),
    "the ring as it lies": (_ring(before=lambda ring, position: ring), AS_IF),
    "inputs from row 0 on": (_ring(rows=lambda first, end, n: np.arange(end - first)), "of the ring is"),
    "turned the other way": (_ring(before=lambda r, p: np.roll(r, p % len(r), axis=0)), AS_IF),
    "one row too far": (_ring(before=lambda r, p: np.roll(r, -(p + 1) % len(r), axis=0)), AS_IF),
    "modulo width": (_ring(before=lambda r, p: np.roll(r, -(p % (len(r) + 1)), axis=0)), AS_IF),
    "rows one further": (_ring(rows=lambda first, end, n: np.arange(first + 1, end + 1) % n), "of the ring is"),
    "taps turned round": (_ring(taps=lambda weight: weight[:, ::-1]), "the result["),
    "no silu": (_ring(gate=lambda out: out), "the result["),
    "the ring is left": (_ring(update=False), "of the ring is"),
    "a piece begins anew": (_fresh, "the result["),
    "a copy of the ring": (_other_ring, "of the ring is"),
    "changes its inputs": (_scales, "changed xBC, weight or bias"),
    "gives nothing": (lambda *given: None, "gave None"),
}

# Exercise 3: in pieces


def _pieces(fill=-np.inf, inputs=lambda xBC, filled: xBC, before=True, initial=True, cut=True, carry=True):
    """Right, but for what is said."""

    def prefill(block, xBC, dt, conv_state, ssm_state, piece):
        tokens, rows, y = len(xBC), len(conv_state), []
        if not initial:
            conv_state, ssm_state = np.zeros_like(conv_state), np.zeros_like(ssm_state)
        zeros = np.zeros_like(ssm_state)
        for begin in range(0, tokens, piece):
            here = slice(begin, begin + piece)
            empty = piece - len(xBC[here])
            filled = np.pad(xBC[here], ((0, empty), (0, 0)))
            steps = np.pad(dt[here], ((0, empty), (0, 0)), constant_values=fill)
            out, ssm_state = block(filled, steps, conv_state, ssm_state if carry else zeros)
            real = inputs(xBC[here], filled)
            conv_state = (np.concatenate([conv_state, real]) if before else real)[-rows:]
            y.append(out)
        y = np.concatenate(y)
        return y[:tokens] if cut else y, conv_state, ssm_state

    return prefill


def _drops_the_rest(block, xBC, dt, conv_state, ssm_state, piece):
    whole = len(xBC) // piece * piece
    if not whole:
        return PIECES(block, xBC, dt, conv_state, ssm_state, piece)
    y, *states = PIECES(block, xBC[:whole], dt[:whole], conv_state, ssm_state, piece)
    return np.concatenate([y, np.zeros((len(xBC) - whole, *y.shape[1:]))]), *states


def _token_by_token(block, xBC, dt, conv_state, ssm_state, piece):
    y = []
    for t in range(len(xBC)):
        out, conv_state, ssm_state = PIECES(block, xBC[t : t + 1], dt[t : t + 1], conv_state, ssm_state, piece)
        y.append(out)
    return np.concatenate(y), conv_state, ssm_state


def _overlaps(block, xBC, dt, conv_state, ssm_state, piece):
    """The last piece begins earlier, so that it is whole: tokens are taken twice."""
    tokens, rows, y = len(xBC), len(conv_state), np.zeros((len(xBC), *ssm_state.shape[:2]))
    if tokens < piece:
        return PIECES(block, xBC, dt, conv_state, ssm_state, piece)
    for begin in [*range(0, tokens - piece, piece), tokens - piece]:
        here = slice(begin, begin + piece)
        y[here], ssm_state = block(xBC[here], dt[here], conv_state, ssm_state)
        conv_state = np.concatenate([conv_state, xBC[here]])[-rows:]
    return y, conv_state, ssm_state


def _in_place(block, xBC, dt, conv_state, ssm_state, piece):
    y, conv, ssm = PIECES(block, xBC, dt, conv_state, ssm_state, piece)
    conv_state[:], ssm_state[:] = conv, ssm
    return y, conv_state, ssm_state


PIECES = _pieces()
EX3 = {
    "as it was": (_pieces(0, lambda xBC, filled: filled, before=False), "state["),
    "a step of softplus(bias) behind the end": (_pieces(0), "must leave the state as it is"),
    "a dt of −1": (_pieces(-1.0), "must leave the state as it is"),
    "inputs of tokens that are not there": (_pieces(inputs=lambda xBC, filled: filled), "tokens that are not there"),
    "a short piece's inputs alone": (_pieces(before=False), "the conv state has shape"),
    "states before are forgotten": (_pieces(initial=False), "prompt 2"),
    "the SSM state stays behind": (_pieces(carry=False), "y["),
    "what was filled up is given back": (_pieces(cut=False), "y has shape"),
    "the rest is dropped": (_drops_the_rest, "y["),
    "token by token": (_token_by_token, "are enough"),
    "the last piece overlaps": (_overlaps, "with width = 4"),
    "states in place": (_in_place, "changed what it was given"),
    "another length": (
        lambda block, xBC, dt, conv, ssm, piece: (block(xBC, dt, conv, ssm)[0], conv, ssm),
        "block's xBC has shape",
    ),
}

RIGHT = {2: RING, 3: PIECES}
WRONG = {2: EX2, 3: EX3}
