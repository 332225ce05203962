"""Measure the layer of chapter 05 on a GPU: Mistral-7B's shapes, one token, the feed-forward block and the whole layer.

Several layers with weights of their own, 1 GB or more in all, take turns, so that no weight is in the cache. Peers: the
same mathematics as PyTorch runs it (eager), and as torch.compile makes it (kernels/compiling.py: with PDL or without;
tuned: with its widest search, the best of three compiles); from separate matrices and from joined ones (q, k, v in one;
gate, up in one). All are timed in a CUDA graph of ours, which suits torch.compile better than the graphs of its own
modes "reduce-overhead" and "max-autotune".
"""

import functools

import torch
import torch.nn.functional as F

from kernels import compiling, fusion, running
from kernels.benching import empty, measure, peer_rows
from kernels.gemv import RING
from lab import Ladder, cuda_timing
from lab.check import Verdict
from ref.roofline import MISTRAL_7B

DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
EPS = 1e-5
HERE = "kernels/fusion/"
GEMV, PLAN = ("kernels/gemv/gemv.cu", "kernels/gemv/plan.py"), HERE + "launches.py"
UNFUSED = (*GEMV, HERE + "rmsnorm.cu", HERE + "elementwise.cu")
FEED_FORWARD = (HERE + "norm_glu.cu", HERE + "gemv_residual.cu", PLAN)
FUSED = (HERE + "norm_qkv.cu", *FEED_FORWARD)


def ladders(seconds=0.3):
    """Check, then time, every step and peer. Returns two Ladders for each dtype."""
    cuda_timing.expect_gpu("the fusion ladder")
    compiling.ahead("kernels.fusion.bench")
    return [_ladder(*case, seconds) for case in _cases() if running.wants(_title(*case[::2]))]


def _cases():
    """(name of a dtype, dtype, whether the whole layer) of each ladder."""
    return [(name, dtype, whole) for name, dtype in DTYPES.items() for whole in (False, True)]


def ways():
    """What torch.compile tunes for each ladder, by its title."""
    return {_title(*case[::2]): functools.partial(_ways, *case) for case in _cases()}


def _title(name, whole):
    return f"Mistral-7B, {'decoder layer without attention' if whole else 'feed-forward block'}, {name}"


def further(roof, versions):
    """The trials, in a file of their own. Returns the paths written."""
    from kernels import trials  # whose modules stand on this one

    return trials.store("fusion", roof, versions)


def _ladder(name, dtype, whole, seconds):
    empty()
    layers, xs, (moved, flops) = _cold_layers(dtype, whole)
    ladder = Ladder(_title(name, whole), bound="read", device="cuda")
    wanted = _truth(layers[-1], xs[-1], whole)
    families = [(way.name, compiling.modes(way)) for way in _ways(name, dtype, whole, layers, xs)]
    compiled = ((row.title, row.calls, ()) for row in peer_rows(families, 0, ladder=ladder.title))
    for title, calls, sources in (*_ours(layers, xs, whole), *_eager(layers, xs, whole), *compiled):
        try:
            error = max(_error(title, calls[-1](), wanted, dtype) for _ in range(2))
        except ValueError as wrong:
            if sources:
                raise
            print(f"{ladder.title}: {wrong}; it is left out")
            continue
        ladder.plan(title, calls, bytes=moved, flops=flops, verdict=Verdict(shapes=1, error=error), sources=sources)
    best = "4 launches" if whole else "2 launches"
    measure(ladder, seconds, sustain=(best, f"{best}, PDL"))
    ladder.calls.clear()  # they hold the layers
    return running.done(ladder)


def _cold_layers(dtype, whole):
    """Layers, an x for each, and the (bytes, flops) of one: weights of 1 GB or more in all, none of which is in the
    cache when its turn comes again."""
    layers = [random_layer(MISTRAL_7B, dtype, DEVICE)]
    work = layers[0].work() if whole else layers[0].feed_forward_work()
    layers += [random_layer(MISTRAL_7B, dtype, DEVICE) for _ in range(max(1, cuda_timing.COLD // work[0]))]
    return layers, [torch.randn(MISTRAL_7B.hidden, device=DEVICE).to(dtype) for _ in layers], work


def random_layer(model, dtype, device="cuda"):
    """A layer with random weights that keep the size of what passes through them."""

    def matrix(rows, cols):
        return (torch.randn(rows, cols, device=device) * cols**-0.5).to(dtype)

    def norm():
        return (1 + torch.randn(model.hidden, device=device) / 10).to(dtype)

    hidden, kv_rows, ffn = model.hidden, model.n_kv_heads * model.head_dim, model.ffn
    first = norm(), matrix(hidden, hidden), matrix(kv_rows, hidden), matrix(kv_rows, hidden), matrix(hidden, hidden)
    return fusion.DecoderLayer(*first, norm(), matrix(ffn, hidden), matrix(ffn, hidden), matrix(hidden, ffn), EPS)


def _ours(layers, xs, whole):
    """Yield (title, one call for each layer, sources) for our steps."""
    if whole:
        names = [("unfused", "12 launches", UNFUSED), ("fused", "4 launches", FUSED)]
        names.append(("one_launch", "1 launch", (HERE + "layer.cu", PLAN)))
    else:
        names = [("unfused_feed_forward", "6 launches", UNFUSED), ("feed_forward", "2 launches", FEED_FORWARD)]
    for name, title, sources in names:
        for pdl in (False, True):
            calls = [functools.partial(getattr(it, name), x, pdl=pdl) for it, x in zip(layers, xs)]
            ring = RING if pdl and sources is UNFUSED else ()  # gemv has it with PDL alone
            yield title + (", PDL" if pdl else ""), calls, (*sources, *ring)


def _eager(layers, xs, whole):
    """The same for PyTorch as it is."""
    for title, (function, bind) in zip(("", ", joined matrices"), _as_torch_writes_it(layers, xs, whole)):
        yield f"torch eager{title}", bind(function), ()


def _ways(name, dtype, whole, layers=None, xs=None):
    """What torch.compile gets. Reset, as it gives up after a few shapes."""
    if layers is None:
        layers, xs, _ = _cold_layers(dtype, whole)
    torch.compiler.reset()
    apart, joined = _as_torch_writes_it(layers, xs, whole)
    way = functools.partial(compiling.Way, _title(name, whole))
    return [
        way("torch.compile", *apart, tuned=False),
        way("torch.compile, tuned", *apart),
        way("torch.compile, tuned, joined matrices", *joined),
    ]


def _as_torch_writes_it(layers, xs, whole):
    """(function, a list of calls of something like it), apart and with joined matrices. x has a batch of 1, as it has
    there."""
    plain, joined = (_layer, _layer_joined) if whole else (_ffn, _ffn_joined)
    take, take_joined = (_layer_weights, _layer_joined_weights) if whole else (_ffn_weights, _ffn_joined_weights)
    apart = [(x[None], *take(it)) for it, x in zip(layers, xs)]
    together = [(x[None], *take_joined(it)) for it, x in zip(layers, xs)]
    return (plain, functools.partial(_bound, apart)), (joined, functools.partial(_bound, together))


def _bound(every, run):
    return [functools.partial(_without_grad, run, *arguments) for arguments in every]


def _without_grad(run, *args):
    with torch.no_grad():
        return run(*args)


def _norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS)


def _ffn(h, norm, gate, up, down):
    n = _norm(h, norm)
    return h + F.linear(F.silu(F.linear(n, gate)) * F.linear(n, up), down)


def _ffn_weights(it):
    return it.ffn_norm, it.W_gate, it.W_up, it.W_down


def _ffn_joined(h, norm, gate_up, down):
    gate, up = F.linear(_norm(h, norm), gate_up).chunk(2, -1)
    return h + F.linear(F.silu(gate) * up, down)


def _ffn_joined_weights(it):
    return it.ffn_norm, torch.cat([it.W_gate, it.W_up]), it.W_down


def _layer(x, norm, q, k, v, o, *ffn):
    n = _norm(x, norm)
    queries = F.linear(n, q)
    return _ffn(x + F.linear(queries, o), *ffn), F.linear(n, k), F.linear(n, v)


def _layer_weights(it):
    return it.attention_norm, it.Wq, it.Wk, it.Wv, it.Wo, *_ffn_weights(it)


def _layer_joined(x, norm, qkv, o, *ffn):
    found = F.linear(_norm(x, norm), qkv)
    return _ffn_joined(x + F.linear(found[:, : len(o)], o), *ffn), found


def _layer_joined_weights(it):
    return it.attention_norm, torch.cat([it.Wq, it.Wk, it.Wv]), it.Wo, *_ffn_joined_weights(it)


def _truth(it, x, whole):
    """What a step must give, in float64."""
    x, h = x.double(), x.double()

    def norm(x, weight):
        return x / (x.square().mean() + EPS).sqrt() * weight.double()

    if whole:
        h = x + it.Wo.double() @ (it.Wq.double() @ norm(x, it.attention_norm))
    n = norm(h, it.ffn_norm)
    return h + it.W_down.double() @ (F.silu(it.W_gate.double() @ n) * (it.W_up.double() @ n))


def _error(title, result, wanted, dtype):
    """The error by the norm; ValueError if a step is wrong. Peers round after every operation, and are off by more."""
    y = result[0] if isinstance(result, tuple) else result
    error = float(torch.linalg.vector_norm(y.reshape(-1).double() - wanted) / torch.linalg.vector_norm(wanted))
    if not error <= 2 * torch.finfo(dtype).eps:  # NaN too
        raise ValueError(f"{title} is not right, so it is not timed: relative error {error:.2g}")
    return error
