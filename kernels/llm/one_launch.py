"""A whole token in one launch: one_launch.cu, its sizes, and where it finds everything.

OneLaunch   a Step (kernels/llm/step.py) whose launch is one
refusal     why a model is not offered it
"""

import functools
import weakref
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.llm.step import Step
from lab import cuda
from lab.card import multiprocessors, shared_memory, starts_early
from lab.tensors import DTYPES, expect

HERE = Path(__file__).resolve().parent
SOURCES = ("kernels/llm/one_launch.cu", "kernels/llm/one_launch.py")  # headers: by what it includes
THREADS, WARPS = 512, 16  # that multiply; one warp more copies
SLOT, TILE, TILES, CHUNK = 32768, 16, 4, 32  # bytes of a slot, at least; tokens of a tile; tiles, channels of a task
MOST_GROUP = 8  # query heads of a kv head
MOST_HEAD_DIM = 256  # a longer head has too few tiles a slot: more teams of warps than a block has named barriers
MACHINE_BLOCKS = 3  # on the SIMT machine: its patience
PIECES = "attention_norm Wqkv bqkv q_norm k_norm Wo ffn_norm W_gate W_up W_down".split()  # as token_tasks.cuh has them


class Plan(NamedTuple):
    """Bytes of a slot, how many there are, bytes of shared memory, and tokens of a task of attention."""

    slot: int
    slots: int
    shared: int
    tokens: int


def refusal(config, bits=16, kv_bits=16, device=None):
    """Why a model cannot be run so, as the end of a sentence; None if it can.

    Weights and cache must have 16 bits; hidden and ffn be multiples of 8, head_dim of 16, up to 256; at most 8 query
    heads share a kv head; two rows of each matrix fit into shared memory; and the card is of compute capability 9.0 or
    newer. device: None stands for a card where there is one, else for the SIMT machine.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if bits != 16 or kv_bits != 16:
        return f"weights and cache must have 16 bits, got bits={bits} and kv_bits={kv_bits}"
    for name, unit in (("hidden", 8), ("ffn", 8), ("head_dim", 16)):
        if getattr(config, name) % unit:
            return f"{name} must be a multiple of {unit}, got {getattr(config, name)}"
    if config.head_dim > MOST_HEAD_DIM:
        return f"head_dim must be at most {MOST_HEAD_DIM}, got {config.head_dim}"
    if config.n_heads // config.n_kv_heads > MOST_GROUP:
        return f"at most {MOST_GROUP} query heads may share a kv head, got {config.n_heads // config.n_kv_heads}"
    if plan(_sizes(config), shared_memory(device)) is None:
        return f"two rows of each matrix must fit into shared memory, got hidden {config.hidden} and ffn {config.ffn}"
    if not starts_early(device):
        return "the card must be of compute capability 9.0 or newer"
    return None


def takes(config, bits=16):
    """Whether there is such a launch for a model."""
    return refusal(config, bits) is None


@functools.cache
def plan(sizes, room):
    """The Plan for a model's sizes and so many bytes of shared memory; None if they are too few."""
    hidden, n_heads, n_kv_heads, head_dim, ffn = sizes[:5]
    slot = -(-max(SLOT, 4 * hidden, 2 * n_heads * head_dim, 2 * ffn) // 128) * 128
    group, tiles = n_heads // n_kv_heads, min(TILES, slot // (4 * TILE * head_dim))
    attention = WARPS // tiles * (2 * group * (head_dim + 8) + 4 * head_dim + 8 * tiles * group)
    fixed = attention + 2 * (4 * WARPS * CHUNK + 8 * WARPS) + 2 * 4 * THREADS + 4 * WARPS + 1024
    fixed += 32 * 8 * -(-head_dim // 64)
    slots = (room - fixed) // slot
    # all the room: where the driver may leave more to L1, products take longer (kernels/gemv/ring_plan.py)
    return Plan(slot, slots, room, tiles * TILE) if slots >= 2 else None


def _sizes(config):
    return config.hidden, config.n_heads, config.n_kv_heads, config.head_dim, config.ffn


@functools.cache
def kernel(dtype, sizes, biases, head_norms, plan):
    """one_launch.cu, compiled for a model's sizes."""
    hidden, n_heads, n_kv_heads, head_dim, ffn = sizes
    numbers = hidden, n_heads, ffn, str(biases).lower(), str(head_norms).lower(), plan.slot, plan.slots
    options = (
        f"-DSIZES=Sizes<{', '.join(map(str, numbers))}>",
        f"-DSHAPE=Shape<{DTYPES[dtype]}, {head_dim}, {n_heads // n_kv_heads}>",
        f"-DSCHEDULE=Schedule<{TILES}, {TILE}, 1, false, false>",
        f"-DMEMORY={plan.shared - plan.slots * plan.slot}",
    )
    return cuda.load(HERE / "one_launch.cu", options, arch="sm_90a").one_launch


class OneLaunch(Step):
    """A token in one launch. Arguments, token, kv_len and logits as in Step; pdl is for `choose` alone.

    Weights stay where they are: the kernel is told how far from the embedding each of them begins. It keeps numbers of
    its own between launches, so one at a time: two launches of one OneLaunch on two streams disturb each other. And a
    launch with another cache makes them anew: graphs that hold an earlier one must go. It holds no cache itself.
    ValueError names what is not offered.
    """

    def __init__(self, config, weights, dtype, device, *, pdl=False):
        super().__init__(config, weights, dtype, device, pdl=pdl)
        if (why := refusal(config, device=self.device)) is not None:
            raise ValueError(f"OneLaunch: {why}")
        self.plan = plan(_sizes(config), shared_memory(self.device))
        layer = weights.layers[0]
        self.flags = layer.bqkv is not None, layer.q_norm is not None
        self.kernel = kernel(dtype, _sizes(config), *self.flags, self.plan)
        self.grid = multiprocessors(self.device) if self.device.type == "cuda" else MACHINE_BLOCKS
        self.pieces = self._pieces()
        self.base = weights.embedding
        if self.device.type == "cpu":
            self.base, self.pieces = _joined([weights.embedding, *self.pieces])
        self.tickets = torch.zeros(3, dtype=torch.int32, device=self.device)
        self.cache = None

    def _pieces(self):
        """All weights but the embedding: those of each layer, the last norm, the head. None: this model has none."""
        c, w = self.config, self.weights
        expect("OneLaunch", "embedding", w.embedding, w.embedding, (c.vocab, c.hidden))
        rows = (c.n_heads + 2 * c.n_kv_heads) * c.head_dim
        shapes = [(c.hidden,), (rows, c.hidden), (rows,), (c.head_dim,), (c.head_dim,)]
        shapes += [
            (c.hidden, c.n_heads * c.head_dim),
            (c.hidden,),
            (c.ffn, c.hidden),
            (c.ffn, c.hidden),
            (c.hidden, c.ffn),
        ]
        found = []
        for layer in w.layers:
            for name, shape in zip(PIECES, shapes):
                piece = getattr(layer, name)
                if piece is not None:
                    expect("OneLaunch", name, piece, w.embedding, shape)
                found.append(piece)
        expect("OneLaunch", "norm", w.norm, w.embedding, (c.hidden,))
        expect("OneLaunch", "head", w.head, w.embedding, (c.vocab, c.hidden))
        of_layers = (f"{name} of layer {index}" for index in range(len(w.layers)) for name in PIECES)
        for name, piece in zip(("embedding", *of_layers, "norm", "head"), (w.embedding, *found, w.norm, w.head)):
            if piece is not None:
                _expect_aligned(name, piece)
        return [*found, w.norm, w.head]

    def launch(self, cache, **options):
        """From self.token, at position self.kv_len - 1, to self.logits; its keys and values go into the cache.

        options: of a launch on the SIMT machine, such as check_races. Returns its report, and None on a card.
        """
        first = cache.layer(0)
        if self.cache is None or self.cache() is not cache or _addresses(first) != self.first:
            self._prepare(cache)
        c, (keys, values) = self.config, map(_start, first)
        args = (self.base, self.places, self.turns, self.token, self.kv_len, keys, values, self.logits)
        args += (self.vectors, self.tickets, len(self.weights.layers), c.vocab, self.capacity, *self.ends, float(c.eps))
        try:
            return self.kernel(self.grid, THREADS + 32, *args, shared=self.plan.shared, **options)
        except BaseException:
            if self.device.type == "cpu":  # a run of the SIMT machine that was interrupted has taken tickets
                self.tickets.zero_()
                self.vectors.zero_()
            raise

    def parts(self, cache):
        """The launch: there is nothing else to compile."""
        yield functools.partial(self.launch, cache)

    def _prepare(self, cache):
        """Tables for this cache, and memory for what blocks hand to each other."""
        self.cache = None  # until all is there for this one
        c, n_layers = self.config, len(self.weights.layers)
        layers = [cache.layer(index) for index in range(n_layers)]
        self.capacity = len(layers[0][0])
        for keys, values in layers:
            for name, part in (("keys", keys), ("values", values)):
                expect("OneLaunch", name, part, self.base, (self.capacity, c.n_kv_heads, c.head_dim))
        for index, pair in enumerate(layers):
            for name, part in zip(("keys", "values"), pair):
                _expect_aligned(f"{name} of layer {index}", part)
        keys_at = _places("keys", [keys for keys, _ in layers])
        values_at = _places("values", [values for _, values in layers])
        at = [_distance(self.base, piece) for piece in self.pieces]
        self.ends = at[-2:]
        each = len(PIECES)
        rows = [[*at[i * each : (i + 1) * each], keys_at[i], values_at[i]] for i in range(n_layers)]
        self.places = torch.tensor(rows, dtype=torch.int64, device=self.device)
        spread = sum(-(-n // 256) * 256 for n in (c.hidden, c.n_heads * c.head_dim, c.hidden, c.ffn))
        of_group = -(-c.n_heads * c.head_dim // 256) * 128 + 2 * c.n_heads  # PARTIAL in token_attention.cuh
        partials = -(-self.capacity // self.plan.tokens) * of_group
        rows = (c.n_heads + 2 * c.n_kv_heads) * c.head_dim
        self.vectors = torch.zeros(spread + rows + partials, dtype=torch.int64, device=self.device)
        self.tickets.zero_()
        # None of it is held here: who makes a larger cache must be able to let go of this one
        self.cache, self.first = weakref.ref(cache), _addresses(layers[0])


def _distance(base, piece):
    """Elements from the beginning of one tensor to that of another."""
    return 0 if piece is None else (piece.data_ptr() - base.data_ptr()) // base.element_size()


def _joined(tensors):
    """Copies of tensors as parts of one: (it, all but the first). On the SIMT machine addresses do not lead from one
    tensor to another."""
    sizes = [0 if t is None else t.numel() for t in tensors]
    whole = torch.cat([t.reshape(-1) for t in tensors if t is not None])
    parts = whole.split(sizes)
    return whole, [None if t is None else part for t, part in zip(tensors[1:], parts[1:])]


def _start(first):
    """The tensor that all layers are reached from: the first of them; on the SIMT machine what it is a part of."""
    return torch.empty(0, dtype=first.dtype).set_(first.untyped_storage()) if first.device.type == "cpu" else first


def _places(name, layers):
    """How far from there each layer begins."""
    if layers[0].device.type == "cpu" and len({layer.untyped_storage().data_ptr() for layer in layers}) > 1:
        raise ValueError(f"OneLaunch: on the SIMT machine {name} of all layers must lie in one tensor, got several")
    return [_distance(_start(layers[0]), layer) for layer in layers]


def _addresses(pair):
    return [part.data_ptr() for part in pair]


def _expect_aligned(name, tensor):
    if tensor.data_ptr() % 16:
        raise ValueError(f"OneLaunch: {name} must start at a multiple of 16 bytes, got {tensor.data_ptr():#x}")
