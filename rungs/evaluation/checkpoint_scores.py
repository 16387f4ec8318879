"""Measure a checkpoint on benchmarks, and record the scores in its run."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rungs.checkpointing import checkpoint_folder, load, published, weights_file
from rungs.common import paths, strict_json
from rungs.common.errors import UserError
from rungs.config.option_values import UNTRAINED_LENGTH
from rungs.data.text.tokenizer import Tokenizer
from rungs.evaluation import harness, scoring
from rungs.parallel.sharding import Layout, create_mesh
from rungs.run import records

_DTYPE = jnp.dtype("float32")


class Measured(NamedTuple):
    """A checkpoint to measure."""

    weights: Path
    tokenizer: Tokenizer
    batch_size: int
    should_stop: Callable[[], bool] = lambda: False
    """Called before each batch of texts; True stops the evaluation."""

    @classmethod
    def find(cls, checkpoint: str, batch_size: int, datasets_dir: Path) -> "Measured":
        """Return the checkpoint to measure; arguments as for `load_tokenizer`."""
        tokenizer = load.load_tokenizer(checkpoint, datasets_dir)
        return cls(checkpoint_folder.find_weights(checkpoint), tokenizer, batch_size)

    def on_choices(self, file: Path, limit: int | None) -> list[records.Evaluation]:
        """Return the accuracy on the multiple-choice items of a file; see `scoring`."""
        items = scoring.read_items(file)[:limit]
        found = scoring.measure_accuracy(items, self._scorer(), self.tokenizer)
        shares = {"accuracy": found.accuracy, "accuracy per character": found.normalized}
        return self._recorded(
            {"task": file.stem, "metric": metric, "items": found.items, **share._asdict()}
            for metric, share in shares.items()
        )

    def on_text(self, file: Path, length: int | None) -> tuple[scoring.TextScore, int]:
        """Return the score of a UTF-8 file, and the tokens of a window: `length`, or that of the
        model's training. Raises UserError if the text is empty, or a window too long."""
        model, train, *_ = weights_file.Weights(self.weights).header
        trained = train and train.sequence_length
        default = min(model.context_length, trained or UNTRAINED_LENGTH)
        if (length or default) > model.context_length:
            raise UserError(
                f"--sequence-length {length}: the model's context_length is {model.context_length}"
            )
        text = strict_json.read_text(file)
        if not text:
            raise UserError(f"{file}: has no text")
        found = scoring.score_text(text, self._scorer(), self.tokenizer, length or default)
        return found, length or default

    def on_tasks(self, tasks: harness.Tasks) -> list[records.Evaluation]:
        """Return the scores on tasks of the lm-evaluation-harness; see `harness`."""
        stops = published.all_stop_tokens(weights_file.Weights(self.weights), self.tokenizer)
        scores = harness.evaluate(
            tasks,
            self._scorer(),
            lambda: load.load_token_generator(self.weights, _DTYPE),  # on one device
            self.tokenizer,
            stops,
            _answers_of(self.weights),
        )
        return self._recorded(score._asdict() for score in scores)

    def _scorer(self) -> scoring.Scorer:
        """Return a scorer on all devices of this host, with weights sharded as in the run."""
        model_config, train, *_ = weights_file.Weights(self.weights).header
        model_config.require_next_token()
        is_split = train is not None and train.sharding is not None and train.sharding.mode != "dp"
        devices = jax.local_devices()
        mesh = create_mesh((len(devices), 1), devices=devices)
        layout = Layout(mesh, "fsdp" if is_split else "dp")
        model = load.load_model(self.weights, layout)
        return scoring.Scorer(model, layout, _DTYPE, self.batch_size, self.should_stop)

    def _recorded(self, scores: Iterable[dict[str, Any]]) -> list[records.Evaluation]:
        """Return scores as evaluations, recorded in the checkpoint's run, if it has one."""
        time, name = records.now(), self.weights.resolve().parent.name
        found = [records.Evaluation(time=time, checkpoint=name, **score) for score in scores]
        if run := records.run_of(self.weights):
            records.append(run, found)
        return found


def _answers_of(weights: Path) -> Path:
    """Return the path, in the user's cache, of the harness's answers for these weights."""
    path = weights.resolve()
    status = path.stat()
    version = f"{path} {status.st_size} {status.st_mtime_ns}"
    name = hashlib.sha256(version.encode()).hexdigest()[:16]
    if (cache := paths.cache_folder()) is None:
        raise UserError("no home folder for the harness's answers; set HOME to a folder")
    return cache / "answers" / name
