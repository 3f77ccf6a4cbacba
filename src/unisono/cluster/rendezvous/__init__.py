"""The rendezvous: how the launchers of several machines agree on who takes part in the next round of a run.

`server.py` runs in the launcher of machine 0 and decides; `client.py` runs in every launcher and is what torch's
elastic agent sees as its `RendezvousHandler`; `authentication.py` checks a shared secret, and `connection.py`
transports JSON messages between client and server.
"""
