"""A model's weights over several devices: by heads, and by columns of the feed-forward block (tensor parallelism).

Of `count` devices, number `rank` has
- its query heads, and the kv heads that they share: rows of W_q, W_k and W_v, with their biases; its part of the cache
- as many of the ffn numbers: rows of W_gate and W_up
- the columns of W_o and W_down that meet these: a product is then a part of a sum over devices
- its rows of the head; embedding and norms whole

So a layer has two sums over devices, of `hidden` numbers each, and a token one more thing to exchange: its logits.
"""

from dataclasses import replace

import torch

from models.config import BadModel
from models.gpu_weights import Loader
from models.mamba2_config import Config as Mamba2Config
from models.weights import all_shapes

BY_COLUMNS = "o_proj.weight", "down_proj.weight"
BY_ROWS = tuple(f"{name}_proj.{part}" for name in ("q", "k", "v", "gate", "up") for part in ("weight", "bias"))
MOST = 8  # devices


def expect_divisible(config, count, bits=16, kv_bits=16):
    """BadModel unless a model can be split over so many devices, with these options of models.load."""
    if isinstance(config, Mamba2Config):
        raise BadModel(f"load: a model with states runs on one device, got gpus={count}")
    for name, value in (("bits", bits), ("kv_bits", kv_bits)):
        if value != 16:
            raise BadModel(f"load: {name} must be 16 over several devices, got {value}")
    for name in ("n_heads", "n_kv_heads", "ffn"):
        if getattr(config, name) % count:
            fit = [str(n) for n in range(1, MOST + 1) if not any(getattr(config, k) % n for k in ("n_kv_heads", "ffn"))]
            raise BadModel(
                f"load: {name} must be a multiple of the number of devices, got {getattr(config, name)} and {count}; "
                f"this model goes on {', '.join(fit)}"
            )


def rows_of(rows, rank, count):
    """(first, behind the last) of a device's rows. Where they do not divide, some have one more."""
    return rows * rank // count, rows * (rank + 1) // count


def share_of(config, rank, count):
    """The Config of one device's share."""
    first, last = rows_of(config.vocab, rank, count)
    parts = {name: getattr(config, name) // count for name in ("n_heads", "n_kv_heads", "ffn")}
    return replace(config, **parts, vocab=last - first)


class CheckpointShare:
    """One device's share of a models.weights.Checkpoint, by the same names."""

    def __init__(self, checkpoint, rank, count):
        self.checkpoint, self.rank, self.count = checkpoint, rank, count
        self.dtypes = checkpoint.dtypes

    def cut(self, name):
        """(axis, first, last): the part of a tensor along an axis; axis None: all of it."""
        shape = self.checkpoint.shape(name)
        axis = 1 if name.endswith(BY_COLUMNS) else 0 if name.endswith((*BY_ROWS, "lm_head.weight")) else None
        return (None, 0, 0) if axis is None else (axis, *rows_of(shape[axis], self.rank, self.count))

    def shape(self, name):
        axis, first, last = self.cut(name)
        shape = list(self.checkpoint.shape(name))
        if axis is not None:
            shape[axis] = last - first
        return tuple(shape)

    def __getitem__(self, name):
        axis, first, last = self.cut(name)
        tensor = self.checkpoint[name]
        return tensor if axis is None else tensor.narrow(axis, first, last - first)

    def place(self, name):
        """As Checkpoint.place, of what is read of the file: rows of a share lie together, columns do not."""
        axis, first, last = self.cut(name)
        path, begin, size = self.checkpoint.place(name)
        if axis != 0:
            return path, begin, size
        row = size // self.checkpoint.shape(name)[0]
        return path, begin + first * row, (last - first) * row

    def bytes(self, on_card):
        """Bytes that are read: on the CPU of the columns alone, for a card of all of them."""
        total = 0
        for name in all_shapes(self.checkpoint.config):
            axis, first, last = self.cut(name)
            whole = self.place(name)[2]
            total += whole * (last - first) // self.checkpoint.shape(name)[1] if axis == 1 and not on_card else whole
        return total


class ShareLoader(Loader):
    """Puts one device's share into its places."""

    def __init__(self, config, checkpoint, progress, dtype, device, rank, count):
        share = CheckpointShare(checkpoint, rank, count)
        super().__init__(share_of(config, rank, count), share, progress, dtype, 16, device)
        self.vocab = rows_of(config.vocab, rank, count)

    def _all(self):
        found = super()._all()
        if self.config.tied:  # the head is a part of the embedding, and only that is read for a token
            found.head = found.embedding[slice(*self.vocab)]
            found.read_bytes += found.head.nbytes - found.embedding.nbytes
        return found

    def layer(self, at):
        found = super().layer(at)
        self.arrive()  # what came whole, and was cut, has its memory back
        return found

    def put(self, name, place):
        axis, first, last = self.checkpoint.cut(name)
        if axis != 1 or self.upload is None:
            return super().put(name, place)
        shape = self.checkpoint.checkpoint.shape(name)
        whole = torch.empty(shape, dtype=self.checkpoint[name].dtype, device=self.device)
        self.upload.copy(self.checkpoint.place(name), whole)
        self.coming.append((name, whole[:, first:last], place))
        return None
