"""Stacked multi-layer perceptrons: E networks of one shape, run as batched matrix products."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qpt.nets.pointwise import mish

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mish": mish,
    "relu": nn.functional.relu,
    "tanh": torch.tanh,
    "gelu": nn.functional.gelu,
}


class StackedMLP(nn.Module):
    """E independent perceptrons over the same sizes; `sizes` lists the layers from input to output."""

    def __init__(self, members: int, sizes: Sequence[int], activation: str = "mish") -> None:
        super().__init__()
        self.members, self.activation = members, ACTIVATIONS[activation]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for inputs, outputs in itertools.pairwise(sizes):
            bound = 1 / math.sqrt(inputs)  # torch.nn.Linear's own initialisation
            self.weights.append(nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(members, 1, outputs).uniform_(-bound, bound)))

    def forward(self, inputs: Tensor, frozen: bool = False) -> Tensor:
        """[..., in], shared by all members -> [E, ..., out]; frozen: no gradient into the weights."""
        shape = inputs.shape[:-1]
        return self._run(inputs.reshape(1, -1, inputs.shape[-1]), frozen).reshape(self.members, *shape, -1)

    def each(self, inputs: Tensor) -> Tensor:
        """[E, ..., in], an input of its own for every member -> [E, ..., out]."""
        x = inputs.reshape(self.members, -1, inputs.shape[-1])
        return self._run(x).reshape(*inputs.shape[:-1], -1)

    def _run(self, x: Tensor, frozen: bool = False) -> Tensor:
        layers, odd = len(self.weights), -x.shape[-1] % 8
        if x.is_cuda and odd:  # rows of whole 16 bytes in bf16: the fast matrix kernels take no others
            x = F.pad(x, (0, odd))
        x = x.expand(self.members, -1, -1)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if frozen:
                weight, bias = weight.detach(), bias.detach()
            if x.shape[-1] > weight.shape[1]:
                weight = F.pad(weight, (0, 0, 0, odd))
            if weight.shape[-1] == 1 and (x.is_cuda or x.dtype is not weight.dtype):
                # A product with one column is no work for a matrix unit, and what is learned from stays exact.
                x = (x.to(weight.dtype) * weight.mT).sum(-1, keepdim=True) + bias
            elif not x.is_cuda:
                x = torch.baddbmm(bias, x, weight)
            else:  # apart, so that a compiled step fuses the bias with the activation
                x = torch.bmm(x, weight) + bias
            if i < layers - 1:
                x = self.activation(x)
        return x
