"""A step of training or evaluation as one replayed CUDA graph: on small graphs the host takes longer to start the kernels than the
device to run them."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_map_only

from gnnfast.cache import watching
from gnnfast.config import override, settings

WARMUP = 3  # steps that run as they are: optimisers and libraries make their state, and graphs are converted


class CaptureError(RuntimeError):
    """A step cannot be captured; the message says why."""


def capture(step: Callable[..., Any]) -> Captured:
    """Turns a step on a fixed graph into a replayed CUDA graph.

    The first three calls run ``step`` as it is, the fourth captures it, and from then on a call replays what was captured: the same
    kernels on the same memory, without Python. Each call is one step. Arguments that are tensors may hold other values in each
    call; everything else that the step reads must stay where it is (values may change in place).

    - Random numbers differ from replay to replay and follow ``torch.manual_seed``; so does dropout.
    - Learning rates and other options of optimisers may change between calls: rates of optimisers that have ``capturable`` (Adam
      and its kin, which are switched to it) are followed, other changes capture the step anew.
    - Gradients may be set to ``None`` in the step. After a call ``p.grad`` holds those of the step.
    - Changes of ``edge_index`` and of what else gnnfast remembers, of shapes, and of parameters and buffers that were moved or
      replaced (of optimisers, and of modules that the step's function names) capture the step anew.
    - Python code of the step runs in the first four calls alone: no prints, no ``model.train()``, no schedulers in it.

    Args:
        step: any function of tensors on one CUDA device that runs forward, and maybe backward and optimisers, without waiting for
            the device: no ``.item()``, no printing of values, no boolean indexing. Its arguments are tensors that require no
            gradient, and plain values.

    Returns:
        A callable that takes what ``step`` takes and returns what it returns: copies of its tensors, without gradients.

    Raises:
        CaptureError: at the fourth call, if the step cannot be captured (the message names the line that waits for the device), or
            at the first, if there is no CUDA device.

    Example::

        def step():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, edge_index)[train], y[train])
            loss.backward()
            optimizer.step()
            return loss

        step = gnnfast.capture(step)
        for epoch in range(200):
            loss = step()
    """
    return Captured(step)


class Captured:
    """See :func:`capture`."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step, self._calls = step, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None
        self._optimizers: list[_Steady] = []
        self._state: list[Tensor] = []
        self._places: list[int] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._before: list[Tensor | None] = []
        self._seen: list[Any] = []
        self._inputs: list[Tensor] = []
        self._facts: Any = None
        self._output: Any = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not torch.cuda.is_available():
            raise CaptureError("gnnfast.capture needs a CUDA device, and torch finds none; call the step itself")
        tensors, facts = _tensors_and_facts(arguments, named)
        if self._graph is not None and (facts != self._facts or not self._holds()):
            self._graph, self._calls = None, 0  # what was captured no longer stands for the step
        if self._graph is None:
            self._calls += 1
            if self._calls <= WARMUP:
                return self._run(arguments, named)
            self._capture(arguments, named, facts)
        assert self._graph is not None
        with torch.no_grad():
            for own, given in zip(self._inputs, tensors):
                own.copy_(given)
        for optimizer in self._optimizers:
            optimizer.follow()
        self._graph.replay()
        for parameter, gradient in self._gradients:  # the replay writes them where they were captured
            if parameter.grad is not gradient:
                parameter.grad = gradient
        return tree_map_only(Tensor, lambda t: t.detach().clone(), self._output)

    def _run(self, arguments: Any, named: Any) -> Any:
        """The step as it is, on the stream on which it will be captured."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        found: list[Optimizer] = []

        def noted(optimizer: Optimizer, *_: Any) -> None:
            if optimizer not in found:
                found.append(optimizer)

        hook = register_optimizer_step_pre_hook(noted)
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream), _converting():
                out = self._step(*arguments, **named)
        finally:
            hook.remove()
            torch.cuda.current_stream().wait_stream(self._stream)
        known = [steady.optimizer for steady in self._optimizers]
        self._optimizers += [_Steady(optimizer) for optimizer in found if optimizer not in known]
        return tree_map_only(Tensor, Tensor.detach, out)

    def _capture(self, arguments: Any, named: Any, facts: Any) -> None:
        own = tree_map_only(Tensor, lambda t: t.detach().clone(), (arguments, named))
        # Held, so that what the kernels read is not let go; and gradients that a step adds to are written in each replay.
        self._state = list({id(t): t for t in self._read()}.values())
        self._places, self._before = [t.data_ptr() for t in self._state], [t.grad for t in self._state if t.is_leaf]
        self._inputs, self._facts = _tensors_and_facts(*own)[0], facts
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        torch.cuda.synchronize()
        for optimizer in self._optimizers:
            optimizer.hold()
        try:
            with watching() as self._seen, _converting(), torch.cuda.graph(graph, stream=self._stream):
                self._output = self._step(*own[0], **own[1])
        except Exception as error:
            torch.cuda.set_stream(stream)  # torch leaves the stream of the capture only if it ends well
            for t in self._state:  # of a capture that failed they hold nothing
                if t.is_leaf:
                    t.grad = None
            self._calls = WARMUP  # the next call tries again, and says the same
            raise CaptureError(_reason(error, self._step)) from error
        finally:
            for optimizer in self._optimizers:
                optimizer.release()
        self._graph = graph
        self._gradients = [(t, t.grad) for t in self._state if t.is_leaf and t.requires_grad]

    def _read(self) -> Iterable[Tensor]:
        """Parameters and buffers of optimisers, and of the modules that the step's function names."""
        for steady in self._optimizers:
            for group in steady.optimizer.param_groups:
                yield from group["params"]
        for module in _modules_of(self._step):
            yield from module.parameters()
            yield from module.buffers()

    def _holds(self) -> bool:
        """Whether all that the captured kernels read is where it was, and stands for the same."""
        if not all(optimizer.unchanged() for optimizer in self._optimizers) or not all(seen.holds() for seen in self._seen):
            return False
        now = list({id(t): t for t in self._read()}.values())
        return len(now) == len(self._state) and all(
            t is old and t.data_ptr() == place for t, old, place in zip(now, self._state, self._places)
        )


def _converting() -> Any:
    """What is replayed many times is worth a conversion."""
    return override(**({"kernel": "gar"} if settings().kernel == "auto" else {}))


def _modules_of(step: Any) -> list[torch.nn.Module]:
    """Modules that a function refers to by name, or that it is a method of."""
    owner = getattr(step, "__self__", step)
    found = [owner] if isinstance(owner, torch.nn.Module) else []
    function = inspect.unwrap(getattr(step, "__func__", step))
    if inspect.isfunction(function):
        names = inspect.getclosurevars(function)
        found += [v for v in (*names.nonlocals.values(), *names.globals.values()) if isinstance(v, torch.nn.Module)]
    return found


_PLAIN = (int, float, complex, str, bool, type(None), torch.dtype, torch.device)


def _tensors_and_facts(arguments: Any, named: Any) -> tuple[list[Tensor], Any]:
    leaves, spec = tree_flatten((arguments, named))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise CaptureError(f"arguments of a captured step must be tensors or plain values, got {type(leaf).__name__}")
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf:
            raise CaptureError(
                "an argument of a captured step requires a gradient, which nobody would get; let the step refer to it"
            )
    shapes = [(tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in tensors]
    return tensors, (spec, shapes, [leaf for leaf in leaves if not isinstance(leaf, Tensor)])


class _Steady:
    """An optimiser that can be captured: its options as they were then, and its learning rates in memory that a replay reads."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._rates: list[Tensor | None] = []
        self._given: list[Any] = []
        self._options: list[dict[str, Any]] = []

    def hold(self) -> None:
        """Called before the step is captured."""
        self._rates, self._given, self._options = [], [], []
        for group in self.optimizer.param_groups:
            rate = group["lr"]
            if "capturable" in group:
                device = group["params"][0].device
                group["capturable"] = True
                for parameter in group["params"]:
                    state = self.optimizer.state.get(parameter, {})
                    if isinstance(state.get("step"), Tensor):
                        state["step"] = state["step"].to(device)
                if not isinstance(rate, Tensor):
                    group["lr"] = torch.tensor(float(rate), device=device)
                self._rates.append(group["lr"])
            else:
                self._rates.append(None)
            self._given.append(rate)
            self._options.append(self._options_of(group, self._rates[-1] is not None))

    def release(self) -> None:
        """Called after it was: users and schedulers see their own numbers."""
        for group, rate in zip(self.optimizer.param_groups, self._given):
            group["lr"] = rate

    def follow(self) -> None:
        """Called before each replay."""
        for i, (group, rate) in enumerate(zip(self.optimizer.param_groups, self._rates)):
            if rate is not None and group["lr"] is not rate and group["lr"] != self._given[i]:
                self._given[i] = group["lr"]
                rate.fill_(float(group["lr"]))

    def unchanged(self) -> bool:
        """Whether nothing changed that a replay would not follow."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self._options):
            return False
        return all(self._options_of(g, rate is not None) == o for g, o, rate in zip(groups, self._options, self._rates))

    @staticmethod
    def _options_of(group: dict[str, Any], follows_rate: bool) -> dict[str, Any]:
        return {k: v for k, v in group.items() if k != "params" and not (k == "lr" and follows_rate)}


def _reason(error: Exception, step: Callable[..., Any]) -> str:
    name = getattr(step, "__qualname__", type(step).__name__)
    if isinstance(error.__context__, Exception):
        error = error.__context__  # what ended the capture, before torch found that it had ended
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    where = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    advice = "Take out of the step what waits for the device (.item(), printing, boolean indexing), or call the step itself."
    if "captur" not in message.lower():
        return f"{name} cannot be captured: {type(error).__name__}: {message}{where}"
    return f"{name} cannot be captured: it does what a CUDA graph cannot hold{where}: {message}. {advice}"
