"""One stage in torch: computes, keeps the step's gradient, and updates its parameters."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.config import RunConfig
from swarm.errors import BadRequest, NeedsInput, NotFinite
from swarm.ids import Digest, MicrobatchId
from swarm.messages import BackwardRequest, ForwardRequest
from swarm.models.decoder import build_stage
from swarm.policy.schedule import learning_rate
from swarm.ports import Draw, Gradient
from swarm.stage import measures, snapshot
from swarm.stage.arrays import from_buffer, from_data, spec_of, to_buffer, to_data
from swarm.stage.checks import RequestChecks
from swarm.stage.graphs import Graph, GraphCache, measured
from swarm.stage.optimizer import StageOptimizer
from swarm.tensors import Buffer, TensorData, TensorSpec

DEFAULT_GRAPH_BUDGET_BYTES = 1 << 30

_PROBES = 3

_IGNORED = -100
"""Target that torch's cross entropy leaves out."""


def numeric_class(device: str = "cpu") -> str:
    """Device type and torch build: stages of one class compute the same bits from the same bits."""
    kind = torch.device(device).type
    unit = torch.cuda.get_device_name(device) if kind == "cuda" else torch.backends.cpu.get_cpu_capability()
    return f"{kind}/{unit}/torch-{torch.__version__}"


class TorchStage:
    """Implements ``ports.StageModule``.

    Memory in bytes per parameter (fp32, AdamW): parameters 4, moments 8, sum of gradients 4, a gradient being
    computed 4, reduced gradient 4.
    """

    def __init__(
        self,
        config: RunConfig,
        stage: int,
        device: str = "cpu",
        graph_budget_bytes: int = DEFAULT_GRAPH_BUDGET_BYTES,
    ) -> None:
        self._config = config
        self._stage = stage
        self._device = torch.device(device)
        self._checks = RequestChecks(config, stage)
        self._first = stage == 0
        self._last = stage == config.model.stage_count - 1
        self._module = build_stage(config, stage).to(self._device)
        named = dict(self._module.named_parameters())
        self._parameters = list(named.values())
        self._specs = [(name, spec_of(parameter)) for name, parameter in named.items()]
        self._optimizer = StageOptimizer(config.optimizer, named)
        self._sum = torch.zeros(sum(p.numel() for p in self._parameters), device=self._device)
        self._sum_views = self._views(self._sum)
        self._reduced: Tensor | None = None
        self.graphs = GraphCache(graph_budget_bytes)
        self._graph_bytes: dict[tuple[int, ...], int] = {}

    # --- computing --------------------------------------------------------------------

    def check_forward(self, request: ForwardRequest) -> None:
        """Raise BadRequest if the tensors do not fit the stage."""
        self._checks.forward(request)

    def check_backward(self, request: BackwardRequest) -> None:
        """Raise BadRequest if the tensors do not fit the stage, or the targets that count are not ``tokens``."""
        self._checks.backward(request)

    def probe(self) -> float:
        """Seconds of one full microbatch's forward, the best of a few; warms up, and leaves nothing behind."""
        shape = (self._config.step.microbatch_size, self._config.model.sequence_length)
        if self._first:
            inputs = torch.zeros(shape, dtype=torch.int64, device=self._device)
        else:
            inputs = torch.ones(*shape, self._config.model.width, device=self._device)
        draw = Draw(step=0, microbatch=MicrobatchId(0))
        seconds = []
        with torch.no_grad():
            for _ in range(1 + _PROBES):
                start = time.perf_counter()
                # Reading an element waits for a device that computes on its own.
                self._module(inputs, draw).flatten()[0].item()
                seconds.append(time.perf_counter() - start)
        return min(seconds[1:])

    def forward(self, draw: Draw, inputs: TensorData, *, keep_graph: bool) -> TensorData:
        """Activations (B, T, D), or logits (B, T, V) at the last stage; the bytes must not be written to.

        Raises NotFinite ('input' or 'output') and BadRequest.
        """
        leaf = self._leaf(inputs)
        if not self._first and not measures.all_finite([leaf]):
            raise NotFinite("input")
        known = self._graph_bytes.get(tuple(leaf.shape))
        if not keep_graph or (known is not None and not self.graphs.has_room(known)):
            with torch.no_grad():
                output = self._module(leaf, draw)
            nbytes = None
        elif known is None:
            output, nbytes = measured(lambda: self._module(leaf, draw), leaf, self._parameters)
            self._graph_bytes[tuple(leaf.shape)] = nbytes
        else:
            output, nbytes = self._module(leaf, draw), known
        if not measures.all_finite([output.detach()]):
            raise NotFinite("output")
        if nbytes is not None:
            self.graphs.keep(draw, Graph(inputs=leaf, output=output, nbytes=nbytes))
        return to_data(output)

    def backward(self, draw: Draw, inputs: TensorData | None, seed: TensorData) -> Gradient:
        """Compute a gradient and add nothing.  Raises NeedsInput, NotFinite ('input') and BadRequest."""
        self._checks.seed(seed)
        graph = self.graphs.take(draw)
        if inputs is not None:
            leaf = self._leaf(inputs)
            if not self._first and not measures.all_finite([leaf]):
                raise NotFinite("input")
            if graph is None or not torch.equal(graph.inputs.detach(), leaf.detach()):
                # Also when the forward was fed by another route than this backward.
                graph = Graph(inputs=leaf, output=self._module(leaf, draw), nbytes=0)
        if graph is None:
            raise NeedsInput(f"no graph of microbatch {draw.microbatch} of step {draw.step}")
        if graph.inputs.shape[0] != seed.spec.shape[0]:
            raise BadRequest(f"seed of {seed.spec.shape[0]} rows, inputs of {graph.inputs.shape[0]}")
        if self._last:
            loss = self._loss(graph.output, seed)
            found = self._gradients(loss, None, graph.inputs)
        else:
            loss = None
            found = self._gradients(graph.output, from_data(seed).to(self._device), graph.inputs)
        checked = [*found, loss.detach()] if loss is not None else found
        return Gradient(
            input_gradient=None if self._first else to_data(found[-1]),
            loss=None if loss is None else float(loss.item()),
            finite=measures.all_finite(checked),
            samples=seed.spec.shape[0],
            handle=found[: len(self._parameters)],
        )

    def _leaf(self, inputs: TensorData) -> Tensor:
        self._checks.inputs(inputs)
        tensor = from_data(inputs)
        if not self._first:
            return tensor.to(self._device).requires_grad_()
        if tensor.min() < 0 or tensor.max() >= self._config.model.vocabulary:
            raise BadRequest(f"token ids from {tensor.min()} to {tensor.max()} in a vocabulary of {self._vocabulary}")
        return tensor.to(self._device)

    def _loss(self, logits: Tensor, seed: TensorData) -> Tensor:
        """Cross entropy, summed over the targets that are not negative, in nats."""
        targets = from_data(seed)
        if targets.max() >= self._vocabulary:
            raise BadRequest(f"target {targets.max()} in a vocabulary of {self._vocabulary}")
        targets = targets.masked_fill(targets < 0, _IGNORED).to(self._device)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="sum")

    def _gradients(self, output: Tensor, seed: Tensor | None, leaf: Tensor) -> list[Tensor]:
        """Of the parameters, in order, and then of the input unless that is ids."""
        wanted = self._parameters if self._first else [*self._parameters, leaf]
        return list(torch.autograd.grad(output, wanted, seed))

    @property
    def _vocabulary(self) -> int:
        return self._config.model.vocabulary

    # --- the step's gradient ----------------------------------------------------------

    def accumulate(self, gradient: Gradient) -> None:
        """Add a gradient to the step's sum."""
        torch._foreach_add_(self._sum_views, gradient.handle)

    def drop_gradient(self) -> None:
        """Zero the step's sum."""
        self._sum.zero_()

    def gradient_sum(self) -> Tensor:
        """The step's sum: one flat fp32 tensor, not a copy, unchanged until the next accumulate, drop or apply."""
        return self._sum

    @property
    def gradient_bytes(self) -> int:
        """Size of the averaged gradient in bytes."""
        return self._sum.nbytes

    def set_reduced(self, mean: Tensor) -> tuple[Digest, float]:
        """Take over the averaged gradient, flat fp32 like the sum, which nobody may write to from here on.

        Returns digest and squared norm.  Raises ValueError on a wrong size or dtype.
        """
        if mean.dtype != torch.float32 or tuple(mean.shape) != tuple(self._sum.shape):
            raise ValueError(f"reduced gradient {mean.dtype} {tuple(mean.shape)}, not fp32 {tuple(self._sum.shape)}")
        mean = mean.detach().to(self._device).contiguous()
        if mean.untyped_storage().data_ptr() == self._sum.untyped_storage().data_ptr():
            mean = mean.clone()
        self._reduced = mean
        return measures.digest([mean]), measures.squared_norm([mean])

    def reduced_bytes(self) -> Buffer:
        """The averaged gradient last set, as raw bytes, not copied; raises ValueError if there is none."""
        return to_buffer(self._kept())

    def load_reduced(self, data: Buffer) -> tuple[Digest, float]:
        """Keep ``data``, which nobody may write to from here on, as the averaged gradient.  Raises ValueError."""
        return self.set_reduced(from_buffer(data, TensorSpec(dtype="float32", shape=tuple(self._sum.shape))))

    def apply(self, step: int, clip_factor: float) -> float:
        """Update by the averaged gradient, which is kept as it is; returns the parameters' squared norm.

        Raises ValueError, and changes nothing, if no averaged gradient is set.
        """
        reduced = self._kept()
        self.graphs.clear()
        # The sum is done with: it lends its memory to the clipped gradient.
        torch.mul(reduced, clip_factor, out=self._sum)
        self._optimizer.step(learning_rate(self._config.optimizer, step), self._sum_views)
        self._sum.zero_()
        return self.squared_norm()

    def _kept(self) -> Tensor:
        if self._reduced is None:
            raise ValueError("no reduced gradient is set")
        return self._reduced

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [parameter.numel() for parameter in self._parameters])
        return [part.view_as(parameter) for part, parameter in zip(parts, self._parameters, strict=True)]

    # --- parameters and state ---------------------------------------------------------

    def squared_norm(self) -> float:
        """Of all parameters, in float64."""
        return measures.squared_norm(self._parameters)

    def digest(self) -> Digest:
        """SHA-256 over the parameters' bytes in order."""
        return measures.digest(self._parameters)

    def flat_parameters(self) -> Tensor:
        """A flat CPU copy of all parameters, in order."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters]).cpu()

    def named_parameters(self) -> dict[str, Tensor]:
        """The parameters, not copied, by their names in the whole model."""
        return {name: p.detach() for (name, _), p in zip(self._specs, self._parameters, strict=True)}

    def snapshot(self) -> tuple[str, Sequence[Buffer]]:
        """Layout (JSON) and a copy of parameters and optimizer state, one buffer a tensor."""
        state = self._optimizer.state()
        entries = [*self._specs, *(self._optimizer.state_specs() if state else [])]
        return snapshot.layout_of(entries), [to_buffer(t.detach().clone()) for t in [*self._parameters, *state]]

    def load(self, layout: str, data: Buffer) -> None:
        """Take over a snapshot; sum, graphs and reduced gradient, which belong to other parameters, are dropped.

        Raises ValueError if it does not fit or is not finite, and then changes nothing.
        """
        entries = snapshot.match(layout, [self._specs, [*self._specs, *self._optimizer.state_specs()]])
        tensors = snapshot.split(data, entries)
        if not measures.all_finite(tensors):
            raise ValueError("snapshot is not finite")
        parameters, state = tensors[: len(self._specs)], tensors[len(self._specs) :]
        self._optimizer.check_state(state)
        self._optimizer.load_state(state)
        self._take(parameters)

    def reset(self) -> None:
        """Initialise from the run's seed, as at version 0."""
        self._optimizer.load_state([])
        self._take([p.detach() for p in build_stage(self._config, self._stage).parameters()])

    def _take(self, parameters: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for own, given in zip(self._parameters, parameters, strict=True):
                own.copy_(given)
        self._sum.zero_()
        self._reduced = None
        self.graphs.clear()
