"""The 3D-parallel trainer: tensor x pipeline x data parallel training of language models.

Importing this package imports nothing else: `trainer.contract`, `trainer.config`,
`trainer.schedule`, `trainer.control.lifecycle` and `trainer.schedule.flops` stay free of torch, so
the operations side may read them.
"""
