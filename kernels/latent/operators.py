"""The package's functions as operators of torch.library: latent_decode, and latent_split and so on of its rungs. They
take a cache's tensors, and torch.compile looks through LatentPages."""

import functools

from kernels.attention.arguments import expect_scale
from kernels.latent import decoding
from kernels.latent.arguments import LatentPages, expect_decode, tensors_of
from lab.operators import Prepared, operator

INPUTS = "Tensor q, Tensor cache, float scale, Tensor? table=None, Tensor? kv_lens=None, bool pdl=False"
ASK = (
    "run(({rung!r}, scale, True if pdl else False), out, q, *(cache if type(cache) is LatentPages else (cache, None)), "
    "kv_lens)"
)


def _decode(function, rung=None):
    where = rung or "decode"

    def fake(q, cache, scale, table=None, kv_lens=None, pdl=False):
        return expect_decode(where, q, cache, table, kv_lens, scale, None)[1]

    def unpack(operators, q, cache, *, kv_lens=None, scale, out=None, pdl=False):
        tokens, table = tensors_of(where, cache)
        return operators(q, tokens, expect_scale(where, scale, 1), table, kv_lens, pdl, out=out)

    prepared = Prepared(decoding.CALLS, ASK.format(rung=rung), names={"LatentPages": LatentPages})
    run = functools.partial(decoding.decode_tensors, rung=rung)
    return operator(f"latent_{where}", INPUTS, fake=fake, unpack=unpack, call=run, prepared=prepared)(function)


decode = _decode(decoding.decode)
split, last, in_place = (_decode(rung, rung.__name__) for rung in (decoding.split, decoding.last, decoding.in_place))
