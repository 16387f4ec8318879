"""Make a run folder from a Hugging Face model: check its tensors, then write them one by one."""

import dataclasses
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from rungs.checkpointing import manifest, published, weights_file
from rungs.common import disk, hub
from rungs.common.errors import UserError
from rungs.common.shown_text import format_bytes
from rungs.common.strict_json import format_name
from rungs.config import model_config, run_config
from rungs.config.reference import schema_key
from rungs.huggingface import jax_gpt2
from rungs.huggingface.config_keys import HFConfig, read_hf_config
from rungs.huggingface.families import family_of
from rungs.huggingface.families.family import Family
from rungs.huggingface.gguf.reading import GGUFTensors, is_gguf
from rungs.huggingface.hf_tokenizer import convert_tokenizer, write_json
from rungs.huggingface.mxfp4 import Mxfp4Folder
from rungs.huggingface.tensors import TensorGroup, Tensors, tensor_groups
from rungs.run.folder import RunFolder, new_run_path

HEAD = "lm_head.weight"
_VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector|visual)\.")
_MAX_LINES = 20


@dataclasses.dataclass(frozen=True)
class HFSource:
    """A Hugging Face model to import."""

    name: str
    """Hub id or folder name."""
    folder: Path
    """Or a GGUF file."""
    revision: str | None = None
    """The commit on the hub."""


def find_source(place: str, revision: str | None = None) -> HFSource:
    """Return the model in a folder or a GGUF file or, if there is none, the one with that id on the
    hub. Raises UserError if there is neither."""
    folder = Path(place)
    if folder.is_dir() or is_gguf(folder):
        if revision is not None:
            kind = "folder" if folder.is_dir() else "file"
            raise UserError(f"{place}: a {kind} has no revisions; leave out --revision")
        return HFSource(folder.resolve().name, folder)
    if place.count("/") > 1 or place.startswith((".", "/", "~")):
        raise UserError(f"{place}: no such folder, and not an id on the Hugging Face hub")
    folder, commit = hub.download_model(place, revision)
    return HFSource(place, folder, commit)


class Match(NamedTuple):
    """Mapping from tensors to parameters."""

    names: dict[str, str]
    """Name in the files by the family's name."""
    specs: dict[str, weights_file.TensorSpec]
    """Shape of each Rungs parameter, and its dtype in the files."""
    notes: list[str]
    """Notes on tensors that were left out or renamed."""


@dataclasses.dataclass(frozen=True)
class Import:
    """A checked Hugging Face model that can be written as a run folder."""

    source: HFSource
    hf_config: HFConfig
    model: model_config.ModelConfig
    tensors: Tensors
    groups: list[TensorGroup]
    match: Match

    @classmethod
    def from_source(cls, source: HFSource, ignored_keys: tuple[str, ...] = ()) -> "Import":
        """Check everything except the values of tensors. `ignored_keys` of `config.json`, or of a
        GGUF file's metadata, count as having no effect. Raises UserError with a line for each
        mistake."""
        tensors: Tensors
        family: Family
        if checkpoint := jax_gpt2.find_checkpoint(source.folder):
            family, tensors = jax_gpt2.FAMILY, jax_gpt2.JaxGPT2Tensors(checkpoint)
            hf_config = tensors.config(checkpoint)
            model = family.to_model_config(hf_config)
        elif source.folder.is_dir():
            hf_config, tensors = read_hf_config(source.folder), Mxfp4Folder(source.folder)
            hf_config.ignore(ignored_keys)
            family = family_of(hf_config)
            model = family.to_model_config(hf_config)
        else:  # whose metadata take the place of config.json
            tensors = stored = GGUFTensors(source.folder, ignored_keys)
            hf_config, family, model = stored.hf_config(), stored.architecture, stored.model
        groups = tensor_groups(model, family.tensors)
        matched = _match(source.folder, tensors, family, groups)
        return cls(source, hf_config, model, tensors, groups, matched)

    @property
    def origin(self) -> weights_file.Origin:
        """Origin of the weights, for the header of the weights file."""
        specs = self.match.specs
        [(most_common, _)] = Counter(self._dtypes()).most_common(1)
        others = {name: spec.dtype for name, spec in specs.items() if spec.dtype != most_common}
        return weights_file.Origin(
            source=self.source.name,
            revision=self.source.revision,
            model_type=self.hf_config.model_type,
            dtype=most_common,
            other_dtypes=others,
        )

    def summary(self) -> str:
        """Describe the model in one line."""
        size = sum(spec.bytes for spec in self.match.specs.values())
        dtypes = ", ".join(f"{count} {name}" for name, count in Counter(self._dtypes()).items())
        name, model_type = self.source.name, self.hf_config.model_type
        return f"{name}: {model_type}, {format_bytes(size)}, tensors: {dtypes}"

    def write_weights(self, path: Path) -> None:
        """Write `model.safetensors`, one tensor at a time. Raises UserError unless finite."""
        broken = []
        tokenizer = self.source.name if self.source.revision else ""
        header = weights_file.WeightsHeader(self.model, None, tokenizer, self.origin)
        with weights_file.TensorWriter(path, self.match.specs, header.as_metadata()) as writer:
            progress = tqdm(total=len(self._dtypes()), unit=" tensors", disable=None)
            for group in self.groups:
                for hf_name, index in group.names.items():
                    own_name = self.match.names[hf_name]
                    tensor = self.tensors.bits(own_name)
                    if not weights_file.all_finite(tensor, self.tensors.specs[own_name].dtype):
                        broken.append(own_name)
                    for name, item in zip(group.parameters, group.split(tensor), strict=True):
                        writer.write(name, item, index)
                    progress.update()
            progress.close()
            if broken:
                named = ", ".join(map(format_name, sorted(broken)[:3])) + ", …" * (len(broken) > 3)
                raise UserError(
                    f"{self.source.folder}: NaN or infinite values in {len(broken)} of"
                    f" {len(self.match.names)} tensors ({named}), so the model computes nothing of"
                    " use; get an intact copy"
                )

    def _dtypes(self) -> list[str]:
        return [self.tensors.specs[name].dtype for name in self.match.names.values()]


def _match(folder: Path, tensors: Tensors, family: Family, groups: list[TensorGroup]) -> Match:
    """Find the tensors for all parameters. Raises UserError with a line for each tensor that is
    missing, unknown, or has the wrong shape or dtype."""
    names, notes = _names_of_family(tensors, family)
    if HEAD in names and not any("head.kernel" in group.parameters for group in groups):
        [embedding] = next(g.names for g in groups if "token_embedding.embedding" in g.parameters)
        head, tied = names.pop(HEAD), names.get(embedding)
        same_spec = tied and tensors.specs[head] == tensors.specs[tied]
        if tied and not (same_spec and np.array_equal(tensors.bits(head), tensors.bits(tied))):
            raise UserError(
                f"{folder}: tensor {head}: differs from {tied}, though config.json ties them"
                " (tie_word_embeddings)"
            )
        notes.append(f"left out: {head} (a copy of the embedding it is tied to)")
    lines = list(_wrong_tensors(tensors, names, groups))
    if lines:
        rest = [f"… and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
        lines = [f"tensor {line}" for line in lines[:_MAX_LINES]] + rest
        raise UserError.at(folder, lines)
    specs = {
        name: weights_file.TensorSpec(
            tensors.specs[names[next(iter(group.names))]].dtype, parameter.shape
        )
        for group in groups
        for name, parameter in group.parameters.items()
    }
    return Match(names, specs, notes)


def _names_of_family(tensors: Tensors, family: Family) -> tuple[dict[str, str], list[str]]:
    """Return the candidate tensors by the family's names, and notes on the rest."""
    names: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    has_vision = any(_VISION.match(name) for name in tensors.specs)
    for name in tensors.specs:
        if has_vision and _VISION.match(name):
            left_out["the vision tower and its projector"] += 1
            continue
        plain = name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
        buffer = next((what for end, what in family.buffers if re.search(end + "$", name)), None)
        if buffer:
            left_out[buffer] += 1
        else:
            names[plain if has_vision else name] = name
    notes = [
        f"left out: {count} tensor{'s' * (count > 1)} ({what})" for what, count in left_out.items()
    ]
    if names and not any(name.startswith(family.prefix) for name in names):
        notes.append(f"added the prefix {family.prefix} to the names of all tensors")
        names = {name if name == HEAD else family.prefix + name: names[name] for name in names}
    return names, notes


def _wrong_tensors(
    tensors: Tensors, names: dict[str, str], groups: list[TensorGroup]
) -> Iterator[str]:
    """Yield a line for each tensor that is missing, unknown, or has the wrong shape or dtype, or
    another dtype than in the first layer."""
    expected = {name: group.shape for group in groups for name in group.names}
    yield from (f"{name}: missing" for name in expected if name not in names)
    yield from (f"{format_name(names[name])}: unknown" for name in names if name not in expected)
    for name in expected.keys() & names.keys():
        spec = tensors.specs[names[name]]
        if spec.shape != expected[name]:
            yield f"{names[name]}: has shape {spec.shape}, must have {expected[name]}"
        if spec.dtype not in weights_file.SAFETENSORS_DTYPES:
            supported = ", ".join(weights_file.SAFETENSORS_DTYPES)
            yield f"{names[name]}: has dtype {spec.dtype}; supported are {supported}"
    for group in groups:
        found = [names[name] for name in group.names if name in names]
        dtypes = {name: tensors.specs[name].dtype for name in found}
        other = next((name for name in found if dtypes[name] != dtypes[found[0]]), None)
        if other:
            yield (
                f"{other}: is {dtypes[other]}, but {found[0]} is {dtypes[found[0]]}; all layers"
                " must have one dtype"
            )


def target_folder(name: str) -> Path:
    """Return the new run folder: a path, or a name in `runs/`. Raises UserError if it exists."""
    target = new_run_path(name)
    if target.exists():
        raise UserError(f"{target}: exists already; choose another name, or move it away")
    return target


def import_model(
    plan: Import, target: Path, check: Callable[[RunFolder], None] = lambda _: None
) -> list[str]:
    """Create a run folder from a Hugging Face model, and return notes on missing or converted
    parts. `check` gets the complete folder. If anything raises, nothing is left behind. Raises
    UserError if the folder cannot be written."""
    with disk.atomic_folder(target) as folder:
        run = RunFolder(folder)
        notes = _fill(plan, run, target)
        check(run)
        return notes


def _fill(plan: Import, run: RunFolder, target: Path) -> list[str]:
    """Write `model.json` and `checkpoints/imported/` into an empty folder, later `target`."""
    run.imported.mkdir(parents=True)
    keys = plan.model.model_dump(mode="json", exclude_defaults=True)
    schema = schema_key(target, run_config.MODEL_FILE)
    write_json(run.path / run_config.MODEL_FILE, schema | keys)
    if isinstance(plan.tensors, GGUFTensors):
        plan.tensors.write_files(run.imported)
    for name, path in published.published_files(plan.source.folder).items():
        shutil.copyfile(path, run.imported / name)
    if not (run.imported / published.CONFIG_FILE).is_file():
        write_json(run.imported / published.CONFIG_FILE, plan.hf_config.values)
    try:
        notes = convert_tokenizer(run.imported, plan.model.vocab_size)
        stops = published.stop_token_ids(run.imported)
    except UserError as error:  # it names copies that are about to be deleted
        message = str(error).replace(str(run.imported), str(plan.source.folder))
        raise UserError(message) from None
    notes += [
        f"warning: eos_token_id {number} is beyond the model's vocabulary, and ends no text"
        for number in stops
        if number >= plan.model.vocab_size
    ]
    plan.write_weights(run.imported / weights_file.WEIGHTS_FILE)
    manifest.write_checksums(run.imported)
    return notes
