"""What an experiment will take, before it is begun."""

from pathlib import Path

from rungs.common.shown_text import counted, format_duration
from rungs.experiments.conduct import Conductor
from rungs.experiments.experiment import BASE, Trial
from rungs.run.derive import config_with
from rungs.run.folder import RunFolder, find_origin


def estimate(conductor: Conductor, datasets_dir: Path, price_per_hour: float | None) -> str:
    """Return how many runs are left, how long they train and what that costs. Runs that depend on
    results, as those of a search, count at most, each as long as the mean of those called for."""
    experiment, missing = conductor.experiment, conductor.missing()
    conductor.check(missing)
    later = experiment.most_runs() - len(conductor.outcomes) - len(missing)
    line = f"{counted(len(missing), 'run')} to train now, {len(conductor.outcomes)} done"
    line += f", at most {later:,} later" if later else ""
    examples = missing or ([experiment.trial(BASE, 0, {})] if later else [])
    seconds = [_seconds(conductor, trial, datasets_dir) for trial in examples]
    known = [each for each in seconds if each is not None]
    if len(known) < len(seconds):
        return f"{line}; the speed of this device is not known before the first run"
    total = sum(known) * (1 + (later + len(missing) - len(examples)) / max(len(examples), 1))
    line += f"; {format_duration(total)} of training, one after another"
    if price_per_hour is not None:
        line += f", {price_per_hour * total / 3600:.2f} at {price_per_hour:g} an hour"
    return line


def _seconds(conductor: Conductor, trial: Trial, datasets_dir: Path) -> float | None:
    """Return how long a run takes: as its budget says, as long as others did, or as planned; None
    if that isn't known, as on a CPU."""
    budget = conductor.experiment.budget
    if budget and budget.minutes:
        return 60 * budget.minutes
    done = list(conductor.outcomes.values())
    alike = [one.minutes for one in done if one.group == trial.group] or [
        one.minutes for one in done
    ]
    if alike:
        return 60 * sum(alike) / len(alike)

    import jax

    from rungs.config.option_values import UTILIZATION_PERCENT
    from rungs.config.run_config import RunConfig
    from rungs.config.train_config import TrainConfig
    from rungs.parallel.devices import resolve_sharding
    from rungs.planning.forecast import forecast
    from rungs.planning.hardware import this_device

    config, hardware = config_with(find_origin(trial.origin), trial.changes), this_device()
    if not isinstance(config.train, TrainConfig) or hardware.platform == "cpu":
        return None
    sharding, share = resolve_sharding(config.train, jax.device_count()), UTILIZATION_PERCENT / 100
    own, run = RunConfig(config.model, config.train), RunFolder(conductor.run(trial))
    return forecast(run, own, hardware, sharding, datasets_dir, share).seconds_left
