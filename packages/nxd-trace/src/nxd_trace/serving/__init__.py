"""An OpenAI-compatible server for one model, with continuous batching.

Needs the extra `nxd-trace[serve]`, which is imported when the application is created.
"""

from nxd_trace.errors import RequestError
from nxd_trace.serving.app import check_installed, make_app
from nxd_trace.serving.middleware import AllowedSites
from nxd_trace.serving.scheduler import GeneratedToken, RestartPolicy, ScheduledPrompt, Scheduler
from nxd_trace.serving.server import serve
from nxd_trace.serving.service import Client, CompletionService, ServerLimits, TextTokenizer
from nxd_trace.serving.weight_updates import UpdateSettings

__all__ = [
    "serve",
    "make_app",
    "check_installed",
    "CompletionService",
    "ServerLimits",
    "RestartPolicy",
    "AllowedSites",
    "UpdateSettings",
    "Client",
    "TextTokenizer",
    # for a server of your own
    "Scheduler",
    "ScheduledPrompt",
    "GeneratedToken",
    "RequestError",
]
