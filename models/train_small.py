"""Train the small models that the course ships, on the course's own text:  python -m models.train_small llama mamba2

It writes models/small/, a Llama, and models/small_mamba2/, a Mamba-2 of as many weights: config.json, model.safetensors
(float16) and tokenizer.json, as Hugging Face lays them out, and training.json: the loss on the way, on what is learned
and on what is held out. Both learn the same text in the same order; a Mamba-2 trained alone takes the Llama's tokens as
they are stored. The weights differ a little from card to card.

    python -m models.train_small --compare

trains the Mamba-2 alone, with each of the scans in COMPARED, and writes models/small_mamba2/scans.json: the curves, and
what a step takes. No weights are kept.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

from models.config import read_config
from models.corpus import texts
from models.small_networks import SCANS, Llama, Mamba2, decays

HERE = Path(__file__).resolve().parent
BOTH = {
    "hidden_size": 256, "vocab_size": 2048, "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
LLAMA = BOTH | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 640, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
}  # fmt: skip
MAMBA2 = BOTH | {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "num_hidden_layers": 6, "num_heads": 8,
    "head_dim": 64, "state_size": 128, "n_groups": 1, "conv_kernel": 4, "expand": 2, "chunk_size": 256,
    "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True,
}  # fmt: skip
KINDS = {"llama": ("small", LLAMA, Llama), "mamba2": ("small_mamba2", MAMBA2, Mamba2)}  # folder, config, network
COMPARED = (
    ("kernels", 0),
    ("torch", 0),
    ("mamba_ssm", 0),
    ("kernels", 1),
)  # scan and seed; the last says what chance does
LENGTH, BATCH, STEPS, WARM_UP, RATE, DECAY = 256, 64, 450, 100, 2e-3, 0.3


def tokenizer_of(paragraphs):
    """Byte pairs: every text can be written, as its bytes are tokens. Token 0 stands before and behind a paragraph."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator(
        paragraphs,
        trainers.BpeTrainer(
            vocab_size=BOTH["vocab_size"], special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    found.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    return found


def stream_of(tokenizer, paragraphs):
    """All paragraphs one behind another, token 0 before each: (n,) int64."""
    return torch.tensor([token for text in paragraphs for token in tokenizer.encode(text).ids] + [0])


def loss_of(network, stream):
    """Mean loss of a token over a stream, in pieces of LENGTH."""
    n = (len(stream) - 1) // LENGTH * LENGTH
    inputs, targets = stream[:n].view(-1, LENGTH), stream[1 : n + 1].view(-1, LENGTH)
    network.eval()
    with torch.no_grad():
        losses = [
            F.cross_entropy(network(i).flatten(0, 1).float(), t.flatten(), reduction="sum")
            for i, t in zip(inputs.split(16), targets.split(16))
        ]
    network.train()
    return float(sum(losses)) / n


def optimiser_of(network):
    """AdamW; what holds a time constant does not shrink."""
    named = list(network.named_parameters())
    groups = [
        {"params": [p for name, p in named if decays(name)], "weight_decay": DECAY},
        {"params": [p for name, p in named if not decays(name)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], RATE, (0.9, 0.98))


def graphed(network, device):
    """The network with its work captured in CUDA graphs, forward and backward, for batches of training; its parameters
    are the network's own."""
    sample = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device=device)
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        return torch.cuda.make_graphed_callables(network, (sample,))


def train(network, stream, held, steps, *, graphs=False, seed=0):
    """[(step, loss, loss on what is held out)]; the network ends as its best on what is held out.

    stream, held   (n,) int64 on the network's device: the text to learn from, and that held out
    graphs         on a card: by CUDA graphs, so that launches cost the host next to nothing
    """
    device, order = stream.device, torch.Generator().manual_seed(seed)
    optimiser, call = optimiser_of(network), graphed(network, device) if graphs else network
    curve, best, kept, smooth = [], math.inf, None, None
    for step in range(steps):
        done = step / steps
        for group in optimiser.param_groups:
            group["lr"] = RATE * min((step + 1) / WARM_UP, 0.5 * (1 + math.cos(math.pi * done)))
        starts = torch.randint(0, len(stream) - LENGTH - 1, (BATCH,), generator=order).to(device)
        at = starts[:, None] + torch.arange(LENGTH, device=device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = call(stream[at])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), stream[at + 1].flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        now = loss.detach()
        smooth = now if smooth is None else 0.95 * smooth + 0.05 * now
        if step % 50 == 49 or step + 1 == steps:
            curve.append((step + 1, round(float(smooth), 4), round(loss_of(network, held), 4)))
            print(f"step {curve[-1][0]:5d}  loss {curve[-1][1]:.3f}  held out {curve[-1][2]:.3f}", flush=True)
            if curve[-1][2] < best:
                best, kept = curve[-1][2], {k: v.detach().clone() for k, v in network.state_dict().items()}
    network.load_state_dict(kept)
    return curve


def compare(stream, held, args, where):
    """The Mamba-2 with each scan, from the same weights, through the same text and with the same dropped numbers."""
    path, found = args.out / "small_mamba2" / "scans.json", []
    for scan, seed in COMPARED:
        torch.manual_seed(seed)
        network = Mamba2(read_config(HERE / "small_mamba2"), scan).to(stream.device)
        print(f"scan: {scan}, seed {seed}", flush=True)
        try:
            graphs = stream.is_cuda and not args.no_graphs
            curve = train(network, stream, held, args.steps, graphs=graphs, seed=seed)
        except ImportError as error:
            print(f"left out: {error}", flush=True)
            continue
        step = step_seconds(network, stream)
        print(f"a step: {step * 1e3:.2f} ms", flush=True)
        found.append({"scan": scan, "seed": seed, "step": step, "curve": curve})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"where": where, "steps": args.steps, "scans": found}) + "\n")


def step_seconds(network, stream, times=20):
    """Median seconds of forward and backward of a batch; in the graphs with which the network was trained, if any."""
    tokens, seconds = stream[: BATCH * (LENGTH + 1)].view(BATCH, LENGTH + 1), []
    settle = torch.cuda.synchronize if stream.is_cuda else lambda: None
    for _ in range(times):
        settle()
        start = time.perf_counter()
        with torch.autocast(stream.device.type, torch.bfloat16):
            logits = network(tokens[:, :-1].contiguous())
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        settle()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[times // 2]


def parser():
    found = argparse.ArgumentParser("python -m models.train_small", description=__doc__.split("\n")[0])
    found.add_argument("kinds", nargs="*", help="llama, mamba2 or both, in this order; both where none is named")
    found.add_argument("--steps", type=int, default=STEPS)
    found.add_argument("--out", type=Path, default=HERE, help="the folder that gets small/ and small_mamba2/")
    found.add_argument("--scan", default="torch", choices=SCANS, help="what runs the Mamba-2's state space duality")
    found.add_argument("--compare", action="store_true", help="the Mamba-2 with each scan; curves alone are kept")
    found.add_argument("--no-graphs", action="store_true", help="on a card, launch by launch")
    return found


def main(arguments=None):
    args = parser().parse_args(arguments)
    kinds = args.kinds or (["mamba2"] if args.compare else list(KINDS))
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise SystemExit(f"train_small: kinds must be of {', '.join(KINDS)}, got {unknown[0]}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "a processor"
    paragraphs, held_out = texts()
    tokenizer = tokenizer_of(paragraphs) if "llama" in kinds else Tokenizer.from_file(f"{HERE}/small/tokenizer.json")
    stream, held = (stream_of(tokenizer, found).to(device) for found in (paragraphs, held_out))
    if args.compare:
        compare(stream, held, args, where)
        return
    for kind in kinds:
        start = time.perf_counter()
        name, config, make = KINDS[kind]
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        torch.manual_seed(0)
        options = {"scan": args.scan} if kind == "mamba2" else {}
        network = make(read_config(folder), **options).to(device)
        count = sum(parameter.numel() for parameter in network.parameters())
        print(f"{kind}: {count:,} weights, {len(stream):,} tokens of text, {len(held):,} held out", flush=True)
        curve = train(network, stream, held, args.steps, graphs=device.type == "cuda" and not args.no_graphs)
        weights = {network.prefix + at: value.half().cpu().contiguous() for at, value in network.state_dict().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(str(folder / "tokenizer.json"))
        facts = {"seconds": round(time.perf_counter() - start), "where": where, "weights": count, "curve": curve}
        (folder / "training.json").write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
