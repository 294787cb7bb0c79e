"""A decoder of random weights that answers some requests at once, a token of each in every step.

The quota in bytes is the argument; the shape follows from it. JSON lines on standard input say what to do, as for
`tessera-tenant time steps`: {"do": "prepare", "mode": "eager"|"graphs", "requests": N}, then
{"do": "measure", "begin": ns, "end": ns} by CLOCK_MONOTONIC. Each step ends with its tokens on the host, as a
server needs them; the next begins with them.
"""

import json
import os
import sys
import time

import torch
import torch.nn.functional as F

TAIL_NS = 150_000_000
HEAD = 128  # of an attention head
VOCABULARY = 32000
DTYPE = torch.bfloat16
DEVICE = "cuda"


def say(event, **figures):
    print(json.dumps({"event": event, "pid": os.getpid(), **figures}), flush=True)


class Shape:
    """How large the model is: about 0.8 or 0.1 billion weights."""

    def __init__(self, quota):
        large = quota >= 6 << 30
        self.layers, self.width = (16, 2048) if large else (8, 1024)
        self.groups = self.width // HEAD // 4  # four query heads have keys and values in common
        self.inner, self.context = self.width * 11 // 4, 1024 if large else 512


def weights(*size):
    return torch.empty(*size, device=DEVICE, dtype=DTYPE).normal_(0.0, 0.02)


class Layer:
    """One layer's weights."""

    def __init__(self, shape):
        width, keys = shape.width, shape.groups * HEAD
        self.before = torch.ones(width, device=DEVICE, dtype=DTYPE)
        self.between = torch.ones(width, device=DEVICE, dtype=DTYPE)
        self.project = weights(width + 2 * keys, width)
        self.out = weights(width, width)
        self.gate, self.up = weights(shape.inner, width), weights(shape.inner, width)
        self.down = weights(width, shape.inner)


def norm(x, scale):
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(DTYPE) * scale


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Model:
    """Weights, and what one batch of requests needs."""

    def __init__(self, shape):
        self.shape = shape
        self.layers = [Layer(shape) for _ in range(shape.layers)]
        self.embedding = weights(VOCABULARY, shape.width)
        self.last = torch.ones(shape.width, device=DEVICE, dtype=DTYPE)
        steps = torch.arange(shape.context, device=DEVICE, dtype=torch.float32)
        rates = torch.arange(0, HEAD, 2, device=DEVICE, dtype=torch.float32) / HEAD
        angles = torch.outer(steps, torch.pow(10000.0, -rates)).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(DTYPE), angles.sin().to(DTYPE)
        self.graph, self.keys, self.values = None, [], []

    def prepare(self, mode, requests):
        """Makes room for the batch, and captures its step if that is asked for."""
        self.graph, self.keys, self.values = None, [], []
        torch.cuda.empty_cache()
        shape, self.requests = self.shape, requests
        size = (requests, shape.groups, shape.context, HEAD)
        self.keys = [weights(*size) for _ in range(shape.layers)]
        self.values = [weights(*size) for _ in range(shape.layers)]
        self.tokens = torch.randint(0, VOCABULARY, (requests,), device=DEVICE)
        self.position = torch.zeros(1, device=DEVICE, dtype=torch.int64)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.compute()
        torch.cuda.current_stream().wait_stream(side)
        if mode == "graphs":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.compute()
            self.graph = graph
        for _ in range(5):
            self.step()

    def compute(self):
        """The next token of each request."""
        shape, requests = self.shape, self.requests
        x = F.embedding(self.tokens, self.embedding)
        cos = self.cos.index_select(0, self.position)
        sin = self.sin.index_select(0, self.position)
        keys_wide = shape.groups * HEAD
        for layer, keys, values in zip(self.layers, self.keys, self.values):
            mixed = F.linear(norm(x, layer.before), layer.project)
            q, k, v = mixed.split((shape.width, keys_wide, keys_wide), dim=-1)
            # Requests, groups, query heads of a group, head: a group's queries share keys and values.
            q = rotate(q.reshape(requests, shape.groups, -1, HEAD), cos, sin)
            k = rotate(k.reshape(requests, shape.groups, 1, HEAD), cos, sin)
            keys.index_copy_(2, self.position, k)
            values.index_copy_(2, self.position, v.reshape(requests, shape.groups, 1, HEAD))
            # All of the context is attended to, whatever the position: every step is the same work.
            heads = F.scaled_dot_product_attention(q, keys, values)
            x = x + F.linear(heads.reshape(requests, shape.width), layer.out)
            h = norm(x, layer.between)
            x = x + F.linear(F.silu(F.linear(h, layer.gate)) * F.linear(h, layer.up), layer.down)
        logits = F.linear(norm(x, self.last), self.embedding)
        self.tokens.copy_(logits.argmax(-1))
        self.position.add_(1).remainder_(shape.context)

    def step(self):
        """A step as a server does it."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.compute()
        return self.tokens.tolist()


def percentile(values, part):
    return sorted(values)[min(len(values) - 1, int(len(values) * part))] / 1e3 if values else 0.0


def measure(model, begin, end):
    """Steps between two moments."""
    took, last = [], time.monotonic_ns()
    while last < end + TAIL_NS:
        model.step()
        now = time.monotonic_ns()
        if begin <= now < end:
            took.append(now - last)
        last = now
    seconds = (end - begin) / 1e9
    say(
        "measured",
        steps=len(took),
        tokens_per_s=len(took) * model.requests / seconds,
        p50_us=percentile(took, 0.5),
        p99_us=percentile(took, 0.99),
        max_us=percentile(took, 1.0),
    )


def main():
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    shape = Shape(int(sys.argv[1]))
    model = Model(shape)
    torch.cuda.synchronize()
    say("ready", torch=torch.__version__, layers=shape.layers, width=shape.width, context=shape.context)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "prepare":
                model.prepare(request["mode"], request["requests"])
                say("prepared")
            else:
                measure(model, request["begin"], request["end"])
        except Exception as error:  # noqa: BLE001: what it is, is a result
            said = str(error).strip().splitlines()
            say("failed", reason=f"{type(error).__name__}: {said[0] if said else ''}"[:300])


if __name__ == "__main__":
    main()
