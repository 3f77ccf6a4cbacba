"""Models of the recipe seo: loading by name, training with and without LoRA, exporting, and inference."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seo_models import TEXTS, both_folder, decoder_folder, encoder_folder
from unisono.errors import ConfigError, UserError
from unisono.recipes.seo.data.tokens import Tokenize
from unisono.recipes.seo.export import write_classifier, write_cross_encoder, write_sentence_transformer
from unisono.recipes.seo.models.encoder import Encoder, pad, pool
from unisono.recipes.seo.models.folders import locate, nothing_fetched
from unisono.recipes.seo.models.load import (
    load_classifier,
    load_cross_encoder,
    load_encoder,
    load_tokenizer,
    load_writer,
    most_tokens,
    prompts_of,
)
from unisono.recipes.seo.settings import Config
from unisono.recipes.seo.trained import open_ranker, open_scorer

LONG = " ".join(f"word{number} and more" for number in range(400))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    torch.manual_seed(0)


def config_for(name: str | Path, **further: Any) -> Config:
    return Config(model_name=str(name), **{"max_length": 64, "query_length": 16, **further})


def loaded(name: str | Path, **further: Any) -> tuple[Encoder, Any]:
    config = config_for(name, **further)
    tokenizer = load_tokenizer(str(name), None, Path())
    return load_encoder(config, tokenizer).eval(), tokenizer


def embedded(encoder: Encoder, tokenizer: Any, texts: list[str], max_length: int = 64) -> torch.Tensor:
    rows = [np.array(row) for row in Tokenize(tokenizer, max_length)(texts)]
    with torch.no_grad():
        return encoder(*pad(rows, tokenizer.pad_token_id))


def sentence_transformer(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def largest(first: Any, second: Any) -> float:
    return float(np.abs(np.asarray(first) - np.asarray(second)).max())


# Vectors -----------------------------------------------------------------------------------------------------------


def test_minilm_embeds_as_sentence_transformers_does() -> None:
    encoder, tokenizer = loaded("minilm", max_length=256)
    theirs = sentence_transformer(locate("minilm")).encode([*TEXTS, LONG])
    assert largest(embedded(encoder, tokenizer, [*TEXTS, LONG], 256), theirs) < 1e-5


def test_each_pooling_uses_the_right_tokens() -> None:
    vectors, mask = torch.randn(2, 4, 3), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    assert torch.equal(pool(vectors, mask, "cls"), vectors[:, 0])
    assert torch.equal(pool(vectors, mask, "last"), torch.stack([vectors[0, 2], vectors[1, 0]]))
    assert torch.allclose(pool(vectors, mask, "mean"), torch.stack([vectors[0, :3].mean(0), vectors[1, 0]]))


@pytest.mark.parametrize("make", [encoder_folder, decoder_folder])
def test_padding_does_not_change_a_vector(tmp_path: Path, make: Any) -> None:
    encoder, tokenizer = loaded(make(tmp_path))
    together = embedded(encoder, tokenizer, TEXTS)
    alone = torch.cat([embedded(encoder, tokenizer, [text]) for text in TEXTS])
    assert largest(together, alone) < 1e-6
    assert torch.allclose(together.norm(dim=1), torch.ones(len(TEXTS)))


def test_batches_are_padded_to_a_multiple_and_never_fully_masked() -> None:
    ids, mask = pad([np.array([5, 6, 7]), np.array([], dtype=np.int32)], 9)
    assert ids.tolist() == [[5, 6, 7, 9, 9, 9, 9, 9], [9] * 8]
    assert mask.sum(1).tolist() == [3, 1]


def test_a_decoder_pools_its_last_token_and_an_encoder_the_mean_by_default(tmp_path: Path) -> None:
    assert loaded(decoder_folder(tmp_path / "decoder"))[0].pooling == "last"
    assert loaded(encoder_folder(tmp_path / "encoder"))[0].pooling == "mean"
    assert loaded(tmp_path / "encoder", pooling="cls")[0].pooling == "cls"


def test_float64_models_return_float64_vectors(tmp_path: Path) -> None:
    encoder, tokenizer = loaded(encoder_folder(tmp_path))
    assert embedded(encoder.double(), tokenizer, TEXTS).dtype == torch.float64


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_every_trained_weight_gets_a_gradient(tmp_path: Path, lora_rank: int) -> None:
    encoder, tokenizer = loaded(encoder_folder(tmp_path), lora_rank=lora_rank)
    rows = [np.array(row) for row in Tokenize(tokenizer, 64)(TEXTS)]
    (encoder(*pad(rows, tokenizer.pad_token_id)) * torch.randn(len(TEXTS), 32)).sum().backward()
    trained = {name: weight for name, weight in encoder.named_parameters() if weight.requires_grad}
    assert trained
    assert [name for name, weight in trained.items() if weight.grad is None] == []


# Export -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [encoder_folder, decoder_folder])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_an_exported_model_embeds_the_same_in_sentence_transformers_and_transformers(
    tmp_path: Path, make: Any, lora_rank: int
) -> None:
    from transformers import AutoModel, AutoTokenizer

    encoder, tokenizer = loaded(make(tmp_path / "base"), lora_rank=lora_rank)
    with torch.no_grad():  # as if trained
        for weight in (weight for weight in encoder.parameters() if weight.requires_grad):
            weight.add_(0.05 * torch.randn_like(weight))
    ours, out = embedded(encoder, tokenizer, [*TEXTS, LONG]), tmp_path / "out"
    write_sentence_transformer(encoder, tokenizer, out, 64, base="base")
    assert largest(ours, embedded(*loaded(tmp_path / "base"), [*TEXTS, LONG])) > 1e-3
    assert largest(sentence_transformer(out).encode([*TEXTS, LONG]), ours) < 1e-5

    again: Any = AutoModel.from_pretrained(out).eval()
    reader = AutoTokenizer.from_pretrained(out)
    batch = reader([*TEXTS, LONG], padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        vectors = again(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    theirs = torch.nn.functional.normalize(pool(vectors, batch["attention_mask"], encoder.pooling), dim=-1)
    assert largest(theirs, ours) < 1e-5
    assert largest(embedded(*loaded(out), [*TEXTS, LONG]), ours) < 1e-5  # and training continues from there
    assert loaded(out)[0].pooling == encoder.pooling


def test_an_exported_lora_gives_the_same_vectors_on_its_base(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModel

    base = encoder_folder(tmp_path / "base")
    encoder, tokenizer = loaded(base, lora_rank=2)
    for name, weight in encoder.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    write_sentence_transformer(encoder, tokenizer, tmp_path / "out", 64, base=str(base))
    put_on = PeftModel.from_pretrained(AutoModel.from_pretrained(base), str(tmp_path / "out" / "adapter"))
    theirs = Encoder(put_on, "mean").eval()
    assert largest(embedded(theirs, tokenizer, TEXTS), embedded(encoder, tokenizer, TEXTS)) < 1e-6


def test_an_exported_tokenizer_does_not_truncate_by_default(tmp_path: Path) -> None:
    encoder, tokenizer = loaded(encoder_folder(tmp_path / "base"))
    Tokenize(tokenizer, 8)([LONG])  # which the tokenizer stores
    write_sentence_transformer(encoder, tokenizer, tmp_path / "out", 64)
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["truncation"] is None


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    encoder, tokenizer = loaded(encoder_folder(tmp_path / "base"))
    before = (tmp_path / "base" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match=r"already contains config\.json; choose another folder"):
        write_sentence_transformer(encoder, tokenizer, tmp_path / "base", 64)
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == before


def test_prompts_of_a_model_are_loaded_used_and_exported(tmp_path: Path) -> None:
    encoder, tokenizer = loaded(encoder_folder(tmp_path / "base"))
    encoder.prompts = {"query": "query: ", "page": "passage: "}
    write_sentence_transformer(encoder, tokenizer, tmp_path / "out", 64)
    assert prompts_of(str(tmp_path / "out")) == {"query": "query: ", "page": "passage: "}
    ranker, theirs = open_ranker(tmp_path / "out"), sentence_transformer(tmp_path / "out")
    for kind, name in (("query", "query"), ("page", "document")):
        assert largest(ranker.embed(TEXTS, kind), theirs.encode(TEXTS, prompt_name=name)) < 1e-5  # type: ignore[arg-type]


def test_an_exported_cross_encoder_gives_the_same_scores_in_sentence_transformers(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    base = encoder_folder(tmp_path / "base")
    config, tokenizer = config_for(base, max_length=40), load_tokenizer(str(base), None, tmp_path)
    model = load_cross_encoder(config, tokenizer).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    write_cross_encoder(model, tokenizer, tmp_path / "out", 56)
    queries = ["a web server", "pictures"]
    ours = open_ranker(tmp_path / "out").scores(queries, [*TEXTS, LONG])
    theirs = CrossEncoder(str(tmp_path / "out"), device="cpu")
    for query, row in zip(queries, ours, strict=True):
        assert largest(theirs.predict([(query, page) for page in [*TEXTS, LONG]]), row) < 1e-5
    assert ours.std() > 1e-3
    with pytest.raises(UserError, match="use scores"):
        open_ranker(tmp_path / "out").embed(TEXTS)


def test_an_exported_classifier_keeps_the_names_of_its_classes(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    base = encoder_folder(tmp_path / "base")
    tokenizer = load_tokenizer(str(base), None, tmp_path)
    model = load_classifier(config_for(base), tokenizer, 3)
    write_classifier(model, tokenizer, tmp_path / "out", 64, names=["poor", "fair", "good"])
    again: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert again.config.id2label == {0: "poor", 1: "fair", 2: "good"}
    scorer = open_scorer(tmp_path / "out")
    assert scorer.names == ["poor", "fair", "good"]
    result = scorer.scores([*TEXTS, LONG])
    assert result.shape == (6, 3)
    assert torch.allclose(result.sum(1), torch.ones(6, dtype=torch.float64))
    assert torch.allclose(scorer.scores([LONG])[0], result[-1], atol=1e-6)


# Tokenizers, heads and new weights ---------------------------------------------------------------------------------


def test_a_tokenizer_without_a_padding_token_gets_one_without_enlarging_the_model(tmp_path: Path) -> None:
    folder = decoder_folder(tmp_path)
    tokenizer: Any = load_tokenizer(str(folder), None, tmp_path)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    model: Any = load_classifier(config_for(folder), tokenizer, 2).eval()
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    rows = [np.array(row) for row in Tokenize(tokenizer, 64)(TEXTS)]
    ids, mask = pad(rows, tokenizer.pad_token_id)
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=mask).logits
        for row, logits in zip(rows, together, strict=True):  # the head uses the last token of each text
            alone = model(input_ids=torch.from_numpy(row)[None]).logits[0]
            assert torch.allclose(alone, logits, atol=1e-6)


def test_a_new_head_is_the_same_in_every_process_and_follows_the_seed(tmp_path: Path) -> None:
    folder = encoder_folder(tmp_path)
    tokenizer = load_tokenizer(str(folder), None, tmp_path)

    def head(seed: int, drawn_before: int) -> torch.Tensor:
        torch.manual_seed(seed)
        torch.randn(drawn_before)
        model: Any = load_classifier(config_for(folder), tokenizer, 2)
        return model.classifier.weight.detach()

    assert torch.equal(head(5, 0), head(5, 3))
    assert not torch.equal(head(5, 0), head(6, 0))


def test_a_different_number_of_classes_gets_a_new_head(tmp_path: Path) -> None:
    base = encoder_folder(tmp_path / "base")
    tokenizer = load_tokenizer(str(base), None, tmp_path)
    write_classifier(load_classifier(config_for(base), tokenizer, 3), tokenizer, tmp_path / "three", 64)
    model: Any = load_classifier(config_for(tmp_path / "three"), tokenizer, 5)
    assert model.classifier.weight.shape[0] == 5
    assert model.config.problem_type == "single_label_classification"


def _fingerprint(folder: Path) -> str:
    torch.manual_seed(7)
    tokenizer: Any = load_tokenizer("tiny", lambda: TEXTS, folder)
    encoder = load_encoder(Config(model_name="tiny"), tokenizer)
    weights = b"".join(weight.detach().numpy().tobytes() for weight in encoder.parameters())
    return hashlib.sha256(weights + tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def test_tiny_models_are_the_same_in_another_process(tmp_path: Path) -> None:
    code = "import sys, pathlib, test_seo_models as it; print(it._fingerprint(pathlib.Path(sys.argv[1])))"
    there = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "there")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=120,
    )
    assert there.stdout.strip() == _fingerprint(tmp_path / "here"), there.stderr


def test_the_tokenizer_of_a_tiny_model_is_trained_once_and_reused(tmp_path: Path) -> None:
    first = load_tokenizer("tiny", lambda: TEXTS, tmp_path)
    second = load_tokenizer("tiny", None, tmp_path)
    assert first.get_vocab() == second.get_vocab()
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]
    with pytest.raises(UserError, match="the tokenizer that this run trained"):
        load_tokenizer("tiny", None, tmp_path / "elsewhere")


def test_a_tiny_model_has_max_length_positions(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("tiny", lambda: TEXTS, tmp_path)
    encoder = load_encoder(Config(model_name="tiny", max_length=1000), tokenizer)
    assert (most_tokens(encoder) or 0) >= 1000


# LoRA --------------------------------------------------------------------------------------------------------------


def test_a_lora_begins_as_its_base_and_trains_nothing_else(tmp_path: Path) -> None:
    base = encoder_folder(tmp_path)
    plain, tokenizer = loaded(base)
    encoder, _ = loaded(base, lora_rank=2)
    assert largest(embedded(plain, tokenizer, TEXTS), embedded(encoder, tokenizer, TEXTS)) < 1e-7
    trained = [name for name, weight in encoder.named_parameters() if weight.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert sum("query" in name for name in trained) == 4  # two layers, A and B each
    assert not any("pooler" in name for name in trained)


def test_a_lora_with_a_head_trains_the_head_too_and_is_merged_with_it(tmp_path: Path) -> None:
    base = encoder_folder(tmp_path / "base")
    tokenizer: Any = load_tokenizer(str(base), None, tmp_path)
    model = load_classifier(config_for(base, lora_rank=2, lora_targets="query,value"), tokenizer, 2).eval()
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name.split(".")[-3] for name in trained if "lora_" not in name} == {"modules_to_save"}
    assert {name.split(".")[-4] for name in trained if "lora_" in name} == {"query", "value"}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in trained:
                weight.add_(torch.randn_like(weight))
        ids, mask = pad([np.array(row) for row in Tokenize(tokenizer, 64)(TEXTS)], tokenizer.pad_token_id)
        ours = model(input_ids=ids, attention_mask=mask).logits
    write_classifier(model, tokenizer, tmp_path / "out", 64)
    again: Any = load_classifier(config_for(tmp_path / "out"), tokenizer, 2).eval()
    with torch.no_grad():
        assert largest(again(input_ids=ids, attention_mask=mask).logits, ours) < 1e-5


def test_unknown_lora_targets_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora_targets: there is no layer 'q_proj'; this model's blocks have dense"):
        loaded(encoder_folder(tmp_path), lora_rank=2, lora_targets="query, q_proj")


# Folders that cannot be used ---------------------------------------------------------------------------------------


def _without(name: str) -> Any:
    return lambda folder: [path.unlink() for path in folder.glob(name)]


def _config(**values: Any) -> Any:
    def change(folder: Path) -> None:
        stored = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(stored | values))

    return change


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _damaged(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def _index(file: str) -> Any:
    def change(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))

    return change


def _modules(*kinds: str, path: str = "", pooling: dict[str, Any] | None = None) -> Any:
    def change(folder: Path) -> None:
        listed = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind in kinds]
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {}))
        if pooling is not None:
            listed.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
        (folder / "modules.json").write_text(json.dumps(listed))

    return change


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_without("*.safetensors"), "has no weights"),
        (_pickled, "has only pytorch_model.bin, a pickle"),
        (_damaged, "cannot be loaded"),
        (_without("token*"), "has no tokenizer"),
        (_without("config.json"), "has no config.json"),
        (_config(model_type="nobody_knows"), "does not support the model type 'nobody_knows'"),
        (_config(model_type=None), "does not support the model type None"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "expected a JSON object"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "is a LoRA"),
        (_config(num_hidden_layers=3), "weights that config.json requires are missing"),
        (_config(hidden_size=64), "cannot be loaded"),
        (_config(vocab_size=10), "cannot be loaded"),
        (_index("../../model.safetensors"), "lists files that do not exist"),
        (_index("missing.safetensors"), "lists files that do not exist"),
        (_modules("Transformer", "Dense", pooling={}), "has a Dense module"),
        (_modules("Transformer", path="../other"), "which is outside the folder"),
        (_modules("Transformer", pooling={"pooling_mode": "max"}), "pooling mode max.*--pooling"),
        (_modules("Transformer", pooling={"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}), "cls"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "its tokenizer cannot be loaded"),
    ],
)
def test_an_unusable_folder_is_reported_in_one_line(tmp_path: Path, spoil: Any, told: str) -> None:
    spoil(encoder_folder(tmp_path / "model"))
    with pytest.raises(ConfigError, match=told) as caught:
        loaded(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_the_pooling_of_a_folder_can_be_overridden(tmp_path: Path) -> None:
    _modules("Transformer", pooling={"pooling_mode": "max"})(encoder_folder(tmp_path / "model"))
    assert loaded(tmp_path / "model", pooling="mean")[0].pooling == "mean"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("./nowhere", "there is no such folder"),
        ("someone/some-model", "the hub is offline or cannot be reached"),
        ("no such: name", "there is no such folder, and it is not a valid hub id"),
    ],
)
def test_a_missing_model_is_reported_in_one_line(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        locate(name)


def test_a_run_that_names_a_model_of_the_hub_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    calls: list[bool] = []

    def fetch(name: str, *, local_files_only: bool, **_: Any) -> str:
        calls.append(local_files_only)
        return "."

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    locate("someone/some-model")
    with nothing_fetched():
        locate("someone/some-model")
    assert calls == [False, True]


def test_if_minilms_package_is_missing_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "unisono\[seo\]"'):
        locate("minilm")


def test_a_max_length_beyond_the_models_positions_is_rejected_with_the_limit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reads at most 64 tokens, not 100; use --max_length 64 or less"):
        loaded(encoder_folder(tmp_path / "encoder"), max_length=100)
    folder = decoder_folder(tmp_path / "decoder", positions=77)
    with pytest.raises(ConfigError, match="reads at most 77 tokens, not 77; use --max_length 72 or less"):
        loaded(folder, max_length=77)  # padded to 80


def test_a_model_that_cannot_do_the_task_is_rejected_with_the_reason(tmp_path: Path) -> None:
    folder = both_folder(tmp_path / "t5")
    with pytest.raises(ConfigError, match="is an encoder-decoder, which cannot embed"):
        loaded(folder)
    with pytest.raises(ConfigError, match="minilm cannot generate text: bert is an encoder"):
        load_writer(Config(), load_tokenizer("minilm", None, tmp_path))


# Inference ------------------------------------------------------------------------------------------------------


def test_a_ranker_does_not_depend_on_the_batching_of_texts(tmp_path: Path) -> None:
    ranker = open_ranker(encoder_folder(tmp_path))
    texts = [*TEXTS, LONG, *TEXTS[::-1]]
    whole = ranker.embed(texts)
    assert largest(whole, torch.cat([ranker.embed([text]) for text in texts])) < 1e-6
    scores = ranker.scores(TEXTS[:2], texts)
    assert largest(scores, ranker.embed(TEXTS[:2], "query") @ whole.T) < 1e-6
    assert scores.shape == (2, len(texts))
    assert abs(float(scores[0, 0]) - 1) < 1e-5  # it is the text itself
    assert ranker.scores([], texts).shape == (0, len(texts))
    assert ranker.scores(TEXTS, []).shape == (len(TEXTS), 0)


def test_minilm_ranks_the_relevant_page_first() -> None:
    pages = ["Bake the dough for forty minutes.", "nginx serves static files over HTTP.", "The cat sleeps all day."]
    assert open_ranker("minilm").scores(["fast web server"], pages).argmax().item() == 1


def test_a_model_without_a_classification_head_is_not_a_scorer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a run of the task score nor a model with a classification head"):
        open_scorer(encoder_folder(tmp_path))


SMALL = {"model_name": "tiny", "max_steps": 2, "batch_size": 8, "num_workers": 0, "num_eval": 8, "max_length": 48}


def run_of(folder: Path, **settings: Any) -> tuple[Path, Path]:
    """A run of the recipe, and the folder it is exported to."""
    import unisono
    from unisono.engine.export import export_run

    run = Path(unisono.train("seo", **SMALL, **settings, output_dir=str(folder / "run")).folder)
    export_run(run, folder / "out")
    return run, folder / "out"


@pytest.mark.parametrize("method", ["bi", "cross"])
def test_a_run_ranks_pages_like_its_exported_folder(tmp_path: Path, method: str) -> None:
    from seo_data import made, write_ranking

    data = write_ranking(tmp_path / "data.jsonl", 40)
    run, out = run_of(tmp_path, data_path=str(data), method=method)
    queries, pages = ([getattr(made(number), name) for number in range(6)] for name in ("query", "page"))
    ours = open_ranker(run).scores(queries, pages)
    assert largest(ours, open_ranker(out).scores(queries, pages)) < 1e-6
    assert ours.std() > 0
    with pytest.raises(UserError, match=r"is a run of the task rank; expected a run of .* with task score"):
        open_scorer(run)


def test_a_run_scores_pages_like_its_exported_folder_including_calibration(tmp_path: Path) -> None:
    rows = [{"text": f"{TEXTS[number % 5]} {number}", "label": 100 + number * 0.5} for number in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run, out = run_of(tmp_path, task="score", data_path=str(tmp_path / "data.jsonl"))
    ours = open_scorer(run).scores(TEXTS)
    assert largest(ours, open_scorer(out).scores(TEXTS)) < 1e-6
    assert ours.shape == (5,)
    assert 100 <= float(ours.min()) <= float(ours.max()) <= 120  # in the unit of the labels
