"""Readers of images, videos, captions and model files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.reader import Reader, in_memory, write
from unisono.errors import UnisonoError
from unisono.recipes.common.bad_files import BadMedia

_MEDIA_ERRORS = (UnisonoError, BadMedia)
_MP4_WORDS = (b"moov", b"mdat", b"trak", b"stsz", b"stco", b"stts", b"elst", b"tkhd", b"\0\0\0\1", b"\0\0\0\0free")


def _pixels(frames: int = 9) -> Any:
    return np.random.default_rng(0).integers(0, 255, (frames, 32, 48, 3), dtype=np.uint8)


def _write_video(folder: Path) -> None:
    """A second of video with sound."""
    import av

    with av.open(str(folder / "video.mp4"), "w") as container:
        video = container.add_stream("libx264", rate=8)
        video.width, video.height, video.pix_fmt = 48, 32, "yuv420p"
        sound = container.add_stream("aac", rate=16000, layout="mono")
        for pixels in _pixels():
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(video.encode())
        samples = np.sin(np.arange(16000) / 20).astype(np.float32)[None]
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(sound.encode(frame))
        container.mux(sound.encode())


def _read_video(folder: Path) -> None:
    from unisono.recipes.wan.data.media import fit, probe, read

    path = folder / "video.mp4"
    facts = probe(path)
    sizes = fit(facts, num_frames=5, height=16, width=16, max_pixels=0, multiple=16, fps=4.0)
    read(path, sizes, fps=4.0, start="middle")


def _read_clips(folder: Path) -> None:
    from unisono.recipes.clips.video.clips import clips

    for number, _ in enumerate(clips(folder / "video.mp4", 0.5, 2, 32, 8000)):
        if number > 20:
            break


def _read_footage(folder: Path) -> None:
    from unisono.recipes.clips.video.footage import Footage

    footage = Footage(folder / "video.mp4")
    end = min(footage.duration, 2.0)
    for number, _ in enumerate(footage.frames(end / 2, end)):
        if number > 50:
            break
    footage.key_frame(end / 2)
    footage.picture_at(end / 2, (32, 32))
    for _ in footage.sound(0.0, end, 8000, "mono"):
        pass


def _write_images(folder: Path) -> None:
    from PIL import Image

    frames = [Image.fromarray(pixels) for pixels in _pixels(4)]
    frames[0].save(folder / "a.png")
    frames[0].save(folder / "b.jpg", exif=Image.Exif())
    frames[0].save(folder / "c.gif", save_all=True, append_images=frames[1:], duration=125)
    frames[0].save(folder / "d.webp", save_all=True, append_images=frames[1:], duration=125)
    frames[0].convert("P").save(folder / "e.bmp")


def _read_images(folder: Path) -> None:
    from unisono.recipes.wan.data.media import fit, probe, read

    failed: BadMedia | UnisonoError | None = None
    for path in sorted(folder.iterdir()):
        try:
            sizes = fit(probe(path), num_frames=5, height=16, width=16, max_pixels=0, multiple=16, fps=0.0)
            read(path, sizes, fps=0.0)
        except _MEDIA_ERRORS as error:
            failed = error
    if failed is not None:
        raise failed


def _png() -> bytes:
    from PIL import Image

    return in_memory(lambda file: Image.fromarray(_pixels(1)[0]).save(file, "png"))


def _write_listed(name: str, content: str) -> Any:
    def valid(folder: Path) -> None:
        write({name: content, "a.png": _png(), "b.png": _png(), "a.txt": "a caption", "b.txt": "another"})(folder)

    return valid


def _read_folder(folder: Path) -> None:
    from unisono.recipes.wan.data.sources import read_sources

    read_sources(folder, leave_out_bad=True)


def _write_latents(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"latent": torch.ones(16, 3, 4, 4)}, folder / "latent.safetensors")
    save_file({"embeddings": torch.ones(5, 8)}, folder / "embeds.safetensors")


def _read_latents(folder: Path) -> None:
    from types import SimpleNamespace

    from unisono.recipes.wan.data.precomputed import read_embedding, read_latent

    failed: BadMedia | None = None
    geometry: Any = SimpleNamespace(channels=16, patch=2)
    for read in (
        lambda: read_latent(folder / "latent.safetensors", geometry),
        lambda: read_embedding(folder / "embeds.safetensors", 8, 16),
    ):
        try:
            read()
        except BadMedia as error:
            failed = error
    if failed is not None:
        raise failed


def _write_packs(folder: Path) -> None:
    import torch

    from unisono.recipes.common.packs import Packs

    Packs(folder).write({"a": torch.ones(3, 4), "b": torch.zeros(2, 2, dtype=torch.bfloat16)})


def _read_packs(folder: Path) -> None:
    from unisono.recipes.common.packs import PackReader, Packs

    entries = list(Packs(folder).find().values())
    reader = PackReader(folder, entries)
    for index in range(len(entries)):
        reader[index]


_TRANSFORMER: dict[str, Any] = {
    **{"_class_name": "WanTransformer3DModel", "patch_size": [1, 2, 2], "num_attention_heads": 2, "num_layers": 2},
    **{"attention_head_dim": 12, "in_channels": 16, "out_channels": 16, "text_dim": 32, "freq_dim": 256, "ffn_dim": 32},
    "rope_max_seq_len": 32,
}


def _write_pipeline(folder: Path) -> None:
    index = {
        **{"_class_name": "WanPipeline", "_diffusers_version": "0.36.0", "boundary_ratio": None},
        **{"transformer": ["diffusers", "WanTransformer3DModel"], "vae": ["diffusers", "AutoencoderKLWan"]},
        **{"tokenizer": ["transformers", "T5TokenizerFast"], "scheduler": ["diffusers", "UniPCMultistepScheduler"]},
    }
    write(
        {
            "model_index.json": json.dumps(index),
            "transformer/config.json": json.dumps(_TRANSFORMER),
            "tokenizer/tokenizer_config.json": '{"model_max_length": 512}',
            "scheduler/scheduler_config.json": '{"_class_name": "UniPCMultistepScheduler", "flow_shift": 3.0}',
        }
    )(folder)


def _read_pipeline(folder: Path) -> None:
    from unisono.recipes.wan.models.load import build_meta, describe, transformer_config

    described = describe(folder)
    build_meta(transformer_config(described))


def _write_lora(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    state = {}
    for block in range(2):
        name = f"transformer.blocks.{block}.attn1.to_q"
        state[f"{name}.lora_A.weight"], state[f"{name}.lora_B.weight"] = torch.ones(2, 24), torch.ones(24, 2)
    metadata = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 2, "transformer.r": 2})}
    save_file(state, folder / "lora.safetensors", metadata)


def _read_lora(folder: Path) -> None:
    from unisono.recipes.wan.models.load import build_meta
    from unisono.recipes.wan.models.lora import open_lora

    arguments = {name: value for name, value in _TRANSFORMER.items() if name != "_class_name"}
    open_lora(build_meta(arguments), folder / "lora.safetensors")


_LIST_WORDS = (b"a.png,", b"file_name,text\n", b'"', b"video", b"caption", b"../outside/secret.mp4", b"a.png\n")

READERS = [
    Reader("video", "unisono.recipes.wan.data.decode", _write_video, _read_video, _MEDIA_ERRORS, words=_MP4_WORDS),
    Reader(
        "video_clips", "unisono.recipes.clips.video.clips", _write_video, _read_clips, _MEDIA_ERRORS, words=_MP4_WORDS
    ),
    Reader(
        "footage", "unisono.recipes.clips.video.footage", _write_video, _read_footage, _MEDIA_ERRORS, words=_MP4_WORDS
    ),
    Reader("images", "unisono.recipes.wan.data.media", _write_images, _read_images, _MEDIA_ERRORS),
    Reader(
        "metadata_csv",
        "unisono.recipes.wan.data.metadata",
        _write_listed("metadata.csv", "file_name,text\na.png,a caption\nb.png,another\n"),
        _read_folder,
        damaged=("metadata.csv",),
        words=_LIST_WORDS,
    ),
    Reader(
        "metadata_jsonl",
        "unisono.recipes.wan.data.metadata",
        _write_listed("metadata.jsonl", '{"file_name": "a.png", "text": "a"}\n{"file_name": "b.png", "text": "b"}\n'),
        _read_folder,
        damaged=("metadata.jsonl",),
        words=_LIST_WORDS,
    ),
    Reader(
        "captions",
        "unisono.recipes.wan.data.sources",
        _write_listed("c.txt", "no image"),
        _read_folder,
        damaged=("*.txt",),
    ),
    Reader("latents", "unisono.recipes.wan.data.precomputed", _write_latents, _read_latents, _MEDIA_ERRORS),
    Reader("packs", "unisono.recipes.common.packs", _write_packs, _read_packs),
    Reader("wan_pipeline", "unisono.recipes.wan.models.load", _write_pipeline, _read_pipeline),
    Reader("lora", "unisono.recipes.wan.models.lora", _write_lora, _read_lora),
]
