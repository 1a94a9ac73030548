"""n-step targets inside a window."""

from __future__ import annotations

import torch
from torch import Tensor


def n_step_targets(
    signal: Tensor, bootstrap: Tensor, mask: Tensor, ended: Tensor, discount: float, n: int
) -> tuple[Tensor, Tensor]:
    """Targets y and their validity for every position of right-padded windows.

    y_p = Σ_{p <= j < q} γ^{j-p} signal_j + γ^{q-p} bootstrap_q, with q = p + n, cut at the window's last valid step
    (its own signal is then not used, as nothing follows it to bootstrap from). Where the last valid step ended the
    episode (`ended`), the sum runs through it and nothing is bootstrapped: terminal rewards and costs are learned.

    signal, bootstrap (value of each step), ended [B, K], mask [B, K] bool -> y [B, K], valid [B, K] bool.
    """
    context = signal.shape[1]
    position = torch.arange(context, device=signal.device)
    length = mask.sum(1, keepdim=True)  # [B, 1]
    ends = (ended.bool() & mask).any(1, keepdim=True)  # only the last valid step can end an episode
    stop = torch.minimum(position + n, length - 1 + ends.long())  # [B, K]: first step that is not summed
    gap = position[None, :] - position[:, None]  # [K, K]: j - p
    power = discount ** gap.clamp(min=0).to(signal.dtype)
    weight = power * ((gap >= 0) & (position < stop[:, :, None]))  # [B, K, K]
    summed = (weight * signal[:, None, :]).sum(-1)
    place = stop.clamp(0, context - 1)
    later = torch.where(
        stop < length, discount ** (stop - position).clamp(min=0).to(signal.dtype) * bootstrap.gather(1, place), 0.0
    )
    return summed + later, mask & (stop > position)


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """|τ - 1(u < 0)| u²: the minimiser over v of E[loss(q - v)] is the τ-expectile of q."""
    return torch.where(difference < 0, 1 - expectile, expectile) * difference.square()
