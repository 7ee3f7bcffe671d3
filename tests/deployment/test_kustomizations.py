"""The kustomizations: they list what is there and nothing else, and every patch hits what it is for."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployment.files import DEPLOY, KUBERNETES, ROOT, container
from tests.deployment.rendering import (
    OVERLAYS,
    apply_operation,
    operations,
    overlay,
    read_kustomization,
    read_manifests,
    render,
)

FOLDERS = ["base", "dashboard", *(f"overlays/{name}" for name in OVERLAYS)]


def listed_files(kustomization: dict[str, Any]) -> Iterator[str]:
    yield from (resource for resource in kustomization["resources"] if not resource.startswith(".."))
    yield from (patch["path"] for patch in kustomization.get("patches", []) if "path" in patch)
    for generator in kustomization.get("configMapGenerator", []):
        yield from generator["files"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_is_listed_and_every_listed_file_exists(folder: str) -> None:
    path = KUBERNETES / folder
    there = {file.name for file in path.iterdir()} - {"kustomization.yaml"}
    assert set(listed_files(read_kustomization(path))) == there


def test_there_are_no_other_folders() -> None:
    found = {str(file.parent.relative_to(KUBERNETES)) for file in KUBERNETES.rglob("*") if file.is_file()}
    assert found == set(FOLDERS)


@pytest.mark.parametrize(
    ("folder", "name", "files"),
    [
        ("nats", "nats-permissions", {"permissions.conf"}),
        ("postgres", "postgres-roles", {"roles.sql", "logins.sql", "own-database.sql"}),
    ],
)
def test_files_of_the_servers_become_config_maps(folder: str, name: str, files: set[str]) -> None:
    rendered = render(DEPLOY / folder)
    assert rendered.keys() == {("ConfigMap", name)}
    data = rendered["ConfigMap", name]["data"]
    assert data == {file: (DEPLOY / folder / file).read_text() for file in files}
    assert rendered["ConfigMap", name]["metadata"]["namespace"] == "jsworker"


@pytest.mark.parametrize("folder", FOLDERS)
def test_kustomizations_say_what_they_are(folder: str) -> None:
    kustomization = read_kustomization(KUBERNETES / folder)
    assert kustomization["apiVersion"] == "kustomize.config.k8s.io/v1beta1"
    assert kustomization["kind"] == "Kustomization"
    assert kustomization["namespace"] == "jsworker"
    if folder.startswith("overlays/"):
        assert kustomization["resources"][0] == "../../base"


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_patch_changes_its_target(name: str) -> None:
    folder = KUBERNETES / "overlays" / name
    base = render(KUBERNETES / "base")
    for patch in read_kustomization(folder)["patches"]:
        manifest = base[patch["target"]["kind"], patch["target"]["name"]]
        for operation in operations(folder, patch):
            before = yaml.safe_dump(manifest)
            apply_operation(manifest, operation)
            assert (yaml.safe_dump(manifest) != before) is (operation["op"] != "test"), operation


@pytest.mark.parametrize("name", OVERLAYS)
def test_everything_is_in_the_namespace_that_demands_restricted_pods(name: str) -> None:
    rendered = overlay(name)
    namespace = rendered["Namespace", "jsworker"]["metadata"]
    assert namespace["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    others = [manifest for key, manifest in rendered.items() if key[0] != "Namespace"]
    assert {manifest["metadata"]["namespace"] for manifest in others} == {namespace["name"]}


@pytest.mark.parametrize("name", OVERLAYS)
def test_everything_has_a_name_that_tells_whose_it_is(name: str) -> None:
    for manifest in overlay(name).values():
        assert manifest["metadata"]["labels"]["app.kubernetes.io/name"]


def test_no_file_holds_a_secret() -> None:
    files: list[Path] = [file for file in KUBERNETES.parent.rglob("*.yaml") if "-patch" not in file.name]
    kinds = {
        manifest["kind"]
        for file in files
        for manifest in read_manifests(file)
        if manifest and "kind" in manifest
    }
    assert "Secret" not in kinds
    assert "StatefulSet" in kinds


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ({"op": "add", "path": "/a~1b/-", "value": 3}, {"a/b": [1, 2, 3]}),
        ({"op": "add", "path": "/a~1b/0", "value": 3}, {"a/b": [3, 1, 2]}),
        ({"op": "replace", "path": "/a~1b/1", "value": 3}, {"a/b": [1, 3]}),
        ({"op": "remove", "path": "/a~1b/0"}, {"a/b": [2]}),
        ({"op": "add", "path": "/c", "value": 3}, {"a/b": [1, 2], "c": 3}),
    ],
)
def test_operations_of_patches(operation: dict[str, Any], expected: dict[str, Any]) -> None:
    document = {"a/b": [1, 2]}
    apply_operation(document, operation)
    assert document == expected


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "test", "path": "/a/0", "value": 2},
        {"op": "replace", "path": "/b", "value": 2},
        {"op": "remove", "path": "/a/1"},
        {"op": "move", "path": "/a"},
    ],
)
def test_operations_that_do_not_fit_are_refused(operation: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, LookupError)):
        apply_operation({"a": [1]}, operation)


def test_the_overlay_that_the_page_of_the_dashboard_shows_changes_what_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs/operate/dashboard.md").read_text()
    [(name, written)] = re.findall(r'(?ms)^```yaml title="deploy/kubernetes/([^"]*)"\n(.*?)^```', page)
    shutil.copytree(KUBERNETES, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(written)
    rendered = render((tmp_path / name).parent)
    one = container(rendered["Deployment", "jsworker-dashboard"])
    assert one["image"] == "registry.example.com/my-jobs:0.1.0"
    ingress = rendered["Ingress", "jsworker-dashboard"]["spec"]
    [host] = ingress["tls"][0]["hosts"]
    assert ingress["rules"][0]["host"] == host
    assert [each for each in one["args"] if "--allow-host" in each] == [f"--allow-host={host}"]
    assert f"secret tls {ingress['tls'][0]['secretName']} " in page
