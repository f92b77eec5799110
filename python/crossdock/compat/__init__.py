"""Other libraries' interfaces on top of Crossdock.

``crossdock.compat.deep_ep`` has the calls of DeepEP. ``python -m crossdock.compat install deep_ep`` makes
``import deep_ep`` resolve to it.
"""
# SPDX-License-Identifier: Apache-2.0
