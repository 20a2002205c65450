"""State that all requests to one server share."""

import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from eyas.serve.admission import AdmissionController
from eyas.serve.builders.request_builder import RequestBuilder
from eyas.serve.builders.token_text import TokenText
from eyas.serve.engine_client import EngineClient
from eyas.serve.grammar.structured_outputs import GrammarCompiler
from eyas.serve.learning.answer_record import AnswerRecorder
from eyas.serve.learning.collector import AnswerCollector, LearnFolder
from eyas.serve.learning.loop import LearningLoop
from eyas.serve.model_info import ModelInfo, ServerLimits
from eyas.serve.monitoring.drafter_changes import DrafterChanges
from eyas.serve.monitoring.metrics import MetricsNames, ServerMetrics
from eyas.serve.protocol.request_policy import RequestPolicy
from eyas.target.model import Target

SHORT_BODY_BYTES = 2**16
"""A body of this size takes some tens of milliseconds to tokenize."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ServerContext:
    """The engine, facts about the model, and everything that is built once per server."""

    engine_client: EngineClient
    model_info: ModelInfo
    limits: ServerLimits
    policy: RequestPolicy
    admission: AdmissionController
    metrics: ServerMetrics
    request_builder: RequestBuilder
    compiler: GrammarCompiler
    token_text: TokenText
    collector: AnswerCollector | None = None
    """Keeps answers to learn from; None if none are kept."""
    drafter_changes: DrafterChanges = field(default_factory=DrafterChanges)
    """Every change of drafter is noted here."""
    learning_loop: LearningLoop | None = None
    """Adapts the drafter to the kept answers; None if they are only kept."""
    started: float = field(default_factory=time.monotonic)
    """When the server started, by the monotonic clock."""
    tokenizer_thread: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "eyas-tokenizer"))
    """For short prompts: tokenizing must not block the event loop."""
    long_prompt_thread: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "eyas-long-prompts"))
    """For long prompts, so that short ones do not wait behind them. Encoding releases the interpreter's lock."""

    def tokenizer_lane(self, body_bytes: int) -> Executor:
        """The thread that tokenizes a body of that size."""
        return self.tokenizer_thread if body_bytes <= SHORT_BODY_BYTES else self.long_prompt_thread

    @classmethod
    def create(
        cls,
        engine_client: EngineClient,
        model_info: ModelInfo,
        limits: ServerLimits,
        policy: RequestPolicy,
        metrics_names: MetricsNames = "both",
        learn_folder: LearnFolder | None = None,
    ) -> "ServerContext":
        """Build everything that the endpoints need around an engine."""
        target = engine_client.target
        # Encoding changes a tokenizer only if its settings differ from the requested ones. After the first call they
        # never do, so several threads may encode and decode from then on.
        target.tokenizer.encode("a")
        admission = AdmissionController(max_num_seqs=model_info.max_num_seqs, queue=limits.queue)
        metrics = ServerMetrics(model_info.name, metrics_names)
        metrics.in_flight.set_function(lambda: admission.in_flight)
        request_builder = RequestBuilder(target, model_info, policy)
        small_server = isinstance(target, Target) and target.device.type == "cpu"
        special_tokens = {token: text for text, token in request_builder.special_tokens.items()}
        collector = None
        if learn_folder is not None:
            recorder = AnswerRecorder(target, request_builder, learn_folder.author)
            collector = AnswerCollector(learn_folder.ring, recorder, metrics)
        return cls(
            engine_client=engine_client,
            model_info=model_info,
            limits=limits,
            policy=policy,
            admission=admission,
            metrics=metrics,
            request_builder=request_builder,
            compiler=GrammarCompiler(target, read_at_start=not small_server),
            token_text=TokenText(target.tokenizer, special_tokens),
            collector=collector,
        )
