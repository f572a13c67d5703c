import pytest

import custom_calls


@pytest.fixture(autouse=True)
def registered():
    custom_calls.register()
    yield
    custom_calls.set_link_bandwidth(None)
