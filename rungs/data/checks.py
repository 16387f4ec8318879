"""Check that a run's config fits its datasets."""

from rungs.config.run_config import MODEL_FILE, TRAIN_FILE, RunConfig
from rungs.config.train_config import TrainConfig
from rungs.data.dataset import TRAIN, VALIDATION, Dataset, Split
from rungs.data.pair_sequences import AnsweredDocuments
from rungs.data.sequences import mix, sequences_by_dataset, start_key

_MAX_WEIGHT_RATIO = 1e6


def problems(config: RunConfig, datasets: dict[str, Dataset]) -> list[str]:
    """Return one line per reason why the config and the datasets do not fit together."""
    return [
        *_weight_problems(config.train),
        *split_problems(config, datasets, TRAIN),
        *_length_problems(config, datasets),
        *split_problems(config, datasets, VALIDATION),
    ]


def split_problems(config: RunConfig, datasets: dict[str, Dataset], split: Split) -> list[str]:
    """Return one line per reason why the config does not fit the split of a dataset."""
    lines, model = [], config.model
    for name in config.train.datasets:
        if split not in datasets[name].splits:
            continue
        description = datasets[name].description.splits[split]
        where = f"{split} split of dataset {name}"
        if (largest := description.largest_token_id) >= model.vocab_size:
            lines.append(
                f"{MODEL_FILE}: vocab_size: {model.vocab_size} is too small for the token id"
                f" {largest} in the {where}; at least {largest + 1}"
            )
        if description.pairs:
            lines += _pairs_problems(config, datasets[name], split, where)
        else:
            lines += _text_problems(config, description.tokens, split, where)
    return lines


def _weight_problems(config: TrainConfig) -> list[str]:
    weights = config.datasets.values()
    if max(weights) / min(weights) > _MAX_WEIGHT_RATIO:
        return [f"{TRAIN_FILE}: dataset: the largest weight is over a million times the smallest"]
    return []


def _text_problems(config: RunConfig, tokens: int, split: Split, where: str) -> list[str]:
    """Check that a text has at least one sequence."""
    key, length, train = start_key(split), config.sequence_length, config.train
    start, needed = getattr(train, key), length + train.target_offset
    if tokens < needed:
        return [
            f"{_length_key(train)}: {length} is too long for the {where}, which has {tokens}"
            f" tokens; at most {tokens - train.target_offset}"
        ]
    if start + needed > tokens:
        return [
            f"{TRAIN_FILE}: {key}: {start} leaves no complete sequence in the {where}, which has"
            f" {tokens} tokens; at most {tokens - needed}"
        ]
    return []


def _pairs_problems(config: RunConfig, dataset: Dataset, split: Split, where: str) -> list[str]:
    """Check that no key is for text only, and that the longest pair fits into a sequence."""
    lines, train = [], config.train
    key, length = start_key(split), config.sequence_length
    if train.target_offset != 1:
        lines.append(
            f"{TRAIN_FILE}: target_offset: {train.target_offset} is for text only; the {where}"
            " holds pairs, which need 1"
        )
    if start := getattr(train, key):
        lines.append(
            f"{TRAIN_FILE}: {key}: {start} is for text only; the {where} holds pairs, which need 0"
        )
    pairs = dataset.description.splits[split].pairs
    assert pairs is not None
    needed = pairs.longest_tokens - 1
    if needed > length:
        count = AnsweredDocuments(dataset.token_path(split)).count_longer_than(length)
        can_be_raised = train.sequence_length is None or needed <= config.model.context_length
        lines.append(
            f"{_length_key(train)}: {length} is too short for {count:,} of the {pairs.pairs:,}"
            f" pairs in the {where} (the longest has {pairs.longest_tokens:,} tokens);"
            + (f" raise it to {needed} or" if can_be_raised else "")
            + " remove them"
        )
    return lines


def _length_key(config: TrainConfig) -> str:
    """Return the file and key that set the sequence length."""
    if config.sequence_length is None:
        return f"{MODEL_FILE}: context_length"
    return f"{TRAIN_FILE}: sequence_length"


def _length_problems(config: RunConfig, datasets: dict[str, Dataset]) -> list[str]:
    """Check that there are enough training sequences, if the other checks allow counting them."""
    train, length, step_tokens = config.train, config.sequence_length, config.tokens_per_step
    parts = sequences_by_dataset(config, datasets, TRAIN)
    if not all(map(len, parts.values())) or _weight_problems(train):
        return []
    sequences = len(mix(parts, train))
    steps = sequences // train.sequences_per_step
    available = f"there are {sequences} sequences of {length} tokens"
    if len(train.datasets) > 1:
        available += " until the first dataset of the mixture runs out"
    if train.start_train_token:
        available += f", starting at token {train.start_train_token}"
    if not steps:
        return [
            f"{TRAIN_FILE}: microbatch_size: {train.microbatch_size} ×"
            f" gradient_accumulation_steps {train.gradient_accumulation_steps} is more than one"
            f" epoch has: {available}; at most {sequences} per step"
        ]
    if train.min_train_tokens > steps * step_tokens:
        needed_steps = -(-train.min_train_tokens // step_tokens)
        return [
            f"{TRAIN_FILE}: min_train_tokens: {train.min_train_tokens} needs {needed_steps} steps"
            f" of {step_tokens} tokens, but one epoch has {steps}: {available}; at most"
            f" {steps * step_tokens}, or -1 for all"
        ]
    return []
