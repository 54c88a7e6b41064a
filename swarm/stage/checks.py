"""Whether a request fits a stage: what can be told from dtypes, shapes and targets before anything is computed."""

from __future__ import annotations

from swarm.config import RunConfig
from swarm.errors import BadRequest
from swarm.messages import BackwardRequest, ForwardRequest
from swarm.stage.arrays import from_data
from swarm.tensors import TensorData, TensorSpec


class RequestChecks:
    """What the tensors of one stage's requests look like."""

    def __init__(self, config: RunConfig, stage: int) -> None:
        self._model = config.model
        self._rows = config.step.microbatch_size
        self._takes_ids = stage == 0
        self._takes_targets = stage == config.model.stage_count - 1

    def forward(self, request: ForwardRequest) -> None:
        """Raise BadRequest unless the inputs fit."""
        self.inputs(request.inputs)

    def backward(self, request: BackwardRequest) -> None:
        """Raise BadRequest unless inputs (if sent), seed and number of tokens fit each other and the stage."""
        self.seed(request.seed)
        rows, columns = request.seed.spec.shape[:2]
        if request.inputs is not None:
            self.inputs(request.inputs)
            if request.inputs.spec.shape[0] != rows:
                raise BadRequest(f"inputs of {request.inputs.spec.shape[0]} rows, seed of {rows}")
        if not 0 <= request.tokens <= rows * columns:
            raise BadRequest(f"{request.tokens} tokens in {rows} x {columns}")
        if self._takes_targets:
            counted = int((from_data(request.seed) >= 0).sum())
            if counted != request.tokens:
                # The weight in the mean would be wrong at all stages.
                raise BadRequest(f"{request.tokens} tokens announced, {counted} targets count")

    def inputs(self, data: TensorData) -> None:
        """Raise BadRequest unless ``data`` is the stage's input in dtype and shape."""
        self._check("inputs", data.spec, ids=self._takes_ids)

    def seed(self, data: TensorData) -> None:
        """Raise BadRequest unless ``data`` seeds the stage's backward in dtype and shape."""
        self._check("targets" if self._takes_targets else "seed", data.spec, ids=self._takes_targets)

    def _check(self, what: str, spec: TensorSpec, *, ids: bool) -> None:
        dtype = "int64" if ids else "float32"
        rest = (self._model.sequence_length,) if ids else (self._model.sequence_length, self._model.width)
        if spec.dtype != dtype:
            raise BadRequest(f"{what}: dtype {spec.dtype}, not {dtype}")
        if spec.shape[1:] != rest or not 1 <= spec.shape[0] <= self._rows:
            raise BadRequest(f"{what}: shape {spec.shape}, not (1 to {self._rows}, {', '.join(map(str, rest))})")
