"""The command line. Thin: each command is a module that is imported only when it is asked for."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence

from qpt import __version__
from qpt.errors import QptError

# command: (module, what it does)
COMMANDS: dict[str, tuple[str, str]] = {
    "tasks": ("qpt.cli.tasks", "list the tasks, what is installed and whose data is at hand"),
    "data": ("qpt.cli.data", "info, convert, validate, download, augment: work with data sets"),
    "sims": ("qpt.cli.sims", "install the simulators"),
    "doctor": ("qpt.cli.doctor", "check that every task makes, resets and steps"),
    "collect": ("qpt.cli.collect", "make a data set in a simulator, of a task or of your own"),
    "train": ("qpt.cli.train", "train a policy from logged episodes"),
    "evaluate": ("qpt.cli.evaluate", "run a policy in a simulator at one or more cost limits"),
    "bench": ("qpt.cli.bench", "train and evaluate a grid of tasks, methods and seeds, and compare"),
    "reproduce": ("qpt.cli.reproduce", "the paper's experiments, beside the numbers that it printed"),
    "certify": ("qpt.cli.certify", "show by episodes that the cost limit is kept, or calibrate it"),
    "judge": ("qpt.cli.judge", "estimate return and cost of a policy from logs alone"),
    "select": ("qpt.cli.select", "choose among checkpoints from logs alone"),
    "calibrate": ("qpt.cli.calibrate", "compare what QPT's critics predict with what its episodes bring"),
    "export": ("qpt.cli.export", "write a policy as an ONNX graph, with a model card"),
    "report": ("qpt.cli.report", "one HTML page about runs and comparisons, and their tables"),
    "play": ("qpt.cli.play", "film one episode, with its running return, cost and limit"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `qpt`: returns 0 on success, 1 for an error of the user's data or set-up, 2 for wrong usage."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [a for a in args if a != "--debug"]
    if not args or args[0] in ("-h", "--help"):
        print(_overview())
        return 0 if args else 2
    if args[0] == "--version":
        print(f"qpt {__version__}")
        return 0
    if empty := [a for a in args if not a or (a.startswith("--") and a.endswith("="))]:
        print(f"error: {empty[0] or 'an argument'} is empty; is a variable of the shell not set?", file=sys.stderr)
        return 2
    if args[0] not in COMMANDS:
        print(f"error: there is no command {args[0]!r}; `qpt --help` lists them", file=sys.stderr)
        return 2
    if not debug:  # of a warning too one sentence, without the place in the code
        warnings.formatwarning = lambda message, *_where, **_how: f"warning: {message}\n"
    try:
        module = importlib.import_module(COMMANDS[args[0]][0])
        result = module.main(args[1:])
    except QptError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    except Exception as error:  # a defect of ours: still one sentence, and how to see more
        if debug:
            raise
        print(
            f"error: unexpected {type(error).__name__}: {error} (run again with --debug for the traceback)",
            file=sys.stderr,
        )
        return 1
    return int(result or 0)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items())
    return (
        f"qpt {__version__}: safe offline reinforcement learning\n\n"
        f"usage: qpt COMMAND ... [--debug]\n\n{rows}\n\n"
        "examples:\n"
        "  qpt train --task BallCircle --out runs/ball\n"
        "  qpt evaluate --checkpoint runs/ball --task BallCircle --limits 10 20 40\n\n"
        "`qpt COMMAND --help` explains each; --debug shows the traceback of an error."
    )
