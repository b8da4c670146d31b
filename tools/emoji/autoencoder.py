"""The first stage: an autoencoder of the pictures, then its decoder alone on slightly noisy latents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL

from tools.emoji.device import mixed_precision
from tools.emoji.networks import build_autoencoder
from tools.emoji.sources import spread
from tools.emoji.stage import Stage

BATCH = 16
KL_WEIGHT = 3e-6
EDGE_WEIGHT = 0.5
# The encoder rests for the last part of the stage. What remains is cheaper, and the decoder learns to
# draw a sharp picture from a latent that is a little off, as those that the denoiser makes will be.
DECODER_ONLY_FROM = 0.6
LARGEST_LATENT_NOISE = 0.25
MEASURED_PICTURES = 96


class AutoencoderStage(Stage):
    """Training of the autoencoder on all the pictures."""

    name = "autoencoder"
    peak_learning_rate = 2e-3
    warmup_steps = 100

    def __init__(self, pictures: np.ndarray, seed: int, device: torch.device, bfloat16: bool) -> None:
        """`pictures` is `uint8[count, 64, 64, 3]`."""
        torch.manual_seed(seed)
        self.autoencoder = build_autoencoder().to(device)
        self.optimizer = torch.optim.AdamW(
            self.autoencoder.parameters(), lr=self.peak_learning_rate, betas=(0.9, 0.99), weight_decay=1e-4
        )
        self._seed = seed
        self._device = device
        self._bfloat16 = bfloat16
        self._pictures = to_tensor(pictures).to(device)
        self._latents: torch.Tensor | None = None

    def step(self, step: int, progress: float) -> torch.Tensor:
        if self._latents is None and progress >= DECODER_ONLY_FROM:
            self._rest_encoder()
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        batch = torch.randint(len(self._pictures), (BATCH,), generator=generator).to(self._device)
        target = self._pictures[batch]
        with mixed_precision(self._device, self._bfloat16):
            if self._latents is None:
                posterior = self.autoencoder.encode(target).latent_dist
                noise = torch.randn(posterior.mean.shape, generator=generator).to(self._device)
                latents = posterior.mean + posterior.std * noise
                divergence = posterior.kl().float().mean()
            else:
                scale = LARGEST_LATENT_NOISE * torch.rand(BATCH, 1, 1, 1, generator=generator)
                noise = scale * torch.randn(self._latents[batch].shape, generator=generator)
                latents = self._latents[batch] + noise.to(self._device)
                divergence = torch.zeros((), device=self._device)
            drawn = self.autoencoder.decode(latents).sample
        loss = picture_loss(drawn.float(), target) + KL_WEIGHT * divergence
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.autoencoder.parameters(), 1.0)
        return loss.detach()

    def state(self) -> dict[str, Any]:
        return {
            "autoencoder": self.autoencoder.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "encoder_rests": self._latents is not None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.autoencoder.load_state_dict(state["autoencoder"])
        self.optimizer.load_state_dict(state["optimizer"])
        if state["encoder_rests"]:
            self._freeze_encoder()

    def measure(self) -> dict[str, float]:
        chosen = self._pictures[spread(len(self._pictures), MEASURED_PICTURES)]
        return {"mse": reconstruction_error(self.autoencoder, chosen)}

    def _rest_encoder(self) -> None:
        standardise_latents(self.autoencoder, encode_all(self.autoencoder, self._pictures))
        self._freeze_encoder()

    def _freeze_encoder(self) -> None:
        self.autoencoder.encoder.requires_grad_(False)
        self._latents = encode_all(self.autoencoder, self._pictures)


def to_tensor(pictures: np.ndarray) -> torch.Tensor:
    """Turn `uint8[count, 64, 64, 3]` into `float32[count, 3, 64, 64]` in -1..1."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float().div(127.5).sub(1.0).contiguous()


def picture_loss(drawn: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compare pictures by value and, so that edges stay clean, by the steps between neighbours."""
    error = drawn - target
    edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
    return error.abs().mean() + error.square().mean() + EDGE_WEIGHT * edges


@torch.no_grad()
def encode_all(autoencoder: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """Return the mean latents `[count, 16, 8, 8]` of all the pictures, in float32."""
    return torch.cat([autoencoder.encode(part).latent_dist.mean for part in _parts(pictures)])


@torch.no_grad()
def reconstruction_error(autoencoder: AutoencoderKL, pictures: torch.Tensor) -> float:
    """Return the mean squared error of pictures in -1..1 after encoding and decoding."""
    errors = [
        (autoencoder.decode(autoencoder.encode(part).latent_dist.mean).sample - part).square().mean(dim=(1, 2, 3))
        for part in _parts(pictures)
    ]
    return torch.cat(errors).mean().item()


@torch.no_grad()
def standardise_latents(autoencoder: AutoencoderKL, latents: torch.Tensor) -> None:
    """Fold the mean and spread of each latent channel into the weights, so that all are 0 and 1.

    A Stable Diffusion pipeline knows one scale for all the channels, and diffusion wants them alike. At
    the picture's border the decoder's padding no longer matches exactly; it learns that afterwards.
    """
    spread_of = latents.std(dim=(0, 2, 3))
    mean = latents.mean(dim=(0, 2, 3))
    channels = len(mean)
    last, first = autoencoder.encoder.conv_out, autoencoder.decoder.conv_in
    last.weight[:channels] /= spread_of[:, None, None, None]
    last.bias[:channels] = (last.bias[:channels] - mean) / spread_of
    # The second half of the encoder's output is the logarithm of the variance.
    last.bias[channels:] -= 2 * spread_of.log()
    first.bias += torch.einsum("oiyx,i->o", first.weight, mean)
    first.weight *= spread_of[None, :, None, None]


def _parts(pictures: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split pictures so that a pass over all of them stays small in memory."""
    return iter(pictures.split(64))
