"""Several texts at once: each as it is alone, whoever else is there; who has ended leaves, and who waits enters."""

import dataclasses

import pytest
import torch
from tiny_models import write

import models
from kernels.llm import shapes
from kernels.paged.cache import MAX_LEN
from models import generate, measure_several, paged, several
from models.config import BadModel
from models.tokens import Tokens

G = torch.Generator().manual_seed(5)
TEXTS = [torch.randint(0, 101, (n,), generator=G).tolist() for n in (6, 17, 3, 9)]
DRAWN = {"temperature": 1.0, "top_k": 20, "top_p": 0.9}


def gathered(pairs, count):
    texts = [[] for _ in range(count)]
    for number, token in pairs:
        texts[number].append(token)
    return texts


def off(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


# Who leaves and who enters


class Counting:
    """Places whose likeliest token is the number of tokens that a text has."""

    most = 2

    def __init__(self, room=100):
        self.room, self.did = room, []

    def fits(self, tokens):
        return tokens <= self.room

    def enter(self, ids, tokens):
        self.room -= tokens
        self.did.append(f"enter {ids[0]}")
        return [ids[0], len(ids), tokens], self.logits(len(ids))

    def step(self, texts):
        self.did.append("step " + " ".join(str(key[0]) for key, _ in texts))
        for key, token in texts:
            assert token == key[1]  # what was chosen last
            key[1] += 1
            assert key[1] <= key[2]  # never more than was asked for
        return torch.stack([self.logits(key[1]) for key, _ in texts])

    def leave(self, key):
        self.room += key[2]
        self.did.append(f"leave {key[0]}")

    def logits(self, token):
        return torch.nn.functional.one_hot(torch.tensor(token), 50).float()


def counted(lengths, places, context=40, stops=()):
    texts = [several.Text(n, [n] * first, most, 0) for n, (first, most) in enumerate(lengths)]
    return gathered(several.write(places, texts, context, stops, (0.0, None, None)), len(texts))


def test_who_has_ended_leaves_and_who_waits_enters():
    places = Counting()
    assert counted([(3, 2), (5, 4), (1, 1), (2, 3), (4, 0)], places) == [[3, 4], [5, 6, 7, 8], [1], [2, 3, 4], []]
    assert places.did == [
        "enter 0", "enter 1", "step 0 1", "leave 0", "enter 2", "leave 2", "enter 3", "step 1 3", "step 1 3", "leave 1",
        "leave 3",
    ]  # fmt: skip
    assert places.room == 100


def test_who_has_no_room_waits():
    places = Counting(room=7)
    assert counted([(3, 2), (3, 2), (1, 1)], places) == [[3, 4], [3, 4], [1]]
    assert places.did[:5] == ["enter 0", "step 0", "leave 0", "enter 1", "enter 2"] and places.room == 7


def test_texts_end_at_a_stop_and_with_the_context():
    places = Counting()
    assert counted([(3, 9), (8, 9)], places, context=10, stops=(5,)) == [[3, 4], [8, 9, 10]]
    assert places.room == 100


# On the processor


@pytest.fixture(scope="module", params=["llama3", "qwen3", "mistral_window"])
def model(request, tmp_path_factory):
    folder = write(tmp_path_factory.mktemp(request.param), request.param, torch.float16, seed=3)
    return models.load(folder, device="cpu")


def test_texts_are_what_they_are_alone(model):
    alone = [list(model.generate(text, 12)) for text in TEXTS]
    for at_once in (1, 3, 16):
        assert gathered(model.generate_several(TEXTS, 12, at_once=at_once), 4) == alone
    seeds = [7, 8, 7, 9]
    drawn = [list(model.generate(text, 12, **DRAWN, seed=seed)) for text, seed in zip(TEXTS, seeds)]
    assert gathered(model.generate_several(TEXTS, 12, **DRAWN, seeds=seeds, at_once=3), 4) == drawn != alone


def test_texts_come_side_by_side(model):
    numbers = [number for number, _ in model.generate_several(TEXTS, 5, at_once=2)]
    assert numbers == [0, 1] * 5 + [2, 3] * 5
    assert list(model.generate_several([], 5)) == [] == list(model.generate_several(TEXTS, 0))


def test_another_text_ends_them(model):
    pairs = model.generate_several(TEXTS, 5)
    next(pairs)
    list(model.generate(TEXTS[0], 1))
    with pytest.raises(RuntimeError, match="has begun another text since"):
        list(pairs)


def test_what_is_wrong_is_said(model, tmp_path):
    for error, wanted, call in [
        (ValueError, "at least one token id", lambda: model.generate_several([[1], []], 3)),
        (ValueError, "ids must be below", lambda: model.generate_several([[10**6]], 3)),
        (ValueError, "max_tokens must be at least 0", lambda: model.generate_several([[1]], -1)),
        (ValueError, "at_once must be at least 1", lambda: model.generate_several([[1]], 3, at_once=0)),
        (ValueError, "at_once must be at most 16, got 17", lambda: model.generate_several([[1]], 3, at_once=17)),
        (
            ValueError,
            "seeds must be one for each text, 2, got 1",
            lambda: model.generate_several(TEXTS[:2], 3, seeds=[1]),
        ),
        (TypeError, "seed must be a whole number", lambda: model.generate_several([[1]], 3, seeds=["a"])),
        (ValueError, "temperature must be", lambda: model.generate_several([[1]], 3, temperature=-1)),
    ]:
        with pytest.raises(error, match=wanted):
            call()
    folder = write(tmp_path, "mamba2", torch.float32)
    with pytest.raises(BadModel, match="a model with states keeps one text"):
        models.load(folder, device="cpu").generate_several(TEXTS, 3)


# By the card's kernels

DEVICES = ["simt"] + ["cuda"] * torch.cuda.is_available()


def stepped(model, texts, tokens, at_once=3, room=40):
    """Logits behind each text and one more token of each, of one step of all."""
    model.engine.reset()
    places = paged.Pages(model.engine, at_once, [room] * len(texts))
    keys = [places.enter(text, room)[0] for text in texts]
    return places.step(list(zip(keys, tokens))), places, keys


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["llama3", "qwen2", "qwen3"])
def test_a_step_of_several_is_what_the_processor_computes(kind, device, tmp_path):
    """Texts of 80 and 41 tokens: one begins a page. And bit for bit the same alone."""
    folder = write(tmp_path, kind, torch.float16, seed=3)
    here, there = models.load(folder, device=device), models.load(folder, device="cpu")
    texts, tokens = [5 * TEXTS[1][:16], 6 * TEXTS[0] + TEXTS[0][:5]], [5, 7]
    found, *_ = stepped(here, texts, tokens, room=90)
    for row, text, token in zip(found.cpu(), texts, tokens):
        assert off(row, there.logits([*text, token])[-1]) < 5e-3
    alone, *_ = stepped(here, texts[1:], tokens[1:], room=90)
    assert torch.equal(alone[0], found[1])


def test_attention_is_asked_not_to_depend_on_others(tmp_path, monkeypatch):
    """On the simulated card these texts are cut alike anyway."""
    asked, attention = [], paged.decode
    monkeypatch.setattr(paged, "decode", lambda *a, **how: asked.append(how) or attention(*a, **how))
    stepped(models.load(write(tmp_path, "qwen3", torch.float16), device="simt"), TEXTS[:1], [5])
    assert asked == 2 * [{"invariant": True}]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [8, 4])
def test_weights_of_few_bits(bits, device, tmp_path):
    folder = write(tmp_path, "llama3", torch.float16, seed=3, hidden_size=128, intermediate_size=256)
    model = models.load(folder, device=device, bits=bits)
    found, *_ = stepped(model, TEXTS[2:3], [7], at_once=2)
    assert off(found[0], model.logits([*TEXTS[2], 7])[-1].to(found.device)) < 5e-3


@pytest.mark.parametrize("device", DEVICES)
def test_pages_go_from_text_to_text(device, tmp_path):
    """Three texts on two places, of which the pool has room for two: the same as alone, and nothing is left."""
    folder = write(tmp_path, "qwen3", torch.float16, seed=3)
    model, there = (models.load(folder, device=where) for where in (device, "cpu"))
    count = 2 if device == "simt" else 40
    alone = [list(there.generate(text, count)) for text in TEXTS[:3]]
    assert gathered(model.generate_several(TEXTS[:3], count, at_once=2), 3) == alone
    _, places, keys = stepped(model, TEXTS[:2], [5, 7], at_once=2, room=20)
    assert not places.fits(1) and places.cache.free_pages == 4 - 3  # 7 tokens have a page of two, 18 have two
    places.leave(keys[1])
    assert places.fits(32) and not places.fits(33) and places.cache.free_pages == 3
    places.leave(keys[0])
    assert places.cache.free_pages == places.free == 4 and not places.promised


@pytest.mark.parametrize("kv_bits", [16, 8, 4])
def test_prompts_in_pieces_see_their_pages(tmp_path, monkeypatch, kv_bits):
    """The second piece of a prompt reads the first one's keys back from its pages, of any bits."""
    folder = write(tmp_path, "llama3", torch.float16, seed=3)
    model = models.load(folder, device="simt", kv_bits=kv_bits)
    model.engine.reset()
    *_, whole, after = model.logits([*TEXTS[1], 5])
    pieces = paged.prompt.__globals__["prefill"]
    monkeypatch.setitem(paged.prompt.__globals__, "prefill", lambda *a, **how: pieces(*a, **how | {"chunk": 7}))
    places = paged.Pages(model.engine, 1, [20])
    request, logits = places.enter(TEXTS[1], 20)
    allowed = {16: 2e-3, 8: 1e-2, 4: 5e-2}[kv_bits]  # a key that is rounded otherwise may have another code
    assert off(logits, whole) < allowed / 2
    assert off(places.step([(request, 5)])[0], after) < allowed


def test_texts_may_be_longer_than_a_cache_has_by_itself(tmp_path):
    model = models.load(write(tmp_path, "qwen3", torch.float16), device="simt")
    places = paged.Pages(model.engine, 2, [5, MAX_LEN + 20])
    request = places.cache.new()
    places.cache.reserve([request], MAX_LEN + 20)
    assert places.cache.free_pages == 1 and places.cache.table.shape == (2, MAX_LEN // 16 + 2)


def test_what_pages_do_not_take_is_said(tmp_path, monkeypatch):
    model = models.load(write(tmp_path / "b", "mistral_head_dim", torch.float16), device="simt")
    with pytest.raises(BadModel, match="head_dim must be a multiple of 16, got 24"):
        model.generate_several(TEXTS, 3)
    model = models.load(write(tmp_path / "c", "qwen3", torch.float16), device="simt")
    token = 2 * 2 * 2 * 2 * 16  # k and v, 2 bytes, 2 layers, 2 kv heads of 16
    monkeypatch.setattr(paged.Pages, "_memory", lambda self: 16 * token + 5)
    assert gathered(model.generate_several([[1, 2]], 1), 1)[0]
    with pytest.raises(BadModel, match="a text needs 2 pages of 16 tokens, room is for 1"):
        model.generate_several([[1] * 17], 3)


@pytest.mark.parametrize("bits", [16, 4])
def test_what_is_measured_runs(bits):
    """The step that models/measure_several.py times, of a small shape."""
    sizes = {"hidden": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "ffn": 256, "vocab": 96}
    shape = dataclasses.replace(shapes.MISTRAL_7B, **sizes)
    weights = shapes.random_weights(shape, bits, "cpu")
    weights = weights if bits == 16 else shapes.in_pairs(weights)
    places, texts = measure_several.filled(shape, weights, torch.device("cpu"), rows=2, seen=20)
    logits = places.step(texts)
    assert torch.isfinite(logits).all() and places.cache.lengths([key for key, _ in texts]) == [20, 20]
    assert not torch.equal(logits[0], logits[1])


# The command


def test_the_command_writes_several(capsys):
    folder, prompts = "models/small", ["A warp reads", "Memory is", "The tensor cores"]
    arguments = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert generate.main([folder, *arguments, "--device", "cpu", "--max-tokens", "6"]) == 0
    said = capsys.readouterr().out
    model, tokens = models.load(folder, device="cpu"), Tokens(folder)
    for number, prompt in enumerate(prompts, 1):
        assert f"[{number}] {prompt}{tokens.decode(model.generate(tokens.encode(prompt), 6))}\n" in said
    assert "written     18 tokens of 3 texts, " in said and said.rstrip().endswith("tokens/s")
    drawn = [*arguments, "--device", "cpu", "--max-tokens", "6", "--temperature", "1", "--seed", "3"]
    assert generate.main([folder, *drawn]) == 0
    alone = tokens.decode(model.generate(tokens.encode(prompts[1]), 6, temperature=1.0, seed=3))
    assert f"[2] {prompts[1]}{alone}\n" in capsys.readouterr().out


def test_the_command_names_an_empty_prompt(capsys):
    assert generate.main(["models/small", "--prompt", "a", "--prompt", " "]) == 2
    assert "--prompt must hold some text" in capsys.readouterr().err
