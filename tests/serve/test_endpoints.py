"""What is read from the server's metrics."""

from __future__ import annotations

import pytest

from diffusion_backend.serve.endpoints import Work, parse_work

METRICS = """\
# HELP diffusion_requests_running requests
# TYPE diffusion_requests_running gauge
diffusion_requests_running{model="a"} 2
diffusion_requests_running{model="b"} 1.0
diffusion_requests_waiting{model="a"} 4
nv_inference_pending_request_count{model="a",version="1"} 5
nv_inference_pending_request_count{model="b",version="1"} 0
nv_cpu_utilization 0.5
"""


def test_work_adds_up_all_models_and_both_queues():
    work = parse_work(METRICS)
    assert work == Work(running=3, waiting=9, models=frozenset("ab"))
    assert str(work) == "3 running, 9 waiting"
    assert not work.is_idle


@pytest.mark.parametrize(
    ("metrics", "idle"),
    [
        ('diffusion_requests_running{model="a"} 0\n', True),
        ('diffusion_requests_running{model="a"} 0\ndiffusion_requests_waiting{model="a"} 1\n', False),
        ('diffusion_requests_running{model="a"} 0\nnv_inference_pending_request_count{model="a"} 1\n', False),
        ('nv_inference_pending_request_count{model="a"} 0\n', True),
        ("", True),
    ],
)
def test_idle_as_far_as_is_known(metrics, idle):
    assert parse_work(metrics).is_idle is idle


def test_of_which_models_it_is_known():
    """Triton tells of any model which requests wait, but not which run."""
    twin = 'diffusion_unary_twin{model="a_unary",stream_model="a"} 1\n'
    remote = 'diffusion_unary_twin{model="remote_unary",stream_model="elsewhere"} 1\n'
    foreign = 'nv_inference_pending_request_count{model="foreign",version="1"} 0\n'
    assert parse_work(twin + METRICS + remote + foreign).models == {"a", "b", "a_unary"}
    assert parse_work(foreign).models == frozenset()
