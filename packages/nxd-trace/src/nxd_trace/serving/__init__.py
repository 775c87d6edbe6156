"""An OpenAI-style completions server for one model, whose requests share a batch.

Needs the extra `nxd-trace[serve]`, which is imported when an application is made, not before.
"""

from nxd_trace.errors import RequestError
from nxd_trace.serving.app import check_installed, make_app
from nxd_trace.serving.middleware import AllowedSites
from nxd_trace.serving.scheduler import Job, RestartPolicy, Scheduler, WrittenToken
from nxd_trace.serving.server import serve
from nxd_trace.serving.service import Client, CompletionService, ServerLimits, TextTokenizer

__all__ = [
    "serve",
    "make_app",
    "check_installed",
    "CompletionService",
    "ServerLimits",
    "RestartPolicy",
    "AllowedSites",
    "Client",
    "TextTokenizer",
    # for a server of your own
    "Scheduler",
    "Job",
    "WrittenToken",
    "RequestError",
]
