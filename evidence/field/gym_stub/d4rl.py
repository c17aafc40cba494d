"""Replaces d4rl: its data comes from the environment."""


def qlearning_dataset(env):
    return {name: values for name, values in env.get_dataset().items() if name != "timeouts"}
