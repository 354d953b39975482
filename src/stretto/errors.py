"""Everything stretto raises.

StrettoError
├── SetupError                what was asked for is not possible
│   ├── AlreadyAttachedError  all parameters have a reducer already
│   ├── ModelMismatchError    the ranks do not hold the same model or options
│   ├── UnsupportedError      an argument or a tensor layout that stretto does not support
│   │   └── UnsupportedMemberError  a member of torch's class that the drop-in lacks: in ddp_faces.py
│   └── BrokenModelError      a model to be measured cannot take a step: in bench/load.py
├── WithheldError             the program read a gradient of which this rank has only its share
├── PlanError                 a bucket plan that contradicts itself or its parameters
├── TraceError, PictureError  a trace cannot be read or written, a picture cannot be drawn: in trace.py and plots.py
├── ReplicaError              the ranks no longer hold the same parameters
├── CommandError              a command of the terminal cannot go on: in cli/console.py
└── CommunicationError        a bucket could not be reduced
    ├── CallsDifferError      ranks have made different calls at the same time
    └── PeerError             another rank failed in this pass, has ended, or was killed

A message names the rank (unless all ranks raise the same text or there is only one), the pass during training, and the
parameters, and it ends with the line to change. tests/test_messages.py makes sure that a test states each one in full.
"""

from __future__ import annotations


class StrettoError(Exception):
    """Base class of all errors that stretto raises on purpose."""


class SetupError(StrettoError, ValueError, RuntimeError):
    """The module or an argument cannot be used.

    It is both a ``ValueError`` and a ``RuntimeError``: torch's DDP raises sometimes one, sometimes the other for such
    mistakes, and programs written for it catch either.
    """


class AlreadyAttachedError(SetupError):
    """All parameters of this module, or those of a wrapper, are already reduced by another handle."""


class ModelMismatchError(SetupError):
    """The ranks hold different models or asked for different options, or another rank cannot do what all were to."""


class UnsupportedError(SetupError, TypeError):
    """An argument, a member or a kind of tensor that this version does not support."""


class WithheldError(StrettoError, RuntimeError):
    """The program read a gradient, but this rank has only its share of it (``keep_grads=False``).

    It is not a ``TypeError``, because operators swallow those.
    """


class PlanError(StrettoError, ValueError):
    """A bucket plan is inconsistent."""


class ReplicaError(StrettoError, RuntimeError):
    """Parameters or buffers that must be equal on all ranks are not."""


class CommunicationError(StrettoError, RuntimeError):
    """A collective of a pass failed or timed out."""


class CallsDifferError(CommunicationError):
    """Ranks have made different calls at the same time."""


class PeerError(CommunicationError):
    """Another rank failed in this pass, has ended, or was killed: its gradients are missing from the mean."""

    can_go_on: bool = False
    """Whether all ranks are still in step after the failed pass: if they drop its gradients, they can go on."""
