"""The kinds of experiments."""

from rungs.experiments.compare import Compare
from rungs.experiments.experiment import Experiment
from rungs.experiments.grid import Grid
from rungs.experiments.mixture import Mixture
from rungs.experiments.propose import Propose
from rungs.experiments.record import Record
from rungs.experiments.scaling import Scaling
from rungs.experiments.search import Search

DEFAULT_KIND = "compare"
KINDS: dict[str, type[Experiment]] = {
    "compare": Compare,
    "grid": Grid,
    "search": Search,
    "scaling": Scaling,
    "mixture": Mixture,
    "propose": Propose,
    "record": Record,
}
"""By `kind` in `experiment.json`."""
