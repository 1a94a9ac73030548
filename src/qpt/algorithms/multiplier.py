"""A Lagrange multiplier steered by a PID controller."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qpt import parallel


class PIDMultiplier(nn.Module):
    """λ = relu(kp relu(e) + ki I + kd D) with e = value - limit, I = relu(I + e) and D = relu(e - previous e).

    The state is in buffers, so that checkpoints resume it and a captured step updates it in place.
    """

    value: Tensor
    integral: Tensor
    previous: Tensor

    def __init__(self, kp: float, ki: float, kd: float) -> None:
        super().__init__()
        self.gains = kp, ki, kd
        for name in ("value", "integral", "previous"):
            self.register_buffer(name, torch.zeros(()))

    @torch.no_grad()
    def update(self, error: Tensor) -> Tensor:
        """The multiplier after an error (a scalar), without gradient."""
        kp, ki, kd = self.gains
        error = parallel.mean(error)
        self.integral.copy_((self.integral + error).relu())
        rise = (error - self.previous).relu()
        self.value.copy_((kp * error.relu() + ki * self.integral + kd * rise).relu())
        self.previous.copy_(error)
        return self.value.clone()
