"""One function at every size, of which a few are compiled.

call at sizes ─► the next larger bucket ─► arguments padded ─► its executable ─► results cut

buckets.py     what sizes there are, which of the arguments' dimensions have them
choosing.py    the best ones for the sizes that were seen
sizes.py       sizes of arrays as functions of those that a function is called with
dims.py        which elements of a larger array are those of the smaller one
rules.py       what makes an equation's results the same; padding.py: a program's
function.py    what `memplan.jit` returns
"""

import glob
import os

from jax.extend import source_info_util

# Messages and profiles name the user's line, not the line here that runs it again.
for _path in glob.glob(os.path.join(os.path.dirname(__file__), "*.py")):
    source_info_util.register_exclusion(_path)
