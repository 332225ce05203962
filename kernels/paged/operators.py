"""The package's functions as operators of torch.library: paged_decode, paged_append_attention. They take the
tensors of a cache, and torch.compile looks through the object."""

from kernels.attention.arguments import expect_scale
from kernels.paged import decoding
from kernels.paged.arguments import expect_attention
from kernels.paged.cache import PagedCache
from lab.operators import Prepared, operator

POOL = "Tensor q, Tensor k_pages, Tensor v_pages, Tensor table, Tensor lens, Tensor slots"
INPUTS = f"{POOL}, float? scale=None, bool pdl=False, bool invariant=False"


# As the functions themselves do; a list of requests is no tensor, and so not for what was prepared.
ASK = (
    "run((scale, True if pdl else False, True if invariant else False), out, q, cache.k_pages, cache.v_pages, "
    "cache.table, cache.lens, requests) if type(cache) is PagedCache else None"
)


def _attention(function, run, new, calls):
    where = function.__name__

    def fake(q, k_pages, v_pages, table, lens, slots, scale=None, pdl=False, invariant=False):
        return expect_attention(where, q, k_pages, v_pages, table, lens, slots, scale, None, new)[1]

    def unpack(operators, q, cache, requests, scale=None, *, out=None, pdl=False, invariant=False):
        slots = decoding.slots_of(where, cache, requests)
        expect_scale(where, scale, q.shape[-1])
        tensors = cache.k_pages, cache.v_pages, cache.table, cache.lens, slots
        return operators(q, *tensors, scale, pdl, invariant, out=out)

    prepared = Prepared(calls, ASK, names={"PagedCache": PagedCache})
    return operator(f"paged_{where}", INPUTS, fake=fake, unpack=unpack, call=run, prepared=prepared)(function)


decode = _attention(decoding.decode, decoding.decode_tensors, None, decoding.DECODES)
append_attention = _attention(decoding.append_attention, decoding.append_tensors, "new", decoding.APPENDS)
