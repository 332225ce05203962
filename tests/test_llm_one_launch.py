"""A whole token in one launch: on the SIMT machine, and on a card where there is one."""

import copy
import dataclasses
import gc
import weakref

import pytest
import torch
from tiny_models import write

import models
from kernels.llm import one_launch
from kernels.llm.one_launch import OneLaunch
from kernels.llm.shapes import MISTRAL_7B
from kernels.llm.step import Step
from lab import cuda
from lab.source import inlined
from models.config import BadModel

DEVICES = ["simt"] + ["cuda"] * torch.cuda.is_available()
KINDS = "llama3", "qwen2", "qwen3", "qwen3_one_kv_head"
TOKENS = [int(t) for t in torch.randint(0, 101, (70,), generator=torch.Generator().manual_seed(5))]


def off(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def step_of(folder, prompt, kind=OneLaunch):
    """(a step, the engine whose weights and cache it takes) behind a prompt, on the SIMT machine."""
    engine = models.load(folder, device="simt").engine
    engine.reset(len(prompt) + 1)
    engine.prefill(torch.tensor(prompt))
    step = kind(engine.config, engine.weights, engine.dtype, engine.device)
    step.token.fill_(7)
    step.kv_len.fill_(len(prompt) + 1)
    return step, engine


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_what_the_processor_computes(kind, device, tmp_path):
    """And so are those behind it, and the greedy text."""
    folder = write(tmp_path, kind, torch.float16, seed=3)
    there, here = models.load(folder, device="cpu"), models.load(folder, device=device, engine="one_launch")
    wanted, engine = there.logits(TOKENS[:6]), here.engine
    engine.reset()
    last = [engine.prefill(torch.tensor(TOKENS[:3]))[0].cpu()] + [engine.step(token) for token in TOKENS[3:6]]
    assert off(torch.stack(last), wanted[2:]) < 5e-3
    count = 3 if device == "simt" else 64
    assert list(here.generate(TOKENS[:6], count)) == list(there.generate(TOKENS[:6], count))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_card_it_is_the_graphs_step(kind, tmp_path):
    folder = write(tmp_path, kind, torch.bfloat16, seed=3, max_position_embeddings=4096)
    engines = [models.load(folder, device="cuda", engine=engine).engine for engine in models.llm.ENGINES]
    prompt = (TOKENS * 50)[:3000]
    for engine in engines:
        engine.reset(len(prompt) + 2)
        engine.prefill(torch.tensor(prompt))
    for token in TOKENS[:2]:
        graph, one = (engine.step(token) for engine in engines)
        assert off(one, graph) < 3e-2


@pytest.mark.parametrize(
    "kind, prompt", [("qwen3", 3), ("llama3", 63), ("qwen3_one_kv_head", 64), ("qwen2", 130), ("llama3", 260)]
)
def test_nothing_races(kind, prompt, tmp_path):
    """In the first token of a group, the last, and in between; where blocks merge groups for themselves, one to three,
    and where tasks do. Numbers of one launch are gone in the next."""
    tokens = (TOKENS * 4)[:prompt]
    step, engine = step_of(write(tmp_path, kind, torch.bfloat16, seed=3, max_position_embeddings=512), tokens)
    graph, _ = step_of(tmp_path, tokens, Step)
    for token in (7, 8):
        for each, cache in ((step, engine.cache), (graph, _.cache)):
            each.token.fill_(token)
            each.logits.fill_(torch.nan)
            each.launch(cache, **{"check_races": token == 8} if each is step else {})
        assert off(step.logits, graph.logits) < 3e-2
        assert off(engine.cache.values[0, : prompt + 1], _.cache.values[0, : prompt + 1]) < 1e-2


def test_any_number_of_blocks_ends(tmp_path):
    """One at a time, too: a task waits only for those in front of it. The bits do not hang on who does what."""
    step, engine = step_of(write(tmp_path, "llama3", torch.float16, seed=3), TOKENS)
    step.launch(engine.cache)
    wanted = step.logits.clone()
    for grid, places, order in ((1, None, "forward"), (5, 1, "reverse"), (5, 2, 3)):
        step.grid = grid
        step.logits.fill_(torch.nan)
        step.launch(engine.cache, order=order, places=places)
        assert torch.equal(step.logits, wanted)
    assert step.tickets.tolist() == [0, 4, 0]


def test_a_number_that_is_taken_too_early_is_noticed(tmp_path, monkeypatch):
    """Without looking at dates the result is another one."""
    step, engine = step_of(write(tmp_path, "llama3", torch.float16, seed=3), TOKENS[:3])
    step.launch(engine.cache)
    wanted = step.logits.clone()
    text = inlined("kernels/llm/one_launch.cu")
    for look in ("(unsigned)(both >> 32) == date;", "when[0] == date && when[1] == date;"):
        assert text.count(look) == 1
        text = text.replace(look, "true;")
    module = step.kernel.module
    step.kernel = cuda.compile(text, module.options[:4], arch="sm_90a").one_launch
    step.token.fill_(9)
    step.launch(engine.cache)
    early = step.logits.clone()
    step.kernel = module.one_launch
    step.launch(engine.cache)
    assert off(early, step.logits) > 0.1 and off(wanted, step.logits) > 0.1


def test_lengths_outside_of_the_cache_do_nothing(tmp_path):
    step, engine = step_of(write(tmp_path, "llama3", torch.float16, seed=3), TOKENS[:3])
    for length in (0, -3, engine.cache.capacity + 1):
        step.kv_len.fill_(length)
        step.logits.fill_(5)
        step.launch(engine.cache)
        assert (step.logits == 5).all() and step.tickets.tolist() == [0, 0, 0]
    step.kv_len.fill_(4)
    longer = type("Cache", (), {"layer": lambda _, i: tuple(t.new_zeros(4096, 1, 8) for t in kept.layer(i))})
    kept = engine.cache
    with pytest.raises(ValueError, match="OneLaunch: keys must have shape"):
        step.launch(longer())
    step.launch(kept)
    assert step.capacity == kept.capacity and step.tickets.tolist() == [0, 1, 0]  # nothing of the other is left
    step.token.fill_(101)
    step.launch(engine.cache)
    assert step.logits.isnan().all()


def test_a_cache_is_not_held(tmp_path):
    """Who makes room for a longer text lets go of the cache; another one, or other tensors, are seen."""
    step, engine = step_of(write(tmp_path, "llama3", torch.float16, seed=3), TOKENS[:3])
    step.launch(engine.cache)
    wanted, storage = step.logits.clone(), weakref.ref(engine.cache.keys.untyped_storage())
    other = copy.deepcopy(engine.cache)
    gone, engine.cache = weakref.ref(engine.cache), None
    gc.collect()  # the SIMT machine's launch leaves cycles
    assert gone() is None and storage() is None
    for _ in range(2):
        step.logits.fill_(torch.nan)
        step.launch(other)
        assert torch.equal(step.logits, wanted)
        other.keys, other.values = other.keys.clone(), other.values.clone()


def test_addresses_are_looked_at(tmp_path):
    step, engine = step_of(write(tmp_path, "llama3", torch.float16, seed=3), TOKENS[:3])
    cache = engine.cache
    for name in ("keys", "values"):
        part = getattr(cache, name)
        setattr(cache, name, torch.zeros(part.numel() + 8, dtype=part.dtype)[1 : part.numel() + 1].view(part.shape))
        with pytest.raises(ValueError, match=f"OneLaunch: {name} of layer 0 must start at a multiple of 16 bytes, got"):
            step.launch(cache)
        setattr(cache, name, part)
    step.launch(cache)
    layer, at = engine.weights.layers[1], engine.weights.layers[1].W_up
    layer.W_up = torch.zeros(at.numel() + 8, dtype=at.dtype)[1 : at.numel() + 1].view(at.shape)
    with pytest.raises(ValueError, match="OneLaunch: W_up of layer 1 must start at a multiple of 16 bytes, got 0x"):
        OneLaunch(engine.config, engine.weights, engine.dtype, engine.device)


def test_what_it_does_not_take_is_said(tmp_path):
    folder = write(tmp_path / "a", "llama3", torch.float16)
    with pytest.raises(BadModel, match="engine='graph' does: weights and cache must have 16 bits, got bits=8 and kv_"):
        models.load(folder, device="simt", bits=8, engine="one_launch")
    with pytest.raises(
        ValueError, match="'graph' or 'one_launch' on a card, 'graph' on the processor, got 'one_launch'"
    ):
        models.load(folder, device="cpu", engine="one_launch")
    with pytest.raises(ValueError, match="engine must be 'graph' or 'one_launch', got 'graphs'"):
        models.load(folder, device="simt", engine="graphs")
    with pytest.raises(BadModel, match="ffn must be a multiple of 8, got 84"):
        models.load(write(tmp_path / "b", intermediate_size=84), device="simt", engine="one_launch")
    with pytest.raises(BadModel, match="head_dim must be a multiple of 16, got 24"):
        models.load(write(tmp_path / "d", "mistral_head_dim"), device="simt", engine="one_launch")
    with pytest.raises(BadModel, match="at most 8 query heads may share a kv head, got 9"):
        heads = {"num_attention_heads": 9, "num_key_value_heads": 1, "head_dim": 16}
        models.load(write(tmp_path / "c", "mistral_head_dim", **heads), device="simt", engine="one_launch")
    large = dataclasses.replace(MISTRAL_7B, ffn=2**17)
    assert "two rows of each matrix must fit into shared memory, got" in one_launch.refusal(large, device="cpu")
    long = dataclasses.replace(MISTRAL_7B, head_dim=272)
    assert one_launch.refusal(long, device="cpu") == "head_dim must be at most 256, got 272"
    assert one_launch.takes(MISTRAL_7B) and not one_launch.takes(MISTRAL_7B, 8)


def test_the_plan_leaves_a_block_all_it_needs():
    """The kernel refuses to compile where its memory is larger than the plan's."""
    room = 227 * 1024
    mistral, qwen, llama = (4096, 32, 8, 128, 14336), (3584, 28, 4, 128, 18944), (8192, 64, 8, 128, 28672)
    assert one_launch.plan(mistral, room)[:2] == (32768, 6)
    for sizes in (mistral, qwen, llama, (896, 14, 2, 64, 4864), (2048, 32, 8, 64, 8192)):
        found = one_launch.plan(sizes, room)
        assert found.slots >= 2 and found.shared <= room
        one_launch.kernel(torch.float16, sizes, False, False, found).module.ptx()
