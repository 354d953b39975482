"""The fair comparison with torch DDP and others, on a built-in model or a user's own: ``stretto bench``.

Example::

    from stretto.bench import compare

    print(compare("train.py:make_model", ranks=2))
"""

from .compare import compare
from .contestants import Contestant, everybody
from .machine import Machine, this_machine
from .result import Comparison
from .timing import Effort, Quartiles

__all__ = ["Comparison", "Contestant", "Effort", "Machine", "Quartiles", "compare", "everybody", "this_machine"]
