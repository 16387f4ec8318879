"""What came of a resumption, as tables."""

from pathlib import Path

from rungs.config.run_config import RunConfig
from rungs.diagnostics.resume_check.compare import Comparison, Resumption

_KILL = "{:>4}  {:>8}  {}"
_ROW = "{:15}  {:66}  {}"


def is_same(path: Path, config: RunConfig, resumption: Resumption, kills: int) -> bool:
    """Train straight and killed, and print what is known as soon as it is.

    Args:
        path: of the run.
        config: of its short copy.

    Returns:
        Whether nothing differs.
    """
    train = config.train
    tokens = config.tokens_per_step
    print(
        f"{path}, short: {resumption.plan.steps} steps of {tokens:,} tokens, a checkpoint every"
        f" {train.checkpoint_interval}",
        flush=True,
    )
    seconds = resumption.train_straight()
    print(f"straight through on {resumption.platform}: {seconds:.1f} s")
    if not resumption.is_promised:
        print(
            f'A {resumption.platform} promises the same bits only with "deterministic": true in'
            " train.json (slower; it may change\nbetween two starts). Without it a difference"
            " below may be no fault."
        )
    print("", _KILL.format("kill", "after", "fell in"), sep="\n", flush=True)
    for number, kill in enumerate(resumption.train_killed(kills), 1):
        print(_KILL.format(number, f"{kill.seconds:.2f} s", kill.sight), flush=True)
    return _is_table_clean(resumption.findings())


def _is_table_clean(findings: list[Comparison]) -> bool:
    print("", _ROW.format("what", "compared", "verdict"), sep="\n")
    for what, how, difference in findings:
        print(_ROW.format(what, how, "DIFFERS" if difference else "identical"))
    differing = [finding for finding in findings if finding.difference]
    for what, _, difference in differing[:1]:
        print("", f"first difference: {what}: {difference}", sep="\n")
    return not differing
