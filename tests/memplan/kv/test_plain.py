"""The cache under LRU beside a plain one, which looks through all blocks for everything it does."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field

import pytest

from memplan.kv import NoPagesError, PrefixCache, Request

Path = tuple[int, ...]  # A block's tokens, and those before it.
TIERS = range(3)


@dataclass(eq=False)
class Block:
    path: Path
    order: int
    tier: int | None = None
    pins: int = 0


@dataclass(eq=False)
class Asked:
    path: list[Block]
    committed: int = 0
    own: int = 0  # Pages that are no block's.


@dataclass(eq=False)
class Plain:
    """Blocks of a token. Pages have no numbers here: how many there are is enough."""

    pages: tuple[int, ...]
    keep: int
    blocks: dict[Path, Block] = field(default_factory=dict)
    requests: list[Asked] = field(default_factory=list)
    order: int = 0

    def held(self, tier: int) -> list[Block]:
        return [b for b in self.blocks.values() if b.tier == tier]

    def unused(self, tier: int) -> int:
        own = sum(r.own for r in self.requests) if tier == 0 else 0
        return self.pages[tier] - len(self.held(tier)) - own

    def room(self) -> int:
        return self.unused(0) + sum(b.pins == 0 for b in self.held(0))

    def behind(self, block: Block) -> list[int]:
        """The tiers of what is behind a block."""
        of = [b for b in self.blocks.values() if b.path[:-1] == block.path]
        return [b.tier for b in of if b.tier is not None]

    def least(self, tier: int) -> Block | None:
        leaves = [
            b for b in self.held(tier) if not b.pins and min(self.behind(b), default=9) > tier
        ]
        return min(leaves, key=lambda b: b.order, default=None)

    def leave(self, block: Block) -> None:
        assert block.tier is not None
        for slower in TIERS[block.tier + 1 :]:
            if self.pages[slower] == 0:
                continue
            if self.unused(slower) == 0:
                least = self.least(slower)
                if least is None or (least.order >= block.order and not self.behind(block)):
                    continue
                self.leave(least)
            block.tier = slower
            return
        block.tier = None
        self.forget(block)

    def forget(self, block: Block) -> None:
        if block.tier is None and block.pins == 0:
            self.blocks.pop(block.path, None)

    def give_page(self) -> bool:
        if self.unused(0) == 0:
            least = self.least(0)
            if least is None:
                return False
            self.leave(least)
        return True

    def block(self, path: Path) -> Block:
        return self.blocks.setdefault(path, Block(path, self.order))

    def pin(self, prompt: Path) -> Asked:
        self.order += 1
        request = Asked([self.block(prompt[: k + 1]) for k in range(len(prompt))])
        for block in request.path:
            block.order = self.order
            block.pins += 1
        for block in request.path:
            if block.tier is None or (block.tier > 0 and not self.give_page()):
                break
            block.tier = 0
            request.committed += 1
        self.requests.append(request)
        return request

    def extend(self, request: Asked, blocks: int) -> bool:
        if blocks > self.room():
            return False
        for _ in range(blocks):
            assert self.give_page()
            request.own += 1
        return True

    def commit(self, request: Asked, token: int) -> None:
        if request.committed == len(request.path):
            before = request.path[-1].path if request.path else ()
            block = self.block((*before, token))
            block.pins += 1
            request.path.append(block)
        request.path[request.committed].tier = 0
        request.committed += 1
        request.own -= 1

    def release(self, request: Asked) -> None:
        self.requests.remove(request)
        for block in reversed(request.path):
            block.pins -= 1
            self.forget(block)
        while len(self.held(0)) > self.keep and (least := self.least(0)) is not None:
            self.leave(least)

    def lookup(self, prompt: Path) -> tuple[int, ...]:
        tiers: list[int | None] = []
        for k in range(len(prompt)):
            block = self.blocks.get(prompt[: k + 1])
            if block is None or block.tier is None:
                break
            tiers.append(block.tier)
        return tuple(map(tiers.count, TIERS))


@pytest.mark.parametrize("seed", range(40))
def test_each_block_is_where_a_plain_cache_has_it(seed: int) -> None:
    rng = random.Random(seed)
    pages = rng.randint(1, 10), *(rng.choice([0, rng.randint(1, 6)]) for _ in range(2))
    keep = rng.choice([pages[0], rng.randint(0, pages[0])])
    device, host, disk = pages
    cache = PrefixCache(
        block_tokens=1, device=device, host=host, disk=disk, policy="lru", keep=keep,
        history=rng.choice([0, 2, 100]),
    )  # fmt: skip
    plain = Plain(pages, keep)
    requests: list[tuple[Request, Asked, Path]] = []
    asked: list[Path] = []
    for _ in range(150):
        step = rng.random()
        if not requests or (step < 0.35 and len(requests) < 5):
            prompt = tuple(rng.randint(0, 2) for _ in range(rng.randint(0, 6)))
            requests.append((cache.pin(prompt, now=0.0), plain.pin(prompt), prompt))
            asked.append(prompt)
            assert requests[-1][0].hit_tokens == requests[-1][1].committed
        elif step < 0.7:
            number = rng.randrange(len(requests))
            request, beside, tokens = requests[number]
            at = beside.committed
            token = tokens[at] if at < len(tokens) else rng.randint(0, 2)
            if not beside.own:
                count = rng.randint(1, 2)
                has_room = plain.extend(beside, count)
                with contextlib.nullcontext() if has_room else pytest.raises(NoPagesError):
                    request.extend(count)
                if not has_room:
                    continue
            # Who asks for nothing: so no two blocks were asked for at one time.
            cache.pin([], now=0.0).release()
            plain.release(plain.pin(()))
            request.commit([token])
            plain.commit(beside, token)
            requests[number] = request, beside, (*tokens[:at], token, *tokens[at + 1 :])
            asked.append(requests[number][2])
        else:
            request, beside, _ = requests.pop(rng.randrange(len(requests)))
            request.release()
            plain.release(beside)
        cache.take_moves()
        cache.check()
        assert [tuple(cache.lookup(p)) for p in asked[-30:]] == [*map(plain.lookup, asked[-30:])]
        assert [*cache.held().values()] == [len(plain.held(tier)) for tier in TIERS]
        assert cache.room == plain.room()
