"""Denoising diffusion: noise schedules, the forward and the reverse step, and the two networks that learn it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import mish


def vp_betas(steps: int, smallest: float = 0.1, largest: float = 10.0) -> Tensor:
    """The variance-preserving schedule: β_t = 1 - exp(-b/T - (B - b)(2t - 1) / 2T²), t = 1…T."""
    t = torch.arange(1, steps + 1, dtype=torch.float64)
    return 1 - torch.exp(-smallest / steps - 0.5 * (largest - smallest) * (2 * t - 1) / steps**2)


def cosine_betas(steps: int, offset: float = 0.008) -> Tensor:
    """The cosine schedule: ᾱ(u) = cos²((u + s)/(1 + s) π/2), β_t = 1 - ᾱ(t/T)/ᾱ((t-1)/T), at most 0.999."""
    u = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    kept = torch.cos((u + offset) / (1 + offset) * math.pi / 2).square()
    return (1 - kept[1:] / kept[:-1]).clamp(max=0.999)


class Diffusion(nn.Module):
    """The Markov chain of a schedule; steps are counted 0…T-1, from almost clean to almost pure noise."""

    signal: Tensor
    noise: Tensor
    to_clean: Tensor
    to_noisy: Tensor
    deviation: Tensor
    posterior_deviation: Tensor

    def __init__(self, betas: Tensor) -> None:
        super().__init__()
        self.steps = len(betas)
        kept = torch.cumprod(1 - betas, 0)  # ᾱ_t
        before = torch.cat([torch.ones(1, dtype=betas.dtype), kept[:-1]])  # ᾱ_{t-1}
        constants = {
            "signal": kept.sqrt(),
            "noise": (1 - kept).sqrt(),
            "to_clean": before.sqrt() * betas / (1 - kept),  # weights of x_0 and of x_t in the mean of x_{t-1}
            "to_noisy": (1 - betas).sqrt() * (1 - before) / (1 - kept),
            "deviation": betas.sqrt(),
            "posterior_deviation": (betas * (1 - before) / (1 - kept)).sqrt(),
        }
        for name, values in constants.items():
            self.register_buffer(name, values.float(), persistent=False)

    def corrupt(self, clean: Tensor, step: Tensor, noise: Tensor) -> Tensor:
        """x_t = √ᾱ_t x_0 + √(1 - ᾱ_t) ε for rows with a step of their own: clean [B, ...], step [B]."""
        shape = (-1, *[1] * (clean.dim() - 1))
        return self.signal[step].view(shape) * clean + self.noise[step].view(shape) * noise

    def clean(self, noisy: Tensor, step: int, predicted: Tensor) -> Tensor:
        """The estimate of x_0 that goes with predicted noise."""
        return (noisy - self.noise[step] * predicted) / self.signal[step]

    def denoise(self, noisy: Tensor, step: int, clean: Tensor, noise: Tensor, *, posterior: bool = False) -> Tensor:
        """x_{t-1} from x_t and an estimate of x_0; the last step (0) adds no noise.

        The noise has variance β_t, or with `posterior` that of q(x_{t-1} | x_t, x_0), which is smaller.
        """
        mean = self.to_clean[step] * clean + self.to_noisy[step] * noisy
        if step == 0:
            return mean
        return mean + (self.posterior_deviation if posterior else self.deviation)[step] * noise


# -- FISOR's: noise of an action, given a state ------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    """Pre-activation residual block: dropout, norm, a layer four times as wide."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout, self.norm = nn.Dropout(dropout), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(mish(self.wide(self.norm(self.dropout(x)))))  # type: ignore[no-any-return]


class ActionDenoiser(nn.Module):
    """Predicts the noise in an action from the noisy action, the state and the step, by a residual perceptron."""

    def __init__(
        self, observation_dim: int, action_dim: int, *, width: int = 256, blocks: int = 3, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.randn(32) * 0.2)  # learned Fourier features of the step
        self.embed = nn.Sequential(nn.Linear(64, 128), nn.Mish(), nn.Linear(128, 128))
        self.first = nn.Linear(action_dim + observation_dim + 128, width)
        self.blocks = nn.Sequential(*(ResidualBlock(width, dropout) for _ in range(blocks)))
        self.last = nn.Linear(width, action_dim)

    def forward(self, noisy: Tensor, observations: Tensor, step: Tensor) -> Tensor:
        """noisy [B, A], observations [B, S], step [B] -> [B, A]."""
        angle = 2 * math.pi * step[:, None].to(noisy.dtype) * self.frequencies  # [B, 32]
        when = self.embed(torch.cat([angle.cos(), angle.sin()], -1))
        x = self.blocks(self.first(torch.cat([noisy, observations, when], -1)))
        return self.last(mish(x))  # type: ignore[no-any-return]


# -- OASIS': noise of a sequence of states, given what its episode earns and costs -------------------------------------


class ConvBlock(nn.Sequential):
    """Convolution over time, group norm, Mish."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 5) -> None:
        super().__init__(
            nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2), nn.GroupNorm(min(8, outputs), outputs), nn.Mish()
        )


class TemporalBlock(nn.Module):
    """Two convolutions over time; the embedding of step and condition is added between them."""

    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.first, self.second = ConvBlock(inputs, outputs), ConvBlock(outputs, outputs)
        self.embed = nn.Sequential(nn.Mish(), nn.Linear(embedding, outputs))
        self.skip = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        hidden = self.first(x) + self.embed(embedding)[..., None]
        return self.second(hidden) + self.skip(x)  # type: ignore[no-any-return]


class TemporalPair(nn.Module):
    """Two blocks in a row: one level of the U-Net."""

    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.first, self.second = (
            TemporalBlock(inputs, outputs, embedding),
            TemporalBlock(outputs, outputs, embedding),
        )

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return self.second(self.first(x, embedding), embedding)  # type: ignore[no-any-return]


class TemporalUNet(nn.Module):
    """Predicts the noise in a sequence [B, H, S] of states from the step and a condition that can be left out.

    H must be divisible by `shrink`. Trained with conditions dropped at random, one network serves with and without
    condition, so that the difference can guide generation.
    """

    def __init__(
        self, state_dim: int, condition_dim: int, *, width: int = 128, multipliers: Sequence[int] = (1, 2)
    ) -> None:
        super().__init__()
        if width % 8:
            raise ValueError("the width of a temporal U-Net is a multiple of 8")
        self.width = width
        self.embed_step = nn.Sequential(nn.Linear(width, 4 * width), nn.Mish(), nn.Linear(4 * width, width))
        self.embed_condition = nn.Sequential(
            nn.Linear(condition_dim, width),
            nn.Mish(),
            nn.Linear(width, 4 * width),
            nn.Mish(),
            nn.Linear(4 * width, width),
        )
        sizes, both = [state_dim, *(width * m for m in multipliers)], 2 * width
        levels = list(pairwise(sizes))
        self.shrink = 2 ** (len(levels) - 1)
        self.downs = nn.ModuleList(TemporalPair(i, o, both) for i, o in levels)
        self.down_samples = nn.ModuleList(nn.Conv1d(o, o, 3, stride=2, padding=1) for _, o in levels[:-1])
        self.middle = TemporalPair(sizes[-1], sizes[-1], both)
        # The way up meets what was passed at each level but the first, whose resolution the last up-sampling restores.
        self.ups = nn.ModuleList(TemporalPair(2 * o, i, both) for i, o in reversed(levels[1:]))
        self.up_samples = nn.ModuleList(
            nn.ConvTranspose1d(i, i, 4, stride=2, padding=1) for i, _ in reversed(levels[1:])
        )
        self.last = nn.Sequential(ConvBlock(sizes[1], width), nn.Conv1d(width, state_dim, 1))

    def forward(self, noisy: Tensor, step: Tensor, condition: Tensor, keep: Tensor) -> Tensor:
        """noisy [B, H, S], step [B], condition [B, C], keep [B] (0: condition not seen) -> [B, H, S]."""
        embedding = torch.cat([self._embed(step, noisy.dtype), self.embed_condition(condition) * keep[:, None]], -1)
        x, passed = noisy.transpose(1, 2), []
        for level, down in enumerate(self.downs):
            x = down(x, embedding)
            passed.append(x)
            if level < len(self.down_samples):
                x = self.down_samples[level](x)
        x = self.middle(x, embedding)
        for up, up_sample in zip(self.ups, self.up_samples, strict=True):
            x = up_sample(up(torch.cat([x, passed.pop()], 1), embedding))
        return self.last(x).transpose(1, 2)  # type: ignore[no-any-return]

    def _embed(self, step: Tensor, dtype: torch.dtype) -> Tensor:
        """Sines and cosines of the step at geometric frequencies, through a perceptron: [B] -> [B, width]."""
        half = self.width // 2
        rate = torch.exp(torch.arange(half, device=step.device, dtype=dtype) * (-math.log(10_000) / (half - 1)))
        angle = step[:, None].to(dtype) * rate
        return self.embed_step(torch.cat([angle.sin(), angle.cos()], -1))  # type: ignore[no-any-return]
