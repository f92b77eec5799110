"""Measurements of the Python package itself; ``python -m crossdock.bench ep``."""
# SPDX-License-Identifier: Apache-2.0
