"""`qpt collect`: make a dataset of DSRL's kind in a simulator, in two stages."""

from __future__ import annotations

from collections.abc import Sequence

from qpt.collect import learn

USAGE = """usage: qpt collect COMMAND ...

  learn   learn behaviour policies along a task's schedule and keep snapshots that cover the plane of cost and return

`qpt collect COMMAND --help` explains each."""


def main(args: Sequence[str]) -> int:
    if args and args[0] == "learn":
        return learn.main(args[1:], "qpt collect learn")
    print(USAGE)
    return 0 if args and args[0] in ("-h", "--help") else 2
