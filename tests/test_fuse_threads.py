"""`fuse` in several threads at once, and beside threads that run models, draw random numbers or import."""

from __future__ import annotations

import builtins
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fuse_support import FEATURES, Residual, Written
from support import twin
from torch import Tensor, fx, nn

import gemmnorm
from gemmnorm.fuse import stand_ins
from gemmnorm.fuse.beside import LOCK

X = torch.randn(5, FEATURES)


@pytest.fixture(autouse=True)
def often_in_turn() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """What each gives or raises, in a thread of its own."""
    found: list[Any] = [None] * len(works)

    def run(i: int) -> None:
        try:
            found[i] = works[i]()
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def catching(self: Any, x: Tensor) -> Tensor:
    """Refused, and what is raised meanwhile caught."""
    try:
        x = x * float(x.sum())
    except Exception:
        x = x * 2
    return self.bn(self.gemm(x))  # type: ignore[no-any-return]


def plain(self: Any, x: Tensor) -> Tensor:
    return self.bn(self.gemm(x) * self.scale)  # type: ignore[no-any-return]


def test_models_are_fused_as_by_one_thread() -> None:
    models = [Residual().eval(), Written(plain), Written(catching), nn.Sequential(Residual(), Written(plain))] * 2
    models = [twin(model) for model in models]
    wanted = [str(gemmnorm.fuse_report(gemmnorm.fuse(twin(model)))) for model in models]
    works = [lambda m=model: str(gemmnorm.fuse_report(gemmnorm.fuse(m))) for model in models]  # type: ignore[misc]
    assert at_once(*works) == wanted


def test_one_class_gets_one_fused_class() -> None:
    models = [Written(plain) for _ in range(4)]
    for model in models:
        model.__class__ = type(models[0])
    at_once(*(lambda m=model: gemmnorm.fuse(m) for model in models))  # type: ignore[misc]
    assert len({type(model) for model in models}) == 1
    for model in models:
        model.eval()
        expected = gemmnorm.unfuse(twin(model))(X)
        torch.testing.assert_close(model(X), expected)


def until(done: threading.Event, work: Callable[[], Any]) -> int:
    count = 0
    while not done.is_set() or not count:
        work()
        count += 1
    return count


def beside(work: Callable[[], Any], begin: Callable[[], Any] = lambda: None) -> None:
    """`work` again and again while another thread fuses; neither raises, and every model is fused."""
    done, models = threading.Event(), [Written(plain) for _ in range(10)]
    begin()

    def fuse() -> set[int]:
        try:
            return {len(gemmnorm.fuse_report(gemmnorm.fuse(model)).matches) for model in models}
        finally:
            done.set()

    matches, count = at_once(fuse, lambda: until(done, work))
    assert matches == {1}
    assert isinstance(count, int), count


def test_other_threads_train() -> None:
    model, alone = Residual(), Residual()
    alone.load_state_dict(model.state_dict())
    for module in (model, alone):
        for dropout in (m for m in module.modules() if isinstance(m, nn.Dropout)):
            dropout.p = 0.0
    trained, expected = gemmnorm.fuse(model.eval()), alone.eval()

    def step() -> None:
        x = X.clone().requires_grad_()
        trained(x)["y"].sum().backward()
        torch.testing.assert_close(trained(X), expected(X))

    beside(step)


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


@pytest.mark.parametrize("draw", [lambda: torch.rand(1).item(), random.random, lambda: random.randrange(1 << 60)])
def test_random_numbers_of_another_thread_are_drawn_once(draw: Callable[[], float]) -> None:
    """Neither is a model refused for them, nor does the other thread draw the same again."""
    drawn: list[float] = []
    beside(lambda: drawn.append(draw()), seed)
    seed()
    assert drawn == [draw() for _ in drawn]


def drawing(self: Any, x: Tensor) -> Tensor:
    return self.bn(self.gemm(x)) * DRAW()  # type: ignore[no-any-return]


DRAW: Callable[[], float] = random.random
RAND, GENERATOR = torch.rand, torch.default_generator


@pytest.mark.parametrize(
    "draw", [random.random, lambda: RAND(1).shape[0], lambda: random.choice([1, 2]), lambda: GENERATOR.seed() % 2]
)
def test_a_forward_that_draws_is_refused_and_leaves_the_states(
    draw: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DRAW", draw)
    model = Written(drawing)
    states = torch.get_rng_state(), random.getstate()
    assert not gemmnorm.fuse_report(model).matches
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_an_import_of_dynamo_in_another_thread_waits() -> None:
    """It would keep what stands in for built-in functions meanwhile."""
    began, seen = threading.Event(), []

    def look_up() -> None:
        finder = next(f for f in sys.meta_path if getattr(f, "find_spec", None) is stand_ins._refuse_dynamo)
        began.set()
        assert finder.find_spec("torch._dynamo", None) is None
        seen.append(type(builtins.len) is type(builtins.abs))

    thread = threading.Thread(target=look_up)
    with LOCK, stand_ins.honest(fx.Tracer()):
        thread.start()
        assert began.wait(10)
        thread.join(0.1)
        assert not seen
    thread.join()
    assert seen == [True]


# --- models that run, or are compiled, in another thread -------------------------------------------------------------


def test_other_threads_compile() -> None:
    def compile_anew() -> None:
        torch._dynamo.reset()
        model = Residual().eval()
        torch.testing.assert_close(torch.compile(model, backend="eager")(X), model(X))

    beside(compile_anew, lambda: torch.compile(Residual().eval(), backend="eager")(X))


def measured(self: Any, x: Tensor) -> Tensor:
    return self.bn(self.gemm(x)) * len(x.shape) if isinstance(x, Tensor) else x  # type: ignore[no-any-return]


@pytest.mark.parametrize("fuse", [lambda m: m, gemmnorm.fuse], ids=["plain", "fused"])
def test_what_another_thread_has_compiled_runs_as_it_is(fuse: Callable[[Any], Any]) -> None:
    """Neither does it raise, nor is it compiled again: `len` and others are replaced only while it waits."""
    torch._dynamo.reset()
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = fuse(Written(measured).eval())
    compiled, begun = torch.compile(model, backend=keep, fullgraph=True), threading.Event()
    compiled(X)

    def call() -> None:
        torch.testing.assert_close(compiled(X), model(X))
        begun.set()

    def record() -> None:
        assert begun.wait(60)
        for _ in range(3):
            assert gemmnorm.fuse_report(Written(plain)).matches

    sys.setswitchinterval(5e-3)  # a call that has begun when a recording begins is compiled again
    done = threading.Event()
    found = at_once(lambda: (record(), done.set()), lambda: until(done, call))
    assert found[0] == (None, None) and isinstance(found[1], int), found
    assert len(graphs) <= 3


def test_a_model_that_another_thread_runs_stays_in_its_mode() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.bn(self.gemm(x))
        return y + 1 if self.training else y - 1  # type: ignore[no-any-return]

    model, done, seen = Written(forward).eval(), threading.Event(), set()
    expected = model(X)

    def call() -> None:
        seen.add(model.training)
        assert torch.equal(model(X), expected)

    def record() -> None:
        try:
            for _ in range(10):
                (match,) = gemmnorm.fuse_report(model).matches
                assert not match.fused
        finally:
            done.set()

    found = at_once(record, lambda: until(done, call))
    assert found[0] is None and isinstance(found[1], int), found
    assert seen == {False}


def test_another_thread_assigns_methods_of_an_autograd_function() -> None:
    """As PyTorch does where it imports `torch.distributed.tensor`."""

    def define() -> None:
        cls: Any = type("Doubled", (torch.autograd.Function,), {})
        cls.forward = staticmethod(lambda ctx, x: x * 2)
        assert torch.equal(cls.apply(X), X * 2)

    beside(define)


def test_one_that_is_recorded_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        Doubled.forward = staticmethod(lambda ctx, x: x * 3)
        return self.bn(self.gemm(Doubled.apply(x)))  # type: ignore[no-any-return]

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

    (refusal,) = gemmnorm.fuse_report(Written(forward)).refusals
    assert "assigns forward of an autograd.Function" in refusal.reason
    assert torch.equal(Doubled.apply(X), X * 2)
