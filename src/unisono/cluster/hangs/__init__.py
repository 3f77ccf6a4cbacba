"""Detects ranks that hang, names the one that caused it, and saves Python stacks.

`heartbeat.py` records where each rank is, `diagnosis.py` decides from that who hangs, `stacks.py` takes Python stacks,
and `report.py` words the message. Two callers use them: `launcher_monitor.py` runs in unisono's launcher and looks at
its ranks from outside; `rank_watchdog.py` is a thread inside each rank, for runs that torchrun, srun or mpirun started.
"""
