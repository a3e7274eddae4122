"""What the site takes from outside docs/: the README, the changelog, scripts and notebooks.

Every page keeps links that work in the repository; here they are turned into the site's own.
"""

import pathlib
import posixpath
import re
import runpy
from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Where pages from outside docs/ stand on the site.
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "license.md",
    "examples/README.md": "examples/index.md",
}
# Pages that the search puts first, as those in messages/: they answer who has seen something.
CURES = ("recompute.md", "several_devices.md")
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?\)")


def uri_of(path: str) -> str:
    """Where a file of the repository stands on the site."""
    if path in MOVED:
        return MOVED[path]
    if path.endswith((".py", ".ipynb")):
        return str(pathlib.PurePosixPath(path).with_suffix(".md"))
    return path.removeprefix("docs/")


def targets(text: str, path: str) -> Iterator[tuple[re.Match[str], str]]:
    """The links of a page to files of the repository, with the files."""
    for link in _LINK.finditer(text):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[2]))
        if (ROOT / target).is_file():
            yield link, target


def linked_sources() -> set[str]:
    """The Python files that a page links to, and all examples."""
    pages = [ROOT / path for path in MOVED] + sorted((ROOT / "docs").rglob("*.md"))
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py")}
    for page in pages:
        path = page.relative_to(ROOT).as_posix()
        found |= {target for _, target in targets(page.read_text(), path)}
    return {path for path in found if path.endswith(".py")}


def source_page(path: str) -> str:
    """A Python file as a page. The search leaves it out: the page of examples describes them."""
    front = "---\nsearch:\n  exclude: true\n---\n"
    return f"{front}# {path}\n\n````python\n{(ROOT / path).read_text()}````\n"


def notebook_files(path: pathlib.Path, config: MkDocsConfig) -> Iterator[File]:
    """A notebook as a page, its pictures, and itself for the download."""
    folder = f"{path.stem}_files"
    text, resources = MarkdownExporter().from_filename(
        str(path), {"output_files_dir": folder, "unique_key": path.stem}
    )
    title, _, rest = text.lstrip().partition("\n")
    text = f"{title}\n\n[:material-download: This notebook]({path.name}){{ .md-button }}\n{rest}"
    text = text.replace("![png](", "![What the cell above has drawn](")
    yield File.generated(config, f"notebooks/{path.stem}.md", content=text)
    yield File.generated(config, f"notebooks/{path.name}", content=path.read_bytes())
    for name, content in resources["outputs"].items():
        yield File.generated(config, f"notebooks/{name}", content=content)


@event_priority(100)
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what stands outside docs/."""
    relative = runpy.run_path(str(ROOT / "docs" / "address.py"))["relative"]
    texts = {uri: relative((ROOT / path).read_text()) for path, uri in MOVED.items()}
    texts["license.md"] = f"# License\n\n```\n{texts['license.md']}```\n"
    texts |= {uri_of(path): source_page(path) for path in linked_sources()}
    for uri, text in texts.items():
        files.append(File.generated(config, uri, content=text))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for file in notebook_files(path, config):
            files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files of the repository at their pages."""
    uri = page.file.src_uri
    if uri.startswith("messages/") or uri in CURES:
        page.meta["search"] = {"boost": 2}
    elif uri == "license.md":
        page.meta["search"] = {"exclude": True}
    path = {uri: path for path, uri in MOVED.items()}.get(uri, f"docs/{uri}")
    if uri.startswith("notebooks/"):
        path = uri
    elif uri.endswith(".md") and (ROOT / uri).with_suffix(".py").is_file():
        return markdown  # a source
    for link, target in reversed(list(targets(markdown, path))):
        there = posixpath.relpath(uri_of(target), posixpath.dirname(uri) or ".")
        if uri.startswith("notebooks/") and target.endswith(".ipynb") and link[0] in markdown[:300]:
            continue  # the download
        markdown = f"{markdown[: link.start()]}]({there}{link[3] or ''}){markdown[link.end() :]}"
    return markdown
