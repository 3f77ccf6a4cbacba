"""The engine `local`: Flower's ServerApp and ClientApp in this process, without a network and without Ray.

`LocalGrid` is a Grid, Flower's interface between a server and its clients, that calls the ClientApp directly.
Strategies and mods are Flower's own and behave as with any other Grid. Each client still trains in a separate process.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import count
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

_RUN, _SERVER = 1, 1_000_000
_ERROR_IN_CLIENT_APP = 2  # Flower's ErrorCode.CLIENT_APP_RAISED_EXCEPTION


class LocalGrid(Grid):
    """Passes messages between a server and clients in the same process."""

    def __init__(self, app: ClientApp, clients: int, parallel: int) -> None:
        self._app, self._parallel, self._numbers = app, parallel, count(1)
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, _RUN, _SERVER  # a Message needs them
        self._contexts = {
            client + 1: Context(
                run_id=_RUN,
                node_id=client + 1,
                node_config={"partition-id": client, "num-partitions": clients},
                state=RecordDict(),
                run_config={},
            )
            for client in range(clients)
        }
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        """Does nothing, because there is only one run."""

    @property
    def run(self) -> Any:
        """The only run."""
        return SimpleNamespace(run_id=_RUN)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Creates a message to a client."""
        return Message(content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Returns the ids of all clients."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Passes each message to its client, and waits for all replies."""
        messages = list(messages)
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(next(self._numbers))
            message.metadata.__dict__["_run_id"] = _RUN
        with ThreadPoolExecutor(self._parallel) as pool:
            replies = list(pool.map(self._deliver, messages))
        ids = [message.metadata.message_id for message in messages]
        self._replies.update(zip(ids, replies, strict=True))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Returns the replies to these messages."""
        return [self._replies.pop(each) for each in list(message_ids) if each in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Passes messages to clients and returns their replies; `timeout` is ignored."""
        return self.pull_messages(self.push_messages(messages))

    def _deliver(self, message: Message) -> Message:
        try:
            # Copy the message: a mod may modify its content, which the server may send to several clients.
            return self._app(deepcopy(message), self._contexts[message.metadata.dst_node_id])
        except Exception as error:
            return Message(Error(_ERROR_IN_CLIENT_APP, f"{error}"), reply_to=message)
