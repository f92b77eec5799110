// See options.hpp. SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/options.hpp"

namespace crossdock::transport::tcp {

TcpOptions read_options(const base::Config*) {
  return {};
}

}  // namespace crossdock::transport::tcp
