"""The networks of the model, untrained, and its scheduler."""

from __future__ import annotations

from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from tools.emoji.render import PICTURE_SIZE

LATENT_CHANNELS = 16
LATENT_SIZE = PICTURE_SIZE // 8
TEXT_WIDTH = 192
# Normalisation in groups of 8 rather than the usual 32: the narrow levels have few channels.
NORM_GROUPS = 8


def build_autoencoder() -> AutoencoderKL:
    """Build the autoencoder: `[batch, 3, 64, 64]` in -1..1 to latents `[batch, 16, 8, 8]` and back."""
    return AutoencoderKL(
        block_out_channels=(32, 64, 96, 128),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=NORM_GROUPS,
        sample_size=PICTURE_SIZE,
        scaling_factor=1.0,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=True,
    )


def build_unet() -> UNet2DConditionModel:
    """Build the denoiser of latents, with cross-attention to the text on its two upper levels."""
    return UNet2DConditionModel(
        sample_size=LATENT_SIZE,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=(96, 160, 192),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT_WIDTH,
        # Despite its name, the number of heads.
        attention_head_dim=4,
        norm_num_groups=NORM_GROUPS,
    )


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Build the text encoder: token ids `[batch, 24]` to states `[batch, 24, 192]`."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=4 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=3,
            num_attention_heads=6,
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def build_scheduler() -> DDIMScheduler:
    """Build the noise schedule: its last step is pure noise, where sampling starts."""
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        steps_offset=1,
    )
