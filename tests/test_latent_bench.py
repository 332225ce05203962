"""The bench of latent attention, on a made-up card: what is timed was right, and FlashInfer and FlashMLA are called
right."""

import functools
from types import SimpleNamespace

import made_up_card
import pytest
import torch

from kernels import benching
from kernels.bench import GPU_TOPICS
from kernels.latent import bench, peers, trials
from kernels.latent.bench_problems import SCALE, problem, truth
from lab import results

HERE = torch.cuda.is_available() and torch.version.cuda is not None
LENS = [70, 3]


@pytest.fixture
def card(monkeypatch):
    made = made_up_card.put_in(monkeypatch)
    for module in (benching, bench):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "CELLS", {"tiny": (3, LENS)})
    monkeypatch.setattr(bench, "CONTIGUOUS", "")
    monkeypatch.setattr(bench, "WAYS", {name: bench.WAYS[name] for name in ("split, PDL",)})
    monkeypatch.setattr(trials, "CELLS", ("tiny",))
    return made


def attention(q, pages, table, lens):
    """As a peer would give it: in its own words."""
    return truth(q, SimpleNamespace(pages=pages, table=table), lens).to(q.dtype)


class Wrapper:
    """FlashInfer's, as far as it is asked."""

    def __init__(self, workspace, backend):
        assert backend in ("fa2", "fa3")

    def plan(self, sequences, ends, numbers, lens, n_heads, latent, rope, page, causal, scale, q_type, kv_type):
        assert sequences.tolist() == [0, 1, 2] and ends.tolist() == [0, 2, 3] and not causal and scale == SCALE
        assert (n_heads, latent, rope, page, q_type, kv_type) == (3, 512, 64, 64, torch.bfloat16, torch.bfloat16)
        assert all(of.dtype == torch.int32 for of in (sequences, ends, numbers, lens))
        self.table = torch.stack([numbers[:2], numbers[2:].repeat(2)])
        self.lens = lens.tolist()

    def run(self, q, q_turned, latents, turned, out):
        q, pages = torch.cat([q, q_turned], -1), torch.cat([latents, turned], -1)
        return out.copy_(attention(q, pages, self.table, self.lens))


def flash_mla(old):
    """FlashMLA's module, before and after its change of 2026."""

    def metadata(*args):
        if bool(args) != old:
            raise TypeError("other arguments")
        return "metadata", None

    def run(q, pages, table, lens, latent, metadata, splits, *, softmax_scale, causal):
        assert q.shape == (2, 1, 3, 576) and pages.shape[1:] == (64, 1, 576) and latent == 512
        assert metadata == "metadata" and softmax_scale == SCALE and not causal
        return attention(q[:, 0], pages[:, :, 0], table, lens.tolist())[:, None], "logarithms"

    return SimpleNamespace(get_mla_metadata=metadata, flash_mla_with_kvcache=run)


@pytest.fixture
def installed(monkeypatch):
    flashinfer = SimpleNamespace(mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper))
    monkeypatch.setattr(peers, "_flashinfer", lambda: flashinfer)
    monkeypatch.setattr(peers, "_workspace", lambda purpose, device: None)
    monkeypatch.setattr(peers, "_flash_mla", lambda: flash_mla(old=True))


@pytest.mark.skipif(HERE, reason="there is a GPU")
def test_without_a_gpu_they_say_so():
    for function in (bench.ladders, trials.ladders):
        with pytest.raises(RuntimeError, match="of latent attention needs an NVIDIA GPU"):
            function()
    assert "latent" in GPU_TOPICS


def test_a_ladder_with_all_peers(card, installed):
    (ladder,) = bench.ladders()
    names = [figure.name for figure in ladder.figures]
    assert names[0] == "split, PDL" and names[-1] == "reading the cache only"
    assert [name.split(":")[0] for name in names[1:-1]] == ["FlashInfer", "FlashMLA", "torch"]
    assert ladder.title == "latent decode bf16, tiny"
    assert ladder.figures[0].flops == 2 * 1088 * 3 * 73 and ladder.figures[0].bytes == 2 * (576 * 73 + 6 * 1088)
    assert all((results.ROOT / source).is_file() for figure in ladder.figures for source in figure.sources)


def test_what_is_wrong_is_not_timed(card, monkeypatch):
    usual = bench.WAYS["split, PDL"]

    def wrong(*args, **how):
        return usual[0](*args, **how).mul_(1.02)

    monkeypatch.setattr(bench, "WAYS", {"split, PDL": (wrong, *usual[1:])})
    monkeypatch.setattr(peers, "sixteen_bit", lambda *_: [])
    with pytest.raises(ValueError, match="split, PDL is not right, so it is not timed"):
        bench.ladders()


@pytest.mark.parametrize("old", [True, False])
def test_peers_give_what_they_must(card, installed, monkeypatch, old):
    monkeypatch.setattr(peers, "_flash_mla", functools.partial(flash_mla, old))
    q, caches, kv_lens, facts = problem(LENS, 3, "cpu")
    modes = {
        f"{name} {mode}": make for name, every in peers.sixteen_bit(q, caches, kv_lens) for mode, make in every.items()
    }
    assert list(modes) == ["FlashInfer fa2", "FlashInfer fa3", "FlashMLA with metadata", "torch two products"]
    for name, make in modes.items():
        for call in make():
            off = (call().reshape(facts["wanted"].shape).double() - facts["wanted"]).norm() / facts["wanted"].norm()
            assert off < 8e-3, name


def test_trials(card, monkeypatch):
    monkeypatch.setattr(trials, "MERGES", {k: v for k, v in trials.MERGES.items() if v[0] in ("last", "none")})
    (ladder,) = trials.ladders()
    assert [figure.name for figure in ladder.figures] == list(trials.MERGES)
    assert all((results.ROOT / source).is_file() for figure in ladder.figures for source in figure.sources)


def test_tables_say_what_roundings_cost(card, monkeypatch):
    few = {title: merge for title, merge in trials.MERGES.items() if merge[1].get("teams", 1) == 1}
    monkeypatch.setattr(trials, "MERGES", few)
    table = trials.reference_table((4, 256, 64))
    plain, amla, bare = (row["relative error"] for row in table.rows.values())
    assert 5e-4 < plain < 2e-3 and amla < 1.3 * plain and bare > 1.2 * amla
    rows = trials.kernel_table("tiny", "cpu").rows
    assert set(rows) == {*trials.MERGES, "decode"} - {"not merged"}
    assert all(row["relative error, broken elements aside"] < 4e-3 for row in rows.values())
    assert not any(row["broken"] for name, row in rows.items() if "AMLA" not in name)
