"""What MkDocs does not do by itself: pages from the top, links out of docs/, llms.txt, plain Markdown."""

import inspect
import posixpath
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, is_typeddict

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
FROM_THE_TOP = {"changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md"}
"""Pages of the site, and the files that they are made of."""

_DIRECTIVE = re.compile(r"(?m)^::: (\S+)(?:\n {4}.*)*$")
_LINK_OR_CODE = re.compile(r"(?ms)^ *```.*?^ *```$|(!?\[[^\]]*\])\(([^)\s]+)\)|`[^`\n]+`")
_log = get_plugin_logger("links")


def on_config(config: Any) -> None:
    """Put the pages of a folder where the table of contents says ``folder/*``, by their names."""

    def expanded(item: Any) -> list[Any]:
        if isinstance(item, str) and item.endswith("/*"):
            pages = sorted(Path(config.docs_dir, item).parent.glob("*.md"))
            return [str(page.relative_to(config.docs_dir)) for page in pages]
        if isinstance(item, dict):
            [(title, inner)] = item.items()
            if isinstance(inner, list):
                within = [each for one in inner for each in expanded(one)]
                return [{title: within}] if within else []
        return [item]

    config.nav = [each for item in config.nav for each in expanded(item)]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made of files at the repository's top."""
    for page, source in FROM_THE_TOP.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links that lead out of docs/ lead to the repository, or nowhere if nobody has told where it is."""
    uri = page.file.src_uri
    source = FROM_THE_TOP.get(uri, f"docs/{uri}")

    def rewritten(link: re.Match[str]) -> str:
        label, target = link.groups()
        if label is None:
            return link[0]
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return link[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        inside = {top: name for name, top in FROM_THE_TOP.items()}.get(place)
        if place.startswith("docs/"):
            inside = place.removeprefix("docs/")
        if inside is not None:
            relative = posixpath.relpath(inside, posixpath.dirname(uri) or ".")
            return f"{label}({relative}{'#' * bool(anchor)}{anchor})"
        if not (ROOT / place).exists():
            _log.warning("%s: %s leads to %s, which does not exist", source, link[0], place)
        if config.extra["repository"]:
            return f"{label}({config.extra['repository']}/blob/HEAD/{place}{'#' * bool(anchor)}{anchor})"
        name = label.strip("[]")
        return name if place.endswith(name.strip("`/")) else f"{name} (`{place}`)"

    text = _LINK_OR_CODE.sub(rewritten, markdown)
    page.meta["plain"] = text
    return text


def on_post_build(config: Any) -> None:
    """Write llms.txt, and beside each page of the site the Markdown that it was made of."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for section, pages in _sections(config.nav_pages):
        lines += ["", f"## {section}", ""]
        for page in pages:
            copy = site / page.file.src_uri
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(_DIRECTIVE.sub(lambda directive: _described(directive[1]), page.meta["plain"]))
            lines.append(f"- [{page.title}]({page.file.src_uri})")
    (site / "llms.txt").write_text("\n".join(lines) + "\n")


def on_nav(nav: Any, config: Any, files: Any) -> None:
    """Keep the table of contents for llms.txt."""
    config.nav_pages = nav


def _described(name: str) -> str:
    """Return what the API reference says of a name, as Markdown."""
    found = pydoc.locate(name)
    parts = [(name, found)]
    for member, value in vars(found).items() if inspect.isclass(found) else ():
        if not member.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)):
            parts.append((f"{name}.{member}", getattr(found, member)))
    return "\n\n".join(
        f"## `{title}`\n\n```text\n{title}{_signature(value)}\n```\n\n{inspect.getdoc(value) or ''}"
        for title, value in parts
    )


def _signature(found: Any) -> str:
    return str(inspect.signature(found)) if callable(found) and not is_typeddict(found) else ""


def _sections(nav: Any) -> Iterator[tuple[str, list[Any]]]:
    for section in nav.items:
        yield section.title, [page for child in section.children for page in child.children or [child]]
