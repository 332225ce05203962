"""embed, rope_append, greedy and attend as operators of torch.library, which say what they write to: llm_embed and
so on, and llm_rope_append_quantized of the parts of two caches. torch.compile looks through the caches."""

from kernels.kv_cache import QuantizedKV
from kernels.llm import attending, operations
from kernels.llm.arguments import expect_quantised
from lab.operators import operator

HEAD = "Tensor qkv, Tensor turns, Tensor kv_len, "
OPTIONS = ", Tensor? bias=None, Tensor? q_norm=None, Tensor? k_norm=None, float eps=1e-06, bool pdl=False"
PLAIN = f"{HEAD}Tensor(k!) k, Tensor(v!) v{OPTIONS}"
CODES = "Tensor({0}c!) {0}_codes, Tensor({0}s!) {0}_scale"
PARTS = f"{HEAD}{CODES.format('k')}, {CODES.format('v')}, int[] shape, int bits, int group, float v_peak{OPTIONS}"


def _queries(qkv, *caches, pdl=False, **options):
    out, _ = operations.expect_rope_append(qkv, *caches, **options, memory=False)
    return out


def _caches(qkv, k_codes, k_scale, v_codes, v_scale, shape, bits, group, v_peak):
    """Two caches, as far as rope_append needs them."""
    where, made = "rope_append", []
    if len(shape) != 4:
        raise ValueError(f"{where}: shape must be (1, capacity, n_kv_heads, head_dim), got {tuple(shape)}")
    for name, codes, scale, role in (("k", k_codes, k_scale, "keys"), ("v", v_codes, v_scale, "values")):
        if bits not in (8, 4) or group < 16 or shape[3] % 16 or shape[3] % group:
            wanted = "bits 8 or 4, and head_dim a multiple of group, which is one of 16"
            raise ValueError(f"{where}: shape, bits and group must be {wanted}, got {tuple(shape)}, {bits} and {group}")
        cache = QuantizedKV.of_parts(where, name, codes, scale, shape, bits, "token", group, role, v_peak)
        cache.dtype = qkv.dtype
        made.append(cache)
    return made


def _of_parts(
    qkv, turns, kv_len, k_codes, k_scale, v_codes, v_scale, shape, bits, group, v_peak, *, bias=None, q_norm=None,
    k_norm=None, eps=1e-6, out=None, pdl=False,
):  # fmt: skip
    k, v = _caches(qkv, k_codes, k_scale, v_codes, v_scale, shape, bits, group, v_peak)
    how = dict(bias=bias, q_norm=q_norm, k_norm=k_norm, eps=eps, out=out, pdl=pdl)
    return operations.rope_append(qkv, turns, kv_len, k, v, **how)


def _fake_of_parts(qkv, turns, kv_len, k_codes, k_scale, v_codes, v_scale, shape, bits, group, v_peak, **options):
    caches = _caches(qkv, k_codes, k_scale, v_codes, v_scale, shape, bits, group, v_peak)
    return _queries(qkv, turns, kv_len, *caches, **options)


_of_parts = operator("llm_rope_append_quantized", PARTS, fake=_fake_of_parts)(_of_parts)


def _unpack(operators, qkv, turns, kv_len, k, v, **options):
    if not (isinstance(k, QuantizedKV) or isinstance(v, QuantizedKV)):
        return operators(qkv, turns, kv_len, k, v, **options)
    expect_quantised("rope_append", k, v, qkv)
    parts = k.packed, k.scale, v.packed, v.scale, list(k.shape), k.bits, k.group, v.peak
    return _of_parts(qkv, turns, kv_len, *parts, **options)


embed = operator(
    "llm_embed", "Tensor E, Tensor token, bool pdl=False",
    fake=lambda E, token, pdl=False: operations.expect_embed(E, token),
)(operations.embed)  # fmt: skip
rope_append = operator("llm_rope_append", PLAIN, fake=_queries, unpack=_unpack)(operations.rope_append)


def _attended(qkv, *caches, pdl=False, **options):
    return attending.expect_attend(qkv, *caches, **options, memory=False)[0]


def _greedy(operators, logits, token, kv_len, state, *, pdl=False):
    operators(logits, token, kv_len, state, pdl=pdl)
    return token


def _greedy_call(**how):
    operations.greedy(**how)


def _greedy_fake(pdl=False, **tensors):
    operations.expect_greedy(**tensors, memory=False)


FURTHER = "float eps=1e-06, float? scale=None, bool beside=False"
attend = operator(
    "llm_attend", PLAIN.replace("float eps=1e-06", FURTHER), fake=_attended,
)(attending.attend)  # fmt: skip
greedy = operator(
    "llm_greedy", "Tensor logits, Tensor(t!) token, Tensor(l!) kv_len, Tensor(s!) state, bool pdl=False",
    fake=_greedy_fake, results="()", unpack=_greedy, call=_greedy_call,
)(operations.greedy)  # fmt: skip
