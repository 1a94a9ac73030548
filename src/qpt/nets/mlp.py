"""Stacked multi-layer perceptrons: E networks of one shape, run as batched matrix products."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qpt.nets import frozen as unlearned
from qpt.nets import kernels
from qpt.nets.pointwise import fused_mish, mish

kernel = kernels.load("qpt.nets.mish_kernel")

WIDEST = 1024  # units of a layer that the kernel takes

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
        x = inputs.reshape(1, -1, inputs.shape[-1])
        return run(x, *self.layers(frozen), self.activation).reshape(self.members, *shape, -1)

    def each(self, inputs: Tensor) -> Tensor:
        """[E, ..., in], an input of its own for every member -> [E, ..., out]."""
        x = inputs.reshape(self.members, -1, inputs.shape[-1])
        return run(x, *self.layers(False), self.activation).reshape(*inputs.shape[:-1], -1)

    def layers(self, frozen: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and biases; frozen: without gradient.

        (By comprehensions: compilers of torch 2.11 and 2.13 stop at other ways to make lists of them.)
        """
        weights, biases = ([p.detach() if frozen else p for p in kind] for kind in (self.weights, self.biases))
        return weights, biases


def run_together(stacks: Sequence[StackedMLP], inputs: Sequence[Tensor], frozen: bool = False) -> Tensor:
    """Stacks of one shape as one, each of its own input [..., in] -> [members of all, ..., out]."""
    weights, biases = (
        [torch.cat(parts) for parts in zip(*kind, strict=True)]
        for kind in zip(*(stack.layers(frozen) for stack in stacks), strict=True)
    )
    rows = [x.reshape(1, -1, x.shape[-1]) for x in inputs]
    if all(x is inputs[0] for x in inputs):
        x = rows[0]
    else:
        x = torch.cat([x.expand(stack.members, -1, -1) for stack, x in zip(stacks, rows, strict=True)])
    return run(x, weights, biases, stacks[0].activation).reshape(len(weights[0]), *inputs[0].shape[:-1], -1)


def run(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """The layers of E members: [E or 1, M, in] -> [E, M, out]."""
    layers, odd = len(weights), -x.shape[-1] % 8
    if x.is_cuda and odd:  # rows of whole 16 bytes in bf16: the fast matrix kernels take no others
        x = F.pad(x, (0, odd))
    if activation is mish and unlearned.fits(x, weights, biases):
        return unlearned.values(x, weights, biases)
    x = x.expand(len(weights[0]), -1, -1)
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if x.shape[-1] > weight.shape[1]:
            weight = F.pad(weight, (0, 0, 0, odd))
        if i == layers - 2 and activation is mish and weights[-1].shape[-1] == 1 and _fits(x, weight):
            values: Tensor = _MishHead.apply(x.bfloat16(), weight, bias, weights[-1], biases[-1])  # type: ignore[no-untyped-call]
            return values
        if i < layers - 1 and activation is mish and _fits(x, weight):
            x = _MishLayer.apply(x.bfloat16(), weight, bias)  # type: ignore[no-untyped-call]
            continue
        if weight.shape[-1] == 1 and (x.is_cuda or x.dtype is not weight.dtype):
            # A product with one column is no work for a matrix unit, and what is learned from stays exact.
            x = (x.to(weight.dtype) * weight.mT).sum(-1, keepdim=True) + bias
        elif not x.is_cuda:
            x = torch.baddbmm(bias, x, weight)
        else:  # apart, so that a compiled step fuses the bias with the activation
            x = torch.bmm(x, weight) + bias
        if i < layers - 1:
            x = activation(x)
    return x


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Whether a hidden layer is learned here, in a compiled step in bf16, and of a width that the kernel takes."""
    if kernel is None or not (x.is_cuda and torch.compiler.is_compiling()):
        return False
    device, width = x.device.type, weight.shape[-1]
    narrow = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16
    learned = torch.is_grad_enabled() and weight.requires_grad and weight.dtype is torch.float32
    return narrow and learned and width % 16 == 0 and width <= WIDEST and x.numel() > 0


class _MishLayer(torch.autograd.Function):
    """mish(x w + b) for x [E, M, in] in bf16, w [E, in, out] and b [E, 1, out] in float32 -> [E, M, out] in float32.

    Forward as anywhere; backward, one kernel takes the gradient through the activation and sums that of the bias.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        narrow = weight.bfloat16()
        z = torch.bmm(x, narrow)
        ctx.save_for_backward(x, narrow, bias, z)
        return fused_mish(z + bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, bias, z = ctx.saved_tensors
        dz, parts = kernel.back(z, bias[:, 0], grad.bfloat16())
        return torch.bmm(dz, weight.mT), _outer(x, dz), parts.sum(1)[:, None]


class _MishHead(torch.autograd.Function):
    """The last hidden layer and the value of every row, mish(x w + b) · v + c: [E, M, in] -> [E, M, 1] in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, last: Tensor, shift: Tensor) -> Tensor:
        narrow = weight.bfloat16()
        z = torch.bmm(x, narrow)
        ctx.save_for_backward(x, narrow, bias, last, z)
        return (fused_mish(z + bias) * last.mT).sum(-1, keepdim=True) + shift

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        x, weight, bias, last, z = ctx.saved_tensors
        dz, parts = kernel.head_back(z, bias[:, 0], last[..., 0], grad[..., 0])
        biases, lasts = parts.sum(1).unbind(1)
        return torch.bmm(dz, weight.mT), _outer(x, dz), biases[:, None], lasts[..., None], grad.sum(1, keepdim=True)


def _outer(x: Tensor, dz: Tensor, pieces: int = 8) -> Tensor:
    """xᵀ dz over many rows: [E, M, in], [E, M, out] -> [E, in, out] in float32.

    By pieces of the rows as matrices of their own: for few large results over long sums, cuBLAS leaves most of a GPU
    idle. Each piece is rounded as the whole would be.
    """
    members, rows = x.shape[:2]
    if rows % (64 * pieces):
        pieces = 1
    cut = (members * pieces, rows // pieces, -1)
    parts = torch.bmm(x.reshape(cut).mT, dz.reshape(cut))
    return parts.view(members, pieces, *parts.shape[1:]).sum(1, dtype=torch.float32)
