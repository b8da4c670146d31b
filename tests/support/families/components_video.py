"""What the families of video and audio need beyond `components`: videos to start from and lively random weights."""

from __future__ import annotations

import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from . import components as parts

LLAVA_IMAGE_TOKEN = parts.VOCAB - 1


def clip(seed: int, frames: int, size: int = 16, *, salt: int = 0) -> list[Image.Image]:
    """Return a video of `frames` different pictures; another one for each seed and salt."""
    return [parts.picture(100 * seed + 50 * salt + frame, size) for frame in range(frames)]


def mask_clip(seed: int, frames: int, size: int = 16) -> list[Image.Image]:
    """Return a video of one mask; another one for each seed."""
    return [parts.mask(seed, size)] * frames


def negative(seed: int) -> dict[str, Any]:
    """Return a negative prompt, for pipelines that need one to be guided; another one for each seed."""
    return {"negative_prompt": ("a white table", "a red river", "a blue frog", "a green lake")[seed % 4]}


def t5(hidden: int = 32, **more: Any) -> dict[str, Any]:
    """Return a T5 text encoder and its tokenizer by the names that pipelines have for them, and `more`."""
    return {"tokenizer": parts.t5_tokenizer(), "text_encoder": parts.t5_encoder(hidden), **more}


def umt5(hidden: int = 32, **more: Any) -> dict[str, Any]:
    """Return a UMT5 text encoder and its tokenizer by the names that pipelines have for them, and `more`."""
    return {"tokenizer": parts.t5_tokenizer(), "text_encoder": parts.umt5_encoder(hidden), **more}


def lively(model: Any, gain: float = 1.5) -> Any:
    """Scale up the weights of a random model, so that its output depends on its input more than on its biases."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(gain)
    return parts.awaken(model).eval()


def offline_ftfy(pipeline: Any) -> Any:
    """Give a pipeline's module an `ftfy` that changes nothing where that package is missing; return the pipeline.

    Those modules import it only if it is installed, but use it anyway.
    """
    _stand_in(pipeline, "ftfy", SimpleNamespace(fix_text=str))
    return pipeline


def offline_torchvision(model: Any) -> Any:
    """Give a model's module the one function that it takes from torchvision, if that is missing; return the model."""
    resize = lambda image, size, interpolation: torch.nn.functional.interpolate(image, size, mode=interpolation)  # noqa: E731
    mode = SimpleNamespace(NEAREST="nearest")
    _stand_in(model, "transforms", SimpleNamespace(functional=SimpleNamespace(resize=resize), InterpolationMode=mode))
    return model


def _stand_in(member: Any, name: str, value: Any) -> None:
    module = sys.modules[member.__module__]
    if not hasattr(module, name):
        setattr(module, name, value)


def llava(hidden: int = 16, *, layers: int = 3) -> Any:
    """Return a LlavaForConditionalGeneration that sees 16 patches of a picture of 32 pixels ."""
    text = transformers.LlamaConfig(**parts.decoder_values(hidden, layers))
    vision = parts.clip_vision_plain(8, size=32).config
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=LLAVA_IMAGE_TOKEN, vision_feature_layer=-1
    )
    config.pad_token_id = parts.llama_tokenizer().pad_token_id
    return transformers.LlavaForConditionalGeneration(config).eval()


def frames_tensor(frames: list[Image.Image]) -> torch.Tensor:
    """Return a video as one tensor of shape (1, channels, frames, height, width) with values from 0 to 1."""
    planes = [np.asarray(frame, np.float32).reshape(frame.height, frame.width, -1) / 255 for frame in frames]
    return torch.from_numpy(np.stack(planes)).permute(3, 0, 1, 2)[None]


def t5_gemma(hidden: int = 32, vision: int = 8) -> Any:
    """Return a T5Gemma2Encoder, which reads text and pictures of 16 pixels."""
    text = parts.decoder_values(hidden, 1) | {"dropout_rate": 0.0}
    sight = transformers.SiglipVisionConfig(
        hidden_size=vision,
        intermediate_size=2 * vision,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
    )
    config = transformers.models.t5gemma2.T5Gemma2EncoderConfig(text_config=text, vision_config=sight)
    return transformers.models.t5gemma2.T5Gemma2Encoder(config).eval()


@cache
def roberta_tokenizer() -> Any:
    """Return a RobertaTokenizer that splits text into bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    names = ("<s>", "<pad>", "</s>", "<unk>", *sorted(ByteLevel.alphabet()), "<mask>")
    return transformers.RobertaTokenizer(
        vocab={token: number for number, token in enumerate(names)}, merges=[], model_max_length=77
    )


def _clap_text(hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": parts.VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 128,
        "projection_dim": hidden,
        "pad_token_id": 1,
        "initializer_range": 0.2,
    }


def clap_text(hidden: int = 32) -> Any:
    """Return a ClapTextModelWithProjection."""
    return transformers.ClapTextModelWithProjection(transformers.ClapTextConfig(**_clap_text(hidden))).eval()


class _Clap(transformers.ClapModel):
    """A ClapModel that gives the features of text as a tensor, as in transformers 4: MusicLDM expects that."""

    def get_text_features(self, *args: Any, **kwargs: Any) -> Any:
        features = super().get_text_features(*args, **kwargs)
        return getattr(features, "pooler_output", features)


def clap(hidden: int = 16) -> Any:
    """Return a ClapModel, which joins text and sound."""
    audio = {
        "spec_size": 8,
        "window_size": 4,
        "num_mel_bins": 8,
        "intermediate_size": 16,
        "depths": [1, 1],
        "num_attention_heads": [1, 1],
        "num_hidden_layers": 1,
        "hidden_size": 192,
        "projection_dim": hidden,
        "patch_size": 2,
        "patch_stride": 2,
        "patch_embed_input_channels": 4,
    }
    config = transformers.ClapConfig(text_config=_clap_text(hidden), audio_config=audio, projection_dim=hidden)
    return _Clap(config).eval()
