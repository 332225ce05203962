"""A cache in 8 or 4 bits: made of tensors, given back as one, and appended to, on the tensors' device.

Which code a number gets stands in rounding.py, and where it lies in layout.py.
"""

import copy
import math

import torch

from kernels.kv_cache import layout
from kernels.kv_cache.arguments import STEP, expect_bits_and_axis, expect_head_dim, expect_how, expect_kv
from kernels.kv_cache.layout import TILE
from kernels.kv_cache.rounding import BITS, codes_of, default_group, padded
from lab.tensors import expect, expect_first

SLICE = 1 << 24  # elements that are quantised at a time, about: a slice needs some ten times as many bytes


def lift(peak):
    """The largest power of two, up to 15, that keeps in float16 what is multiplied by scales up to `peak`."""
    return min(15, 15 - math.frexp(peak)[1])


class QuantizedKV:
    """Keys or values of a batch of sequences, quantised: what `quantize` returns and `decode` reads.

    shape   (batch, kv_len, n_kv_heads, head_dim)
    dtype   of the tensor that was quantised, and of what `dequantize` returns
    bits, axis, group, device
    role    "keys" or "values": how the codes lie. Caches with a scale for each channel are keys; others start as values
            unless `quantize` is told, and `decode` lays them out anew, in place, when it first takes them as keys
    nbytes  of the codes and scales in use, in whole tiles of 16 tokens: what `decode` reads
    recent  the exact tokens of the last, unfinished tile or group, for `append`
    """

    def __init__(self, like, bits, axis, group, role, room):
        batch, _, n_kv_heads, head_dim = like.shape
        self.shape = torch.Size((batch, 0, n_kv_heads, head_dim))
        self.bits, self.axis, self.group, self.role = bits, axis, group, role
        self.dtype, self.device = like.dtype, like.device
        self.peak = 0.0
        self.recent = like.new_empty(batch, 0, n_kv_heads, head_dim)
        self._step = group if axis == "channel" else TILE  # tokens that are quantised together
        self.packed, self.scale = self._memory(room)

    @classmethod
    def of_parts(cls, where, name, packed, scale, shape, bits, axis, group, role, peak):
        """What `decode` needs of a cache, from what it reads. Nothing can be appended, and it stays as it lies.
        TypeError or ValueError names the part as NAME_codes, NAME_scale or NAME_peak."""
        batch, kv_len, n_kv_heads, head_dim = shape
        self = cls.__new__(cls)
        self.shape, self.bits, self.axis, self.group, self.role = torch.Size(shape), bits, axis, group, role
        if any(n < 1 for n in shape):
            raise ValueError(f"{where}: shape must have none of it 0, got {tuple(shape)}")
        if not 0 <= peak < math.inf:
            raise ValueError(f"{where}: {name}_peak must be finite, 0 or more, got {peak}")
        wanted = batch, n_kv_heads, "tiles", layout.tile_bytes(bits, head_dim)
        expect_first(where, f"{name}_codes", packed, wanted, (torch.uint8,))
        tiles = packed.shape[2]
        if tiles * TILE < kv_len or tiles * TILE % STEP:
            wanted = f"a multiple of {STEP // TILE} tiles, {-(-kv_len // TILE)} or more, for {kv_len} tokens"
            raise ValueError(f"{where}: {name}_codes must have {wanted}, got {tiles}")
        groups, width = tiles, TILE * head_dim // group
        if axis == "channel":
            groups, width = -(-tiles * TILE // group), head_dim
        expect(where, f"{name}_scale", scale, packed, (batch, n_kv_heads, groups, width), (torch.float16,))
        for part, tensor in (("codes", packed), ("scale", scale)):
            if tensor.data_ptr() % 16:
                got = f"{tensor.data_ptr():#x}"
                raise ValueError(f"{where}: {name}_{part} must start at an address divisible by 16, got {got}")
        self.packed, self.scale, self.device, self.peak = packed, scale, packed.device, peak
        return self

    def __repr__(self):
        return f"<QuantizedKV {tuple(self.shape)} bits={self.bits} axis={self.axis!r} group={self.group} {self.role}>"

    @property
    def nbytes(self):
        tiles, groups = self._extent(self.shape[1])
        return sum(t[:, :, :n].numel() * t.element_size() for t, n in ((self.packed, tiles), (self.scale, groups)))

    @property
    def role(self):
        """As "keys" or "values". `form` goes with it: how the codes lie, a word for each of bits, axis, group, role."""
        return self._role

    @role.setter
    def role(self, role):
        self._role, self.form = role, f"{self.bits} {self.axis} {self.group} {role}"

    @property
    def peak(self):
        """The largest magnitude of a scale. `lift` goes with it."""
        return self._peak

    @peak.setter
    def peak(self, peak):
        self._peak, self.lift = peak, lift(peak)

    @property
    def capacity(self):
        """Tokens that there is room for; `append` makes more when it is needed."""
        return self.packed.shape[2] * TILE

    def codes(self):
        """The codes as they stand in ref/kv_cache.py: int8 (batch, kv_len, n_kv_heads, head_dim), or bytes of e4m3."""
        codes = torch.empty(self.shape, dtype=torch.uint8 if self.bits == "fp8" else torch.int8, device=self.device)
        for b, begin, end in self._slices():
            codes[b : b + 1, begin:end] = layout.unpack(self.packed, self.bits, self.role, b, begin, end)
        return codes

    def scales(self):
        """The scales as they stand in ref/kv_cache.py: float16, one for each group."""
        kv_len = self.shape[1]
        _, groups = self._extent(kv_len)
        scale = self.scale[:, :, :groups]
        if self.axis == "channel":
            return layout.unpack_channel_scales(scale).transpose(1, 2).contiguous()
        return layout.unpack_token_scales(scale, self.role)[:, :kv_len].contiguous()

    def dequantize(self, dtype=None):
        """code · scale, rounded to a dtype; None: that of what was quantised. Beyond its largest number: that."""
        dtype = dtype or self.dtype
        values, scale = torch.empty(self.shape, dtype=dtype, device=self.device), self.scales()
        limit = torch.finfo(dtype).max
        for b, begin, end in self._slices():
            codes = layout.unpack(self.packed, self.bits, self.role, b, begin, end)
            x = (codes.view(torch.float8_e4m3fn) if self.bits == "fp8" else codes).float()
            if self.axis == "token":
                x.unflatten(3, (-1, self.group)).mul_(scale[b : b + 1, begin:end, :, :, None])
            else:
                groups = scale[b : b + 1, begin // self.group : -(-end // self.group)].float()
                x *= groups.repeat_interleave(self.group, 1)[:, : end - begin]
            values[b : b + 1, begin:end] = x.clamp_(-limit, limit)
        return values

    def append(self, kv_new):
        """Put tokens behind the others, kv_new (batch, n, n_kv_heads, head_dim), n at least 1. Returns the cache.

        The codes are those that quantising everything at once would give: a token may change the scale of the group
        that it falls into, so the last, unfinished group is quantised again from its exact tokens. Finished groups
        stay as they are. Where there is no more room, the cache moves to twice as much memory (quantize(capacity=)
        avoids that). It waits for the device, once a sequence, to look for what cannot be stored; so a graph cannot
        capture it, and a graph that has captured `decode` goes on with the old length and memory.

        TypeError or ValueError as for `quantize`; the cache is unchanged then.
        """
        batch, kv_len, n_kv_heads, head_dim = self.shape
        expect_kv("append", "kv_new", kv_new, (batch, "n", n_kv_heads, head_dim))
        if kv_new.dtype != self.dtype or kv_new.device != self.device:
            wanted, got = (
                f"{dtype} on {device}" for dtype, device in ((self.dtype, self.device), (kv_new.dtype, kv_new.device))
            )
            raise TypeError(f"append: kv_new must be of {wanted}, like the cache, got {got}")
        peak = _peak("append", "kv_new", kv_new, self.bits)
        if kv_len + kv_new.shape[1] > self.capacity:
            self._move(max(kv_len + kv_new.shape[1], 2 * self.capacity))
        self._put(kv_new.detach(), peak)
        return self

    def lay_out(self, role):
        """Lay the codes and scales out for keys or values (`packed` and `scale` are new tensors: it takes the memory of
        the cache twice while it runs). ValueError for a cache with axis="channel", which holds keys."""
        if role != self.role:
            if self.axis == "channel":
                raise ValueError(
                    "lay_out: a cache with axis='channel' holds keys, so its role must be 'keys', got 'values'"
                )
            new, scale = copy.copy(self), self.scales()  # so that nothing is lost where memory runs out
            new.role = role
            new.packed, new.scale = new._memory(self.capacity)
            for b, begin, end in self._slices():
                codes = layout.unpack(self.packed, self.bits, self.role, b, begin, end)
                new._write(codes, scale[b : b + 1, begin:end], b, begin)
            self.role, self.packed, self.scale = role, new.packed, new.scale
        return self

    def _put(self, kv, peak):
        """Quantise tokens that follow the others, for which there is room."""
        batch, kv_len, n_kv_heads, head_dim = self.shape
        before = self.recent.shape[1]
        length = before + kv.shape[1]
        many = max(1, SLICE // (self._step * n_kv_heads * head_dim)) * self._step
        some = max(1, SLICE // (min(many, length) * n_kv_heads * head_dim))
        for b in range(0, batch, some):
            for t in range(0, length, many):  # from the first recent token on
                x = kv[b : b + some, max(0, t - before) : t - before + many]
                if t == 0:
                    x = torch.cat([self.recent[b : b + some], x], 1)
                codes, scale = codes_of(x.float(), self.bits, self.axis, self.group)
                self._write(codes, scale, b, kv_len - before + t)
        kv_len += kv.shape[1]
        left = kv_len % self._step
        self.shape = torch.Size((batch, kv_len, n_kv_heads, head_dim))
        self.peak = max(self.peak, peak)
        joined = torch.cat([self.recent, kv[:, max(0, kv.shape[1] - left) :]], 1)
        self.recent = joined[:, joined.shape[1] - left :].clone()

    def _write(self, codes, scale, b, begin):
        """Put codes and scales of the sequences b, b + 1, .. in their places, from the token `begin` on, where a tile
        begins."""
        n, length, n_kv_heads, head_dim = codes.shape
        tile, tiles = begin // TILE, -(-length // TILE)
        codes = layout.pack(padded(codes, tiles * TILE).reshape(1, -1, n_kv_heads, head_dim), self.bits, self.role)
        self.packed[b : b + n, :, tile : tile + tiles] = codes.view(n_kv_heads, n, tiles, -1).transpose(0, 1)
        if self.axis == "channel":
            first, groups = begin // self.group, scale.shape[1]
            self.scale[b : b + n, :, first : first + groups] = layout.pack_channel_scales(scale).transpose(1, 2)
            return
        scale = layout.pack_token_scales(padded(scale, tiles * TILE), self.role)
        self.scale[b : b + n, :, tile : tile + tiles] = scale

    def _memory(self, tokens):
        """Zeroed codes and scales for so many tokens. Zeros, so that what no token has written is a number."""
        batch, _, n_kv_heads, head_dim = self.shape
        tiles, groups = self._extent(-(-tokens // STEP) * STEP)
        width, scales = layout.tile_bytes(self.bits, head_dim), head_dim
        if self.axis == "token":
            scales = TILE * head_dim // self.group
        packed = torch.zeros(batch, n_kv_heads, tiles, width, dtype=torch.uint8, device=self.device)
        return packed, torch.zeros(batch, n_kv_heads, groups, scales, dtype=torch.float16, device=self.device)

    def _extent(self, tokens):
        """(tiles of codes, groups of scales) of so many tokens; where scales belong to tokens, a tile is a group."""
        return -(-tokens // TILE), -(-tokens // (self.group if self.axis == "channel" else TILE))

    def _move(self, tokens):
        old = self.packed, self.scale
        self.packed, self.scale = self._memory(tokens)
        for new, before in zip((self.packed, self.scale), old):
            new[:, :, : before.shape[2]] = before

    def _slices(self):
        """(sequence, first token, one past the last) of pieces that are unpacked at a time."""
        batch, kv_len, n_kv_heads, head_dim = self.shape
        step = math.lcm(self._step, TILE)
        many = max(1, SLICE // (step * n_kv_heads * head_dim)) * step
        return [(b, t, min(t + many, kv_len)) for b in range(batch) for t in range(0, kv_len, many)]


def quantize(kv, bits, *, axis="token", group=None, role=None, capacity=None):
    """Quantise keys or values, kv (batch, kv_len, n_kv_heads, head_dim) of float16, bfloat16 or float32.

    bits      8 (int8), 4 (int4) or "fp8" (e4m3)
    axis      "token": a scale for `group` channels of a token and head. "channel": a scale for `group` tokens of a
              channel and head, for keys, some of whose channels are much larger than the rest
    group     axis="token": a multiple of 16 that divides head_dim; axis="channel": a multiple of 32. None: one scale
              for a token and head, or for 128 tokens, in 8 bits; 32 on either axis in 4 bits (16 channels where 32
              does not divide head_dim)
    role      "keys" or "values"; None: see QuantizedKV
    capacity  tokens to make room for, kv_len or more

    head_dim is a multiple of 16, 256 at most. Takes bits / 8 bytes an element and 2 for each scale. Runs on the
    tensor's device, and waits for it, to look for numbers that cannot be stored: NaN and infinity, and what needs a
    scale beyond float16, are named in a ValueError. TypeError or ValueError names any other argument; nothing has been
    made by then.
    """
    expect_bits_and_axis("quantize", bits, axis)
    expect_kv("quantize", "kv", kv, ("batch", "kv_len", "n_kv_heads", "head_dim"))
    _, kv_len, _, head_dim = kv.shape
    expect_head_dim("quantize", head_dim)
    group = default_group(bits, axis, head_dim) if group is None else group
    expect_how("quantize", bits, axis, group, role, head_dim)
    if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < kv_len):
        raise ValueError(f"quantize: capacity must be a whole number of kv_len, {kv_len}, or more, got {capacity!r}")
    peak = _peak("quantize", "kv", kv, bits)
    role = role or ("keys" if axis == "channel" else "values")
    cache = QuantizedKV(kv, bits, axis, group, role, capacity or kv_len)
    cache._put(kv.detach(), peak)
    return cache


def _peak(where, name, kv, bits):
    """The largest scale that these numbers will have. ValueError for what cannot be stored, with its first index."""
    if kv.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{where}: a graph cannot capture this: it waits for the card, to look at the numbers")
    kv, largest, limit = kv.detach(), 0.0, 65504 * float(BITS[bits])
    many = max(1, SLICE // kv[0, 0].numel())
    some = max(1, many // kv.shape[1])
    for b in range(0, kv.shape[0], some):
        for begin in range(0, kv.shape[1], many):
            size = kv[b : b + some, begin : begin + many].float().abs()
            top = float(size.amax())  # NaN if there is one
            if not top <= limit:
                bad = ~torch.isfinite(size) if not math.isfinite(top) else size > limit
                index = torch.nonzero(bad)[0].tolist()
                index = (b + index[0], begin + index[1], *index[2:])
                wanted = "be finite" if not math.isfinite(top) else f"not pass {limit:.6g} in magnitude"
                raise ValueError(f"{where}: {name} must {wanted}, got {kv[index].item()} at {index}")
            largest = max(largest, top)
    return largest / BITS[bits]
