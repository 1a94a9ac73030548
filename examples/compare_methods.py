"""Compare methods: a grid of runs, a summary with intervals, a page to read.

    python examples/compare_methods.py                                   # a toy road, a minute
    python examples/compare_methods.py --task BallCircle --data embedded:ballcircle --limits 20 40 70 --steps 5000
    python examples/compare_methods.py --algorithms qpt cdt caps bc-safe cpq --seeds 0 1 2 3 4 --workers 4

Start it again after an interruption: finished runs are skipped, begun ones go on. `qpt bench` and `qpt report` do the
same from the command line.
"""

import argparse
from pathlib import Path

import qpt
from qpt.data import write
from qpt.envs.toy import tradeoff
from qpt.experiments.bench import run_jobs
from qpt.experiments.executors import local_executor
from qpt.experiments.jobs import grid
from qpt.experiments.results import summarize
from qpt.report import write_report

SMALL = {"batch_size": 64, "width": 32, "device": "cpu"} | {
    f"{method}.{name}": value
    for method in ("qpt", "cdt")
    for name, value in {"context": 5, "layers": 1, "heads": 2, "lr": 1e-3, "warmup": 50}.items()
}
SMALL |= {"qpt.critic_width": 64, "qpt.critic_lr": 1e-3, "qpt.candidates": 16}


def toy_data(folder):
    """Register the toy as a task; the file of its data."""
    qpt.register_task(tradeoff(0).task())
    folder.mkdir(parents=True, exist_ok=True)
    return str(write(tradeoff(0).dataset(300), folder / "toy.hdf5"))


def main(args=None):
    flags = argparse.ArgumentParser()
    flags.add_argument("--task", default="Tradeoff-0")
    flags.add_argument("--data", help="a file, or embedded:ballcircle; the toy brings its own")
    flags.add_argument("--algorithms", nargs="+", default=["qpt", "cdt", "bc-safe"])
    flags.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    flags.add_argument("--limits", type=float, nargs="+", default=[10, 30])
    flags.add_argument("--steps", type=int, default=500, help="of training, for each method")
    flags.add_argument("--episodes", type=int, default=20, help="at each limit")
    flags.add_argument("--workers", type=int, default=1, help="processes; 0 for this one alone")
    flags.add_argument("--out", type=Path, default=Path("runs/compare-methods"))
    f = flags.parse_args(args)

    data = toy_data(f.out) if f.data is None else f.data
    jobs = grid(
        [f.task],
        f.algorithms,
        seeds=f.seeds,
        limits=f.limits,
        data={f.task: data},
        overrides={"steps": f.steps}
        | {k: v for k, v in SMALL.items() if "." not in k or k.split(".")[0] in f.algorithms},
        episodes=f.episodes,
    )
    bench = run_jobs(jobs, f.out / "runs", local_executor(f.workers), show="lines")
    for key, why in bench.failures.items():
        print(f"failed: {key}: {why}")
    for line in summarize(bench.results):
        cost = "{:.1f} [{:.1f}, {:.1f}]".format(line["cost"], *line["cost_interval"])
        earned = "{:.1f} [{:.1f}, {:.1f}]".format(line["return"], *line["return_interval"])
        print(
            f"{line['label']:<8} limit {line['cost_limit']:<4g} return {earned:<20} cost {cost:<20} {line['verdict']}"
        )
    page = write_report([f.out / "runs"], f.out / "report.html", title=f"Methods on {f.task}")[0]
    print(f"wrote {page}")
    return bench


if __name__ == "__main__":
    main()
