"""A page as one file that opens without a network: HTML, style, scripts and data from `assets/`."""

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from rungs.common import disk

ASSETS = Path(__file__).parent / "assets"
_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}


def assemble(
    html: str,
    *,
    styles: Sequence[str],
    scripts: Sequence[str],
    data: str,
    library: str = "",
    connects: bool = False,
) -> str:
    """Return a page. Its content security policy allows its own scripts and styles, by hash.

    Args:
        html: the asset with a {{NAME}} for each part: POLICY, STYLE, LIBRARY, SCRIPT, DATA.
        styles: names of assets.
        scripts: names of assets without .js, in order of execution; they share one scope.
        data: JSON.
        library: a script to run before them.
        connects: whether the page may ask its server."""
    script = "\n".join(asset(f"{name}.js") for name in scripts)
    script = f'"use strict";\n(() => {{\n{script}\n}})();'
    style = "".join(map(asset, styles))
    server = "'self'" if connects else "'none'"
    policy = [
        "default-src 'none'",
        f"script-src {_hash(library)} {_hash(script)}",
        f"style-src {_hash(style)}",
        f"connect-src {server}",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    parts = {
        "POLICY": "; ".join(policy),
        "STYLE": style,
        "LIBRARY": library,
        "SCRIPT": script,
        # without characters that could end its script element
        "DATA": data.translate(_ESCAPED),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], asset(html))


def write(path: Path, page: str) -> None:
    """Write a page atomically; raises RunFailure."""
    content = page.encode()
    with disk.writing(path, "the page", len(content)):
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.replace_file(path, content)


def asset(name: str) -> str:
    """Return the text of a file in `assets/`."""
    return (ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
