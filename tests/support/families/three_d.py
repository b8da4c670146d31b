"""Shap-E: a shape, given as pictures of it from all sides."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import HeunDiscreteScheduler, PriorTransformer
from diffusers.pipelines import shap_e

from . import Case
from . import components as parts
from .components_video import lively

TEXT, LATENT, HIDDEN = 16, 16, 8


class Renderer(shap_e.ShapERenderer):
    """A renderer that takes few samples a ray, in one batch, and the same ones each time.

    The real one draws them from torch's global generator, so that no two calls give the same pictures, and handles
    4096 rays at a time, no fewer. Several fine samples of a ray can jump at the slightest change of the shape.
    """

    def decode_to_image(self, latents: Any, device: Any, size: int = 64) -> Any:
        """Return the pictures from the 20 cameras."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            few = {"ray_batch_size": 20 * size * size, "n_coarse_samples": 8, "n_fine_samples": 1}
            return super().decode_to_image(latents, device, size=size, **few)


def _common(**config: Any) -> dict[str, Any]:
    prior = PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        embedding_dim=LATENT,
        num_embeddings=4 * HIDDEN,  # one for each row of `param_shapes`
        embedding_proj_dim=TEXT,
        time_embed_dim=32,
        clip_embed_dim=2 * LATENT,
        additional_embeddings=0,
        time_embed_act_fn="gelu",
        norm_in_type="layer",
        encoder_hid_proj_type=None,
        added_emb_type=None,
        **config,
    )
    renderer = Renderer(
        param_shapes=((HIDDEN, 93), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN)),
        d_latent=LATENT,
        d_hidden=HIDDEN,
        n_output=12,
        background=(0.1, 0.1, 0.1),
    )
    scheduler = HeunDiscreteScheduler(
        # Its own schedule begins at a sigma of 403, where float32 rounds to 1e-4.
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="sample",
        use_karras_sigmas=True,
        clip_sample=True,
        clip_sample_range=1.0,
    )
    return {"prior": lively(prior), "shap_e_renderer": lively(renderer), "scheduler": scheduler}


def _from_text() -> Any:
    return diffusers.ShapEPipeline(
        **_common(),
        text_encoder=parts.clip_text_projected(TEXT, projection=TEXT),
        tokenizer=parts.clip_tokenizer(),
    )


def _from_picture() -> Any:
    return diffusers.ShapEImg2ImgPipeline(
        **_common(embedding_proj_norm_type="layer"),
        image_encoder=parts.clip_vision_plain(TEXT),
        image_processor=parts.clip_image_processor(),
    )


CASES = [
    Case(
        pipeline="ShapEPipeline",
        modality="video",
        kind="text-to-3d",
        build=_from_text,
        params={"frame_size": 8},
        guidance_scale=(None, None, 1.0, None),
    ),
    Case(
        pipeline="ShapEImg2ImgPipeline",
        modality="video",
        kind="image-to-3d",
        build=_from_picture,
        params={"frame_size": 8},
        inputs=lambda i: {"image": parts.picture(i, 32)},
        guidance_scale=(None, None, 1.0, None),
        has_prompt=False,
    ),
]
