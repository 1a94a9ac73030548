"""Parameters side by side in one buffer, so that what an optimiser does to them is a few large kernels.

PyTorch's kernels for lists of tensors give one block of threads up to 65,536 numbers: a layer of 256 × 256 keeps one
block busy for 35 µs while the rest of a GPU has nothing to do, and clipping and moving averages do so again. Where
Triton is there, two kernels do all that clipping and Adam do to a buffer. A CPU gains nothing by it and keeps PyTorch's
own Adam.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from qpt.nets import kernels

kernel = kernels.load("qpt.algorithms.flat_kernel")

ALIGNED = 4  # numbers; compiled kernels expect tensors to begin at whole 16 bytes
PIECE = 4096  # numbers that one block of threads updates


def lay_out(tensors: Sequence[Tensor]) -> Tensor:
    """Move tensors into one new buffer, in their order; each becomes a view of it."""
    buffer = torch.zeros(sum(map(_room, tensors)), dtype=tensors[0].dtype, device=tensors[0].device)
    for tensor, view in zip(tensors, views(buffer, tensors), strict=True):
        tensor.data = view.copy_(tensor.detach())
    return buffer


def side_by_side(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The same tensors, on CUDA moved into one buffer."""
    tensors = list(tensors)
    if tensors[0].is_cuda:
        lay_out(tensors)
    return tensors


def views(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a buffer, in the shapes of the tensors that lie (or would lie) there."""
    parts = torch.split(buffer, [_room(tensor) for tensor in tensors])
    return [part[: tensor.numel()].view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def joined(one: Sequence[Tensor], other: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of tensors, flat, with pairs that follow one another in both buffers made one."""
    first = 0
    for i in range(1, len(one) + 1):
        if i == len(one) or not (_follows(one[i - 1], one[i]) and _follows(other[i - 1], other[i])):
            length = sum(map(_room, one[first : i - 1])) + one[i - 1].numel()
            yield _stretch(one[first], length), _stretch(other[first], length)
            first = i


class FlatAdam(torch.optim.Optimizer):
    """AdamW over one buffer, by our kernels or PyTorch's; checkpoints hold what `torch.optim.AdamW` would write."""

    def __init__(
        self, parameters: list[nn.Parameter], lr: float, *, weight_decay: float, betas: tuple[float, float]
    ) -> None:
        self.parameters, device = parameters, parameters[0].device
        settings = {"lr": torch.tensor(lr, device=device), "betas": betas, "weight_decay": weight_decay, "eps": 1e-8}
        super().__init__(parameters, settings)
        buffer = lay_out(parameters)
        self._moments = {name: torch.zeros_like(buffer) for name in ("exp_avg", "exp_avg_sq")}
        self._count = torch.zeros((), device=device)
        self._buffers = (buffer, *self._moments.values())
        self._pieces = [torch.split(x, PIECE) for x in self._buffers]
        self._gap = torch.zeros(ALIGNED, dtype=buffer.dtype, device=device)
        self._blocks: dict[tuple[int, ...], Tensor] = {}
        self._expose()

    def _expose(self) -> None:
        """The state of every parameter, as views."""
        for name, moment in self._moments.items():
            for parameter, view in zip(self.parameters, views(moment, self.parameters), strict=True):
                self.state[parameter] |= {"step": self._count, name: view}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for name, moment in self._moments.items():
            for parameter, view in zip(self.parameters, views(moment, self.parameters), strict=True):
                if name in self.state[parameter]:
                    view.copy_(self.state[parameter][name])
                    self._count.copy_(self.state[parameter]["step"])
        self._expose()

    def descend(self, gradients: Sequence[Tensor], sizes: Sequence[int], clip: float | None) -> list[Tensor]:
        """One step; the gradients of each group (so many parameters each) are clipped on their own.

        Returns the norms of the groups before clipping.
        """
        parts: list[Tensor] = []
        for gradient in gradients:
            parts.append(gradient.reshape(-1))
            if odd := _room(gradient) - gradient.numel():
                parts.append(self._gap[:odd])
        gradient = torch.cat(parts)
        starts = [0, *accumulate(map(_room, gradients))]
        bounds = tuple(starts[place] for place in accumulate(sizes, initial=0))
        self._count += 1
        if not _fits(gradient):
            return self._step_by_pytorch(gradient, bounds, clip)
        if bounds not in self._blocks:  # in the first steps of a run, before any is captured
            self._blocks[bounds] = kernel.table(bounds, gradient.device)
        settings = self.param_groups[0]
        norms: list[Tensor] = kernel.adamw(
            self._buffers,
            gradient,
            self._blocks[bounds],
            len(sizes),
            count=self._count,
            lr=settings["lr"],
            betas=settings["betas"],
            weight_decay=settings["weight_decay"],
            eps=settings["eps"],
            clip=clip,
        )
        return norms

    def _step_by_pytorch(self, gradient: Tensor, bounds: Sequence[int], clip: float | None) -> list[Tensor]:
        norms: list[Tensor] = []
        if clip:
            for start, end in pairwise(bounds):
                norms.append(torch.linalg.vector_norm(gradient[start:end]))
                gradient[start:end].mul_((clip / (norms[-1] + 1e-6)).clamp(max=1.0))
        values, means, squares = self._pieces
        settings = self.param_groups[0]
        torch._fused_adamw_(
            values,
            torch.split(gradient, PIECE),
            means,
            squares,
            [],
            [self._count] * len(values),
            lr=settings["lr"],
            beta1=settings["betas"][0],
            beta2=settings["betas"][1],
            weight_decay=settings["weight_decay"],
            eps=settings["eps"],
            amsgrad=False,
            maximize=False,
        )
        return norms


def _fits(gradient: Tensor) -> bool:
    """Whether our own kernels can make the step."""
    return kernel is not None and gradient.is_cuda and gradient.dtype is torch.float32


def _room(tensor: Tensor) -> int:
    """Numbers that a tensor takes in a buffer."""
    return -(-tensor.numel() // ALIGNED) * ALIGNED


def _follows(tensor: Tensor, following: Tensor) -> bool:
    """Whether a tensor lies right behind another one."""
    if tensor.untyped_storage().data_ptr() != following.untyped_storage().data_ptr():
        return False
    return following.storage_offset() == tensor.storage_offset() + _room(tensor)


def _stretch(tensor: Tensor, length: int) -> Tensor:
    return tensor.detach().as_strided((length,), (1,))
