"""Build the docs site: `uv run --group docs docs_site/build.py`.

The pages are the Markdown files of the repository, the executed notebooks, and a reference made
from docstrings. Links between pages are kept, links to other files become plain text.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import rungs
from docs_site.notebook_page import markdown_of

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs_site"
PAGES = SITE / "pages"
IMAGES = ROOT / "docs" / "images"
COMMAND = "uv run --group docs docs_site/build.py"
OUTSIDE_DOCS = {
    "README.md": "index.md",
    "runs/README.md": "ladder.md",
    "records/README.md": "records.md",
    "notebooks/README.md": "notebooks.md",
    "assignment/README.md": "assignment.md",
    "assignment/systems/README.md": "assignment-systems.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
ABOUT_NAMES = "The names of `import rungs`, such as `rungs.load_model`, by where they are defined."
ABOUT_PACKAGES = """All modules, with the docstrings of their functions and classes. To use Rungs
from Python, begin with [the names of `import rungs`](rungs.md); they are made of these packages.
[Architecture](../architecture.md) says how they work together."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def main() -> int:
    """Write the pages, build the site, and return the exit code of the builder."""
    builder = Path(sys.executable).with_name("zensical")
    if not builder.exists():
        sys.exit("error: zensical is not installed; run this with its group: " + COMMAND)
    shutil.rmtree(PAGES, ignore_errors=True)
    pages = sources()
    for source, page in pages.items():
        write(page, with_own_links(text_of(source), source, pages))
    shutil.copytree(IMAGES, PAGES / "images")
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(notebook, PAGES / "notebooks")
    shutil.copy(SITE / "site.css", PAGES)
    write_reference()
    command = [str(builder), "build", "--strict", "--clean", "-f", str(SITE / "zensical.toml")]
    return subprocess.run(command, check=False).returncode


def sources() -> dict[Path, Path]:
    """Return the Markdown files and notebooks of the site, each with its page."""
    docs = ROOT / "docs"
    found = {ROOT / name: Path(page) for name, page in OUTSIDE_DOCS.items()}
    found |= {path: path.relative_to(docs) for path in sorted(docs.rglob("*.md"))}
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    return found | {path: path.relative_to(ROOT).with_suffix(".md") for path in notebooks}


def text_of(source: Path) -> str:
    """Return a page's Markdown, before its links are rewritten."""
    is_notebook = source.suffix == ".ipynb"
    return markdown_of(source) if is_notebook else source.read_text(encoding="utf-8")


def with_own_links(text: str, source: Path, pages: dict[Path, Path]) -> str:
    """Return a text whose links lead to pages of the site. Code blocks stay as they are."""

    def replaced(link: re.Match[str]) -> str:
        mark, label, target = link.groups()
        place, _, anchor = target.partition("#")
        if "://" in target or not place:
            return link[0]
        path = (source.parent / place).resolve()
        page = pages.get(path) or pages.get(path / "README.md")
        if page is None and path.is_relative_to(IMAGES):
            page = "images" / path.relative_to(IMAGES)
        if page is None:
            return label
        address = Path(os.path.relpath(page, pages[source].parent)).as_posix()
        return f"{mark}[{label}]({address}{'#' * bool(anchor)}{anchor})"

    parts = CODE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(replaced, part) for part in parts)


def write_reference() -> None:
    """Write a page of the names in `rungs`, and one for each package, with the docstrings of its
    modules."""
    names = (f"::: {getattr(rungs, name).__module__}.{name}" for name in rungs.__all__)
    write(Path("reference/rungs.md"), "\n\n".join(["# rungs", ABOUT_NAMES, *names]) + "\n")
    lines = [f"# Packages\n\n{ABOUT_PACKAGES}\n"]
    for package in sorted(path for path in (ROOT / "rungs").iterdir() if path.is_dir()):
        modules = [module_name(path) for path in sorted(package.rglob("*.py"))]
        if not modules:
            continue
        page = "\n\n".join([f"# {package.name}", *(f"::: {name}" for name in modules)])
        write(Path("reference") / f"{package.name}.md", page + "\n")
        about = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
        summary = " ".join(about.split("\n\n")[0].split())
        lines.append(f"- [`rungs.{package.name}`]({package.name}.md): {summary}")
    write(Path("reference/index.md"), "\n".join(lines) + "\n")


def module_name(path: Path) -> str:
    """Return the dotted name of a module or package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def write(page: Path, text: str) -> None:
    """Write a page, and the folders that it is in."""
    (PAGES / page).parent.mkdir(parents=True, exist_ok=True)
    (PAGES / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
