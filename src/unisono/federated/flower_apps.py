"""The apps that Flower's programs load by name; an environment variable names their federation."""

from __future__ import annotations

import os
from pathlib import Path

from unisono.federated.client_app import client_app
from unisono.federated.plan import ENVIRONMENT, Federation
from unisono.federated.server_app import server_app

server = server_app()
client = client_app(Federation.read(Path(os.environ[ENVIRONMENT])))
