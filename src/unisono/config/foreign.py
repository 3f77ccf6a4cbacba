"""Maps flags of other trainers to unisono's equivalent setting, or to advice on what to use instead.

The names come from HF Trainer and the diffusers examples, accelerate, Lightning, kohya's sd-scripts and
musubi-tuner, and DiffSynth-Studio, as spelled in their argument parsers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

_RENAMED: dict[str, tuple[str, ...]] = {
    # setting of unisono -> its names in other trainers
    "num_epochs": ("epochs", "num_train_epochs", "max_train_epochs", "max_epochs"),
    "max_steps": ("max_train_steps", "num_steps", "total_steps", "train_steps", "iterations"),
    "batch_size": ("train_batch_size", "per_device_train_batch_size", "per_gpu_train_batch_size", "micro_batch_size"),
    "eval_batch_size": ("per_device_eval_batch_size", "per_gpu_eval_batch_size", "val_batch_size"),
    "gradient_accumulation_steps": ("accumulate_grad_batches", "grad_accum", "grad_accum_steps"),
    "learning_rate": ("lr", "unet_lr", "base_lr"),
    "weight_decay": ("adam_weight_decay",),
    "beta1": ("adam_beta1",),
    "beta2": ("adam_beta2",),
    "epsilon": ("adam_epsilon",),
    "grad_clip": ("max_grad_norm", "gradient_clip_val", "gradient_clipping"),
    "lr_schedule": ("lr_scheduler", "lr_scheduler_type", "scheduler"),
    "warmup_steps": ("lr_warmup_steps", "num_warmup_steps"),
    "optimizer": ("optim", "optimizer_type", "customized_optimizer"),
    "mixed_precision": ("precision", "amp"),
    "compile": ("torch_compile", "dynamo_backend"),
    "blocks_on_host": ("blocks_to_swap",),
    "tf32": ("allow_tf32",),
    "activation_checkpointing": ("gradient_checkpointing", "use_gradient_checkpointing", "use_checkpoint"),
    "num_workers": (
        *("dataloader_num_workers", "max_data_loader_n_workers", "dataset_num_workers"),
        *("num_dataloader_workers", "workers"),
    ),
    "pin_memory": ("dataloader_pin_memory",),
    "prefetch_factor": ("dataloader_prefetch_factor",),
    "output_dir": ("output_path", "default_root_dir", "checkpoint_dir", "logging_dir", "save_dir"),
    "resume": ("resume_from_checkpoint", "ckpt_path"),
    "save_every": ("save_steps", "checkpointing_steps", "save_every_n_steps", "save_freq"),
    "keep_last": ("save_total_limit", "checkpoints_total_limit", "save_last_n_steps", "save_top_k"),
    "eval_every": ("eval_steps", "val_check_interval", "eval_freq"),
    "preview_every": ("sample_every_n_steps", "validation_steps", "sample_interval"),
    "track": ("log_with", "report_to"),
    "track_project": ("wandb_project", "log_tracker_name", "tracker_project_name", "tracker_name"),
    "log_every": ("logging_steps", "log_every_n_steps", "log_interval"),
    "best_metric": ("metric_for_best_model",),
    "gpus": ("gpu_ids", "devices", "num_gpus", "device_ids"),
    "nproc": ("num_processes", "nproc_per_node", "world_size"),
    "nnodes": ("num_nodes", "num_machines"),
    "node_rank": ("machine_rank",),
    "rdzv_endpoint": ("main_process_ip", "main_process_port", "master_addr", "master_port"),
    "backend": ("ddp_backend", "dist_backend"),
    "find_unused_parameters": ("ddp_find_unused_parameters",),
    "bucket_cap_mb": ("ddp_bucket_cap_mb",),
    "sync_batch_norm": ("sync_batchnorm", "sync_bn"),
    "fsdp_cpu_offload": ("fsdp_offload_params", "cpu_offload", "enable_optimizer_cpu_offload"),
    "deterministic": ("full_determinism",),
    "seed": ("data_seed", "random_seed", "seed_everything"),
    # settings of recipes
    "lora_rank": ("network_dim", "lora_r", "lora_dim"),
    "lora_alpha": ("network_alpha",),
    "lora_targets": ("lora_target_modules", "target_modules"),
    "lora_path": ("lora_checkpoint", "network_weights", "preset_lora_path"),
    "dataset_path": ("dataset_base_path", "train_data_dir", "instance_data_dir", "dataset_dir"),
    "model_path": ("pretrained_model_name_or_path", "dit", "model_paths", "model_id_with_origin_paths"),
    "parts_path": ("vae", "t5", "tokenizer_path", "text_encoder1"),
    "caption_dropout": ("caption_dropout_rate", "proportion_empty_prompts"),
    "sigma_sampling": ("timestep_sampling", "weighting_scheme"),
    "shift": ("discrete_flow_shift", "flow_shift"),
    "preview_prompts": ("validation_prompt", "validation_prompts", "sample_prompts"),
    "num_previews": ("num_validation_images",),
    "cache_dir": ("latent_cache_dir", "cache_directory"),
    "attention": ("attn_mode", "sdpa", "flash_attn", "sage_attn", "xformers", "split_attn", "attn_implementation"),
}

_SHARDS = "to train a model that does not fit, use --strategy fsdp (with --fsdp_cpu_offload) or a LoRA"
_TRACKERS = "--track wandb,mlflow sends metrics to trackers; --track my_file.py:MyTracker to any other one"
_API_KEY = "set the environment variable WANDB_API_KEY, because settings are stored, and use --track wandb"
_RUN_NAME = "a tracked run has the name of its folder (--output_dir)"
_EIGHT_BIT = "--base_precision stores frozen weights in 8 or 4 bit; trained weights stay in 32 bit; " + _SHARDS
_CACHED = "latents and embeddings are cached by default (--cache_dir, --no_cache)"
_SIZES = "samples keep their proportions (--max_pixels), or all have one size (--height, --width)"
_DEEPSPEED = "DeepSpeed is not supported; --strategy fsdp shards weights, gradients and optimizer state"
_STATE = "every checkpoint contains optimizer state and data position; run the same command again to resume"
_BY_STEPS = "evaluations, previews and checkpoints are counted in steps (--eval_every, --preview_every, --save_every)"
_HUB = "unisono does not upload anything; `unisono export` writes a folder that you can upload"
_REPEATS = "every sample is used once per epoch; train longer with --num_epochs or --max_steps"

_ANSWERS: dict[str, tuple[str, ...]] = {
    # advice -> the flags of other trainers to which it applies
    "--blocks_on_host stores blocks in host memory; " + _SHARDS: (
        *("use_pinned_memory_for_block_swap", "offload_inactive_dit", "offload_models"),
        *("enable_model_cpu_offload", "cpu_offload_split_threshold", "img_in_txt_in_offloading"),
    ),
    "use --optimizer adamw8bit": ("use_8bit_adam", "use_8bit_optimizer"),
    "Lion is not supported; --optimizer adamw8bit needs even less memory": ("use_lion_optimizer",),
    _EIGHT_BIT: (
        *("fp8_base", "fp8_scaled", "fp8_t5", "fp8_llm", "fp8_models", "quantization", "load_in_8bit"),
        *("load_in_4bit", "quant_options", "base_model_precision"),
    ),
    "use --mixed_precision fp8": ("enable_fp8_training", "fp8_optimizations"),
    _TRACKERS: (
        *("logger", "log_tracker_config", "use_wandb", "wandb", "log_prefix", "enable_wandb_log", "enable_csv_log"),
        *("enable_swanlab_log", "swanlab_project", "enable_tensorboard_log"),
    ),
    _API_KEY: ("wandb_api_key",),
    _RUN_NAME: ("wandb_run_name", "run_name"),
    _REPEATS: ("repeats", "num_repeats", "dataset_repeat", "dataset_repeats"),
    _CACHED: ("cache_latents", "cache_latents_to_disk", "cache_text_encoder_outputs", "vae_cache_cpu"),
    _SIZES: (
        *("resolution", "enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps"),
        *("bucket_no_upscale", "center_crop", "aspect_ratio_bucketing"),
    ),
    _DEEPSPEED: ("deepspeed", "use_deepspeed", "zero_stage", "deepspeed_config_file", "deepspeed_multinode_launcher"),
    "choose it with --strategy fsdp": (
        *("use_fsdp", "fsdp", "fsdp_config", "fsdp_sharding_strategy", "fsdp_auto_wrap_policy", "fsdp_version"),
        *("fsdp_transformer_layer_cls_to_wrap", "fsdp_state_dict_type"),
    ),
    "unisono uses several GPUs without a flag (--gpus chooses them)": ("multi_gpu", "distributed", "use_ddp"),
    "the GPU is chosen by --gpus; --gpus 0 trains on the CPU": ("use_cpu", "no_cuda", "cpu", "device"),
    "write --mixed_precision bf16": ("bf16", "full_bf16"),
    "write --mixed_precision fp16": ("fp16", "full_fp16"),
    "weights are float32 (--dtype), and the computation is in 16 bit (--mixed_precision)": ("dit_dtype", "torch_dtype"),
    "set the warm-up as a number of steps with --warmup_steps": ("warmup_ratio",),
    "use --ema_decay; 0 turns the moving average off": ("use_ema", "ema", "ema_model"),
    "use --lr_scaling linear": ("scale_lr",),
    "use --best_mode max or min": ("greater_is_better",),
    "`unisono export RUN FOLDER --step best` writes the best checkpoint": ("load_best_model_at_end",),
    _STATE: ("save_state", "save_state_on_train_end", "ignore_data_skip", "initial_step", "skip_until_initial_step"),
    _BY_STEPS: (
        *("save_every_n_epochs", "sample_every_n_epochs", "check_val_every_n_epoch", "save_strategy", "eval_strategy"),
        *("evaluation_strategy", "logging_strategy", "sample_at_first", "validation_epochs", "save_last_n_epochs"),
    ),
    _HUB: ("push_to_hub", "hub_model_id", "hub_token", "huggingface_repo_id"),
    "name the run folder with --output_dir": ("output_name", "save_model_as", "save_precision", "training_comment"),
    "put the settings into a YAML file and pass it with --config": ("dataset_config", "config_file", "sample_config"),
    "the model is defined by the files in --model_path": (
        "task",
        "trainable_models",
        "lora_base_model",
        "dit_in_channels",
    ),
    "a LoRA is trained with --lora_rank": ("network_module", "network_args", "use_lora", "network_train_unet_only"),
    "--learning_rate applies to all trained weights": ("text_encoder_lr", "train_text_encoder"),
    "set optimizer arguments with --learning_rate, --weight_decay, --beta1, --beta2 and --epsilon": ("optimizer_args",),
    "noise levels are sampled according to --sigma_sampling, --logit_mean, --logit_std, --mode_scale and --shift": (
        *("sigmoid_scale", "min_timestep", "max_timestep", "num_timestep_buckets", "preserve_distribution_shape"),
        *("min_snr_gamma", "snr_gamma", "noise_offset"),
    ),
    "captions are read from name.txt next to each file in --dataset_path, or from a metadata file there": (
        *("caption_extension", "caption_column", "dataset_metadata_path", "data_file_keys", "instance_prompt"),
    ),
    "workers stay alive until the run ends": ("persistent_data_loader_workers", "dataloader_persistent_workers"),
    "offloading activations is not supported; --activation_checkpointing recomputes them": (
        *("gradient_checkpointing_cpu_offload", "use_gradient_checkpointing_offload"),
    ),
    "the model defines the noise level at which the experts switch; --expert chooses which one is trained": (
        *("timestep_boundary", "dit_high_noise", "max_timestep_boundary", "min_timestep_boundary"),
    ),
}

_COMMAND_FLAGS = ("config", "step")  # flags of `unisono train` and `unisono export` that are not settings

FOREIGN: dict[str, str] = {theirs: ours for ours, names in _RENAMED.items() for theirs in names}
"""unisono's setting for each flag of another trainer that has an equivalent."""
ANSWERS: dict[str, str] = {theirs: answer for answer, names in _ANSWERS.items() for theirs in names}
"""Advice for each flag of another trainer that has no equivalent setting."""


def foreign_answer(
    name: str, settings: Collection[str], recipes_with: Callable[[str], list[str]], prefix: str = "--"
) -> str:
    """Returns what to use instead of a flag of another trainer or another recipe; empty for an unknown name.

    `settings` are the settings of the current recipe. `recipes_with` returns the built-in recipes that have a given
    setting. `prefix` is "--" for a flag and "" for a key in a file.
    """
    answer = ANSWERS.get(name)
    if answer is not None and set(re.findall(r"--(\w+)", answer)) <= {*settings, *_COMMAND_FLAGS}:
        return f"; {answer}"
    ours = FOREIGN.get(name, name)
    if ours in settings:
        return f"; here it is {prefix}{ours}" if ours != name else ""
    if recipes := recipes_with(ours):
        *others, last = recipes
        names = f"{', '.join(others)} and {last}" if others else last
        return f"; {prefix}{ours} is a setting of {names}, not of this recipe"
    return ""
