"""Actors and action models of the methods that decide from a single state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

_EDGE = 1e-3  # logged actions at the bound have no finite inverse tanh; they are read as this far inside


def perceptron(sizes: Sequence[int], activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of the given sizes, from input to output, with the activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


class Standardize(nn.Module):
    """(x - mean) / std with the data's statistics, which travel with the weights; `enabled=False` leaves x as it is."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], enabled: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean) if enabled else torch.zeros(len(mean)))
        self.register_buffer("std", torch.tensor(std) if enabled else torch.ones(len(std)))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class SquashedGaussian(nn.Module):
    """tanh of a Gaussian whose mean and spread depend on the state."""

    def __init__(self, observation_dim: int, action_dim: int, width: int, log_std: tuple[float, float]) -> None:
        super().__init__()
        self.net = perceptron([observation_dim, width, width, 2 * action_dim])
        self.low, self.high = log_std

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log of the standard deviation, both before the tanh: [..., A] each."""
        mean, log_std = self.net(observations).chunk(2, -1)
        return mean, log_std.clamp(self.low, self.high)

    def mode(self, observations: Tensor) -> Tensor:
        return torch.tanh(self(observations)[0])

    def sample(self, observations: Tensor, noise: Tensor) -> Tensor:
        """Actions from standard normal noise, through which gradients flow; observations may broadcast to the noise."""
        mean, log_std = self(observations)
        return torch.tanh(mean + log_std.exp() * noise)

    def log_prob(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Log density of squashed actions, summed over their dimensions: [...]."""
        mean, log_std = self(observations)
        inside = actions.clamp(-1 + _EDGE, 1 - _EDGE)
        density = gaussian_log_prob(torch.atanh(inside), mean, log_std)
        return (density - torch.log1p(-inside.square())).sum(-1)


def gaussian_log_prob(values: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Element by element, without a sum over dimensions."""
    return -0.5 * ((values - mean) * torch.exp(-log_std)).square() - log_std - 0.5 * math.log(2 * math.pi)


class VAE(nn.Module):
    """Conditional variational auto-encoder of actions: what would the data do here?"""

    def __init__(self, observation_dim: int, action_dim: int, width: int, latent: int | None = None) -> None:
        super().__init__()
        self.latent = latent or 2 * action_dim
        self.encoder = perceptron([observation_dim + action_dim, width, width, 2 * self.latent])
        self.decoder = perceptron([observation_dim + self.latent, width, width, action_dim])

    def encode(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log of the standard deviation of the latent: [..., L] each."""
        mean, log_std = self.encoder(torch.cat([observations, actions], -1)).chunk(2, -1)
        return mean, log_std.clamp(-4, 15)

    def decode(self, observations: Tensor, latent: Tensor) -> Tensor:
        return torch.tanh(self.decoder(torch.cat([observations, latent], -1)))

    def sample(self, observations: Tensor, noise: Tensor) -> Tensor:
        """Actions like the data's from standard normal noise, cut to its likely middle as in BCQ."""
        return self.decode(observations, noise.clamp(-0.5, 0.5))

    def divergence(self, observations: Tensor, actions: Tensor) -> Tensor:
        """KL of the posterior from the prior, a mean over the latent; large for actions unlike the data's: [...]."""
        return _divergence(*self.encode(observations, actions))

    def loss(self, observations: Tensor, actions: Tensor, noise: Tensor, beta: float) -> Tensor:
        """Reconstruction error + β KL, both averaged over the batch and their dimensions; noise [B, L]."""
        mean, log_std = self.encode(observations, actions)
        rebuilt = self.decode(observations, mean + log_std.exp() * noise)
        return nn.functional.mse_loss(rebuilt, actions) + beta * _divergence(mean, log_std).mean()


def _divergence(mean: Tensor, log_std: Tensor) -> Tensor:
    return 0.5 * (mean.square() + (2 * log_std).exp() - 1 - 2 * log_std).mean(-1)


class Perturbation(nn.Module):
    """Moves a proposed action by at most `reach` in each dimension."""

    def __init__(self, observation_dim: int, action_dim: int, width: int, reach: float) -> None:
        super().__init__()
        self.net = perceptron([observation_dim + action_dim, width, width, action_dim], nn.Tanh)
        self.reach = reach

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        shift = torch.tanh(self.net(torch.cat([observations, actions], -1)))
        return (actions + self.reach * shift).clamp(-1, 1)
