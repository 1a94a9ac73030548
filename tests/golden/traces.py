"""Golden traces as files: how they are written, renamed and compared.

`python -m golden.traces` (`make golden`) makes all of them again. It runs everything twice, the second time with
initial weights that differ in the last digit. If the results differ by more than half of the tolerance, the trace
depends on rounding: the run is named, and no file is written.

The tolerance was chosen from measured differences: with SSE4, AVX2 and AVX-512 instructions (ATEN_CPU_CAPABILITY,
MKL_ENABLE_INSTRUCTIONS, ONEDNN_MAX_CPU_ISA, OPENBLAS_CORETYPE), MKL_CBWR=COMPATIBLE, one and two threads, and initial
weights changed in the last digit, all on one AMD EPYC machine with torch 2.13. The largest differences, relative to the
value or, if larger, the mean of its series (sums: relative to the norm):

              all but OASIS                                OASIS
  metrics     1.4e-6, 5.6e-5 in bcq-lag/default            4.7e-4
  decisions   2.1e-5                                       1.6e-3
  sum         1.2e-6                                       2.1e-3
  norm        1.2e-7                                       5.4e-7
  change      at most 5e-7 of the norm                     1.3e-5 and 5e-7 of the norm
  other       6.2e-6, 3.2e-5 in judgement and selection

Where several candidates are almost equally good, rounding may choose another one. What is chosen is therefore seen in
the action and its values, and `make golden` checks that no choice depends on rounding.
"""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from golden.names import RENAMED

Trace = dict[str, dict[str, Any]]
Names = dict[tuple[str, str, str], str | None]

FOLDER = Path(__file__).parent
MADE_WITH = FOLDER / "made_with.json"
MOST_BYTES = 300_000
DIGITS = 8  # significant ones, one more than a float32 has

# By kind of number, for all runs and for some (by method or by name).
TOLERANCE: dict[str, dict[str, float]] = {
    "*": {"metrics": 2e-5, "decisions": 1e-4, "sum": 2e-5, "norm": 1e-6, "change": 1e-5, "other": 3e-5},
    "oasis": {"metrics": 3e-3, "decisions": 1e-2, "sum": 1e-2, "norm": 5e-6, "change": 1e-4},
    "bcq-lag/default": {"metrics": 3e-4},
    "others/judgement": {"other": 3e-4},
    "others/selection": {"other": 3e-4},
}


# -- files -------------------------------------------------------------------------------------------------------------


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.json"


def stored(name: str) -> Trace:
    found: Trace = json.loads(path_of(name).read_text(encoding="utf-8"))
    return found


def text(trace: Trace) -> str:
    """JSON with a line for each key, so that a difference shows where it is."""
    sections = []
    for section, values in trace.items():
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(_short(value))}" for key, value in values.items())
        sections.append(f" {json.dumps(section)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def _short(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_short(each) for each in value]
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.{DIGITS}g}") + 0.0  # and no -0.0
    return value


def versions() -> dict[str, str]:
    """What the numbers may depend on besides the code."""
    return {"machine": platform.machine()} | {name: version(name) for name in ("torch", "numpy")}


# -- names -------------------------------------------------------------------------------------------------------------


def translated(name: str, trace: Trace, names: Names) -> Trace:
    """The trace with new names for old ones."""
    method = name.split("/")[0]
    result: Trace = {}
    for section, values in trace.items():
        result[section] = {}
        for old, value in values.items():
            rows = [(m, s, old) for m in (method, "*") for s in (section, "*")]
            new = next((names[row] for row in rows if row in names), old)
            if new is None:
                continue
            if section == "weights" and new in result[section]:
                value = _joined(result[section][new], value)
            result[section][new] = value
    return result


def _joined(a: list[float], b: list[float]) -> list[Any]:
    """Number, sum, norm and change of two groups of weights taken together."""
    return [a[0] + b[0], a[1] + b[1], math.hypot(a[2], b[2]), math.hypot(a[3], b[3])]


def unused(names: Names, traces: dict[str, Trace]) -> list[tuple[str, str, str]]:
    """Rows that no stored trace needs. In the row of a module's part the new name is the stored one."""
    seen = {
        (m, s, key)
        for name, trace in traces.items()
        for section, values in trace.items()
        for key in values
        for m in (name.split("/")[0], "*")
        for s in (section, "*")
    }
    return [
        row for row, new in names.items() if row not in seen and not (row[1] == "weights" and (*row[:2], new) in seen)
    ]


# -- comparison --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    section: str
    key: str
    place: int  # in the series, from 1; 0: of the whole
    what: str

    def __str__(self) -> str:
        where = f" at {'step' if self.section == 'metrics' else 'place'} {self.place}" if self.place else ""
        return f"{self.section}: {self.key}{where}: {self.what}"


def differences(
    name: str, expected: Trace, found: Trace, names: Names = RENAMED, share: float = 1.0
) -> list[Difference]:
    """Where the numbers differ by more than this share of the tolerance: the first place of each series.

    Metrics come first, in the order of their steps. New keys are ignored.
    """
    expected, found = translated(name, expected, names), translated(name, found, names)
    result = []
    for section, values in expected.items():
        for key, value in values.items():
            if key in found.get(section, {}):
                result += _compared(name, section, key, value, found[section][key], share)
            else:
                new = [k for k in found.get(section, {}) if k not in values]
                result.append(Difference(section, key, 0, f"missing; new here: {', '.join(new) or 'nothing'}"))
    return sorted(result, key=lambda each: (each.section != "metrics", each.place if each.section == "metrics" else 0))


def _compared(name: str, section: str, key: str, expected: Any, found: Any, share: float) -> Iterator[Difference]:
    one, two = list(_leaves(expected)), list(_leaves(found))
    if len(one) != len(two):
        yield Difference(section, key, 0, f"{len(one)} values stored, {len(two)} now")
        return
    for place, (a, b, most) in enumerate(zip(one, two, allowed(name, section, one), strict=True), 1):
        if isinstance(a, float) and isinstance(b, float | int) and not isinstance(b, bool):
            if not abs(a - b) <= share * most:
                yield Difference(
                    section, key, place, f"{a:.7g} stored, {b:.7g} now, {abs(a - b):.1e} apart, not {most:.1e}"
                )
                return
        elif a != b:
            yield Difference(section, key, place, f"{a} stored, {b} now")
            return


def tolerance(name: str, kind: str) -> float:
    rows = (TOLERANCE.get(key, {}) for key in (name, name.split("/")[0], "*"))
    return next(row[kind] for row in rows if kind in row)


def allowed(name: str, section: str, values: list[Any]) -> list[float]:
    """The largest difference allowed for each of the values."""
    if section == "weights":  # float32 rounds a change at the size of the weights
        _, _, norm, change = values
        size = {"sum": norm, "norm": norm, "change": change}
        most = [tolerance(name, kind) * size[kind] for kind in size]
        return [0.0, *most[:2], most[2] + 5e-7 * norm]
    numbers = [abs(value) for value in values if isinstance(value, float)]
    mean = sum(numbers) / max(len(numbers), 1)  # for values near 0 in a series that crosses it
    kind = section.split(",")[0]
    share = tolerance(name, kind if kind in TOLERANCE["*"] else "other")
    return [share * max(abs(value), mean) if isinstance(value, float) else 0.0 for value in values]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, float) and math.isnan(value):
        yield None
    else:
        yield value


def report(name: str, found: list[Difference], most: int = 8) -> str:
    """The first differences, and how many there are."""
    lines = [f"{name} differs from its golden trace:", *(f"  {each}" for each in found[:most])]
    if len(found) > most:
        lines.append(f"  and {len(found) - most} more")
    return "\n".join(lines)


def other_versions() -> str:
    """For a report: the versions the traces were made with, if they differ from the present ones."""
    made, here = json.loads(MADE_WITH.read_text(encoding="utf-8")), versions()
    return "" if made == here else f"\n  (made with {made}, while this is {here})"


# -- making them -------------------------------------------------------------------------------------------------------


def main() -> int:
    from golden.runs import RUNS, missing

    texts = {}
    for name, run in RUNS.items():
        if reason := missing(name):
            print(f"{name} cannot be made here: {reason}")
            return 1
        trace = run()
        if found := differences(name, trace, run(nudge=True), {}, share=0.5):
            print(report(name, found))
            print("This run depends on the last digit of its initial weights; give it another seed or other settings.")
            return 1
        texts[path_of(name)] = text(trace)
    if (total := sum(len(content.encode()) for content in texts.values())) > MOST_BYTES:
        print(f"The traces take {total} bytes; at most {MOST_BYTES} are allowed.")
        return 1
    texts[MADE_WITH] = json.dumps(versions(), indent=1) + "\n"
    for old in FOLDER.rglob("*.json"):
        if old not in texts:
            old.unlink()
    changed = 0
    for path, content in texts.items():
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
            changed += 1
    print(f"{len(texts)} files of {total / 1000:.0f} kB, {changed} of them changed")
    for row in unused(RENAMED, {name: stored(name) for name in RUNS}):
        print(f"delete the row {row} of names.py: the traces have the new name")
    return 0


if __name__ == "__main__":
    sys.exit(main())
