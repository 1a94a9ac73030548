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
from qpt.modelcard import changes, find_evidence, model_card, rows_of, with_settings
from qpt.policy import Policy, load_policy
from qpt.runtime import FORMAT, OnnxPolicy, noise, suggest_returns
from qpt.writing import check_folder

EXPORTABLE = ("qpt", "cdt", "bc-safe", "caps", "cpq", "coptidice")  # the others draw noise as they act
OPSET = 18
TOLERANCE = 1e-5  # of the parity check
CALIBRATION = ("task", "limit", "internal_limit", "risk", "confidence")  # of a calibrated limit, in the side file


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
        ties = f"; {self.ties} chose another candidate of equal worth" if self.ties else ""
        return f"In a check of {self.decisions} decisions, actions are within {self.difference:.1e} of PyTorch's{ties}."


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

    Settings replace fields of the policy's config, as in `load_policy`. The model card shows the episodes and, of what
    lies in the run's folder, what is about this checkpoint (see `qpt.modelcard.find_evidence`).
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
    policy, settings = load_policy(folder, **settings), changes(manifest, settings)
    if episodes is not None:
        _check_episodes(episodes, folder, settings)
    graph, evidence = to_onnx(policy), find_evidence(folder, episodes, settings)
    facts = side_file(policy, manifest, folder, graph)
    facts["calibrations"] = [{k: row[k] for k in CALIBRATION} for row in evidence.calibrations]
    staged = [file.with_name(f".{file.stem}.partial{file.suffix}") for file in files]
    try:
        for file, content in zip(staged[:2], (graph, json.dumps(facts, indent=1).encode()), strict=True):
            file.write_bytes(content)
        difference, ties, decisions = parity(policy, OnnxPolicy(staged[0]))
        if not difference <= TOLERANCE:  # NaN is no agreement
            raise QptError(
                f"the graph does not decide as PyTorch does (actions differ by up to {difference:.1e}), so nothing was "
                "written; please report it with the versions of torch, onnxscript and onnxruntime"
            )
        done = Export(*files, difference, ties, decisions)
        as_exported = manifest | {"config": asdict(policy.method.config)}
        staged[2].write_text(model_card(as_exported, facts, done.parity, evidence, settings), encoding="utf-8")
        for old, new in zip(staged, files, strict=True):
            old.replace(new)
    except OSError as error:
        raise QptError(f"the export {out} cannot be written: {error.strerror}; choose another --out") from error
    finally:
        for file in staged:
            file.unlink(missing_ok=True)
    return done


def _check_episodes(episodes: Episodes, folder: Path, settings: dict[str, Any]) -> None:
    """The table that is given for the card must be of the policy that is exported."""
    named = {Path(name).name for name in episodes.checkpoint.tolist()} == {folder.name}
    if not named or not rows_of(episodes, folder).all():
        raise QptError(
            f"the episodes are not those of the checkpoint {folder}; "
            "evaluate the one that is exported, or leave out --episodes"
        )
    if not with_settings(episodes, folder, settings):
        raise QptError(
            "the episodes were run with other settings than those of the export; "
            "evaluate with the same (--set), or leave out --episodes"
        )


# -- the graph ---------------------------------------------------------------------------------------------------------


class _Decision(nn.Module):
    """`method.act` with tensors in and tensors out."""

    def __init__(self, method: Any) -> None:
        super().__init__()
        self.method = method

    def forward(self, *fields: Tensor, noise: Tensor | None = None) -> tuple[Tensor, ...]:
        # Without seeds: a method that asks for them cannot be exported.
        decision = self.method.act(Context._make((*fields, None, noise, None)))
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
                dynamic_shapes={"fields": tuple({0: batch} for _ in INPUTS)} | {name: {0: batch} for name in extra},
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


def parity(policy: Policy, exported: OnnxPolicy) -> tuple[float, int, int]:
    """Largest difference of actions from PyTorch's, ties and decisions, over made-up contexts of 1 to 64 episodes.

    Where candidates are worth the same to the last digit, rounding may choose another one: a tie, not a difference.
    """
    module, rng = _Decision(policy.method.eval()), np.random.default_rng(0)
    largest, ties, decisions = 0.0, 0, 0
    for n in (1, 3, 64):
        context = _made_up(policy, exported.facts["noise"], n, rng)
        tensors = {name: torch.from_numpy(values) for name, values in context.items()}
        given = tensors.pop("noise")
        with torch.no_grad():
            outputs = module(*tensors.values(), noise=given if given.shape[1] else None)
        expected = {name: x.numpy() for name, x in zip(exported.outputs, outputs, strict=True)}
        if not np.isfinite(expected["action"]).all():
            raise QptError(
                "the policy gives actions that are not finite, so nothing was written; export an earlier checkpoint, "
                "or train it again"
            )
        got = exported.decide(context)
        apart = np.abs(got["action"] - expected["action"]).max(1)  # [n]
        tied = np.full(n, "reward_q" in got) & (apart > TOLERANCE)
        for name in got.keys() & {"fallback", "reward_q", "cost_q"}:
            tied &= np.isclose(got[name], expected[name], rtol=TOLERANCE, atol=TOLERANCE)
        largest = float(np.max([largest, *apart[~tied]]))  # NaN, if there is one
        ties, decisions = ties + int(tied.sum()), decisions + n
    return largest, ties, decisions


def _made_up(
    policy: Policy, plan: list[dict[str, Any]], n: int, rng: np.random.Generator
) -> dict[str, npt.NDArray[Any]]:
    """Contexts within the data's ranges, as `Context` orders them, and their noise."""
    spec, k = policy.spec, policy.method.context
    trained = policy.trained_limit if policy.limit_mode == "trained" else None
    limit = np.full(n, trained) if trained is not None else rng.uniform(0, max(spec.cost_max, 1.0), n)
    target = rng.uniform(spec.return_min, spec.return_max, n)
    first = rng.integers(0, max(spec.horizon - k, 1), (n, 1))
    left = np.sort(rng.random((n, k)))[:, ::-1]  # of the targets, falling
    context = {
        "observations": rng.normal(spec.observation_mean, spec.observation_std, (n, k, spec.observation_dim)),
        "actions": rng.uniform(-1, 1, (n, k, spec.action_dim)),
        "return_to_go": target[:, None] * left,
        "cost_to_go": limit[:, None] * left - 1,
        "steps": np.minimum(first + np.arange(k), spec.horizon - 1),
        "last": rng.integers(0, k, n),
        "return_target": target,
        "cost_limit": limit,
    }
    context = {name: x if x.dtype.kind == "i" else x.astype(np.float32) for name, x in context.items()}
    return context | {"noise": noise(plan, rng.integers(0, 2**40, n), first[:, 0])}


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
    """The method's suggestions as a table; None where it has none, or none that a table can hold."""
    spec = policy.spec
    factor = float(getattr(policy.method.config, "target_factor", 1.0))
    own = getattr(policy.method, "suggest_return", spec.suggest_return)
    most = 10 * max(spec.cost_max, 1.0)
    asked = np.concatenate([np.random.default_rng(0).uniform(0, most, 200), spec.frontier_costs])
    forms = [  # from the data they change where a logged episode comes within the limit, or within half of it
        ("previous", sorted({times * cost for cost in spec.frontier_costs for times in (1, 2)})),
        ("linear", sorted({cost for _, cost in spec.published_pairs})),
        ("linear", np.linspace(0, most, 1001).tolist()),
    ]
    try:
        right = np.array([own(float(limit)) for limit in asked])
        for between, costs in forms:
            table = {"costs": costs, "returns": [own(cost) for cost in costs], "between": between, "factor": 1.0}
            if costs and np.allclose(suggest_returns(table, asked), right, rtol=1e-6, atol=1e-6):
                return table | {"factor": factor}
    except QptError:
        pass
    return None


def _files(out: Path, overwrite: bool) -> tuple[Path, Path, Path]:
    if out.suffix != ".onnx":
        raise QptError(f"the graph is written as .onnx, not as {out.name!r}; change the ending of --out")
    files = out, out.with_suffix(".json"), out.with_suffix(".md")
    for file in files:
        if file.exists() and not overwrite:
            raise QptError(f"{file} exists already; choose another --out, or add --overwrite")
    check_folder(out.parent)
    return files
