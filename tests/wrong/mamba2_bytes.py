"""Wrong answers to exercise 1 of chapter 18, in the form of mamba2.py's."""

from exercises.checks.mamba2_bytes import crossing, state_of, token_bytes, token_of


def _counts(how=None, read_all=True, cross=crossing):
    """(token_bytes, crossing): right, but for what is said."""

    def count(sizes, layers, kv_len, state_bits=32):
        read, written = token_bytes(sizes, layers, kv_len, state_bits, **(how or {}))
        return read if read_all else written, written

    return count, cross


def _adds(read=0, written=lambda states, token: states + token):
    def count(sizes, layers, kv_len, state_bits=32):
        found = token_bytes(sizes, layers, kv_len, state_bits)[0]
        states = layers.count("mamba") * state_of(sizes, state_bits)
        token = layers.count("attention") * token_of(sizes)
        return found + read * token, written(states, token)

    return count, crossing


def _crosses(states=2, more=1, none=None):
    def cross(sizes, layers, state_bits=32):
        if "attention" not in layers:
            return none
        held = states * layers.count("mamba") * state_of(sizes, state_bits)
        return held // (layers.count("attention") * token_of(sizes)) + more

    return cross


def _sorts(sizes, layers, kv_len, state_bits=32):
    layers.sort()
    layers.reverse()
    layers.append(layers.pop(0))
    return token_bytes(sizes, layers, kv_len, state_bits)


RIGHT = {1: _counts()}
EX1 = {
    "states in every layer": (_counts({"states_everywhere": True}), "states are read and written in every layer"),
    "a cache in every layer": (_counts({"cache_everywhere": True}), "bytes read, expected"),
    "width inputs": (_counts({"conv_rows": 0}), "has width − 1 inputs of a channel, not width"),
    "the convolution over x alone": (_counts({"conv_of_x": True}), "runs over x, B and C"),
    "in_proj without z": (_counts({"no_z": True}), "in_proj gives z"),
    "in_proj without dt": (_counts({"no_dt": True}), "in_proj gives dt too"),
    "one group": (_counts({"groups": 1}), "there may be several groups"),
    "groups are heads": (_counts({"groups": "nheads"}), "for each group, not for each head"),
    "only keys": (_counts({"cache": 0.5}), "only the keys"),
    "heads of queries": (_counts({"kv_heads": "n_heads"}), "heads of keys and values, not of queries"),
    "no scales": (_counts({"scales": 0}), "states of 8 bits"),
    "feed-forward behind attention alone": (_counts({"ffn_everywhere": False}), "ffn = 96"),
    "the whole embedding": (_counts({"row": "vocab"}), "the whole embedding"),
    "no head": (_counts({"head": 0}), "the head is not counted"),
    "this token's key twice": (_adds(read=1), "bytes read, expected"),
    "states are not written": (_adds(written=lambda states, token: token), "bytes written, expected"),
    "keys are not written": (_adds(written=lambda states, token: states), "bytes written, expected"),
    "states read, not written, at the crossing": (_counts(cross=_crosses(states=1)), "crossing: "),
    "the last length below": (_counts(cross=_crosses(more=0)), "crossing: "),
    "0 where there is none": (_counts(cross=_crosses(none=0)), "it gave 0, expected None"),
    "changes the list": ((_sorts, crossing), "changed the sizes or the list of layers"),
    "floats": ((lambda *given: tuple(map(float, token_bytes(*given))), crossing), "expected two whole numbers"),
}
WRONG = {1: EX1}
