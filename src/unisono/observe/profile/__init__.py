"""The profile of some steps of a run: what is profiled, the trace, tables of operators and waits, memory, pictures."""
