"""What every method has in common: the facts of its data, the context it decides from, the protocol of the loop."""

from __future__ import annotations

import copy
import importlib
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from types import MethodType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from qpt import parallel
from qpt.algorithms.flat import FlatAdam, joined
from qpt.data.augment import augment
from qpt.data.sampling import Sampler, WindowSampler
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.tasks import Augmentation, Task, get_task

CONSTANT = 1e-4  # a column of observations that varies less is left as it is
LimitMode = Literal["live", "trained", "ignored"]


@dataclass(frozen=True)
class Spec:
    """What a method must know of its data; stored with every checkpoint, so that a policy needs no data set."""

    observation_dim: int
    action_dim: int
    horizon: int
    observation_mean: tuple[float, ...]
    observation_std: tuple[float, ...]
    frontier_costs: tuple[float, ...]  # the Pareto episodes by rising cost, and their returns
    frontier_returns: tuple[float, ...]
    return_min: float
    return_max: float
    cost_max: float
    mean_return_to_go: float  # mean magnitude over all steps: the scale of the reward critics
    mean_cost_to_go: float
    augmentation: Augmentation = field(default_factory=Augmentation)
    task: str | None = None
    surrogate: bool = False
    cost_unit: float = 1.0  # the largest cost of a step, at most 1: what counts as little depends on it
    published: tuple[Sequence[float], ...] | None = None  # the task's (return, cost) pairs; None: of an older version

    @classmethod
    def from_data(cls, data: Trajectories, horizon: int | None = None, task: Task | None = None) -> Spec:
        horizon = horizon or (task.horizon if task else None) or int(data.lengths.max())
        if data.lengths.max() > horizon:
            raise QptError(
                f"the longest episode has {data.lengths.max()} steps but the horizon is {horizon}; "
                "give a larger --horizon"
            )
        for what, sums in (("rewards", data.returns_to_go), ("costs", data.costs_to_go)):
            if not np.isfinite(sums).all():
                raise QptError(f"the sums of {what} are beyond any float32; give the {what} in a larger unit")
        std = data.observations.std(0, dtype=np.float64)
        pareto = data.pareto_episodes()
        return cls(
            observation_dim=data.observation_dim,
            action_dim=data.action_dim,
            horizon=horizon,
            observation_mean=tuple(map(float, data.observations.mean(0, dtype=np.float64))),
            observation_std=tuple(float(x) if x > CONSTANT else 1.0 for x in std),  # a constant column stays as it is
            frontier_costs=tuple(map(float, data.episode_costs[pareto])),
            frontier_returns=tuple(map(float, data.returns[pareto])),
            return_min=float(data.returns.min()),
            return_max=float(data.returns.max()),
            cost_max=float(data.episode_costs.max()),
            cost_unit=min(1.0, float(data.costs.max())) or 1.0,
            mean_return_to_go=float(np.abs(data.returns_to_go).mean(dtype=np.float64)),
            mean_cost_to_go=float(data.costs_to_go.mean(dtype=np.float64)),
            augmentation=task.augmentation if task else Augmentation(),
            task=task.name if task else None,
            surrogate=data.is_surrogate,
            published=task.targets if task else (),
        )

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Spec:
        if not isinstance(row["task"], str | None):
            raise ValueError("its task has no name")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
        return cls(**values | {"augmentation": Augmentation(**row["augmentation"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def suggest_return(self, cost_limit: float, frugality: float = 0.0) -> float:
        """The best return logged within the limit; below the cheapest episode, that episode's.

        Where half of the limit bought all but a share `frugality` of the range of returns, the cheapest such return.
        Beyond the dearest episode every limit is the same.
        """
        cost_limit = min(cost_limit, self.cost_max)
        place = int(np.searchsorted(self.frontier_costs, cost_limit, side="right")) - 1
        best = self.frontier_returns[max(place, 0)]
        enough = best - frugality * (self.return_max - self.return_min)
        cheap = int(np.searchsorted(self.frontier_returns, enough))
        return self.frontier_returns[cheap] if self.frontier_costs[cheap] <= cost_limit / 2 else best

    def published_return(self, cost_limit: float) -> float | None:
        """The return of the task's published (return, cost) pairs, interpolated; beyond them, that of the nearest."""
        if not self.published_pairs:
            return None
        returns, costs = zip(*self.published_pairs, strict=True)
        return float(np.interp(cost_limit, costs, returns))

    @property
    def published_pairs(self) -> list[Sequence[float]]:
        """The task's published (return, cost) pairs, by rising cost."""
        known = get_task(self.task).targets if self.published is None and self.task else self.published
        return sorted(known or (), key=lambda pair: pair[1])


class Context(NamedTuple):
    """What n running episodes look like to a method that decides now; right-padded windows of K steps."""

    observations: Tensor  # [n, K, S]
    actions: Tensor  # [n, K, A] zero where not yet taken
    return_to_go: Tensor  # [n, K]
    cost_to_go: Tensor  # [n, K]
    steps: Tensor  # [n, K] index in the episode
    last: Tensor  # [n] place of the current step in the window
    return_target: Tensor  # [n] of the whole episode
    cost_limit: Tensor  # [n] of the whole episode
    seeds: Tensor  # [n] of the episode's noise
    noise: Tensor | None = None  # [n, W] drawn by the caller, in place of what the seeds would give
    active: Tensor | None = None  # [n] whose decisions count; None: all. Work for the others may be spared

    def now(self, field: Tensor) -> Tensor:
        """The entry of the current step."""
        return field[torch.arange(self.last.shape[0], device=self.last.device), self.last]

    def rows(self, index: Tensor) -> Context:
        """Some of the episodes."""
        return Context._make(None if field is None else field[index] for field in self)


class Decision(NamedTuple):
    actions: Tensor  # [n, A]
    diagnostics: dict[str, Tensor]  # [n] each, e.g. fallback 0/1


class Algorithm(Protocol):
    """A method: an nn.Module with these attributes and methods. See docs/your-own-algorithm.md."""

    config: Any  # a frozen dataclass with batch_size and steps among its fields
    spec: Spec
    optimizers: dict[str, torch.optim.Optimizer]
    limit_mode: LimitMode
    context: int  # steps of history that `act` sees
    compilable: tuple[str, ...]  # methods that may be replaced by their compiled forms
    training: bool  # nn.Module's

    def make_sampler(self, data: Trajectories, device: torch.device, seed: int) -> Sampler: ...

    def update(self, batch: Any) -> dict[str, Tensor]:
        """One gradient step; metrics stay on the device, so that the host need not wait."""
        ...

    def act(self, context: Context) -> Decision: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> Any: ...

    def to(self, *args: Any) -> Any: ...

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...


# name: (module, class, config class); modules are imported when asked for
ALGORITHMS: dict[str, tuple[str, str, str]] = {
    "qpt": ("qpt.algorithms.qpt", "QPT", "QPTConfig"),
    "bc-safe": ("qpt.algorithms.bc", "BC", "BCConfig"),
    "cdt": ("qpt.algorithms.cdt", "CDT", "CDTConfig"),
    "bcq-lag": ("qpt.algorithms.bcq_lag", "BCQLag", "BCQLagConfig"),
    "cpq": ("qpt.algorithms.cpq", "CPQ", "CPQConfig"),
    "coptidice": ("qpt.algorithms.coptidice", "COptiDICE", "COptiDICEConfig"),
    "fisor": ("qpt.algorithms.fisor", "FISOR", "FISORConfig"),
    "oasis": ("qpt.algorithms.oasis", "OASIS", "OASISConfig"),
    "caps": ("qpt.algorithms.caps", "CAPS", "CAPSConfig"),
}
_registered: dict[str, tuple[type, type]] = {}


def register_algorithm(name: str, algorithm: type, config: type) -> None:
    """Make a method of one's own known by name, for this process."""
    if name in ALGORITHMS:
        raise QptError(f"the name {name!r} belongs to a built-in algorithm; choose another")
    _registered[name] = (algorithm, config)


def algorithm_names() -> list[str]:
    """The built-in methods, the registered ones, and those of the modules that QPT_ALGORITHMS names."""
    for module in filter(None, os.environ.get("QPT_ALGORITHMS", "").split(",")):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise QptError(
                f"QPT_ALGORITHMS names {module!r}, which cannot be imported ({error}); is its folder in PYTHONPATH?"
            ) from error
    return [*ALGORITHMS, *_registered]


def algorithm_classes(name: str) -> tuple[type, type]:
    """The class and the config class of an algorithm."""
    if name not in ALGORITHMS:
        algorithm_names()  # a module that registers it may not have been imported yet
    if name in _registered:
        return _registered[name]
    if name not in ALGORITHMS:
        raise QptError(f"there is no algorithm {name!r}; choose one of {', '.join(algorithm_names())}")
    module, algorithm, config = ALGORITHMS[name]
    room = importlib.import_module(module)
    return getattr(room, algorithm), getattr(room, config)


def config_from(config_class: type, values: dict[str, Any]) -> Any:
    """A config from plain values; unknown names get an error."""
    unknown = set(values) - {f.name for f in fields(config_class)}
    if unknown:
        raise QptError(f"{config_class.__name__} has no field {', '.join(sorted(unknown))}")
    return config_class(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def preset_config(algorithm: str, name: str, task: Task | None = None) -> Any:
    """The config of a method's preset. Published ones have other steps and settings for MetaDrive's tasks."""
    _, config_class = algorithm_classes(algorithm)
    if not hasattr(config_class, "preset"):
        if name != "default":
            raise QptError(f"{algorithm} has no preset {name!r}; leave it out")
        return config_class()
    config = config_class.preset(name)
    if name == "paper" and task is not None:
        if task.suite == "metadrive":
            config = replace(config, **getattr(config_class, "METADRIVE", {}))
        if config.steps == Task.paper_steps:
            config = replace(config, steps=task.paper_steps)
    return config


def relabelled_windows(config: Any, spec: Spec, data: Trajectories, device: torch.device, seed: int) -> WindowSampler:
    """The windows of the sequence methods: logged and, where configured, relabelled episodes."""
    relabelled = None
    if config.augmentation:
        relabelled = augment(
            data,
            rule=config.augmentation_rule,
            fraction=config.augmentation_fraction,
            max_reward=spec.augmentation.max_reward,
            degree=spec.augmentation.degree,
            max_reward_decrease=spec.augmentation.max_reward_decrease,
            seed=seed,
        )
        for note in relabelled.notes:
            warnings.warn(f"augmentation: {note}", stacklevel=2)
    return WindowSampler(
        data,
        config.batch_size,
        config.context,
        relabelled=relabelled,
        weighting=config.weighting,
        cost_ceiling=config.cost_ceiling,
        device=device,
        seed=seed,
    )


# -- little tools ------------------------------------------------------------------------------------------------------


def adam(
    parameters: Iterable[nn.Parameter],
    lr: float,
    *,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
) -> torch.optim.Optimizer:
    """Fused Adam(W) whose learning rate is a tensor on the device, so that a captured step can change it."""
    parameters = list(parameters)
    if parameters[0].is_cuda:
        return FlatAdam(parameters, lr, weight_decay=weight_decay, betas=betas)
    return torch.optim.AdamW(parameters, lr=torch.tensor(lr), betas=betas, weight_decay=weight_decay, fused=True)


def descend(
    optimizer: torch.optim.Optimizer, loss: Tensor, groups: list[list[nn.Parameter]], clip: float | None = None
) -> list[Tensor]:
    """One step of the given parameters alone: no other in the graph gets, or pays for, a gradient.

    The gradient norm of each group is clipped on its own; returns the norms before clipping.
    """
    flat = [parameter for group in groups for parameter in group]
    gradients = parallel.average(torch.autograd.grad(loss, flat))
    if isinstance(optimizer, FlatAdam):
        return optimizer.descend(gradients, [len(group) for group in groups], clip)
    for parameter, gradient in zip(flat, gradients, strict=True):
        # A compiled backward pass may lay a gradient out in its own way; fused optimisers want it like the parameter.
        alike = gradient.stride() == parameter.stride()
        parameter.grad = gradient if alike else torch.empty_like(parameter).copy_(gradient)
    norms = [nn.utils.clip_grad_norm_(group, clip) for group in groups] if clip else []
    optimizer.step()
    return norms


def soft_update(target: Sequence[Tensor], online: Sequence[Tensor], rate: float | Tensor) -> None:
    """target <- target + rate * (online - target), in few fused calls; a rate that changes is a tensor."""
    with torch.no_grad():
        if target[0].is_cuda:
            for old, new in joined(target, online):
                old.lerp_(new, rate)
        elif isinstance(rate, Tensor):
            drift = torch._foreach_sub(list(online), list(target))
            torch._foreach_mul_(drift, rate)
            torch._foreach_add_(list(target), drift)
        else:
            torch._foreach_lerp_(list(target), list(online), rate)


def frozen_copy(module: nn.Module) -> Any:
    """A copy without gradients that stays in evaluation mode (no dropout) while what holds it trains: a target."""
    frozen = copy.deepcopy(module).eval().requires_grad_(False)
    frozen.train = MethodType(_stay, frozen)  # type: ignore[method-assign]
    return frozen


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:  # noqa: ARG001
    return module


def within_episode(value: Tensor, timeouts: Tensor, largest: float) -> Tensor:
    """Values of next states, behind a timeout no larger than what a whole logged episode brought.

    Where a state tells how far the episode has come, no logged step holds the values behind the last one.
    """
    return torch.where(timeouts > 0, value.clamp(-largest, largest), value)


def with_step(seen: Tensor, steps: Tensor, horizon: int) -> Tensor:
    """What is seen of a state, and how far its episode has come, from -1 to 1."""
    return torch.cat([seen, steps[..., None].to(seen.dtype) * (2 / horizon) - 1], -1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the valid entries only; 0 where there are none."""
    weight = mask.to(values.dtype)
    return parallel.total((values * weight).sum()) / parallel.total(weight.sum()).clamp(min=1)


def discounted_limit(cost_limit: Tensor | float, remaining: Tensor | float, discount: float) -> Any:
    """The discounted sum of a budget spent evenly over the remaining steps: κ (1 - γ^H) / ((1 - γ) H)."""
    if discount == 1.0:
        return cost_limit
    return cost_limit * (1 - discount**remaining) / ((1 - discount) * remaining)
