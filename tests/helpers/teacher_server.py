"""A stand-in for a server of a teacher on loopback: a transformers model behind /v1/completions."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch


@contextmanager
def serve_teacher(model, *, before=lambda requests: None, change=lambda answer: answer):
    """Serve the model; yield the address and the requests received.

    Args:
        before: called with the requests so far; its (status, text), if any, is the answer.
        change: of each answer.
    """
    requests, lock = [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                requests.append({**body, "path": self.path})
                refusal = before(requests)
                status, text = refusal or (
                    200,
                    json.dumps(change({"choices": [score_choice(model, body)]})),
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
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@torch.no_grad()
def score_choice(model, body):
    ids = torch.tensor([body["prompt"]])
    logp = model(input_ids=ids).logits[0].log_softmax(-1)
    logprobs = [None] + [float(logp[t - 1, ids[0, t]]) for t in range(1, ids.shape[1])]
    if body.get("echo"):
        return {
            "text": "",
            "logprobs": {
                "token_logprobs": [*logprobs, -0.5],
                "tokens": ["?"] * (len(logprobs) + 1),
            },
        }
    likeliest = logp.argmax(-1).tolist()
    places = [None]
    for t in range(1, ids.shape[1]):  # the token that was sent, and maybe a likelier one
        places.append(
            {str(likeliest[t - 1]): {"logprob": 0.0}, str(int(ids[0, t])): {"logprob": logprobs[t]}}
        )
    return {"text": "", "prompt_logprobs": places}
