"""The transformer of darkroom: it is causal, its cache is exact, and it embeds x and y separately."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unisono.recipes.darkroom.models.transformer import NO_ACTION, SEPARATOR_KINDS, HistoryTransformer, Shape, Tokens
from unisono.recipes.darkroom.rooms import NUM_ACTIONS

ROOM, BATCH, LENGTH = 5, 3, 12


def reader(separators: bool = False, dropout: float = 0.0) -> HistoryTransformer:
    """A small model with weights so large that every input affects the output."""
    torch.manual_seed(0)
    shape = Shape(ROOM, LENGTH, 16, 2, 2, 24, dropout=dropout, attention_dropout=dropout, separators=separators)
    model = HistoryTransformer(shape).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def some_tokens(seed: int, separators: bool = False, length: int = LENGTH) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def column(high: int) -> Tensor:
        return torch.randint(high, (BATCH, length), generator=generator)

    return Tokens(
        column(ROOM * ROOM), column(NUM_ACTIONS + 1), column(2), column(SEPARATOR_KINDS) if separators else None
    )


def part(tokens: Tokens, begin: int, end: int) -> Tokens:
    return Tokens(*(None if column is None else column[:, begin:end] for column in tokens))


@pytest.mark.parametrize("separators", [False, True])
def test_a_token_never_sees_the_future_and_always_the_past(separators: bool) -> None:
    model, tokens, others = reader(separators), some_tokens(1, separators), some_tokens(2, separators)
    before = model(tokens)
    for known in range(1, LENGTH):
        mixed = Tokens(
            *(
                None if mine is None else torch.cat([mine[:, :known], other[:, known:]], dim=1)
                for mine, other in zip(tokens, others, strict=True)
            )
        )
        after = model(mixed)
        torch.testing.assert_close(after[:, :known], before[:, :known], rtol=0, atol=1e-12)
        assert (after[:, known:] - before[:, known:]).abs().amax(dim=(0, 2)).min() > 1e-3, "each of them is seen later"


@pytest.mark.parametrize("column", Tokens._fields)
def test_every_part_of_the_first_token_influences_the_last_one(column: str) -> None:
    model, tokens = reader(separators=True), some_tokens(1, separators=True)
    changed = getattr(tokens, column).clone()
    changed[:, 0] = (changed[:, 0] + 1) % 2
    difference = model(tokens) - model(tokens._replace(**{column: changed}))
    assert difference[:, -1].abs().amax(dim=1).min() > 1e-4


@pytest.mark.parametrize("separators", [False, True])
@pytest.mark.parametrize("first", [0, 1, 5, LENGTH])
def test_logits_with_a_cache_equal_those_of_one_pass(separators: bool, first: int) -> None:
    model = reader(separators).eval()
    cache = model.new_cache(BATCH, torch.float64)
    # After clearing, the cache contains nothing of the first history.
    for seed in (1, 2):
        tokens = some_tokens(seed, separators)
        expected = model(tokens)
        cache.clear()
        if first:
            torch.testing.assert_close(model(part(tokens, 0, first), cache), expected[:, :first], rtol=0, atol=1e-12)
        for at in range(first, LENGTH):
            one = model(part(tokens, at, at + 1), cache)
            torch.testing.assert_close(one[:, 0], expected[:, at], rtol=0, atol=1e-12)


def test_rows_of_a_batch_are_independent() -> None:
    model, tokens = reader(), some_tokens(1)
    together = model(tokens)
    for row in range(BATCH):
        alone = model(Tokens(*(None if column is None else column[row : row + 1] for column in tokens)))
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-12)


def test_x_and_y_have_separate_embeddings() -> None:
    model = reader()

    def embedded(x: int, y: int) -> Tensor:
        cell = torch.tensor([[x * ROOM + y]])
        return model.embed(model._one_hot(Tokens(cell, torch.full_like(cell, NO_ACTION), torch.zeros_like(cell))))

    for x1, y1, x2, y2 in ((0, 0, 1, 1), (4, 2, 0, 3), (2, 4, 3, 0)):
        torch.testing.assert_close(embedded(x1, y1) + embedded(x2, y2), embedded(x1, y2) + embedded(x2, y1))
        assert (embedded(x1, y1) - embedded(x1, y2)).abs().max() > 0.1
        assert (embedded(x1, y1) - embedded(x2, y1)).abs().max() > 0.1


def test_one_hot_columns_are_those_of_the_cell_the_action_and_the_reward() -> None:
    model = reader()
    tokens = Tokens(torch.tensor([[13]]), torch.tensor([[NO_ACTION]]), torch.tensor([[1]]))
    assert model._one_hot(tokens).flatten().nonzero().flatten().tolist() == [2, 5 + 3, 10 + NO_ACTION, 16]


def test_dropout_is_active_only_in_training() -> None:
    tokens = some_tokens(1)
    for inside in ("dropout", "attention_dropout"):
        shape = Shape(ROOM, LENGTH, 16, 2, 2, 24, **{inside: 0.5})  # type: ignore[arg-type]
        model = HistoryTransformer(shape)
        assert not torch.equal(model(tokens), model(tokens)), inside
        model.eval()
        assert torch.equal(model(tokens), model(tokens)), inside


def test_the_model_has_the_configured_sizes() -> None:
    model = HistoryTransformer(Shape(room_size=9, context=240, width=64, num_layers=4, num_heads=4, inner=128))
    assert [module.widen.out_features for module in model.blocks] == [128] * 4  # type: ignore[union-attr]
    embedding, positions = (9 + 9 + 6 + 1) * 64, 240 * 64
    block = 64 * 3 * 64 + 64 * 64 + 2 * 64 * 128 + 2 * 64
    assert sum(parameter.numel() for parameter in model.parameters()) == embedding + positions + 4 * block + 64 + 325
