"""Sends one request and says how it ended, as its client saw it."""

from __future__ import annotations

import base64
import io
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tritonclient.utils import InferenceServerException

from tests.support.client import Answer, HttpError, Served
from tests.support.media_files import array, as_file, files, picture

from .mix import PROBES, TEXT, Plan

PATIENCE_S = 300.0
"""After so long without an end a request counts as lost."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a client saw of its request.

    Attributes:
        ended: as it was planned (`mix.End`), or `wrong` with `problem`, or `lost`.
        num_outputs, num_steps, total_ms: of a finished request: pictures, steps, and the server's own total.
    """

    plan: Plan
    ended: str
    seconds: float
    problem: str = ""
    num_outputs: int = 0
    num_steps: int = 0
    total_ms: float = 0.0


class WrongError(Exception):
    """An answer is not what it must be."""


class Caller:
    """Sends requests; any number of threads may call it.

    Args:
        served: the server's client.
        alone: for each of `mix.PROBES` its picture on the idle server.
    """

    def __init__(self, served: Served, alone: Sequence[NDArray[np.uint8]]) -> None:
        self._served = served
        self._alone = alone

    @classmethod
    def prepare(cls, served: Served) -> Caller:
        """Ask for the probes' pictures on the idle server first."""
        return cls(served, [served.infer(f"{TEXT}_unary", **values).images for values in PROBES])

    def __call__(self, plan: Plan) -> Told:
        """Send a request, wait for its end, and return what was seen; never raises for what the server did."""
        begin = time.monotonic()
        try:
            if plan.end in ("cancelled", "gone"):
                self._give_up(plan)
                return Told(plan, plan.end, time.monotonic() - begin)
            answer = self._answer(plan)
            if plan.end != "finished":
                raise WrongError(f"it finished, but was to end as {plan.end}")
            record = self._check(plan, answer)
            return Told(plan, "finished", time.monotonic() - begin, "", plan.num_outputs, *record)
        except (InferenceServerException, HttpError) as error:
            ended, problem = _judge(plan, error)
            return Told(plan, ended, time.monotonic() - begin, problem)
        except WrongError as error:
            return Told(plan, "wrong", time.monotonic() - begin, str(error))
        except AssertionError as error:  # of the client: not ended within its time
            return Told(plan, "lost", time.monotonic() - begin, str(error))

    # -- the ways -----------------------------------------------------------------------------------------------

    def _answer(self, plan: Plan) -> Mapping[str, Any]:
        """Return the outputs of a request's last response."""
        inputs = _inputs(plan.way, plan.values)
        served, twin = self._served, f"{plan.model}_unary"
        match plan.way:
            case "stream":
                call = served.stream(plan.model, timeout_s=plan.timeout_s, **inputs)
                answer = call.result(PATIENCE_S)
                _check_events(plan, call.answers)
                return answer.outputs
            case "infer":
                return served.infer(twin, timeout_s=plan.timeout_s, client_timeout_s=PATIENCE_S, **inputs).outputs
            case "infer_http" | "http_json":
                return served.infer_http(twin, binary=plan.way == "infer_http", **inputs).outputs
            case "generate":
                return served.generate(twin, **inputs)
            case "generate_stream":
                events = list(served.generate_stream(plan.model, **inputs))
                if [event["event"] for event in events] != ["step"] * (len(events) - 1) + ["finished"]:
                    raise WrongError("events out of order")
                return events[-1]

    def _give_up(self, plan: Plan) -> None:
        """Send a long request and leave it."""
        if plan.way == "generate_stream":
            events = self._served.generate_stream(plan.model, **plan.values)
            if next(events)["event"] != "step":
                raise WrongError("the first event is no step")
            events.close()
        elif plan.way == "infer":
            try:
                self._served.infer(f"{plan.model}_unary", client_timeout_s=plan.patience_s, **plan.values)
            except InferenceServerException as error:
                if error.status() != "StatusCode.DEADLINE_EXCEEDED":
                    raise
            else:
                raise WrongError("it finished before its client left")
        else:
            call = self._served.stream(plan.model, **plan.values)
            if plan.patience_s is None:
                call.wait_step()
            else:
                time.sleep(plan.patience_s)
            call.cancel()

    # -- checks -------------------------------------------------------------------------------------------------

    def _check(self, plan: Plan, outputs: Mapping[str, Any]) -> tuple[int, float]:
        """Return the steps and the total of a finished request; raises where its answer is wrong."""
        text = outputs["metrics"]
        record = json.loads(text if isinstance(text, str) else text[0])
        seeds = np.asarray(outputs["seeds"]).reshape(-1).tolist()
        if len(seeds) != plan.num_outputs:
            raise WrongError(f"{len(seeds)} seeds for {plan.num_outputs} outputs")
        if isinstance(sent := plan.values.get("seed"), int) and seeds[0] != sent:
            raise WrongError(f"seed {seeds[0]} instead of {sent}")
        images = _pictures(outputs)
        if len(images) != plan.num_outputs:
            raise WrongError(f"{len(images)} pictures for {plan.num_outputs} outputs")
        size = (
            (plan.values["picture"][2],) * 2
            if "picture" in plan.values
            else (record["param_height"], record["param_width"])
        )
        if "height" in plan.values and size != (plan.values["height"], plan.values["width"]):
            raise WrongError(f"the size is {size}")
        if any(image.shape != (*size, 3) for image in images):
            raise WrongError(f"a picture has the shape {images[0].shape}")
        if plan.probe is not None:
            alone = self._alone[plan.probe].astype(int)
            difference = int(np.abs(np.stack(images).astype(int) - alone).max())
            if difference > 1:
                raise WrongError(f"it differs by {difference} of 255 from the same request alone")
        steps = int(record["param_num_inference_steps"])
        if "strength" in plan.values:
            steps = min(int(steps * plan.values["strength"]), steps)
        return steps, float(record["time_total_ms"])


def _inputs(way: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a plan as its way wants them, with its picture if it has one."""
    inputs = dict(values)
    if "picture" in inputs:
        form, which, side = inputs.pop("picture")
        drawn = picture(which, side)
        inputs |= {"image": array(drawn)} if form == "raw" else {"image_file": files(as_file(drawn))}
    if way in ("generate", "generate_stream") and isinstance(inputs.get("extra_args"), dict):
        inputs["extra_args"] = json.dumps(inputs["extra_args"])  # JSON as the text of a field
    return inputs


def _check_events(plan: Plan, answers: Sequence[Answer]) -> None:
    """Raise if the events of a stream are not the steps in order, previews between them, and the result."""
    told = [(answer.step, answer.num_steps) for answer in answers if answer.event == "step"]
    if told != [(k + 1, len(told)) for k in range(len(told))]:
        raise WrongError(f"the step events are {told}")
    if plan.model == TEXT and len(told) != plan.values["num_inference_steps"]:
        raise WrongError(f"{len(told)} step events")
    if answers[-1].event != "finished":
        raise WrongError(f"the last event is {answers[-1].event}")
    if "preview_interval" in plan.values and not any(answer.event == "preview" for answer in answers):
        raise WrongError("no preview came")


def _pictures(outputs: Mapping[str, Any]) -> list[NDArray[np.uint8]]:
    """Return the pictures of an answer, whatever form they have in it."""
    if "images" in outputs:
        return list(np.asarray(outputs["images"]))
    encoded = outputs["encoded"]
    items = [encoded] if isinstance(encoded, str) else list(encoded)
    pictures = []
    for item in items:
        data = base64.b64decode(item, validate=True) if isinstance(item, str) else item
        with Image.open(io.BytesIO(data)) as image:
            pictures.append(np.asarray(image.convert("RGB")))
    return pictures


def _judge(plan: Plan, error: InferenceServerException | HttpError) -> tuple[str, str]:
    """Return how a request that got an error ended, and what is wrong with that."""
    message = error.message()
    if plan.end == "late" and "timeout expired" in message:  # in Triton's queue, which counts nothing
        return "refused", ""
    if not plan.words or not re.search(plan.words, message):
        return "wrong", f"the error {message!r}"
    status = error.status() if isinstance(error, InferenceServerException) else None
    if plan.end == "rejected" and status != "StatusCode.INVALID_ARGUMENT":
        return "wrong", f"the code is {status}"
    if re.search(r"Traceback|\.py|/(usr|home|root|opt|tmp)/", message):
        return "wrong", f"the error tells of the server's inside: {message!r}"
    return plan.end, ""
