"""A whole token of Mamba-2 in one launch: one_launch.cu, its sizes, and where it finds everything.

OneLaunch   a Step (kernels/mamba2/step.py) whose launch is one
refusal     why a model is not offered it
"""

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.mamba2.arguments import FLOAT
from kernels.mamba2.step import Step
from lab import cuda
from lab.card import multiprocessors, shared_memory, starts_early
from lab.tensors import DTYPES, expect

HERE = Path(__file__).resolve().parent
SOURCES = ("kernels/mamba2/one_launch.cu", "kernels/mamba2/one_launch.py")  # headers: by what it includes
MOST_THREADS, MOST_WORDS, MOST_SLOTS = 512, 4, 24
# The last arguments of Sizes (token_line.cuh), of which trials.py tries others: tasks of a ticket, warps that finish at
# most, whether windows are written late, whether states leave L2 first
CHOSEN = 2, 9, "true", "true"
MACHINE_BLOCKS = 3  # on the SIMT machine: its patience
PIECES = "norm W_in gated_norm W_out".split()  # as token_line.cuh has them


def refusal(config, bits=16, device=None):
    """Why a model cannot be run so, as the end of a sentence; None if it can. device: None stands for a card where
    there is one, else for the SIMT machine."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if bits != 16:
        return f"weights must have 16 bits, got bits={bits}"
    if config.attention_layers or config.ffn:
        return "all layers must be of Mamba-2, without feed-forward blocks, got a hybrid"
    if config.ngroups != 1:
        return f"ngroups must be 1, as the gated norm's root is taken last, got {config.ngroups}"
    if getattr(config, "biases", False):
        return "in_proj and out_proj must have no biases, got some"
    for name, unit in (("hidden", 8), ("d_inner", 8), ("headdim", 2), ("dstate", 4)):
        if getattr(config, name) % unit:
            return f"{name} must be a multiple of {unit}, got {getattr(config, name)}"
    if config.dstate > 256:
        return f"dstate must be at most 256, got {config.dstate}"
    if plan(config.hidden, config.d_inner, config.dstate, shared_memory(device)) is None:
        return f"two groups of rows must fit into shared memory, got hidden {config.hidden}, d_inner {config.d_inner}"
    if not starts_early(device):
        return "the card must be of compute capability 9.0 or newer"
    return None


class Plan(NamedTuple):
    """Threads that multiply, threads of a block, how many slots there are, and bytes of shared memory."""

    threads: int
    block: int
    slots: int
    shared: int


@functools.cache
def plan(hidden, d_inner, dstate, room, finishers=CHOSEN[1]):
    """The Plan for so many bytes of shared memory and at most so many warps that finish; None if there is none."""
    words = -(-(hidden // 8) // MOST_THREADS)
    threads = -(-(hidden // 8) // words // 32) * 32
    if words > MOST_WORDS or -(-(d_inner // 8) // threads) > MOST_WORDS:
        return None
    rows = 2 * max(4 * hidden, (2 if 3 * hidden < 2 * d_inner else 4) * d_inner)
    slot = -(-(rows + 8 * dstate) // 128) * 128
    fixed = finishers * 4 * threads + 2 * threads // 8 + 1024  # sums, squares, barriers
    slots = min(MOST_SLOTS, (room - fixed) // (slot + 32))
    return Plan(threads, threads + 32 * min(finishers, slots) + 32, slots, room) if slots >= 2 else None


@functools.cache
def kernel(dtype, hidden, nheads, headdim, dstate, width, threads, slots, *chosen):
    """one_launch.cu, compiled for a model's sizes. chosen: as CHOSEN, and further arguments of Sizes."""
    numbers = DTYPES[dtype], hidden, nheads, headdim, dstate, width, threads, slots, *chosen
    return cuda.load(
        HERE / "one_launch.cu", (f"-DSIZES=Sizes<{', '.join(map(str, numbers))}>",), arch="sm_90a"
    ).one_launch


class OneLaunch(Step):
    """A token in one launch. Arguments, token, kv_len and logits as in Step; pdl is for `choose` alone. States are
    float32.

    Weights stay where they are: the kernel is told how far from the embedding each of them begins. It keeps numbers of
    its own between launches, so one at a time: two launches of one OneLaunch on two streams disturb each other.
    ValueError names what is not offered.
    """

    chosen = CHOSEN

    def __init__(self, config, weights, dtype, device, *, pdl=False):
        super().__init__(config, weights, dtype, device, pdl=pdl)
        if (why := refusal(config, device=self.device)) is not None:
            raise ValueError(f"OneLaunch: {why}")
        c = config
        self.width = weights.layers[0].conv_weight.shape[1]
        self.plan = plan(c.hidden, c.d_inner, c.dstate, shared_memory(self.device), self.chosen[1])
        sizes = c.hidden, c.nheads, c.headdim, c.dstate, self.width, self.plan.threads, self.plan.slots
        self.kernel = kernel(dtype, *sizes, *self.chosen)
        self.grid = multiprocessors(self.device) if self.device.type == "cuda" else MACHINE_BLOCKS
        self.base, pieces = weights.embedding, self._pieces()
        if self.device.type == "cpu":  # where addresses do not lead from one tensor to another
            whole = torch.cat([t.reshape(-1) for t in (self.base, *pieces)])
            sizes = [t.numel() for t in (self.base, *pieces)]
            self.base, *pieces = whole.split(sizes)
            self.base = whole
        at = [(piece.data_ptr() - self.base.data_ptr()) // 2 for piece in pieces]
        self.ends = at[-2:]
        self.places = torch.tensor(at[:-2], dtype=torch.int64, device=self.device)
        self.constants = torch.stack([self._constants(layer) for layer in weights.layers])
        spread = -(-c.hidden // 256) * 256 + -(-c.d_inner // 256) * 128
        numbers = spread + 2 * c.dstate + c.nheads
        self.vectors = torch.zeros(numbers, dtype=torch.int64, device=self.device)
        self.turn = torch.zeros(3, dtype=torch.int32, device=self.device)

    def _pieces(self):
        """All matrices and norms but the embedding: those of each layer, the last norm, the head."""
        c, w = self.config, self.weights
        rows = c.d_inner + c.channels + c.nheads
        shapes = (c.hidden,), (rows, c.hidden), (c.d_inner,), (c.hidden, c.d_inner)
        found = [(name, getattr(layer, name), s) for layer in w.layers for name, s in zip(PIECES, shapes)]
        found += [("norm", w.norm, (c.hidden,)), ("head", w.head, (c.vocab, c.hidden))]
        for name, piece, shape in [("embedding", w.embedding, (c.vocab, c.hidden)), *found]:
            expect("OneLaunch", name, piece, w.embedding, shape)
            if piece.data_ptr() % 16:
                raise ValueError(f"OneLaunch: {name} must start at a multiple of 16 bytes, got {piece.data_ptr():#x}")
        return [piece for _, piece, _ in found]

    def _constants(self, layer):
        """A layer's numbers in float, one behind another."""
        c = self.config
        bias = torch.zeros_like(layer.conv_weight[:, 0]) if layer.conv_bias is None else layer.conv_bias
        shapes = {"conv_weight": (c.channels, self.width), "dt_bias": (c.nheads,), "A": (c.nheads,), "D": (c.nheads,)}
        for name, shape in shapes.items():
            expect("OneLaunch", name, getattr(layer, name), self.weights.embedding, shape, FLOAT)
        return torch.cat([layer.conv_weight.reshape(-1), bias, layer.dt_bias, layer.A, layer.D])

    def launch(self, state, **options):
        """From self.token to self.logits; the states move on by it. state.conv (n_layers, 1, width - 1, channels) and
        state.ssm (n_layers, 1, nheads, headdim, dstate) float32, each one tensor.

        options: of a launch on the SIMT machine, such as check_races. Returns its report, and None on a card.
        """
        c, n_layers = self.config, len(self.weights.layers)
        expect("OneLaunch", "conv", state.conv, self.base, (n_layers, 1, self.width - 1, c.channels))
        states = (n_layers, 1, c.nheads, c.headdim, c.dstate)
        expect("OneLaunch", "ssm", state.ssm, self.base, states, FLOAT)
        args = (self.base, self.constants, self.places, state.conv, state.ssm, self.token, self.logits, self.vectors)
        args += (self.turn, n_layers, c.vocab, *self.ends, float(c.eps), *map(float, c.dt_limit))
        try:
            return self.kernel(self.grid, self.plan.block, *args, shared=self.plan.shared, **options)
        except BaseException:
            if self.device.type == "cpu":  # a run of the SIMT machine that was interrupted has taken tickets
                self.turn.zero_()
                self.vectors.zero_()
            raise

    def parts(self, state, once=False):
        """The launch: there is nothing else to compile."""
        yield functools.partial(self.launch, state)
