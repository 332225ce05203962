"""The public kernels that our decode attention is measured beside, each called as suits it best.

    SDPA flash, SDPA cuDNN   torch's scaled_dot_product_attention; grouped heads through enable_gqa
    FlashInfer               on pages of 64 tokens, in order; plain, and with programmatic dependent launch
    FlexAttention            through torch.compile

All read the cache where it lies, tokens first: on an H200 a copy with heads first made XQA in fp8 3 % faster, and no
other. FlashInfer's ways are XQA, its batch wrapper (as it comes, and with the kernel for Hopper, fa3), its function for
one sequence, and BatchAttention, which shares out sequences of any lengths. What was never the fastest there is not
here: SDPA with the heads of a group as 4 queries, and FlashInfer's kernels without tensor cores on a 16-bit cache. A
peer that is not installed, or refuses a case, is left out with a printed sentence.

    sixteen_bit(q, caches)   q (batch, n_heads, head_dim); caches a list of (k, v), one for each call, k and v (batch,
    eight_bit(q, caches)     kv_len, n_kv_heads, head_dim). All yield (name, {mode: make}); make() returns the list of
    flex(q, caches)          calls. The fastest mode counts
"""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

PAGE = 64  # tokens
WORKSPACE = 512 << 20  # bytes
FA3_FROM = 16  # sequences: it does not cut one into parts, and a few do not fill the card
IN_FP8 = "products in fp8"


def sixteen_bit(q, caches):
    """SDPA's two kernels, and FlashInfer: the cache in the type of q."""
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        yield f"SDPA {name}", {"enable_gqa": functools.partial(_each, functools.partial(_sdpa, backend, q), caches)}
    if (flashinfer := _flashinfer()) is None:
        return
    for pdl in (False, True):
        modes = {"XQA": functools.partial(_xqa, q, caches, pdl)}
        modes["batch, tensor cores"] = functools.partial(_batch, q, caches, pdl, True)
        if len(q) == 1 and not pdl:  # it knows no PDL
            run = functools.partial(flashinfer.single_decode_with_kv_cache, q[0], use_tensor_cores=True)
            modes["single, tensor cores"] = functools.partial(_each, run, [(k[0], v[0]) for k, v in caches])
        if len(q) >= FA3_FROM and not pdl:
            modes["batch, fa3"] = functools.partial(_batch, q, caches, pdl, True, "fa3")
        if not pdl:
            modes["BatchAttention"] = functools.partial(_batch_attention, q, caches)
        yield "FlashInfer, PDL" if pdl else "FlashInfer", modes


def eight_bit(q, caches):
    """FlashInfer on a cache of e4m3 without scales. XQA rounds q and the weights to e4m3, too: it is less exact."""
    if _flashinfer() is None:
        return
    for pdl in (False, True):
        also = ", PDL" if pdl else ""
        modes = {"batch, tensor cores": True, "batch, CUDA cores": False}
        yield f"FlashInfer{also}", {m: functools.partial(_batch, q, caches, pdl, cores) for m, cores in modes.items()}
        yield f"FlashInfer, {IN_FP8}{also}", {"XQA": functools.partial(_xqa, q, caches, pdl)}


def flex(q, caches):
    """FlexAttention. Compiled anew for every shape, which takes seconds."""
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(k, v):
        return compiled(*_heads_first(q, k, v), enable_gqa=True)

    yield "FlexAttention", {"compiled": functools.partial(_each, run, caches)}


def _each(run, caches):
    """A call for each cache."""
    return [functools.partial(run, *cache) for cache in caches]


def _heads_first(q, k, v):
    """Views as torch wants them: (batch, heads, tokens, head_dim)."""
    return q[:, :, None], k.transpose(1, 2), v.transpose(1, 2)


def _sdpa(backend, q, k, v):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*_heads_first(q, k, v), enable_gqa=True)


@functools.cache
def _flashinfer():
    """The module, or None with a sentence, said once."""
    try:
        import flashinfer
    except ImportError as error:
        print(f"FlashInfer cannot be imported ({error}): its rows are left out; pip install flashinfer-python")
        return None
    return flashinfer


@functools.cache
def _workspace(purpose, device):
    """Scratch memory, which must be zero at first and must not be shared."""
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


def _pages(caches):
    """(k, v) of each cache in pages, without a copy: (pages, PAGE, n_kv_heads, head_dim)."""
    return [tuple(x.view(-1, PAGE, *x.shape[2:]) for x in cache) for cache in caches]


def _batch(q, caches, pdl, tensor_cores, backend="auto"):
    """Calls of FlashInfer's BatchDecodeWithPagedKVCacheWrapper, planned beforehand."""
    batch, kv_len, n_kv_heads, head_dim = caches[0][0].shape
    pages = kv_len // PAGE
    workspace = _workspace("batch", q.device)
    make = _flashinfer().BatchDecodeWithPagedKVCacheWrapper
    wrapper = make(workspace, "NHD", use_tensor_cores=tensor_cores, backend=backend)
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32) * pages,
        torch.arange(batch * pages, dtype=torch.int32, device=q.device),
        torch.full((batch,), PAGE, dtype=torch.int32),
        q.shape[1],
        n_kv_heads,
        head_dim,
        PAGE,
        q_data_type=q.dtype,
        kv_data_type=caches[0][0].dtype,
    )
    return [functools.partial(wrapper.run, q, cache, enable_pdl=pdl) for cache in _pages(caches)]


def _batch_attention(q, caches):
    """Calls of FlashInfer's BatchAttention, planned beforehand; it has no PDL."""
    batch, kv_len, n_kv_heads, head_dim = caches[0][0].shape
    ends = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    wrapper = _flashinfer().BatchAttention(kv_layout="NHD", device=str(q.device))
    wrapper.plan(
        ends,
        ends * (kv_len // PAGE),
        torch.arange(batch * kv_len // PAGE, dtype=torch.int32, device=q.device),
        torch.full((batch,), kv_len, dtype=torch.int32, device=q.device),
        q.shape[1],
        n_kv_heads,
        head_dim,
        head_dim,
        PAGE,
        q_data_type=q.dtype,
        kv_data_type=caches[0][0].dtype,
    )
    return [functools.partial(_first, wrapper.run, q, cache) for cache in _pages(caches)]


def _first(run, *arguments):
    return run(*arguments)[0]  # behind it come the logarithms of the sums


def _xqa(q, caches, pdl):
    """Calls of FlashInfer's XQA, the kernel that it took over from TensorRT-LLM."""
    batch, kv_len, _, head_dim = caches[0][0].shape
    table = torch.arange(batch * kv_len // PAGE, dtype=torch.int32, device=q.device).view(batch, -1)
    lengths = torch.full((batch,), kv_len, dtype=torch.uint32, device=q.device)
    rest = _workspace("XQA", q.device), table, lengths, kv_len, head_dim**-0.5, 1.0
    run = _flashinfer().decode.xqa_batch_decode_with_kv_cache
    return [functools.partial(run, q, cache, *rest, enable_pdl=pdl) for cache in _pages(caches)]
