"""Tiny, randomly initialised pipelines, built offline; every kind of denoiser that the tests need."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPAGPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

SEED = 20240
START, END = "<|startoftext|>", "<|endoftext|>"
WORDS = ["a", "an", "the", "in", "on", "of", "red", "blue", "green", "apple", "whale", "cat", "dog", "table", "river"]


def clip_tokenizer() -> CLIPTokenizer:
    """Return a CLIP tokenizer that knows bytes only (a token a character)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(character + "</w>" for character in alphabet), START, END]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=24)


def t5_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that T5 pipelines take: whole words, an end mark, padding."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=24
    )


def clip_text(cls: type = CLIPTextModel, *, hidden: int = 16) -> Any:
    """Return a CLIP text encoder of one layer."""
    size = len(clip_tokenizer())
    config = CLIPTextConfig(
        vocab_size=size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        projection_dim=hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=24,
        bos_token_id=size - 2,
        eos_token_id=size - 1,
        pad_token_id=size - 1,
    )
    return cls(config).eval()


def autoencoder(latent_channels: int = 4, *, blocks: int = 2, **config: Any) -> AutoencoderKL:
    """Return a decoder that doubles the side once a block but the first."""
    return AutoencoderKL(
        block_out_channels=(8,) * blocks,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        sample_size=16,
        **config,
    ).eval()


def unet(cls: type[UNet2DConditionModel] = UNet2DConditionModel) -> UNet2DConditionModel:
    """Return a UNet with attention, for latents of 8×8."""
    return cls(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    ).eval()


class MixingUNet(UNet2DConditionModel):
    """A UNet whose rows look at each other, so that calls of several requests cannot be joined."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See the UNet; the mean over all rows is taken off."""
        output = super().forward(*args, **kwargs)
        sample = output[0]
        mixed = sample - sample.mean(dim=0, keepdim=True) / 2
        return (mixed,) if isinstance(output, tuple) else type(output)(sample=mixed)


def ddim() -> DDIMScheduler:
    """Return a scheduler that takes exactly as many steps as it is asked for."""
    return DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def stable_diffusion(
    cls: type = StableDiffusionPipeline, unet_cls: type[UNet2DConditionModel] = UNet2DConditionModel, **extra: Any
) -> Any:
    """Return a UNet pipeline (or a relative of the same parts) that makes pictures of 16×16."""
    torch.manual_seed(SEED)
    return quiet(
        cls(
            vae=autoencoder(),
            text_encoder=clip_text(),
            tokenizer=clip_tokenizer(),
            unet=unet(unet_cls),
            scheduler=ddim(),
            safety_checker=None,
            feature_extractor=None,
            image_encoder=None,
            requires_safety_checker=False,
            **extra,
        )
    )


def perturbed_attention() -> Any:
    """Return a pipeline that swaps the attention of its shared UNet in each call, for one that mixes rows."""
    return stable_diffusion(StableDiffusionPAGPipeline, pag_applied_layers="mid")


def mixed_rows() -> Any:
    """Return a pipeline whose denoiser fails the self-check."""
    return stable_diffusion(unet_cls=MixingUNet)


def stable_diffusion_3() -> StableDiffusion3Pipeline:
    """Return an MMDiT pipeline with two CLIP encoders and no T5."""
    torch.manual_seed(SEED)
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
    )
    return quiet(
        StableDiffusion3Pipeline(
            transformer=transformer.eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=autoencoder(shift_factor=0.06, scaling_factor=1.5, use_quant_conv=False, use_post_quant_conv=False),
            text_encoder=clip_text(CLIPTextModelWithProjection),
            tokenizer=clip_tokenizer(),
            text_encoder_2=clip_text(CLIPTextModelWithProjection),
            tokenizer_2=clip_tokenizer(),
            text_encoder_3=None,
            tokenizer_3=None,
        )
    )


def flux() -> FluxPipeline:
    """Return a FLUX pipeline (guidance as an embedding, packed latents) with CLIP and T5."""
    torch.manual_seed(SEED)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    t5 = T5EncoderModel(
        T5Config(vocab_size=3 + len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0)
    )
    return quiet(
        FluxPipeline(
            transformer=transformer.eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=autoencoder(shift_factor=0.1, scaling_factor=1.3, use_quant_conv=False, use_post_quant_conv=False),
            text_encoder=clip_text(),
            tokenizer=clip_tokenizer(),
            text_encoder_2=t5.eval(),
            tokenizer_2=t5_tokenizer(),
        )
    )


def quiet(pipeline: Any) -> Any:
    """Switch the progress bar off."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
