"""Environments of verifiers and OpenEnv: their own ones where the libraries are installed, and what
is refused."""

import importlib.resources
import importlib.util
import json
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rungs.common.errors import UserError
from rungs.config.reinforce_config import TaskConfig
from rungs.config.run_config import load_reinforcement_run
from rungs.data.build.task_dataset import character_tokenizer
from rungs.data.text.tokenizer import TOKENIZER_FILE
from rungs.reinforcement.environment_check import check_environment
from rungs.reinforcement.policy_learner import reinforcement
from rungs.reinforcement.rerun import replay
from rungs.reinforcement.rollout_files import RolloutFiles, read
from rungs.run.folder import RunFolder
from rungs.tasks.catalog import open_task
from rungs.tasks.environment import Environment, Reply
from rungs.tasks.task import Item
from tests.support import tiny_run
from tests.support.tiny_reinforcement import MODEL, make_reinforcement_run, reinforce

HERE = Path()
ECHO = "openenv:echo_env.server.echo_env_environment:EchoEnvironment"
HANGMAN: dict[str, Any] = {"source": "verifiers:textarena", "settings": {"game": "Hangman-v0"}}
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n—"


def needs(library: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(missing, reason=f"needs `uv run --extra {library}`")


needs_verifiers, needs_openenv = needs("verifiers"), needs("openenv")


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install packages as a user does, so that other processes can import them: a taskset of our
    own, and what `openenv init` writes. nltk finds words even if it can't download its own."""
    packages, home = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("home")
    for name in ("guessing_taskset.py", "demanding_taskset.py", "lock_environment.py"):
        (packages / name).write_text((Path(__file__).parent / name).read_text())
    if importlib.util.find_spec("openenv"):
        template = importlib.resources.files("openenv") / "cli" / "templates" / "openenv_env"
        write_template(Path(str(template)), packages / "echo_env")
    words = home / "nltk_data" / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("dog\napple\nbridge\nelephant")
    link = Path(sysconfig.get_path("purelib")) / f"rungs_test_{os.getpid()}.pth"
    link.write_text(str(packages))
    site.addsitedir(str(packages))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        yield
    link.unlink()


def write_template(template: Path, folder: Path) -> None:
    for path in template.rglob("*.py"):
        text, place = path.read_text(), str(path.relative_to(template))
        for key, value in {"__ENV_NAME__": "echo_env", "__ENV_CLASS_NAME__": "Echo"}.items():
            text, place = text.replace(key, value), place.replace(key, value)
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text)


def config_of(**keys: Any) -> TaskConfig:
    return TaskConfig(**({"train_items": 4, "validation_items": 2} | keys))


Talk = Callable[..., list[Reply]]


@contextmanager
def opened(config: TaskConfig) -> Iterator[tuple[list[Item], Talk]]:
    """Yield training items, and a function that says something about one."""
    task = open_task(config, HERE, trusts=True)

    def talk(item: int, *texts: str) -> list[Reply]:
        with closing(environment.begin(task.train[item], 0)) as episode:
            return [episode.step(text, lambda _: []) for text in texts]

    with Environment(config, task, HERE, trusts=True) as environment:
        yield [task.train[index] for index in range(len(task.train))], talk


@needs_verifiers
def test_a_conversation_of_verifiers_is_paid_at_its_end() -> None:
    with opened(config_of(source="verifiers:guessing-taskset", settings={"highest": 7})) as found:
        items, talk = found
        assert [item.answer for item in items] == ["2", "3", "4", "5"]
        assert {item.prompt for item in items} == {"Guess.\n\nA number from 0 to 7:"}
        first, second, third = talk(3, "2", "6", "5")
        assert (first.texts, first.over, first.verdict.rewards) == (
            ["higher"],
            False,
            {"reward": 0},
        )
        assert (second.texts, second.verdict.rewards) == (["lower"], {"reward": 0})
        assert (third.over, third.verdict.rewards) == (True, {"reward": 1 + 0.5 / 3})
        [failed] = talk(3, "x")
        assert failed.verdict.status == "error"
        assert "invalid literal for int()" in failed.verdict.message


@needs_verifiers
def test_a_game_of_textarena_is_played() -> None:
    with opened(config_of(**HANGMAN)) as (items, talk):
        assert "You are playing Hangman." in items[0].prompt
        [begun] = talk(0, "[z]")
        size = begun.texts[0].count(" C") + 1
        words = (Path.home() / "nltk_data" / "corpora" / "words" / "en-basic").read_text().split()
        *wrong, won = talk(0, *(f"[{word}]" for word in words if len(word) == size))
    assert begun.texts[0].startswith("C00 C01 C02")
    assert all("is not the target word" in reply.texts[0] for reply in wrong if not reply.over)
    assert (won.over, won.verdict.rewards) == (True, {"reward": 1})


@needs_openenv
def test_the_environment_of_openenvs_template_answers() -> None:
    with opened(config_of(source=ECHO)) as (items, talk):
        assert [item.info for item in items] == [{"seed": seed} for seed in (2, 3, 4, 5)]
        assert json.loads(items[0].prompt)["echoed_message"].endswith("environment ready!")
        first, second = talk(0, "Hello", "there!")
        assert json.loads(first.texts[0]) == {"echoed_message": "Hello", "message_length": 5}
        assert (second.over, second.verdict.rewards) == (False, {"reward": pytest.approx(0.6)})


@needs_openenv
def test_actions_of_openenv_are_json() -> None:
    config = config_of(source="openenv:lock_environment:LockEnvironment", settings={"secret": 7})
    with opened(config) as (items, talk):
        assert len({item.prompt for item in items}) == 4
        wrong, missing, shut, done = talk(
            1, "7", '{"dial": 1}', '{"dial": 2, "digit": 6}', '{"dial": 3, "digit": 7}'
        )
    assert wrong.texts == missing.texts == ["error: not an action"]
    assert (json.loads(shut.texts[0])["clicks"], shut.verdict.rewards) == (2, {"reward": 0})
    assert (shut.over, done.over, done.verdict.rewards) == (False, True, {"reward": 1})


@needs_openenv
def test_an_environment_must_begin_as_its_prompt_says() -> None:
    settings = {"secret": 7, "keeps_seed": False}
    config = config_of(source="openenv:lock_environment:LockEnvironment", settings=settings)
    with opened(config) as (_, talk):
        [failed] = talk(0, "7")
    assert failed.verdict.status == "error"
    assert "its first observation is not the prompt" in failed.verdict.message


@pytest.mark.long
@pytest.mark.parametrize(
    "task",
    [
        pytest.param(HANGMAN, marks=needs_verifiers),
        pytest.param({"source": ECHO}, marks=needs_openenv),
    ],
)
def test_a_run_is_replayed_without_asking(
    task: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = {"vocab_size": len(CHARACTERS) + 1, "context_length": 1800}
    tiny_run.write_start(tmp_path / "start", "parity-pairs", **(MODEL | sizes))
    character_tokenizer(CHARACTERS).save(tmp_path / "start" / TOKENIZER_FILE)
    limits = {"train_items": 8, "validation_items": 2, "turn_end": "e", "max_reply_tokens": 40}
    keys = {"tasks": [task | limits], "max_new_tokens": 200, "steps": 2, "checkpoint_interval": 1}
    keys |= {"prompts_per_step": 2, "samples_per_prompt": 2, "validation_samples": 1}
    run = make_reinforcement_run(tmp_path / "run", tmp_path / "start", **keys)
    (run.path / "model.json").write_text(json.dumps(MODEL | sizes))
    assert reinforce(run, trust_verifier=True) == 0
    turns = [turn for one in read(RolloutFiles(run.rollouts).step(1)) for turn in one.turns]
    assert any(turn.reply for turn in turns)
    config, kind = load_reinforcement_run(run.path), reinforcement(trust_verifier=True)
    assert check_environment(run, config, kind)[0].endswith("the same both times")
    monkeypatch.setattr(Environment, "begin", None)
    assert replay(RunFolder(run.path), config, "step-000001", kind) == 0
    assert "the same 4 texts" in capsys.readouterr().out


@needs_verifiers
def test_what_verifiers_needs_and_has_not_here_is_named() -> None:
    settings = {"task": {"judges": [{"id": "reference"}]}}
    with pytest.raises(UserError) as caught:
        open_task(
            config_of(source="verifiers:demanding-taskset", settings=settings), HERE, trusts=True
        )
    assert str(caught.value) == (
        "verifiers:demanding-taskset: can't be used here, as it needs agents besides the model:"
        " critic; judges (models): reference; toolsets (servers): Calculator; a runtime (sandbox):"
        " tests_pass, setup; a container: demanding-taskset; stops or interceptors: is_done"
    )


@needs_verifiers
@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("openenv", {"base_url": "http://127.0.0.1:1"}, "the prompt of a task is no text"),
        ("no-such-taskset", {}, "taskset 'no-such-taskset' not found"),
        ("guessing-taskset", {"lowest": 1}, "lowest"),
        ("guessing-taskset", {"highest": 1}, "has 2 items, so validation_items leaves none"),
    ],
)
def test_what_is_wrong_with_a_taskset_is_told(
    name: str, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        open_task(config_of(source=f"verifiers:{name}", settings=settings), HERE, trusts=True)


@needs_openenv
@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("http://127.0.0.1:8000", "is a server, which can't be used here"),
        ("openenv.core.env_server.mcp_environment:MCPEnvironment", r"calls of tools \(MCP\)"),
        ("echo_env.server.app:No", "has no attribute 'No'"),
    ],
)
def test_what_is_wrong_with_an_environment_of_openenv_is_told(place: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        open_task(config_of(source=f"openenv:{place}"), HERE, trusts=True)


def test_only_a_trusted_library_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(source="verifiers:textarena")
    with pytest.raises(UserError, match="if you trust it, give --trust-verifier"):
        open_task(config, HERE)
    monkeypatch.setitem(sys.modules, "rungs.tasks.verifiers_adapter", None)
    with pytest.raises(UserError, match=r"not installed .*; install it: uv sync --extra verifiers"):
        open_task(config, HERE, trusts=True)
