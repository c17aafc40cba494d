"""Replaces Atari's simulator, and the reader of DQN's replays, which needs TensorFlow: random images, no display."""

import cv2
import numpy as np

cv2.destroyAllWindows = lambda: None


class ALEInterface:
    """A game that ends after eight frames."""

    def __init__(self):
        self.generator = np.random.default_rng(3)

    def ignored(self, *ignored):
        pass

    setInt = setBool = setFloat = loadROM = ignored

    def getMinimalActionSet(self):
        return [0, 1, 3, 4]

    def getScreenGrayscale(self):
        return self.generator.integers(0, 255, (84, 84), dtype=np.uint8)

    def reset_game(self):
        self.frames = 0

    def act(self, action):
        self.frames += 1
        return float(action == 1)

    def game_over(self):
        return self.frames % 8 == 0

    def lives(self):
        return 1


def get_game_path(name):
    return name


class FixedReplayBuffer:
    """Episodes of seven steps."""

    _loaded_buffers = True

    def __init__(self, replay_suffix, **ignored):
        self.generator = np.random.default_rng(replay_suffix)

    def sample_transition_batch(self, batch_size, indices):
        states = self.generator.integers(0, 255, (1, 84, 84, 4), dtype=np.uint8)
        action, reward = self.generator.integers(0, 4, 1), self.generator.random(1)
        return states, action, reward, states, action, reward, [indices[0] % 7 == 6], indices
