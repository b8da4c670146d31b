"""The parts that the families share, made offline: tokenizers, text and image encoders, autoencoders, UNets, pictures.

Tokenizers have a token for each common word of the prompts, as real ones do, and split all else into bytes or
characters. They are made once per process. Models hold weights: make them anew for each pipeline. All text encoders
have `VOCAB` rows of embeddings, at least as many as any tokenizer here has tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    PriorTransformer,
    UnCLIPScheduler,
    UNet2DConditionModel,
    VQModel,
)
from PIL import Image

from . import Case

VOCAB = 512
PROMPTS = ("a red apple on a table", "a blue whale in a river", "a green frog on a leaf", "a white swan in a lake")
# In this order no word's first two letters are found inside of a later one: so merging finds each of them whole.
WORDS = (
    "apple",
    "table",
    "whale",
    "green",
    "blue",
    "river",
    "frog",
    "white",
    "swan",
    "lake",
    "leaf",
    "red",
    "on",
    "in",
    "a",
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{ message['content'] }}{%- else %}"
    "{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{%- else %}{{ part['text'] }}{%- endif %}{%- endfor %}{%- endif %}{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
# The tokens after the bytes: the same numbers in every byte-level tokenizer, so that configurations can name them.
SPECIAL = (
    "<|endoftext|>",
    "<|startoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<think>",
    "</think>",
)
TOKEN_ID = {token: 256 + number for number, token in enumerate(SPECIAL)}


# --- Pipelines ------------------------------------------------------------------------------------------------------


def builder(pipeline: str | type, parts: Mapping[str, Callable[[], Any]], **more: Callable[[], Any]) -> Any:
    """Return a function that builds the pipeline, each of its parts made anew by the function of that name.

    Args:
        pipeline: the name of a class of `diffusers`, or the class.
        parts: how to make the parts; those that the class does not take are left out, so that a table of parts can
            serve a whole family. What it takes and no function makes is None, or its default.
        more: further parts, or others instead of those.
    """
    makers = {**parts, **more}

    def build() -> Any:
        made_class = getattr(diffusers, pipeline) if isinstance(pipeline, str) else pipeline
        given: dict[str, Any] = {}
        for name, parameter in list(inspect.signature(made_class.__init__).parameters.items())[1:]:
            if name in makers:
                given[name] = makers[name]()
            elif name == "requires_safety_checker":
                given[name] = False
            elif parameter.default is inspect.Parameter.empty:
                given[name] = None
        return made_class(**given)

    return build


def part_of(module: str, name: str) -> Any:
    """Return a class from a module of pipelines that is deprecated, or was not yet in older versions of `diffusers`."""
    for place in ("deprecated.", ""):
        with contextlib.suppress(ModuleNotFoundError):
            return getattr(importlib.import_module(f"diffusers.pipelines.{place}{module}"), name)
    raise ModuleNotFoundError(f"diffusers has no pipelines {module}")


def steps_of(kind: str, params: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return the steps of a case's requests: more where the first are left out, so that two are left of the fewest."""
    return (3, 4, 5, 4) if "strength" in params or "image-to-image" in kind else (2, 3, 4, 3)


def together(*functions: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    """Return the function that gives the arguments of all of them for the i-th request."""
    return lambda i: {key: value for function in functions for key, value in function(i).items()}


def image_case(
    pipeline: str | type,
    kind: str,
    parts: Mapping[str, Callable[[], Any]],
    *inputs: Callable[[int], dict[str, Any]],
    params: Mapping[str, Any],
    make: Mapping[str, Callable[[], Any]] | None = None,
    **more: Any,
) -> Case:
    """Return a case that makes pictures: `make` has parts instead of those of the family's table; `more` is Case's."""
    return Case(
        pipeline=pipeline if isinstance(pipeline, str) else pipeline.__name__,
        modality="image",
        kind=kind,
        build=builder(pipeline, parts, **(make or {})),
        params=params,
        inputs=together(*inputs),
        **({"steps": steps_of(kind, params)} | more),
    )


def with_attributes(case: Case, **attributes: Any) -> Case:
    """Return the case, the attributes of its pipeline set: for sizes that no argument tells."""

    def build() -> Any:
        pipe = case.build()
        for name, value in attributes.items():
            if not hasattr(pipe, name):
                raise AttributeError(f"{case.pipeline} has no {name}")
            setattr(pipe, name, value)
        return pipe

    return dataclasses.replace(case, build=build)


# --- Tokenizers -----------------------------------------------------------------------------------------------------


@cache
def _byte_letters() -> list[str]:
    """The letters that byte-level tokenizers write bytes with, in a fixed order."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


@cache
def _characters() -> list[str]:
    return [chr(code) for code in range(33, 127)]


def _with_words(vocab: dict[str, int], before: str = "", after: str = "") -> dict[str, Any]:
    """Return the arguments of a tokenizer that merges the letters of `WORDS`, each between `before` and `after`."""
    vocab, merges = dict(vocab), []
    for word in WORDS:
        letters = [*before, *word[:-1], word[-1] + after]
        begun = letters[0]
        for letter in letters[1:]:
            merges.append((begun, letter))
            begun += letter
            vocab.setdefault(begun, len(vocab))
    return {"vocab": vocab, "merges": list(dict.fromkeys(merges))}


@cache
def clip_tokenizer(pad: str = "<|endoftext|>") -> Any:
    """CLIPTokenizer: 77 places; `pad` is "!" for the second text encoder of some pipelines."""
    letters = _byte_letters()
    ends = [letter + "</w>" for letter in letters if 33 <= ord(letter) < 127]
    vocab = {token: number for number, token in enumerate(letters)}
    vocab |= {token: 256 + number for number, token in enumerate((*ends, "<|startoftext|>", "<|endoftext|>"))}
    return transformers.CLIPTokenizer(**_with_words(vocab, after="</w>"), model_max_length=77, pad_token=pad)


def _scored_words() -> list[tuple[str, float]]:
    """Words and characters for tokenizers that choose the likeliest split; the words are likelier."""
    return [("▁", -2.0), *((c, -3.0) for c in _characters()), *(("▁" + word, -1.0) for word in WORDS)]


@cache
def t5_tokenizer(model_max_length: int = 512) -> Any:
    """T5Tokenizer, which T5TokenizerFast is another name of."""
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *_scored_words()]
    return transformers.T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=model_max_length)


@cache
def byt5_tokenizer() -> Any:
    """ByT5Tokenizer: bytes, so that nothing has to be made."""
    return transformers.ByT5Tokenizer(extra_ids=0, model_max_length=512)


@cache
def xlm_roberta_tokenizer() -> Any:
    """XLMRobertaTokenizer."""
    vocab = [(t, 0.0) for t in ("<s>", "<pad>", "</s>", "<unk>")]
    vocab += [*_scored_words(), ("<mask>", 0.0)]
    return transformers.XLMRobertaTokenizer(vocab=vocab, model_max_length=77)


@cache
def bert_tokenizer(model_max_length: int = 77) -> Any:
    """BertTokenizer, which BertTokenizerFast is another name of."""
    letters = _characters()
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + c for c in letters), *WORDS[:-1]]
    return transformers.BertTokenizer(
        vocab={token: number for number, token in enumerate(vocab)}, model_max_length=model_max_length
    )


@cache
def qwen_tokenizer(
    padding_side: str = "right", *, begins: bool = False, kind: type = transformers.Qwen2Tokenizer
) -> Any:
    """Qwen2Tokenizer with a chat template; also for Qwen3 and for any pipeline that takes some chat tokenizer.

    With `begins` every text begins with a token of its own, so that an empty one is not without tokens.
    """
    vocab = {token: number for number, token in enumerate(_byte_letters())}
    words = _with_words(vocab | TOKEN_ID, before="Ġ")
    tokenizer = kind(**words, model_max_length=4096, padding_side=padding_side)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:])})
    tokenizer.chat_template = CHAT_TEMPLATE
    if begins:
        from tokenizers.processors import TemplateProcessing

        first = "<|startoftext|>"
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, TOKEN_ID[first])]
        )
    return tokenizer


@cache
def llama_tokenizer(padding_side: str = "right") -> Any:
    """LlamaTokenizer, which LlamaTokenizerFast is another name of."""
    vocab = {t: i for i, t in enumerate(("<unk>", "<s>", "</s>", "<pad>", "▁", *_characters()))}
    tokenizer = transformers.LlamaTokenizer(
        **_with_words(vocab, before="▁"), pad_token="<pad>", model_max_length=4096, padding_side=padding_side
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@cache
def gemma_tokenizer(padding_side: str = "right") -> Any:
    """GemmaTokenizer, which GemmaTokenizerFast is another name of."""
    vocab = {t: i for i, t in enumerate(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", "\n", *_characters()))}
    tokenizer = transformers.GemmaTokenizer(
        **_with_words(vocab, before="▁"), model_max_length=4096, padding_side=padding_side, add_bos_token=True
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


# --- Text encoders --------------------------------------------------------------------------------------------------


def _clip_text_config(hidden: int, projection: int, layers: int) -> Any:
    ids = clip_tokenizer()
    return transformers.CLIPTextConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        projection_dim=projection,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=ids.bos_token_id,
        eos_token_id=ids.eos_token_id,
        pad_token_id=ids.pad_token_id,
        hidden_act="gelu",
        initializer_factor=5.0,
    )


def clip_text(hidden: int = 32, *, projection: int = 32, layers: int = 2) -> Any:
    """CLIPTextModel."""
    return transformers.CLIPTextModel(_clip_text_config(hidden, projection, layers)).eval()


def clip_text_projected(hidden: int = 32, *, projection: int = 32, layers: int = 2) -> Any:
    """CLIPTextModelWithProjection."""
    return transformers.CLIPTextModelWithProjection(_clip_text_config(hidden, projection, layers)).eval()


def _t5_values(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "d_model": hidden,
        "d_kv": hidden // 2,
        "d_ff": 2 * hidden,
        "num_layers": layers,
        "num_heads": 2,
        "relative_attention_num_buckets": 8,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
        "is_encoder_decoder": False,
        "use_cache": False,
    }


def t5_encoder(hidden: int = 32, *, layers: int = 1) -> Any:
    """T5EncoderModel."""
    return transformers.T5EncoderModel(transformers.T5Config(**_t5_values(hidden, layers))).eval()


def umt5_encoder(hidden: int = 32, *, layers: int = 1) -> Any:
    """UMT5EncoderModel."""
    return transformers.UMT5EncoderModel(transformers.UMT5Config(**_t5_values(hidden, layers))).eval()


def bert(hidden: int = 32, *, layers: int = 1, positions: int = 128) -> Any:
    """BertModel."""
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.2,
    )
    return transformers.BertModel(config).eval()


def decoder_values(hidden: int = 32, layers: int = 2) -> dict[str, Any]:
    """The values that the configurations of decoder-only language models have in common."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": hidden // 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "bos_token_id": TOKEN_ID["<|startoftext|>"],
        "eos_token_id": TOKEN_ID["<|im_end|>"],
        "pad_token_id": TOKEN_ID["<|endoftext|>"],
        "use_cache": False,
    }


def language_model(kind: str = "LlamaModel", hidden: int = 32, *, layers: int = 2, **values: Any) -> Any:
    """A decoder-only text model by the name of its class in `transformers`, e.g. Gemma2Model, Qwen3ForCausalLM.

    The configuration's class is the model's `config_class`; `values` replace or add to the values it is made from.
    """
    model_class = getattr(transformers, kind)
    return model_class(model_class.config_class(**(decoder_values(hidden, layers) | values))).eval()


def qwen_vl(kind: str = "Qwen2_5_VLForConditionalGeneration", hidden: int = 32, *, layers: int = 2) -> Any:
    """A Qwen2-VL, Qwen2.5-VL or Qwen3-VL model that reads text and pictures (see `qwen_vl_processor`)."""
    model_class = getattr(transformers, kind)
    vision: dict[str, Any] = {"depth": 2, "patch_size": 14, "spatial_merge_size": 2, "num_heads": 2}
    if kind.startswith("Qwen3"):
        vision |= {
            "hidden_size": 32,
            "intermediate_size": 32,
            "out_hidden_size": hidden,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            "patch_size": 16,
        }
    elif kind.startswith("Qwen2_5"):
        vision |= {
            "hidden_size": 32,
            "intermediate_size": 32,
            "out_hidden_size": hidden,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        }
    else:
        vision |= {"embed_dim": 32, "hidden_size": hidden, "mlp_ratio": 2}
    heads = hidden // 2
    sections = [heads // 2 - 2 * (heads // 8), heads // 8, heads // 8]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    config = model_class.config_class(
        text_config=decoder_values(hidden, layers) | {"rope_parameters": rope, "rope_scaling": rope},
        vision_config=vision,
        image_token_id=TOKEN_ID["<|image_pad|>"],
        video_token_id=TOKEN_ID["<|video_pad|>"],
        vision_start_token_id=TOKEN_ID["<|vision_start|>"],
        vision_end_token_id=TOKEN_ID["<|vision_end|>"],
        vocab_size=VOCAB,
        tie_word_embeddings=False,
    )
    return model_class(config).eval()


@cache
def _without_video(kind: str) -> Any:
    """A processor's class that does without the part for videos, which needs torchvision."""
    base = getattr(transformers, kind)
    return type(kind, (base,), {"check_argument_for_proper_class": lambda self, name, argument: type(argument)})


def qwen_vl_processor(kind: str = "Qwen2_5_VLProcessor", *, padding_side: str = "right") -> Any:
    """The processor that goes with `qwen_vl`; pictures become at most 16 patches of the picture encoder."""
    patch = 16 if kind.startswith("Qwen3") else 14
    pictures = transformers.Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=2, temporal_patch_size=2, min_pixels=(2 * patch) ** 2, max_pixels=(4 * patch) ** 2
    )
    return _without_video(kind)(pictures, qwen_tokenizer(padding_side), None, chat_template=CHAT_TEMPLATE)


# --- Picture encoders -----------------------------------------------------------------------------------------------


def _clip_vision_config(hidden: int, projection: int, size: int) -> Any:
    return transformers.CLIPVisionConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        projection_dim=projection,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=size,
        patch_size=size // 4,
        initializer_factor=5.0,
    )


def clip_vision(hidden: int = 32, *, projection: int = 32, size: int = 32) -> Any:
    """CLIPVisionModelWithProjection for pictures of `size`, cut into 16 patches."""
    return transformers.CLIPVisionModelWithProjection(_clip_vision_config(hidden, projection, size)).eval()


def clip_vision_plain(hidden: int = 32, *, size: int = 32) -> Any:
    """CLIPVisionModel, without a projection."""
    return transformers.CLIPVisionModel(_clip_vision_config(hidden, hidden, size)).eval()


def clip_image_processor(size: int = 32) -> Any:
    """CLIPImageProcessor without torchvision."""
    square = {"height": size, "width": size}
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=square)


def siglip_vision(hidden: int = 32, *, size: int = 32) -> Any:
    """SiglipVisionModel."""
    config = transformers.SiglipVisionConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=size,
        patch_size=size // 4,
    )
    return transformers.SiglipVisionModel(config).eval()


def siglip_image_processor(size: int = 32) -> Any:
    """SiglipImageProcessor without torchvision."""
    return transformers.SiglipImageProcessorPil(size={"height": size, "width": size})


# --- Denoisers and autoencoders -------------------------------------------------------------------------------------


def awaken(module: Any, scale: float = 0.1) -> Any:
    """Give weights that begin as zeros (ControlNet's outputs, zero-initialised gates) random values.

    Without this a part that is trained from zero has no effect, and nothing could go wrong in it.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1 and not parameter.any():
                parameter.normal_(std=scale)
    return module


def certain(autoencoder: Any) -> Any:
    """Take an autoencoder's doubt away: its latents are the mean.

    Some pipelines draw the latents of a control picture from torch's global generator, so would not repeat themselves.
    """
    last = getattr(autoencoder, "quant_conv", None) or autoencoder.encoder.conv_out
    half = last.weight.shape[0] // 2
    with torch.no_grad():
        last.weight[half:] = 0.0
        last.bias[half:] = -30.0
    return autoencoder


def vae(latent_channels: int = 4, *, blocks: int = 2, channels: int = 8, **values: Any) -> Any:
    """AutoencoderKL that makes pictures 2 ** (blocks - 1) times smaller.

    For `latent_channels` of 16 and more it has the shift and the missing quantisation layers of the newer models.
    """
    newer = latent_channels >= 16
    settings = {
        "block_out_channels": (channels,) * (blocks - 1) + (2 * channels,),
        "layers_per_block": 1,
        "down_block_types": ("DownEncoderBlock2D",) * blocks,
        "up_block_types": ("UpDecoderBlock2D",) * blocks,
        "latent_channels": latent_channels,
        "norm_num_groups": 4,
        "sample_size": 32,
        "scaling_factor": 1.0 if newer else 0.18215,
        "shift_factor": 0.1 if newer else None,
        "use_quant_conv": not newer,
        "use_post_quant_conv": not newer,
    }
    return certain(AutoencoderKL(**(settings | values))).eval()


def unet_values(context: int = 32, **values: Any) -> dict[str, Any]:
    """What `unet` and `controlnet` are made from; `values` replace or add to it."""
    settings = {
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "norm_num_groups": 8,
        "attention_head_dim": 2,
        "cross_attention_dim": context,
    }
    return settings | values


def unet(context: int = 32, *, channels: int = 4, out_channels: int = 4, size: int = 16, **values: Any) -> Any:
    """UNet2DConditionModel of two levels, the lower one with attention to a text of `context` features."""
    settings = {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "sample_size": size, "in_channels": channels}
    return UNet2DConditionModel(**(unet_values(context) | settings | {"out_channels": out_channels} | values)).eval()


def controlnet(context: int = 32, *, blocks: int = 2, **values: Any) -> Any:
    """ControlNetModel for `unet`; its picture is 2 ** (blocks - 1) times the latent's size, as with `vae`."""
    settings = {"in_channels": 4, "conditioning_embedding_out_channels": (8,) * (blocks - 1) + (16,)}
    return awaken(ControlNetModel(**(unet_values(context) | settings | values))).eval()


def prior(features: int = 32) -> Any:
    """PriorTransformer: from the text's embedding to a picture's."""
    model = awaken(PriorTransformer(num_attention_heads=2, attention_head_dim=8, embedding_dim=features, num_layers=1))
    model.clip_std.data.fill_(1.0)
    return model.eval()


def prior_scheduler() -> Any:
    """UnCLIPScheduler as priors set it."""
    return UnCLIPScheduler(variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=5.0)


def movq() -> Any:
    """VQModel with spatial norms, as Kandinsky has it; makes pictures half as large.

    Its norms, which the latents scale and shift, begin as near to doing nothing as trained ones are; random ones would
    multiply rounding errors.
    """
    model = VQModel(
        block_out_channels=[32, 32],  # its spatial norms have 32 groups
        down_block_types=["DownEncoderBlock2D", "AttnDownEncoderBlock2D"],
        up_block_types=["AttnUpDecoderBlock2D", "UpDecoderBlock2D"],
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
        norm_type="spatial",
        num_vq_embeddings=12,
        vq_embed_dim=4,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".conv_y." in name or ".conv_b." in name:
                parameter.mul_(0.2)
                if name.endswith("conv_y.bias"):
                    parameter.add_(1.0)
    return model.eval()


# --- Pictures -------------------------------------------------------------------------------------------------------


def picture(seed: int, size: int | tuple[int, int] = 32, mode: str = "RGB") -> Image.Image:
    """A coarse random picture; `size` is the side, or the width and the height."""
    width, height = (size, size) if isinstance(size, int) else size
    coarse = np.random.default_rng(seed + 1000).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def mask(seed: int, size: int | tuple[int, int] = 32) -> Image.Image:
    """A white rectangle, to be painted anew, on black; another one for each seed."""
    width, height = (size, size) if isinstance(size, int) else size
    chance = random.Random(seed)
    left, top = chance.randrange(width // 4), chance.randrange(height // 4)
    white = Image.new("L", (width // 2, height // 2), 255)
    black = Image.new("L", (width, height), 0)
    black.paste(white, (left, top))
    return black


def noise(seed: int, *shape: int) -> torch.Tensor:
    """Normally distributed numbers: for embeddings and latents that a request brings along."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1000))
