"""`unisono federate`: clients that keep their data train one model together, in rounds, with Flower.

Each client is one run of `unisono train`. At the start of a round, the global weights replace the client's weights; the
optimizer state, data position and schedule continue. A federation of one client therefore trains like a plain run.
"""
