"""The ladder of a training step, without a card: its gradients, its convolution's, and that what is timed was right."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from test_attention_bench import card as card

from kernels import benching
from kernels.ssd import dropin, stack
from kernels.ssd import peers as ssd_peers
from kernels.ssd_backward import peers, training


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 37, 70), (1, 66, 5)], ids=str)
def test_the_convolutions_gradients(shape):
    batch, seqlen, channels = shape
    wide = torch.randn(batch, seqlen, channels + 3)  # a view of one projection
    x, weight, bias, dy = wide[..., 2:-1].transpose(1, 2), torch.randn(channels, 4), torch.randn(channels), None
    found = [t.detach().requires_grad_() for t in (x, weight, bias)]
    wanted = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    y = training.conv1d(*found)
    dy = torch.randn(y.shape)
    whole = F.conv1d(wanted[0], wanted[1][:, None], wanted[2], padding=3, groups=channels)[..., :seqlen]
    torch.testing.assert_close(y.double(), F.silu(whole), rtol=1e-5, atol=1e-5)
    y.backward(dy)
    F.silu(whole).backward(dy.double())
    for one, right in zip(found, wanted):
        torch.testing.assert_close(one.grad.double(), right.grad, rtol=1e-4, atol=1e-4)


def test_a_convolution_that_it_does_not_do():
    with pytest.raises(NotImplementedError, match="silu without seq_idx"):
        training.conv1d(torch.randn(1, 8, 4), torch.randn(8, 4), seq_idx=torch.zeros(1, 4))


def test_work_is_that_of_three_forwards():
    """Bar SSD, whose products are counted one by one: a quarter more than its share of the forward, times three."""
    moved, flops = training.work()
    there = stack.work(training.SEQLEN)
    assert 3 < flops / there[1] < 3.2 and 2.8 < moved / there[0] < 3.2
    assert training.work(ssd=False) == tuple(3 * n for n in stack.work(training.SEQLEN, ssd=False))


class Block(torch.nn.Module):
    """A layer that does nothing but SSD, by the name in mamba_ssm's module."""

    def __init__(self, module):
        super().__init__()
        self.module, self.weight = [module], torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.A = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

    def forward(self, hidden, residual):
        residual = hidden if residual is None else residual + hidden
        return self.module[0].mamba_chunk_scan_combined(residual * self.weight, 0, self.A, 0, 0, 256), residual


class Layer(torch.nn.Module):
    """What of mamba_ssm's layer decides how SSD is called: views of one projection, and of one convolution."""

    HEADS, HEADDIM, DSTATE, MODEL = 2, 8, 16, 12

    def __init__(self, module):
        super().__init__()
        self.module, inner = [module], self.HEADS * self.HEADDIM
        self.split = inner + 2 * self.DSTATE, self.HEADS
        self.in_proj = torch.nn.Linear(self.MODEL, sum(self.split), bias=False)
        self.conv1d = torch.nn.Conv1d(self.split[0], self.split[0], 4, groups=self.split[0])
        self.out_proj = torch.nn.Linear(inner, self.MODEL, bias=False)
        self.A_log, self.D, self.dt_bias = (torch.nn.Parameter(torch.randn(self.HEADS)) for _ in range(3))

    def forward(self, hidden, residual):
        residual = hidden if residual is None else residual + hidden
        xBC, dt = torch.split(self.in_proj(residual), self.split, dim=-1)
        weight = self.conv1d.weight[:, 0]
        xBC = self.module[0].causal_conv1d_fn(xBC.transpose(1, 2), weight, bias=self.conv1d.bias).transpose(1, 2)
        x, B, C = torch.split(xBC, [self.HEADS * self.HEADDIM, self.DSTATE, self.DSTATE], dim=-1)
        y = self.module[0].mamba_chunk_scan_combined(
            x.unflatten(-1, (self.HEADS, self.HEADDIM)), dt, -self.A_log.exp(), B[:, :, None], C[:, :, None],
            chunk_size=16, D=self.D, dt_bias=self.dt_bias, dt_softplus=True,
        )  # fmt: skip
        return self.out_proj(y.flatten(-2)), residual


def token_by_token(x, dt, A, B, C, chunk_size, D, dt_bias, dt_softplus):
    """SSD as it is defined, of one group."""
    steps, state, y = F.softplus(dt + dt_bias), 0, []
    for t in range(x.shape[1]):
        fed = steps[:, t, :, None, None] * x[:, t, :, :, None] * B[:, t, :, None]
        state = torch.exp(A * steps[:, t])[..., None, None] * state + fed
        y.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(y, 1)


def test_a_step_of_ours_has_all_gradients(monkeypatch):
    """Of the input and of every weight of three layers, by what stands as ours in the ladder."""
    module = ModuleType("mamba2")
    module.mamba_chunk_scan_combined = module.causal_conv1d_fn = None
    for place in (ssd_peers, training):
        monkeypatch.setattr(place, "layer", lambda: SimpleNamespace(mamba2=module))
    monkeypatch.setattr(sys.modules["kernels.ssd_backward.choice"], "FASTEST", ())  # rungs are tested elsewhere
    monkeypatch.setattr(dropin, "fused", sys.modules["kernels.ssd.five"].five)
    blocks, hidden = [Layer(module) for _ in range(3)], torch.randn(2, 37, Layer.MODEL)
    gradient, found = torch.randn(hidden.shape), []
    for ssd in (training.mamba_chunk_scan_combined, token_by_token):
        found.append([training.step(blocks, hidden, gradient, ssd)])
        found[-1] += [weight.grad for block in blocks for weight in block.parameters()]
    assert len(found[0]) == 1 + 3 * 7 and all(one is not None for one in found[0])
    for one, right in zip(*found):
        assert (one - right).norm() <= 1e-4 * right.norm()


@pytest.fixture
def made_up(card, monkeypatch):
    """Two such layers, on a card that is this CPU."""
    module = ModuleType("mamba2")
    module.mamba_chunk_scan_combined, module.causal_conv1d_fn, module.seen = "theirs", None, []
    for place in (ssd_peers, training):
        monkeypatch.setattr(place, "layer", lambda: SimpleNamespace(mamba2=module))
    monkeypatch.setattr(
        ssd_peers, "mamba", lambda: lambda x, dt, A, B, C, chunk_size: module.seen.append(chunk_size) or 2 * A * x
    )
    monkeypatch.setattr(peers, "tune_quickly", lambda anew: None)
    monkeypatch.setattr(stack, "layers", lambda dtype: [Block(module), Block(module)])
    monkeypatch.setattr(training, "mamba_chunk_scan_combined", lambda x, dt, A, *_: 2 * A * x)
    monkeypatch.setattr(training, "SEQLEN", 40)
    monkeypatch.setattr(stack, "MODEL", 8)
    monkeypatch.setattr(stack.cuda_timing, "flops_probe", lambda: (lambda: None, 10**9))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return module


def test_the_ladder(made_up, capsys):
    (ladder,) = training.ladders()
    assert ladder.title == training.TITLE and "8K" in ladder.title
    theirs, ours, without = ladder.figures
    assert [f.name for f in ladder.figures] == [training.THEIRS, training.OURS, training.WITHOUT]
    assert ours.checked.startswith("0.0e+00 from mamba_ssm's") and "chunk" in theirs.checked
    assert {"kernels/ssd_backward/chunks.cu", "kernels/ssd/fused.cu", training.HERE} <= set(ours.sources)
    assert ours.flops == theirs.flops > without.flops and ours.called == ours.timing
    assert set(made_up.seen) == {128, 256} and made_up.mamba_chunk_scan_combined == "theirs"
    assert training.gain(ladder) == theirs.timing.median / ours.timing.median
    assert "ours makes it" in capsys.readouterr().out and benching.DEVICE == "cpu"


@pytest.mark.parametrize("wrong", [2.2, torch.nan])
def test_what_is_wrong_is_not_timed(made_up, monkeypatch, wrong):
    monkeypatch.setattr(training, "mamba_chunk_scan_combined", lambda x, dt, A, *_: wrong * A * x)
    with pytest.raises(ValueError, match="ours is off by .* from mamba_ssm's"):
        training.ladders()


@pytest.mark.parametrize("part, off", [(0, "inf"), (0.5, "0.5")], ids=["none of it", "half of it"])
def test_a_weight_whose_gradient_is_wrong_is_named(made_up, monkeypatch, part, off):
    """Though the input's is right."""

    def ours(x, dt, A, *_):
        return 2 * x * (part * A + (1 - part) * A.detach() if part else A.detach())

    monkeypatch.setattr(training, "mamba_chunk_scan_combined", ours)
    with pytest.raises(ValueError, match=f"gradient of A is off by {off}"):
        training.ladders()


def test_without_mamba_ssm_there_is_none(card, monkeypatch):
    monkeypatch.setattr(ssd_peers, "_module", lambda: None)
    ssd_peers.layer.cache_clear()
    assert training.ladders() == []
    ssd_peers.layer.cache_clear()
