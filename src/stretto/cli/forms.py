"""What commands that take a model say of it."""

from __future__ import annotations

from ..bench.models import BUILT_IN

MODEL = (
    f"A built-in model ({', '.join(BUILT_IN)}), or a function of yours: script.py:factory or package.module:factory. "
    "It is called without arguments and returns model, (model, batch) or (model, batch, loss), with loss(model, batch) "
    "the loss of a step."
)
