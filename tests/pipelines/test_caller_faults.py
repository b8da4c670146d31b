"""What a pipeline does with arguments that only it can judge, or out of its own will, stays with the request."""

from __future__ import annotations

import logging
import sys

import pytest

from diffusion_backend.errors import InvalidArgumentError, PipelineError
from tests.pipelines.test_steps import make
from tests.support.fakes import DEADLINE_S


@pytest.mark.parametrize("extra", [{"eta": "x"}, {"guidance_rescale": {}}, {"cross_attention_kwargs": "x"}], ids=str)
def test_an_argument_of_a_type_that_the_pipeline_cannot_take_is_refused_by_name(sd, caplog, extra):
    """Found by the fuzz: it fails in the pipeline, before a step is done; the next request is served."""
    caplog.set_level(logging.CRITICAL)
    with sd.running() as running:
        with pytest.raises(InvalidArgumentError, match=r"extra_args|arguments"):
            running.engine.submit(make("a dog", 2, extra_args=extra)).result(DEADLINE_S)
        assert running.engine.submit(make("a dog", 2)).result(DEADLINE_S)


def test_a_pipeline_that_exits_ends_its_own_request_only(sd, monkeypatch, caplog):
    """Code of others may call sys.exit(); the thread on which everybody's requests run must not end with it."""
    caplog.set_level(logging.CRITICAL)
    prepare = type(sd.pipeline).prepare_latents

    def exits(pipeline, batch_size, *args, **kwargs):
        if batch_size == 2:
            sys.exit("no two")
        return prepare(pipeline, batch_size, *args, **kwargs)

    monkeypatch.setattr(type(sd.pipeline), "prepare_latents", exits)
    with sd.running() as running:
        good, bad = running.together([make("a dog", 2), make("a dog", 2, num_outputs_per_prompt=2)])
        with pytest.raises(PipelineError, match="failed in preprocess: SystemExit: no two"):
            bad.result(DEADLINE_S)
        assert good.result(DEADLINE_S)
        assert running.engine.submit(make("a dog", 2)).result(DEADLINE_S)
