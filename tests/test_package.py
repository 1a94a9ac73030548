"""The package as a whole: public names, cheap imports, one-way layers, and what files promise about each other."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import pytest

import qpt
from helpers import tiny_data
from qpt.algorithms.qpt_config import QPTConfig
from qpt.errors import QptError, require
from qpt.training import TrainConfig, train

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "qpt").rglob("*.py"))


def project() -> dict[str, object]:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert isinstance(found, dict)
    return found


def test_public_names_resolve() -> None:
    for name in qpt.__all__:
        value = getattr(qpt, name)
        if name != "__version__":
            assert getattr(value, "__doc__", None), name
    assert set(qpt.__all__) <= set(dir(qpt))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = qpt.nonsense


@pytest.mark.parametrize("module", ["qpt", "qpt.tasks", "qpt.data", "qpt.cli.tasks", "qpt.cli.doctor"])
def test_cheap_modules_do_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_data_can_be_read_without_torch() -> None:
    code = "import sys, qpt; print(len(qpt.load_dataset('embedded:ballcircle')) > 99, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True False\n"


def test_a_policy_needs_neither_simulators_nor_screens_nor_data(tmp_path: Path) -> None:
    """What a robot has: torch, numpy and the checkpoint."""
    small = QPTConfig(steps=2, batch_size=4, width=8, layers=1, heads=2, context=3, critic_width=8)
    train(TrainConfig(config=small, out=tmp_path / "run", device="cpu", progress=False), tiny_data())
    code = """
import sys
absent = "gymnasium pybullet bullet_safety_gym mujoco safety_gymnasium panda3d metadrive matplotlib rich tyro h5py"
sys.modules.update(dict.fromkeys(absent.split()))  # an import of these fails
import numpy as np
import qpt
policy = qpt.load_policy(sys.argv[1], candidates=3)
policy.reset(2, cost_limits=[1, 5])
for _ in range(4):
    actions = policy.act(np.ones((2, 3)))
    policy.observe([1, 1], [0, 1])
print(actions.shape, policy.spent.tolist())
"""
    given = [sys.executable, "-c", code, tmp_path / "run"]
    done = subprocess.run(given, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(2, 2) [0.0, 4.0]\n"


def test_versions_agree() -> None:
    assert qpt.__version__ == project()["version"] == importlib.metadata.version("qpt")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {qpt.__version__}\n" in citation


def test_package_data_are_there() -> None:
    for name in ("py.typed", "tasks.json", "data/embedded/ballcircle.hdf5"):
        assert resources.files("qpt").joinpath(name).is_file(), name


def test_rooms_import_one_way() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


def test_a_missing_package_names_the_command() -> None:
    with pytest.raises(QptError, match=re.escape("run: pip install 'qpt[plot]'")):
        require("a_package_that_is_not_there", "plot")


def test_every_extra_that_an_error_names_exists() -> None:
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    named = {
        extra for path in SOURCES for extra in re.findall(r'require\("[\w.]+", "([\w-]+)"\)', path.read_text("utf-8"))
    }
    assert {"plot", "parquet", "minari"} <= named <= set(extras)


def test_no_file_is_unpickled() -> None:
    # What a parent tells its own worker, through a private pipe or the user's cluster; nothing else is unpickled.
    names = ("envs/vector.py", "envs/block.py", "collect/workers.py", "experiments/executors.py")
    workers = {ROOT / "src/qpt" / name for name in names}
    banned = re.compile(r"\bimport pickle\b|\bpickle\.load|allow_pickle=True|\btorch\.load\(")
    assert workers <= set(SOURCES)
    for path in set(SOURCES) - workers:
        assert not banned.search(path.read_text("utf-8")), path


def test_nothing_depends_on_the_machine_it_was_written_on() -> None:
    folders = (ROOT / name for name in ("src", "tests", "docs", "benchmarks", "examples"))
    texts = {".py", ".md", ".toml", ".json", ".cff", ".txt", ".yml"}
    files = [*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*") if "_build" not in path.parts)]
    checked = [p for p in files if p.is_file() and (p.suffix in texts or p.name in ("Makefile", "run"))]
    assert len(checked) > 50
    foreign = re.compile(r"(?<![\w.])/(?:work|root|home|tmp|Users)/|\.\./shared")
    for path in checked:
        found = foreign.search(path.read_text("utf-8"))
        assert found is None, f"{path.name}: {found}"


def test_links_between_documents_lead_somewhere() -> None:
    def places(page: Path) -> set[str]:
        """The anchors of a page's headings, as GitHub makes them."""
        heads = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
        return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}

    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        if "_build" in path.parts:
            continue
        prose = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
        for target, place in re.findall(r"\]\(([^)#:\s]*)(?:#([\w-]+))?\)", prose):
            page = path.parent / target if target else path
            assert page.exists(), f"{path.name}: {target}"
            assert not place or page.suffix != ".md" or place in places(page), f"{path.name}: {target}#{place}"


@pytest.mark.slow
def test_the_tour_of_the_readme_works(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cost of the episode:" in done.stdout
