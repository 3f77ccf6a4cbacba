"""Which texts are trained on and which are kept for looking: parts of a set, and folds of it.

The same seed gives the same parts in every process.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from unisono.errors import ConfigError

STRATEGIES = ("stratified", "kfold", "timeseries", "group")

Indices = list[int]


def parts(
    num: int,
    ratios: Sequence[float],
    seed: int,
    classes: Sequence[Hashable] | None = None,
    *,
    in_order: bool = False,
    texts: Sequence[Hashable] | None = None,
) -> list[Indices]:
    """Cuts 0 … num - 1 into parts of these ratios; of each class alike where classes are given.

    `in_order`: the first ones, then the next ones, as they stand. `texts`: equal ones come into one part.
    """
    if any(ratio < 0 for ratio in ratios) or not 0.999 < sum(ratios) < 1.001:
        raise ConfigError(f"the parts of a split must add up to 1, got {', '.join(f'{ratio:g}' for ratio in ratios)}")
    wanted = sum(ratio > 0 for ratio in ratios)
    if num < wanted:
        raise ConfigError(f"{num} texts cannot be split into {wanted} parts; give more")
    order = np.arange(num) if in_order else np.random.default_rng(seed).permutation(num)
    order, again = _once(order, texts, wanted)
    if classes is not None and not in_order:
        order = _spread(order, classes)
    sizes = [max(round(ratio * len(order)), int(ratio > 0)) for ratio in ratios]  # no part asked for is empty
    sizes[int(np.argmax(sizes))] += len(order) - sum(sizes)
    ends = np.cumsum(sizes)
    return [_with_equals(part.tolist(), again) for part in np.split(order, ends[:-1])]


def folds(
    num: int,
    num_folds: int,
    strategy: str,
    seed: int,
    classes: Sequence[Hashable] | None = None,
    groups: Sequence[Hashable] | None = None,
    texts: Sequence[Hashable] | None = None,
) -> list[tuple[Indices, Indices]]:
    """(train, validation) of each fold: every text is validated on once (timeseries: all but the first part).

    `texts`: equal ones come into one fold, unless they go by time or by groups of the user's.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"cv_strategy: expected {', '.join(STRATEGIES)}; got {strategy!r}")
    if num_folds < 2:
        raise ConfigError(f"cv_folds: expected at least 2, got {num_folds}")
    if strategy == "timeseries":
        pieces = [piece.tolist() for piece in np.array_split(np.arange(num), num_folds + 1)]
        _check_filled(pieces, num, num_folds + 1)
        return [
            ([each for piece in pieces[: index + 1] for each in piece], pieces[index + 1]) for index in range(num_folds)
        ]
    order, again = np.random.default_rng(seed).permutation(num), dict[int, Indices]()
    if strategy == "group":
        if groups is None:
            raise ConfigError("cv_strategy group: say by what (DataLoaderConfig.group_by, a key of the metadata)")
        pieces = _of_groups(order, groups, num_folds)
    else:
        order, again = _once(order, texts, num_folds)
        if strategy == "stratified" and classes is not None:
            # Class by class, so that dealing them out gives each fold its share of each; evenly mixed classes would
            # be dealt out one to each fold.
            order = np.array([index for members in _members(order, classes) for index in members], dtype=int)
        pieces = [_with_equals(order[index::num_folds].tolist(), again) for index in range(num_folds)]
    _check_filled(pieces, num, num_folds)
    found = []
    for index, piece in enumerate(pieces):
        others = [each for number, other in enumerate(pieces) if number != index for each in other]
        found.append((sorted(others), sorted(piece)))
    return found


def _once(order: np.ndarray, texts: Sequence[Hashable] | None, at_least: int) -> tuple[np.ndarray, dict[int, Indices]]:
    """Each text once, and where those that stand there again are: nobody is asked what he was told."""
    first: dict[Hashable, int] = {}
    again: dict[int, Indices] = {}
    for index in order.tolist() if texts is not None else ():
        chosen = first.setdefault(texts[index], index)  # type: ignore[index]
        if chosen != index:
            again.setdefault(chosen, []).append(index)
    if len(first) < max(1, at_least):  # too few different ones
        return order, {}
    return np.array(list(first.values()), dtype=int), again


def _with_equals(indices: Indices, again: dict[int, Indices]) -> Indices:
    return sorted([*indices, *(other for index in indices for other in again.get(index, ()))])


def _members(order: np.ndarray, of: Sequence[Hashable]) -> list[list[int]]:
    """The indices of each class or group, in this order."""
    members: dict[Hashable, list[int]] = {}
    for index in order.tolist():
        members.setdefault(of[index], []).append(index)
    return list(members.values())


def _spread(order: np.ndarray, classes: Sequence[Hashable]) -> np.ndarray:
    """The same indices, with each class spread evenly from the first to the last."""
    placed = [
        ((place + 0.5) / len(indices), index)
        for indices in _members(order, classes)
        for place, index in enumerate(indices)
    ]
    return np.array([index for _, index in sorted(placed)], dtype=int)


def _of_groups(order: np.ndarray, groups: Sequence[Hashable], num_folds: int) -> list[Indices]:
    """Whole groups in each fold: the largest first, into the fold that has fewest."""
    members = _members(order, groups)
    if len(members) < num_folds:
        raise ConfigError(f"cv_strategy group: {len(members)} groups cannot be cut into {num_folds} folds")
    pieces: list[Indices] = [[] for _ in range(num_folds)]
    for group in sorted(members, key=len, reverse=True):
        min(pieces, key=len).extend(group)
    return pieces


def _check_filled(pieces: Sequence[Sequence[int]], num: int, num_folds: int) -> None:
    if not all(pieces):
        raise ConfigError(f"{num} texts cannot be cut into {num_folds} folds; give more texts, or fewer folds")
