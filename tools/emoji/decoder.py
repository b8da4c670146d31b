"""The third stage: the decoder alone, on the latents that the finished denoiser draws."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline

from tools.emoji.autoencoder import LARGEST_LATENT_NOISE, encode_all, picture_loss, reconstruction_error, to_tensor
from tools.emoji.captions import draw_caption, name_prompts
from tools.emoji.device import mixed_precision
from tools.emoji.metrics import NearestEmoji, share_within
from tools.emoji.pipeline import decode, draw_latents
from tools.emoji.sources import Emoji, spread
from tools.emoji.stage import Stage

# A batch has as many latents of the encoder as of the denoiser: the first keep the decoder honest, the
# second are what it is given in use, and are off in ways that noise does not imitate.
BATCH = 16
DRAWN_SHARE = 0.5
# New latents are drawn every so many steps, and the oldest make room for them.
DRAW_EVERY = 16
DRAWN_AT_ONCE = 24
MOST_DRAWN = 2_400
GUIDANCES = (1.5, 6.0)
MEASURED_NAMES = 48


class DecoderStage(Stage):
    """Training of the decoder to draw a sharp picture from a latent that the denoiser made."""

    name = "decoder"
    peak_learning_rate = 1e-3
    warmup_steps = 50

    def __init__(
        self,
        entries: list[Emoji],
        pictures: np.ndarray,
        pipeline: StableDiffusionPipeline,
        seed: int,
        device: torch.device,
        bfloat16: bool,
    ) -> None:
        """`pictures` is `uint8[count, 64, 64, 3]`, in the order of `entries`; `pipeline` draws with what is trained."""
        self._pipeline = pipeline
        self._decoder = pipeline.vae.decoder
        self._decoder.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(
            self._decoder.parameters(), lr=self.peak_learning_rate, betas=(0.9, 0.99), weight_decay=1e-4
        )
        self._entries = entries
        self._seed = seed
        self._device = device
        self._bfloat16 = bfloat16
        self._pictures = to_tensor(pictures).to(device)
        self._originals = pictures
        self._nearest = NearestEmoji(pictures)
        self._latents = encode_all(pipeline.vae, self._pictures)
        self._drawn = self._latents[:0]
        self._drawn_of = torch.zeros(0, dtype=torch.long)

    def step(self, step: int, _progress: float) -> torch.Tensor:
        if step % DRAW_EVERY == 0:
            self._draw_more(step)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        latents, which = self._batch(generator)
        with mixed_precision(self._device, self._bfloat16):
            drawn = self._pipeline.vae.decode(latents).sample
        loss = picture_loss(drawn.float(), self._pictures[which.to(self._device)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._decoder.parameters(), 1.0)
        return loss.detach()

    def state(self) -> dict[str, Any]:
        return {
            "decoder": self._decoder.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "drawn": self._drawn.cpu(),
            "drawn_of": self._drawn_of,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._decoder.load_state_dict(state["decoder"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._drawn = state["drawn"].to(self._device)
        self._drawn_of = state["drawn_of"]

    def measure(self) -> dict[str, float]:
        prompts = name_prompts(self._entries, MEASURED_NAMES)
        latents = draw_latents(self._pipeline, [name for _, name in prompts], range(len(prompts)))
        pictures = decode(self._pipeline, latents)
        ranks = [self._nearest.rank(picture, index) for picture, (index, _) in zip(pictures, prompts, strict=True)]
        originals = self._originals[[index for index, _ in prompts]]
        chosen = self._pictures[spread(len(self._pictures), 2 * MEASURED_NAMES)]
        return {
            "mse": reconstruction_error(self._pipeline.vae, chosen),
            "drawn_mse": float(np.square((pictures / 127.5) - (originals / 127.5)).mean()),
            "top1": share_within(ranks, 1),
        }

    def _batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return latents `[BATCH, 16, 8, 8]`, some drawn and some encoded, and the index of each one's emoji."""
        drawn_count = round(BATCH * DRAWN_SHARE) if len(self._drawn) else 0
        encoded = torch.randint(len(self._latents), (BATCH - drawn_count,), generator=generator)
        scale = LARGEST_LATENT_NOISE * torch.rand(len(encoded), 1, 1, 1, generator=generator)
        clean = self._latents[encoded.to(self._device)]
        noisy = clean + (scale * torch.randn(clean.shape, generator=generator)).to(self._device)
        if not drawn_count:
            return noisy, encoded
        chosen = torch.randint(len(self._drawn), (drawn_count,), generator=generator)
        latents = torch.cat([noisy, self._drawn[chosen.to(self._device)]])
        return latents, torch.cat([encoded, self._drawn_of[chosen]])

    def _draw_more(self, step: int) -> None:
        """Draw latents of some emoji and keep those whose picture is nearest to the emoji that was asked for."""
        rng = random.Random(self._seed * 1_000_003 + step)
        asked = [rng.randrange(len(self._entries)) for _ in range(DRAWN_AT_ONCE)]
        captions = [draw_caption(self._entries[index], rng) or self._entries[index].name for index in asked]
        seeds = [rng.randrange(2**31) for _ in asked]
        latents = draw_latents(self._pipeline, captions, seeds, guidance=rng.uniform(*GUIDANCES))
        pictures = decode(self._pipeline, latents)
        right = [place for place, index in enumerate(asked) if self._nearest.rank(pictures[place], index) == 0]
        self._drawn = torch.cat([self._drawn, latents[right].float()])[-MOST_DRAWN:]
        self._drawn_of = torch.cat([self._drawn_of, torch.tensor([asked[place] for place in right], dtype=torch.long)])
        self._drawn_of = self._drawn_of[-MOST_DRAWN:]
