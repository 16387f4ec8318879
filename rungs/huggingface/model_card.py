"""The model card (`README.md`) of a model on the hub: training data, losses, scores. Metadata:
https://huggingface.co/docs/hub/model-cards"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from rungs.checkpointing.manifest import META_FILE, CheckpointMeta, read_checkpoint
from rungs.common.hub import MAIN
from rungs.common.paths import refuse_link_out
from rungs.config.reinforce_config import ReinforceConfig
from rungs.config.train_config import TrainConfig
from rungs.data.catalog import dataset_folder
from rungs.data.tokens.dataset import TRAIN, DatasetDescription, read_description
from rungs.huggingface.exporting import Export
from rungs.run import records
from rungs.run.folder import RunFolder

CARD_FILE, CHARTS = "README.md", "charts"
_TASK = "text-generation"

Rows = list[tuple[str, str]]


class ModelCard:
    """The card of a checkpoint that is uploaded as a revision of `owner/name`, with a GGUF file of
    the name `gguf` if there is one. `datasets_dir` may still have the datasets that it was trained
    on."""

    def __init__(
        self, name: str, revision: str, export: Export, datasets_dir: Path, gguf: str | None
    ) -> None:
        self._name, self._revision, self._export, self._gguf = name, revision, export, gguf
        header, checkpoint = export.weights.header, export.weights.path.parent
        self._model, self._train, self._origin = header.model, header.train, header.origin
        has_meta = (checkpoint / META_FILE).is_file()
        self._meta: CheckpointMeta | None = read_checkpoint(checkpoint).meta if has_meta else None
        self._run: RunFolder | None = records.run_of(export.weights.path)
        names = self._train.datasets if isinstance(self._train, TrainConfig) else {}
        self._datasets = {
            name: read_description(dataset_folder(name, datasets_dir)) for name in names
        }
        found = records.read(self._run, records.Evaluation) if self._run else []
        latest = {
            (one.task, one.metric, one.few_shot): one
            for one in found
            if one.checkpoint == checkpoint.resolve().name
        }
        self._scores = list(latest.values())

    def write(self, folder: Path) -> None:
        """Write the card and the run's charts into the folder to upload."""
        charts = self._run.charts if self._run else []
        for chart in charts:
            refuse_link_out(chart)
            (folder / CHARTS).mkdir(exist_ok=True)
            shutil.copyfile(chart, folder / CHARTS / chart.name)
        images = [
            f"![{chart.stem.replace('-', ' ')}]({CHARTS}/{chart.name})\n\n" for chart in charts
        ]
        scores = []
        for one in self._scores:
            shots = f", {one.few_shot} examples before each" if one.few_shot else ""
            score = f"{one.with_error} on {one.items:,} items{shots}"
            scores.append((f"{one.task}, {one.metric}", score))
        if isinstance(self._train, ReinforceConfig):
            names = ", ".join(f"`{task.source}`" for task in self._train.tasks)
            data = f"Prompts of the tasks {names}."
        else:
            sources = [(f"`{name}`", self._data_source(name)) for name in self._datasets]
            data = _table(("dataset", "from"), sources)
        sections = {
            "Figures": _table(("figure", "value"), self._figures()),
            "Benchmarks": _table(("benchmark", "score ± standard error (or 95% interval)"), scores),
            "Data": data,
            "Use": self._use_text(),
            "Config": self._config_text(),
            "Charts": "".join(images),
        }
        text = f"---\n{self._metadata().to_yaml()}\n---\n\n# {self._name.partition('/')[2]}\n\n"
        text += f"{self._opening()}\n"
        for title, section in sections.items():
            text += f"\n## {title}\n\n{section.rstrip()}\n" if section else ""
        (folder / CARD_FILE).write_text(text, encoding="utf-8")

    def _metadata(self) -> ModelCardData:
        source = self._origin.source if self._origin else ""
        described = (one for one in self._datasets.values() if one)
        repositories = {name for one in described if (name := _repository(one))}
        return ModelCardData(
            library_name="transformers",
            pipeline_tag=_TASK,
            tags=["rungs", "jax", *(["gguf"] if self._gguf else [])],
            base_model=source if source.count("/") == 1 else None,  # an id on the hub
            datasets=sorted(repositories) or None,
            model_name=self._name if self._scores else None,
            eval_results=[
                EvalResult(_TASK, one.task, one.task, one.metric, one.value) for one in self._scores
            ]
            or None,
        )

    def _opening(self) -> str:
        family = self._export.choice.family.model_type
        text = f"A language model with the architecture `{family}`, trained with Rungs in JAX."
        if self._origin is not None:
            at = f" at commit {self._origin.revision}" if self._origin.revision else ""
            text += f" The training started from `{self._origin.source}`{at}."
        if isinstance(self._train, ReinforceConfig):
            text += " It was trained by reinforcement learning from verifiable rewards."
        return text

    def _figures(self) -> Rows:
        parameters = sum(math.prod(spec.shape) for spec in self._export.specs.values())
        rows = [("parameters", f"{parameters:,}")]
        rows.append(("context length", f"{self._model.context_length:,} tokens"))
        if (meta := self._meta) is None:
            return rows
        rows.append(("steps", f"{meta.global_step + 1:,} of {meta.total_steps:,}"))
        rows.append(("tokens seen", f"{meta.tokens_seen:,}"))
        if meta.pass_at_1 is not None:
            rows.append(("pass@1 on held-out items", f"{meta.pass_at_1:.1%}"))
        elif meta.train_loss is not None:
            rows.append(("training loss of the last step", _loss(meta.train_loss)))
        if meta.validation_loss is not None:
            rows.append(("validation loss", _loss(meta.validation_loss)))
        rows.append(("matmuls in", meta.train.get("compute_dtype", "auto")))
        return rows

    def _data_source(self, dataset: str) -> str:
        """Return the origin of a dataset, as far as known."""
        parts = []
        if description := self._datasets[dataset]:
            source, documents = description.source, description.source.documents
            parts.append(_repository(description) or source.kind)
            parts += [f"commit {source.revision}"] if source.revision else []
            parts += [f"license {documents.license}"] if documents and documents.license else []
            if TRAIN in description.splits:
                parts.append(f"{description.splits[TRAIN].tokens:,} tokens")
        if self._meta is not None and TRAIN in self._meta.datasets.get(dataset, {}):
            parts.append(f"sha256 of the tokens {self._meta.datasets[dataset][TRAIN]}")
        return ", ".join(parts)

    def _use_text(self) -> str:
        is_main = self._revision == MAIN
        argument = "" if is_main else f', revision="{self._revision}"'
        option = "" if is_main else f" --revision {self._revision}"
        text = f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{self._name}"{argument})
tokenizer = AutoTokenizer.from_pretrained("{self._name}"{argument})
```

With Rungs:

```sh
uvx --from rungs-lm rungs pretrained import {self._name} runs/{self._name.partition("/")[2]}{option}
```"""
        if self._gguf:
            text += f"""

With llama.cpp:

```sh
llama-cli -hf {self._name} -hff {self._gguf}
```"""
        return text

    def _config_text(self) -> str:
        configs: list[tuple[str, Any]] = [("model.json", self._model)]
        if self._train is not None:
            is_policy = isinstance(self._train, ReinforceConfig)
            configs.append(("reinforce.json" if is_policy else "train.json", self._train))
        return "\n\n".join(
            f"<details><summary>{name}</summary>\n\n```json\n"
            f"{json.dumps(config.as_json(), indent=2)}\n```\n\n</details>"
            for name, config in configs
        )


def _repository(description: DatasetDescription) -> str | None:
    documents = description.source.documents
    return documents.repository if documents else None


def _loss(loss: float) -> str:
    return f"{loss:.4f} nats per token (perplexity {math.exp(loss):.2f})"


def _table(head: tuple[str, str], rows: Rows) -> str:
    """Return a table, or nothing if it has no rows."""
    lines = [head, ("---", "---"), *rows] if rows else []
    return "\n".join(f"| {first} | {second} |" for first, second in lines)
