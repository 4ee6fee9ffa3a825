"""Kept rows of `bench.scaling`: only a change of the controller's own sources keeps a rival's row valid."""

from __future__ import annotations

import subprocess
import sys

from bench import scaling, sources

IMPORTED = """
import sys
import sim.baselines.scaling.dynamo, sim.experiments.scaling
print(*(module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)), sep="\\n")
"""


def test_rivals_import_nothing_of_the_controller() -> None:
    told = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True, cwd=scaling.ROOT
    )
    imported = set(told.stdout.split())
    found = [name for name in scaling.CONTROLLER if str(scaling.ROOT / name) in imported]
    assert str(scaling.ROOT / "goodput/sizing.py") in imported
    assert not found


def test_no_simulation_imports_an_actuator() -> None:
    told = subprocess.run(
        [sys.executable, "-c", IMPORTED.replace("sim.experiments.scaling", "sim.experiments.scaling_ours")],
        capture_output=True, text=True, check=True, cwd=scaling.ROOT,
    )  # fmt: skip
    assert str(scaling.ROOT / "goodput/controller.py") in told.stdout
    assert not any(str(scaling.ROOT / name) in told.stdout for name in scaling.LIVE)


def test_the_files_that_rows_depend_on_exist() -> None:
    for name in (*scaling.CONTROLLER, *scaling.PLANNER):
        assert (scaling.ROOT / name).is_file(), name
    for name in scaling.LIVE:
        assert (scaling.ROOT / name).exists(), name
    assert len({scaling.digest(system) for system in (scaling.OURS, scaling.DYNAMO, "HPA")}) == 3
    assert scaling.digest("HPA") == scaling.digest("static")


def test_a_mended_sentence_keeps_rows_and_a_changed_number_does_not() -> None:
    before = sources.code('"""Says."""\n\nLEAST = 3  # of them\n"""Fewest."""\n')
    assert sources.code('"""Says it better."""\nLEAST = 3\n') == before
    assert sources.code('"""Says."""\n\nLEAST = 4  # of them\n"""Fewest."""\n') != before
