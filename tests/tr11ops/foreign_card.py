"""A card of another trainer, as tests of several rooms write it."""

FOREIGN = """
[run]
name = "hf"
directory = "run"

[slurm]
nodes = 1
gpus_per_node = 0
workers_per_node = 2
cpus_per_task = 1
time_limit = "00:10:00"

[trainer]
dialect = "huggingface"
command = ["train.py", "--output_dir", "{folder}"]
folder = "out"
"""
