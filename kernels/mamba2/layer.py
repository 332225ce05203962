"""A token of Mamba-2, a launch for each layer: layer.cu, its sizes, and the Step that launches it.

LayerStep   a Step (kernels/mamba2/step.py) of one launch a layer, and three for the model
refusal     why a model is not offered it
"""

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.mamba2.arguments import FLOAT
from kernels.mamba2.launches import TYPES
from kernels.mamba2.step import Step
from kernels.mamba2.stepping import plan as state_plan
from lab import cuda
from lab.card import multiprocessors, shared_memory, starts_early
from lab.prepared import Calls
from lab.tensors import DTYPES, expect

HERE = Path(__file__).resolve().parent
SOURCES = ("kernels/mamba2/layer.cu", "kernels/mamba2/layer.py")  # headers: by what it includes
MOST_THREADS, MOST_STAGES, MOST_WORDS, MOST_STATE_ROWS = 512, 32, 4, 2
FLYING = 61440  # bytes on their way to a multiprocessor at a time: as many as fill memory, and no more (layer_rows.cuh)
AHEAD = 3  # groups of the next launch's first matrix
FIXED = 2048  # bytes of shared memory beside ring and sums, the driver's own among them
MACHINE_BLOCKS = 3  # on the SIMT machine: its patience
CALLS = Calls("mamba2_layer", outs=6)


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
    for name in ("hidden", "d_inner", "dstate"):
        if getattr(config, name) % 8:
            return f"{name} must be a multiple of 8, got {getattr(config, name)}"
    if not starts_early(device):
        return "the card must be of compute capability 9.0 or newer"
    if (
        plan(config.hidden, config.d_inner, config.nheads, config.dstate, 4, _blocks(device), shared_memory(device))
        is None
    ):
        sizes = f"hidden {config.hidden}, d_inner {config.d_inner}, dstate {config.dstate}"
        return f"a block's share of rows and states must fit into a multiprocessor, got {sizes}"
    return None


class Plan(NamedTuple):
    threads: int  # that multiply
    stages: int  # groups in the ring
    flying: int  # of them on their way at a time
    ahead: int  # of the next launch's, asked for into L2
    lanes: int  # of a state's row
    state_rows: int  # of a thread
    shared: int  # bytes of shared memory


@functools.cache
def plan(hidden, d_inner, nheads, dstate, itemsize, blocks, room):
    """The Plan of a model; None where there is no room. itemsize: bytes of a number of a state."""
    of_row = -(-hidden // 8 // MOST_THREADS)  # words of a row, a thread
    threads = -(-(hidden // 8) // of_row // 32) * 32
    words = [-(-(cols // 8) // threads) for cols in (hidden, d_inner)]
    if max(words) > MOST_WORDS:
        return None
    hidden_rows, inner_rows = ({1: 4, 2: 2}.get(n, 1) for n in words)  # of a group
    slot = max(hidden_rows * hidden, inner_rows * d_inner) * 2
    in_rows = 2 * d_inner + 2 * dstate + nheads
    sums = max(_whole(in_rows, blocks, hidden_rows), _whole(hidden, blocks, inner_rows)) * (threads // 32 | 1) * 4
    stages = min(MOST_STAGES, (room - FIXED - sums) // slot)
    lanes = state_plan(dstate, 16 // itemsize, 1).lanes
    state_rows = -(-_whole(d_inner, blocks, 1) // (threads // lanes))
    if stages < 2 or (state_rows > MOST_STATE_ROWS and blocks != MACHINE_BLOCKS):
        return None
    flying = min(stages, max(2, round(FLYING / slot)))
    return Plan(threads, stages, flying, min(AHEAD, stages), lanes, state_rows, stages * slot + sums)


def _whole(rows, blocks, of_group):
    """Rows of a block at the most, in whole groups."""
    return -(-(-(-rows // blocks)) // of_group) * of_group  # noqa: B002


def _blocks(device):
    return multiprocessors(device) if device.type == "cuda" else MACHINE_BLOCKS


@functools.cache
def kernel(dtype, state_dtype, hidden, nheads, headdim, dstate, width, found):
    """layer.cu, compiled for a model's sizes."""
    numbers = DTYPES[dtype], hidden, nheads, headdim, dstate, width, *found[:-1]
    options = f"-DSIZES=Sizes<{', '.join(map(str, numbers))}>", f"-DSTATE={TYPES[state_dtype]}"
    return cuda.load(HERE / "layer.cu", options, arch="sm_90").layer


class LayerStep(Step):
    """A token in one launch a layer, one in front of them and one behind, and the embedding's. Arguments, token, kv_len
    and logits as in Step; states are float32 or like the weights.

    Blocks of a launch wait for each other: no other work may keep them from running side by side. One at a time, as
    they share numbers: two launches of one LayerStep on two streams disturb each other. ValueError names what is not
    offered.
    """

    def __init__(self, config, weights, dtype, device, *, pdl=True):
        super().__init__(config, weights, dtype, device, pdl=pdl)
        if (why := refusal(config, device=self.device)) is not None:
            raise ValueError(f"LayerStep: {why}")
        self.blocks, self.width = _blocks(self.device), weights.layers[0].conv_weight.shape[1]
        self.turn = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._expect_weights()

    def _expect_weights(self):
        c, w = self.config, self.weights
        rows = c.d_inner + c.channels + c.nheads
        halves = {
            "norm": (c.hidden,),
            "W_in": (rows, c.hidden),
            "gated_norm": (c.d_inner,),
            "W_out": (c.hidden, c.d_inner),
        }
        floats = {"conv_weight": (c.channels, self.width), "dt_bias": (c.nheads,), "A": (c.nheads,), "D": (c.nheads,)}
        for number, layer in enumerate(w.layers):
            for name, shape in (halves | floats).items():
                tensor = getattr(layer, name)
                expect("LayerStep", name, tensor, w.embedding, shape, FLOAT if name in floats else None)
                if name in halves and tensor.data_ptr() % 16:
                    where = f"{name} of layer {number}"
                    raise ValueError(
                        f"LayerStep: {where} must start at a multiple of 16 bytes, got {tensor.data_ptr():#x}"
                    )
            if layer.conv_bias is not None:
                expect("LayerStep", "conv_bias", layer.conv_bias, w.embedding, (c.channels,), FLOAT)

    def parts(self, state, once=False):
        """As in Step. once: the launches of the first and of the last layer."""
        layers = self.weights.layers
        yield self.begin
        yield functools.partial(self.enter, layers[0], state.conv[0])
        for number in sorted({0, len(layers) - 1}) if once else range(len(layers)):
            behind = number + 1 < len(layers)
            following = (layers[number + 1], state.conv[number + 1]) if behind and not once else (None, None)
            yield functools.partial(self.through, layers[number], state.ssm[number], *following)
        yield self.end

    def through(self, layer, ssm, following, conv):
        """From what in_proj gives in this layer to what it gives in the next one, or to the end of the last."""
        c, entrance = self.config, following or _Nothing
        outs = self.projected, self.mixed, self.residual, ssm, conv, self.turn
        others = layer.A, layer.D, layer.dt_bias, layer.gated_norm, layer.W_out
        others += entrance.norm, entrance.W_in, entrance.conv_weight, entrance.conv_bias
        near = entrance.W_out
        options = c.eps, tuple(c.dt_limit), self.pdl
        if CALLS.run(options, *outs, *others, near) is not None:
            return
        state_shape = (1, c.nheads, c.headdim, c.dstate)
        expect("LayerStep", "ssm", ssm, self.mixed, state_shape, (torch.float32, self.mixed.dtype))
        if following:
            expect("LayerStep", "conv", conv, self.mixed, (1, self.width - 1, c.channels))
        found = plan(
            c.hidden, c.d_inner, c.nheads, c.dstate, ssm.element_size(), self.blocks, shared_memory(self.device)
        )  # fmt: skip
        run = kernel(self.mixed.dtype, ssm.dtype, c.hidden, c.nheads, c.headdim, c.dstate, self.width, found)
        args = self.projected, self.mixed, self.residual, ssm, *others, conv, near, self.turn
        with CALLS.preparing(options, outs, outs, (*others, near)):
            try:
                run(
                    self.blocks, found.threads + 32, *args, float(c.eps), *map(float, c.dt_limit), shared=found.shared,
                    pdl=self.pdl,
                )  # fmt: skip
            except BaseException:
                if self.device.type == "cpu":  # a run of the SIMT machine that was interrupted
                    self.turn.zero_()
                raise


class _Nothing:
    """In the place of a layer behind the last."""

    norm = W_in = W_out = conv_weight = conv_bias = None
