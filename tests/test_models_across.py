"""A model over several devices: its shares, the same text as on one, the same bits everywhere; processes; what is
refused. Devices of the SIMT machine stand for cards; on two cards the same in CUDA graphs."""

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import write

import models
from kernels import collective
from kernels.collective import PeerTimeout
from kernels.collective import group as groups
from kernels.llm import shapes
from lab import cuda
from models import exchange_costs, exchanges, generate, measure_gpus, shares
from models.across import Meeting
from models.config import BadModel, read_config
from models.tokens import Tokens
from models.weights import Checkpoint, all_shapes

HERE = Path(__file__).resolve().parent
SMALL = HERE.parent / "models" / "small"
CARDS = torch.cuda.device_count() if torch.version.cuda is not None else 0
OVER_TWO = "--device", "simt", "--gpus", "2"
TOKENS = [int(t) for t in torch.randint(0, 101, (6,), generator=torch.Generator().manual_seed(5))]


def off(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def expect_same_bits(engine):
    """All devices have the same residual stream, logits, token and length, bit for bit."""
    first, *others = engine.token_step.steps
    for name in ("x", "h", "all_logits", "token", "kv_len"):
        mine = getattr(first, name).cpu()
        assert all(torch.equal(getattr(step, name).cpu(), mine) for step in others), name
    assert not torch.isnan(first.all_logits).any()


@pytest.mark.parametrize("kind, count", [("llama3", 2), ("qwen2", 2), ("llama2", 4)])
def test_steps_and_text_are_those_of_one_device(kind, count, tmp_path):
    """With a tied head, and biases of heads; 101 rows of the head and 20 columns of W_down do not divide evenly."""
    folder = write(tmp_path, kind, torch.float16, seed=3)
    there, here = models.load(folder, device="cpu"), models.load(folder, device="simt", gpus=count)
    wanted, engine = there.logits(TOKENS), here.engine
    assert here.devices == count and there.devices == 1
    assert off(here.logits(TOKENS), wanted) < 5e-3
    engine.reset()
    last = [engine.prefill(torch.tensor(TOKENS[:4]))[0].cpu()]
    for step in engine.token_step.steps:
        step.all_logits.fill_(torch.nan)
    last += [engine.step(token) for token in TOKENS[4:]]
    assert off(torch.stack(last), wanted[3:]) < 5e-3
    expect_same_bits(engine)
    if kind == "llama3":
        assert list(here.generate(TOKENS, 3)) == list(there.generate(TOKENS, 3))
        expect_same_bits(engine)
        drawn = {"temperature": 1.0, "top_k": 20, "seed": 3}
        assert list(here.generate(TOKENS, 3, **drawn)) == list(there.generate(TOKENS, 3, **drawn))


def test_the_trained_model_writes_the_same_text():
    """The course's own, token by token as on one device; and each device moves half."""
    one, two = models.load(SMALL, device="cpu"), models.load(SMALL, device="simt", gpus=2)
    assert list(two.generate([5, 17, 200, 33], 3)) == list(one.generate([5, 17, 200, 33], 3))
    expect_same_bits(two.engine)
    whole, share = one.config, shares.share_of(one.config, 0, 2)
    row = whole.hidden * 2
    assert two.engine.token_bytes == 2 * 2 * whole.n_layers * share.kv_rows
    norms = 2 * (2 * whole.n_layers + 1) * whole.hidden
    matrices = 2 * whole.weights - norms
    assert two.step_bytes(9) == matrices // 2 + norms + row + 10 * two.engine.token_bytes


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama2"])
def test_shares_put_together_are_the_checkpoint(kind, tmp_path):
    """Every number of every tensor is on one device, or on all."""
    folder = write(tmp_path, kind, torch.bfloat16)
    config = read_config(folder)
    with Checkpoint(folder, config) as checkpoint:
        parts = [shares.CheckpointShare(checkpoint, rank, 2) for rank in range(2)]
        for name in all_shapes(config):
            whole, (axis, *_) = checkpoint[name], parts[0].cut(name)
            found = [part[name] for part in parts]
            assert [tuple(t.shape) for t in found] == [part.shape(name) for part in parts]
            if axis is None:
                assert all(torch.equal(t, whole) for t in found)
            else:
                assert torch.equal(torch.cat(found, dim=axis), whole)
                assert ("o_proj" in name or "down" in name) == (axis == 1)
            for part, tensor in zip(parts, found):
                path, begin, size = part.place(name)
                if axis != 1:
                    raw = path.read_bytes()[begin : begin + size]
                    assert raw == tensor.contiguous().view(torch.uint8).numpy().tobytes()
        cut = sum(t.nbytes for name in all_shapes(config) for t in [parts[0][name]])
        assert parts[0].bytes(on_card=False) == cut < parts[0].bytes(on_card=True) < checkpoint.bytes


class AtOnce:
    """An Upload whose copies are made when they are asked for."""

    def copy(self, where, place):
        path, first, count = where
        raw = torch.frombuffer(bytearray(path.read_bytes()[first : first + count]), dtype=torch.uint8)
        place.copy_(raw.view(place.dtype).view(place.shape))

    def wait(self):
        pass


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_comes_to_a_card_whole_is_cut_there(dtype, tmp_path):
    folder = write(tmp_path, "qwen2", dtype)
    config, device = read_config(folder), torch.device("cpu")
    with Checkpoint(folder, config) as checkpoint:
        how = config, checkpoint, lambda count: None, torch.float16, device, 1, 2
        wanted, loader = shares.ShareLoader(*how).all(), shares.ShareLoader(*how)
        loader.upload = AtOnce()
        found = loader._all()
        loader.arrive()
    for a, b in zip(wanted.layers, found.layers):
        for name in ("Wqkv", "Wo", "W_glu", "W_down", "bqkv", "attention_norm"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(wanted.head, found.head) and wanted.read_bytes == found.read_bytes


def test_no_token_is_given_out_of_a_step_that_failed():
    """A graph that is replayed looks at nothing: whoever reads its token does."""
    model = models.load(SMALL, device="simt", gpus=2)
    group, choose = model.engine.exchange.group, model.engine.token_step.choose

    def last():
        choose()
        group.seen[0][0] = 2  # as if device 0 had given up in this step

    model.engine.token_step.choose = last
    tokens = model.generate([5, 17], 2)
    next(tokens)
    with pytest.raises(collective.PeerTimeout, match="step: device 0 waited for device 1"):
        next(tokens)
    assert group in groups.FAILED


def test_what_one_thread_raises_ends_all():
    def work(n):
        if n == 1:
            raise MemoryError("no room")
        return meeting.add_up(n, torch.zeros(1))

    meeting = Meeting(3, lambda parts: None)
    with pytest.raises(MemoryError, match="no room"):
        meeting.run(work)


def test_what_is_not_offered_is_said(tmp_path, monkeypatch):
    folder = write(tmp_path / "a", "llama2")
    load = lambda folder=folder, **how: models.load(folder, **{"device": "simt", "gpus": 2} | how)  # noqa: E731
    one, dim24 = functools.partial(load, engine="one_launch"), write(tmp_path / "c", "mistral_head_dim")
    one_kv_head = write(tmp_path / "b", "qwen3_one_kv_head")
    for error, wanted, call in [
        (ValueError, "gpus must be a whole number from 1 to 8, got 9", lambda: load(gpus=9)),
        (ValueError, "gpus must be a whole number from 1 to 8, got True", lambda: load(gpus=True)),
        (ValueError, "device must be 'cuda' or 'simt' for gpus=2, got 'cpu'", lambda: load(device="cpu")),
        (
            BadModel,
            "n_heads must be .* number of devices, got 4 and 3; this model goes on 1, 2, 4",
            lambda: load(gpus=3),
        ),
        (BadModel, "n_kv_heads must be a multiple of .*, got 1 and 2; this model goes on 1", lambda: load(one_kv_head)),
        (BadModel, "bits must be 16 over several devices, got 8", lambda: load(bits=8)),
        (BadModel, "kv_bits must be 16 over several devices, got 4", lambda: load(kv_bits=4)),
        (ValueError, "engine must be 'graph' or 'one_launch', got 'fast'", lambda: load(engine="fast")),
        (BadModel, "does not run this model over 2 devices.* head_dim .* multiple of 16, got 24", lambda: one(dim24)),
        (BadModel, "a model with states runs on one device", lambda: load(write(tmp_path / "m", "mamba2"))),
        (BadModel, "over 2 devices keeps one text at a time", lambda: load().generate_several([[1], [2]], 1)),
        (BadModel, "torch.distributed must be initialised", exchanges.Processes),
    ]:
        with pytest.raises(error, match=wanted):
            call()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="gpus=2 needs as many NVIDIA GPUs, and PyTorch finds none here"):
        load(device=None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ValueError, match="gpus must be at most the cards that PyTorch finds here, one card only, got 2"
    ):
        load(device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    said = "cuda:0 cannot read and write the memory of cuda:1 (no peer access between the two cards)"

    def refused(where):
        raise cuda.NoPeerAccess(f"{said}; kernels.collective.copies works there")

    monkeypatch.setattr(exchanges.collective, "Group", refused)
    with pytest.raises(BadModel, match=r"no peer access.*torchrun --nproc-per-node 2 .* --exchange messages"):
        load(device="cuda")


def test_a_card_without_room_for_its_share_is_named(tmp_path, monkeypatch):
    config = read_config(write(tmp_path, "llama2"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**5, 10**6))
    with pytest.raises(BadModel, match=r"cuda:1 has 0.0 GB free, and a share of this model needs"):
        models.across._expect_room(config, 1, 2, torch.device("cuda:1"))


def test_the_command(capsys, monkeypatch):
    assert generate.main(["llama", "--prompt", "Once upon a time", "--max-tokens", "1", *OVER_TWO]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Once upon a time,\n") and "MB on each of 2 devices" in out
    for arguments, wanted in [
        (["--distributed"], "wants torchrun, which sets RANK"),
        (["--gpus", "0"], "gpus must be a whole number from 1 to 8, got 0"),
        ([*OVER_TWO, "--prompt", "More"], "keeps one text at a time"),
    ]:
        monkeypatch.delenv("RANK", raising=False)
        assert generate.main(["llama", "--prompt", "Once", *arguments]) == 2
        assert wanted in capsys.readouterr().err
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert generate.main(["llama", "--prompt", "Once", "--distributed", "--device", "cpu"]) == 2
    assert (
        "an NVIDIA GPU for each process, or --device simt, whose devices stand for them; got --device cpu"
        in capsys.readouterr().err
    )
    assert generate.main(["llama", "--prompt", "Once", "--distributed", *OVER_TWO]) == 2
    assert "--gpus must be 1 with --distributed, got 2" in capsys.readouterr().err


def test_what_exchanges_must_cost():
    """Two sums a layer, one of the logits: bytes by hand, times by a law, and by a stored table where there is one."""
    config = SimpleNamespace(hidden=4096, n_layers=32, vocab=32000)
    memory = exchange_costs.exchanges(config, 2)
    assert [(e.times, e.message, e.sent) for e in memory] == [(32, 32768, 32768)] * 2 + [(1, 64000, 64000)]
    ring = exchange_costs.exchanges(config, 4, "messages")
    assert [(e.times, e.message, e.sent) for e in ring] == [(32, 8192, 12288)] * 2 + [(1, 64000, 96000)]
    law = exchange_costs.Law(1e-5, 1e9)
    assert exchange_costs.seconds(config, 4, "messages", law) == pytest.approx(64 * 18.192e-6 + 74e-6)
    row = [(1024, 2e-6), (8192, 3e-6), (65536, 5e-6)]
    times = [exchange_costs._between(row, n) for n in (1, 1024, 4608, 8192, 65536, 122880)]
    assert times == pytest.approx([2e-6, 2e-6, 2.5e-6, 3e-6, 5e-6, 7e-6])


@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs PyTorch's gloo"
)
@pytest.mark.parametrize("exchange", ["memory", "messages"])
def test_two_processes_write_the_same_text(exchange, tmp_path):
    tokens = Tokens(SMALL)
    wanted = tokens.decode(models.load(SMALL, device="cpu").generate(tokens.encode("Once upon a time"), 2))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "models.generate", "llama", "--distributed", "--device", "simt"]
    command += ["--prompt", "Once upon a time", "--max-tokens", "2", "--exchange", exchange]
    runs = []
    for rank in (0, 1):
        about = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in about.items()} | {"OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        runs.append(subprocess.Popen(command, cwd=HERE.parent, env=environment, **pipes))
    try:
        found = [run.communicate(timeout=150) for run in runs]
    finally:
        for run in runs:
            run.kill()
    for run, (_, errors) in zip(runs, found):
        assert run.returncode == 0, errors[-2000:]
    assert found[0][0].startswith("Once upon a time" + wanted) and "exchanges   9 a token" in found[0][0]
    assert found[1][0] == ""


def test_what_is_measured_is_a_token_of_one_device():
    """Weights and cache of models/measure_gpus.py, cut into shares, of a small shape."""
    shape = shapes.Shape("small", 64, 2, 4, 2, 16, 48, 101, torch.float16)
    weights, cache = shapes.random_weights(shape, 16, "cpu"), shapes.RandomCache(shape, 20, 32, device="cpu")
    wanted = shapes.wanted_logits(shape, weights, cache, 7)
    over_two = exchanges.Devices(["cpu", "cpu"])
    (steps, whole), caches = measure_gpus.over(over_two, shape, weights, cache, token=7, length=20)
    for each in (steps, whole):
        assert measure_gpus.expect_right(each, caches, over_two, wanted, 2e-2) < 1e-2
    steps.steps[1].weights.layers[1].Wo.zero_()
    with pytest.raises(ValueError, match="a token over 2 devices is not right"):
        measure_gpus.expect_right(steps, caches, over_two, wanted, 2e-2)
    of_parts = {"qkv": 1, "attention": 2, "W_o": 3, "GLU": 4, "W_down": 5, "head": 6}
    law = exchange_costs.seconds(shape, 2)
    assert measure_gpus.predicted(shape, of_parts, 2) == pytest.approx(36 + 1e6 * law)
    if CARDS < 2:
        assert measure_gpus.main([]) == 2


@pytest.mark.skipif(CARDS < 2, reason="needs two NVIDIA GPUs that reach each other's memory")
@pytest.mark.parametrize("engine", models.llm.ENGINES)
@pytest.mark.parametrize("kind", ["llama3", "qwen2", "llama2"])
def test_over_cards(kind, engine, tmp_path):
    """In CUDA graphs, greedy and drawn; a text behind another."""
    folder = write(tmp_path, kind, torch.float16, seed=3)
    there = models.load(folder, device="cpu")
    for count in [n for n in (2, 4) if n <= CARDS and there.config.n_kv_heads % n == 0]:
        if engine == "one_launch" and shares.share_of(there.config, 0, count).ffn % 8:
            continue
        here = models.load(folder, device="cuda", gpus=count, engine=engine)
        assert off(here.logits(TOKENS), there.logits(TOKENS)) < 2e-2
        assert list(here.generate(TOKENS, 64)) == list(there.generate(TOKENS, 64))
        expect_same_bits(here.engine)
        drawn = {"temperature": 1.0, "top_k": 20, "seed": 3}
        assert list(here.generate(TOKENS, 32, **drawn)) == list(here.generate(TOKENS, 32, **drawn))
        assert list(here.generate(TOKENS[:2], 100)) == list(here.generate(TOKENS[:2], 100))
        here.engine.exchange.synchronize()


def test_a_device_that_gives_up_is_told_of(tmp_path, monkeypatch):
    """On cards nobody waits for a replay, so the next one looks whether a device has waited in vain."""
    engine = models.load(write(tmp_path, "llama2", torch.float16), device="simt", gpus=2).engine
    engine.exchange.on_cards = True
    engine.exchange.group.seen[1][0] = 1
    with pytest.raises(PeerTimeout, match="generate: device 1 waited for device 0, which did not come"):
        engine._replay(True)
