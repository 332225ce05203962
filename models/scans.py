"""What the layers of a Mamba-2 hand to their scans over a text: x, dt, A, B and C as trained weights make them.

    of(folder, tokens)          the arguments of each layer's scan, by name
    held_out(folder, count)     so many tokens of the course's own text that the small models were not trained on

Decays of random weights are drawn alike for each token; those of trained weights depend on the token. For what imports
no `models`, a command writes them to a file, for torch.load:  python -m models.scans FOLDER COUNT FILE
"""

import argparse
import itertools
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from lab.arguments import expect_count
from models import mamba2_torch, mamba2_weights
from models.config import BadModel, read_config
from models.mamba2 import State, prefill
from models.mamba2_config import Config
from models.tokens import Tokens
from models.weights import Checkpoint

NAMES = "x", "dt", "A", "B", "C"


def of(folder, tokens, device="cpu"):
    """One dict for each Mamba-2 layer: the arguments of kernels.ssd.fused that its scan has over these tokens.

    folder  a checkpoint's, as models.load takes it; a hybrid is refused, as its states are not the whole of it
    tokens  (n,) int64 ids, one text; n >= 1

    x (1, n, nheads, headdim), dt (1, n, nheads), before bias and softplus; B, C (1, n, ngroups, dstate); A, D, dt_bias
    (nheads,); all float32 on the device, computed in float32; and dt_softplus, dt_limit. BadModel for another kind of
    model; ValueError for tokens of another shape.
    """
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError(f"of: tokens must be (n,), n >= 1, got shape {tuple(tokens.shape)}")
    config, device = read_config(folder), torch.device(device)
    if not isinstance(config, Config) or config.attention_layers:
        raise BadModel(f"{folder}: expected a Mamba-2 without attention, got {config.kind}")
    with Checkpoint(folder, config) as checkpoint:
        weights = mamba2_weights.Loader(config, checkpoint, lambda _: None, torch.float32, 16, device).all()
    pieces = [[] for _ in weights.layers]
    layers = itertools.cycle(pieces)  # the prompt comes in pieces, and each goes through all layers

    def noted(*arguments, **options):
        next(layers).append((dict(zip(NAMES, arguments)), options))
        return mamba2_torch.ssd(*arguments, **options)

    steps = {"conv1d": mamba2_torch.conv1d, "gated_norm": mamba2_torch.gated_norm}
    ops = SimpleNamespace(product=F.linear, ssd=noted, **steps)
    with torch.inference_mode():
        prefill(config, weights, tokens.to(device), State(config, device), ops=ops)
        return [_whole(found) for found in pieces]


def _whole(pieces):
    """The arguments of a layer's pieces as those of one call."""
    options = pieces[0][1]
    found = {name: torch.cat([call[name] for call, _ in pieces], dim=1) for name in ("x", "dt", "B", "C")}
    return found | {"A": pieces[0][0]["A"]} | {k: options[k] for k in ("D", "dt_bias", "dt_softplus", "dt_limit")}


def held_out(folder, count):
    """(count,) int64: what the small models were not trained on, one paragraph behind another, as in their training;
    past its end it begins again. In the course's folder alone. ValueError for a count below 1."""
    from models.corpus import texts  # not in a wheel

    count, tokens = expect_count("held_out", "count", count, low=1), Tokens(folder)
    text = [token for paragraph in texts()[1] for token in tokens.encode(paragraph)]
    return torch.tensor(list(itertools.islice(itertools.cycle(text), count)))


def main(arguments=None):
    found = argparse.ArgumentParser("python -m models.scans", description=__doc__.split("\n")[0])
    found.add_argument("folder"), found.add_argument("count", type=int), found.add_argument("file")
    args = found.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.save(of(args.folder, held_out(args.folder, args.count), device), args.file)


if __name__ == "__main__":
    main()
