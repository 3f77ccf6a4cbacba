"""Processes and machines: who am I, start the ranks, agree, signals."""
