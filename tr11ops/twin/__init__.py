"""A real Slurm of many nodes on one machine, with faults and a stand-in worker."""
