"""Adam over one buffer by our own kernels against PyTorch in float64; without a GPU, Triton's interpreter runs them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from kernels import DEVICE, load
from qpt.algorithms import flat
from qpt.algorithms.flat import ALIGNED, FlatAdam

kernel = load("qpt.algorithms.flat_kernel")

SHAPES = [(3, 5), (2,), (), (70, 90), (1, 1, 7), (4,), (50, 41)]  # odd sizes, a scalar, one of several blocks
GROUPS = {1: [7], 3: [2, 2, 3]}
assert 2 * kernel.BLOCK < 70 * 90


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "kernel", kernel)
    monkeypatch.setattr(flat, "_fits", lambda _gradient: True)


def draw(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(shape, generator=generator)).to(DEVICE) for shape in SHAPES]


def make(weight_decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.99)) -> tuple[list[nn.Parameter], FlatAdam]:
    own = [nn.Parameter(x) for x in draw(0)]
    return own, FlatAdam(own, 0.01, weight_decay=weight_decay, betas=betas)


class Right:
    """PyTorch's own AdamW and clipping, one parameter at a time in float64."""

    def __init__(self, weight_decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        self.own = [nn.Parameter(x.double()) for x in draw(0)]
        lr = torch.tensor(0.01, device=DEVICE)
        self.optimizer = torch.optim.AdamW(
            self.own, lr=lr, weight_decay=weight_decay, betas=betas, capturable=DEVICE == "cuda"
        )

    def descend(self, gradients: list[Tensor], sizes: Sequence[int], clip: float | None) -> list[Tensor]:
        for parameter, gradient in zip(self.own, gradients, strict=True):
            parameter.grad = gradient.double()
        rest = iter(self.own)
        groups = [list(islice(rest, size)) for size in sizes]
        norms = [nn.utils.clip_grad_norm_(group, clip) for group in groups] if clip else []
        self.optimizer.step()
        return norms


def assert_close(got: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    for a, b in zip(got, right, strict=True):
        assert a.dtype is torch.float32
        assert a.shape == b.shape
        assert torch.allclose(a.double(), b.double(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [None, 0.5, 1000, 60.0])  # none, all, no and some groups are clipped
@pytest.mark.parametrize("groups", [1, 3])
def test_steps_equal_pytorchs(groups: int, clip: float | None, weight_decay: float) -> None:
    own, fast = make(weight_decay)
    right = Right(weight_decay)
    for step in range(4):
        for optimizer in (fast, right.optimizer):
            optimizer.param_groups[0]["lr"].fill_(0.01 * (step + 1))
        gradients = draw(100 + step)
        norms = right.descend(gradients, GROUPS[groups], clip)
        assert_close(fast.descend(gradients, GROUPS[groups], clip), norms)
        assert len(norms) == (groups if clip else 0)
        assert_close(own, right.own)
    for mine, theirs in zip(fast.state.values(), right.optimizer.state.values(), strict=True):
        assert mine["step"] == theirs["step"] == 4
        assert_close([mine["exp_avg"], mine["exp_avg_sq"]], [theirs["exp_avg"], theirs["exp_avg_sq"]])


@pytest.mark.parametrize("steps", [1, 2, 1000, 100_000])
def test_means_are_corrected_to_the_last_digits(steps: int) -> None:
    """Of 1 - 0.999 float32 holds few digits; PyTorch's kernel takes the betas as float32, and so do ours."""
    own, fast = make(0.0, betas=(0.9, 0.999))
    beta1, beta2 = torch.tensor([0.9, 0.999]).double().tolist()
    buffer, means, squares = fast._buffers
    buffer.zero_()
    means.copy_(torch.linspace(-1, 1, len(means)))
    squares.copy_(torch.linspace(0.1, 2, len(squares)))
    step = means.double() * beta1 / (1 - beta1**steps)
    right = -0.01 * step / ((squares.double() * beta2 / (1 - beta2**steps)).sqrt() + 1e-8)
    fast._count.fill_(steps - 1)
    fast.descend([torch.zeros_like(p) for p in own], [7], None)
    assert torch.allclose(buffer.double(), right, rtol=1e-6, atol=0)


def test_pytorchs_fused_kernel_agrees_where_nothing_is_clipped() -> None:
    own, fast = make()
    plain = [nn.Parameter(x) for x in draw(0)]
    slow = torch.optim.AdamW(
        plain, lr=torch.tensor(0.01, device=DEVICE), weight_decay=0.1, betas=(0.9, 0.99), fused=True
    )
    for step in range(3):
        gradients = draw(step)
        for parameter, gradient in zip(plain, gradients, strict=True):
            parameter.grad = gradient
        slow.step()
        fast.descend(gradients, [7], None)
        assert_close(own, plain)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_group(bad: float) -> None:
    own, fast = make()
    gradients = draw(1)
    norms = Right().descend(gradients, GROUPS[3], 0.5)
    gradients[3][69, 89] = bad
    got = fast.descend(gradients, GROUPS[3], 0.5)
    assert torch.equal(torch.stack(got).isfinite(), torch.tensor([True, False, True], device=DEVICE))
    assert_close([got[0], got[2]], [norms[0], norms[2]])
    if bad != bad:
        assert got[1].isnan()
        assert all(p.isnan().all() for p in own[2:4])  # as a factor of NaN makes of it
    assert all(p.isfinite().all() for p in [*own[:2], *own[4:]])


def test_what_lies_between_parameters_stays_zero() -> None:
    own, fast = make()
    for step in range(3):
        fast.descend(draw(step), GROUPS[3], 0.5)
    for buffer in fast._buffers:
        used = torch.zeros_like(buffer, dtype=torch.bool)
        for view in flat.views(used, own):
            view.fill_(True)
        assert 0 < (~used).sum() < ALIGNED * len(SHAPES)
        assert not buffer[~used].any()


def test_every_number_lies_in_one_block_of_its_group() -> None:
    bounds = (0, 4, 4, 4 + 2 * kernel.BLOCK, 5000)
    rows = kernel.table(bounds, torch.device("cpu")).tolist()
    assert [n for start, end, *_ in rows for n in range(start, end)] == list(range(5000))
    for row, (start, end, first, last, group) in enumerate(rows):
        assert bounds[group] <= start <= end <= bounds[group + 1]
        assert end - start <= kernel.BLOCK
        assert first <= row < last
        assert {r[4] for r in rows[first:last]} == {group}


def test_groups_of_many_blocks_and_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BLOCK", 16)
    own, fast = make()
    right = Right()
    gradients = draw(1)
    got, norms = (x.descend(gradients, [4, 0, 3], 0.5) for x in (fast, right))
    assert_close(got, norms)
    assert_close(own, right.own)


def test_a_state_goes_on_where_it_was() -> None:
    own, fast = make()
    fast.descend(draw(1), GROUPS[3], 0.5)
    other, fresh = make()
    fresh.load_state_dict(copy.deepcopy(fast.state_dict()))
    for mine, theirs in zip(other, own, strict=True):
        mine.data.copy_(theirs)
    for optimizer in (fast, fresh):
        optimizer.descend(draw(2), GROUPS[3], 0.5)
    assert all(map(torch.equal, own, other))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_a_captured_step_is_the_plain_one() -> None:
    own, fast = make()
    other, plain = make()
    gradients = draw(1)
    for optimizer in (fast, plain):
        optimizer.descend(gradients, GROUPS[3], 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norms = fast.descend(gradients, GROUPS[3], 0.5)
    for step in range(3):
        for gradient, new in zip(gradients, draw(2 + step), strict=True):
            gradient.copy_(new)
        graph.replay()
        assert all(map(torch.equal, norms, plain.descend(gradients, GROUPS[3], 0.5)))
        assert all(map(torch.equal, own, other))
