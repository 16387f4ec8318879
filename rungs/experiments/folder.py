"""An experiment's folder: finding it, its paths, its config and its lock."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rungs.common import disk, strict_json
from rungs.common.errors import UserError, did_you_mean
from rungs.experiments.experiment import Experiment
from rungs.experiments.kinds import DEFAULT_KIND, KINDS

EXPERIMENTS = Path("experiments")
CONFIG = "experiment.json"


@dataclass(frozen=True)
class ExperimentFolder:
    """The folder of an experiment and the paths in it."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / CONFIG

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @classmethod
    def find(cls, name: str) -> "ExperimentFolder":
        """Return the folder with this name: a path, or a folder in `experiments/`. Raises UserError
        if there is none."""
        for path in (Path(name), EXPERIMENTS / name):
            if (path / CONFIG).is_file():
                return cls(path)
        known = sorted(path.parent.name for path in EXPERIMENTS.glob(f"*/{CONFIG}"))
        otherwise = f"an experiment's folder has an {CONFIG}"
        raise UserError(f"{name}: no such experiment; {did_you_mean(name, known, otherwise)}")

    def load(self) -> Experiment:
        """Read and check `experiment.json`. Raises UserError with a line per error."""
        text = strict_json.read_text(self.config)
        kind = DEFAULT_KIND
        with contextlib.suppress(ValueError, AttributeError):  # reported below
            kind = json.loads(text).get("kind", kind)
        if kind not in KINDS:
            known = did_you_mean(str(kind), KINDS, f"there are {', '.join(KINDS)}")
            raise UserError(f"{self.config}: kind: no experiment is called {kind!r}; {known}")
        return strict_json.parse(text, self.config, KINDS[kind])

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the experiment's lock, which also ends with the process. A UserError in the block
        leaves no lock file behind. Raises UserError if another process holds the lock."""
        path = self.path / "experiment.lock"
        is_new = not path.exists()
        try:
            with disk.lock_file(path):
                yield
        except BlockingIOError:
            raise UserError(f"{self.path}: another process conducts it; wait or stop it") from None
        except UserError:
            if is_new:
                path.unlink(missing_ok=True)
            raise
