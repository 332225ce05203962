"""Train the small model that the course ships, on the course's own text:  python -m models.train_small

It writes models/small/: config.json, model.safetensors (float16) and tokenizer.json, as Hugging Face lays a Llama out,
and training.json: the loss on the way, on what is learned and on what is held out. The weights differ a little from
card to card.
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

from models.corpus import texts
from models.positions import rotary_tables, rotate

HERE = Path(__file__).resolve().parent / "small"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 640, "vocab_size": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LENGTH, BATCH, STEPS, WARM_UP, RATE, DROP, DECAY = 256, 64, 450, 100, 2e-3, 0.25, 0.3


def tokenizer_of(paragraphs):
    """Byte pairs: every text can be written, as its bytes are tokens. Token 0 stands before and behind a paragraph."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator(
        paragraphs,
        trainers.BpeTrainer(
            vocab_size=CONFIG["vocab_size"], special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    found.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    return found


class Layer(nn.Module):
    """One layer; its parameters have the names of Hugging Face's Llama."""

    def __init__(self, c):
        super().__init__()
        hidden, ffn, q, kv = c.hidden, c.ffn, c.q_rows, c.kv_rows
        linear = lambda rows, cols: nn.Linear(cols, rows, bias=False)  # noqa: E731
        self.c, self.head_dim = c, c.head_dim
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden, c.eps), nn.RMSNorm(hidden, c.eps)
        projections = {"q_proj": linear(q, hidden), "k_proj": linear(kv, hidden), "v_proj": linear(kv, hidden)}
        self.self_attn = nn.ModuleDict(projections | {"o_proj": linear(hidden, q)})
        block = {"gate_proj": linear(ffn, hidden), "up_proj": linear(ffn, hidden), "down_proj": linear(hidden, ffn)}
        self.mlp = nn.ModuleDict(block)

    def forward(self, x, tables):
        batch, n, _ = x.shape
        normed = self.input_layernorm(x)
        q, k, v = (self.self_attn[f"{p}_proj"](normed).view(batch, n, -1, self.head_dim) for p in "qkv")
        q, k = (rotate(t.flatten(0, 1), *(table.repeat(batch, 1) for table in tables)).view_as(t) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.dropout(self.self_attn["o_proj"](mixed.transpose(1, 2).reshape(batch, n, -1)), DROP, self.training)
        normed, mlp = self.post_attention_layernorm(x), self.mlp
        block = mlp["down_proj"](F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))
        return x + F.dropout(block, DROP, self.training)


class Network(nn.Module):
    """The model of models.prefill, as PyTorch differentiates it."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.n_layers))
        self.norm = nn.RMSNorm(c.hidden, c.eps)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = (2 * c.n_layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                nn.init.normal_(parameter, std=0.02 * deep)

    def forward(self, tokens):
        x = F.dropout(self.embed_tokens(tokens), DROP, self.training)
        tables = rotary_tables(self.c, 0, tokens.shape[1], tokens.device)
        for layer in self.layers:
            x = layer(x, tables)
        return F.linear(self.norm(x), self.embed_tokens.weight)


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


def train(steps, device, seed=0):
    """(tokenizer, network, [(step, loss, loss on what is held out)]): the best network on what is held out."""
    from models.config import read_config

    torch.manual_seed(seed)
    paragraphs, held_out = texts()
    tokenizer = tokenizer_of(paragraphs)
    order = torch.Generator().manual_seed(seed)
    stream, held = stream_of(tokenizer, paragraphs).to(device), stream_of(tokenizer, held_out).to(device)
    HERE.mkdir(exist_ok=True)
    (HERE / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    network = Network(read_config(HERE)).to(device)
    optimiser = torch.optim.AdamW(network.parameters(), RATE, (0.9, 0.98), weight_decay=DECAY)
    curve, best, kept, smooth = [], math.inf, None, None
    for step in range(steps):
        done = step / steps
        for group in optimiser.param_groups:
            group["lr"] = RATE * min((step + 1) / WARM_UP, 0.5 * (1 + math.cos(math.pi * done)))
        starts = torch.randint(0, len(stream) - LENGTH - 1, (BATCH,), generator=order).to(device)
        at = starts[:, None] + torch.arange(LENGTH, device=device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = network(stream[at])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), stream[at + 1].flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
        if step % 50 == 49 or step + 1 == steps:
            curve.append((step + 1, round(smooth, 4), round(loss_of(network, held), 4)))
            print(f"step {curve[-1][0]:5d}  loss {curve[-1][1]:.3f}  held out {curve[-1][2]:.3f}", flush=True)
            if curve[-1][2] < best:
                best, kept = curve[-1][2], {k: v.detach().clone() for k, v in network.state_dict().items()}
    network.load_state_dict(kept)
    return tokenizer, network, curve


def main():
    found = argparse.ArgumentParser("python -m models.train_small", description=__doc__.split("\n")[0])
    found.add_argument("--steps", type=int, default=STEPS)
    args = found.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.perf_counter()
    tokenizer, network, curve = train(args.steps, device)
    weights = {f"model.{name}": value.half().cpu().contiguous() for name, value in network.state_dict().items()}
    save_file(weights, HERE / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(HERE / "tokenizer.json"))
    where = torch.cuda.get_device_name() if device.type == "cuda" else "a processor"
    facts = {"seconds": round(time.perf_counter() - start), "where": where, "curve": curve}
    (HERE / "training.json").write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
