"""A policy as one ONNX graph: context in, action and diagnostics out, with a side file and a model card beside it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from qpt.algorithms import candidates
from qpt.algorithms.base import ALGORITHMS, Context
from qpt.algorithms.qpt import QPT
from qpt.checkpoint import MODEL, read_manifest, resolve, versions
from qpt.episodes import Episodes
from qpt.errors import QptError, require
from qpt.modelcard import model_card
from qpt.policy import Policy, load_policy
from qpt.runtime import FORMAT, OnnxPolicy
from qpt.tasks import get_task

EXPORTABLE = ("qpt", "cdt", "bc-safe", "caps", "cpq", "coptidice")  # the others draw noise as they act
OPSET = 18
TOLERANCE = 1e-5  # of the parity check
TIES = 0.01  # share of decisions in which rounding may prefer another candidate


@dataclass(frozen=True)
class Export:
    """What an export wrote, and how close its decisions are to PyTorch's."""

    graph: Path
    side: Path
    card: Path
    difference: float  # largest, of actions, over the decisions that agree
    ties: int  # decisions in which another candidate of equal worth was chosen
    decisions: int

    @property
    def parity(self) -> str:
        """A sentence."""
        ties = f", and {self.ties} chose another candidate of equal worth" if self.ties else ""
        return f"Of {self.decisions} decisions, all are within {self.difference:.1e} of PyTorch's{ties}."


def export_policy(
    checkpoint: str | Path,
    out: str | Path,
    *,
    which: Literal["last", "best"] = "last",
    episodes: Episodes | None = None,
    overwrite: bool = False,
    **settings: Any,
) -> Export:
    """Write the policy of a checkpoint or run as `out` (.onnx), and a .json and a .md of the same name.

    Settings replace fields of the policy's config, as in `load_policy`; episodes go into the model card.
    """
    out = Path(out)
    files = _files(out, overwrite)
    for package in ("onnx", "onnxscript"):
        require(package, "onnx")
    folder = resolve(checkpoint, which)
    manifest = read_manifest(folder)
    if manifest["algorithm"] not in EXPORTABLE and manifest["algorithm"] in ALGORITHMS:
        raise QptError(
            f"{manifest['algorithm']} draws noise of its own as it acts and cannot be exported; "
            f"these can: {', '.join(EXPORTABLE)}"
        )
    policy = load_policy(folder, **settings)
    graph = to_onnx(policy)
    facts = side_file(policy, manifest, folder, graph)
    staged = [file.with_name(f".{file.stem}.partial{file.suffix}") for file in files]
    try:
        for file, content in zip(staged[:2], (graph, json.dumps(facts, indent=1).encode()), strict=True):
            file.write_bytes(content)
        difference, ties, decisions = parity(policy, OnnxPolicy(staged[0]))
        if difference > TOLERANCE or ties > TIES * decisions:
            raise QptError(
                f"the graph does not decide as PyTorch does: actions differ by up to {difference:.1e}, and {ties} of "
                f"{decisions} choices differ; nothing was written"
            )
        done = Export(*files, difference, ties, decisions)
        staged[2].write_text(
            model_card(manifest | {"config": asdict(policy.method.config)}, facts, done.parity, episodes),
            encoding="utf-8",
        )
        for old, new in zip(staged, files, strict=True):
            old.replace(new)
    except OSError as error:
        raise QptError(f"the export {out} cannot be written: {error.strerror}; choose another --out") from error
    finally:
        for file in staged:
            file.unlink(missing_ok=True)
    return done


# -- the graph ---------------------------------------------------------------------------------------------------------


class _Decision(nn.Module):
    """`method.act` with tensors in and tensors out."""

    def __init__(self, method: Any) -> None:
        super().__init__()
        self.method = method

    def forward(self, *fields: Tensor, noise: Tensor | None = None) -> tuple[Tensor, ...]:
        # Without seeds: a method that asks for them cannot be exported.
        decision = self.method.act(Context._make((*fields, None, noise)))
        return decision.actions.clamp(-1, 1), *decision.diagnostics.values()


INPUTS = Context._fields[:8]  # all but the seeds, which the caller's noise stands for


def noise_plan(method: Any) -> list[dict[str, Any]]:
    """The random numbers that a decision takes as its input."""
    if not isinstance(method, QPT) or not method.config.inference_with_candidates or method.config.candidates == 1:
        return []
    return [draw._asdict() for draw in candidates.draws(method, method.config.candidates)]


def to_onnx(policy: Policy) -> bytes:
    """The decision of any number of episodes as an ONNX graph, in float32."""
    method: Any = policy.method.eval()
    context = _example(policy)
    module = _Decision(method)
    width = sum(draw["size"] for draw in noise_plan(method))
    extra = {"noise": torch.zeros(2, width)} if width else {}
    batch = torch.export.Dim("n", min=1)
    try:
        with torch.no_grad(), _quiet():
            names = ["action", *method.act(context._replace(noise=extra.get("noise"))).diagnostics]
            program = torch.export.export(
                module,
                context[: len(INPUTS)],
                extra,
                dynamic_shapes={
                    "fields": tuple({0: batch} for _ in INPUTS),
                    "noise": {0: batch} if width else None,
                },
            )
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                input_names=[*INPUTS, *extra],
                output_names=names,
                external_data=False,
                verbose=False,
            )
        assert exported is not None
        graph: bytes = exported.model_proto.SerializeToString()
    except Exception as error:  # the exporter has many kinds
        raise QptError(
            f"the {policy.algorithm} policy cannot be turned into a graph ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0]}); these can: {', '.join(EXPORTABLE)}"
        ) from error
    return graph


def _example(policy: Policy) -> Context:
    n, k = 2, policy.method.context  # two episodes: a size of 1 would be taken for a constant
    return Context(
        torch.zeros(n, k, policy.observation_dim),
        torch.zeros(n, k, policy.action_dim),
        torch.zeros(n, k),
        torch.zeros(n, k),
        torch.zeros(n, k, dtype=torch.long),
        torch.zeros(n, dtype=torch.long),
        torch.zeros(n),
        torch.zeros(n),
        torch.zeros(n, dtype=torch.long),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's progress and warnings are about itself; what goes wrong is raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# -- parity ------------------------------------------------------------------------------------------------------------


def parity(policy: Policy, exported: OnnxPolicy, steps: int = 25) -> tuple[float, int, int]:
    """Largest difference of actions, choices that differ, and decisions, over made-up episodes of 1 and of 5 rows.

    Both see the same history at every step; limits range over the data's and change half-way.
    """
    spec, rng = policy.spec, np.random.default_rng(0)
    largest, ties, decisions = 0.0, 0, 0
    trained = policy.trained_limit if policy.limit_mode == "trained" else None
    for n in (1, 5):

        def limits(n: int = n) -> npt.NDArray[np.float64]:
            return np.full(n, trained) if trained is not None else rng.uniform(0, max(spec.cost_max, 1.0), n)

        first, seeds = limits(), np.arange(n) + 17
        targets = rng.uniform(spec.return_min, spec.return_max, n)
        for one in (policy, exported):
            one.reset(n, cost_limits=first, seeds=seeds, return_targets=targets)
        for step in range(min(steps, spec.horizon)):
            if step == steps // 2:
                changed = limits()
                policy.set_cost_limit(changed)
                exported.set_cost_limit(changed)
            seen = rng.normal(spec.observation_mean, spec.observation_std, (n, policy.observation_dim))
            expected, got = policy.act(seen), exported.act(seen)
            apart = np.abs(expected - got).max(1)
            agree = apart <= 10 * TOLERANCE
            largest = max([largest, *apart[agree].tolist()])
            ties, decisions = ties + int((~agree).sum()), decisions + n
            exported._window["actions"][:] = policy._actions.numpy()  # a tie shall not spoil later decisions
            reward, cost = rng.normal(size=n), rng.random(n) * spec.cost_max / spec.horizon
            policy.observe(reward, cost)
            exported.observe(reward, cost)
    return largest, ties, decisions


# -- the side file -----------------------------------------------------------------------------------------------------


def side_file(policy: Policy, manifest: dict[str, Any], folder: Path, graph: bytes) -> dict[str, Any]:
    """What a program needs beside the graph, and where the graph comes from."""
    spec, method, data = policy.spec, policy.method, manifest.get("data", {})
    return {
        "format": FORMAT,
        "sha256": hashlib.sha256(graph).hexdigest(),
        "algorithm": manifest["algorithm"],
        "task": spec.task,
        "observation_dim": spec.observation_dim,
        "action_dim": spec.action_dim,
        "context": method.context,
        "horizon": spec.horizon,
        "limit_mode": policy.limit_mode,
        "trained_limit": policy.trained_limit,
        "cost_range": [spec.frontier_costs[0], spec.cost_max],
        "return_targets": _return_targets(policy),
        "noise": noise_plan(method),
        "versions": versions() | {name: require(name, "onnx").__version__ for name in ("onnx", "onnxscript")},
        "opset": OPSET,
        "provenance": {
            "checkpoint": folder.name,
            "step": manifest.get("step"),
            "model_sha256": manifest["sha256"].get(MODEL),
            "seed": manifest.get("seed"),
            "data": data | {"source": Path(str(data.get("source", ""))).name},  # folders are nobody's business
            "trained_with": manifest.get("versions", {}),
        },
    }


def _return_targets(policy: Policy) -> dict[str, Any] | None:
    """The method's suggestions as a table; None where it has none."""
    spec, config = policy.spec, policy.method.config
    factor = float(getattr(config, "target_factor", 1.0))
    own = getattr(policy.method, "suggest_return", None)
    if own is None or getattr(config, "targets", None) == "data":
        costs, returns = spec.frontier_costs, spec.frontier_returns
        return {"costs": costs, "returns": returns, "between": "previous", "factor": factor}
    pairs = get_task(spec.task).targets if spec.task and getattr(config, "targets", None) == "published" else ()
    grid = sorted({cost for _, cost in pairs}) or np.linspace(0, spec.cost_max, 201).tolist()
    try:
        return {"costs": grid, "returns": [own(cost) for cost in grid], "between": "linear", "factor": factor}
    except QptError:
        return None


def _files(out: Path, overwrite: bool) -> tuple[Path, Path, Path]:
    if out.suffix != ".onnx":
        raise QptError(f"the graph is written as .onnx, not as {out.name!r}; change the ending of --out")
    files = out, out.with_suffix(".json"), out.with_suffix(".md")
    for file in files:
        if file.exists() and not overwrite:
            raise QptError(f"{file} exists already; choose another --out, or add --overwrite")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QptError(f"the folder {out.parent} cannot be made: {error.strerror}; choose another --out") from error
    return files
