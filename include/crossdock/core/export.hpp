// CROSSDOCK_API marks what the shared library exports; everything else is hidden.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#define CROSSDOCK_API __attribute__((visibility("default")))
