"""A proposer for experiments of kind `propose`: Optuna over ranges, as in kind `search`.

"proposer": ["python3", "-m", "rungs.experiments.optuna_proposer", "ranges.json"]
"""

import json
import math
import sys
from pathlib import Path

from pydantic import TypeAdapter

from rungs.experiments.search import Ranges, proposals_of


def main() -> None:
    """Read what is known from stdin; print a proposal."""
    ranges: Ranges = TypeAdapter(Ranges).validate_json(Path(sys.argv[1]).read_bytes())
    known = json.load(sys.stdin)
    sign = 1 if known["lower_is_better"] else -1
    results = [
        (one["changes"], math.inf if one["value"] is None else sign * one["value"])
        for one in known["proposals"]
        if one["changes"]
    ]
    (changes,) = proposals_of("tpe", ranges, results, 1)
    print(json.dumps({"changes": changes, "why": f"TPE, after {len(results)} results"}))


if __name__ == "__main__":
    main()
