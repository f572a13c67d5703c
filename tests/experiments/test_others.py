"""Programs of others: what is said of a folder without them."""

import pytest
from absl import app

from experiments.others import EXPERIMENT


@pytest.mark.parametrize("words", [(), ("--path", "/nowhere")])
def test_a_folder_without_libraries_is_refused(words: tuple[str, ...]):
    with pytest.raises(app.UsageError, match=r"libraries in it, found (None|/nowhere): install"):
        EXPERIMENT.run(*words)
