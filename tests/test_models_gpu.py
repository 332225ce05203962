"""A model by the card's kernels: on the SIMT machine, and on a card where there is one."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import KINDS, write

import models
import models.config
import models.gpu
import models.upload
from kernels import fusion, llm
from models.config import BadModel
from models.gpu_weights import Loader
from models.upload import read_whole
from models.weights import Checkpoint

DEVICES = ["simt"] + ["cuda"] * torch.cuda.is_available()
TOKENS = [int(t) for t in torch.randint(0, 101, (6,), generator=torch.Generator().manual_seed(5))]


def off(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mistral_window"])
def test_a_step_is_what_the_processor_computes(kind, device, tmp_path):
    """And those behind a prompt, and the greedy text, and a drawn one."""
    if device == "simt" and kind not in ("llama3", "qwen2", "qwen3", "mistral_head_dim"):
        pytest.skip("four kinds have all that differs; a card runs them all")
    folder = write(tmp_path, kind, torch.float16, seed=3)
    there, here = models.load(folder, device="cpu"), models.load(folder, device=device)
    wanted = there.logits(TOKENS)
    assert off(here.logits(TOKENS), wanted) < 5e-3
    here.engine.reset()
    last = [here.engine.prefill(torch.tensor(TOKENS[:3]))[0].cpu()]
    last += [here.engine.step(token) for token in TOKENS[3:]]
    assert off(torch.stack(last), wanted[2:]) < 5e-3
    count = 4 if device == "simt" else 64
    assert list(here.generate(TOKENS, count)) == list(there.generate(TOKENS, count))
    if device == "simt":
        drawn = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 3}
        assert list(here.generate(TOKENS, 4, **drawn)) == list(there.generate(TOKENS, 4, **drawn))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits, bound", [(8, 0.03), (4, 0.35)])
def test_weights_of_few_bits(bits, bound, device, tmp_path):
    """Off by their rounding, which random weights suffer from most. A step reads them as they are, a prompt widened."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    folder = write(tmp_path / "a", "qwen2", torch.float16, seed=3, **sizes)
    wanted = models.load(folder, device="cpu").logits(TOKENS)
    model = models.load(folder, device=device, bits=bits)
    found = model.logits(TOKENS)
    assert 1e-3 < off(found, wanted) < bound
    model.engine.reset()
    assert off(torch.stack([model.engine.step(token) for token in TOKENS]), found) < 5e-3
    assert model.step_bytes(5) < models.load(folder, device=device).step_bytes(5) * (0.6 if bits == 8 else 0.4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits, bound", [(8, 0.03), (4, 0.35)])
def test_a_cache_of_few_bits(bits, bound, device, tmp_path):
    """A prompt and the steps behind it are off by the cache's rounding, and by no more from each other than in 16 bits:
    both see keys and values as the cache has them. In the middle of a tile, too."""
    folder = write(tmp_path, "llama3", torch.float16, seed=3)
    plain, model = models.load(folder, device=device), models.load(folder, device=device, kv_bits=bits)
    tokens = (TOKENS * 4)[:19]
    wanted, found = plain.logits(tokens), model.logits(tokens)
    assert 1e-3 < off(found, wanted) < bound
    engine = model.engine
    engine.reset()
    last = [engine.prefill(torch.tensor(tokens[:14]))[0].cpu()]
    last += [engine.step(token) for token in tokens[14:17]]
    last += list(engine.prefill(torch.tensor(tokens[17:]), every=True).cpu())
    assert off(torch.stack(last), found[13:]) < 5e-3
    assert engine.token_bytes == plain.engine.token_bytes * (bits + 1) / 16  # a scale for 16 numbers, head_dim
    assert model.step_bytes(9) == model.step_bytes(0) + 9 * engine.token_bytes
    assert list(model.generate(TOKENS, 3)) == list(model.generate(TOKENS, 3))


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_of_few_bits_grows(device, tmp_path, monkeypatch):
    monkeypatch.setattr(models.gpu, "ROOM", 16)
    model = models.load(write(tmp_path, "qwen3", torch.bfloat16, seed=3), device=device, kv_bits=4)
    engine, tokens = model.engine, (TOKENS * 4)[:18]
    wanted = model.logits(tokens)[-1]
    model.engine.cache = None
    engine.reset()
    engine.prefill(torch.tensor(tokens[:16]))
    assert engine.cache.capacity == 16
    found = [engine.step(token) for token in tokens[16:]][-1]
    assert engine.cache.capacity == 32 and off(found, wanted) < 0.05


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["llama2", "mistral_window", "qwen3"])
def test_prompts_in_pieces_are_the_prompt(kind, device, tmp_path, monkeypatch):
    """Whatever stands before a piece, and however long it is; a window, too, where it is the whole context."""
    changes = {"sliding_window": 24} if kind == "mistral_window" else {}
    model = models.load(write(tmp_path, kind, torch.float16, seed=3, **changes), device=device)
    engine, tokens = model.engine, (TOKENS * 4)[:23]
    wanted = model.logits(tokens)
    monkeypatch.setattr(models.gpu, "CARD_CHUNK", 5)
    monkeypatch.setattr(models.prefill, "CHUNK", 5)
    engine.reset()
    found = [engine.prefill(torch.tensor(tokens[at : at + n]), every=True) for at, n in ((0, 1), (1, 12), (13, 10))]
    assert off(torch.cat(found).cpu(), wanted) < 5e-3
    engine.reset()
    assert off(engine.prefill(torch.tensor(tokens)).cpu()[0], wanted[-1]) < 5e-3


def test_sixteen_bits_between_the_steps_of_a_prompt(tmp_path):
    """What a card computes in 16 bits, here by the processor: as far off as the numbers' own rounding."""
    model = models.load(write(tmp_path, "qwen3", torch.float16, seed=3), device="simt")
    wanted, engine = model.logits(TOKENS), model.engine
    engine.reset()
    how = {"every": True, "product": models.gpu._product, "dtype": torch.float16}
    with torch.inference_mode():
        found = models.prefill.prefill(engine.config, engine.weights, torch.tensor(TOKENS), engine.cache, **how)
    assert found.dtype == torch.float32 and 1e-5 < off(found, wanted) < 5e-3


def test_the_first_token_waits_for_no_step(tmp_path, monkeypatch):
    """It is there when the prompt is done: before anything is compiled, and before the next step begins."""
    engine = models.load(write(tmp_path, "llama3", torch.float16), device="simt").engine
    wanted, did = list(engine.write(TOKENS, 4, 0, 0.0, None, None)), []
    for name in ("_compiled", "_replay"):
        called = getattr(engine, name)
        monkeypatch.setattr(engine, name, lambda *a, called=called, name=name: (did.append(name), called(*a))[1])
    written = engine.write(TOKENS, 4, 0, 0.0, None, None)
    assert next(written) == wanted[0] and not did and engine.cache.length == len(TOKENS)
    assert next(written) == wanted[1] and did.count("_replay") == 2  # one more is under way
    assert list(written) == wanted[2:] and engine.cache.length == len(TOKENS) + 3


def test_which_launches_depend_on_the_one_ahead(tmp_path, monkeypatch):
    """attend reads the length before it waits, so the launch behind its writer, embed, must not be a dependent one."""
    model = models.load(write(tmp_path, "llama2", torch.float16), device="simt")
    seen = []
    for room, name in ((fusion, "norm_qkv"), (llm, "attend"), (llm, "embed")):
        called = getattr(room, name)

        def noted(*args, called=called, name=name, **options):
            seen.append((name, options.get("pdl", False)))
            return called(*args, **options)

        monkeypatch.setattr(room, name, noted)
    model.engine.step(5)
    layers = [("norm_qkv", True), ("attend", True)] * 2
    assert seen == [("embed", False), *layers, ("norm_qkv", True)]  # the last one is the head


def test_what_a_card_does_not_run_is_said(tmp_path, monkeypatch):
    with pytest.raises(BadModel, match="head_dim must be a multiple of 8 and at most 256 there, got 12"):
        models.load(write(tmp_path / "a", head_dim=12), device="simt")
    with pytest.raises(BadModel, match="head_dim must be a multiple of 16 for kv_bits=8, got 24"):
        models.load(write(tmp_path / "c", "mistral_head_dim"), device="simt", kv_bits=8)
    folder = write(tmp_path / "b", dtype=torch.float32, hidden_size=64)
    config = models.config.read_config(folder)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**5, 10**6))
    with pytest.raises(BadModel, match=r"cuda:0 has 0.0 GB free, and this model needs 0.0 GB in 16 bits"):
        models.gpu._expect_room(config, 16, 16, torch.device("cuda:0"))
    need = models.gpu.bytes_needed(config, 4) + 1
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (need, 10**6))
    with pytest.raises(BadModel, match="in 16 bits; bits=4 would fit"):
        models.gpu._expect_room(config, 16, 16, torch.device("cuda:0"))


def test_what_is_compiled_ahead_finds_no_length(tmp_path, monkeypatch):
    """It is launched once, whenever it is compiled: at a length, over what the next prompt has put there."""

    class Job:
        found = []

        def result(self):
            self.found.append(int(engine.kv_len))

    engine = models.load(write(tmp_path, "llama3", torch.float16), device="simt").engine
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    engine.compiling = [Job()]
    assert len(list(engine.write(TOKENS, 1, 0, 0.0, None, None))) == 1
    assert not Job.found and engine.kv_len.item() == 0  # a token alone waits for nothing
    assert len(list(engine.write(TOKENS, 2, 0, 0.0, None, None))) == 2
    engine.reset()
    engine.kv_len.zero_()
    engine.compiling = [Job()]
    engine.step(TOKENS[0])
    assert Job.found == [0, 0]


def test_a_window_bounds_the_context_there(tmp_path):
    model = models.load(write(tmp_path, "mistral_window", torch.float16), device="simt")
    with pytest.raises(ValueError, match="at most 7 tokens here, got 8"):
        model.logits([1] * 8)


class AtOnce:
    """An Upload whose copies are made when they are asked for."""

    def copy(self, where, place):
        path, first, count = where
        raw = torch.empty(count, dtype=torch.uint8)
        with open(path, "rb") as file:
            read_whole(file.fileno(), raw.numpy(), first, path)
        place.copy_(raw.view(place.dtype).view(place.shape))

    def wait(self):
        pass


def spoiled(folder, name):
    """The same folder, a NaN in one of its tensors."""
    weights = load_file(folder / "model.safetensors")
    weights[name][3, 4] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_comes_by_pieces_is_what_is_in_the_file(dtype, bits, tmp_path):
    folder, name = write(tmp_path, "qwen2", dtype, seed=3, hidden_size=128), "model.layers.1.mlp.up_proj.weight"
    config, into = models.config.read_config(folder), torch.float16 if dtype == torch.float16 else torch.bfloat16

    def loaded(upload):
        with Checkpoint(folder, config) as checkpoint:
            loader = Loader(config, checkpoint, lambda count: None, into, bits, torch.device("cpu"))
            loader.upload = upload
            found = loader._all()
            loader.arrive()
        return found

    one, other = loaded(None), loaded(AtOnce())
    assert torch.equal(one.norm, other.norm) and torch.equal(one.embedding, other.embedding)
    for a, b in zip(one.layers, other.layers):
        for W in ("Wqkv", "Wo", "W_glu", "W_down"):
            a_W, b_W = (getattr(layer, W) for layer in (a, b))
            assert torch.equal(a_W, b_W) if bits == 16 else torch.equal(a_W.dequantize(), b_W.dequantize())
    spoiled(folder, name)
    for upload in (None, AtOnce()):
        with pytest.raises(BadModel, match=rf"{name}: weights must be finite, got nan at \(3, 4\)"):
            loaded(upload)


def test_a_file_that_ends_too_early_is_named(tmp_path):
    path, buffer = tmp_path / "x", bytearray(10)
    path.write_bytes(bytes(range(12)))
    with open(path, "rb") as file:
        read_whole(file.fileno(), buffer, 2, path)
        assert buffer == bytes(range(2, 12))
        with pytest.raises(OSError, match=r"x: ends at byte 12, expected 1 more"):
            read_whole(file.fileno(), buffer, 3, path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_what_comes_to_a_card_by_threads_is_what_is_in_the_file(tmp_path, monkeypatch):
    """In pieces of all sizes, of files in another type, too."""
    monkeypatch.setattr(models.upload, "PIECE", 1000)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        folder = write(tmp_path / str(dtype), "qwen3", dtype, seed=4)
        there, here = (models.load(folder, device=device).engine.weights for device in ("cuda", "simt"))
        assert torch.equal(there.embedding.cpu(), here.embedding) and torch.equal(there.head.cpu(), here.head)
        for a, b in zip(there.layers, here.layers):
            assert all(torch.equal(getattr(a, n).cpu(), getattr(b, n)) for n in ("Wqkv", "Wo", "W_glu", "W_down"))
    spoiled(folder, "model.layers.0.self_attn.o_proj.weight")
    with pytest.raises(
        BadModel, match=r"layers.0.self_attn.o_proj.weight: weights must be finite, got nan at \(3, 4\)"
    ):
        models.load(folder, device="cuda")
