"""Where the deployment files are, and what containers read from them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from jsworker.core.settings import Settings, load_settings, unknown_variables

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"

DOWNWARD = {
    "metadata.name": "jsworker-0",
    "metadata.uid": "c2f7b8f0-6c0e-4d9e-9d4e-0a4a0f4ff3f1",
}
"""What Kubernetes puts in for a field of the pod."""


def read_yaml(text: str) -> Any:
    """Return the only document of a text, parsed in C: ten times as fast, and each test process begins so."""
    return yaml.load(text, Loader=yaml.CSafeLoader)


def pod(workload: Mapping[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def container(workload: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = pod(workload)["containers"]
    return found


def own_variables(workload: Mapping[str, Any]) -> dict[str, str]:
    """The variables that a container is given by its pod alone."""
    return {
        entry["name"]: entry.get("value") or DOWNWARD[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container(workload).get("env", [])
    }


def given_variables(rendered: Mapping[tuple[str, str], Any], workload: Mapping[str, Any]) -> dict[str, str]:
    """The variables of a container: of its ConfigMaps, where the last one counts, and of its pod."""
    variables: dict[str, str] = {}
    for source in container(workload)["envFrom"]:
        variables |= rendered["ConfigMap", source["configMapRef"]["name"]]["data"]
    return variables | own_variables(workload)


def settings_from(variables: Mapping[str, str], files: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings as a container with these variables reads them; a secret's file holds its path there."""
    for variable in [name for name in os.environ if name.startswith("JSWORKER_")]:
        monkeypatch.delenv(variable)
    for variable, value in variables.items():
        assert isinstance(value, str), f"{variable} needs quotes"
        if variable.endswith("_FILE"):
            file = files / Path(value).name
            file.write_text(value)
            monkeypatch.setenv(variable, str(file))
        else:
            monkeypatch.setenv(variable, value)
    assert unknown_variables() == []
    return load_settings()
