"""The package's functions as operators of torch.library: attention_decode, attention_mix_shared and so on."""

import torch

from kernels.attention import decoding, mix, rungs
from kernels.attention.arguments import expect_decode
from lab.operators import Prepared, operator
from lab.tensors import expect

DECODE = "Tensor q, Tensor k, Tensor v, float? scale=None, Tensor? kv_lens=None"


def expect_lengths(where, kv_lens, q):
    """What can be said of kv_lens without looking into them."""
    if kv_lens is not None:
        expect(where, "kv_lens", kv_lens, q, (q.shape[0],), (torch.int32,))


def _decode(rung, further="", prepared=None):
    """A rung of decode attention; `further`: arguments that it has besides."""
    where = rung.__name__

    def fake(q, k, v, scale=None, *, kv_lens=None, splits=None, pdl=False):
        rungs.expect_splits(where, splits)
        _, out = expect_decode(where, q, k, v, scale, None, alignment=1)
        expect_lengths(where, kv_lens, q)
        return out

    return operator(f"attention_{where}", DECODE + further, fake=fake, prepared=prepared)(rung)


def _mix(rung):
    where = rung.__name__

    def fake(att, v):
        return mix._expect_all(where, att, v, None)

    return operator(f"attention_{where}", "Tensor att, Tensor v", fake=fake)(rung)


ASK = "run((scale, True if pdl else False), out, q, k, v, kv_lens)"  # as decoding.decode does
decode = _decode(decoding.decode, ", bool pdl=False", Prepared(decoding.CALLS, ASK))
two_pass, online = _decode(rungs.two_pass), _decode(rungs.online)
split, split_triton = (_decode(rung, ", int? splits=None") for rung in (rungs.split, rungs.split_triton))
mix_naive, mix_split, mix_shared = map(_mix, (mix.mix_naive, mix.mix_split, mix.mix_shared))
