"""in_proj and out_proj of a prompt with what stands beside them, in float64: on the SIMT machine, and on a card where
there is one that can."""

from types import SimpleNamespace

import pytest
import torch
from test_mamba2_prompt import SMALL, off, states

import ref.mamba2
from kernels.mamba2 import prompt, prompt_products, shapes

DEVICES = ["cpu"] + ["cuda"] * (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9)
ALLOWED = {torch.float16: 5.2e-4, torch.bfloat16: 4.1e-3}
on_both = pytest.mark.parametrize("device", DEVICES)


def made_for(tokens, hidden, inner, channels, heads, width, like):
    shape = SimpleNamespace(hidden=hidden, d_inner=inner, channels=channels, in_rows=inner + channels + heads)
    made = prompt_products.between(shape, tokens, width, like)
    for tensor in (made.normed, made.projected, made.squares, made.rest, made.edges, *made.roots):
        tensor.fill_(torch.nan)
    return made


@on_both
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("convolve", [False, True])
@pytest.mark.parametrize(
    "tokens, hidden, inner, channels, heads, width, begins",
    [
        (1, 64, 64, 64, 8, 4, True),  # fewer tokens than taps
        (130, 72, 64, 128, 8, 4, True),  # two tiles, the second of two rows; k no whole step
        (66, 136, 128, 192, 16, 2, False),
        (191, 64, 192, 64, 72, 8, True),  # the channels in the middle of a tile; a last strip of 63
    ],
)
def test_in_proj(tokens, hidden, inner, channels, heads, width, begins, convolve, dtype, device):
    torch.manual_seed(tokens)
    rows = inner + channels + heads
    x, W = torch.randn(tokens, hidden).to(dtype), (torch.randn(rows, hidden) / hidden**0.5).to(dtype)
    taps, bias, rest = torch.randn(channels, width), torch.randn(channels), torch.rand(tokens) + 0.5
    state = torch.randn(1, width - 1, channels).to(dtype) if begins else None
    there = lambda t: None if t is None else t.clone().to(device)  # noqa: E731
    made, kept = made_for(tokens, hidden, inner, channels, heads, width, there(x)), there(state)
    found = prompt_products.in_proj(
        there(x), there(W), there(taps), there(bias), kept, made, inner, rest=there(rest), convolve=convolve, pdl=True
    )
    wanted = rest.double()[:, None] * (x.double() @ W.double().T)
    middle = slice(inner, inner + channels)
    assert off(found.cpu()[:, :inner], wanted[:, :inner]) < ALLOWED[dtype]
    assert off(found.cpu()[:, inner + channels :], wanted[:, inner + channels :]) < ALLOWED[dtype]
    if convolve:
        read = wanted[None, :, middle].to(dtype)
        y, last = ref.mamba2.conv1d(*(None if t is None else t.double().numpy() for t in (read, taps, bias, state)))
        wanted[:, middle] = torch.from_numpy(y[0])
        assert state is None or off(kept.cpu(), torch.from_numpy(last)) < ALLOWED[dtype]
    assert off(found.cpu()[:, middle], wanted[:, middle]) < 2 * ALLOWED[dtype]


@on_both
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("tokens, hidden, cols, before", [(1, 8, 8, False), (130, 72, 64, True), (200, 328, 136, True)])
def test_out_proj_and_the_norm_behind_it(tokens, hidden, cols, before, dtype, device):
    """Rows of more than one tile's columns, and what is outside of all of them."""
    torch.manual_seed(hidden)
    x, W = torch.randn(tokens, cols).to(dtype), (torch.randn(hidden, cols) / cols**0.5).to(dtype)
    residual, weight = 30 * torch.randn(tokens, hidden), torch.randn(hidden).to(dtype)
    ahead = (torch.rand(tokens) + 0.5) / 30 if before else None
    there = lambda t: None if t is None else t.clone().to(device)  # noqa: E731
    made, stream, last = made_for(tokens, hidden, 64, 64, 8, 4, there(x)), there(residual), there(ahead)
    found = prompt_products.out_proj(there(x), there(W), stream, there(weight), made, before=last, pdl=True)
    assert found is stream
    total = residual.double() + x.double() @ W.double().T
    assert off(stream.cpu(), total) < 1e-6
    scale = ahead.double()[:, None] if before else 1
    assert off(made.normed.cpu(), total * weight.double() * scale) < ALLOWED[dtype]
    root = (total.square().mean(dim=1) + 1e-5).rsqrt()
    rest = prompt_products.norm_root(made, hidden, 1e-5, before=last, root=made.roots[0], pdl=True)
    assert off(made.roots[0].cpu(), root) < 1e-6 and off(rest.cpu(), root / (ahead.double() if before else 1)) < 1e-6


def test_no_two_threads_meet():
    made = made_for(70, 72, 64, 64, 8, 4, torch.empty(0).half())
    x, W, weight = torch.randn(70, 72).half(), torch.randn(136, 72).half(), torch.randn(72).half()
    state = torch.randn(1, 3, 64).half()
    how = dict(check_races=True)
    prompt_products.in_proj(x, W, torch.randn(64, 4), None, state, made, 64, rest=torch.rand(70), **how)
    y, W_out = torch.randn(70, 64).half(), torch.randn(72, 64).half()
    prompt_products.out_proj(y, W_out, torch.randn(70, 72), weight, made, before=torch.rand(70), **how)
    assert not made.projected.isnan().any() and not made.normed.isnan().any()


@on_both
@pytest.mark.parametrize("convolve", [False, True])
def test_layers_joined_are_those_apart(convolve, device):
    """And pieces of a prompt are the prompt at once."""
    torch.manual_seed(4)
    weights, residual = shapes.random_weights(SMALL, device), torch.randn(150, SMALL.hidden, device=device)
    there, mine, pieces = (states(1, device, 0.0) for _ in range(3))
    wanted = prompt.layers(SMALL, weights, residual.clone(), there, joined=False)
    found = prompt.joined_layers(SMALL, weights, residual.clone(), mine, convolve=convolve)
    assert off(found, wanted) < 2e-3 and off(mine.ssm, there.ssm) < 2e-3 and off(mine.conv, there.conv) < 2e-3
    parts = [
        prompt.joined_layers(SMALL, weights, part.clone(), pieces, convolve=convolve) for part in residual.split(64)
    ]
    assert off(torch.cat(parts), found) < 1e-6 and off(pieces.ssm, mine.ssm) < 1e-6
    assert torch.equal(pieces.conv, mine.conv)


def test_what_cannot_be_joined_is_named():
    weights, residual = shapes.random_weights(SMALL, "cpu"), torch.randn(3, SMALL.hidden)
    with pytest.raises(ValueError, match=r"layers: joined must not be True: the residual is torch.float16"):
        prompt.layers(SMALL, weights, residual.half(), joined=True)
    weights.layers[1].b_in = torch.zeros(SMALL.in_rows).half()
    with pytest.raises(ValueError, match=r"layers: joined must not be True: products have a bias"):
        prompt.layers(SMALL, weights, residual, joined=True)
    made = made_for(3, 72, 64, 64, 8, 4, torch.empty(0).half())
    x, W, taps = torch.randn(3, 72).half(), torch.randn(136, 72).half(), torch.randn(64, 4)
    for change, error, wanted in [
        ({"x": x[:2]}, ValueError, r"made.projected must have shape \(2, 136\)"),
        ({"W": W.float()}, TypeError, "W must be of torch.float16 or torch.bfloat16"),
        ({"inner": 40}, ValueError, "inner and channels must be multiples of 64 in 136 rows, got 40 and 64"),
        ({"rest": torch.ones(2)}, ValueError, r"rest must have shape \(3,\)"),
        ({"conv_weight": torch.randn(257)[1:].view(64, 4)}, ValueError, "conv_weight must begin at a multiple of 16"),
    ]:
        call = dict(x=x, W=W, conv_weight=taps, conv_bias=None, state=None, made=made, inner=64)
        with pytest.raises(error, match="in_proj: " + wanted):
            prompt_products.in_proj(**call | change)
