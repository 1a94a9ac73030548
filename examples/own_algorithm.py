"""A method of your own, in one file: trained, evaluated, certified and reported like the built-in ones.

    python examples/own_algorithm.py                        # trains it and BC-Safe on a toy road and compares them
    python examples/own_algorithm.py train --algorithm rvs --task BallCircle --data embedded:ballcircle --out runs/rvs
    python examples/own_algorithm.py evaluate --checkpoint runs/rvs --limits 10 20 40

With arguments it is the `qpt` command, which knows one method more. docs/your-own-algorithm.md explains each part.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from qpt.algorithms.base import Decision, adam, descend, register_algorithm
from qpt.data.sampling import WindowSampler
from qpt.nets.heads import Standardize, perceptron


@dataclass(frozen=True)
class RvSConfig:
    """Every field is a flag of `train`, and the sentence below it is the flag's help."""

    steps: int = 20_000
    """Gradient steps."""
    batch_size: int = 256
    """Steps of the log in a batch."""
    width: int = 256
    """Width of the two hidden layers."""
    lr: float = 1e-3
    """Learning rate."""


class RvS(nn.Module):
    """Supervised learning of actions, told what is still to be earned and what may still be spent."""

    limit_mode = "live"  # a limit can be given and changed when it acts; also: "trained", "ignored"
    context = 1  # it looks at the current step alone
    compilable = ("loss",)  # what torch.compile may replace on a GPU

    def __init__(self, config, spec):
        super().__init__()
        self.config, self.spec = config, spec  # spec: sizes, scales and frontier of the data
        self.standardize = Standardize(spec.observation_mean, spec.observation_std)
        self.net = perceptron([spec.observation_dim + 3, config.width, config.width, spec.action_dim])
        self.make_optimizers()

    def make_optimizers(self):
        self.optimizers = {"net": adam(self.net.parameters(), self.config.lr)}

    def make_sampler(self, data, device, seed):
        return WindowSampler(data, self.config.batch_size, self.context, device=device, seed=seed)

    def forward(self, observations, return_to_go, cost_to_go, steps):
        spec, left = self.spec, (self.spec.horizon - steps).clamp(min=1)
        earn = return_to_go / left / (abs(spec.return_max) / spec.horizon + 1e-6)  # a step, in shares of the best
        spend = cost_to_go.clamp(min=0) / left / (spec.cost_max / spec.horizon + 1e-6)
        told = torch.stack([earn, spend, left / spec.horizon], -1)
        return torch.tanh(self.net(torch.cat([self.standardize(observations), told], -1)))

    def loss(self, batch):
        guess = self(batch.observations, batch.return_to_go, batch.cost_to_go, batch.steps)  # [B, 1, A]
        return nn.functional.mse_loss(guess, batch.actions)

    def update(self, batch):
        loss = self.loss(batch)
        descend(self.optimizers["net"], loss, [list(self.net.parameters())])
        return {"loss": loss.detach()}

    def act(self, context):
        now = map(context.now, (context.observations, context.return_to_go, context.cost_to_go, context.steps))
        return Decision(self(*now), {})


register_algorithm("rvs", RvS, RvSConfig)


def main(out="runs/own-algorithm", steps=1500, episodes=20):
    """Beside BC-Safe on a toy road, in the same table and on the same page."""
    from compare_methods import main as compare  # the example beside this one

    limits = ["--limits", "10", "20", "30", "--steps", str(steps), "--episodes", str(episodes), "--seeds", "0"]
    return compare(["--algorithms", "rvs", "bc-safe", *limits, "--workers", "0", "--out", str(Path(out))])


if __name__ == "__main__":
    import own_algorithm  # noqa: F401 (once more, under a name by which worker processes find it)

    if len(sys.argv) > 1:
        from qpt.cli import main as qpt_command

        sys.exit(qpt_command())
    main()
