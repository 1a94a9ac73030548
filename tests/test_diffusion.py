"""Schedules and steps of diffusion against the textbook, and what the networks must not mix up."""

from __future__ import annotations

import math

import pytest
import torch

from qpt.nets.diffusion import ActionDenoiser, Diffusion, TemporalUNet, cosine_betas, vp_betas


def test_vp_schedule_is_the_published_formula():
    expected = [1 - math.exp(-0.1 / 5 - 0.5 * (10 - 0.1) * (2 * t - 1) / 25) for t in range(1, 6)]
    assert vp_betas(5).tolist() == pytest.approx(expected, rel=1e-12)


def test_cosine_schedule_keeps_what_the_cosine_says():
    betas = cosine_betas(20)
    kept = 1.0
    for t, beta in enumerate(betas.tolist()[:-1], start=1):  # the last one is capped
        kept *= 1 - beta
        expected = math.cos((t / 20 + 0.008) / 1.008 * math.pi / 2) ** 2 / math.cos(0.008 / 1.008 * math.pi / 2) ** 2
        assert kept == pytest.approx(expected, rel=1e-9)
    assert betas[-1] == pytest.approx(0.999)


def test_corruption_in_one_go_has_the_moments_of_step_by_step_noise():
    diffusion, betas = Diffusion(vp_betas(5)), vp_betas(5)
    clean, step = torch.full((5, 1), 0.7), torch.arange(5)
    for t in range(5):
        mean, variance = 0.7, 0.0
        for beta in betas[: t + 1].tolist():
            mean, variance = math.sqrt(1 - beta) * mean, (1 - beta) * variance + beta
        still = diffusion.corrupt(clean, step, torch.zeros(5, 1))[t]
        moved = diffusion.corrupt(clean, step, torch.ones(5, 1))[t]
        assert still.item() == pytest.approx(mean, rel=1e-5)
        assert (moved - still).item() == pytest.approx(math.sqrt(variance), rel=1e-5)


@pytest.mark.parametrize("step", range(5))
def test_denoising_is_the_ddpm_step(step):
    diffusion = Diffusion(vp_betas(5)).double()
    betas = vp_betas(5)
    kept = torch.cumprod(1 - betas, 0)
    generator = torch.Generator().manual_seed(0)
    noisy, predicted, noise = (torch.randn(3, 2, generator=generator, dtype=torch.float64) for _ in range(3))
    mean = (noisy - betas[step] / (1 - kept[step]).sqrt() * predicted) / (1 - betas[step]).sqrt()
    expected = mean + (betas[step].sqrt() * noise if step else 0)
    clean = diffusion.clean(noisy, step, predicted)
    torch.testing.assert_close(diffusion.denoise(noisy, step, clean, noise), expected, rtol=1e-5, atol=1e-6)


def test_posterior_noise_is_smaller():
    diffusion = Diffusion(cosine_betas(20))
    zero, one = torch.zeros(1), torch.ones(1)
    betas, kept = cosine_betas(20), torch.cumprod(1 - cosine_betas(20), 0)
    moved = diffusion.denoise(zero, 7, zero, one, posterior=True)
    assert moved.item() == pytest.approx(math.sqrt(betas[7] * (1 - kept[6]) / (1 - kept[7])), rel=1e-5)
    assert moved < diffusion.denoise(zero, 7, zero, one)
    assert diffusion.denoise(100 * one, 0, 3 * one, one).item() == pytest.approx(3.0, rel=1e-5)  # the last step: x_0


def test_a_perfect_predictor_leads_back_to_the_clean_value():
    """With the true noise at every step, denoising ends at x_0 whatever noise is added on the way."""
    diffusion = Diffusion(vp_betas(5)).double()
    clean = torch.tensor([[0.3, -0.8]], dtype=torch.float64)
    x = torch.randn(1, 2, dtype=torch.float64)
    for step in reversed(range(5)):
        truth = (x - diffusion.signal[step] * clean) / diffusion.noise[step]
        x = diffusion.denoise(x, step, diffusion.clean(x, step, truth), torch.randn_like(x))
    torch.testing.assert_close(x, clean, rtol=0, atol=1e-6)


def test_action_denoiser_sees_state_action_and_step():
    torch.manual_seed(0)
    net = ActionDenoiser(3, 2, width=32, blocks=2).eval()
    noisy, seen, step = torch.randn(4, 2), torch.randn(4, 3), torch.tensor([0, 1, 2, 3])
    out = net(noisy, seen, step)
    assert out.shape == (4, 2)
    for changed in (net(noisy + 1, seen, step), net(noisy, seen + 1, step), net(noisy, seen, step.flip(0))):
        assert (out - changed).abs().max() > 1e-4
    torch.testing.assert_close(net(noisy[1:2], seen[1:2], step[1:2]), out[1:2])


def test_unet_ignores_a_dropped_condition_and_only_that():
    torch.manual_seed(0)
    net = TemporalUNet(3, 2, width=16)
    x, step = torch.randn(4, 8, 3), torch.tensor([0, 5, 5, 19])
    keep = torch.tensor([1.0, 0.0, 1.0, 0.0])
    here, there = net(x, step, torch.zeros(4, 2), keep), net(x, step, torch.ones(4, 2), keep)
    assert here.shape == x.shape
    same = (here - there).abs().amax((1, 2)) < 1e-6
    assert same.tolist() == [False, True, False, True]


def test_unet_joins_all_times_and_every_parameter_learns():
    torch.manual_seed(0)
    net = TemporalUNet(3, 2, width=16, multipliers=(1, 2, 4))
    assert net.shrink == 4
    x = torch.randn(2, 8, 3, requires_grad=True)
    out = net(x, torch.tensor([1, 2]), torch.randn(2, 2), torch.ones(2))
    reach = torch.autograd.grad(out[0, 0].sum(), x, retain_graph=True)[0]
    assert reach[0, -1].abs().max() > 0  # the first state hears of the last
    assert reach[1].abs().max() == 0  # but not of another sequence
    gradients = torch.autograd.grad(out.square().sum(), list(net.parameters()))
    assert all(g.abs().max() > 0 for g in gradients)
