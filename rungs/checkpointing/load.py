"""Loading saved weights: a model with LoRA merged, its tokenizer, a text generator; a start of a
run, and the model and optimizer that it begins with if it resumes or has saved weights."""

import dataclasses
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from rungs.checkpointing import manifest, optimizer_state, published
from rungs.checkpointing.checkpoint_folder import IMPORTED, find_valid_weights, find_weights
from rungs.checkpointing.manifest import Checkpoint
from rungs.checkpointing.weights_file import WEIGHTS_FILE, Weights, file_or_index
from rungs.common import shown_text
from rungs.common.errors import UserError, errors_at
from rungs.config import run_config
from rungs.config.run_config import MODEL_FILE, TRAIN_FILE, AnyRunConfig
from rungs.data import catalog
from rungs.data.text import tokenizer_files
from rungs.data.text.tokenizer import TOKENIZER_FILE, Tokenizer
from rungs.model.generation import Generator, Request
from rungs.model.gpt import GPT
from rungs.model.lora import DOWN, LOW_RANK_NAMES, UP
from rungs.model.sampling import GREEDY, Sampling
from rungs.model.weight_formats import UnreadTensor, WeightFormat, refuse_impossible
from rungs.optim.skipping_optimizer import UPDATES, WEIGHTS, SkippingOptimizer
from rungs.parallel.sharding import PREDICTION, Layout
from rungs.run.folder import RunFolder, StartOptions
from rungs.step.state import AbstractModel, AbstractState, create_model, shapes_of


def load_model(path: Path | str, layout: Layout | None = None) -> GPT:
    """Return a trained model, with LoRA merged: `model(tokens_BS)` gives float32 logits_BSV.
    Parameters keep their saved dtypes. `path` is as for `find_weights`: a run, a checkpoint or a
    weights file. Parameters go onto the devices of `layout`, which must not split the vocabulary,
    or the first device. Raises UserError if there is nothing at `path`, or it is damaged."""
    weights = MergedWeights(find_valid_weights(path))
    abstract = AbstractModel(weights.header.model, layout)
    return abstract.fill(place_weights(weights, abstract))


def load_token_generator(
    path: Path | str,
    compute_dtype: DTypeLike | None = "float32",
    weight_format: WeightFormat = "dtype",
) -> Generator:
    """Return a trained model that continues token ids. Weights are converted while they are read, a
    layer or block of rows at a time, so memory holds the model once, in its final form. Arguments
    are those of `load_model` and `Generator`; with None as dtype it is float32 on a CPU, else
    bfloat16. Raises UserError if there is nothing to load at `path`, it is damaged, or the model
    can't be quantized."""
    if compute_dtype is None:
        compute_dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    weights = MergedWeights(find_valid_weights(path))
    refuse_impossible(weight_format, weights.header.model)
    abstract = AbstractModel(weights.header.model)
    weights.check_tensors(abstract.shapes)
    dtypes = weights.dtypes()
    unread = {
        name: FileTensor(weights.path, name, shape, jnp.dtype(dtypes[name]))
        for name, shape in abstract.shapes.items()
    }
    model = abstract.fill(unread)
    return Generator(model, jnp.dtype(compute_dtype), weight_format)


@dataclasses.dataclass(frozen=True)
class FileTensor(UnreadTensor):
    """A tensor in a weights file, with LoRA merged."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, *part: slice) -> np.ndarray:
        """Return the tensor, or a slice of its first axes. Raises UserError unless finite."""
        # opened anew, as an open file would keep everything read from it mapped
        return MergedWeights(self.path).array(self.name, part)


def load_tokenizer(path: Path | str, datasets_dir: Path | None = None) -> Tokenizer:
    """Return the tokenizer of a model: the file next to the weights if there is one, else that of
    the model's dataset, else the one on the Hugging Face hub. `path` is as for `load_model`. Raises
    UserError if it cannot be found, or is damaged."""
    weights = find_weights(path)
    opened = Weights(weights)
    if file := opened.tokenizer_file:
        manifest.refuse_damaged(weights, only=TOKENIZER_FILE)
        return tokenizer_files.load_tokenizer(file)
    name = opened.header.tokenizer
    if not name:
        raise UserError(
            f"{weights}: was imported without a tokenizer; put its tokenizer.json in that folder"
        )
    folder = catalog.dataset_folder(name, catalog.find_datasets_dir(datasets_dir))
    return tokenizer_files.load_tokenizer(folder if folder.is_dir() else name)


class TextGenerator(NamedTuple):
    """A model that continues texts, with the begin and stop tokens it was trained with."""

    generator: Generator
    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...]
    """Tokens that end a text."""

    def continue_texts(
        self, texts: Sequence[str], new_tokens: int, sampling: Sampling = GREEDY, seed: int = 0
    ) -> list[str]:
        """Return the continuation of each text, at most `new_tokens` tokens long. `stop_tokens` in
        `sampling` replace the model's. Raises UserError if a text is not valid Unicode, or is empty
        and there is no token to start with; TypeError for one text instead of several."""
        if isinstance(texts, str):
            raise TypeError("texts: one text; give a list, as [text]")
        prompts = [self.tokenizer.encode_beginning(text) for text in texts]
        stops = sampling.stop_tokens or self.stop_tokens
        request = Request(new_tokens, sampling._replace(stop_tokens=stops), seed)
        continued = self.generator.generate(prompts, request)
        pairs = zip(prompts, continued, strict=True)
        return [continuation(self.tokenizer, prompt, new) for prompt, new in pairs]


def load_generator(
    path: Path | str,
    compute_dtype: DTypeLike = "float32",
    weight_format: WeightFormat = "dtype",
) -> TextGenerator:
    """Return a trained model that continues texts; arguments and errors as for
    `load_token_generator` and `load_tokenizer`."""
    tokenizer = load_tokenizer(path)
    stops = published.all_stop_tokens(Weights(find_weights(path)), tokenizer)
    generator = load_token_generator(path, compute_dtype, weight_format)
    return TextGenerator(generator, tokenizer, stops)


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Return the text of the new tokens. The prompt is needed because tokenizers may drop a space
    at the start of a text, and split characters between tokens."""
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.decode([*prompt, *new], skip_special_tokens=True)
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(new, skip_special_tokens=True)


class MergedWeights(Weights):
    """Weights with LoRA merged: each low-rank product is added to its kernel. A prediction module,
    which only training uses, is left out, unless it `keeps_module`."""

    def __init__(self, path: Path, keeps_module: bool = False) -> None:
        super().__init__(path)
        self._saved, self._keeps_module = self.header.model, keeps_module
        model = self._saved.model_copy(update={} if keeps_module else {"prediction_module": False})
        self.header = self.header._replace(model=model, base=None)  # merged, they are no adapter
        self._lora = self.header.train.lora if self.header.train else None

    def names(self) -> set[str]:
        """Return the names of all tensors except those that are merged or left out."""
        return {name for name in super().names() if not self._is_left_out(name)}

    def _is_left_out(self, name: str) -> bool:
        is_of_module = name.startswith(PREDICTION) and not self._keeps_module
        return is_of_module or name.endswith(LOW_RANK_NAMES)

    def check_tensors(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """As for `Weights`; the low-rank tensors must fit their kernels, too."""
        has_more = self._lora or self._saved.prediction_module
        every = shapes_of(self._saved, self._lora) if has_more else {}
        left_out = {name: every[name] for name in every if self._is_left_out(name)}
        super().check_tensors(shapes | left_out)

    def array(self, name: str, part: tuple[slice, ...] = ()) -> np.ndarray:
        """Return a tensor, or a slice of its first axes, merged in float32, in its stored dtype. A
        kernel with LoRA can be sliced along its first axis only."""
        kernel = super().array(name, part)
        prefix = name.removesuffix("kernel")
        if self._lora is None or prefix + DOWN not in super().names():
            return kernel
        assert len(part) <= 1
        down, up = super().array(prefix + DOWN, part), super().array(prefix + UP, part)
        stack, rank = len(kernel), down.shape[-1]
        added = down.reshape(stack, -1, rank) @ up.reshape(stack, rank, -1)
        scale = np.float32(self._lora.alpha / self._lora.rank)
        merged: np.ndarray = kernel.astype(np.float32) + scale * added.reshape(kernel.shape)
        return merged.astype(kernel.dtype)


@dataclasses.dataclass(frozen=True)
class Start:
    """A start of a run."""

    run: RunFolder
    config: Any  # AnyRunConfig, of the kind of run
    options: StartOptions
    saved: Checkpoint | None
    weights: Weights | None
    """The weights to continue from; None for random ones."""

    @property
    def first_step(self) -> int:
        return self.saved.step + 1 if self.saved else 0

    @property
    def stopped_after(self) -> int | None:
        """The validations without a better loss after which stop_after ended the run; None if it
        didn't, or now allows more."""
        limit = getattr(self.config.train, "stop_after", None)
        count = self.saved.meta.stopped_after if self.saved and not self.is_branching else None
        return count if limit and count and count >= limit else None

    @property
    def is_branching(self) -> bool:
        """Whether it takes the first step of its own after another run's."""
        return self.saved is not None and self.saved.step == self.config.train.branch_step

    @property
    def fresh_start(self) -> str:
        """How to begin anew if the run can't go on from its checkpoint, for a message."""
        return "make a run without --from-step" if self.is_branching else "start over with --fresh"


def find_starting_weights(run: RunFolder, config: AnyRunConfig) -> Weights | None:
    """Return the weights that a new run starts from, None if they are random. Raises UserError if
    they are missing, don't fit `model.json`, or are imported here but not named by `start_from`."""
    path = _starting_file(run, config)
    if path is None:
        if run.imported.exists():
            raise UserError(
                f"{run.path / TRAIN_FILE}: start_from: missing, but {run.imported} holds an"
                ' imported model; add "start_from": "imported", or train from random weights in'
                f" another folder: {shown_text.command_line('train')} RUN --like"
                f" {shown_text.quoted(run.path)}"
            )
        return None
    manifest.refuse_damaged(path)
    weights = MergedWeights(path, keeps_module=config.model.prediction_module)
    has_table = config.model.positions == "learned"
    may_differ = {"init"} if has_table else {"init", "context_length"}
    lines = [
        f"{key}: {json.dumps(here)}, but the weights to start from"
        f" ({weights.path}) have {json.dumps(saved)}; change it to that"
        for key, (saved, here) in run_config.differences(weights.header.model, config.model).items()
        if key not in may_differ
    ]
    if lines:
        raise UserError.at(run.path / MODEL_FILE, lines)
    weights.check_tensors(shapes_of(weights.header.model))
    return weights


def starting_dtypes(run: RunFolder, config: AnyRunConfig) -> dict[str, str] | None:
    """Return the saved dtypes, by name, of the parameters that a new run starts from: empty if
    weights are random, None if they are not here or unreadable."""
    try:
        path = _starting_file(run, config)
        return {} if path is None else MergedWeights(path).dtypes()
    except UserError:
        return None


def _starting_file(run: RunFolder, config: AnyRunConfig) -> Path | None:
    """Return the weights file that `start_from` names, or None. Raises UserError."""
    name = config.train.start_from
    if name is None:
        return None
    with errors_at(f"{run.path / config.train_file}: start_from: "):
        if name != IMPORTED:
            return find_weights(name)
        path = file_or_index(run.imported / WEIGHTS_FILE)
        if not path.is_file():
            raise UserError(
                "nothing was imported into this run; name a run or a checkpoint, or import into a"
                f" new folder: {shown_text.command_line('pretrained')} import HUB_ID RUN"
            )
        return path


def restore(
    saved: Checkpoint, config: AnyRunConfig, total_steps: int, mesh: Mesh
) -> tuple[GPT, SkippingOptimizer]:
    """Return the model and optimizer of a checkpoint, each array read directly onto its devices.
    Check its files first with `Checkpoint.damage`."""
    abstract = AbstractState(config, total_steps, mesh)
    weights = place_weights(saved.weights, abstract, cast=abstract.trained)
    averaged = _place_averaged(saved, abstract)
    rest = {name: leaf for name, leaf in abstract.optimizer.items() if name not in averaged}
    optimizer = optimizer_state.load(saved.folder, rest, may_pad=abstract.is_padded)
    return abstract.fill(weights, optimizer | averaged)


def _place_averaged(saved: Checkpoint, abstract: AbstractState) -> dict[str, jax.Array]:
    """Return the part of the optimizer state that averages weights, on its devices, as far as it is
    not saved with the rest: empty if there are no averages. A branch may begin to average; then it
    is as before the first update."""
    leaves = abstract.optimizer
    averages = {name: leaf for name, leaf in leaves.items() if name.startswith(WEIGHTS)}
    source = saved.averaged_weights or saved.weights
    placed = {
        name: place_padded(source.array(name.removeprefix(WEIGHTS)).astype(leaf.dtype), leaf)
        for name, leaf in averages.items()
    }
    if placed and saved.averaged_weights is None:
        placed[UPDATES] = place_padded(np.zeros((), np.uint32), leaves[UPDATES])
    return placed


def place_starting_weights(
    weights: Weights | None, config: AnyRunConfig, total_steps: int, mesh: Mesh
) -> dict[str, jax.Array]:
    """Return the saved parameters that a run starts from, on its devices; empty if there are none.
    Trained parameters are cast to float32; with LoRA the frozen ones keep their saved dtype."""
    if weights is None:
        return {}
    abstract = AbstractState(config, total_steps, mesh)
    return place_weights(weights, abstract, cast=abstract.trained, skip=LOW_RANK_NAMES)


def load_frozen(weights: Weights, config: AnyRunConfig, mesh: Mesh) -> GPT:
    """Return a model that a run does not train, such as a teacher or a reference, on its devices.
    `config` has the model's own `model.json`; its lora doesn't count."""
    frozen = config._replace(train=config.train.model_copy(update={"lora": None}))
    return create_model(frozen, mesh, place_starting_weights(weights, frozen, 1, mesh))


def place_weights(
    weights: Weights,
    abstract: AbstractModel | AbstractState,
    cast: Collection[str] = (),
    skip: tuple[str, ...] = (),
) -> dict[str, jax.Array]:
    """Read parameters one at a time and place each onto its devices, with the shapes and shardings
    of `abstract`. Those named in `cast` get the dtypes of `abstract`, others keep their own. Names
    with an ending in `skip` are left out."""
    names = [name for name in abstract.weights if not name.endswith(skip)]
    weights.check_tensors({name: abstract.shapes[name] for name in names})

    def place(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        array = weights.array(name)
        return place_padded(array.astype(leaf.dtype, copy=False) if name in cast else array, leaf)

    return {name: place(name, abstract.weights[name]) for name in names}


def place_padded(array: np.ndarray, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Place an array onto its devices, padded with zeros to the shape and sharding of `like`."""
    padding = [(0, size - own) for size, own in zip(like.shape, array.shape, strict=True)]
    padded = np.pad(array, padding) if like.shape != array.shape else array
    return jax.make_array_from_callback(like.shape, like.sharding, lambda at: padded[at])
