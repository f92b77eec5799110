"""Plain references for tests, in NumPy: see :mod:`crossdock.testing.ep_reference`."""
# SPDX-License-Identifier: Apache-2.0
