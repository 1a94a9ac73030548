"""One run on several processes (torchrun): each takes its share of every batch, and gradients are averaged.

Every process holds the same weights and optimisers. What a step reads off the whole batch is put together over all
processes, so that the step equals one process's step on the batches laid end to end: gradients (`average`), means over
valid entries (`total`) and statistics without gradient (`mean`). With one process all of these return what they are
given.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

PATIENCE = timedelta(hours=6)  # the others wait while the first process evaluates


def processes() -> int:
    """How many processes share this run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is; the first, 0, writes the files."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def speaks() -> bool:
    """Whether this process is the one that prints; also before and after the processes are joined."""
    return not launched() or os.environ.get("RANK", "0") == "0"


def launched() -> bool:
    """Whether torchrun started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def place(device: torch.device) -> torch.device:
    """The device of this process: where torchrun started it, each has a GPU of its own."""
    if device.type == "cuda" and device.index is None and launched():
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device


@contextmanager
def group(device: torch.device) -> Iterator[None]:
    """Join the processes that torchrun started, and leave them at the end; nothing without torchrun."""
    if not launched() or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield
        dist.barrier()  # who left early would take the connection from one that still writes
    finally:
        dist.destroy_process_group()


def average(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The mean of each over the processes, in one exchange."""
    if processes() == 1:
        return list(gradients)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat /= processes()
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]


def mean(statistic: Tensor) -> Tensor:
    """The mean over the processes of a tensor that needs no gradient."""
    return average([statistic.detach()])[0]


def total(part: Tensor) -> Tensor:
    """The sum over the processes, for losses: its gradient is such that `average` gives that of the whole batch."""
    summed: Tensor = part if processes() == 1 else _Total.apply(part)  # type: ignore[no-untyped-call]
    return summed


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, part: Tensor) -> Tensor:
        summed = part.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient * processes()  # each process knows only its part's share; the average divides by their number


# -- state -------------------------------------------------------------------------------------------------------------


def agree(tensors: Iterable[Tensor]) -> None:
    """Give every process the first one's values, in place."""
    if processes() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, 0)


def gather(state: Tensor, device: torch.device) -> list[Tensor]:
    """Every process's tensor of this kind (of one shape), the first's first; on the CPU."""
    if processes() == 1:
        return [state.cpu()]
    mine = state.to(device)
    found = [torch.empty_like(mine) for _ in range(processes())]
    dist.all_gather(found, mine)
    return [part.cpu() for part in found]


def anyone(flag: bool, device: torch.device) -> bool:
    """Whether any process says yes."""
    if processes() == 1:
        return flag
    asked = torch.tensor(float(flag), device=device)
    dist.all_reduce(asked)
    return bool(asked.item())
