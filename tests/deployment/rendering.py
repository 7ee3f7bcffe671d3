"""Kustomizations, read as kustomize does, as far as those of this project go."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from tests.deployment.files import KUBERNETES, read_yaml

Manifest: TypeAlias = dict[str, Any]
Rendered: TypeAlias = dict[tuple[str, str], Manifest]
"""Manifests by kind and name."""

UNDERSTOOD = {
    "apiVersion",
    "kind",
    "namespace",
    "resources",
    "images",
    "configMapGenerator",
    "patches",
}
OVERLAYS = ("single", "scale-out")


def read_kustomization(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = read_yaml((folder / "kustomization.yaml").read_text())
    assert set(content) <= UNDERSTOOD, f"{folder}: {set(content) - UNDERSTOOD} is not understood here"
    return content


def render(folder: Path) -> Rendered:
    """The manifests of a kustomization, with those it builds on."""
    kustomization = read_kustomization(folder)
    rendered: Rendered = {}
    for manifest in _resources(folder, kustomization):
        key = (manifest["kind"], manifest["metadata"]["name"])
        assert key not in rendered, f"{key} twice"
        rendered[key] = manifest
    for patch in kustomization.get("patches", []):
        _patch(rendered, folder, patch)
    for image in kustomization.get("images", []):
        _replace_image(rendered, image)
    for manifest in rendered.values():
        if manifest["kind"] != "Namespace":
            manifest["metadata"]["namespace"] = kustomization["namespace"]
    return rendered


def overlay(name: str) -> Rendered:
    return render(KUBERNETES / "overlays" / name)


def read_manifests(file: Path) -> list[Manifest]:
    return list(yaml.load_all(file.read_text(), Loader=yaml.CSafeLoader))


def operations(folder: Path, patch: Manifest) -> list[Manifest]:
    """The operations of a JSON patch, which stands in the kustomization or in a file beside it."""
    text = patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text()
    found: list[Manifest] = read_yaml(text)
    return found


def _resources(folder: Path, kustomization: Manifest) -> Iterator[Manifest]:
    for resource in kustomization.get("resources", []):
        path = folder / resource
        if path.is_dir():
            yield from render(path).values()
        else:
            yield from read_manifests(path)
    for generator in kustomization.get("configMapGenerator", []):
        yield {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": generator["name"], "labels": generator["options"]["labels"]},
            "data": {file: (folder / file).read_text() for file in generator["files"]},
        }


def _patch(rendered: Rendered, folder: Path, patch: Manifest) -> None:
    target = patch["target"]
    manifest = rendered[target["kind"], target["name"]]
    for operation in operations(folder, patch):
        apply_operation(manifest, operation)


def apply_operation(document: Any, operation: Manifest) -> None:
    """Change a document by one operation of a JSON patch; what it needs must be there."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    place = document
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    key: Any = last if isinstance(place, dict) or last == "-" else int(last)
    match operation["op"]:
        case "test":
            assert place[key] == operation["value"], operation
        case "remove":
            del place[key]
        case "replace":
            assert place[key] is not None, operation
            place[key] = operation["value"]
        case "add" if isinstance(place, list):
            place.insert(len(place) if key == "-" else key, operation["value"])
        case "add":
            place[key] = operation["value"]
        case unknown:
            raise AssertionError(f"{unknown} is not understood here")


def _replace_image(rendered: Rendered, image: Manifest) -> None:
    found = 0
    for manifest in rendered.values():
        template = manifest["spec"].get("template", {}) if "spec" in manifest else {}
        for one in template.get("spec", {}).get("containers", []):
            if one["image"].partition(":")[0] == image["name"]:
                one["image"] = f"{image['newName']}:{image['newTag']}"
                found += 1
    assert found, f"no container has the image {image['name']}"
