"""A run with a past full of events, for tests."""

from __future__ import annotations

from tests.tr11ops.goodput.past import Past

CARD = """
[run]
name = "run"
directory = "run"
exit_duration_minutes = 50
[slurm]
nodes = 3
spare_nodes = 1
workers_per_node = 1
time_limit = "01:00:00"
[model]
layers = 2
hidden_size = 32
attention_heads = 4
sequence_length = 32
[batch]
micro_batch_size = 2
global_batch_size = 12
train_samples = 1200
[schedule]
learning_rate = 1e-3
[checkpoint]
interval = 5
[data]
prefixes = ["data/none"]
[tokenizer]
padded_vocabulary_size = 512
"""


NODES = ("n1", "n2", "n3", "n4")


TAG, SECOND = "20260921-000000-00000001", "20260921-000000-00000002"


def eventful(past: Past) -> None:
    """A node that dies, a stall, a time limit, a kill switch, and a controller that is killed.
    Three nodes and a spare.
    """
    past.submit(0, TAG, 4, "1-3%1")
    past.attempt(600, "101", NODES, TAG)
    past.launch(610, 1, NODES[:3])
    past.phase(640, "starting", 0)
    past.phase(700, "loading", 0)
    past.phase(720, "training", 0)
    past.save(past.steps(720, 1, 5, 100), 1260)
    past.phase(1260, "training")
    past.save(past.steps(1260, 6, 10, 100), 1800)
    past.phase(1800, "evaluating")
    past.phase(1860, "training")
    past.steps(1860, 11, 12, 100)
    past.failed(2200, 2210, "node", ["n2"])
    past.launch(2212, 2, ("n1", "n3", "n4"))
    past.phase(2230, "starting", 0)
    past.phase(2300, "loading", 0)
    past.phase(2320, "training", 10)
    past.steps(2320, 11, 12, 100)
    past.step(4120, 13, 1600)
    past.save(past.steps(4120, 14, 15, 100), 4360)
    past.phase(4360, "ending")
    past.ended(4361, 4365, "exit-duration", 15)
    past.verdict(4370, "exit-duration", 15)

    past.attempt(4970, "102", NODES, TAG)
    past.launch(4980, 1, NODES[:3])
    past.phase(4990, "starting", 0)
    past.phase(5080, "loading", 0)
    past.phase(5100, "training", 15)
    past.steps(5100, 16, 17, 100)
    past.journal(5310, "kill-switch-set", request=1)
    past.save(past.steps(5300, 18, 18, 100), 5440)
    past.phase(5440, "ending")
    past.ended(5441, 5450, "kill-switch", 18)
    past.verdict(5455, "kill-switch", 18, restart=False)
    past.journal(9055, "resumed", switches=["kill switch"], jobs=["1000"])

    past.attempt(9115, "103", NODES, TAG)
    past.launch(9120, 1, NODES[:3])
    past.phase(9130, "starting", 0)
    past.phase(9200, "loading", 0)
    past.phase(9220, "training", 18)
    past.steps(9220, 19, 21, 100)
