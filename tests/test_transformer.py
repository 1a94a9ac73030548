"""The transformer's shortcuts (pruned last block, shared history) against the plain computation, in float64."""

from __future__ import annotations

import pytest
import torch

from qpt.nets.mlp import StackedMLP, run_together
from qpt.nets.transformer import ACTION, STATE, TrajectoryTransformer


def make(**changes: float) -> TrajectoryTransformer:
    torch.manual_seed(0)
    settings = {
        "context": 6,
        "horizon": 20,
        "width": 16,
        "layers": 3,
        "heads": 2,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "return_scale": 0.1,
        "cost_scale": 0.2,
        "cost_offset": 5.0,
    }
    net = TrajectoryTransformer(torch.randn(3), torch.rand(3) + 0.5, 2, **(settings | changes))  # type: ignore[arg-type]
    for parameter in net.parameters():  # far from the tiny initial weights, so that differences show
        torch.nn.init.normal_(parameter, std=0.3)
    return net.double().eval()


def window(batch: int = 5, context: int = 6) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    return (
        torch.randn(batch, context, generator=g).double(),
        torch.randn(batch, context, generator=g).double(),
        torch.randn(batch, context, 3, generator=g).double(),
        torch.randn(batch, context, 2, generator=g).double(),
        torch.arange(context).expand(batch, -1) + 3,
    )


def slow_forward(net: TrajectoryTransformer, tokens: torch.Tensor) -> torch.Tensor:
    """All blocks on all tokens, attention written out with an explicit mask."""
    x = net.norm_in(tokens.flatten(1, 2))
    length = x.shape[1]
    for block in net.blocks:
        h = block.norm1(x)
        q, k, v = block.qkv(h).chunk(3, -1)
        heads = []
        size = q.shape[-1] // block.heads
        for i in range(block.heads):
            part = slice(i * size, (i + 1) * size)
            scores = q[..., part] @ k[..., part].transpose(1, 2) / size**0.5
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
            heads.append(scores.softmax(-1) @ v[..., part])
        x = x + block.project(torch.cat(heads, -1))
        x = x + block.mlp(block.norm2(x))
    return net.norm_out(x).unflatten(1, (-1, 4))


def test_pruned_last_block_equals_all_tokens() -> None:
    net, inputs = make(), window()
    returns, costs, observations, actions, steps = inputs
    kinds = [
        net.embed_return((returns * net.return_scale)[..., None]),
        net.embed_cost((net.cost_offset - costs * net.cost_scale)[..., None]),
        net.embed_observation((observations - net.mean) / net.std),
        net.embed_action(actions),
    ]
    full = slow_forward(net, torch.stack(kinds, -2) + net.embed_step(steps)[..., None, :])
    torch.testing.assert_close(net(*inputs)[:, :, 0], full[:, :, STATE], rtol=0, atol=1e-10)
    both = net(*inputs, kinds=(STATE, ACTION))
    torch.testing.assert_close(both, full[:, :, [STATE, ACTION]], rtol=0, atol=1e-10)


def test_critics_in_bf16_end_in_float32() -> None:
    critics, x = StackedMLP(2, [5, 8, 8, 1]), torch.randn(40, 5)
    with torch.autocast("cpu", torch.bfloat16):
        values = critics(x)
    assert values.dtype is torch.float32
    torch.testing.assert_close(values, critics(x), rtol=0.02, atol=0.02)
    assert not torch.equal(values, critics(x))


def test_the_future_and_the_padding_do_not_matter() -> None:
    net, inputs = make(), window()
    changed = [x.clone() for x in inputs]
    for x in changed[:4]:
        x[:, 4:] = 99.0
    changed[3][:, 3] = 99.0  # the action of step 3 comes after its state
    before, after = net(*inputs), net(*changed)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=0)
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_state_normalisation_lives_inside() -> None:
    net, inputs = make(), list(window())
    expected = net(*inputs)
    shifted = make()
    shifted.load_state_dict(net.state_dict() | {"mean": net.mean + 2.0, "std": net.std * 3.0})
    inputs[2] = (inputs[2] - net.mean) / net.std * shifted.std + shifted.mean
    torch.testing.assert_close(shifted(*inputs), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("count", [1, 7])
def test_candidates_with_a_shared_history_equal_separate_windows(count: int) -> None:
    net = make()
    returns, costs, observations, actions, steps = window(batch=6)
    last = torch.tensor([0, 1, 2, 3, 4, 5])
    g = torch.Generator().manual_seed(2)
    return_candidates, cost_candidates = torch.randn(2, 6, count, generator=g).double()
    fast = net.candidates(returns, costs, observations, actions, steps, last, return_candidates, cost_candidates)
    for row in range(6):
        for j in range(count):
            r, c = returns[row].clone(), costs[row].clone()
            r[last[row]], c[last[row]] = return_candidates[row, j], cost_candidates[row, j]
            n = int(last[row]) + 1
            alone = net(
                r[None, :n], c[None, :n], observations[row][None, :n], actions[row][None, :n], steps[row][None, :n]
            )
            torch.testing.assert_close(fast[row, j], alone[0, -1, 0], rtol=0, atol=1e-10)


def test_stacked_networks_equal_separate_ones() -> None:
    torch.manual_seed(0)
    stack = StackedMLP(3, [4, 8, 8, 2]).double()
    x = torch.randn(5, 6, 4).double()
    own = torch.randn(3, 5, 6, 4).double()
    for member in range(3):
        y, z = x, own[member]
        for i, (weight, bias) in enumerate(zip(stack.weights, stack.biases, strict=True)):
            y, z = (t @ weight[member] + bias[member] for t in (y, z))
            if i < 2:
                y, z = (t * torch.tanh(torch.log1p(torch.exp(t))) for t in (y, z))
        torch.testing.assert_close(stack(x)[member], y, rtol=0, atol=1e-12)
        torch.testing.assert_close(stack.each(own)[member], z, rtol=0, atol=1e-12)


def test_stacks_run_together_as_they_run_alone() -> None:
    one, other = StackedMLP(2, [4, 8, 1]).double(), StackedMLP(3, [4, 8, 1]).double()
    x, y = torch.randn(5, 6, 4, dtype=torch.float64, requires_grad=True), torch.randn(5, 6, 4, dtype=torch.float64)
    for inputs in ((x, y), (x, x)):
        together = run_together([one, other], inputs)
        alone = torch.cat([one(inputs[0]), other(inputs[1])])
        torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
        learned = [x, *one.parameters(), *other.parameters()]
        weight = torch.randn_like(alone)
        for a, b in zip(*(torch.autograd.grad((v * weight).sum(), learned) for v in (together, alone)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    frozen = run_together([one, other], (x, y), frozen=True)
    assert torch.autograd.grad(frozen.sum(), [*one.parameters()], allow_unused=True) == (None,) * 4


def test_stacks_compile_to_one_graph() -> None:
    one, other, x = StackedMLP(2, [4, 8, 1]), StackedMLP(3, [4, 8, 1]), torch.randn(6, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        return run_together([one, other], (x, x)) + run_together([one, other], (x, x), frozen=True)

    torch.testing.assert_close(torch.compile(step, backend="eager", fullgraph=True)(x), step(x))


def test_reading_one_step_equals_reading_all() -> None:
    net, batch = make(), window()
    last = torch.tensor([0, 5, 2, 3, 5])
    everywhere, once = net(*batch), net(*batch, last=last)
    assert once.shape == (5, 1, 1, 16)
    torch.testing.assert_close(once[:, 0, 0], everywhere[torch.arange(5), last, 0], atol=1e-12, rtol=1e-12)
