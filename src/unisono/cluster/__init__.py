"""Processes and machines: detects this process's rank, starts and restarts ranks, lets them agree, and stops them.

The path of a run through this package: `environment.py` finds out which launcher started this process; `launch/` starts
ranks and restarts them; `rendezvous/` brings the launchers of several machines together; in each rank
`process_group.py` connects it to the others, `signals.py` receives requests to stop, `agree.py` lets all ranks make
the same decision, and `outcome.py` records how the rank ended. `hangs/` finds ranks that stop making progress, and
`slurm/` and `kubernetes/` write batch scripts and manifests. `launch/agent.py` describes step by step what happens
after `kill -9` of a rank.

`lifetime.py` makes ranks die with their launcher, `awake_clock.py` measures time without suspensions, `alive.py` shows
a scheduler that the launcher is alive, `ports.py` names the process that uses a port, `shared_folder.py` checks that
all machines see one output folder, `allreduce.py` is the communication test of `unisono doctor`, and `own_loop.py` is
for training loops that users write themselves. Nothing in this package depends on what the ranks compute.
"""
