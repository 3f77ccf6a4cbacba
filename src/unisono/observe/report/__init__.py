"""One self-contained page of a run, made from the files in its folder and nothing else."""
