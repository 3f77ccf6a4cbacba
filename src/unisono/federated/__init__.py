"""`unisono federate`: clients that keep their data train one model in rounds, through Flower.

Each client is one run of `unisono train`. At the start of a round its weights are replaced by the global ones; the
optimizer's state, the position in its data and the schedule go on. So one client alone trains like a plain run.
"""
