"""What a run minimizes, one file for each objective: its loss, the arrays that its batches need
beside tokens, its figures in the metrics.

table         the objective of each name in `train.json`; the compiled step of a run
next_token    cross-entropy; what every objective of runs on datasets has
multi_token   the next token, and by a module of its own the one after it
masked_diffusion  tokens that are masked, with attention to both sides
preferences   pairs of a chosen and a rejected answer: dpo, ipo, simpo; the reference
kto           answers that are desirable or not
distillation  a teacher's predictions, beside each step or stored
policy        reinforcement learning: advantages, the weight of each token

`step/objective.py` has the protocol. A new objective is a subclass of `NextToken` in a file here, a
line in `table.py`, and its name and keys in `config/train_config.py`. Another loss of preferences
is a function and a line of `LOSSES` in `preferences.py`, its log-probabilities in `pairs` there
(sums or means per token), a line of `OBJECTIVES` in `table.py`, and in `config/train_config.py` its
name, the default of `beta`, and whether it has a reference; also name it in `_OBJECTIVES_FOR` in
`data/tokens/loader.py`."""
