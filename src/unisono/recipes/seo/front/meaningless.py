"""Fields of the known SEOConfig that never did anything, and why each is refused when it is set.

A script that leaves them as they are, or writes out their defaults, runs; one that relies on them is told.
"""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any

from unisono.errors import ConfigError

_PROFILED = "nothing was measured by it; put torch.profiler around train_epoch, or read metrics.jsonl of the run"
_DEBUGGED = "nothing was debugged by it; metrics.jsonl of the run has gradient norms, memory and times of every step"
_DRAWN = "no picture is drawn here: this engine reads texts"
_SCALED = "the engine chooses it: fp16 scales the loss by itself, bf16 needs no scaling"
_CAST = "weights stay in 32 bit and token ids whole numbers, whatever is computed in 16 bit"
_GENERATED = "this engine writes no text; `unisono train seo --task snippet` does"
_OF_MODEL = "the model's own config says it"
_P_TUNING = "prompts are not trained here; use_lora=True trains few weights"

_GROUPS: list[tuple[Any, str, str]] = [
    (
        True,
        _PROFILED,
        "profile_data_loading profile_preprocessing profile_model_inference profile_training_loop profile_memory_usage "
        "profile_gpu_utilization profile_cpu_utilization profile_io_operations profile_batch_processing "
        "profile_validation_loop profile_early_stopping profile_lr_scheduling profile_mixed_precision "
        "profile_gradient_accumulation profile_multi_gpu profile_autocast profile_grad_scaler profile_checkpointing "
        "profile_metrics_calculation profile_cross_validation profile_data_splitting profile_model_compilation "
        "profile_optimization_orchestrator profile_memory_optimizer profile_async_data_loader profile_model_compiler "
        "profile_performance_benchmarking profile_evaluation_metrics profile_multi_gpu_training "
        "profile_enhanced_mixed_precision",
    ),
    (
        False,
        _PROFILED,
        "enable_code_profiling enable_autograd_profiler enable_tensorboard_profiler profile_network_operations "
        "profile_logging profile_error_handling profile_input_validation profile_gradio_interface "
        "profile_testing_framework profile_demo_showcase profile_error_handling_validation profile_try_except_blocks "
        "profile_comprehensive_logging profile_pytorch_debugging profile_code_profiling",
    ),
    (
        False,
        _DEBUGGED,
        "debug_memory_usage debug_gradient_norms debug_forward_pass debug_backward_pass debug_device_placement "
        "debug_mixed_precision debug_data_loading debug_validation debug_early_stopping debug_lr_scheduling",
    ),
    (False, _DRAWN, "use_diffusion"),
    (True, _DRAWN, "use_classifier_free_guidance"),
    ("runwayml/stable-diffusion-v1-5", _DRAWN, "diffusion_model_name"),
    (50, _DRAWN, "diffusion_steps"),
    (7.5, _DRAWN, "diffusion_guidance_scale"),
    (512, _DRAWN, "diffusion_height diffusion_width"),
    (1, _DRAWN, "diffusion_batch_size num_images_per_prompt clip_skip"),
    ("ddim", _DRAWN, "scheduler_type"),
    ("low quality, blurry, distorted, watermark, text", _DRAWN, "negative_prompt"),
    ("stable-diffusion", _DRAWN, "pipeline_type"),
    ("lllyasviel/sd-controlnet-canny", _DRAWN, "controlnet_model"),
    ("kandinsky-community/kandinsky-2.2", _DRAWN, "kandinsky_model"),
    ("DeepFloyd/IF-I-XL-v1.0", _DRAWN, "if_model deepfloyd_model"),
    ("wuerstchen/Wuerstchen", _DRAWN, "wuerstchen_model"),
    (0.0, _DRAWN, "eta"),
    ({}, _DRAWN, "cross_attention_kwargs"),
    (0.7, _GENERATED, "temperature"),
    (0.9, _GENERATED, "top_p"),
    (50, _GENERATED, "top_k"),
    (1.1, _GENERATED, "repetition_penalty"),
    (8, _OF_MODEL, "num_attention_heads"),
    (0.1, _OF_MODEL, "attention_dropout hidden_dropout"),
    (True, "attention is PyTorch's own fused one", "use_xformers"),
    (True, "use_mixed_precision and mixed_precision_dtype say it", "fp16"),
    (True, _SCALED, "mixed_precision_grad_scaler mixed_precision_grad_scaler_enabled"),
    (2.0**16, _SCALED, "mixed_precision_grad_scaler_init_scale"),
    (2.0, _SCALED, "mixed_precision_grad_scaler_growth_factor"),
    (0.5, _SCALED, "mixed_precision_grad_scaler_backoff_factor"),
    (2000, _SCALED, "mixed_precision_grad_scaler_growth_interval"),
    (
        True,
        _CAST,
        "mixed_precision_memory_efficient mixed_precision_cast_model mixed_precision_cast_inputs "
        "mixed_precision_autocast_enabled mixed_precision_autocast_cache_enabled",
    ),
    (False, _CAST, "mixed_precision_cast_outputs"),
    ("default", _CAST, "mixed_precision_autocast_mode"),
    (
        "auto",
        "mixed_precision_dtype says it",
        "mixed_precision_autocast_dtype mixed_precision_autocast_fast_dtype mixed_precision_autocast_fallback_dtype",
    ),
    (False, _P_TUNING, "use_p_tuning"),
    (True, _P_TUNING, "p_tuning_v2 prefix_projection"),
    (20, _P_TUNING, "pre_seq_len"),
    (True, "gradients are always summed over the whole batch, once per step", "sync_gradients"),
    (
        False,
        "the gradient of the whole batch is clipped (max_grad_norm): parts of it would be another training",
        "clip_gradients_before_accumulation",
    ),
    (False, "gradients stay where they are computed; a smaller batch_size saves memory", "accumulate_gradients_on_cpu"),
    ("./cache", "HF_HOME says where models from the hub are kept", "cache_dir"),
    ("INFO", "what is said while it trains has no levels; metrics.jsonl and events.jsonl have it all", "log_level"),
    ([], "pages are told apart by the metadata of a data set: DataLoaderConfig(group_by=...)", "seo_domains"),
    ([], "pages are told apart by the metadata of a data set: DataLoaderConfig(group_by=...)", "seo_content_types"),
]

MEANINGLESS: dict[str, tuple[Any, str]] = {
    name: (default, reason) for default, reason, names in _GROUPS for name in names.split()
}
"""Name -> its known default, and why nothing else can be said by it."""


def _default(value: Any) -> Any:
    return field(default_factory=lambda: type(value)()) if isinstance(value, list | dict) else field(default=value)


Meaningless: Any = make_dataclass(
    "Meaningless", [(name, Any, _default(default)) for name, (default, _) in MEANINGLESS.items()], kw_only=True
)
"""The fields, for a config to have beside its own."""


def refuse_meaningless(config: Any) -> None:
    """Refuses a config in which one of them is set, with the reason."""
    for name, (default, reason) in MEANINGLESS.items():
        if (value := getattr(config, name)) != default:
            raise ConfigError(f"{name}={value!r} would do nothing: {reason}")
