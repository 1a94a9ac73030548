"""Stacked multi-layer perceptrons: E networks of one shape, run as batched matrix products."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qpt.nets.pointwise import mish

if torch.cuda.is_available() and importlib.util.find_spec("triton"):
    from qpt.nets import product_kernel as kernel
else:
    kernel = None  # type: ignore[assignment]

WIDEST = 256  # units of the last hidden layer: a tile holds whole rows of it

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
        """Weights and biases; frozen: without gradient."""
        weights, biases = list[Tensor](self.weights), list[Tensor](self.biases)
        return ([w.detach() for w in weights], [b.detach() for b in biases]) if frozen else (weights, biases)


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
    if x.shape[-1] > weights[0].shape[1]:
        weights = [F.pad(weights[0], (0, 0, 0, odd)), *weights[1:]]
    if activation is mish and _fits(x, weights):
        values: Tensor = _Values.apply(x, weights[0].requires_grad, *weights, *biases)  # type: ignore[no-untyped-call]
        return values
    x = x.expand(len(weights[0]), -1, -1)
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
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


def _fits(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether a gradient is wanted, in a compiled step in bf16, of one value by widths that the kernels take."""
    if kernel is None or not (x.is_cuda and torch.compiler.is_compiling()):
        return False
    device, widths = x.device.type, [weight.shape[-1] for weight in weights]
    narrow = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16
    learned = torch.is_grad_enabled() and (weights[0].requires_grad or x.requires_grad)
    wide = all(weight.dtype is torch.float32 for weight in weights)
    taken = len(widths) > 1 and widths[-1] == 1 and widths[-2] <= WIDEST and not any(w % 16 for w in widths[:-1])
    return narrow and learned and wide and taken and x.numel() > 0


class _Values(torch.autograd.Function):
    """One value a row by layers with mish between them: x [E or 1, M, in] -> [E, M, 1] in float32.

    Activation and bias are part of the products' kernels, forward and backward. Where the weights are not learned, only
    the gradient of x is computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, learned: bool, *layers: Tensor) -> Tensor:
        weights, biases = layers[: len(layers) // 2], layers[len(layers) // 2 :]
        narrow, last = [weight.bfloat16() for weight in weights[:-1]], weights[-1][..., 0]
        inputs, sums = [x.bfloat16()], []
        for weight, bias in zip(narrow[:-1], biases[:-2], strict=True):
            z, active = kernel.ahead(inputs[-1], weight, bias[:, 0], "mish")
            inputs.append(active)
            sums.append(z)
        z, values = kernel.value(inputs[-1], narrow[-1], biases[-2][:, 0], last)
        ctx.learned, ctx.shared, ctx.dtype = learned, len(x) < len(last), x.dtype
        ctx.save_for_backward(last, *narrow, *sums, z, *(inputs if learned else ()))
        out: Tensor = values[..., None] + biases[-1]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        last, *saved = ctx.saved_tensors
        learned, hidden = ctx.learned, len(saved) // (3 if ctx.learned else 2)
        weights, sums, inputs = saved[:hidden], saved[hidden : 2 * hidden], saved[2 * hidden :]
        dz, parts = kernel.value_back(sums[-1], last, grad[..., 0], "mish", learned)
        found, totals = [], [parts.sum(1)]
        for i in reversed(range(hidden)):
            if learned:
                found.append(_outer(inputs[i].expand(len(dz), -1, -1), dz))
            if i > 0:
                dz, parts = kernel.back(dz, weights[i], sums[i - 1], "mish", learned)
                totals.append(parts.sum(1))
        dx: Tensor | None = None
        if ctx.needs_input_grad[0]:
            dx = torch.bmm(dz, weights[0].mT)
            if ctx.shared:
                dx = dx.sum(0, keepdim=True, dtype=torch.float32)
            dx = dx.to(ctx.dtype)
        if not learned:
            return (dx, None, *(None for _ in range(2 * hidden + 2)))
        bias, lasts = totals[0].unbind(1)
        biases = [total[:, None] for total in (bias, *totals[1:])]
        return dx, None, *found[::-1], lasts[..., None], *biases[::-1], grad.sum(1, keepdim=True)


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
