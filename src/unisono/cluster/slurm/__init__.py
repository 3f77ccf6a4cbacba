"""SLURM: `script.py` writes the batch script of a run, `commands.py` calls SLURM's command-line tools."""
