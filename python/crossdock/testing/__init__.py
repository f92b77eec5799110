"""Plain references for tests, in NumPy: see :mod:`crossdock.testing.ep_reference` and
:mod:`crossdock.testing.moe_reference`."""
# SPDX-License-Identifier: Apache-2.0
