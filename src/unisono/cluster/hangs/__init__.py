"""Detects hangs, names the rank that caused the hang, and saves Python stacks.

`heartbeat.py` records where each rank is, `diagnosis.py` decides from these records which rank hangs, `stacks.py` takes
Python stacks, and `report.py` formats the message. Two detectors use these: `launcher_monitor.py` runs in unisono's
launcher and watches its ranks from outside; `rank_watchdog.py` is a thread inside each rank, for runs that torchrun,
srun or mpirun started, where unisono has no process outside the ranks.
"""
