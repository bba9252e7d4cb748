#include <torch/csrc/stable/library.h>

#include "common/isa.h"
#include "common/parallel.h"
#include "sparse_features.h"
#include "sparse_features_cpu_kernel.h"

namespace gnnfast {

void Cpu::sparse_features(const SparseFeaturesArgs& args, const Tensor& ref) {
  const DType dtype = dtype_of("features", ref);
  const int64_t rows_of_x = args.op == kValues ? args.a.num_rows : std::max<int64_t>(args.a.num_rows, 1);
  const int64_t stored_per_row = args.stored / std::max<int64_t>(rows_of_x, 1) + 1;
  parallel_rows(args.a.rowptr, args.a.num_rows, std::max(stored_per_row, args.op == kFeatures ? args.width : 0),
                [&](int64_t begin, int64_t end) { GNNFAST_CALL_ISA(sparse_features_rows, args, dtype, begin, end); });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CPU, m) { GNNFAST_IMPL_SPARSE_FEATURES(m, Cpu); }

}  // namespace gnnfast
