"""When to stop: after so many epochs that brought nothing."""

from __future__ import annotations

import math

from unisono.errors import ConfigError


class EarlyStopping:
    """Says after each epoch whether to stop: call it with the value that is watched."""

    def __init__(
        self, patience: int = 5, min_delta: float = 0.001, monitor: str = "val_loss", mode: str = "min"
    ) -> None:
        """Stops when `patience` values in a row were not better than the best by more than `min_delta`."""
        if mode not in ("min", "max"):
            raise ConfigError(f"mode: expected min or max, got {mode!r}")
        if not isinstance(patience, int) or patience < 0:
            raise ConfigError(f"patience: expected a whole number of at least 0, got {patience!r}")
        self.patience, self.min_delta, self.monitor, self.mode = patience, min_delta, monitor, mode
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.best: float | None = None
        self.best_epoch = -1
        self.epochs = 0
        self.counter = 0
        self.early_stop = False

    def __call__(self, value: float) -> bool:
        """Takes the value of the next epoch; True: stop."""
        better = math.isfinite(value) and (self.best is None or self._gain(value, self.best) > self.min_delta)
        if better:
            self.best, self.best_epoch, self.counter = value, self.epochs, 0
        else:
            self.counter += 1
        self.epochs += 1
        self.early_stop = self.early_stop or self.counter >= max(1, self.patience)
        return self.early_stop

    @property
    def improved(self) -> bool:
        """Whether the last value was the best so far."""
        return self.epochs > 0 and self.best_epoch == self.epochs - 1

    def _gain(self, value: float, best: float) -> float:
        return best - value if self.mode == "min" else value - best
