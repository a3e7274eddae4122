"""Write the project's public address everywhere, on the day that it has one.

    python docs/address.py

address.cfg says what the owner decides. From it come the metadata of the package, the address of
the site, the citation, the links and the picture of the README, which lead nowhere on the index's
page while they are relative, the commands that install, and the first cells of the notebooks. While
the file names no repository nothing is written; a second run changes nothing.
"""

import configparser
import json
import pathlib
import re
import sys
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[1]
PICTURES = (".png", ".svg")


def read(root: pathlib.Path = ROOT) -> dict[str, str]:
    """What address.cfg says; "" for what it leaves open."""
    parser = configparser.ConfigParser()
    parser.read(root / "address.cfg", encoding="utf-8")
    return {key: value.rstrip("/") for key, value in parser["address"].items()}


def prefixes(address: dict[str, str]) -> tuple[str, str]:
    """What stands before a file's path in a link to it, and in that of a picture."""
    return f"{address['repository']}/blob/main/", f"{address['repository']}/raw/main/"


def relative(text: str, root: pathlib.Path = ROOT) -> str:
    """A page with links as they were: the site makes its own of them."""
    address = read(root)
    for prefix in prefixes(address) if address["repository"] else ():
        text = text.replace(f"]({prefix}", "](")
    return text


def readme(text: str, address: dict[str, str]) -> str:
    """Links to files of the repository become absolute."""
    page, picture = prefixes(address)

    def absolute(link: re.Match) -> str:
        return f"]({picture if link[1].endswith(PICTURES) else page}{link[1]})"

    return installed(re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", absolute, text), address)


def installed(text: str, address: dict[str, str]) -> str:
    """Commands install from the index."""
    text = re.sub(r"'/path/to/(?:this|the)/clone\[", f"'{address['name']}[", text)
    return text.replace("project, install the clone with", "project, install it with")


def first_cell(text: str, address: dict[str, str]) -> str:
    """The cell of a notebook that installs, or the script that has it."""
    text = re.sub(
        r"# From the package index once kmp is published there\..*\n#   pip .*\n", "", text
    )
    return text.replace('"kmp[', f'"{address["name"]}[')


def notebook(text: str, address: dict[str, str]) -> str:
    """The first cell of a notebook; what is stored otherwise stays."""
    stored = json.loads(text)
    for cell in stored["cells"]:
        cell["source"] = first_cell("".join(cell["source"]), address).splitlines(keepends=True)
    return json.dumps(stored, indent=1, ensure_ascii=False) + "\n"


def metadata(text: str, address: dict[str, str]) -> str:
    """setup.cfg: the addresses, the name, and the extras that name the package."""
    page = prefixes(address)[0]
    urls = {
        "Source": address["repository"],
        "Documentation": address["site"] or f"{page}docs/overview.md",
        "Changelog": f"{page}CHANGELOG.md",
        "Issues": f"{address['repository']}/issues",
    }
    lines = "".join(f"    {key} = {value}\n" for key, value in urls.items())
    text = re.sub(r"project_urls =\n(?:    .*\n)+", "", text)
    text = text.replace("keywords =\n", f"project_urls =\n{lines}keywords =\n", 1)
    text = re.sub(r"^name = .*$", f"name = {address['name']}", text, count=1, flags=re.MULTILINE)
    return re.sub(r"^    kmp\[", f"    {address['name']}[", text, flags=re.MULTILINE)


def site(text: str, address: dict[str, str]) -> str:
    """mkdocs.yml: where the site is, and where the repository."""
    lines = f"site_url: {address['site']}\n" if address["site"] else ""
    lines += f"repo_url: {address['repository']}\n"
    text = re.sub(r"^(?:site_url|repo_url): .*\n", "", text, flags=re.MULTILINE)
    return text.replace("docs_dir:", f"{lines}docs_dir:", 1)


def citation(text: str, address: dict[str, str]) -> str:
    """CITATION.cff: the repository and the authors."""
    text = re.sub(r"^repository-code: .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"  - name: .*", f"  - name: {address['authors']}", text)
    return text.replace("authors:", f"repository-code: {address['repository']}\nauthors:", 1)


def releasing(text: str, address: dict[str, str]) -> str:
    """docs/releasing.md: what was to do before the first release is done."""
    return text.partition("\n## Before the first one")[0]


def places(root: pathlib.Path) -> dict[pathlib.Path, Callable[[str, dict[str, str]], str]]:
    """Each file that has the address, and what is done to it."""
    found: dict[pathlib.Path, Callable[[str, dict[str, str]], str]] = {
        root / "README.md": readme,
        root / "setup.cfg": metadata,
        root / "mkdocs.yml": site,
        root / "CITATION.cff": citation,
        root / "docs" / "releasing.md": releasing,
        root / "docs" / "parity.md": installed,
        root / "benchmarks" / "experiments" / "parity.py": installed,
        root / "notebooks" / "from_examples.py": first_cell,
    }
    return found | dict.fromkeys(sorted((root / "notebooks").glob("*.ipynb")), notebook)


def main(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """Write, and return what was changed."""
    address = read(root)
    if not address["repository"]:
        print("address.cfg names no repository yet: nothing was written.")
        return []
    if not re.fullmatch(r"https://[^/\s]+/\S+", address["repository"]):
        sys.exit(f"`repository` in address.cfg must be https://...; it is {address['repository']}")
    changed = []
    for path, edit in places(root).items():
        before = path.read_text(encoding="utf-8")
        after = edit(before, address)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path)
            print(path.relative_to(root))
    return changed


if __name__ == "__main__":
    main()
