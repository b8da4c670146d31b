"""The second stage: the denoiser of latents and the text encoder that steers it."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.models.attention_processor import AttnProcessor
from transformers import CLIPTokenizer

from tools.emoji.autoencoder import encode_all, to_tensor
from tools.emoji.captions import draw_caption, name_prompts
from tools.emoji.device import mixed_precision
from tools.emoji.metrics import NearestEmoji, share_within
from tools.emoji.networks import build_scheduler, build_text_encoder, build_unet
from tools.emoji.pipeline import assemble, draw
from tools.emoji.sources import Emoji
from tools.emoji.stage import Stage

BATCH = 16
AVERAGE_DECAY = 0.999
# In terms of the clean picture, the loss on v weighs a step by its signal-to-noise ratio plus one. The
# ratio is capped here, by drawing the almost clean steps less often: they would else take much of the
# training and change little in the picture.
LARGEST_SIGNAL_TO_NOISE = 5.0
MEASURED_NAMES = 48


class DenoiserStage(Stage):
    """Training of the UNet and the text encoder on the latents of all the pictures."""

    name = "denoiser"
    peak_learning_rate = 8e-4
    warmup_steps = 200

    def __init__(
        self,
        entries: list[Emoji],
        pictures: np.ndarray,
        autoencoder: AutoencoderKL,
        tokenizer: CLIPTokenizer,
        seed: int,
        device: torch.device,
        bfloat16: bool,
    ) -> None:
        """`pictures` is `uint8[count, 64, 64, 3]`, in the order of `entries`."""
        torch.manual_seed(seed + 1)
        unet = build_unet().to(device, memory_format=torch.channels_last)
        text_encoder = build_text_encoder(tokenizer).to(device)
        if device.type == "cpu":
            # For heads this narrow, PyTorch's fused attention is slower on a CPU than plain products.
            unet.set_attn_processor(AttnProcessor())
            text_encoder.set_attn_implementation("eager")
        self._trained = torch.nn.ModuleDict({"unet": unet, "text_encoder": text_encoder})
        self._average = copy.deepcopy(self._trained).requires_grad_(False).eval()
        self.optimizer = torch.optim.AdamW(
            self._trained.parameters(), lr=self.peak_learning_rate, betas=(0.9, 0.99), weight_decay=1e-2, fused=True
        )
        self._updates = 0
        self._entries = entries
        self._seed = seed
        self._device = device
        self._bfloat16 = bfloat16
        self._tokenizer = tokenizer
        self._nearest = NearestEmoji(pictures)
        self._latents = encode_all(autoencoder, to_tensor(pictures).to(device))
        self._scheduler = build_scheduler()
        self._shares = time_shares(self._scheduler.alphas_cumprod)
        self.pipeline = assemble(autoencoder, self._average["unet"], self._average["text_encoder"], tokenizer)

    def step(self, step: int, _progress: float) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        batch = shuffled_batch(len(self._entries), BATCH, step, self._seed)
        clean = self._latents[batch.to(self._device)]
        noise = torch.randn(clean.shape, generator=generator).to(self._device)
        times = draw_times(self._shares, BATCH, generator).to(self._device)
        noisy = self._scheduler.add_noise(clean, noise, times).contiguous(memory_format=torch.channels_last)
        velocity = self._scheduler.get_velocity(clean, noise, times)
        captions = self._captions(batch.tolist(), step)
        with mixed_precision(self._device, self._bfloat16):
            states = self._trained["text_encoder"](captions).last_hidden_state
            predicted = self._trained["unet"](noisy, times, states).sample
        loss = (predicted.float() - velocity).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained.parameters(), 1.0)
        return loss.detach()

    @torch.no_grad()
    def update(self) -> None:
        super().update()
        # A young average follows fast, or it would remember the untrained weights.
        decay = min(AVERAGE_DECAY, (1 + self._updates) / (10 + self._updates))
        torch._foreach_lerp_(list(self._average.parameters()), list(self._trained.parameters()), 1 - decay)
        self._updates += 1

    def state(self) -> dict[str, Any]:
        return {
            "trained": self._trained.state_dict(),
            "average": self._average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "updates": self._updates,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._trained.load_state_dict(state["trained"])
        self._average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._updates = state["updates"]

    def measure(self) -> dict[str, float]:
        prompts = name_prompts(self._entries, MEASURED_NAMES)
        pictures = draw(self.pipeline, [name for _, name in prompts], range(len(prompts)))
        ranks = [self._nearest.rank(picture, index) for picture, (index, _) in zip(pictures, prompts, strict=True)]
        return {"top1": share_within(ranks, 1), "top5": share_within(ranks, 5)}

    def _captions(self, indices: list[int], step: int) -> torch.Tensor:
        """Draw a caption for each emoji and return its token ids `[batch, 24]`."""
        rng = random.Random(self._seed * 1_000_003 + step)
        texts = [draw_caption(self._entries[index], rng) for index in indices]
        ids = self._tokenizer(
            texts,
            padding="max_length",
            max_length=self._tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        return ids.to(self._device)


def shuffled_batch(count: int, batch: int, step: int, seed: int) -> torch.Tensor:
    """Return the indices of a step's batch when every pass over `range(count)` is shuffled anew.

    It follows from the numbers alone, so a run that resumes continues as if it had never stopped.
    """
    first, last = step * batch, (step + 1) * batch
    passes = range(first // count, (last - 1) // count + 1)
    orders = [
        torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + number)) for number in passes
    ]
    start = first - passes.start * count
    return torch.cat(orders)[start : start + batch]


def time_shares(signal: torch.Tensor) -> torch.Tensor:
    """Return how often each time is drawn, in all 1, from the squared share of the signal there, in 0..1."""
    ratio = signal / (1 - signal)
    weights = (ratio.clamp(max=LARGEST_SIGNAL_TO_NOISE) + 1) / (ratio + 1)
    return weights / weights.sum()


def draw_times(shares: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw `count` times by their shares, one from each of as many equal slices of the whole.

    The loss then varies less from step to step than with independent draws.
    """
    places = (torch.arange(count) + torch.rand(count, generator=generator)) / count
    return torch.searchsorted(shares.cumsum(0), places).clamp(max=len(shares) - 1)
