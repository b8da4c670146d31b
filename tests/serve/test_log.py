"""The server's log, taken apart."""

from __future__ import annotations

import pytest

from diffusion_backend.serve.log import LoadProgress, explain_end, first_line, parse_line

FAILED = (
    "E1130 15:05:26.901381 3474 model_lifecycle.cc:642] \"failed to load 'bad' version 1: Internal: ValueError: "
    'no \\"weights\\"\\n\\nAt:\\n  /models/bad/1/model.py(3): initialize\\n"'
)


def test_line_of_the_server():
    line = parse_line(FAILED + "\n")
    assert (line.level, line.source) == ("E", "model_lifecycle.cc")
    assert line.text.startswith(
        "failed to load 'bad' version 1: Internal: ValueError: no \"weights\"\n\nAt:\n  /models"
    )
    assert line.is_load_failure
    assert line.raw == FAILED


@pytest.mark.parametrize(
    ("raw", "readable"),
    [
        (FAILED, True),
        ('I1130 15:05:26.652261 3474 model.py:14] "hello from a model"', True),
        ("printed by a model", True),
        ('W1130 15:05:26.652261 3474 server.cc:14] "something odd"', True),
        ('I1130 15:05:25.315829 3474 model_lifecycle.cc:472] "loading: bad:1"', False),
        ('W1130 15:05:26.903440 3474 metrics.cc:798] "DCGM unable to start: DCGM initialization error"', False),
        ("Error: Failed to initialize NVML", False),
        ("+-------+---------+", False),
        ("| bad   | 1       | UNAVAILABLE", False),
        ("", False),
    ],
)
def test_what_is_shown_by_default(raw, readable):
    assert parse_line(raw).is_readable is readable


def test_progress_of_loading():
    progress = LoadProgress()
    seen = []
    for text in (
        "loading: emoji:1",
        "loading: bad:1",
        "loading: bad:2",
        "successfully loaded 'emoji'",
        "failed to load 'bad'",
        "successfully loaded 'never begun'",
        "successfully unloaded 'emoji' version 1",
    ):
        progress.feed(parse_line(f'I1130 15:05:25.315829 3474 model_lifecycle.cc:472] "{text}"'))
        seen.append(list(progress.loading))
    assert seen == [["emoji"], ["emoji", "bad"], ["emoji", "bad"], ["bad"], [], [], []]
    assert progress.loaded == {"never begun"}
    assert not progress.unloaded
    progress.feed(parse_line('I1130 15:05:25.3 3474 server.cc:345] "Timeout 8: Found 10 live models and 0 in-flight"'))
    assert not progress.unloaded
    progress.feed(parse_line('I1130 15:05:25.3 3474 server.cc:345] "Timeout 8: Found 0 live models and 0 in-flight"'))
    assert progress.unloaded


def test_a_model_whose_configuration_was_refused():
    progress = LoadProgress()
    line = "E1130 15:05:25.3 3474 model_repository_manager.cc:1460] \"Poll failed for model directory 'a': it's wrong\""
    progress.feed(parse_line(line))
    assert progress.refused == {"a": "it's wrong"}
    assert progress.loading == []


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("Internal: ValueError: no weights\n\nAt:\n  /models/model.py(3)", "ValueError: no weights"),
        ("Invalid argument: instance group", "instance group"),
        ("", "no reason given"),
    ],
)
def test_first_line_of_a_reason(reason, line):
    assert first_line(reason) == line


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["tritonserver: unrecognized option '--x'", "Usage: tritonserver [options]", "\t--help"], [0]),
        (["Usage: tritonserver [options]", "\t--help", 'Bad option: "--y".', "invalid argument for --y", ""], [2, 3]),
        (["Error: Failed to initialize NVML", "terminate called"], [0, 1]),
    ],
)
def test_why_the_server_ended(lines, told):
    assert explain_end([parse_line(line) for line in lines]) == [lines[number] for number in told]


def test_errors_tell_best_why_the_server_ended():
    error = 'E1130 15:05:26.9 3474 main.cc:1] "failed to start HTTP service"'
    assert explain_end([parse_line(line) for line in ("one", error, "two")]) == ["failed to start HTTP service"]
