"""The commands of `python -m trainer.checkpoint`, one module each.

A module holds `run(options)`, which returns a JSON-able dict, and
`describe(result)`, its text for people. A module may also hold `exit_code(result)`; without it a
result means 0.
"""
