"""Starts the ranks on this machine and restarts them after a failure.

`launcher.py` is the entry point; `agent.py` is torch's elastic agent with unisono's rules; `job_folder.py` is the
folder through which a launcher and its ranks exchange files; `warm_ranks.py` forks the ranks of many short runs.

`agent.py` describes step by step what happens after `kill -9` of one rank on one of two machines.
"""
