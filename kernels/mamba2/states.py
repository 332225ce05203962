"""A state of 8 bits: codes, and a scale for each row."""

import torch


class QuantizedState:
    """A state (…, headdim, dstate) in codes of one byte, with a float32 scale for each row of dstate numbers.

    codes (…, dstate) int8, scale (…,) float32: a number is code · scale, and a row's largest has the code 127.
    """

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, state):
        """The state of a tensor of numbers."""
        state = state.float()
        scale = state.abs().amax(dim=-1) / 127
        per_code = torch.where(scale > 0, 1 / scale, 0.0)
        return cls((state * per_code[..., None]).round().clamp(-127, 127).to(torch.int8), scale)

    def dequantize(self):
        """A tensor of numbers, float32."""
        return self.codes.float() * self.scale[..., None]

    @property
    def shape(self):
        return self.codes.shape

    @property
    def device(self):
        return self.codes.device

    @property
    def nbytes(self):
        return self.codes.nbytes + self.scale.nbytes

    def __getitem__(self, index):
        return QuantizedState(self.codes[index], self.scale[index])
