"""Several models behind one listener: each request goes to the picker of the model it names.

Must never: choose a worker, or take a request for a model that nobody serves to another one. Read
`picker.py` for one model.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from trunkline.core.records import WorkerId
from trunkline.gateway.answers import unknown_model
from trunkline.gateway.contracts import ClientError, InferenceRequest, Pick, Picker, Refusal
from trunkline.ports.worker import AttemptEnd


class ByModel:
    """A `Picker` over those of the models."""

    def __init__(self, pickers: Mapping[str, Picker], model_of: Callable[[str], str]) -> None:
        """`model_of(name)`: the model that a name in a request asks for; empty for none of ours."""
        self._pickers = pickers
        self._model_of = model_of

    def pick(self, request: InferenceRequest, tried: frozenset[WorkerId]) -> Pick | Awaitable[Pick]:
        picker = self._pickers.get(self._model_of(request.model))
        if picker is None:
            raise ClientError(self._refusal(request.model))
        found = picker.pick(request, tried)
        if isinstance(found, Pick):
            found.by = picker
            return found
        return _later(found, picker)

    def first_byte(self, pick: Pick) -> None:
        _picker_of(pick).first_byte(pick)

    def pulled(self, pick: Pick, told: bytes) -> None:
        _picker_of(pick).pulled(pick, told)

    def ended(self, pick: Pick, end: AttemptEnd, cached_tokens: int | None) -> None:
        _picker_of(pick).ended(pick, end, cached_tokens)

    def _refusal(self, model: str) -> Refusal:
        if model:
            return unknown_model(model)
        text = f"model is missing; this gateway serves {', '.join(self._pickers)}"
        return Refusal(code="missing_model", message=text, param="model")


async def _later(found: Awaitable[Pick], picker: Picker) -> Pick:
    pick = await found
    pick.by = picker
    return pick


def _picker_of(pick: Pick) -> Picker:
    assert pick.by is not None, "a pick of another picker"
    return pick.by
