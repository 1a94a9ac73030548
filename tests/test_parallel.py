"""Two processes on halves of a batch do what one does on the whole: gradients to rounding, resumed runs to the bit."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch import multiprocessing

from helpers import tiny_data
from qpt import checkpoint, parallel
from qpt.algorithms.base import Spec, algorithm_classes, algorithm_names, masked_mean
from qpt.algorithms.qpt import QPTConfig
from qpt.errors import QptError
from qpt.training import TrainConfig, train, train_seeds

# One number is taken over the whole batch in each of these that processes do not share: the quantile of unlikely
# actions (CPQ), the normaliser of the χ weights (COptiDICE). Each process takes it over its own half.
OWN_STATISTIC = ("cpq", "coptidice")
CASES = [*algorithm_names(), "caps-sac", "oasis-labelers", "oasis-policy"]
HALF = 10  # a process's share of the batch; no other size in these configs is 10, 5 or 20
SMALL: dict[str, Any] = {
    "batch_size": 2 * HALF,
    "critic_batch": HALF,
    "width": 16,
    "critic_width": 16,
    "vae_width": 16,
    "layers": 1,
    "heads": 2,
    "context": 4,
    "samples": 3,
    "cost_limit": 8.0,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "window": 8,
    "kept": 4,
    "sequences": 7,
    "diffusion_steps": 3,
    "policy_updates": 2,
}


def configured(case: str) -> Any:
    name = case if case in algorithm_names() else case.split("-")[0]
    config_class = algorithm_classes(name)[1]
    extra = {"caps-sac": {"base": "sac-bc"}}.get(case, {})
    # OASIS has stages: the case decides which one the first step is in.
    if name == "oasis":
        extra = {"stage_min": 0, "steps": 10} | {
            "oasis": {"generator_share": 0.5},
            "oasis-labelers": {"generator_share": 0.0, "labeler_share": 0.9},
            "oasis-policy": {"generator_share": 0.0, "labeler_share": 0.0},
        }[case]
    known = {f.name for f in fields(config_class)}
    return name, replace(config_class(), **{k: v for k, v in {**SMALL, **extra}.items() if k in known})


def my_half(batch: Any, rank: int) -> Any:
    """Every second row; batches are (named) tuples of tensors with the batch first, or of such tuples."""
    if isinstance(batch, torch.Tensor):
        return (batch.double() if batch.is_floating_point() else batch)[rank :: parallel.processes()]
    return type(batch)(*(my_half(part, rank) for part in batch))


def same_noise(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Replace torch's draws: the n-th is the same for all, and each process gets its rows of it."""
    counter, world = itertools.count(), parallel.processes()

    def drawing(kind: Any) -> Any:
        def draw(*args: Any, **kwargs: Any) -> torch.Tensor:
            generator = torch.Generator().manual_seed(next(counter))
            high = (args[0],) if kind is torch_randint else ()
            shape = list(args[1] if high else args[0].shape if kwargs.pop("like", False) else args)
            axis = next((i for i, n in enumerate(shape) if n in (HALF, HALF // 2)), None) if world > 1 else None
            if axis is not None:
                shape[axis] *= world
            noise = kind(*high, shape, generator=generator)
            return noise if axis is None else noise[(slice(None),) * axis + (slice(rank, None, world),)]

        return draw

    torch_randint = torch.randint
    like = drawing(torch.randn)
    for name in ("randn", "rand", "randint"):
        patch.setattr(torch, name, drawing(getattr(torch, name)))
    patch.setattr(torch, "randn_like", lambda x: like(x, like=True))


def gradients(case: str, rank: int, steps: int = 2) -> dict[str, torch.Tensor]:
    """All gradients of some steps of a method, as its optimisers see them before clipping, and its state after."""
    name, config = configured(case)
    data, seen = tiny_data(), {}
    torch.set_default_dtype(torch.float64)  # so that nothing but a wrong formula makes a difference
    try:
        with pytest.MonkeyPatch.context() as patch:
            torch.manual_seed(0)
            share = {
                k: v // parallel.processes() for k in ("batch_size", "critic_batch") if (v := getattr(config, k, 0))
            }
            method = algorithm_classes(name)[0](replace(config, **share), Spec.from_data(data))
            whole = algorithm_classes(name)[0](config, Spec.from_data(data)).make_sampler(data, torch.device("cpu"), 3)
            method.make_sampler(data, torch.device("cpu"), 3)  # some learn the data's statistics here
            method.double()
            method.make_optimizers()
            same_noise(patch, rank)
            average = parallel.average

            def recorded(parts: Any) -> list[torch.Tensor]:
                found = average(parts)
                for part in found:
                    seen[f"{len(seen)}"] = part.detach().clone()
                return found

            patch.setattr(parallel, "average", recorded)
            for _ in range(steps):
                method.update(my_half(whole.sample(), rank))
    finally:
        torch.set_default_dtype(torch.float32)
    return seen | {f"state/{k}": v.clone() for k, v in method.state_dict().items()}


# -- what both processes do --------------------------------------------------------------------------------------------


def run_config(out: Path, **changes: Any) -> TrainConfig:
    small = {"width": 8, "layers": 1, "heads": 2, "context": 3, "critic_width": 8}
    method = QPTConfig(steps=8, batch_size=8, dropout=0.2, decay=0.0, **small)  # a falling rate knows when it will end
    settings: dict[str, Any] = {"config": method, "checkpoint_every": 4, "log_every": 2, "progress": False}
    return TrainConfig(out=out, threads=1, device="cpu", **(settings | changes))


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    out = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=2)
    for case in CASES:
        save_file(gradients(case, rank), out / f"{case}-{rank}.safetensors")
    mask = torch.arange(4) < (3 if rank else 1)
    save_file({"mean": masked_mean(torch.arange(4.0) + 10 * rank, mask)}, out / f"mean-{rank}.safetensors")

    train(run_config(out / "whole"), tiny_data())
    short = replace(run_config(out).config, steps=4)
    train(run_config(out / "parts", config=short), tiny_data())
    train(run_config(out / "parts", resume=True), tiny_data())
    oasis = replace(configured("oasis")[1], steps=6, generator_share=0.3, labeler_share=0.3, stage_min=1)
    train(run_config(out / "oasis", algorithm="oasis", config=oasis), tiny_data())
    short = run_config(out / "oasis-parts", algorithm="oasis", config=oasis, checkpoint_every=5)
    train(short, tiny_data())
    for step in (checkpoint.checkpoints(out / "oasis-parts")[-1],) if rank == 0 else ():
        step.rename(out / "later")  # as if it had been stopped at step 5
    dist.barrier()
    train(replace(short, resume=True), tiny_data())

    errors = {}
    for name, act in {
        "odd": lambda: train(
            run_config(out / "odd", config=replace(run_config(out).config, batch_size=7)), tiny_data()
        ),
        "seeds": lambda: train_seeds(run_config(out / "many", seeds=(0, 1)), tiny_data()),
    }.items():
        try:
            act()
        except QptError as error:
            errors[name] = str(error)
    (out / f"errors-{rank}.json").write_text(json.dumps(errors))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left behind."""
    out = tmp_path_factory.mktemp("parallel")
    multiprocessing.start_processes(work, (str(out),), nprocs=2, start_method="fork")
    return out


# -- and what must be true of it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_whole_batch(case: str, folder: Path) -> None:
    ours = [load_file(folder / f"{case}-{rank}.safetensors") for rank in (0, 1)]
    assert ours[0].keys() == ours[1].keys()
    for key in ours[0]:
        assert torch.equal(ours[0][key], ours[1][key]), key  # the processes stay in step, to the bit
    whole = gradients(case, 0)
    assert whole.keys() == ours[0].keys()
    assert sum(bool(g.abs().max() > 0) for g in whole.values() if g.numel()) > len(whole) / 2
    for key, wanted in whole.items():
        got, scale = ours[0][key], float(wanted.abs().max()) if wanted.numel() else 0.0
        if case in OWN_STATISTIC:
            assert torch.isfinite(got).all(), key
        else:
            torch.testing.assert_close(
                got, wanted, rtol=1e-8, atol=1e-10 + 1e-10 * scale, msg=lambda m, k=key: f"{k}: {m}"
            )


def test_means_over_valid_entries_count_all_entries(folder: Path) -> None:
    for rank in (0, 1):  # 0 of the first, 10, 11 and 12 of the second: not the mean of 0 and 11
        assert load_file(folder / f"mean-{rank}.safetensors")["mean"].item() == 33 / 4


@pytest.mark.parametrize(("whole", "parts"), [("whole", "parts"), ("oasis", "oasis-parts")])
def test_resumed_runs_end_with_the_same_bits(whole: str, parts: str, folder: Path) -> None:
    a, b = (checkpoint.resolve(folder / name) for name in (whole, parts))
    assert checkpoint.read_manifest(a)["processes"] == 2
    assert checkpoint.read_manifest(a)["step"] == checkpoint.read_manifest(b)["step"]
    for file in (checkpoint.MODEL, checkpoint.TRAINING):
        one, two = load_file(a / file), load_file(b / file)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[k], two[k]) for k in one)


def test_processes_draw_apart_and_one_writes(folder: Path) -> None:
    states = load_file(checkpoint.resolve(folder / "whole") / checkpoint.TRAINING)
    for name in ("sampler", "torch"):
        assert not torch.equal(states[f"generator/{name}"], states[f"generator/{name}/1"])
    rows = [json.loads(line) for line in (folder / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    # The config that is kept is the whole run's, not that of a share.
    assert checkpoint.read_manifest(checkpoint.resolve(folder / "whole"))["config"]["batch_size"] == 8


def test_what_cannot_be_shared_gets_a_sentence(folder: Path) -> None:
    for rank in (0, 1):
        errors = json.loads((folder / f"errors-{rank}.json").read_text())
        assert errors["odd"] == "2 processes cannot share a batch-size of 7; give a multiple of 2"
        assert "several processes train one seed" in errors["seeds"]
    with pytest.raises(QptError, match=r"has 2 process\(es\), not 1; resume it with torchrun --nproc-per-node 2"):
        train(run_config(folder / "whole", resume=True), tiny_data())


def test_alone_nothing_changes() -> None:
    x = torch.randn(3, requires_grad=True)
    assert parallel.total(x) is x
    assert parallel.average([x])[0] is x
    assert (parallel.processes(), parallel.rank(), parallel.speaks()) == (1, 0, True)
    assert [parallel.anyone(flag, torch.device("cpu")) for flag in (True, False)] == [True, False]


@pytest.mark.slow
def test_torchrun_trains_and_resumes(tmp_path: Path) -> None:
    """The documented command, twice."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    small = "--steps {} --batch-size 8 --width 8 --layers 1 --heads 2 --context 2 --critic-width 8 --device cpu"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    for steps, more in ((3, []), (6, ["--resume"])):
        args = [*small.format(steps).split(), "--data", "embedded:ballcircle", "--out", str(tmp_path / "run"), *more]
        done = subprocess.run(
            [*command, "-m", "qpt", "train", *args],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"done at step {steps}") == 1
    assert checkpoint.read_manifest(checkpoint.resolve(tmp_path / "run"))["processes"] == 2
