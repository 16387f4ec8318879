"""Experiments: several runs and a verdict.

    kinds            the kinds of experiments
    experiment       what all kinds have: keys of `experiment.json`, runs, outcomes, pairs by seed
    compare          variants against a base
    grid             every combination of some values
    confirm          what kinds that choose among runs share: a confirmation with fresh seeds
    search           settings that Optuna proposes
    scaling          sizes and budgets, and what a larger budget would reach
    mixture          proportions of datasets
    propose          ideas of a program
    optuna_proposer  such a program, which asks Optuna
    record           a loss that the mean of several seeds is below
    verdict          intervals of differences, and verdicts
    folder           an experiment's folder, config and lock
    conduct          trains what is missing, keeps ledger and report
    reproduction     all runs once more, compared with the ledger
    estimate         what is left, how long it takes and what it costs
    workers          where runs are trained: processes on this machine
    clusters         the same on Slurm and on Ray
    outcome          the measure and curve of a run that ended
    loose_runs       runs that belong to no experiment, as such outcomes
    ledger           what happened, in a chain of checksums
    table            results as text, Markdown, LaTeX and CSV
    charts           effects, curves, heat map, curves of equal compute
    report           report.md, report.html

A new kind is a file here and a line in `kinds`."""
