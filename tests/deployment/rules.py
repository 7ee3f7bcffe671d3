"""The alerts as a plain file for Prometheus, beside their tests: ``python -m tests.deployment.rules FOLDER``.

Then ``promtool check rules FOLDER/rules.yaml`` and ``promtool test rules FOLDER/rules.test.yaml``.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.deployment.files import DEPLOY, KUBERNETES, read_yaml

TESTS = DEPLOY / "prometheus/rules.test.yaml"


def groups() -> list[dict[str, Any]]:
    manifest = read_yaml((KUBERNETES / "overlays/scale-out/rules.yaml").read_text())
    found: list[dict[str, Any]] = manifest["spec"]["groups"]
    return found


def alerts() -> dict[str, dict[str, Any]]:
    """The alerts by name."""
    found = [rule for group in groups() for rule in group["rules"]]
    by_name = {rule["alert"]: rule for rule in found}
    assert len(by_name) == len(found), "an alert's name stands twice"
    return by_name


def write_rules(folder: Path) -> None:
    """Write the rules and their tests into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": groups()}, sort_keys=False))
    shutil.copy(TESTS, folder / TESTS.name)


if __name__ == "__main__":
    write_rules(Path(sys.argv[1]))
