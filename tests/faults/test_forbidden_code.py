"""Rungs never runs what it reads, and uses the network only through Hugging Face's hub library."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("*.py", "rungs/**/*.py", "smoke_tests/*.py")
CODE_CHILD = ROOT / "rungs/tasks/code_child.py"
"""The program in which a user's verifier, environment or tools run, with `--trust-verifier`."""
PRODUCT = sorted(path for folder in FOLDERS for path in ROOT.glob(folder))
ANY = "what was read"
FORBIDDEN_MODULES = {
    ANY,
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
    "code",
    "runpy",
    "ftplib",
    "http",
    "httpx",
    "requests",
    "socketserver",
    "telnetlib",
    "urllib",
    "urllib3",
    "aiohttp",
    "xmlrpc",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load"}
FORBIDDEN_KEYWORDS = {"allow_pickle": {False}, "shell": {False}, "trust_remote_code": {False}}
"""Each with the values that are allowed."""


def problems(source: str) -> list[str]:
    """Return a line for each forbidden thing in a file."""
    return list(_problems(ast.parse(source)))


def _problems(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        for module in _imported(node):
            if module.split(".")[0] in FORBIDDEN_MODULES:
                yield f"line {getattr(node, 'lineno', 0)}: imports {module}"
        if isinstance(node, ast.Call):
            name = _called(node)
            if name in FORBIDDEN_CALLS or name.endswith((".load_module", ".exec_module")):
                yield f"line {node.lineno}: calls {name}"
            for keyword in node.keywords:
                if keyword.arg in FORBIDDEN_KEYWORDS and not _is_allowed(keyword):
                    yield f"line {node.lineno}: gives {keyword.arg} to {name}"
        if isinstance(node, ast.Constant) and node.value == "trust_remote_code":
            yield f"line {node.lineno}: names trust_remote_code"


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(alias.name for alias in node.names)]
    if isinstance(node, ast.Call) and _called(node).endswith("import_module"):
        name = node.args[0]
        prefix = name.values[0] if isinstance(name, ast.JoinedStr) else name  # f"rungs.{part}"
        return [ast.literal_eval(prefix) if isinstance(prefix, ast.Constant) else ANY]
    return []


def _called(node: ast.Call) -> str:
    """Return the dotted name of a called function; of others than names, the last part."""
    parts, function = [], node.func
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    parts += [function.id] if isinstance(function, ast.Name) else [""]
    return ".".join(reversed(parts))


def _is_allowed(keyword: ast.keyword) -> bool:
    values = FORBIDDEN_KEYWORDS[keyword.arg or ""]
    return isinstance(keyword.value, ast.Constant) and keyword.value.value in values


def test_no_code_is_run_that_was_read() -> None:
    found = {path: lines for path in PRODUCT if (lines := [*_problems(tree_of(path))])}
    [line] = found.pop(ROOT / "install_uv.py")  # runs before there is a library for it
    assert line.endswith("imports urllib.request")
    lines = found.pop(ROOT / "rungs/report/run_page.py")  # listens on this machine's own address
    assert [line.split(": ")[1] for line in lines] == [
        "imports http",
        "imports http.server",
    ]
    lines = found.pop(ROOT / "rungs/integrations/hooks.py")  # of the command line
    assert [line.split(": ")[1] for line in lines] == [
        "imports urllib.parse",
        "imports urllib.request",
    ]
    [line] = found.pop(ROOT / "rungs/model/kernels/splash_attention.py")  # a module of JAX
    assert line.endswith("calls spec.loader.exec_module")
    [line] = found.pop(ROOT / "rungs/tasks/openenv_adapter.py")  # runs with --trust-verifier only
    assert line.endswith(f"imports {ANY}")
    assert [line.split(": ")[1] for line in found.pop(CODE_CHILD)] == [
        "calls exec",
        "calls compile",
    ]
    assert found == {}


def test_nothing_imports_the_program_that_runs_users_code() -> None:
    importers = [
        path for path in PRODUCT if any(CODE_CHILD.stem in name for name in imported_names(path))
    ]
    assert importers == []
    users = [path.name for path in PRODUCT if f"{CODE_CHILD.stem}.py" in texts_of(path)]
    assert users == ["code_process.py"]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def texts_of(path: Path) -> set[str]:
    """Return the texts in a file's code."""
    nodes = ast.walk(tree_of(path))
    return {
        node.value for node in nodes if isinstance(node, ast.Constant) and type(node.value) is str
    }


@functools.cache
def imported_names(path: Path) -> set[str]:
    return {name for node in ast.walk(tree_of(path)) for name in _imported(node)}


def test_one_file_asks_the_hub_and_others_take_what_does_not_use_the_network() -> None:
    users = {path.name: path for path in PRODUCT if "huggingface_hub" in imported_modules(path)}
    users.pop("hub.py")
    imports = {
        name: [
            ast.unparse(node)
            for node in ast.walk(tree_of(path))
            if any("huggingface_hub" in imported for imported in _imported(node))
        ]
        for name, path in users.items()
    }
    assert imports == {
        "model_card.py": ["from huggingface_hub import EvalResult, ModelCardData"],
        "weights_file.py": ["from huggingface_hub import split_state_dict_into_shards_factory"],
    }


def imported_modules(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_names(path)}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as harmless",
        "from pickle import loads",
        "def late():\n    from urllib.request import urlopen",
        "import importlib\nimportlib.import_module('marshal')",
        "import importlib\nimportlib.import_module(f'marshal{x}')",
        "eval('1')",
        "exec(text)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=wanted)",
        "torch.load(path)",
        "subprocess.run(text, shell=True)",
        "Model.from_pretrained(name, trust_remote_code=True)",
        "Model.from_pretrained(name, **{'trust_remote_code': True})",
        "__import__('os').system('x')",
    ],
)
def test_forbidden_code_is_found(source: str) -> None:
    assert problems(source)
