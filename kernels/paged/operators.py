"""The package's functions as operators of torch.library: paged_decode, paged_decode_shared, paged_append_attention.
They take the
tensors of a cache, and torch.compile looks through the object."""

from kernels.attention.arguments import expect_scale
from kernels.paged import appending, decoding
from kernels.paged.arguments import expect_attention
from kernels.paged.cache import PagedCache
from kernels.paged.prefixes import prefixes_of
from lab.operators import Prepared, operator

POOL = "Tensor q, Tensor k_pages, Tensor v_pages, Tensor table, Tensor lens, Tensor slots"
INPUTS = f"{POOL}, float? scale=None, bool pdl=False, bool invariant=False"


# As the functions themselves do; a list of requests is no tensor, and so not for what was prepared.
ASK = (
    "run((scale, True if pdl else False, True if invariant else False), out, q, cache.k_pages, cache.v_pages, "
    "cache.table, cache.lens, requests) if variant is None{} and type(cache) is PagedCache else None"
)
LISTED = (
    "Tensor q, Tensor k_pages, Tensor v_pages, Tensor table, Tensor lens, Tensor items, Tensor count, Tensor rows, "
)
LISTED += "Tensor levels, float? scale=None, bool pdl=False"


def _shared(q, k_pages, v_pages, table, lens, items, count, rows, levels, scale=None, *, out=None, pdl=False):
    """appending.shared_tensors, for torch.compile."""
    pool, listed = (k_pages, v_pages, table, lens), (items, count, rows, levels)
    return appending.shared_tensors(q, *pool, *listed, scale, out=out, pdl=pdl)


def _fake_shared(q, k_pages, v_pages, table, lens, items, count, rows, levels, scale=None, pdl=False):
    return appending.expect_shared(q, k_pages, v_pages, table, lens, items, count, rows, levels, scale, None)[1]


shared = operator("paged_decode_shared", LISTED, fake=_fake_shared)(_shared)


def _attention(function, run, new, calls):
    where = function.__name__

    def fake(q, k_pages, v_pages, table, lens, slots, scale=None, pdl=False, invariant=False):
        return expect_attention(where, q, k_pages, v_pages, table, lens, slots, scale, None, new)[1]

    def unpack(
        operators, q, cache, requests, scale=None, *, out=None, pdl=False, invariant=False, prefixes=None, variant=None
    ):
        if variant is not None:
            raise NotImplementedError(f"{where}: an operator, as torch.compile makes one of it, takes no variant")
        if cache.bits != 16:
            raise NotImplementedError(f"{where}: an operator, as torch.compile makes one of it, takes no bits but 16")
        if prefixes is not None:
            p = prefixes_of(where, cache, requests, prefixes)
            if not invariant and not appending.why_not(q, cache.k_pages, expect_scale(where, scale, q.shape[-1])):
                tensors = cache.k_pages, cache.v_pages, cache.table, cache.lens, p.items, p.count, p.rows, p.levels
                return shared(q, *tensors, scale, out=out, pdl=pdl)
        slots = decoding.slots_of(where, cache, requests)
        expect_scale(where, scale, q.shape[-1])
        tensors = cache.k_pages, cache.v_pages, cache.table, cache.lens, slots
        return operators(q, *tensors, scale, pdl, invariant, out=out)

    ask = ASK.format("" if new else " and prefixes is None")
    prepared = Prepared(calls, ask, names={"PagedCache": PagedCache})
    return operator(f"paged_{where}", INPUTS, fake=fake, unpack=unpack, call=run, prepared=prepared)(function)


decode = _attention(decoding.decode, decoding.decode_tensors, None, decoding.DECODES)
append_attention = _attention(decoding.append_attention, decoding.append_tensors, "new", decoding.APPENDS)
