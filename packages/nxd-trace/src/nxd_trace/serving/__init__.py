"""An OpenAI-style completions server for one model, whose requests share a batch.

Needs the extra `nxd-trace[serve]`, which is imported when an application is made, not before.
"""

from nxd_trace.serving.app import check_installed, make_app
from nxd_trace.serving.browsers import AllowedSites
from nxd_trace.serving.errors import RequestError
from nxd_trace.serving.readers import Client
from nxd_trace.serving.scheduler import Job, RestartPolicy, Scheduler, WrittenToken
from nxd_trace.serving.server import serve
from nxd_trace.serving.service import CompletionService, ServerLimits, TextTokenizer

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
