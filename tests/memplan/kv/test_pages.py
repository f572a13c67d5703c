"""Pages beside the tokens that they are for, in all tiers, and where bytes are lost."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from custom_calls import library
from memplan.kv import KvSettingError, Move, PageError, PageStore, Place, PrefixCache

SIZE = 2


def pools(pages: int) -> dict:
    """Two layers of unequal rows and types, the second of no whole number of blocks."""
    return {
        "keys": jnp.zeros((pages, SIZE, 3), jnp.float32),
        "values": [jnp.zeros((pages, SIZE), ml_dtypes.bfloat16), jnp.zeros((pages,), jnp.int8)],
    }


def row_of(tokens: Sequence[int]) -> int:
    return (hash(tuple(tokens)) % 100) + 1


class Server:
    def __init__(self, cache: PrefixCache, folder: Path | None = None) -> None:
        self.cache = cache
        self.store = PageStore(cache, pools(cache.pages[0]), folder)

    def serve(self, prompt: Sequence[int], now: float) -> int:
        """Tokens that were found; all rows are those of their tokens."""
        with self.cache.pin(prompt, now=now) as request:
            self.store.settle()
            hit = request.hit_tokens
            blocks = len(prompt) // SIZE
            request.extend(blocks - hit // SIZE)
            self.store.settle()
            for k, page in enumerate(request.pages):
                row = row_of(prompt[: (k + 1) * SIZE])
                if k >= hit // SIZE:
                    self.write(page, row)
                assert self.rows(page) == [row] * 3
            request.commit(prompt[hit : blocks * SIZE])
        self.store.settle()
        self.cache.check()
        return hit

    def write(self, page: int, row: int) -> None:
        pools = self.store.pools
        values = [pool.at[page].set(row) for pool in pools["values"]]
        self.store.pools = {"keys": pools["keys"].at[page].set(row), "values": values}

    def rows(self, page: int) -> list[int]:
        """The one number of each of a page's rows."""
        pools = self.store.pools
        rows = (np.unique(np.asarray(p[page])) for p in (pools["keys"], *pools["values"]))
        return [int(row.item()) for row in rows]


PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=8), max_size=12)


class TestPageStore:
    @settings(max_examples=25)
    @given(
        PROMPTS, st.tuples(st.integers(4, 6), st.integers(0, 3), st.integers(0, 4)), st.booleans()
    )
    def test_rows_are_those_of_their_tokens(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        prompts: list[list[int]],
        pages: tuple[int, int, int],
        is_lru: bool,
    ) -> None:
        device, host, disk = pages
        policy = "lru" if is_lru else "hints"
        sizes = {"device": device, "host": host, "disk": disk}
        cache = PrefixCache(block_tokens=SIZE, policy=policy, **sizes)
        server = Server(cache, tmp_path_factory.getbasetemp() if disk else None)
        for now, prompt in enumerate(prompts):
            server.serve(prompt, float(now))

    @pytest.mark.parametrize("tier", ["host", "disk"])
    def test_what_is_found_comes_back_whole(self, tier: str, tmp_path: Path) -> None:
        cache = PrefixCache(block_tokens=SIZE, device=4, policy="lru", **{tier: 4})
        server = Server(cache, tmp_path)
        server.serve(range(8), 0.0)
        server.serve(range(10, 18), 1.0)
        assert cache.held()[tier] == 4
        assert server.serve(range(8), 2.0) == 8

    def test_a_changed_byte_is_seen_and_what_is_behind_it_forgotten(self, tmp_path: Path) -> None:
        cache = PrefixCache(block_tokens=SIZE, device=4, disk=8, policy="lru")
        server = Server(cache, tmp_path)
        server.serve(range(8), 0.0)
        server.serve(range(10, 18), 1.0)
        assert server.store.file is not None
        file = os.open(server.store.file, os.O_RDWR)
        try:
            for record in range(4):
                os.pwrite(file, b"\xff", record * server.store.record_bytes + 5)
            os.fsync(file)
        finally:
            os.close(file)
        request = cache.pin(range(8), now=2.0)
        with pytest.raises(PageError, match=r"their checksums are not those of what was written"):
            server.store.settle()
        request.release()
        server.store.settle()
        cache.check()
        assert cache.lookup(range(8)).device == 0
        assert server.serve(range(8), 3.0) == 0
        assert server.serve(range(10, 18), 4.0) == 8, "what nobody changed is still there"

    def test_nothing_is_left_in_the_folder_of_a_process_that_is_killed(
        self, tmp_path: Path
    ) -> None:
        cache = PrefixCache(block_tokens=SIZE, device=4, disk=4, policy="lru")
        server = Server(cache, tmp_path)
        server.serve(range(8), 0.0)
        server.serve(range(10, 18), 1.0)
        assert cache.held()["disk"] == 4
        assert not [*tmp_path.iterdir()]

    def test_settling_a_warm_store_compiles_nothing(self) -> None:
        cache = PrefixCache(block_tokens=SIZE, device=4, host=4, policy="lru")
        server = Server(cache)
        server.write(1, 20)
        server.store.warm()
        assert server.rows(1) == [20] * 3
        with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
            compiled: list[str] = []
            patch.setattr(logging.Logger, "handle", lambda _, record: compiled.append(record.msg))
            for now, prompt in enumerate([range(8), range(10, 18), range(8)]):
                with cache.pin(prompt, now=float(now)) as request:
                    request.extend(4 - request.hit_tokens // SIZE)
                    server.store.settle()
                    request.commit([*prompt][request.hit_tokens :])
        assert cache.held()["host"] > 0
        assert not [message for message in compiled if "Compiling" in message]

    def test_of_two_copies_to_one_page_the_second_stays(self) -> None:
        class Twice(PrefixCache):
            def take_moves(self) -> list[Move]:
                return [Move(Place(0, page), Place(1, 0)) for page in (2, 3)] + [
                    Move(Place(1, 0), Place(0, 0))
                ]

        server = Server(Twice(block_tokens=SIZE, device=4, host=1))
        server.write(2, 20)
        server.write(3, 30)
        server.store.settle()
        assert server.rows(0) == [30] * 3

    @pytest.mark.parametrize("keep", [0, 4])
    def test_lost_bytes_that_move_on_stay_lost(self, keep: int, tmp_path: Path) -> None:
        cache = PrefixCache(
            block_tokens=SIZE, device=4, host=2, disk=4, policy="lru", keep=keep
        )  # fmt: skip
        server = Server(cache, tmp_path)
        for now, prompt in enumerate((range(8), range(10, 18), range(20, 28))):
            server.serve(prompt, float(now))
        assert sum(cache.held().values()) >= 6
        assert server.store.file is not None
        with open(server.store.file, "r+b") as file:
            for record in range(4):
                file.seek(record * server.store.record_bytes + 5)
                file.write(b"\xff")
        for now, prompt in enumerate((range(8), range(10, 18), range(20, 28), range(8)), 3):
            cache.pin(prompt, now=float(now)).release()  # Before anything is copied.
        with pytest.raises(PageError):
            server.store.settle()
        cache.check()
        for now, prompt in enumerate((range(8), range(10, 18), range(20, 28)), 7):
            with contextlib.suppress(PageError):
                server.serve(prompt, float(now))  # Rows that are found are right.

    def test_what_a_disk_refused_is_written_the_next_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = PrefixCache(block_tokens=SIZE, device=4, disk=8, policy="lru")
        server = Server(cache, tmp_path)
        server.serve(range(8), 0.0)
        write, refused = library.load().write_file, [True]

        def write_file(*args: object) -> None:
            if refused and refused.pop():
                raise OSError(28, "No space left on device")
            write(*args)

        monkeypatch.setattr(library.load(), "write_file", write_file)
        with pytest.raises(OSError, match="No space left"):
            server.serve(range(10, 18), 1.0)
        server.store.settle()
        assert server.serve(range(8), 2.0) == 8

    def test_pools_and_folders_that_do_not_go_with_the_cache(self) -> None:
        cache = PrefixCache(block_tokens=SIZE, device=4, disk=1)
        with pytest.raises(KvSettingError, match=r"pools=\(3, 2, 3\): expected arrays \[4, ...\]"):
            PageStore(cache, pools(3))
        with pytest.raises(KvSettingError, match="folder=None: expected a folder for the 1 pages"):
            PageStore(cache, pools(4))
        with pytest.raises(KvSettingError, match="a tree of arrays"):
            PageStore(cache, {})
