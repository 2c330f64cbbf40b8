"""Statistics of a call, and what is made of them while calls run: records for code, Prometheus metrics, log lines.

`stats` is filled by the loop; `listeners` are told of it, cycle by cycle: `records`, `prometheus`, `log_line`.
"""

from .listeners import begin_call
from .log_line import log_as_environment_says, log_every
from .low_acceptance import watch_acceptance
from .prometheus import disable, enable, start_http_server
from .records import CallRecord, CallTrace, CycleTiming, CycleTrace, Record, RowTrace, TokenScore, record
from .stats import LOSSLESS_RULES, SpecDecodingStats


__all__ = [
    "LOSSLESS_RULES",
    "CallRecord",
    "CallTrace",
    "CycleTiming",
    "CycleTrace",
    "Record",
    "RowTrace",
    "SpecDecodingStats",
    "TokenScore",
    "begin_call",
    "disable",
    "enable",
    "log_every",
    "record",
    "start_http_server",
    "watch_acceptance",
]

log_as_environment_says()
