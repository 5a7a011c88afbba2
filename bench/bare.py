"""The floor under every server of this kind: a Starlette app that answers the same bytes at once."""

from __future__ import annotations

import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

ANSWER = (
    b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":"AACAPwAAgD8AAIA/AACAPw=="}],"model":"fake"}'
)


async def embeddings(request: Request) -> Response:
    return Response(ANSWER, media_type="application/json")


app = Starlette(routes=[Route("/v1/embeddings", embeddings, methods=["POST"]), Route("/readyz", embeddings)])

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), loop="uvloop", http="httptools", access_log=False, log_level="warning")
