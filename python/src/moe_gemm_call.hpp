// What Python gives a grouped product, as the library's call. Needs the GIL.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include <crossdock/moe/grouped_gemm.hpp>

#include "copies.hpp"
#include "moe/gemm_core.hpp"

namespace crossdock::python {

inline constexpr uint32_t kGemmRank = 0;

class GemmBox final : public RankBox {
 public:
  explicit GemmBox(moe::Gemm gemm) : gemm_(std::move(gemm)) { make_lanes(); }
  ~GemmBox() override { drop_lanes(); }
  [[nodiscard]] symm::Group& ranks() const override { return gemm_.core().group(); }
  [[nodiscard]] moe::Gemm& gemm() { return gemm_; }

 private:
  moe::Gemm gemm_;
};

// `call` has all arguments of Gemm.__call__ as attributes; None: not given.
struct GemmArguments {
  nb::handle call;
  uint32_t experts = 0;
  uint32_t expert_rows = 0;
};
// Raises InvalidArgument where type, shape, strides or place of one is wrong. `copies`: of the
// arrays, in the twin.
moe::GemmCall gemm_call_of(const GemmArguments& arguments, const std::shared_ptr<GemmBox>& box,
                           Copies& copies, int device);

}  // namespace crossdock::python
