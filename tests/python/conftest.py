"""The tests of the Python package; they run against the package that PYTHONPATH names, which ctest sets
to that of the build tree."""
# SPDX-License-Identifier: Apache-2.0
