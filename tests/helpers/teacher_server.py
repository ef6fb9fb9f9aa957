"""A stand-in for a server of a teacher on loopback: a transformers model behind /v1/completions."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch


@contextmanager
def serving(model, *, before=lambda asked: None, change=lambda answer: answer):
    """Address of the server, and what it was asked.

    Args:
        before: given each request; what it gives, (status, text), is answered in its place.
        change: of each answer.
    """
    asked, lock = [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                asked.append({**body, "path": self.path})
                refusal = before(asked)
                status, text = refusal or (
                    200,
                    json.dumps(change({"choices": [choice(model, body)]})),
                )
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@torch.no_grad()
def choice(model, body):
    ids = torch.tensor([body["prompt"]])
    logp = model(input_ids=ids).logits[0].log_softmax(-1)
    told = [None] + [float(logp[t - 1, ids[0, t]]) for t in range(1, ids.shape[1])]
    if body.get("echo"):
        return {
            "text": "",
            "logprobs": {"token_logprobs": [*told, -0.5], "tokens": ["?"] * (len(told) + 1)},
        }
    likeliest = logp.argmax(-1).tolist()
    places = [None]
    for t in range(1, ids.shape[1]):  # the token that was sent, and maybe a likelier one
        places.append(
            {str(likeliest[t - 1]): {"logprob": 0.0}, str(int(ids[0, t])): {"logprob": told[t]}}
        )
    return {"text": "", "prompt_logprobs": places}
