"""Loops of arithmetic: inference, generation, reinforcement learning, solvers, random draws, NumPy, devices."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from manygrad import Tensor, TinyJit, Variable, function, nn, no_grad, scan
from manygrad.nn import functional as F
from tests.endurance.idiom import batch, idiom, network


@idiom
def inference() -> Iterator[Any]:
    model = network().eval()
    for i in count():
        with no_grad():
            yield model(Tensor(batch(i)[0])).numpy()


@idiom
def inference_with_gradients_on() -> Iterator[Any]:
    model = network().eval()
    for i in count():
        yield model(Tensor(batch(i)[0])).numpy()


@idiom
def inference_of_other_sizes() -> Iterator[Any]:
    model = network().eval()
    for i in count():
        with no_grad():
            yield model(Tensor(batch(i, rows=1 + i % 7)[0])).tolist()


@idiom
def captured_inference() -> Iterator[Any]:
    model = network().eval()
    run = TinyJit(lambda x: model(x).softmax(0))
    for i in count():
        yield run(Tensor(batch(i)[0])).numpy()


@idiom
def captured_inference_of_what_is_computed() -> Iterator[Any]:
    model = network().eval()
    run = TinyJit(model)
    for i in count():
        x = (Tensor(batch(i)[0]) - 0.5) / 2
        yield run(x).argmax(0).item()


@idiom
def captured_inference_moved_to_a_device() -> Iterator[Any]:
    """As a server of a language model does: each token comes from the host, and the answer is read."""
    model = network().eval()
    run = TinyJit(model, warmup=0)
    for i in count():
        yield run(Tensor(batch(i)[0]).to("CPU:0")).numpy()


@idiom
def function_with_a_graph_of_its_own() -> Iterator[Any]:
    model = network()

    @function
    def both(x: Tensor) -> Tensor:
        return model(x) + model(x * 2)

    for i in count():
        yield both(Tensor(batch(i)[0])).sum().item()


@idiom
def generation_with_a_cache() -> Iterator[Any]:
    table, query, head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)
    keys = Tensor.zeros(6, 8).contiguous().realize()
    token = 1
    for i in count():
        with no_grad():
            x = table(Tensor([token]))
            keys[i % 6 : i % 6 + 1] = x
            seen = keys[: i % 6 + 1]
            out = (query(x) @ seen.T).softmax(-1) @ seen
            token = head(out).argmax(-1).item()
        yield token


@idiom
def generation_with_a_bound_position() -> Iterator[Any]:
    table, query, head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)
    keys = Tensor.zeros(32, 8).contiguous().realize()
    place = Variable("place", 0, 31)

    @TinyJit
    def step(token: Tensor, at: Any) -> Tensor:
        x = table(token)
        keys[at : at + 1] = x
        seen = keys[: at + 1]
        return head((query(x) @ seen.T).softmax(-1) @ seen).argmax(-1)

    token = Tensor([1])
    for i in count():
        with no_grad():
            token = step(token, place.bind(i % 32))
        yield token.item()


@idiom
def generation_without_a_cache() -> Iterator[Any]:
    table, head = nn.Embedding(16, 8), nn.Linear(8, 16)
    text = [1, 2, 3]
    for _ in count():
        with no_grad():
            text.append(head(table(Tensor(text[-12:])).mean(0)).argmax().item())
        yield text[-1]


@idiom
def generation_that_appends() -> Iterator[Any]:
    """The text so far is a tensor that is joined with each token."""
    table, head = nn.Embedding(16, 8), nn.Linear(8, 16)
    text = Tensor([[1, 2, 3]])
    for _ in count():
        with no_grad():
            token = head(table(text[:, -8:]).mean(1)).argmax(-1, keepdim=True)
            text = Tensor.cat([text, token], dim=1)[:, -16:].realize()
        yield token.item()


@idiom
def policy_gradient() -> Iterator[Any]:
    policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = nn.optim.Adam(policy.parameters(), lr=0.01)
    rng = np.random.default_rng(0)
    for _ in count():
        states, actions, rewards = [], [], []
        state = rng.standard_normal(4).astype(np.float32)
        for _ in range(4):
            with no_grad():
                chances = policy(Tensor(state[None])).softmax(-1)
            action = chances.multinomial(1).item()
            states.append(state)
            actions.append(action)
            rewards.append(float(state[action]))
            state = (state * 0.9 + rng.standard_normal(4) * 0.1).astype(np.float32)
        optimizer.zero_grad()
        logs = policy(Tensor(np.stack(states))).log_softmax(-1)
        loss = -(logs.gather(1, Tensor(actions)[:, None])[:, 0] * Tensor(rewards)).mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


@idiom
def deep_q_learning() -> Iterator[Any]:
    """A replay buffer on the host, and a target network that follows softly."""
    model, target = network(), network()
    target.load_state_dict(model.state_dict())
    optimizer = nn.optim.Adam(model.parameters(), lr=0.01)
    memory: deque[tuple[np.ndarray, float]] = deque(maxlen=64)
    rng = np.random.default_rng(0)
    for _ in count():
        state = rng.standard_normal(4).astype(np.float32)
        with no_grad():
            value = model(Tensor(state)).item()
        memory.append((state, value))
        rows = rng.integers(0, len(memory), 8)
        x = Tensor(np.stack([memory[r][0] for r in rows]))
        with no_grad():
            wanted = target(x) * 0.9 + 1
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(model(x), wanted)
        loss.backward()
        optimizer.step()
        with no_grad():
            for t, p in zip(target.parameters(), model.parameters()):
                t.mul_(0.95).add_(p, alpha=0.05)
        yield loss.item()


@idiom
def replay_buffer_on_the_device() -> Iterator[Any]:
    memory = Tensor.zeros(6, 4).contiguous().realize()
    rng = np.random.default_rng(0)
    for i in count():
        memory[i % 6] = Tensor(batch(i)[0][0])
        yield memory[Tensor(rng.integers(0, 6, 8))].sum().item()


@idiom
def rollouts_kept_as_tensors() -> Iterator[Any]:
    policy = network()
    for i in count():
        with no_grad():
            out = [policy(Tensor(batch(8 * i + k)[0][:1])) for k in range(8)]
            returns = Tensor.zeros(1, 1)
            found = []
            for value in reversed(out):
                returns = value + 0.9 * returns
                found.append(returns)
        yield Tensor.cat(found).numpy()


@idiom
def power_iteration() -> Iterator[Any]:
    a = Tensor(np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32))
    v = Tensor.ones(6)
    for _ in count():
        v = a @ v
        v = v / v.norm()
        yield v.sum().item()


@idiom
def decayed_sum() -> Iterator[Any]:
    s = Tensor.zeros(8, 4)
    for i in count():
        s = s * 0.9 + Tensor(batch(i)[0])
        yield s.sum().item()


@idiom
def mean_and_variance_as_they_come() -> Iterator[Any]:
    n, mean, squares = 0, Tensor.zeros(4), Tensor.zeros(4)
    for i in count():
        n += 1
        x = Tensor(batch(i)[0][0])
        delta = x - mean
        mean = mean + delta / n
        squares = squares + delta * (x - mean)
        yield (squares / n).sqrt().tolist() if i % 5 == 4 else None


@idiom
def beam_search() -> Iterator[Any]:
    table, head = nn.Embedding(16, 8), nn.Linear(8, 16)
    beams, scores = Tensor([[1], [1], [1]]), Tensor.zeros(3)
    for _ in count():
        with no_grad():
            logs = head(table(beams[:, -4:]).mean(1)).log_softmax(-1) + scores[:, None]
            scores, best = logs.flatten().topk(3)
            scores = scores - scores[0]
            beams = Tensor.cat([beams[best // 16], (best % 16)[:, None]], dim=1)[:, -8:]
        yield beams.tolist()


@idiom
def k_means() -> Iterator[Any]:
    points = Tensor(np.random.default_rng(0).standard_normal((24, 2)).astype(np.float32))
    centres = points[:3]
    for _ in count():
        nearest = (points[:, None] - centres[None]).square().sum(-1).argmin(1)
        members = F.one_hot(nearest, 3).float()
        centres = (members.T @ points) / members.sum(0).clamp(1)[:, None]
        yield centres.numpy()


@idiom
def conjugate_gradients() -> Iterator[Any]:
    rng = np.random.default_rng(0)
    m = rng.standard_normal((6, 6)).astype(np.float32)
    a = Tensor(m @ m.T + 6 * np.eye(6, dtype=np.float32))
    for i in count():
        b = Tensor(rng.standard_normal(6).astype(np.float32))
        x, r = b.zeros_like(), b
        p, old = r, (r * r).sum()
        for _ in range(4):
            ap = a @ p
            alpha = old / (p * ap).sum()
            x, r = x + alpha * p, r - alpha * ap
            new = (r * r).sum()
            p, old = r + new / old * p, new
        yield x.numpy() if i % 2 else old.item()


@idiom
def newton_until_it_converges() -> Iterator[Any]:
    for i in count():
        x, target = Tensor([1.0]), Tensor([2.0 + i % 5])
        for _ in range(20):
            error = x * x - target
            if abs(error.item()) < 1e-3:
                break
            x = x - error / (2 * x)
        yield x.item()


@idiom
def simulation_in_place() -> Iterator[Any]:
    heat = Tensor(np.random.default_rng(0).random((8, 8), np.float32))
    for i in count():
        heat[1:-1, 1:-1] += 0.1 * (
            heat[2:, 1:-1] + heat[:-2, 1:-1] + heat[1:-1, 2:] + heat[1:-1, :-2] - 4 * heat[1:-1, 1:-1]
        )
        yield heat.numpy() if i % 5 == 0 else None


@idiom
def steps_of_a_system_read_at_each() -> Iterator[Any]:
    state, turn = Tensor([1.0, 0.0]), Tensor([[0.99, -0.1], [0.1, 0.99]])
    for _ in count():
        state = (turn @ state).realize()
        yield state.tolist()


@idiom
def numpy_and_back() -> Iterator[Any]:
    x = np.ones(8, np.float32)
    for i in count():
        x = (Tensor(x) * 0.9 + float(i % 3)).numpy()
        yield x


@idiom
def sorted_and_largest() -> Iterator[Any]:
    for i in count():
        x = Tensor(batch(i)[0])
        values, where = x.sort(dim=1)
        yield values[0].numpy(), where[0].numpy(), x.topk(2, dim=0)[1].numpy(), x.argsort(1)[1].tolist()


@idiom
def masks_and_shapes_that_depend_on_data() -> Iterator[Any]:
    for i in count():
        x = Tensor(batch(i, rows=2)[0])
        yield x[x > 0].sum().item(), x.nonzero().shape[0], x.masked_fill(x < 0, 0).sum().item()


@idiom
def random_draws() -> Iterator[Any]:
    for _ in count():
        x = Tensor.rand(4, 4) + Tensor.randn(4, 4) + Tensor.randint(4, 4, low=0, high=3)
        yield x.sum().item(), Tensor.randperm(6).tolist(), x.bernoulli(0.5).sum().item()


@idiom
def seeded_each_step() -> Iterator[Any]:
    for i in count():
        Tensor.manual_seed(i)
        yield F.dropout(Tensor.ones(16), 0.5).numpy()


@idiom
def losses_in_a_growing_list_of_numbers() -> Iterator[Any]:
    model = network()
    losses: list[float] = []
    for i in count():
        losses.append(model(Tensor(batch(i)[0])).square().mean().item())
        yield np.mean(losses[-5:])


@idiom(keeps=1)
def outputs_in_a_growing_list() -> Iterator[Any]:
    model = network()
    outputs = []
    for i in count():
        with no_grad():
            outputs.append(model(Tensor(batch(i)[0])).realize())
        yield Tensor.cat(outputs[-3:]).sum().item()


@idiom
def deleted_names() -> Iterator[Any]:
    model = network()
    for i in count():
        x = Tensor(batch(i)[0])
        hidden = model[0](x)
        out = model[2](hidden.tanh())
        del x, hidden
        value = out.sum().item()
        del out
        yield value


@idiom
def results_in_dicts() -> Iterator[Any]:
    model, states = network(), dict[str, Tensor]()
    for i in count():
        with no_grad():
            states[f"slot {i % 4}"] = model(Tensor(batch(i)[0])).mean(0)
        yield sum(t.item() for t in states.values())


@idiom
def views_of_a_buffer() -> Iterator[Any]:
    buffer = Tensor.zeros(64).contiguous().realize()
    for i in count():
        part = buffer.view(8, 8)[i % 8]
        part += 1.0
        yield buffer.sum().item()


@idiom
def nested_loops_with_scan() -> Iterator[Any]:
    for i in count():
        xs = Tensor(batch(i)[0])
        last, all_of = scan(lambda h, x: ((h * 0.5 + x).tanh(), h.sum()), Tensor.zeros(4), xs)
        yield last.numpy(), all_of.numpy()


@idiom
def symbolic_sizes() -> Iterator[Any]:
    x = Tensor(batch(0, 16)[0])
    for i in count():
        n = Variable("n", 1, 16).bind(1 + i % 16)
        yield (x[:n] * 2).sum().item()


@idiom
def several_devices() -> Iterator[Any]:
    devices = ("CPU:0", "CPU:1")
    model = network()
    for p in model.parameters():
        p.shard_(devices)
    optimizer = nn.optim.SGD(model.parameters(), lr=0.05)
    for i in count():
        optimizer.zero_grad()
        x, y = (Tensor(a).shard(devices, axis=0) for a in batch(i))
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss.item()


@idiom
def from_device_to_device() -> Iterator[Any]:
    for i in count():
        x = Tensor(batch(i)[0]).to("CPU:1") * 2
        yield x.to("CPU:0").sum().item()


@idiom
def arrays_on_disk() -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder:
        for i in count():
            path = str(Path(folder, f"part{i % 3}.safetensors"))
            nn.state.safe_save({"x": Tensor(batch(i)[0])}, path)
            yield nn.state.safe_load(path)["x"].to("CPU:0").sum().item()


@idiom
def printed_and_compared() -> Iterator[Any]:
    model = network()
    for i in count():
        out = model(Tensor(batch(i)[0]))
        yield f"{out} {out.shape} {out.mean()}", bool((out > 0).any().item()), out.allclose(out + 1)
