"""A prompt through the layers of a Mamba-2: several sequences end to end, and where in_proj leaves its rows."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kernels import lowbit
from kernels.mamba2 import prompt, shapes
from models import mamba2_gpu

SMALL = shapes.Shape("small", 72, 2, 8, 16, 32, 64)
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
on_both = pytest.mark.parametrize("device", DEVICES)


def states(count, device, fill, c=SMALL):
    conv = torch.full((c.n_layers, count, shapes.WIDTH - 1, c.channels), fill).half()
    ssm = torch.full((c.n_layers, count, c.nheads, c.headdim, c.dstate), fill)
    return SimpleNamespace(conv=conv.to(device), ssm=ssm.to(device))


def off(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@on_both
def test_prompts_end_to_end_are_each_by_itself(device):
    """Among them one shorter than the convolution's window, and one without tokens."""
    torch.manual_seed(3)
    weights, begins = shapes.random_weights(SMALL, device), (0, 2, 70, 70, 91)
    residual, cu_seqlens = torch.randn(91, SMALL.hidden, device=device), torch.tensor(begins, dtype=torch.int32)
    mine = states(4, device, torch.nan)
    together = prompt.layers(SMALL, weights, residual.clone(), mine, cu_seqlens=cu_seqlens.to(device))
    assert not mine.conv[:, 2].any() and not mine.ssm[:, 2].any()
    for number in (0, 1, 3):
        begin, end = begins[number : number + 2]
        one = states(1, device, 0.0)
        alone = prompt.layers(SMALL, weights, residual[begin:end].clone(), one)
        assert off(together[begin:end], alone) < 2e-3
        assert off(mine.conv[:, number], one.conv[:, 0]) < 2e-3 and off(mine.ssm[:, number], one.ssm[:, 0]) < 2e-3


@on_both
@pytest.mark.parametrize("rows, stride", [(40, 64), (64, 64), (129, 192)])
def test_in_projs_rows_begin_at_lines(rows, stride, device):
    u, W = torch.randn(5, 24).half().to(device), torch.randn(rows, 24).half().to(device)
    found = prompt.project(u, W)
    assert found.shape == (5, rows) and found.stride() == (stride, 1)
    assert off(found, F.linear(u.double(), W.double())) < 5e-4
    assert prompt.project(u.float(), W.float()).stride() == (rows, 1)


@on_both
@pytest.mark.parametrize("bits", [8, 4])
def test_a_prompt_of_few_bits_is_that_of_the_widened_weights(bits, device):
    """Whose rows begin at lines; those of few bits do not, at an odd number of them not even at a word."""
    torch.manual_seed(5)
    odd = dataclasses.replace(SMALL, nheads=5)
    weights, residual, found = shapes.random_weights(odd, device), torch.randn(70, odd.hidden).to(device), []
    few = [[lowbit.quantize(W, bits) for W in (layer.W_in, layer.W_out)] for layer in weights.layers]
    for matrices in (few, [[W.dequantize() for W in pair] for pair in few]):
        for layer, (W_in, W_out) in zip(weights.layers, matrices):
            layer.W_in, layer.W_out = W_in, W_out
        mine = states(1, device, 0.0, odd)
        y = prompt.layers(odd, weights, residual.clone(), mine, product=mamba2_gpu._product)
        found.append((y, mine.conv, mine.ssm))
    for few, wide in zip(*found):
        assert off(few, wide) < 2e-3


def test_weights_of_few_bits_are_the_products_own_matter():
    u, Wq = torch.randn(5, 64).half(), lowbit.quantize(torch.randn(40, 64).half(), 8)
    assert prompt.project(u, Wq, lambda given, W: (given, W)) == (u, Wq)
