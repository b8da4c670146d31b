"""Sound: Stable Audio, AudioLDM, MusicLDM, ACE-Step, LongCat-Audio, Dance Diffusion."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import transformers
from diffusers import AutoencoderKL, AutoencoderOobleck, DDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines import ace_step, audioldm2, stable_audio, stable_audio_3

from . import Case
from . import components as parts
from .components_video import clap, clap_text, lively, roberta_tokenizer, t5, umt5

GUIDANCE = (None, None, 1.0, None)
WIDTH = 16


def _sound_vae(latent: int) -> Any:
    """Return an autoencoder of stereo sound with 8 samples a second, 2 of them a latent."""
    return lively(
        AutoencoderOobleck(
            encoder_hidden_size=6,
            downsampling_ratios=[1, 2],
            channel_multiples=[2, 4],
            decoder_channels=4,
            decoder_input_channels=latent,
            sampling_rate=8,
        ),
        1.0,
    )


# --- Stable Audio -----------------------------------------------------------------------------------------------------


def _stable_audio() -> Any:
    transformer = diffusers.StableAudioDiTModel(
        sample_size=32,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        num_key_value_attention_heads=2,
        cross_attention_dim=8,
        cross_attention_input_dim=8,
        time_proj_dim=8,
        global_states_input_dim=16,
    )
    projection = stable_audio.StableAudioProjectionModel(
        text_encoder_dim=WIDTH, conditioning_dim=8, min_value=0, max_value=32
    )
    # The scheduler it ships with, CosineDPMSolverMultistepScheduler, needs torchsde.
    scheduler = diffusers.EDMDPMSolverMultistepScheduler(sigma_data=1.0, prediction_type="v_prediction")
    components = t5(WIDTH, transformer=lively(transformer), vae=_sound_vae(4), scheduler=scheduler)
    components["tokenizer"] = parts.t5_tokenizer(32)
    return diffusers.StableAudioPipeline(**components, projection_model=lively(projection))


def _stable_audio_3(name: str) -> Any:
    transformer = diffusers.StableAudio3DiTModel(
        io_channels=8,
        patch_size=1,
        embed_dim=32,
        depth=2,
        num_heads=4,
        cond_token_dim=WIDTH,
        global_cond_dim=WIDTH,
        local_add_cond_dim=9,
        timestep_features_dim=16,
        ff_mult=2,
        num_memory_tokens=3,
        use_differential_attention=False,
    )
    vae = diffusers.AutoencoderSAME(
        patch_size=2,
        encoder_channels=8,
        encoder_c_mults=(2,),
        encoder_strides=(2,),
        encoder_transformer_depths=(1,),
        latent_dim=8,
        use_differential_attention=False,
        dim_heads=4,
        ff_mult=2,
        sampling_rate=16,
    )
    text = parts.decoder_values(WIDTH, 2) | {"sliding_window": 64, "layer_types": ["full_attention"] * 2}
    text = transformers.T5GemmaModuleConfig(**text).to_dict()
    text_config = transformers.T5GemmaConfig(encoder=text, decoder=text, is_encoder_decoder=False)
    duration = stable_audio_3.StableAudio3DurationEmbedder(output_dim=WIDTH, fourier_dim=16)
    return getattr(diffusers, name)(
        transformer=lively(transformer),
        vae=lively(vae),
        text_encoder=transformers.T5GemmaEncoderModel(text_config).eval(),
        tokenizer=parts.gemma_tokenizer(),
        duration_embedder=lively(duration),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1),
    )


# --- Mel spectrograms -------------------------------------------------------------------------------------------------


def _spectrogram_parts() -> dict[str, Any]:
    """Return what turns latents into a spectrogram of 8 mel bins, and that into sound of 16 kHz, and the scheduler."""
    vae = AutoencoderKL(
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 16),
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
    )
    config = transformers.SpeechT5HifiGanConfig(
        model_in_dim=8,
        upsample_initial_channel=16,
        upsample_rates=[2, 2],
        upsample_kernel_sizes=[4, 4],
        resblock_kernel_sizes=[3, 7],
        resblock_dilation_sizes=[[1, 3], [1, 3]],
        normalize_before=False,
    )
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
    )
    return {"vae": lively(vae), "vocoder": lively(transformers.SpeechT5HifiGan(config), 16.0), "scheduler": scheduler}


def _audio_ldm(name: str, encoder: Any, **more: Any) -> Any:
    """AudioLDM and MusicLDM: the text comes in as a class embedding."""
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=2,
        cross_attention_dim=(8, 16),
        class_embed_type="simple_projection",
        projection_class_embeddings_input_dim=WIDTH,
        class_embeddings_concat=True,
    )
    lively(unet.class_embedding, 8.0)  # it gets vectors of length 1
    return getattr(diffusers, name)(
        **_spectrogram_parts(),
        text_encoder=encoder(WIDTH),
        tokenizer=roberta_tokenizer(),
        unet=lively(unet),
        **more,
    )


def _audio_ldm_2() -> Any:
    unet = audioldm2.AudioLDM2UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=(8, 16),
        attention_head_dim=2,
    )
    language = transformers.GPT2Config(
        n_embd=16, n_head=1, n_layer=1, vocab_size=parts.VOCAB, n_positions=128, initializer_range=0.2
    )
    language_model = transformers.GPT2LMHeadModel(language).eval()
    language_model.config.max_new_tokens = 4
    projection = audioldm2.AudioLDM2ProjectionModel(text_encoder_dim=WIDTH, text_encoder_1_dim=8, langauge_model_dim=16)
    return diffusers.AudioLDM2Pipeline(
        **_spectrogram_parts(),
        text_encoder=clap(WIDTH),
        tokenizer=roberta_tokenizer(),
        feature_extractor=None,
        text_encoder_2=parts.t5_encoder(8),
        tokenizer_2=parts.t5_tokenizer(77),
        language_model=language_model,
        projection_model=lively(projection),
        unet=lively(unet),
    )


# --- Others -----------------------------------------------------------------------------------------------------------


def _ace_step() -> Any:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16}
    size = {"hidden_size": 32, "intermediate_size": 64}
    transformer = diffusers.AceStepTransformer1DModel(
        **size, **heads, num_hidden_layers=2, in_channels=24, audio_acoustic_hidden_dim=8
    )
    condition = ace_step.AceStepConditionEncoder(
        **size,
        **heads,
        text_hidden_dim=32,
        timbre_hidden_dim=8,
        num_lyric_encoder_hidden_layers=1,
        num_timbre_encoder_hidden_layers=1,
    )
    return diffusers.AceStepPipeline(
        transformer=lively(transformer),
        condition_encoder=lively(condition),
        text_encoder=parts.language_model("Qwen3Model", 32),
        tokenizer=parts.qwen_tokenizer(),
        vae=_sound_vae(8),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1),
    )


def _longcat() -> Any:
    transformer = diffusers.LongCatAudioDiTTransformer(
        dit_dim=32, dit_depth=2, dit_heads=4, dit_text_dim=32, latent_dim=8, text_conv=False
    )
    vae = diffusers.LongCatAudioDiTVae(
        channels=16, c_mults=[1, 2], strides=[2], latent_dim=8, encoder_latent_dim=16, downsampling_ratio=2
    )
    return diffusers.LongCatAudioDiTPipeline(
        **umt5(32), transformer=lively(transformer), vae=lively(vae, 1.0), scheduler=FlowMatchEulerDiscreteScheduler()
    )


def _dance() -> Any:
    unet = diffusers.UNet1DModel(
        block_out_channels=(32, 32, 64),  # a head of its attention has 32
        extra_in_channels=64,
        sample_size=256,
        sample_rate=1024,
        use_timestep_embedding=False,
        flip_sin_to_cos=True,
        time_embedding_type="fourier",
        mid_block_type="UNetMidBlock1D",
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
        up_block_types=("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
    )
    return diffusers.DanceDiffusionPipeline(unet=lively(unet, 1.0), scheduler=diffusers.IPNDMScheduler())


_case = partial(Case, modality="audio", guidance_scale=GUIDANCE)
_spectrogram = {"audio_length_in_s": 0.004}

CASES = [
    _case(
        pipeline="StableAudioPipeline",
        kind="text",
        build=_stable_audio,
        params={"audio_end_in_s": 4.0},
    ),
    _case(
        pipeline="StableAudio3Pipeline",
        kind="text",
        build=partial(_stable_audio_3, "StableAudio3Pipeline"),
        params={"duration": 2.0},
        guidance_scale=(None, 3.0, None, 3.0),
    ),
    Case(
        pipeline="StableAudio3AudioToAudioPipeline",
        modality="audio",
        kind="audio-to-audio",
        build=partial(_stable_audio_3, "StableAudio3AudioToAudioPipeline"),
        params={"duration": 2.0, "init_noise_level": 0.8},
        inputs=lambda i: {"audio": 0.3 * parts.noise(i, 1, 2, 32)},
    ),
    Case(
        pipeline="StableAudio3InpaintPipeline",
        modality="audio",
        kind="inpaint",
        build=partial(_stable_audio_3, "StableAudio3InpaintPipeline"),
        params={"duration": 2.0, "mask_start_seconds": 0.5, "mask_end_seconds": 1.5},
        inputs=lambda i: {"audio": 0.3 * parts.noise(i, 1, 2, 32)},
    ),
    _case(
        pipeline="AudioLDMPipeline",
        kind="text",
        build=partial(_audio_ldm, "AudioLDMPipeline", clap_text),
        params=_spectrogram,
    ),
    _case(pipeline="AudioLDM2Pipeline", kind="text", build=_audio_ldm_2, params=_spectrogram),
    _case(
        pipeline="MusicLDMPipeline",
        kind="text",
        build=partial(_audio_ldm, "MusicLDMPipeline", clap, feature_extractor=None),
        params=_spectrogram,
    ),
    _case(
        pipeline="AceStepPipeline",
        kind="text",
        build=_ace_step,
        params={"audio_duration": 4.0, "max_text_length": 256, "max_lyric_length": 16, "lyrics": "la la"},
    ),
    _case(
        pipeline="LongCatAudioDiTPipeline",
        kind="text",
        build=_longcat,
        params={"audio_duration_s": 0.002},
    ),
    Case(
        pipeline="DanceDiffusionPipeline",
        modality="audio",
        kind="unconditional",
        build=_dance,
        params={"audio_length_in_s": 0.25},
        has_prompt=False,
    ),
]
