"""A whole token over several devices in one launch on each, on the SIMT machine: right, without races at any turns, the
same bits everywhere; caches that change; a device that does not come."""

import pytest
import torch
from tiny_models import write

import models
from kernels import collective
from kernels.collective.one_launch import OneLaunches, OneLaunchShare
from kernels.llm import shapes
from lab import cuda
from lab.source import inlined
from models.measure_gpus import PartOfCache, weights_of
from models.shares import rows_of, share_of

TOKENS = [int(t) for t in torch.randint(0, 101, (6,), generator=torch.Generator().manual_seed(5))]
SHAPE = shapes.Shape("small", 64, 2, 4, 4, 16, 96, 101, torch.float16)
CPU = torch.device("cpu")


def off(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


class Token:
    """The token 7 behind `length - 1` others, over so many devices."""

    def __init__(self, devices, length=20, races=False):
        torch.manual_seed(0)
        weights, cache = shapes.random_weights(SHAPE, 16, "cpu"), shapes.RandomCache(SHAPE, length, 320, device="cpu")
        self.wanted = shapes.wanted_logits(SHAPE, weights, cache, 7)
        self.group = collective.Group(["cpu"] * devices, races=races)
        self.shares = []
        for rank in range(devices):
            share = weights_of(weights, SHAPE, rank, devices, CPU)
            config = share_of(SHAPE, rank, devices)
            self.shares.append(OneLaunchShare(config, share, SHAPE.dtype, CPU, rank, devices))
            self.shares[-1].token.fill_(7)
            self.shares[-1].kv_len.fill_(length)
        self.caches = [PartOfCache(cache, rank, devices, CPU) for rank in range(devices)]
        self.launches = OneLaunches(self.shares, self.group)

    def logits(self):
        """Of a launch, those of all devices' rows one behind another."""
        for share in self.shares:
            share.logits.fill_(torch.nan)
        self.launches.launch(self.caches)
        assert [rows_of(SHAPE.vocab, r, len(self.shares))[1] for r in self.group.ranks][-1] == SHAPE.vocab
        return torch.cat([share.logits for share in self.shares])


def test_a_token_is_that_of_one_device_at_any_turns():
    """Nothing races, also from one launch to the next, in which numbers of the last one still lie everywhere."""
    token = Token(2, races=True)
    first = token.logits()
    assert off(first, token.wanted) < 3e-3
    token.group.devices.turns = 3
    assert torch.equal(token.logits(), first)
    token.group.synchronize()


@pytest.mark.parametrize("devices, length", [(4, 20), (2, 300)])
def test_more_devices_and_more_tokens(devices, length):
    """Groups of tokens that each block merges for itself, and such as tasks merge."""
    token = Token(devices, length)
    assert off(token.logits(), token.wanted) < 3e-3
    token.group.devices.turns = "reverse"
    assert off(token.logits(), token.wanted) < 3e-3


def test_other_caches_begin_anew():
    """Dates begin again then, and no number of an earlier launch is taken for one of these."""
    token = Token(2)
    first = token.logits()
    for part in token.caches:
        for keys, values in part.layers:
            keys.mul_(-1)
            values.mul_(-1)
    assert off(token.logits(), first) > 0.1
    others = Token(2).caches
    token.caches = others
    assert torch.equal(token.logits(), first)


def test_a_part_that_is_taken_too_early_is_noticed():
    """Without looking at the date another sum is made."""
    token = Token(2)
    token.logits()
    for share in token.shares:
        share.token.fill_(9)
    right = token.logits()
    text, look = inlined("kernels/collective/one_launch.cu"), "if (has(seen, date)) return"
    assert text.count(look) == 1
    kernel = token.shares[0].kernel
    options = [option for option in kernel.module.options if option.startswith("-D")]
    early = cuda.compile(text.replace(look, "return"), options, arch="sm_90a").one_launch_share
    for share in token.shares:
        share.kernel = early
        share.token.fill_(7)
    assert off(token.logits(), token.wanted) > 0.1 and off(right, token.wanted) > 0.1


def test_a_device_that_does_not_come_is_named():
    """It does nothing, as its length is 0; the other one gives up, once."""
    token = Token(2)
    token.logits()
    token.shares[1].kv_len.fill_(0)
    token.group.limit = 20
    with pytest.raises(
        collective.PeerTimeout, match="device 0 waited for device 1, which did not come within 20 looks"
    ):
        token.logits()
    with pytest.raises(collective.PeerTimeout):
        token.logits()


@pytest.mark.parametrize("kind", ["qwen2"])
def test_the_engine_writes_the_same_text(kind, tmp_path):
    folder = write(tmp_path, kind, torch.float16, seed=3)
    there = models.load(folder, device="cpu")
    here = models.load(folder, device="simt", gpus=2, engine="one_launch")
    assert list(here.generate(TOKENS, 3)) == list(there.generate(TOKENS, 3))
    first, second = here.engine.token_step.steps
    assert torch.equal(first.all_logits, second.all_logits) and torch.equal(first.token, second.token)
    here.engine.cache = None
    assert list(here.generate(TOKENS[:3], 2)) == list(there.generate(TOKENS[:3], 2))


def test_a_share_alone_is_refused():
    token = Token(2)
    with pytest.raises(NotImplementedError, match="a share runs beside the others"):
        token.shares[0].launch(token.caches[0])
