"""The edge to the scheduler: one protocol, Slurm, and the embedded one."""
