"""Replaces secrets in settings and messages, so that neither run.json nor a tracker stores them.

Four kinds of text are secrets: settings whose names say so (`api_key`, `hub_token`, `password`), the user information
of a URL (`https://user:password@host`), the values of environment variables with such names (`WANDB_API_KEY`), and
texts in the format of well-known access tokens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

REDACTED = "(redacted)"

# A name that merely ends in _token may be a token of a text: stop_token, pad_token.
_NAMES = re.compile(
    r"(^|_)(api_?key|access_?key|secret_?key|private_?key|secret|password|passwd|passphrase|credentials?"
    r"|((hf|hub|api|access|auth|bearer|github|gitlab|wandb|mlflow|tracking|session|refresh|secret)_)token)s?$|^token$",
    re.IGNORECASE,
)
_VARIABLES = re.compile(r"(API_?KEY|ACCESS_?KEY(_ID)?|SECRET|PASSWORD|PASSWD|CREDENTIALS?|TOKEN)$", re.IGNORECASE)
_USER_INFORMATION = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_FORMATS = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|gh[opsu]_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16}|dapi[0-9a-f]{32})"
)
_SHORTEST = 8  # a shorter value of an environment variable could occur in any text by chance


def is_secret_name(name: str) -> bool:
    """Whether the name of a setting says that its value is a secret."""
    return _NAMES.search(name) is not None


def is_redacted(value: Any) -> bool:
    """Whether a stored value contains the placeholder for a secret."""
    if isinstance(value, Mapping):
        return any(is_redacted(each) for each in value.values())
    if isinstance(value, list | tuple):
        return any(is_redacted(each) for each in value)
    return isinstance(value, str) and REDACTED in value


def redacted_text(text: str) -> str:
    """Returns the text without the secrets in it."""
    text = _FORMATS.sub(REDACTED, _USER_INFORMATION.sub(REDACTED, text))
    for value in _secrets_of_environment():
        text = text.replace(value, REDACTED)
    return text


def redacted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings without the secrets in them."""
    return {name: _redacted(name, value) for name, value in values.items()}


def _redacted(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _redacted(str(key), each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(name, each) for each in value]
    if not isinstance(value, str) or not value:
        return value
    return REDACTED if is_secret_name(name) else redacted_text(value)


def _secrets_of_environment() -> list[str]:
    values = [value for name, value in os.environ.items() if _VARIABLES.search(name) and len(value) >= _SHORTEST]
    return sorted(values, key=len, reverse=True)
