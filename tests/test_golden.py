"""Golden traces: tiny runs of everything that computes still give the stored numbers. See CONTRIBUTING.md."""

from __future__ import annotations

import copy
import json
import math

import pytest

from golden import runs, traces
from golden.names import RENAMED

CDT: traces.Trace = {
    "metrics": {"loss": [3.0, 2.0, -1.0, 0.0]},
    "weights": {"critics": [4, 1.0, 3.0, 0.3], "values": [2, 1.0, 4.0, 0.4]},
    "decisions": {"action 0": [0.5, -0.5], "chosen": [1, 2]},
}


@pytest.mark.parametrize("name", runs.RUNS)
def test_the_numbers_are_the_stored_ones(name: str) -> None:
    if reason := runs.missing(name):
        pytest.skip(reason)
    found = traces.differences(name, traces.stored(name), runs.RUNS[name]())
    if found:
        pytest.fail(traces.report(name, found) + traces.other_versions(), pytrace=False)


@pytest.mark.parametrize("method", runs.method_names())
def test_every_method_has_the_traces_of_its_presets(method: str) -> None:
    named = {fit.preset for fit in runs.FITS.values() if fit.method == method and not fit.changes}
    assert named >= {"default", "paper"} | ({"transformer"} if method == "qpt" else set())
    both = {fit.changes.get("variant") for fit in runs.FITS.values() if fit.method == method}
    variants = [getattr(runs.preset_config(method, preset), "variant", None) for preset in named]
    assert variants == [None] * len(named) or "reference" in both | set(variants)


def test_the_files_are_those_of_the_runs_and_small() -> None:
    files = set(traces.FOLDER.rglob("*.json")) - {traces.MADE_WITH}
    assert files == {traces.path_of(name) for name in runs.RUNS}
    assert sum(path.stat().st_size for path in files) <= traces.MOST_BYTES


def test_every_new_name_stands_for_a_stored_one() -> None:
    assert traces.unused(RENAMED, {name: traces.stored(name) for name in runs.RUNS}) == []


def test_the_decisions_of_qpt_show_every_case() -> None:
    """Else a change of the rule may go unnoticed: give the settings in `FITS` another offset."""
    stored = traces.stored("qpt/default")
    own, shield, best = (stored[f"decisions, {what}"] for what in ("own", "shield", "constrained"))
    rows = list(zip(own["action 0"], shield["action 0"], best["action 0"], shield["fallback"], strict=True))
    assert any(mine == kept != other and not failed for mine, kept, other, failed in rows)  # the shield keeps its own
    assert any(mine != kept and not failed for mine, kept, _, failed in rows)  # or finds another
    assert any(mine != kept and failed for mine, kept, _, failed in rows)  # or none passes


def changed(section: str, key: str, place: int, value: float) -> traces.Trace:
    other = copy.deepcopy(CDT)
    other[section][key][place] = value
    return other


def test_the_first_step_that_differs_is_named_with_its_size() -> None:
    other = changed("metrics", "loss", 2, -1.002)
    other["decisions"]["chosen"][1] = 1
    found = traces.differences("cdt/default", CDT, other, {})
    assert traces.report("cdt/default", found) == (
        "cdt/default differs from its golden trace:\n"
        "  metrics: loss at step 3: -1 stored, -1.002 now, 2.0e-03 apart, not 3.0e-05\n"
        "  decisions: chosen at place 2: 2 stored, 1 now"
    )


@pytest.mark.parametrize(
    ("section", "key", "place", "allowed"),
    [
        ("metrics", "loss", 0, 2e-5 * 3),
        ("metrics", "loss", 3, 2e-5 * 1.5),  # for values near 0 the mean size counts
        ("decisions", "action 0", 1, 1e-4 * 0.5),
        ("weights", "values", 1, 2e-5 * 4),  # a sum is compared relative to the norm
        ("weights", "values", 2, 1e-6 * 4),
        ("weights", "values", 3, 1e-5 * 0.4 + 5e-7 * 4),
    ],
)
def test_only_differences_beyond_the_tolerance_are_reported(section: str, key: str, place: int, allowed: float) -> None:
    value = CDT[section][key][place]
    for near in (value + 0.9 * allowed, value - 0.9 * allowed):
        other = changed(section, key, place, near)
        assert traces.differences("cdt/default", CDT, other, {}) == []
        assert traces.differences("cdt/default", CDT, other, {}, share=0.5)
    for far in (value + 1.1 * allowed, value - 1.1 * allowed, float("nan")):
        other = changed(section, key, place, far)
        found = traces.differences("cdt/default", CDT, other, {})
        assert [(each.section, each.key, each.place) for each in found] == [(section, key, place + 1)]
        assert bool(traces.differences("oasis/default", CDT, other, {})) == math.isnan(far)  # OASIS may differ more


def test_what_is_missing_is_noticed_and_what_is_new_is_not() -> None:
    other = copy.deepcopy(CDT)
    other["metrics"]["total"] = other["metrics"].pop("loss")
    assert list(map(str, traces.differences("cdt/default", CDT, other, {}))) == [
        "metrics: loss: missing; new here: total"
    ]
    other["metrics"]["loss"] = [3.0]
    assert "4 values stored, 1 now" in str(traces.differences("cdt/default", CDT, other, {})[0])
    other["metrics"]["loss"] = CDT["metrics"]["loss"]
    assert traces.differences("cdt/default", CDT, other, {}) == []


def test_names_change_without_the_numbers() -> None:
    other = copy.deepcopy(CDT)
    other["metrics"] = {"total": other["metrics"]["loss"]}
    del other["decisions"]["chosen"]
    names: traces.Names = {("cdt", "metrics", "loss"): "total", ("*", "*", "chosen"): None}
    assert traces.differences("cdt/default", CDT, other, names) == []
    assert len(traces.differences("caps/default", CDT, other, names)) == 1  # the metric is CDT's alone
    other["metrics"]["total"][0] = 4.0
    assert [each.key for each in traces.differences("cdt/default", CDT, other, names)] == ["total"]
    assert traces.unused(names, {"cdt/default": CDT}) == []
    names["cdt", "metrics", "lost"] = "found"
    assert traces.unused(names, {"cdt/default": CDT}) == [("cdt", "metrics", "lost")]


def test_modules_are_split_and_joined_without_the_numbers() -> None:
    other = copy.deepcopy(CDT)
    other["weights"] = {"all": [6, 2.0, 5.0, 0.5]}
    joined: traces.Names = {("*", "weights", "critics"): "all", ("*", "weights", "values"): "all"}
    assert traces.differences("cdt/default", CDT, other, joined) == []
    split = {("*", "weights", part): "all" for part in CDT["weights"]}
    assert traces.differences("cdt/default", other, CDT, split) == []  # type: ignore[arg-type]
    assert traces.unused(split, {"cdt/default": other}) == []  # type: ignore[arg-type]
    other["weights"]["all"][2] = 5.1
    assert len(traces.differences("cdt/default", CDT, other, joined)) == 1


def test_a_file_holds_a_line_for_each_series_and_reads_back() -> None:
    trace: traces.Trace = {"metrics": {"loss": [1 / 3, None, -0.0]}, "counts": {"n": 3, "name": "x"}}
    lines = traces.text(trace).splitlines()
    assert lines == [
        "{",
        ' "metrics": {',
        '  "loss": [0.33333333, null, 0.0]',
        " },",
        ' "counts": {',
        '  "n": 3,',
        '  "name": "x"',
        " }",
        "}",
    ]
    assert traces.differences("x/y", json.loads(traces.text(trace)), trace, {}) == []
