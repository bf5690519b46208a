"""Python's collector of cyclic garbage, set for a process that holds many small records for long.

As Python starts it, it looks at everything that there is again and again while thousands of slots are made: a fifth of
the operator's time, in pauses of a tenth of a second in which no claim is answered. Hardly anything here is cyclic;
what is waits a little longer.
"""

from __future__ import annotations

import gc

#: new objects until the young ones are looked at, such looks until the middle ones are, and so on
_THRESHOLDS = (5_000, 50, 100)


def look_less_often() -> None:
    """Called once, when everything has been imported: modules live as long as the process and are left out."""
    gc.set_threshold(*_THRESHOLDS)
    gc.collect()
    gc.freeze()
