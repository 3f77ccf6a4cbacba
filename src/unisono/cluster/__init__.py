"""Processes and machines: who this process is, how ranks are started and restarted, how they agree, how they stop.

The path of a run through this package: `environment.py` finds out which launcher started this process; `launch/` starts
ranks and restarts them; `rendezvous/` brings the launchers of several machines together; in each rank
`process_group.py` connects it to the others, `signals.py` receives requests to stop, `agree.py` makes all ranks take
the same decision, and `outcome.py` writes down how the rank ended. `hangs/` finds ranks that stop making progress.
`slurm/` writes batch scripts. Nothing in this package knows what training is.
"""
