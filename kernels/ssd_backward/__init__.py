"""The SSD layer run backwards: from the gradient of y to those of all that y was made of."""

from kernels.ssd_backward.arguments import Gradients
from kernels.ssd_backward.few import few

__all__ = ["Gradients", "few"]
