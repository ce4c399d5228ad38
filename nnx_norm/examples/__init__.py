# SPDX-License-Identifier: Apache-2.0
"""A small PPO that trains with the library: `python -m nnx_norm.examples.ppo`."""
