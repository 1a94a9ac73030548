"""Deployment: a policy for n episodes that run side by side, with a cost limit that can change at any step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qpt.algorithms.base import Algorithm, Context, Decision
from qpt.behaviour import PREFIX, load_behaviour
from qpt.checkpoint import load_algorithm, resolve
from qpt.errors import QptError
from qpt.running import Doubles, Running


class Policy(Running):
    """A trained method at work: see `Running` for how it is asked."""

    def __init__(
        self,
        method: Algorithm,
        *,
        trained_limit: float | None = None,
        past_horizon: Literal["error", "clamp"] = "error",
        dtype: torch.dtype = torch.float32,
        name: str = "",
        checkpoint: str = "",
        sha256: Mapping[str, str] | None = None,
    ) -> None:
        self.method, self.spec, self.dtype = method, method.spec, dtype
        self.algorithm, self.checkpoint, self.task = name, checkpoint, self.spec.task  # names, for results
        self.sha256, self.surrogate = sha256, self.spec.surrogate  # of the checkpoint's files; of its data
        super().__init__(
            (self.spec.observation_dim, self.spec.action_dim),
            method.context,
            self.spec.horizon,
            method.limit_mode,
            trained_limit,
            past_horizon,
            np.float64 if dtype == torch.float64 else np.float32,
        )
        self._device = next(iter(method.state_dict().values())).device
        self._away: _Away | None = None  # on another device than the host: how to decide there

    def _suggest(self, limits: Doubles) -> Doubles:
        suggest = getattr(self.method, "suggest_return", self.spec.suggest_return)  # a method may know better targets
        factor = float(getattr(self.method.config, "target_factor", 1.0))
        return np.array([float(suggest(limit)) * factor for limit in limits.tolist()])

    def _decide(
        self, last: npt.NDArray[np.int64], running: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
        seen = {name: torch.from_numpy(values) for name, values in self._seen(last).items()}
        if self.method.training:
            self.method.eval()
        with torch.no_grad():
            seeds, active = torch.from_numpy(self._seeds), torch.from_numpy(running)
            decision = self._ask(Context(**seen, seeds=seeds, active=active))
            actions = decision.actions.clamp(-1, 1)
        return actions.numpy(), {name: values.double().numpy() for name, values in decision.diagnostics.items()}

    def _ask(self, context: Context) -> Decision:
        if self._device.type == "cpu":
            return self.method.act(context)
        key = (self.count, self.method.config)
        if self._away is None or self._away.key != key:
            self._away = _Away(key, self.method, self._device, context)
        return self._away.act(context)


SENT = Context._fields.index("noise")  # fields that travel to a GPU: noise is drawn and all rows are decided on there


class _Away:
    """Decisions on a GPU: one copy there, one copy back, and between them from the second on one captured graph."""

    def __init__(self, key: Any, method: Algorithm, device: torch.device, like: Context) -> None:
        self.key, self.method, self.device = key, method, device
        given: list[Tensor] = list(like[:SENT])  # type: ignore[arg-type]
        sizes = [-(-x.numel() * x.element_size() // 16) * 16 for x in given]  # aligned
        self._here = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = torch.empty_like(self._here, device=device)

        def views(buffer: Tensor) -> list[Tensor]:
            parts = zip(torch.split(buffer, sizes), given, strict=True)
            return [part[: x.numel() * x.element_size()].view(x.dtype).view(x.shape) for part, x in parts]

        self._fields, self._context = views(self._here), Context(*views(self._there))
        self._graph: Any = None
        self._calls = 0

    def act(self, context: Context) -> Decision:
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            return self._act(context)

    def _act(self, context: Context) -> Decision:
        for field, value in zip(self._fields, context[:SENT], strict=True):
            field.copy_(value)  # type: ignore[arg-type]
        self._there.copy_(self._here, non_blocking=True)
        self._calls += 1
        if self._calls == 1 or self.device.type != "cuda":  # the first plainly: libraries set themselves up
            self._result = self._packed()
        elif self._graph is None:
            torch.cuda.synchronize(self.device)
            self._graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            with torch.cuda.graph(self._graph, stream=stream):  # torch's own would be of the GPU that it first saw
                self._result = self._packed()
        if self._graph is not None:
            self._graph.replay()
        rows = self._result.cpu()  # [n, A + diagnostics]
        width = rows.shape[1] - len(self._names)
        return Decision(rows[:, :width], {name: rows[:, width + i] for i, name in enumerate(self._names)})

    def _packed(self) -> Tensor:
        decision = self.method.act(self._context)
        self._names = list(decision.diagnostics)
        columns = [x[:, None].to(decision.actions.dtype) for x in decision.diagnostics.values()]
        return torch.cat([decision.actions, *columns], 1)


def load_policy(
    path: str | Path,
    *,
    which: Literal["last", "best"] = "last",
    device: str = "cpu",
    past_horizon: Literal["error", "clamp"] = "error",
    **settings: Any,
) -> Any:
    """The `Policy` of a checkpoint or run folder; settings replace fields of its config (e.g. candidates=10).

    "behaviour:TASK/17" is instead one of the `BehaviourPolicy`s that come with the package, number 17 of that task;
    noise=0 lets it act with its mean action.
    """
    if str(path).startswith(PREFIX):
        return load_behaviour(str(path), **settings)
    folder = resolve(path, which)
    algorithm, manifest = load_algorithm(folder, device)
    if settings:
        from dataclasses import replace

        try:
            algorithm.config = replace(algorithm.config, **settings)
        except TypeError as error:
            raise QptError(f"the {manifest['algorithm']} policy has no such setting: {error}") from error
        free = getattr(algorithm, "deciding", set(settings))  # a method of one's own need not say
        if fixed := sorted(set(settings) - free):
            raise QptError(
                f"the {manifest['algorithm']} policy was trained with its {', '.join(fixed)}, which cannot change now; "
                f"what can: {', '.join(sorted(free)) or 'nothing'}"
            )
    limit = getattr(algorithm.config, "cost_limit", None)
    return Policy(
        algorithm,
        trained_limit=limit,
        past_horizon=past_horizon,
        name=manifest["algorithm"],
        checkpoint=str(folder),
        sha256=manifest["sha256"],
    )
