"""What checkpoints record about tasks, so that a run resumes with the same ones."""

import hashlib
import json
from collections.abc import Sequence

from rungs.checkpointing.manifest import file_checksum
from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import UserError
from rungs.config.task_config import TaskConfig
from rungs.data.dataset import VALIDATION
from rungs.tasks.task import Task, all_of
from rungs.tasks.verifiers.opening import Verifier

Checksums = dict[str, dict[str, str]]
"""The sha256 of each part of a task, by the task's number and name."""


def record_of(
    configs: Sequence[TaskConfig],
    tasks: Sequence[Task],
    verifiers: Sequence[Verifier],
    reference: Weights | None,
) -> Checksums:
    """Return the checksums of files, held-out items and verifiers of tasks, and those of the
    reference of the KL divergence."""
    record: Checksums = {}
    for number, (config, task, verifier) in enumerate(zip(configs, tasks, verifiers, strict=True)):
        parts = {VALIDATION: _items_checksum(task), **task.sha256}
        if verifier.sha256 is not None:
            parts[verifier.name] = verifier.sha256
        record[f"{number} {config.source}"] = parts
    if reference is not None:
        record["reference"] = {reference.path.name: file_checksum(reference.path) or ""}
    return record


def check_same_tasks(before: Checksums, now: Checksums) -> None:
    """Raise UserError if something that a run was started with has changed."""
    for name, parts in now.items():
        for part, checksum in parts.items():
            was = before.get(name, {}).get(part)
            if was != checksum:
                raise UserError(
                    f"task {name}: {part} is not what this run was started with (sha256 {was}, now"
                    f" {checksum}); restore it, or start over with --fresh"
                )


def _items_checksum(task: Task) -> str:
    lines = [[item.prompt, item.answer, item.info] for item in all_of(task.validation)]
    return hashlib.sha256(json.dumps(lines, sort_keys=True).encode()).hexdigest()
