"""Small real Wan models in diffusers' layout, and a dataset of images, videos and captions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    T5TokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

from unisono.recipes.wan.data.render import write_video
from unisono.recipes.wan.tiny.models import PipelineParts

SMALL: dict[str, Any] = {
    **{"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16},
    **{"out_channels": 16, "text_dim": 32, "freq_dim": 256, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32},
}


def parts(channels: int = 16, text_length: int = 24) -> PipelineParts:
    """All parts of a pipeline except the transformer; 48 channels as in TI2V-5B."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", "▁a", "▁red", "▁ball", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = T5TokenizerFast(vocab=[(piece, -1.0) for piece in pieces], extra_ids=0, model_max_length=text_length)
    text = UMT5Config(vocab_size=len(pieces), d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4)
    shape: dict[str, Any] = {"base_dim": 3, "z_dim": channels, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    if channels == 48:
        shape |= {"in_channels": 12, "out_channels": 12, "is_residual": True, "patch_size": 2}
        shape |= {"latents_mean": [0.0] * 48, "latents_std": [1.0] * 48, "scale_factor_spatial": 16}
    vae = AutoencoderKLWan(**shape, temperal_downsample=[False, True, True])
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return PipelineParts(tokenizer, UMT5EncoderModel(text).eval(), vae.eval(), scheduler)


def model(config: dict[str, Any] = SMALL, seed: int = 0) -> Any:
    """A transformer with random weights."""
    torch.manual_seed(seed)
    return WanTransformer3DModel(**config)


def save_pipelines(root: Path) -> dict[str, Path]:
    """Pipelines of all three kinds, saved by diffusers itself."""
    wide = {**SMALL, "in_channels": 48, "out_channels": 48}
    pipelines: dict[str, dict[str, Any]] = {
        "2.1": {**parts()._asdict(), "transformer": model()},
        "a14b": {**parts()._asdict(), "transformer": model(), "transformer_2": model(seed=1), "boundary_ratio": 0.875},
        "5b": {**parts(48)._asdict(), "transformer": model(wide), "expand_timesteps": True},
    }
    for name, components in pipelines.items():
        WanPipeline(**components).save_pretrained(root / name)
    return {name: root / name for name in pipelines}


def save_image_pipelines(root: Path) -> dict[str, Path]:
    """Image-to-video pipelines of all kinds, saved by diffusers itself."""
    torch.manual_seed(5)
    clip = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 4}
    encoder = CLIPVisionModel(CLIPVisionConfig(**clip, image_size=32, patch_size=16, projection_dim=16)).eval()
    processor = CLIPImageProcessor(crop_size=32, size=32)
    channels = {**SMALL, "in_channels": 36}
    embeds = {**channels, "image_dim": 32, "added_kv_proj_dim": 24}
    with_clip = {**parts(text_length=512)._asdict(), "image_encoder": encoder, "image_processor": processor}
    experts = {"transformer": model(channels), "transformer_2": model(channels, seed=1), "boundary_ratio": 0.9}
    last = model({**embeds, "pos_embed_seq_len": 10})
    torch.nn.init.normal_(last.condition_embedder.image_embedder.pos_embed, std=0.1)  # the constructor leaves zeros
    pipelines: dict[str, dict[str, Any]] = {
        "i2v": {**with_clip, "transformer": model(embeds)},
        "flf2v": {**with_clip, "transformer": last},
        "i2v-a14b": {**parts()._asdict(), **experts},
    }
    for name, components in pipelines.items():
        WanImageToVideoPipeline(**components).save_pretrained(root / name)
    return {name: root / name for name in pipelines}


def save_videos(folder: Path) -> Path:
    """Four videos of two sizes and lengths, with captions; the first has a picture for its first frame."""
    folder.mkdir(parents=True)
    pixels = torch.randint(256, (9, 32, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    for number in range(4):
        frames = pixels[: 9 if number < 3 else 5, :, : 32 if number % 2 else 64]
        write_video(frames.contiguous(), folder / f"v{number}.mp4", 8.0)
        (folder / f"v{number}.txt").write_text(f"a red ball {number}")
    Image.fromarray(pixels[3].numpy()).save(folder / "v0.first.png")
    return folder


def save_data(folder: Path) -> Path:
    """Five images of two shapes and three videos of two lengths, with captions."""
    folder.mkdir(parents=True)
    pixels = torch.randint(256, (9, 32, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    for number in range(5):
        image = pixels[number, :, : 32 if number % 2 else 64]
        Image.fromarray(image.contiguous().numpy()).save(folder / f"p{number}.png")
        (folder / f"p{number}.txt").write_text(f"a red ball {number}")
    for number in range(3):
        write_video(pixels[: 9 if number else 7, :, :32].contiguous(), folder / f"f{number}.mp4", 8.0)
        (folder / f"f{number}.txt").write_text("a ball")
    return folder
