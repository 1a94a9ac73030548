"""Run an exported policy with numpy and onnxruntime alone, and change its cost limit half-way.

    qpt export --checkpoint runs/ball --out policy.onnx
    python examples/onnx_policy.py policy.onnx 40 10

The system that is controlled here is made up: put yours in place of `plant`.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime


class Episode:
    """One episode of a decision maker: act, then observe what came of it. `cost_limit` may be changed at any time."""

    def __init__(self, graph: str, cost_limit: float, seed: int = 0):
        self.facts = json.loads(Path(graph).with_suffix(".json").read_text())
        self.session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
        self.cost_limit, self.history = cost_limit, []  # history: [observation, action, earned and spent before it]
        self.earned = self.spent = 0.0
        rng = np.random.default_rng(seed)  # any source will do; qpt.runtime repeats PyTorch's numbers
        self.draw = lambda d: rng.random(d["size"]) if d["uniform"] else rng.normal(size=d["size"])
        self.noise = [self.draw(d) for d in self.facts["noise"]]

    def act(self, observation):
        f, step = self.facts, len(self.history)
        self.history.append([observation, np.zeros(f["action_dim"]), self.earned, self.spent])
        window = self.history[-f["context"] :]
        self.noise = [self.draw(d) if d["each_step"] else old for d, old in zip(f["noise"], self.noise, strict=True)]
        target = self.return_target()
        observations, actions, earned, spent = map(np.array, zip(*window, strict=True))
        feed = {"observations": observations, "actions": actions, "steps": step + 1 + np.arange(-len(window), 0)}
        feed |= {"return_to_go": target - earned, "cost_to_go": self.cost_limit - spent}
        padding = f["context"] - len(window)  # at the end; the graph looks no further than `last`
        feed = {name: np.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for name, x in feed.items()}
        feed |= {"last": len(window) - 1, "return_target": target, "cost_limit": self.cost_limit}
        feed["noise"] = np.concatenate([[], *self.noise])
        kinds = {i.name: np.int64 if "int64" in i.type else np.float32 for i in self.session.get_inputs()}
        batch = {name: np.asarray(feed[name])[None].astype(kind) for name, kind in kinds.items()}  # one episode
        action, *diagnostics = self.session.run(None, batch)
        window[-1][1] = action[0]
        names = [output.name for output in self.session.get_outputs()]
        return action[0], {name: round(float(x[0]), 3) for name, x in zip(names[1:], diagnostics, strict=True)}

    def observe(self, reward, cost):
        self.earned, self.spent = self.earned + reward, self.spent + cost

    def return_target(self):
        """The best logged return within the limit; for a table of published targets, on the line between them."""
        t = self.facts["return_targets"]
        place = max(np.searchsorted(t["costs"], self.cost_limit, side="right") - 1, 0)
        line = np.interp(self.cost_limit, t["costs"], t["returns"])
        return t["factor"] * (line if t["between"] == "linear" else t["returns"][place])


def plant(state, action):
    """Made up: the state drifts with the action; large actions earn more, and cost."""
    size = float(np.abs(action).mean())
    return 0.95 * state + 0.1 * np.resize(action, state.shape), size, float(size > 0.5)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    episode = Episode(sys.argv[1], cost_limit=float(sys.argv[2]))
    steps, state = min(40, episode.facts["horizon"]), np.zeros(episode.facts["observation_dim"])
    for step in range(steps):
        if step == steps // 2:
            episode.cost_limit = float(sys.argv[3])
        action, diagnostics = episode.act(state)
        state, reward, cost = plant(state, action)
        episode.observe(reward, cost)
        print(f"step {step:2} limit {episode.cost_limit:g} spent {episode.spent:g} {action.round(3)} {diagnostics}")
