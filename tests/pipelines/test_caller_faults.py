"""What only the pipeline can find out of a request's arguments is still the caller's fault."""

from __future__ import annotations

import logging

import pytest

from diffusion_backend.errors import InvalidArgumentError
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
